"""Plans and findings as lines for people. Pure: colours are names, the command line paints them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from oncewire._ground.topology.files import Declared
from oncewire._ground.topology.findings import Finding, Severity
from oncewire._ground.topology.rules import Act, Need, Plan, Step, show
from oncewire._ground.topology.units import show_bytes, show_duration

_SIGNS = {Act.CREATE: ("+", "green"), Act.UPDATE: ("~", "yellow"), Act.RECREATE: ("~", "yellow")}
_DONE = {Act.CREATE: "created", Act.UPDATE: "changed", Act.RECREATE: "made anew"}


class Line(NamedTuple):
    """`sign` is painted, `name` is a column of its own."""

    sign: str
    color: str
    name: str
    text: str


def plan_lines(plan: Plan) -> Iterator[Line]:
    for step in plan.steps:
        yield from _step_lines(step)
    for item in plan.extras:
        yield Line("?", "blue", _name(item), "not declared, left alone")
    for note in plan.notes:
        yield Line("i", "blue", "", note)


def done_line(step: Step) -> Line:
    sign, color = _SIGNS[step.act]
    return Line(sign, color, "", f"{_DONE[step.act]:<9}  {_name(step.item)}")


def summary(plan: Plan) -> str:
    """`2 to create, 1 to change, 1 only with a flag; 43 as declared`."""
    counted = Counter(_kind(step) for step in plan.steps)
    said = [f"{counted[kind]} {kind}" for kind in dict.fromkeys(_kind(step) for step in plan.steps)]
    left = f"{len(plan.same)} as declared"
    return f"{', '.join(said)}; {left}" if said else f"nothing to do: {left}"


def outcome(plan: Plan, done: Iterable[Step]) -> str:
    counted = Counter(_DONE[step.act] for step in done)
    said = [f"{count} {what}" for what, count in counted.items()] or ["nothing to do"]
    refused = f", {len(plan.steps)} left as they are" if plan.steps else ""
    return f"{', '.join(said)}{refused}; {len(plan.same)} as declared"


def finding_lines(findings: Iterable[Finding]) -> Iterator[Line]:
    for one in findings:
        color = "red" if one.severity is Severity.ERROR else "yellow"
        yield Line(one.severity.value, color, "", f"{one.place}: {one.message}")
        yield Line("", color, "", f"→ {one.remedy}")


def findings_summary(declared: Declared) -> str:
    counted = Counter(one.severity for one in declared.findings)
    said = [f"{count} {severity}{'s' * (count > 1)}" for severity, count in sorted(counted.items())]
    size = f"{len(declared.topology.streams)} streams, {len(declared.topology.consumers)} consumers"
    return f"{size}: {', '.join(said) or 'all is well'}"


def _kind(step: Step) -> str:
    if step.need is Need.IMPOSSIBLE:
        return "impossible"
    if step.flag:
        return "only with a flag"
    return "to create" if step.act is Act.CREATE else "to change"


def _name(item: str) -> str:
    kind, _, name = item.partition(":")
    return f"{kind:<8}  {name}"


def _step_lines(step: Step) -> Iterator[Line]:
    sign, color = _SIGNS[step.act] if step.need is Need.NOTHING else ("!", "red")
    name = _name(step.item)
    if step.act is Act.CREATE:
        yield Line(sign, color, name, _described(step))
    for change in step.changes:
        yield Line(
            sign, color, name, f"{change.key}  {show(change.key, change.found)} → {show(change.key, change.declared)}"
        )
        sign, name = "", ""
    if step.flag:
        yield Line("", color, "", f"only with {step.flag}")
    if step.cost:
        yield Line("", color, "", step.cost)


def _described(step: Step) -> str:
    config = step.config
    if step.consumer:
        filters = [config["filter_subject"]] if "filter_subject" in config else config.get("filter_subjects", ())
        most = show("max_deliver", config["max_deliver"])
        deliveries = f"{most} deliver{'y' if most == '1' else 'ies'}"
        return f"{', '.join(filters)}, ack within {show_duration(config['ack_wait'])}, {deliveries}"
    said = [", ".join(config.get("subjects", ())), show_duration(config.get("max_age", 0))]
    said += [config["retention"]] if config["retention"] != "limits" else []
    said += [show_bytes(config["max_bytes"])] if config["max_bytes"] > 0 else []
    said += [f"{config['num_replicas']} copies"] if config["num_replicas"] > 1 else []
    return ", ".join(said)
