"""What a running agent counts, and how far behind it is."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

from oncewire._ground.contracts.blocks import Outcome
from oncewire._ground.errors import OncewireError
from oncewire._ground.metrics import Page

if TYPE_CHECKING:
    from oncewire.agent.run import Runner

OUTCOMES: Final = (*(one.value for one in Outcome), "redelivered", "retried")


def collect(page: Page, runner: Runner) -> None:
    agent = runner.agent.full_name
    page.put("oncewire_agent_ready", 0 if runner.trouble else 1, agent=agent)
    if not runner.is_started:
        return
    commits = runner.commits
    for outcome in OUTCOMES:
        page.put("oncewire_agent_inputs_total", commits.counts.get(outcome, 0), agent=agent, outcome=outcome)
    page.put("oncewire_agent_effects_total", commits.effects, agent=agent)
    page.put("oncewire_agent_commits_total", commits.commits, agent=agent)
    page.put("oncewire_agent_in_flight", runner.in_flight, agent=agent)
    page.put("oncewire_agent_open_blocks", len(commits.open), agent=agent)
    for stream, lag in runner.lags.items():
        page.put("oncewire_agent_lag", lag, agent=agent, stream=stream)
    page.histogram("oncewire_agent_stored_seconds", commits.stored, agent=agent)
    page.histogram("oncewire_agent_delivery_seconds", commits.delivery, agent=agent)
    page.histogram("oncewire_agent_handling_seconds", commits.handling, agent=agent)
    page.histogram("oncewire_agent_publish_seconds", commits.publishing, agent=agent)


async def look(runner: Runner) -> None:
    """Ask the server how much waits; while it is away the last answer stands."""
    for stream in {stream for stream, _ in runner.opened}:
        mine = [consumer for known, consumer in runner.opened if known == stream]
        with contextlib.suppress(OncewireError):
            infos = [await runner.client.api(f"CONSUMER.INFO.{stream}.{consumer}") for consumer in mine]
            runner.lags[stream] = sum(info["num_pending"] for info in infos)
