"""`oncewire doctor`: what is there, what it promises, what is missing, and what to do about it."""

from __future__ import annotations

import logging
import sys
from dataclasses import asdict
from typing import Any

import click

from oncewire._ground import doctor as rules
from oncewire._ground.settings import Settings
from oncewire.cli import face, facts

COLORS = {rules.Verdict.OK: "green", rules.Verdict.WARNING: "yellow", rules.Verdict.BROKEN: "red"}


@click.command()
@face.setting_options("data", "nats_url", "nats_system_key", "nats_monitor_url", "postgres_url")
@face.command
def doctor(*, as_json: bool, **flags: Any) -> None:
    """Look at the servers, the disk and this machine: each line is ok, warning or broken, with the remedy.

    The servers are those of the settings, else those of the `oncewire up` that runs on the data folder.

    \b
    Examples:
      oncewire doctor
      oncewire doctor --data /var/lib/oncewire --json
      NATS_URL=nats://prod:4222 NATS_MONITOR_URL=http://prod:8222 oncewire doctor
    \b
    Exit code 0 when nothing is broken (warnings are fine), 1 when something is.
    """
    logging.getLogger("oncewire").addHandler(logging.NullHandler())  # what the client would log, a check says
    checks: list[rules.Check] = []
    face.run(_examine(face.load_here(flags).settings, checks))
    worst = rules.worst(checks)
    if as_json:
        face.print_json({"verdict": worst, "checks": [asdict(check) for check in checks]})
    else:
        _show(checks)
    sys.exit(face.EXIT_NOT_WELL if worst is rules.Verdict.BROKEN else 0)


async def _examine(settings: Settings, checks: list[rules.Check]) -> None:
    checks += rules.examine(await facts.gather(settings))


def _show(checks: list[rules.Check]) -> None:
    verdict_width = max(len(check.verdict) for check in checks)
    name_width = max(len(check.name) for check in checks)
    for check in checks:
        verdict = click.style(f"{check.verdict:<{verdict_width}}", fg=COLORS[check.verdict], bold=True)
        face.say(f"{check.name:<{name_width}}  {check.text}", sign=f"{verdict}  ")
        if check.remedy:
            face.say(f"{'':<{verdict_width + name_width + 2}}  → {check.remedy}")
    face.say()
    face.say(_summary(checks))


def _summary(checks: list[rules.Check]) -> str:
    broken, warnings = (
        sum(check.verdict is verdict for check in checks) for verdict in (rules.Verdict.BROKEN, rules.Verdict.WARNING)
    )
    counted = [f"{broken} broken"] * bool(broken)
    counted += [f"{warnings} warning{'s' * (warnings > 1)}"] * bool(warnings)
    return ", ".join(counted) or "all is well"
