"""Declared against found: what is in place, what only a flag allows, what nobody touches. No server."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from oncewire._ground.topology import Consumer, Plan, Step, Stream, Topology
from oncewire._ground.topology.rules import (
    Act,
    Found,
    FoundConsumer,
    FoundStream,
    Need,
    creates,
    permit,
    plan,
    show,
)
from oncewire._ground.topology.text import plan_lines, summary

DAY_NS = 86_400 * 10**9
A = Stream(key="A", name="A", subjects=("a.>",), max_age_ns=7 * DAY_NS, max_bytes=1_000)
C = Consumer(stream_key="A", stream="A", name="c", filters=("a.b",), services=("s",), max_deliver=10)
DECLARED = Topology(streams=(A,), consumers=(C,), contracts=())

STREAM_AS_SERVED: dict[str, Any] = {
    "name": "A",
    "subjects": ["a.>"],
    "retention": "limits",
    "max_consumers": -1,
    "max_msgs": -1,
    "max_bytes": 1_000,
    "max_age": 7 * DAY_NS,
    "max_msgs_per_subject": -1,
    "max_msg_size": -1,
    "discard": "old",
    "storage": "file",
    "num_replicas": 1,
    "duplicate_window": 120 * 10**9,
    "compression": "none",
    "allow_direct": True,
    "mirror_direct": False,
    "sealed": False,
    "deny_delete": False,
    "deny_purge": False,
    "allow_rollup_hdrs": False,
    "consumer_limits": {},
    "allow_msg_ttl": False,
    "allow_atomic": True,
    "allow_batched": True,
    "metadata": {"_nats.level": "5", "_nats.req.level": "4", "_nats.ver": "2.15.1"},
}
"""What nats-server 2.15.1 answers for A, key by key."""

CONSUMER_AS_SERVED: dict[str, Any] = {
    "durable_name": "c",
    "name": "c",
    "deliver_policy": "all",
    "ack_policy": "explicit",
    "ack_wait": 30 * 10**9,
    "max_deliver": 10,
    "filter_subject": "a.b",
    "replay_policy": "instant",
    "max_waiting": 512,
    "max_ack_pending": 1_000,
    "num_replicas": 0,
    "metadata": {"_nats.level": "5", "_nats.req.level": "0", "_nats.ver": "2.15.1"},
}


def served(
    stream: dict[str, Any] | None = None, consumer: dict[str, Any] | None = None, *, delivered: int = 0, **state: Any
) -> Found:
    """The server as declared, but for these keys."""
    durable = FoundConsumer(name="c", config={**CONSUMER_AS_SERVED, **(consumer or {})}, delivered=delivered)
    config = {**STREAM_AS_SERVED, **(stream or {})}
    found = FoundStream(name="A", config=config, created="then", consumers={"c": durable}, **state)
    return Found(streams={"A": found}, api_level=5)


def only(found: Found) -> Step:
    (step,) = plan(DECLARED, found).steps
    return step


def test_what_the_server_adds_is_no_drift() -> None:
    assert plan(DECLARED, served()) == Plan(same=("stream:A", "consumer:A/c"))


def test_an_empty_server_gets_streams_before_their_consumers() -> None:
    steps = plan(DECLARED, Found(api_level=5)).steps
    assert [(step.item, step.act, step.need) for step in steps] == [
        ("stream:A", Act.CREATE, Need.NOTHING),
        ("consumer:A/c", Act.CREATE, Need.NOTHING),
    ]


def test_requests_leave_out_what_is_off_so_that_older_servers_take_them() -> None:
    stream, consumer = (step.config for step in plan(DECLARED, Found(api_level=5)).steps)
    assert "sealed" not in stream
    assert "persist_mode" not in stream
    assert stream["allow_atomic"]
    assert stream["allow_batched"]
    assert consumer["filter_subject"] == "a.b"
    assert "filter_subjects" not in consumer


def test_a_server_too_old_for_atomic_batches_is_told_and_not_asked() -> None:
    found = Found(api_level=1)
    made = plan(DECLARED, found)
    assert "allow_atomic" not in made.steps[0].config
    assert "too old for atomic batches" in made.notes[0]
    assert plan(DECLARED, Found(api_level=2)).steps[0].config["allow_atomic"]
    neither = replace(A, name="B", allow_atomic=False, allow_batched=False)
    assert plan(Topology(streams=(A, neither), contracts=()), found).notes == made.notes
    assert plan(Topology(streams=(neither,), contracts=()), found).notes == ()
    config = {key: value for key, value in STREAM_AS_SERVED.items() if key not in ("allow_atomic", "allow_batched")}
    there = FoundStream(name="A", config=config)
    assert "stream:A" in plan(DECLARED, Found(streams={"A": there}, api_level=1)).same


def test_a_server_too_old_for_fast_ingest_is_told_and_not_asked() -> None:
    made = plan(DECLARED, Found(api_level=3))
    assert "allow_batched" not in made.steps[0].config
    assert ["too old for fast ingest" in note for note in made.notes] == [True]
    assert plan(DECLARED, Found(api_level=4)).notes == ()
    assert plan(DECLARED, Found(api_level=4)).steps[0].config["allow_batched"]
    config = {key: value for key, value in STREAM_AS_SERVED.items() if key != "allow_batched"}
    there = FoundStream(name="A", config=config)
    assert "stream:A" in plan(DECLARED, Found(streams={"A": there}, api_level=3)).same


@pytest.mark.parametrize(
    "drift",
    [
        {"max_age": DAY_NS},
        {"max_bytes": 500},
        {"max_bytes": -1},
        {"max_msgs": 5},
        {"max_msgs_per_subject": 4},
        {"max_msg_size": 100},
        {"max_consumers": 3},
        {"discard": "new"},
        {"duplicate_window": 10**9},
        {"allow_direct": False},
        {"allow_atomic": False},
        {"allow_batched": False},
        {"no_ack": True},
        {"subjects": ["a.>", "b.>"]},
        {"subjects": ["b.>"]},
        {"allow_rollup_hdrs": True},
        {"compression": "s2"},
        {"sources": [{"name": "Z"}]},
        {"republish": {"src": ">", "dest": "r.>"}},
        {"subject_transform": {"src": "a.>", "dest": "x.>"}},
        {"description": "by hand"},
        {"retention": "interest"},
        {"consumer_limits": {"max_ack_pending": 5}},
    ],
)
def test_streams_are_changed_in_place_where_the_server_can(drift: dict[str, Any]) -> None:
    step = only(served(drift))
    assert (step.act, step.need) == (Act.UPDATE, Need.NOTHING)
    assert [change.key for change in step.changes] == list(drift)


@pytest.mark.parametrize(
    "drift",
    [
        {"storage": "memory"},
        {"retention": "workqueue"},
        {"mirror": {"name": "Z"}},
        {"deny_delete": True},
        {"deny_purge": True},
        {"sealed": True},
        {"allow_msg_ttl": True},
        {"allow_msg_schedules": True},
        {"allow_msg_counter": True},
        {"persist_mode": "async"},
    ],
)
def test_what_a_stream_cannot_change_needs_to_be_recreated_and_says_the_loss(drift: dict[str, Any]) -> None:
    step = only(served(drift, messages=12, bytes=2_048))
    assert (step.act, step.need) == (Act.RECREATE, Need.RECREATE)
    assert step.flag == "--recreate stream:A"
    assert step.cost == "deletes 12 messages (2 KiB) and the positions of c"


def test_what_can_only_be_turned_on_is_turned_on_in_place() -> None:
    declared = replace(DECLARED, streams=(replace(A, deny_delete=True, deny_purge=True),))
    (step,) = plan(declared, served()).steps
    assert (step.act, step.need) == (Act.UPDATE, Need.NOTHING)


@pytest.mark.parametrize(
    ("drift", "state"),
    [
        ({"max_bytes": 5_000}, {"messages": 1, "bytes": 1_001}),
        ({"max_bytes": -1}, {"messages": 1, "bytes": 1_001}),
        ({"max_age": 0}, {"messages": 1, "oldest_ns": 8 * DAY_NS}),
        ({"max_age": 30 * DAY_NS}, {"messages": 1, "oldest_ns": 8 * DAY_NS}),
    ],
)
def test_a_lower_limit_that_drops_messages_needs_to_be_accepted(drift: dict[str, Any], state: dict[str, Any]) -> None:
    step = only(served(drift, **state))
    assert (step.act, step.need, step.flag) == (Act.UPDATE, Need.ACCEPT, "--accept stream:A")
    assert step.cost.startswith("drops messages beyond")


def test_a_lower_limit_that_drops_nothing_is_changed_in_place() -> None:
    assert only(served({"max_bytes": 5_000}, messages=9, bytes=1_000)).need is Need.NOTHING
    assert only(served({"max_age": 0}, messages=9, oldest_ns=7 * DAY_NS)).need is Need.NOTHING


@pytest.mark.parametrize(("key", "limit"), [("max_msgs", 3), ("max_msgs_per_subject", 3)])
def test_fewer_messages_need_to_be_accepted_when_more_are_there(key: str, limit: int) -> None:
    declared = replace(DECLARED, streams=(replace(A, **{key: limit}),))
    assert plan(declared, served(messages=4)).steps[0].need is Need.ACCEPT
    assert plan(declared, served(messages=3)).steps[0].need is Need.NOTHING


def test_a_higher_limit_drops_nothing_whatever_is_there() -> None:
    declared = replace(DECLARED, streams=(replace(A, max_msgs_per_subject=10, max_age_ns=0, max_bytes=-1),))
    found = served({"max_msgs_per_subject": 5}, messages=1_000, bytes=900, oldest_ns=6 * DAY_NS)
    assert plan(declared, found).steps[0].need is Need.NOTHING


def test_dropping_what_is_acknowledged_needs_to_be_accepted() -> None:
    declared = replace(DECLARED, streams=(replace(A, retention="interest"),))
    assert plan(declared, served(messages=1)).steps[0].need is Need.ACCEPT
    assert plan(declared, served()).steps[0].need is Need.NOTHING
    assert only(served({"retention": "interest"}, messages=1)).need is Need.NOTHING


def test_fewer_copies_need_to_be_accepted_and_more_do_not() -> None:
    """`apply` without --env prod must not take the copies of a production stream away."""
    step = only(served({"num_replicas": 3}))
    assert (step.need, step.cost) == (Need.ACCEPT, "keeps 1 of 3 copies")
    declared = replace(DECLARED, streams=(replace(A, replicas=3),))
    assert plan(declared, served()).steps[0].need is Need.NOTHING


@pytest.mark.parametrize(
    "drift",
    [
        {"ack_wait": 10**9},
        {"max_deliver": 3},
        {"max_deliver": -1},
        {"max_ack_pending": 7},
        {"headers_only": True},
        {"backoff": [10**9]},
        {"inactive_threshold": 10**9},
        {"max_batch": 3},
        {"sample_freq": "100"},
        {"description": "by hand"},
        {"num_replicas": 1},
        {"priority_policy": "overflow", "priority_groups": ["x"]},
    ],
)
def test_durables_are_changed_in_place_where_the_server_can(drift: dict[str, Any]) -> None:
    step = only(served(consumer=drift, delivered=9))
    assert (step.act, step.need) == (Act.UPDATE, Need.NOTHING)
    assert {change.key for change in step.changes} == set(drift)


@pytest.mark.parametrize(
    "drift",
    [
        {"ack_policy": "none"},
        {"deliver_policy": "new"},
        {"deliver_policy": "by_start_sequence", "opt_start_seq": 4},
        {"replay_policy": "original"},
        {"max_waiting": 5},
        {"mem_storage": True},
        {"deliver_subject": "push.here"},
    ],
)
def test_what_a_durable_cannot_change_needs_to_be_recreated_and_says_the_position(drift: dict[str, Any]) -> None:
    step = only(served(consumer=drift, delivered=1_234))
    assert (step.act, step.flag) == (Act.RECREATE, "--recreate consumer:A/c")
    assert "loses its position (sequence 1,234)" in step.cost


@pytest.mark.parametrize("was", [["a.>"], ["a.b", "a.c"], ["a.*"], []])
def test_a_narrower_filter_is_changed_in_place(was: list[str]) -> None:
    """All that the durable will get it was getting before: its position is right."""
    step = only(served(consumer={"filter_subject": "", "filter_subjects": was}, delivered=9))
    assert (step.act, step.need) == (Act.UPDATE, Need.NOTHING)


@pytest.mark.parametrize("was", [["a.c"], ["a.b.>"]])
def test_a_moved_filter_would_skip_messages_and_needs_a_flag(was: list[str]) -> None:
    drift = {"filter_subject": "", "filter_subjects": was}
    step = only(served(consumer=drift, delivered=9))
    assert (step.act, step.flag) == (Act.UPDATE, "--accept consumer:A/c")
    assert only(served(consumer=drift)).need is Need.NOTHING


@pytest.mark.parametrize("filters", [(), ("a.b", "a.x")])
def test_a_filter_that_is_wider_in_part_needs_a_flag(filters: tuple[str, ...]) -> None:
    declared = replace(DECLARED, consumers=(replace(C, filters=filters),))
    (step,) = plan(declared, served(delivered=9)).steps
    assert step.need is Need.ACCEPT


def test_several_filters_replace_a_single_one_in_the_request() -> None:
    declared = replace(DECLARED, consumers=(replace(C, filters=("a.b", "a.x")),))
    config = plan(declared, served()).steps[0].config
    assert config["filter_subjects"] == ("a.b", "a.x")
    assert "filter_subject" not in config


def test_what_is_healed_by_leaving_it_out_is_left_out() -> None:
    drift = {"republish": {"src": ">", "dest": "r.>"}, "no_ack": True, "sources": [{"name": "Z"}]}
    assert not drift.keys() & only(served(drift)).config.keys()


def test_a_mirror_is_shown_without_subjects() -> None:
    copy = replace(A, subjects=(), mirror="B")
    config = {**STREAM_AS_SERVED, "subjects": None, "mirror": {"name": "B"}}
    config |= {"allow_atomic": False, "allow_batched": False}
    found = Found(streams={"A": FoundStream(name="A", config=config)}, api_level=5)
    assert plan(Topology(streams=(copy,), contracts=()), found).steps == ()


def test_the_order_of_subjects_and_filters_is_no_drift() -> None:
    declared = Topology(
        streams=(replace(A, subjects=("a.>", "b.>")),), consumers=(replace(C, filters=("a.b", "b.c")),), contracts=()
    )
    found = served({"subjects": ["b.>", "a.>"]}, {"filter_subject": "", "filter_subjects": ["b.c", "a.b"]})
    assert plan(declared, found).steps == ()


@pytest.mark.parametrize(
    "operators", [{"placement": {"cluster": "x"}}, {"metadata": {"team": "blue"}}, {"first_seq": 100}]
)
def test_what_belongs_to_operators_is_no_drift_and_survives_a_change(operators: dict[str, Any]) -> None:
    assert plan(DECLARED, served(operators)).steps == ()
    assert plan(DECLARED, served(operators)).notes == ()
    assert only(served({**operators, "max_age": 1})).config.items() >= operators.items()


def test_a_paused_consumer_is_no_drift() -> None:
    assert plan(DECLARED, served(consumer={"pause_until": "2030-01-01T00:00:00Z"})).steps == ()


def test_a_key_of_a_newer_server_is_noted_and_survives_a_change() -> None:
    found = served({"quantum": {"spin": 1}})
    assert plan(DECLARED, found).steps == ()
    assert plan(DECLARED, found).notes == (
        "stream:A has quantum = {'spin': 1}, a key that this version does not judge",
    )
    assert only(served({"quantum": {"spin": 1}, "max_age": 1})).config["quantum"] == {"spin": 1}
    assert plan(DECLARED, served({"quantum": False})).notes == ()
    assert "consumer:A/c has quantum = 7" in plan(DECLARED, served(consumer={"quantum": 7})).notes[0]
    assert only(served(consumer={"quantum": 7, "ack_wait": 1})).config["quantum"] == 7


def test_metadata_of_the_server_is_not_sent_back() -> None:
    assert only(served({"max_age": 1})).config["metadata"] == {}


def test_what_nobody_declared_is_listed_and_never_touched() -> None:
    there = served().streams["A"]
    extra = {name: FoundConsumer(name=name, config={}) for name in ("shop_consumer", "ow-reader-1")}
    found = Found(
        streams={"A": replace(there, consumers={**there.consumers, **extra})}, others={"THEIRS": ("t.>",)}, api_level=5
    )
    made = plan(DECLARED, found)
    assert made.steps == ()
    assert made.extras == ("consumer:A/shop_consumer", "stream:THEIRS")


def test_a_services_part_does_not_list_other_services_as_undeclared() -> None:
    part = replace(DECLARED, streams=(), consumers=())
    assert plan(part, replace(served(), others={"A": ("a.>",)}), DECLARED).extras == ()


def test_a_stream_of_others_that_holds_our_subjects_makes_it_impossible() -> None:
    found = Found(others={"THEIRS": ("a.x",)}, api_level=5)
    step = plan(replace(DECLARED, consumers=()), found).steps[0]
    assert (step.need, step.flag) == (Need.IMPOSSIBLE, "")
    assert "THEIRS captures a.x" in step.cost
    assert permit([step], recreate=frozenset({"stream:A"}), accept=frozenset({"stream:A"})).todo == ()


def test_one_shared_subject_of_several_is_enough_to_block() -> None:
    declared = replace(DECLARED, streams=(replace(A, subjects=("x.>", "a.>")),), consumers=())
    step = plan(declared, Found(others={"FREE": ("f.>",), "THEIRS": ("t.>", "a.x")}, api_level=5)).steps[0]
    assert step.need is Need.IMPOSSIBLE
    assert creates([step]).todo == ()


def test_a_stream_gives_subjects_up_before_another_takes_them() -> None:
    b = Stream(key="B", name="B", subjects=("b.>",))
    declared = replace(DECLARED, streams=(b, A))
    steps = plan(declared, served({"subjects": ["a.>", "b.>"]})).steps
    assert [step.item for step in steps] == ["stream:A", "stream:B"]
    widened = replace(DECLARED, streams=(replace(A, subjects=("a.>", "c.>")), b))
    there = {"A": served().streams["A"], "B": FoundStream(name="B", config={"subjects": ["b.>", "c.>"]})}
    steps = plan(widened, Found(streams=there, api_level=5)).steps
    assert [step.item for step in steps] == ["stream:B", "stream:A"]


def test_flags_allow_only_what_they_name() -> None:
    lossy = only(served({"storage": "memory"}))
    assert permit([lossy]).refused == (lossy,)
    assert permit([lossy], accept=frozenset({"stream:A"})).refused == (lossy,)
    assert permit([lossy], recreate=frozenset({"stream:B"})).refused == (lossy,)
    assert permit([lossy], recreate=frozenset({"stream:A"})).todo == (lossy,)


def test_a_stream_that_can_be_changed_is_never_recreated() -> None:
    step = only(served({"max_bytes": -1}, messages=1, bytes=5_000))
    assert permit([step], recreate=frozenset({"stream:A"})).refused == (step,)
    assert permit([step], accept=frozenset({"stream:A"})).todo == (step,)


def test_a_durable_with_a_moved_filter_may_keep_its_position_or_start_over() -> None:
    step = only(served(consumer={"filter_subject": "a.c"}, delivered=9))
    assert permit([step], accept=frozenset({step.item})).todo == (step,)
    assert permit([step], recreate=frozenset({step.item})).todo == (replace(step, act=Act.RECREATE),)


def test_a_durable_that_can_be_changed_keeps_its_position_whatever_the_flag() -> None:
    step = only(served(consumer={"max_deliver": 3}, delivered=9))
    assert permit([step], recreate=frozenset({step.item})).todo == (step,)
    assert step.act is Act.UPDATE


def test_a_service_creates_and_changes_nothing() -> None:
    steps = [*plan(DECLARED, Found(api_level=5)).steps, only(served({"max_age": 1}))]
    allowed = creates(steps)
    assert [step.act for step in allowed.todo] == [Act.CREATE, Act.CREATE]
    assert [step.act for step in allowed.refused] == [Act.UPDATE]


def test_a_plan_reads_like_a_diff() -> None:
    made = plan(DECLARED, served({"max_age": DAY_NS}, {"ack_policy": "none"}, delivered=7))
    assert [(line.sign, line.name, line.text) for line in plan_lines(made)] == [
        ("~", "stream    A", "max_age  1d → 7d"),
        ("!", "consumer  A/c", "ack_policy  none → explicit"),
        ("", "", "only with --recreate consumer:A/c"),
        ("", "", "loses its position (sequence 7): it starts again at the first message"),
    ]
    assert summary(made) == "1 to change, 1 only with a flag; 0 as declared"
    assert summary(plan(DECLARED, served())) == "nothing to do: 2 as declared"


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("max_age", 7 * DAY_NS, "7d"),
        ("duplicate_window", 120 * 10**9, "2m"),
        ("ack_wait", 30 * 10**9, "30s"),
        ("inactive_threshold", 0, "forever"),
        ("max_bytes", 67_108_864, "64 MiB"),
        ("max_msg_size", -1, "unlimited"),
        ("max_msgs", 10_000, "10,000"),
        ("max_msgs_per_subject", -1, "unlimited"),
        ("max_deliver", 0, "0"),
        ("max_ack_pending", 1_000, "1,000"),
        ("subjects", ("a", "b"), "a, b"),
        ("filter_subjects", (), "all"),
        ("sources", [{"name": "Z"}], "[{'name': 'Z'}]"),
        ("no_ack", True, "yes"),
        ("no_ack", False, "no"),
        ("mirror", None, "none"),
        ("description", "", "none"),
        ("storage", "file", "file"),
    ],
)
def test_values_are_shown_as_people_write_them(key: str, value: Any, text: str) -> None:
    assert show(key, value) == text
