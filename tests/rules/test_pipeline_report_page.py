"""The report's page: it needs nothing beside itself, shows what it is given, and lets nobody write into it."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser

import pytest

from oncewire.pipeline.report import plots, rules
from oncewire.pipeline.report.page import page
from oncewire.pipeline.report.rules import Content
from tests.support import reports

VOID = {"meta"}
EMPTY = Content("/lake", reports.BEGIN, None, [], [], [], [], [], [], None, [], [])


class Tags(HTMLParser):
    """Every tag that opens must close; what refers elsewhere is noted."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: set[str] = set()
        self.outside: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        told = dict(attrs)
        self.outside += [value or "" for name, value in told.items() if name in ("src", "href", "action", "data")]
        self.ids += [told["id"] or ""] if "id" in told else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert tag == self.open.pop()


def read(html: str) -> Tags:
    tags = Tags()
    tags.feed(html)
    tags.close()
    return tags


@pytest.mark.parametrize(
    "content", [reports.content(), reports.content(is_good=False), EMPTY], ids=["good", "bad", "empty"]
)
def test_the_page_is_whole_and_refers_to_nothing(content: Content) -> None:
    html = page(content)
    tags = read(html)
    assert ([], []) == (tags.open, tags.outside)
    assert len(tags.ids) == len(set(tags.ids))
    assert not tags.names & {"script", "link", "img", "iframe", "object"}
    assert [] == re.findall(r"url\(|@import", html)


def test_nobody_writes_into_the_page() -> None:
    html = page(reports.content())
    assert reports.EVIL not in html
    assert "&lt;script&gt;" in html


def test_findings_are_named() -> None:
    html = page(reports.content(is_good=False))
    assert all(word in html for word in ("2 findings", "MESHFORGE_EVENTS 4711–4713", "fx.0b1c", "block 88"))
    assert "Nothing lost" not in html


def test_a_lake_without_anything_says_what_to_do() -> None:
    html = page(EMPTY)
    assert "oncewire pipeline audit" in html


def test_many_minutes_are_put_together() -> None:
    start = datetime(2026, 11, 1, tzinfo=UTC)
    axis = rules.axis_of((start + timedelta(minutes=at) for at in range(1_000)), timedelta(minutes=1))
    assert axis is not None
    assert (timedelta(minutes=6), 167) == (axis.step, axis.count)
    rows = [{"stream": "S", "window_start": start + timedelta(minutes=at), "messages": 60} for at in range(1_000)]
    [series] = rules.throughput(rows, axis)
    assert [1.0, 4 / 6] == pytest.approx([series.values[0], series.values[-1]])  # four minutes are left for the last


def test_streams_beyond_the_first_are_one_line() -> None:
    start = reports.BEGIN
    axis = rules.axis_of([start], timedelta(minutes=1))
    assert axis is not None
    rows = [{"stream": f"S{at}", "window_start": start, "messages": 600 - at} for at in range(9)]
    found = rules.throughput(rows, axis)
    assert [*(f"S{at}" for at in range(rules.STREAMS_MAX)), rules.OTHERS] == [one.name for one in found]
    assert (594 + 593 + 592) / 60 == pytest.approx(found[-1].values[0])


def test_topics_are_summed_by_group_the_busiest_first() -> None:
    found = rules.topic_lines(reports.topics())
    names = ("topic", "group", "produced", "settled", "dead", "failed", "p95_ms")
    assert [
        ("orders", "", 8_000, 0, 0, 0, None),
        ("orders", "billing", 0, 7_980, 8, 62, 55.0),
        (reports.EVIL, "", 3, 0, 0, 0, None),
    ] == [tuple(one[name] for name in names) for one in found]


def test_latency_is_that_of_the_worst_minute() -> None:
    rows = [
        {"stream": name, "window_start": reports.BEGIN, "p50_ms": value, "p95_ms": value, "p99_ms": value}
        for name, value in (("A", 3.0), ("B", 7.0))
    ]
    axis = rules.axis_of([reports.BEGIN, reports.BEGIN + timedelta(minutes=1)], timedelta(minutes=1))
    assert axis is not None
    assert [(7.0, None)] * 3 == [one.values for one in rules.latency(rows, axis)]


@pytest.mark.parametrize(
    ("value", "top"), [(0, 1.0), (225, 240.0), (108, 120.0), (1, 1.0), (0.03, 0.03), (999, 1000.0)]
)
def test_an_axis_ends_at_a_round_number(value: float, top: float) -> None:
    assert top == pytest.approx(plots.nice_top(value))


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (12, "12"), (1234, "1,234"), (56_700, "56.7k"), (2_990_000, "2.99M"), (0.25, "0.25")]
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert text == plots.short(value)
