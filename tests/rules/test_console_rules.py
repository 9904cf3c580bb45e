"""What the console says of what was found, and that foreign text and payloads stay bounded."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import oncewire
from oncewire._ground.metrics.histogram import SECONDS
from oncewire._ground.metrics.table import TABLE, Kind
from oncewire._ground.topology import Topology
from oncewire._ground.topology.model import Consumer, Stream
from oncewire._ground.topology.rules import Found, FoundConsumer, FoundStream, plan
from oncewire.console import rules
from oncewire.console.payloads import EDIT_BYTES_MAX, HEX_BYTES_MAX, SHOWN_BYTES_MAX, hex_lines, shown_payload
from oncewire.console.rules import Look

PAGE = Path(oncewire.__file__).parent / "console" / "page"
DECLARED = Topology(
    streams=(Stream(key="ORDERS", name="ORDERS", subjects=("orders.>",), replicas=1),),
    consumers=(Consumer(stream_key="ORDERS", name="worker", stream="ORDERS", filters=("orders.new",)),),
)


def look(at_s: float, last: int, deliveries: int, **found: FoundStream) -> Look:
    worker = FoundConsumer(
        name="worker", config=DECLARED.consumers[0].wire(), deliveries=deliveries, pending=5, unacked=2
    )
    stream = FoundStream(
        name="ORDERS", config=DECLARED.streams[0].wire(), messages=last, last=last, consumers={"worker": worker}
    )
    others = {name: tuple(one.config.get("subjects", ())) for name, one in found.items()}
    return Look(at_s, Found(streams={"ORDERS": stream}, others=others, strangers=found, api_level=4))


def rows(now: Look, before: Look | None = None) -> list[rules.StreamRow]:
    return rules.rows(DECLARED, now, before, plan(DECLARED, now.found))


def test_rates_are_what_came_between_two_looks() -> None:
    (row,) = rows(look(12.0, 130, 60), look(10.0, 100, 20))
    assert (15.0, 20.0, "") == (row.rate, row.consumers[0].rate, row.drift)


def test_the_first_look_has_no_rates() -> None:
    (row,) = rows(look(12.0, 130, 60))
    assert (0.0, 0.0) == (row.rate, row.consumers[0].rate)


def test_a_stream_that_went_back_has_no_negative_rate() -> None:
    (row,) = rows(look(12.0, 10, 5), look(10.0, 100, 20))
    assert (0.0, 0.0) == (row.rate, row.consumers[0].rate)


def test_a_quantile_lies_between_the_bounds_of_its_bucket() -> None:
    counts = [0] * (len(SECONDS) + 1)
    assert rules.quantile_ms(counts, 95) is None
    counts[0], counts[3] = 90, 10  # up to 1 ms, and from 5 to 10 ms
    assert [0.56, 7.5, 9.5] == [rules.quantile_ms(counts, one) for one in (50, 95, 99)]
    counts[-1] = 900  # beyond the last bound nothing is known
    assert SECONDS[-1] * 1000 == rules.quantile_ms(counts, 95)


def test_latency_is_what_was_counted_between_two_looks() -> None:
    name = "oncewire_relay_stored_seconds"
    before, now = ({name: [count] + [0] * len(SECONDS), "oncewire_of_others": [1]} for count in (5, 9))
    (told,) = rules.latencies(before, now)
    assert ("outbox row to stream", 4) == (told.name, told.count)
    assert [9, 0] == [rules.latencies(*looks)[0].count for looks in (({}, now), (now, now))]
    assert {name for name in rules.LATENCIES if TABLE[name].kind is Kind.HISTOGRAM} == rules.LATENCIES.keys()


def test_what_is_missing_is_a_row_that_says_so() -> None:
    now = Look(1.0, Found(api_level=4))
    (row,) = rules.rows(DECLARED, now, None, plan(DECLARED, now.found))
    assert (False, "is missing") == (row.is_there, row.drift)


def test_a_consumer_that_is_missing_is_shown_beside_those_that_are_there() -> None:
    there = FoundStream(name="ORDERS", config=DECLARED.streams[0].wire())
    now = Look(1.0, Found(streams={"ORDERS": there}, api_level=4))
    (row,) = rules.rows(DECLARED, now, None, plan(DECLARED, now.found))
    assert [("worker", "is missing")] == [(one.name, one.drift) for one in row.consumers]


def test_drift_names_both_values() -> None:
    there = FoundStream(name="ORDERS", config=DECLARED.streams[0].wire() | {"max_age": 3_600 * 10**9})
    now = Look(1.0, Found(streams={"ORDERS": there}, api_level=4))
    (row,) = rules.rows(DECLARED, now, None, plan(DECLARED, now.found))
    assert "max_age is 1h, not" in row.drift


def test_strangers_are_shown_and_not_blamed() -> None:
    found = rows(look(1.0, 0, 0, **{"OWB+=+jobs+1": FoundStream(name="OWB+=+jobs+1", config={"subjects": ["owb.>"]})}))
    assert [("stream", True), ("topic", False)] == [(one.kind, one.is_declared) for one in found]


def test_totals_count_consumers_and_groups_but_not_buckets() -> None:
    bucket = FoundStream(name="KV_x", config={}, messages=9, bytes=9)
    streams = rows(look(12.0, 130, 60, KV_x=bucket), look(10.0, 100, 20, KV_x=bucket))
    groups = [{"groups": [{"lag": 7, "in_flight": 1}]}, {"name": "brief"}]
    told = rules.totals(streams, groups, 3, 0.5)
    assert (15.0, 20.0, 12, 3, 3, 130) == (
        told.published, told.delivered, told.lag, told.in_flight, told.letters, told.messages,
    )  # fmt: skip


def test_a_durable_that_is_kept_for_tools_is_not_behind() -> None:
    """Nothing reads GATEWAY_FANOUT by design: what waits on it is not lag."""
    names = {"GATEWAY_FANOUT": 68, "mine": 5}
    consumers = {name: FoundConsumer(name=name, config={}, pending=lag) for name, lag in names.items()}
    there = FoundStream(name="CHAT", config={}, consumers=consumers)
    row = next(row for row in rows(look(1.0, 0, 0, CHAT=there)) if row.name == "CHAT")
    assert {"GATEWAY_FANOUT": True, "mine": False} == {one.name: one.is_unread for one in row.consumers}
    assert 5 == rules.totals([row], [], 0, 0.5).lag


def test_foreign_text_is_bounded_and_can_always_be_encoded() -> None:
    shown = rules.shown("\udcff" + "x" * 10_000)
    assert 401 == len(json.loads(json.dumps(shown).encode()))
    assert shown.encode()


# ---- payloads


def test_json_is_set_apart() -> None:
    shown = shown_payload(b'{"a":1}')
    assert ("json", '{\n  "a": 1\n}', '{"a":1}') == (shown["kind"], shown["text"], shown["whole"])


@pytest.mark.parametrize("payload", [b"\xff\xfe", b"a\x00b", b"\x1b[31m", bytes(range(256))])
def test_what_is_no_text_is_shown_as_hex_and_not_edited(payload: bytes) -> None:
    shown = shown_payload(payload)
    assert ("hex", None) == (shown["kind"], shown["whole"])
    assert shown["text"].replace("\n", "").isprintable()


def test_hex_has_places_bytes_and_letters() -> None:
    assert ["00000000", "61", "00", "a."] == hex_lines(b"a\x00").split()


@pytest.mark.parametrize("payload", [b"x" * (1 << 20), b"\xff" * (1 << 20), b"[" * (1 << 20), "é".encode() * (1 << 19)])
def test_large_payloads_are_cut_and_say_so(payload: bytes) -> None:
    shown = shown_payload(payload)
    assert shown["is_cut"]
    assert len(shown["text"]) <= max(SHOWN_BYTES_MAX, 6 * HEX_BYTES_MAX)
    assert shown["whole"] is None or len(shown["whole"]) <= EDIT_BYTES_MAX


def test_deep_json_is_text() -> None:
    assert "text" == shown_payload(b"[" * 5_000)["kind"]


# ---- the page's own files


def test_the_page_refers_to_nothing_elsewhere() -> None:
    """No address of another place but the name of SVG, no inline script or style."""
    files = [path for path in sorted(PAGE.rglob("*")) if path.suffix in (".js", ".css", ".html")]
    assert {".js", ".css", ".html"} == {path.suffix for path in files}
    for path in files:
        text = path.read_text()
        found = set(re.findall(r"https?://[^\s\"'`)]*", text)) - {"http://www.w3.org/2000/svg"}
        assert not {one for one in found if "127.0.0.1" not in one}, path
        assert "innerHTML" not in text
        assert "@import" not in text
    page = (PAGE / "index.html").read_text()
    assert not re.findall(r"<script(?![^>]* src=)|<style|\son\w+=|\sstyle=", page)


def test_every_module_that_is_imported_is_there() -> None:
    imported = [
        (path, name) for path in PAGE.rglob("*.js") for name in re.findall(r'from "(\.[^"]+)"', path.read_text())
    ]
    assert imported
    assert [] == [(path, name) for path, name in imported if not (path.parent / name).resolve().is_file()]
