"""Agents: handlers whose every effect happens once."""

from typing import TYPE_CHECKING

from oncewire._ground.lazy import exports

if TYPE_CHECKING:
    from oncewire._ground.ledger.stores import open_store
    from oncewire.agent.agent import Agent
    from oncewire.agent.context import Context
    from oncewire.agent.effects import Effect, Retry, Terminate
    from oncewire.agent.run import Runner, running

__all__ = ["Agent", "Context", "Effect", "Retry", "Runner", "Terminate", "open_store", "running"]

__getattr__ = exports(
    __name__,
    {
        "Agent": "oncewire.agent.agent",
        "Context": "oncewire.agent.context",
        "Effect": "oncewire.agent.effects",
        "Retry": "oncewire.agent.effects",
        "Runner": "oncewire.agent.run",
        "Terminate": "oncewire.agent.effects",
        "open_store": "oncewire._ground.ledger.stores",
        "running": "oncewire.agent.run",
    },
)
