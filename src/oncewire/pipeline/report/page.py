"""The page: HTML text around the plots. Nothing is loaded from elsewhere, no script runs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any, Final

from oncewire.pipeline.auditing.verdict import CHECKS, Finding, Verdict
from oncewire.pipeline.report import plots
from oncewire.pipeline.report.plots import duration, short
from oncewire.pipeline.report.rules import Content, Lineage, Series
from oncewire.pipeline.report.style import STYLE

VERDICTS_SHOWN: Final = 30
FINDINGS_SHOWN: Final = 50
STOPS_SHOWN: Final = 100


def page(content: Content) -> str:
    """The whole document."""
    parts = [_head(content), _verdict(content), _throughput(content), _latency(content), _letters(content)]
    parts += [_consumers(content), _topics(content), _lineage(content), _usage(content)]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><title>Oncewire report</title>'
        f"<style>{STYLE}</style></head><body><main>{''.join(parts)}</main></body></html>\n"
    )


def _when(at: datetime) -> str:
    return f'<time datetime="{at.isoformat()}">{at:%Y-%m-%d %H:%M:%S} UTC</time>'


def _verdict_time(verdict: Verdict) -> datetime:
    return datetime.fromtimestamp(verdict.at_ms / 1000, UTC)


def section(id_: str, title: str, body: str, lead: str = "") -> str:
    told = f'<p class="lead">{lead}</p>' if lead else ""
    return f'<section aria-labelledby="{id_}"><h2 id="{id_}">{escape(title)}</h2>{told}{body}</section>'


def table(heads: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]], caption: str) -> str:
    """Cells are HTML; a head's class counts for its column: `n` is a number."""
    top = "".join(f'<th scope="col" class="{kind}">{escape(name)}</th>' for name, kind in heads)
    body = "".join(
        "<tr>"
        + "".join(f'<td class="{kind}">{cell}</td>' for cell, (_, kind) in zip(row, heads, strict=True))
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f"<caption>{escape(caption)}</caption><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def plot(svg: str, legend: str = "") -> str:
    return f'<figure>{legend}<div class="scroll plot">{svg}</div></figure>'


def legend(series: Sequence[Series]) -> str:
    words = "".join(f'<li><i class="key s{at}"></i>{escape(one.name)}</li>' for at, one in enumerate(series))
    return f'<ul class="legend">{words}</ul>'


def nothing(text: str) -> str:
    return f'<p class="nothing">{escape(text)}</p>'


# ---- sections


def _head(content: Content) -> str:
    messages = sum(one.messages for one in content.streams)
    letters = sum(count for _, count in content.causes)
    tiles = [
        ("messages", short(messages), "each once"),
        ("streams", str(len(content.streams)), "with messages"),
        ("runs", short(content.runs), "of more than one step"),
        ("dead letters", short(letters), f"{len(content.causes)} causes"),
    ]
    shown = "".join(
        f"<li><b>{escape(value)}</b><span>{escape(name)}</span><small>{escape(more)}</small></li>"
        for name, value, more in tiles
    )
    return (
        f'<header><h1>Oncewire report</h1><p class="lead">{escape(content.lake)} · {_when(content.made_at)}</p>'
        f'<ul class="tiles">{shown}</ul></header>'
    )


def _verdict(content: Content) -> str:
    if not content.verdicts:
        return section("audit", "Audit", nothing("Nothing was audited yet: oncewire pipeline audit."))
    last = content.verdicts[0]
    word = "Nothing lost, nothing doubled, nothing changed" if last.is_good else f"{last.errors:,} findings"
    kind = "good" if last.is_good else "bad"
    sign = "✓" if last.is_good else "✗"
    banner = (
        f'<p class="banner {kind}"><span aria-hidden="true">{sign}</span><b>{escape(word)}</b>'
        f"<small>audited {_when(_verdict_time(last))}, {last.took_s:.1f} s, {last.pending:,} pending</small></p>"
    )
    return section("audit", "Audit", banner + _checks(last) + _findings(last) + _cut(last) + _history(content.verdicts))


def _checks(verdict: Verdict) -> str:
    rows = ""
    for check, promise in CHECKS.items():
        wrong = sum(1 for one in verdict.findings if one.check == check)
        told: dict[str, int] = {}
        for one in verdict.counts:
            if one.check == check:
                told[one.name] = told.get(one.name, 0) + one.count
        shown = " · ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in sorted(told.items()))
        mark = f'<i class="mark {"bad" if wrong else "good"}">{"✗" if wrong else "✓"}</i>'
        rows += f"<li>{mark}<span>{escape(promise)}</span><small>{escape(shown)}</small></li>"
    return f'<ul class="checks">{rows}</ul>'


def _findings(verdict: Verdict) -> str:
    if not verdict.findings:
        return ""
    rows = [
        (
            escape(one.check),
            escape(one.problem.replace("_", " ")),
            escape(_position(one)),
            escape(f"{one.chain} block {one.block}" if one.block else one.chain),
            f"<code>{escape(one.id)}</code>" if one.id else "",
            escape(one.detail),
        )
        for one in verdict.findings[:FINDINGS_SHOWN]
    ]
    heads = [("check", ""), ("problem", ""), ("position", "k"), ("chain", "k"), ("id", ""), ("detail", "w")]
    return table(heads, rows, f"What is wrong ({verdict.errors:,} in all)")


def _position(one: Finding) -> str:
    if not one.stream or not one.first:
        return one.stream
    return f"{one.stream} {one.first}" + (f"–{one.last}" if one.last > one.first else "")


def _cut(verdict: Verdict) -> str:
    stops = [
        (
            escape(stop.stream + (f" #{stop.incarnation}" if stop.incarnation else "")),
            f"{stop.sequence:,}",
            f"{stop.pending:,}",
        )
        for stop in verdict.cut[:STOPS_SHOWN]
    ]
    heads = [("stream", ""), ("up to sequence", "n"), ("newer ones", "n")]
    chains = [(escape(one.chain), f"{one.last:,}", f"{one.confirmed:,}") for one in verdict.chains]
    more = [("agent", ""), ("up to block", "n"), ("effects up to block", "n")]
    rest = len(verdict.cut) - len(stops)
    more_streams = f", and {rest:,} streams more" if rest else ""
    told = table(heads, stops, f"The cut: what lies above is pending{more_streams}") + (
        table(more, chains, "Chains of blocks") if chains else ""
    )
    return f"<details><summary>The cut</summary>{told}</details>"


def _history(verdicts: Sequence[Verdict]) -> str:
    if len(verdicts) < 2:
        return ""
    dots = "".join(
        f'<li class="{"good" if one.is_good else "bad"}" title="{_verdict_time(one):%Y-%m-%d %H:%M} · '
        f'{"good" if one.is_good else f"{one.errors} findings"}">{"✓" if one.is_good else "✗"}</li>'
        for one in reversed(verdicts[:VERDICTS_SHOWN])
    )
    return f'<h3>The last {min(len(verdicts), VERDICTS_SHOWN)} audits</h3><ol class="history">{dots}</ol>'


def _throughput(content: Content) -> str:
    if content.axis is None:
        return section("throughput", "Throughput", nothing("Silver holds no messages yet."))
    svg = plots.lines("Messages a second by stream over time", content.axis, content.throughput)
    rows = [
        (
            escape(one.stream), f"{one.messages:,}", short(one.peak_per_s), plots.spark(one.rates),
            duration(one.p50_ms), duration(one.p95_ms), duration(one.p99_ms), duration(one.max_ms),
        )
        for one in content.streams
    ]  # fmt: skip
    heads = [("stream", ""), ("messages", "n"), ("peak /s", "n"), ("rate", "")]
    heads += [(name, "n") for name in ("p50", "p95", "p99", "longest")]
    told = table(heads, rows, "Streams; the percentiles are those of the worst minute")
    return section("throughput", "Throughput", plot(svg, legend(content.throughput)) + told, "messages a second")


def _latency(content: Content) -> str:
    if content.axis is None:
        return ""
    svg = plots.lines("Latency percentiles over time", content.axis, content.latency, duration)
    lead = "from the time that a message states to the time its stream took it in; the worst minute of each interval"
    return section("latency", "Latency", plot(svg, legend(content.latency)), lead)


def _letters(content: Content) -> str:
    if not content.causes:
        return section("letters", "Dead letters", nothing("No dead letters."))
    rows = [
        (
            escape(one["cause"]), escape(one["stream"]), escape(one["consumer"]), f"{one['letters']:,}",
            escape(one["last_error"] or ""),
        )
        for one in content.letters
    ]  # fmt: skip
    heads = [("cause", ""), ("stream", ""), ("consumer", ""), ("letters", "n"), ("last error", "w")]
    body = plot(plots.bars("Dead letters by cause", content.causes)) + table(
        heads, rows, "Letters by consumer and cause"
    )
    return section("letters", "Dead letters", body, "by cause")


def _consumers(content: Content) -> str:
    if not content.consumers:
        return ""
    names = ("done", "duplicate", "terminated", "dead", "passed", "given_up", "redeliveries")
    rows = [
        (escape(one["stream"]), escape(one["consumer"]), *(f"{one[name]:,}" for name in names))
        for one in content.consumers
    ]
    heads = [("stream", ""), ("consumer", ""), *((name.replace("_", " "), "n") for name in names)]
    return section("consumers", "Consumers", table(heads, rows, "What became of the inputs"))


def _topics(content: Content) -> str:
    if not content.topics:
        return ""

    def took(ms: float | None) -> str:
        return duration(ms) if ms is not None else ""

    names = ("produced", "settled", "dead", "failed")
    rows = [
        (
            escape(one["tenant"]), escape(one["topic"]), escape(one["group"] or "producers"),
            *(f"{one[name]:,}" for name in names), took(one["p50_ms"]), took(one["p95_ms"]),
        )
        for one in content.topics
    ]  # fmt: skip
    heads = [("tenant", ""), ("topic", ""), ("group", ""), *((name, "n") for name in (*names, "p50", "p95"))]
    lead = "what producers stored and groups settled; the percentiles, from stored to settled, are the worst minute's"
    return section("topics", "Topics", table(heads, rows, "Topics of the broker"), lead)


def _lineage(content: Content) -> str:
    if content.lineage is None:
        return section("lineage", "Lineage", nothing("No message has caused another one yet."))
    found: Lineage = content.lineage
    run = found.run
    lead = (
        f"run <code>{escape(run['run'])}</code> of {escape(run['tenant'] or 'no tenant')}: {run['steps']:,} steps in "
        f"{duration(run['duration_ms'])}, {run['retries']} retries; the critical path has "
        f"{len(run['critical_path'])} steps and takes {duration(run['critical_ms'])}"
    )
    svg = plots.run_steps("Steps of the run over time", found.steps, run["started_at"], run["duration_ms"])
    key = (
        '<ul class="legend"><li><i class="key crit"></i>critical path</li><li><i class="key other"></i>others</li></ul>'
    )
    rows = [
        (
            f"{'· ' * step['depth']}{escape(step['type'] or '')}", escape(step["subject"]),
            f"{escape(step['stream'])} {step['sequence']:,}", duration(step["wait_ms"]), str(step["retries"]),
        )
        for step in found.steps
    ]  # fmt: skip
    heads = [("step", ""), ("subject", ""), ("position", ""), ("after its cause", "n"), ("retries", "n")]
    more = f"<details><summary>Steps as a table</summary>{table(heads, rows, 'Steps of the run')}</details>"
    return section("lineage", "Lineage", plot(svg, key) + more, lead)


def _usage(content: Content) -> str:
    if not content.usage:
        return ""
    rows: list[tuple[Any, ...]] = [
        (
            escape(one["tenant"]), escape(one["meter"]), f"{one['quantity']:,.6g}", escape(one["unit"]),
            f"{one['events']:,}", f"{one['late_quantity']:,.6g}", f"{one['late_events']:,}",
        )
        for one in content.usage
    ]  # fmt: skip
    heads = [("tenant", ""), ("meter", ""), ("quantity", "n"), ("unit", ""), ("events", "n"), ("late", "n")]
    lead = "sums over identities; late is what came in more than an hour behind its window"
    return section("usage", "Usage", table([*heads, ("late events", "n")], rows, "Metered use by tenant"), lead)
