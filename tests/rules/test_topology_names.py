"""Names of agents' durables."""

from __future__ import annotations

import pytest

from oncewire.errors import ContractViolation
from oncewire.topology import durable_name, sr_durable_name


def test_an_agent_of_the_default_tenant_is_named_alone() -> None:
    assert durable_name("shop") == "shop_consumer"


def test_elsewhere_tenant_and_workspace_stand_in_front() -> None:
    assert durable_name("shop", "acme", "eu") == "acme_eu_shop_consumer"
    assert durable_name("shop", "default", "eu") == "default_eu_shop_consumer"
    assert durable_name("shop", "acme", "default") == "acme_default_shop_consumer"


def test_on_sr_streams_the_prefix_of_the_settings_stands_in_front() -> None:
    assert sr_durable_name("sr-consumer", "shop") == "sr-consumer-shop"


@pytest.mark.parametrize("agent", ["", "a.b", "a b", "a*", ">", "a/b", "ä", "x" * 129, "ow-reader-x"])
def test_what_cannot_be_part_of_a_name_is_refused(agent: str) -> None:
    with pytest.raises(ContractViolation):
        durable_name(agent)


def test_a_name_that_the_server_would_not_take_is_refused() -> None:
    with pytest.raises(ContractViolation, match="longer than 255"):
        durable_name("a" * 100, "t" * 100, "w" * 100)
