"""The names of agents' durables. Pure.

One durable per agent and stream. Outside the default tenant and workspace both stand in front; on the `sr-*` streams
the settings' prefix does, as the message contracts say.
"""

from __future__ import annotations

from oncewire.contracts.subjects import DEFAULT_TENANT, DEFAULT_WORKSPACE, READER_PREFIX, token
from oncewire.errors import ContractViolation

NAME_BYTES_MAX = 255
"""What the server takes; it keeps a consumer as a folder of that name."""


def durable_name(agent: str, tenant: str = DEFAULT_TENANT, workspace: str = DEFAULT_WORKSPACE) -> str:
    """`{agent}_consumer`; outside the default tenant and workspace `{tenant}_{workspace}_{agent}_consumer`.

    Two agents can meet in one name (`a_b` in `c`, `b` in `c_a`): their filters differ, which is drift, never shared.
    """
    token(agent, "agent")
    if (token(tenant, "tenant"), token(workspace, "workspace")) == (DEFAULT_TENANT, DEFAULT_WORKSPACE):
        return _checked(f"{agent}_consumer")
    return _checked(f"{tenant}_{workspace}_{agent}_consumer")


def sr_durable_name(prefix: str, agent: str) -> str:
    """`<NATS_CONSUMER_PREFIX>-<agent>`, for the `sr-*` streams."""
    return _checked(f"{prefix}-{token(agent, 'agent')}")


def _checked(name: str) -> str:
    if len(name) > NAME_BYTES_MAX:
        raise ContractViolation(f"the consumer name {name[:40]!r}… is longer than {NAME_BYTES_MAX} bytes")
    if name.startswith(READER_PREFIX):
        raise ContractViolation(f"{READER_PREFIX}… is for readers that keep no position: {name!r}", field="agent")
    return name
