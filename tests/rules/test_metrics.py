"""Counters and gauges as Prometheus reads them."""

from __future__ import annotations

from pathlib import Path

from oncewire.metrics import SERIES_MAX, Registry


def test_the_text_is_what_prometheus_reads(tmp_path: Path) -> None:
    registry = Registry()
    registry.counter("letters_total", "Letters.").add(cause='a "b"\n\\')
    registry.counter("letters_total", "Letters.").add(2, cause="c")
    registry.gauge("full", "How full.").set(0.5)
    expected = (
        "# HELP letters_total Letters.\n# TYPE letters_total counter\n"
        'letters_total{cause="a \\"b\\"\\n\\\\"} 1\nletters_total{cause="c"} 2\n'
        "# HELP full How full.\n# TYPE full gauge\nfull 0.5\n"
    )
    registry.write(tmp_path / "metrics.prom")
    assert expected == registry.text() == (tmp_path / "metrics.prom").read_text()
    assert ["metrics.prom"] == [one.name for one in tmp_path.iterdir()]


def test_a_label_without_end_is_added_up_under_other() -> None:
    counter = Registry().counter("seen_total", "Seen.")
    for number in range(SERIES_MAX + 10):
        counter.add(name=str(number))
    assert (1.0, 10.0, SERIES_MAX + 3) == (counter.value(name="5"), counter.value(name="other"), len(counter.lines()))


def test_a_gauge_that_is_replaced_forgets_what_is_gone() -> None:
    gauge = Registry().gauge("waiting", "Waiting.")
    gauge.set(3, name="a")
    gauge.replace({(("name", "b"),): 1})
    assert (0.0, 1.0) == (gauge.value(name="a"), gauge.value(name="b"))


def test_a_large_counter_is_shown_in_full() -> None:
    registry = Registry()
    registry.counter("seen_total", "Seen.").add(12_345_678)
    assert registry.text().endswith("seen_total 12345678\n")
