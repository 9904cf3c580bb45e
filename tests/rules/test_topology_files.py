"""Reading declarations: every mistake has its place, and nothing that a file can hold breaks the reader."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncewire._ground.errors import InvalidSetting
from oncewire._ground.settings import Settings
from oncewire._ground.topology import Env, examine, load, values
from oncewire._ground.topology.declared import shipped
from oncewire._ground.topology.export import export_as
from oncewire._ground.topology.files import FILE_BYTES_MAX, Declared, Source, declare, line_numbers
from oncewire._ground.topology.findings import Finding, errors
from oncewire._ground.topology.lint import lint
from oncewire._ground.topology.units import parse_bytes, parse_duration_ns, show_bytes, show_duration

VECTORS = Path(__file__).parents[1] / "vectors" / "topology"
DOCS = Path(__file__).parents[2] / "docs"
DAY_NS = 86_400 * 10**9

MISTAKES = {
    5: ("bad-value", "streams.ORDERS.max_age"),
    6: ("bad-value", "streams.ORDERS.max_bytes"),
    7: ("bad-value", "streams.ORDERS.retention"),
    8: ("bad-value", "streams.ORDERS.replicas"),
    9: ("unknown-key", "streams.ORDERS.max_mgs"),
    11: ("illegal-name", "streams.BAD NAME"),
    15: ("copies-work-queue", "streams.COPY.sources"),
    18: ("captured-twice", "streams.SHADOW.subjects"),
    20: ("window-over-age", "streams.SHORT.duplicate_window"),
    24: ("missing-key", "streams.EMPTY"),
    28: ("is-a-bucket", "streams.KV_mine.subjects"),
    32: ("no-ack-loses", "streams.SILENT.no_ack"),
    39: ("filters-overlap", "consumers.MESHFORGE_COMMANDS.second.filters"),
    43: ("filter-outside", "consumers.ORDERS.outside.filters"),
    49: ("not-pull", "consumers.ORDERS.pushed.deliver_subject"),
    55: ("not-explicit", "consumers.ORDERS.careless.ack_policy"),
    61: ("refused-key", "consumers.ORDERS.backing_off.backoff"),
    67: ("dlq-subject", "consumers.ORDERS.misaddressed.dlq_subject"),
    71: ("unknown-service", "consumers.ORDERS.unowned.services"),
    74: ("unknown-stream", "consumers.NOWHERE.lost"),
    80: ("writes-dead-letters", "services.rogue.publishes"),
    83: ("name-not-stable", "released.consumers"),
    85: ("unknown-section", "topics"),
}


def read(text: str, settings: Settings | None = None) -> Declared:
    """The shipped catalogs with one file of a user over them."""
    topology, found = declare(shipped(), [Source("own.toml", text)], settings or Settings())
    return Declared(topology, (*found, *lint(topology)))


def wrong(text: str, settings: Settings | None = None) -> list[Finding]:
    return errors(read(text, settings).findings)


def codes(text: str, settings: Settings | None = None) -> list[str]:
    return [finding.code for finding in wrong(text, settings)]


def test_a_file_with_twenty_mistakes_gets_each_of_them_named_with_its_place() -> None:
    path = VECTORS / "twenty-mistakes.toml"
    found = errors(examine([path], Settings()).findings)
    places = {(finding.code, finding.place) for finding in found}
    assert places == {(code, f"{path}:{line} {where}") for line, (code, where) in MISTAKES.items()}
    assert len(found) == len(MISTAKES) > 20
    assert all(finding.message and finding.remedy for finding in found)


def test_the_shipped_catalogs_have_no_errors() -> None:
    assert wrong("") == []


def test_errors_stop_a_load_and_say_how_to_see_them_all() -> None:
    with pytest.raises(InvalidSetting, match=r"23 errors: .*; and 18 more") as caught:
        load([VECTORS / "twenty-mistakes.toml"], Settings())
    assert "oncewire topology lint" in caught.value.hint


def test_a_user_overrides_single_keys_of_a_shipped_stream() -> None:
    declared = read('[streams.BILLING]\nmax_bytes = "1 GiB"\n')
    billing = declared.topology.stream("BILLING")
    assert errors(declared.findings) == []
    assert billing is not None
    assert (billing.max_bytes, billing.max_age_ns, billing.subjects) == (1 << 30, 7 * DAY_NS, ("platform.billing.>",))


def test_a_user_adds_streams_buckets_consumers_and_services() -> None:
    declared = read("""
        [streams.ORDERS]
        subjects = ["orders.>"]
        [buckets.prices]
        history = 5
        [consumers.ORDERS.biller]
        filters = ["orders.placed"]
        services = ["shop"]
        dlq_subject = "dlq.orders.placed"
        [services.shop]
        publishes = ["orders.>"]
    """)
    assert errors(declared.findings) == []
    topology = declared.topology
    bucket = topology.stream("KV_prices")
    assert topology.stream("ORDERS") is not None
    assert bucket is not None
    assert (bucket.subjects, bucket.max_msgs_per_subject) == (("$KV.prices.>",), 5)
    assert "biller" in {consumer.name for consumer in topology.consumers}


def test_a_later_file_wins() -> None:
    first, second = (
        Source("a.toml", '[streams.DLQ]\nmax_bytes = "1 GiB"'),
        Source("b.toml", "[streams.DLQ]\nmax_msgs = 7"),
    )
    topology, _ = declare(shipped(), [first, second, first], Settings())
    dlq = topology.stream("DLQ")
    assert dlq is not None
    assert (dlq.max_bytes, dlq.max_msgs) == (1 << 30, 7)
    assert topology.place("streams", "DLQ", "max_msgs") == "b.toml:2 streams.DLQ.max_msgs"


def test_settings_act_on_the_sr_streams_and_on_no_other() -> None:
    settings = Settings(stream_prefix="acme", message_ttl_s=3_600, duplicate_window_s=60, max_msgs_per_subject=9)
    usual, changed = (read("", one).topology for one in (Settings(), settings))
    assert {"acme-events", "acme-commands", "acme-queries"} == {
        one.name for one in changed.streams if one not in usual.streams
    }
    for stream in changed.streams:
        if stream.name.startswith("acme-"):
            assert stream.subjects[0].startswith("sr.")
            assert (
                stream.max_age_ns,
                stream.duplicate_window_ns,
                stream.max_msgs_per_subject,
            ) == (3_600 * 10**9, 60 * 10**9, 9)


def test_the_sr_streams_follow_the_settings_of_the_message_contracts_by_default() -> None:
    found = {one.name: one for one in read("").topology.streams if one.follows == "message-settings"}
    assert {"sr-events", "sr-commands", "sr-queries"} == set(found)
    assert {(7 * DAY_NS, 120 * 10**9, -1)} == {
        (one.max_age_ns, one.duplicate_window_ns, one.max_msgs_per_subject) for one in found.values()
    }


def test_a_users_file_wins_over_the_settings() -> None:
    found = read('[streams.sr-events]\nmax_age = "30d"', Settings(stream_prefix="acme")).topology.stream("acme-events")
    assert found is not None
    assert found.max_age_ns == 30 * DAY_NS


def test_chat_prefixes_move_stream_filters_and_contracts_together() -> None:
    settings = Settings(chat_events_prefix="talk.events", chat_tokens_prefix="talk.tokens")
    declared = read("", settings)
    chat = declared.topology.stream("CHAT_EVENTS")
    assert errors(declared.findings) == []
    assert chat is not None
    assert chat.subjects == ("talk.events.*", "talk.tokens.*", "chat.presence.*")
    assert {("talk.events.*",), ("talk.tokens.*",)} == {
        one.filters for one in declared.topology.consumers if one.stream == "CHAT_EVENTS"
    }


def test_a_chat_prefix_inside_another_stream_is_refused() -> None:
    assert "captured-twice" in codes("", Settings(chat_events_prefix="platform.billing"))


def test_a_time_to_live_shorter_than_the_window_is_refused_with_the_setting_as_its_place() -> None:
    found = wrong('[streams.sr-events]\nmax_age = "1m"')
    assert [(one.code, one.place) for one in found] == [("window-over-age", "setting streams.duplicate_window_s")]


def test_environments_differ_in_replicas_where_a_stream_has_no_number_of_its_own() -> None:
    topology = read("[streams.BILLING]\nreplicas = 5").topology
    for env, replicas in ((Env.DEV, 1), (Env.PROD, 3)):
        found = {one.name: one.wire()["num_replicas"] for one in topology.for_env(env).streams}
        assert found.pop("BILLING") == 5
        assert {replicas} == set(found.values())


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("streams = 3", "not-a-table"),
        ("[streams]\nX = 3", "not-a-table"),
        ("consumers.X = 1", "not-a-table"),
        ("[consumers.BILLING]\nx = 1", "not-a-table"),
        ("[[streams.X]]\nsubjects = ['x']", "not-a-table"),
        ("[released]\nstreams = 'X'", "bad-value"),
        ("[streams.X]\nsubjects = [1]", "bad-value"),
        ("[streams.X]\nsubjects = []", "bad-value"),
        ("[streams.X]\nsubjects = ['a..b']", "bad-value"),
        ("[streams.X]\nsubjects = ['a.>.b']", "bad-value"),
        ("[streams.X]\nsubjects = ['x', 'x']", "bad-value"),
        ("[streams.X]\nsubjects = ['x']\nno_ack = 1", "bad-value"),
        ("[streams.X]\nsubjects = ['x']\nmax_msgs = true", "bad-value"),
        ("[streams.X]\nsubjects = ['x']\nmax_msgs = 0", "bad-value"),
        ("[streams.X]\nsubjects = ['x']\nduplicate_window = 'forever'", "bad-value"),
        ("[streams.X]\nsubjects = ['x']\nmax_age = '0s'", "bad-value"),
        ("[streams.X]\nsubjects = ['x']\nmax_age = '999999999d'", "bad-value"),
        ("[streams.X]\nsubjects = ['x']\nmax_bytes = '999999999999 GiB'", "bad-value"),
        ("[streams.X]\nsubjects = ['x']\npersist_mode = 'async'", "refused-key"),
        ("[streams.X]\nsubjects = ['x']\ndescription = \"a\\u001b[2Jb\"", "bad-value"),
        ("[streams.X]\nsubjects = ['x']\ndescription = nan", "not-toml"),
        ("[buckets.X]\nhistory = 65", "bad-value"),
        ("[buckets.X]\nsubjects = ['x']", "unknown-key"),
        ("[streams.X\n", "not-toml"),
        ("[streams.X]\n[streams.X]\n", "not-toml"),
        ("\x00", "not-toml"),
        ("a = " + "[" * 5_000, "not-toml"),
        ("a = " + "9" * 5_000, "not-toml"),
        ("a" + ".a" * 3_000 + " = 1", "too-many"),
    ],
)
def test_what_is_not_a_topology_is_a_finding_and_never_a_crash(text: str, code: str) -> None:
    assert code in codes(text) or (code == "not-toml" and codes(text))


def test_a_file_with_too_many_tables_is_one_finding() -> None:
    text = "\n".join(f"[services.s{at}]" for at in range(2_001))
    assert codes(text) == ["too-many"]


def test_one_bad_value_does_not_look_like_ten() -> None:
    """The stream stays declared with a default, so its consumers and subjects are not reported as well."""
    assert codes("[streams.BILLING]\nmax_age = 7") == ["bad-value"]


@given(st.text(max_size=200))
def test_any_text_is_read_without_a_crash(text: str) -> None:
    read(text)


_SCALARS = st.one_of(st.integers(), st.text(max_size=8), st.booleans(), st.floats(allow_nan=False))
_VALUES = st.one_of(_SCALARS, st.lists(_SCALARS, max_size=3))
_KEYS = st.sampled_from(
    ["subjects", "max_age", "max_bytes", "filters", "services", "replicas", "history", "mirror", "x"]
)


@given(
    st.dictionaries(
        st.sampled_from(["streams.X", "buckets.X", "consumers.BILLING.x", "services.x", "released"]),
        st.dictionaries(_KEYS, _VALUES, max_size=4),
        max_size=3,
    )
)
def test_any_value_in_any_place_is_read_without_a_crash(tables: dict[str, dict[str, object]]) -> None:
    lines = [line for name, table in tables.items() for line in (f"[{name}]", *map(_toml, table.items()))]
    for finding in read("\n".join(lines)).findings:
        assert finding.place


def _toml(pair: tuple[str, object]) -> str:
    def show(value: object) -> str:
        if isinstance(value, str):
            return '"' + "".join(f"\\U{ord(one):08x}" for one in value if not 0xD800 <= ord(one) < 0xE000) + '"'
        if isinstance(value, list):
            return f"[{', '.join(map(show, value))}]"
        return str(value).lower() if isinstance(value, bool | float) else str(value)

    return f"{pair[0]} = {show(pair[1])}"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\xff\xfe", "is not UTF-8: bad byte at position 0"),
        (b"#" * (FILE_BYTES_MAX + 1), "is larger than 256 KiB"),
    ],
)
def test_files_that_are_no_text_or_too_large_are_refused(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "own.toml"
    path.write_bytes(content)
    with pytest.raises(InvalidSetting, match=re.escape(says)):
        load([path], Settings())


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="cannot be read: No such file"):
        load([tmp_path / "none.toml"], Settings())
    with pytest.raises(InvalidSetting, match="cannot be read: Is a directory"):
        load([tmp_path], Settings())


def test_lines_are_found_for_bare_quoted_and_dotted_keys() -> None:
    text = '\n[a.b]\nc = 1\n"d e" = 2\n# f = 3\n[a."x.y"]\n g.h = """\nz = 1\n"""\n'
    assert line_numbers(text) == {
        ("a",): 2,
        ("a", "b"): 2,
        ("a", "b", "c"): 3,
        ("a", "b", "d e"): 4,
        ("a", "x.y"): 6,
        ("a", "x.y", "g"): 7,
        ("a", "x.y", "g", "h"): 7,
        ("a", "x.y", "z"): 8,
    }


@pytest.mark.parametrize(
    ("text", "duration_ns"),
    [("7d", 7 * DAY_NS), ("30s", 30 * 10**9), ("1h30m", 5_400 * 10**9), ("250ms", 250 * 10**6), ("forever", 0)],
)
def test_durations_read_as_they_are_written(text: str, duration_ns: int) -> None:
    assert duration_ns == parse_duration_ns(text)
    assert text == show_duration(duration_ns)


@pytest.mark.parametrize("text", ["", "7", "d", "7 d", "-1s", "1.5h", "7days", "٧d", "1s ", "1S"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not"):
        parse_duration_ns(text)


@pytest.mark.parametrize("text", ["64 MB", "64MB", "64 MiB", "64MiB", "65536 KiB", "67108864 B"])
def test_64_mb_are_67108864_bytes(text: str) -> None:
    assert parse_bytes(text) == 67_108_864
    assert show_bytes(67_108_864) == "64 MiB"


@given(st.integers(1, 2**62))
def test_durations_of_whole_milliseconds_and_sizes_survive_the_way_to_text_and_back(value: int) -> None:
    assert value == parse_bytes(show_bytes(value))
    whole = value // 10**6 * 10**6
    assert whole == 0 or whole == parse_duration_ns(show_duration(whole))


def test_the_examples_of_the_documentation_are_right() -> None:
    examples = re.findall(r"```toml\n(.*?)```", (DOCS / "topology.md").read_text(), re.DOTALL)
    assert len(examples) == 3
    for example in examples:
        assert wrong(example) == []


def test_every_key_is_documented() -> None:
    documented = set(re.findall(r"`([a-z_]+)`", (DOCS / "topology.md").read_text()))
    silent = {"description", "follows", "history", "ack_policy", "deliver_subject"}
    assert {*values.STREAM, *values.CONSUMER, *values.SERVICE} - documented <= silent


def test_an_exported_toml_file_reads_back_as_the_same_topology() -> None:
    topology = load((), Settings())
    again, found = declare([Source("exported.toml", export_as("toml", topology))], [], Settings())
    assert found == ()
    plain = [(one.name, one.wire(), one.one_reader) for one in topology.streams]
    assert plain == [(one.name, one.wire(), one.one_reader) for one in again.streams]
    assert topology.consumers == again.consumers
    assert topology.services == again.services
