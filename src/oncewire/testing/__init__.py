"""What users import in their own tests: no server, the same rules.

`AgentTest` runs an agent's handlers on a ledger in memory. The pytest fixture `agent_test` is in
`oncewire.testing.fixtures`: name that module in `pytest_plugins`.
"""

from typing import TYPE_CHECKING

from oncewire._ground.lazy import exports

if TYPE_CHECKING:
    from oncewire.testing.agents import AgentTest, Handled
    from oncewire.testing.wire import DeadLetter, Published

__all__ = ["AgentTest", "DeadLetter", "Handled", "Published"]

__getattr__ = exports(
    __name__,
    {
        "AgentTest": "oncewire.testing.agents",
        "DeadLetter": "oncewire.testing.wire",
        "Handled": "oncewire.testing.agents",
        "Published": "oncewire.testing.wire",
    },
)
