"""Names of agents' durables."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from oncewire._ground.errors import ContractViolation
from oncewire._ground.topology import durable_name, sr_durable_name


def test_an_agent_of_the_default_tenant_is_named_alone() -> None:
    assert durable_name("shop") == "shop_consumer"


def test_elsewhere_tenant_and_workspace_stand_in_front() -> None:
    assert durable_name("shop", "acme", "eu") == "acme_eu_shop_consumer"
    assert durable_name("shop", "default", "eu") == "default_eu_shop_consumer"
    assert durable_name("shop", "acme", "default") == "acme_default_shop_consumer"


def test_on_sr_streams_the_prefix_of_the_settings_stands_in_front() -> None:
    assert sr_durable_name("sr-consumer", "shop") == "sr-consumer-shop"
    assert sr_durable_name("sr-consumer", "shop-front") == "sr-consumer-shop-front"
    assert sr_durable_name("sr-consumer", "shop-front", "acme", "eu") == "sr-consumer-acme-eu-shop-front"
    assert sr_durable_name("sr-consumer", "shop", "default", "eu") == "sr-consumer-default-eu-shop"


PART = st.text("ab-_=2D", min_size=1, max_size=4) | st.just("default")
NAMES = st.lists(st.tuples(PART, PART, PART), min_size=2, max_size=2, unique=True)


@given(NAMES)
@example([("c", "a-b", "d"), ("c", "a", "b-d")])
@example([("d", "a-b", "c"), ("c-d", "a", "b")])
@example([("shop", "acme", "eu"), ("acme-eu-shop", "default", "default")])
@example([("b", "a-", "c"), ("b", "a", "-c")])
@example([("b", "a-", "c"), ("b", "a=2D", "c")])
def test_no_two_agents_share_a_name_on_sr_streams(owners: list[tuple[str, str, str]]) -> None:
    one, other = owners
    assert sr_durable_name("p", *one) != sr_durable_name("p", *other)


@given(NAMES)
@example([("c", "a_b", "d"), ("c", "a", "b_d")])
@example([("d", "a_b", "c"), ("c_d", "a", "b")])
def test_elsewhere_only_an_agent_of_the_default_tenant_can_be_named_like_another(
    owners: list[tuple[str, str, str]],
) -> None:
    """The runtime's contract fixes that name. Ownership refuses the second one (test_agent_durable)."""
    one, other = owners
    if ("default", "default") not in (one[1:], other[1:]):
        assert durable_name(*one) != durable_name(*other)


@pytest.mark.parametrize("agent", ["", "a.b", "a b", "a*", ">", "a/b", "ä", "x" * 129, "ow-reader-x"])
def test_what_cannot_be_part_of_a_name_is_refused(agent: str) -> None:
    with pytest.raises(ContractViolation):
        durable_name(agent)


def test_a_name_that_the_server_would_not_take_is_refused() -> None:
    with pytest.raises(ContractViolation, match="longer than 255"):
        durable_name("a" * 100, "t" * 100, "w" * 100)
