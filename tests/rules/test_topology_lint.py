"""What lint proves, one test per sentence. Mistakes with their places are in test_topology_files.py."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from oncewire._ground.contracts.catalog import CATALOG, Entry, Family
from oncewire._ground.settings import Settings
from oncewire._ground.topology import Consumer, Finding, Service, Severity, Stream, Topology, load
from oncewire._ground.topology.findings import errors
from oncewire._ground.topology.lint import lint

WORKER = Service(name="worker")


def topology(
    *things: Stream | Consumer | Service, contracts: tuple[Entry, ...] = (), released: tuple[str, ...] = ()
) -> Topology:
    return Topology(
        streams=tuple(one for one in things if isinstance(one, Stream)),
        consumers=tuple(one for one in things if isinstance(one, Consumer)),
        services=(WORKER, *(one for one in things if isinstance(one, Service))),
        contracts=contracts,
        released_consumers=tuple(one for one in released if "/" in one),
        released_streams=tuple(one for one in released if "/" not in one),
    )


def stream(name: str, *subjects: str, **options: object) -> Stream:
    return Stream(key=name, name=name, subjects=subjects, **options)  # type: ignore[arg-type]


def consumer(name: str, *filters: str, of: str = "A", **options: object) -> Consumer:
    facts: dict[str, object] = {"services": ("worker",), "max_deliver": -1, **options}
    return Consumer(stream_key=of, stream=of, name=name, filters=filters, **facts)  # type: ignore[arg-type]


def codes(*things: Stream | Consumer | Service, **more: tuple[Entry, ...]) -> list[str]:
    return [finding.code for finding in errors(lint(topology(*things, **more)))]  # type: ignore[arg-type]


def warnings(*things: Stream | Consumer | Service) -> list[Finding]:
    return [finding for finding in lint(topology(*things)) if finding.severity is Severity.WARNING]


def named(pattern: str) -> tuple[Entry, ...]:
    return (Entry(pattern, Family.MESSAGE, ""),)


def test_a_subject_of_the_contracts_that_one_stream_captures_is_fine() -> None:
    assert codes(stream("A", "a.>"), contracts=named("a.b")) == []
    assert codes(stream("A", "a.>"), contracts=named("a.>")) == []


def test_a_subject_of_the_contracts_that_no_stream_captures_is_an_error() -> None:
    assert codes(stream("A", "a.>"), contracts=named("b.c")) == ["not-captured"]


def test_a_star_does_not_capture_two_tokens() -> None:
    """`sr.commands.*` would lose `sr.commands.iteration.start`."""
    assert codes(stream("A", "sr.commands.*"), contracts=named("sr.commands.iteration.start")) == ["not-captured"]


def test_a_subject_that_is_captured_only_in_parts_is_an_error() -> None:
    assert codes(stream("A", "a.b"), contracts=named("a.>")) == ["not-captured"]
    assert codes(stream("A", "a.b"), stream("B", "a.c"), contracts=named("a.*")) == ["not-captured"]


def test_a_subject_that_two_streams_capture_is_one_error() -> None:
    assert codes(stream("A", "a.>"), stream("B", "a.b"), contracts=named("a.b")) == ["captured-twice"]
    assert codes(stream("A", "a.>"), stream("B", "*.b")) == ["captured-twice", "reserved-subject"]


@pytest.mark.parametrize("entry", CATALOG, ids=lambda entry: entry.pattern)
def test_without_its_stream_a_subject_of_the_contracts_is_missed(entry: Entry) -> None:
    """Every stream that a contract needs is proved to be needed."""
    whole = load((), Settings())
    rest = replace(whole, streams=tuple(one for one in whole.streams if not one.captures(entry.pattern)))
    assert any(entry.pattern in finding.message for finding in lint(rest) if finding.code == "not-captured")


def test_filters_lie_inside_their_stream() -> None:
    assert codes(stream("A", "a.>"), consumer("c", "a.b.*")) == []
    assert codes(stream("A", "a.*"), consumer("c", "a.>")) == ["filter-outside"]
    assert codes(stream("A", "a.>"), consumer("c", "b")) == ["filter-outside"]


def test_filters_of_one_consumer_do_not_overlap() -> None:
    assert codes(stream("A", "a.>"), consumer("c", "a.b", "a.*")) == ["filters-overlap"]


@pytest.mark.parametrize("queue", [{"retention": "workqueue"}, {"one_reader": True}])
def test_where_each_message_is_for_one_filters_of_two_do_not_overlap(queue: dict[str, object]) -> None:
    both = consumer("c", "a.b"), consumer("d", "a.*")
    assert codes(stream("A", "a.>", **queue), *both) == ["filters-overlap"]
    assert codes(stream("A", "a.>"), *both) == []
    assert codes(stream("A", "a.>", **queue), consumer("c", "a.b"), consumer("d", "a.c")) == []


def test_commands_stay_for_one_worker_each_when_their_stream_keeps_them() -> None:
    commands = load((), Settings()).stream("MESHFORGE_COMMANDS")
    assert commands is not None
    assert replace(commands, retention="limits").has_one_reader


@pytest.mark.parametrize("copy", [{"mirror": "Q"}, {"sources": ("Q",)}])
def test_nothing_mirrors_or_sources_a_work_queue(copy: dict[str, object]) -> None:
    assert codes(stream("Q", "q.>", retention="workqueue"), stream("A", **copy)) == ["copies-work-queue"]
    assert codes(stream("Q", "q.>"), stream("A", **copy)) == []
    assert codes(stream("A", **copy)) == ["unknown-stream"]


def test_a_work_queue_copies_nothing() -> None:
    queue = stream("A", sources=("Q",), retention="workqueue")
    assert codes(stream("Q", "q.>"), queue) == ["copies-into-work-queue"]


def test_a_work_queue_is_read_from_the_start() -> None:
    queue = stream("A", "a.>", retention="workqueue")
    assert codes(queue, consumer("c", "a.b", deliver_policy="new")) == ["work-queue-policy"]


def test_durables_are_pulled_and_acknowledged_explicitly() -> None:
    assert codes(stream("A", "a.>"), consumer("c", "a.b", deliver_subject="x")) == ["not-pull"]
    assert codes(stream("A", "a.>"), consumer("c", "a.b", ack_policy="all")) == ["not-explicit"]
    assert codes(stream("A", "a.>"), consumer("c", "a.b", ack_policy="none")) == ["not-explicit"]


@pytest.mark.parametrize("name", ["a.b", "a b", "a*", "a>", "a/b", "a\\b", "", "ä", "x" * 129, "a\n"])
def test_names_are_legal(name: str) -> None:
    assert codes(stream(name, "a.>")) == ["illegal-name"]
    assert codes(stream("A", "a.>"), consumer(name, "a.b")) == ["illegal-name"]


def test_names_of_readers_without_a_position_are_theirs() -> None:
    assert codes(stream("A", "a.>"), consumer("ow-reader-x", "a.b")) == ["reserved-name"]


def test_names_are_stable() -> None:
    declared = stream("A", "a.>"), consumer("c", "a.b")
    assert errors(lint(topology(*declared, released=("A", "A/c")))) == []
    gone = errors(lint(topology(*declared, released=("B", "A/d"))))
    assert [finding.code for finding in gone] == ["name-not-stable"] * 2


def test_the_released_names_hold_all_shipped_streams_and_consumers() -> None:
    whole = load((), Settings())
    assert set(whole.released_streams) == {one.key for one in whole.streams}
    assert set(whole.released_consumers) == {f"{one.stream_key}/{one.name}" for one in whole.consumers}


def test_two_streams_cannot_have_one_name() -> None:
    assert codes(stream("A", "a.>"), replace(stream("B", "b.>"), name="A")) == ["same-name"]


@pytest.mark.parametrize("word", ["publishes", "asks", "makes_streams"])
@pytest.mark.parametrize("subject", ["dlq.>", "dlq.x", "*.x", ">"])
def test_only_the_dead_letter_service_writes_dead_letters(subject: str, word: str) -> None:
    assert "writes-dead-letters" in codes(Service(name="rogue", **{word: (subject,)}))
    assert "writes-dead-letters" not in codes(Service(name="dlq", **{word: (subject,)}))


@pytest.mark.parametrize("word", ["publishes", "asks", "makes_streams", "answers"])
@pytest.mark.parametrize(
    "subject",
    [">", "*.x", "*", "$JS.API.>", "$JS.API.STREAM.DELETE.A", "$SYS.REQ", "$KV.>", "$KV.*.x", "$KV", "_INBOX_a.>"],
)
def test_no_word_of_a_service_reaches_the_servers_own_subjects_or_inboxes(subject: str, word: str) -> None:
    assert "reserved-subject" in codes(Service(name="rogue", **{word: (subject,)}))


@pytest.mark.parametrize("subject", ["$KV.prices.>", "$SRV.PING", "a.*", "inbox.x"])
def test_a_bucket_by_its_name_and_subjects_of_ones_own_are_nobodys_else(subject: str) -> None:
    assert codes(Service(name="fine", publishes=(subject,), answers=(subject,))) == []


def test_a_window_is_not_longer_than_the_age() -> None:
    assert codes(stream("A", "a.>", max_age_ns=9, duplicate_window_ns=10)) == ["window-over-age"]
    assert codes(stream("A", "a.>", max_age_ns=10, duplicate_window_ns=10)) == []
    assert codes(stream("A", "a.>", max_age_ns=0, duplicate_window_ns=10)) == []


def test_queries_are_answered_by_responders_and_everything_else_is_confirmed() -> None:
    assert codes(stream("A", "sr.queries.>")) == ["queries-need-no-ack"]
    assert codes(stream("A", "sr.queries.>", no_ack=True)) == []
    assert codes(stream("A", "a.>", no_ack=True)) == ["no-ack-loses"]


@pytest.mark.parametrize("subject", ["$JS.API.>", "$SYS.>", ">", "*.x", "_INBOX.>"])
def test_the_servers_own_subjects_are_not_captured(subject: str) -> None:
    assert "reserved-subject" in codes(stream("A", subject))


def test_a_mirror_has_no_subjects() -> None:
    assert codes(stream("B", "b.>"), stream("A", "a.>", mirror="B")) == ["mirror-listens"]


def test_a_consumer_belongs_to_a_declared_stream_and_service() -> None:
    assert codes(consumer("c", "a.b")) == ["unknown-stream"]
    assert codes(stream("A", "a.>"), consumer("c", "a.b", services=())) == ["no-service"]
    assert codes(stream("A", "a.>"), consumer("c", "a.b", services=("x",))) == ["unknown-service"]


def test_dead_letters_go_where_the_rule_says() -> None:
    billing = stream("A", "platform.billing.>")
    low = {"max_deliver": 10, "dlq_subject": "dlq.billing.low"}
    assert codes(billing, consumer("c", "platform.billing.low", **low)) == []
    assert codes(billing, consumer("c", "platform.billing.low", max_deliver=10)) == ["dlq-subject"]
    assert codes(billing, consumer("c", "platform.billing.*", max_deliver=10)) == []


def test_a_consumer_that_never_gives_up_has_no_dead_letters() -> None:
    assert codes(stream("A", "a.>"), consumer("c", "a.b", dlq_subject="dlq.a.b")) == ["dlq-subject"]


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"max_bytes": 1}, "drops-unread"),
        ({"max_msgs": 1}, "drops-unread"),
        ({"max_msgs_per_subject": 2}, "drops-unread"),
        ({"storage": "memory"}, "in-memory"),
        ({"retention": "workqueue", "max_age_ns": 10**12}, "drops-unread"),
    ],
)
def test_limits_that_lose_in_silence_are_warnings_and_no_errors(options: dict[str, object], code: str) -> None:
    assert codes(stream("A", "a.>", **options)) == []
    assert [finding.code for finding in warnings(stream("A", "a.>", **options))] == [code]


def test_a_stream_of_last_values_keeps_what_it_is_for() -> None:
    assert warnings(stream("A", "a.>", max_msgs_per_subject=1)) == []


def test_a_full_stream_that_refuses_loses_nothing_in_silence() -> None:
    assert warnings(stream("A", "a.>", max_bytes=1, max_msgs=1, discard="new")) == []


def test_dead_letters_stay_unique_as_long_as_they_live() -> None:
    letters = stream("DLQ", "dlq.>", max_age_ns=10**15)
    assert [finding.code for finding in warnings(letters)] == ["letters-repeat"]
    assert warnings(replace(letters, duplicate_window_ns=10**15)) == []


def test_the_shipped_warnings_are_the_limits_that_the_specs_ask_for() -> None:
    found = [finding for finding in lint(load((), Settings())) if finding.severity is Severity.WARNING]
    assert [finding.place.split(" ")[1] for finding in found] == [
        "streams.BILLING.max_bytes",
        "streams.PAYMENTS.max_bytes",
        "streams.PROVISIONING.max_bytes",
        "streams.APPS.max_bytes",
        "streams.STORAGE.max_bytes",
        "streams.CHAT_EVENTS.max_msgs_per_subject",
        "streams.DLQ.max_bytes",
    ]
