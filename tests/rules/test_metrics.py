"""What parts count, as Prometheus reads it; and the one table that says what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from oncewire._ground.metrics import Histogram, Page, Tally
from oncewire._ground.metrics.page import SERIES_MAX
from oncewire._ground.metrics.table import PARTS, TABLE, Kind

CONTRACT = {"produce_rejected_total", "dlq_messages_total", "inflight_messages", "consumer_lag"}
"""Names of the `/v1` contract."""


def test_the_text_is_what_prometheus_reads(tmp_path: Path) -> None:
    page = Page()
    page.put("oncewire_dlq_alerts_total", 1, kind='a "b"\n\\')
    page.put("oncewire_dlq_alerts_total", 2, kind="c")
    page.put("oncewire_dlq_full_ratio", 0.5)
    expected = (
        "# HELP oncewire_dlq_alerts_total Alerts raised.\n# TYPE oncewire_dlq_alerts_total counter\n"
        'oncewire_dlq_alerts_total{kind="a \\"b\\"\\n\\\\"} 1\noncewire_dlq_alerts_total{kind="c"} 2\n'
        "# HELP oncewire_dlq_full_ratio Share of DLQ's max_bytes in use.\n# TYPE oncewire_dlq_full_ratio gauge\n"
        "oncewire_dlq_full_ratio 0.5\n"
    )
    page.write(tmp_path / "metrics.prom")
    assert expected == page.text() == (tmp_path / "metrics.prom").read_text()
    assert ["metrics.prom"] == [one.name for one in tmp_path.iterdir()]


def test_a_label_without_end_is_added_up_under_other() -> None:
    page, tally = Page(), Tally(1)
    for number in range(SERIES_MAX + 10):
        page.put("oncewire_broker_topic_messages", 1, topic=str(number))
        tally.add(str(number))
    lines = [line for line in page.text().splitlines() if not line.startswith("#")]
    assert (SERIES_MAX + 1, True) == (
        len(lines),
        any(line.endswith('{tenant="other",topic="other"} 10') for line in lines),
    )
    assert (SERIES_MAX + 1, 10) == (len(tally.counts), tally.counts[("other",)])


def test_a_large_counter_is_shown_in_full() -> None:
    page = Page()
    page.put("oncewire_broker_produced_total", 12_345_678)
    assert page.text().endswith("oncewire_broker_produced_total 12345678\n")


def test_a_histogram_counts_up_to_each_bound() -> None:
    found = Histogram()
    found.observe(0.0009765625, 4)
    found.observe_all([0.015625, 512.0])
    found.observe(-1.0)  # the clock of another machine
    assert {"0.001": 5, "0.025": 6, "300": 6, "+Inf": 7} == {
        bound: count for bound, count in found.cumulative() if bound in ("0.001", "0.025", "300", "+Inf")
    }
    page = Page()
    page.histogram("oncewire_broker_produce_seconds", found)
    lines = page.text().splitlines()
    assert ["oncewire_broker_produce_seconds_sum 512.01953125", "oncewire_broker_produce_seconds_count 7"] == lines[-2:]
    assert 'oncewire_broker_produce_seconds_bucket{le="+Inf"} 7' in lines


def test_the_page_of_another_process_becomes_part_of_this_one() -> None:
    other, page = Page(), Page()
    other.put("oncewire_pipeline_lag", 7, stream='a"b\\\nc')
    other.put("oncewire_pipeline_ready", 1)
    other.put("oncewire_process_resident_bytes", 5)
    page.put_text(other.text(), "oncewire_pipeline_")
    assert [line for line in other.text().splitlines() if "pipeline" in line] == page.text().splitlines()


@pytest.mark.parametrize(
    "call", [lambda page: page.put("oncewire_nothing", 1), lambda page: page.put("oncewire_dlq_letters", 1, id="7")]
)
def test_what_is_not_declared_cannot_be_shown(call: object) -> None:
    with pytest.raises((KeyError, AssertionError)):
        call(Page())  # type: ignore[operator]


def test_names_kinds_and_labels_follow_the_rules() -> None:
    """One form for all; nothing unbounded is a label."""
    wrong = []
    for part, metrics in PARTS.items():
        for one in metrics:
            first = "stream" if one.name.startswith("oncewire_stream_") else part
            is_named = one.name in CONTRACT or re.fullmatch(rf"oncewire_{first}_[a-z_]+", one.name)
            is_counter = one.kind is Kind.COUNTER
            is_time = one.kind is not Kind.HISTOGRAM or one.name.endswith("_seconds")
            if not is_named or is_counter != one.name.endswith("_total") or not is_time or not one.about.endswith("."):
                wrong.append(one.name)
            if {"id", "key", "conversation", "user", "message", "offset", "owner"} & set(one.labels):
                wrong.append(one.name)
    assert [] == wrong
    assert len(TABLE) == sum(map(len, PARTS.values()))
