"""Subjects: grammar, matching against a brute-force model, builders, mapping, the catalog."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncewire._ground.contracts import catalog, subjects
from oncewire._ground.errors import ContractViolation

VECTORS = json.loads((Path(__file__).parent.parent / "vectors" / "subjects.json").read_text())

WORLD = [".".join(tokens) for size in (1, 2, 3, 4) for tokens in itertools.product("abc", repeat=size)]
"""Every subject of up to four tokens; `c` stands in no filter, as the token that nobody thought of."""

FILTERS = [
    ".".join(tokens)
    for size in (1, 2, 3)
    for tokens in itertools.product("ab*>", repeat=size)
    if ">" not in tokens[:-1]
]


def model(pattern: str) -> frozenset[str]:
    """The subjects of WORLD that pass a filter, found by the definition."""
    found = {""}
    wanted = pattern.split(".")
    for at, want in enumerate(wanted):
        if want == ">":
            return frozenset(one for one in WORLD if any(_begins(one, head) for head in found) and one.count(".") >= at)
        tokens = "abc" if want == "*" else want
        found = {f"{head}.{token}".lstrip(".") for head in found for token in tokens}
    return frozenset(found)


def _begins(subject: str, head: str) -> bool:
    return head == "" or subject.startswith(f"{head}.")


PASSES = {pattern: model(pattern) for pattern in FILTERS}


def test_a_subject_passes_a_filter_as_the_definition_says() -> None:
    for pattern in FILTERS:
        assert PASSES[pattern] == {subject for subject in WORLD if subjects.matches(subject, pattern)}, pattern


def test_overlap_and_cover_agree_with_the_sets_of_subjects() -> None:
    for a, b in itertools.product(FILTERS, repeat=2):
        assert subjects.overlaps(a, b) == bool(PASSES[a] & PASSES[b]), (a, b)
        assert subjects.covers(a, b) == (PASSES[b] <= PASSES[a]), (a, b)


@pytest.mark.parametrize("vector", VECTORS["matches"], ids=str)
def test_the_committed_matches_hold(vector: dict[str, object]) -> None:
    assert subjects.matches(str(vector["subject"]), str(vector["filter"])) is vector["matches"]


@pytest.mark.parametrize("vector", VECTORS["event_types"], ids=lambda one: one["message_type"])
def test_an_event_type_maps_by_its_leading_word(vector: dict[str, str]) -> None:
    assert catalog.sr_event(vector["message_type"]) == vector["subject"]


def test_commands_are_built_as_the_spec_names_them() -> None:
    assert [subject for subject, _ in catalog.SR_COMMANDS] == VECTORS["commands"]
    assert subjects.sr_command("iteration", "start") == "sr.commands.iteration.start"
    assert subjects.sr_query("loop") == "sr.queries.loop"


@pytest.mark.parametrize("vector", VECTORS["dlq"], ids=lambda one: one["subject"])
def test_a_dead_letter_goes_under_the_messages_own_subject(vector: dict[str, str]) -> None:
    assert subjects.dlq_subject(vector["subject"]) == vector["dlq_subject"]


def test_a_dead_letter_is_never_dead_lettered_again() -> None:
    with pytest.raises(ContractViolation, match="never dead-lettered again"):
        subjects.dlq_subject("dlq.billing.usage.metered")


BAD_TOKENS = ["", "a.b", "*", ">", "a*", "a b", "a\tb", "a\r\nPUB x", "\x00", "\x7f", "ü", "a/b", "a\\b", "x" * 129]


@pytest.mark.parametrize("value", BAD_TOKENS)
def test_a_value_that_could_leave_its_place_is_refused(value: str) -> None:
    for build in (
        lambda: subjects.evt(value, "demo", "x"),
        lambda: subjects.evt("default", value, "x"),
        lambda: subjects.evt("default", "demo", value),
        lambda: subjects.cmd("default", "demo", value, "x"),
        lambda: subjects.chat_events(value),
        lambda: subjects.ledger("agent", value),
        lambda: subjects.dlq_request(value),
    ):
        with pytest.raises(ContractViolation):
            build()


@given(st.text(max_size=20), st.text(max_size=20), st.text(max_size=20))
def test_what_is_built_parses_back_to_its_parts(tenant: str, workspace: str, name: str) -> None:
    try:
        subject = subjects.evt(tenant, workspace, name)
    except ContractViolation:
        return
    assert subjects.parse(subject) == subjects.Address("evt", tenant, workspace, (name,))
    assert subjects.check_subject(subject) == subject


@given(st.from_regex(r"\A[A-Za-z0-9_:-]{1,128}\Z"))
def test_ordinary_names_are_tokens(name: str) -> None:
    assert subjects.token(name) == name


def test_the_builders_give_the_subjects_of_the_specs() -> None:
    assert subjects.evt("default", "demo", "order", "placed") == "evt.default.demo.order.placed"
    assert subjects.cmd("default", "demo", "shop", "tick") == "cmd.default.demo.shop.tick"
    assert subjects.chat_events("c1") == "chat.events.c1"
    assert subjects.chat_tokens("c1", prefix="talk.tokens") == "talk.tokens.c1"
    assert subjects.chat_presence("c1") == "chat.presence.c1"
    assert subjects.ledger("shop", "L1") == "ledger.shop.L1"


def test_a_name_is_required_and_too_many_tokens_are_refused() -> None:
    with pytest.raises(ContractViolation, match="name is empty"):
        subjects.evt("default", "demo")
    with pytest.raises(ContractViolation, match="32 tokens"):
        subjects.evt("default", "demo", *["x"] * 30)
    with pytest.raises(ContractViolation, match="1024 bytes"):
        subjects.evt("default", "demo", *["x" * 128] * 8)


@pytest.mark.parametrize(
    "subject", ["evt", "evt.t", "evt.t.w", "evt.t.w.", "evt..w.x", "sr.events.loop.x", "", "evtx.t.w.x"]
)
def test_a_runtime_subject_without_an_owner_is_refused(subject: str) -> None:
    with pytest.raises(ContractViolation, match="no tenant and workspace"):
        subjects.parse(subject)


@pytest.mark.parametrize("subject", ["", ".", "a..b", ".a", "a.", "a b", "a\n", "a.\x00", "a.*", ">", "x" * 1025])
def test_a_subject_that_cannot_be_published_to_is_refused(subject: str) -> None:
    with pytest.raises(ContractViolation):
        subjects.check_subject(subject)


@pytest.mark.parametrize("pattern", [">", "*", "a.*.>", "a.b", "é.>", "$JS.EVENT.>"])
def test_wildcards_are_for_filters(pattern: str) -> None:
    assert subjects.check_filter(pattern) == pattern


def test_a_filter_ends_with_its_tail_wildcard() -> None:
    with pytest.raises(ContractViolation, match="before its end"):
        subjects.check_filter("a.>.b")


def test_the_catalog_is_valid_and_knows_every_builder() -> None:
    for entry in catalog.CATALOG:
        subjects.check_filter(entry.pattern)
    families = {
        subjects.evt("t", "w", "x"): catalog.Family.RUNTIME,
        subjects.cmd("t", "w", "a", "x"): catalog.Family.RUNTIME,
        catalog.sr_event("Anything"): catalog.Family.MESSAGE,
        subjects.sr_command("iteration", "start"): catalog.Family.MESSAGE,
        subjects.sr_query("x"): catalog.Family.MESSAGE,
        "platform.billing.usage.metered": catalog.Family.MESSAGE,
        subjects.chat_events("c"): catalog.Family.REALTIME,
        subjects.chat_tokens("c"): catalog.Family.REALTIME,
        subjects.chat_presence("c"): catalog.Family.REALTIME,
        subjects.ledger("a", "l"): catalog.Family.BLOCK,
        subjects.dlq_request("a"): catalog.Family.LETTER,
        "dlq.sr.events.loop": catalog.Family.LETTER,
        "nobody.knows": None,
    }
    assert families == {subject: catalog.family(subject) for subject in families}


def test_no_subject_carries_two_envelopes() -> None:
    for one, other in itertools.combinations(catalog.CATALOG, 2):
        if one.family is not other.family:
            assert not subjects.overlaps(one.pattern, other.pattern), (one, other)


@pytest.mark.parametrize("subject", ["evt.a\udcff.b", "evt.a.\ud800"])
def test_a_subject_that_is_no_utf_8_is_refused(subject: str) -> None:
    """It could be neither kept in a ledger nor named in a header."""
    with pytest.raises(ContractViolation, match="is not valid UTF-8"):
        subjects.check_filter(subject)
