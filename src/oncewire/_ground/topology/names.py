"""The names of agents' durables. Pure.

One durable per agent and stream. Outside the default tenant and workspace its name carries both; on the `sr-*` streams
the settings' prefix is in front, as the message contracts say. No two agents share a name there: a separator inside a
tenant or workspace is escaped, and an agent whose own name could be read as all three is written out in full.

Elsewhere the runtime's contract fixes `{agent}_consumer` for every agent of the default tenant. So `a_b_c` there and
the agent `c` of `a` and `b` have one name: on one stream the second is refused, since a durable knows its agent.
"""

from __future__ import annotations

from oncewire._ground.contracts.subjects import DEFAULT_TENANT, DEFAULT_WORKSPACE, READER_PREFIX, token
from oncewire._ground.errors import ContractViolation

NAME_BYTES_MAX = 255
"""What the server takes; it keeps a consumer as a folder of that name."""


def durable_name(agent: str, tenant: str = DEFAULT_TENANT, workspace: str = DEFAULT_WORKSPACE) -> str:
    """`{agent}_consumer`; outside the default tenant and workspace `{tenant}_{workspace}_{agent}_consumer`."""
    token(agent, "agent")
    if _are_default(tenant, workspace):
        return _checked(f"{agent}_consumer")
    return _checked(f"{_part(tenant, '_')}_{_part(workspace, '_')}_{agent}_consumer")


def sr_durable_name(prefix: str, agent: str, tenant: str = DEFAULT_TENANT, workspace: str = DEFAULT_WORKSPACE) -> str:
    """`<NATS_CONSUMER_PREFIX>-{agent}`, for the `sr-*` streams; outside the default tenant and workspace
    `<NATS_CONSUMER_PREFIX>-{tenant}-{workspace}-{agent}`."""
    token(agent, "agent")
    if _are_default(tenant, workspace) and agent.count("-") < 2:
        return _checked(f"{prefix}-{agent}")
    return _checked(f"{prefix}-{_part(tenant, '-')}-{_part(workspace, '-')}-{agent}")


def _are_default(tenant: str, workspace: str) -> bool:
    return (token(tenant, "tenant"), token(workspace, "workspace")) == (DEFAULT_TENANT, DEFAULT_WORKSPACE)


def _part(name: str, separator: str) -> str:
    """In front of a separator: none stands inside. `=`, since names of durables are keys in buckets."""
    return name.replace("=", "=3D").replace(separator, f"={ord(separator):02X}")


def _checked(name: str) -> str:
    if len(name) > NAME_BYTES_MAX:
        raise ContractViolation(
            f"the consumer name {name[:40]!r}… is longer than {NAME_BYTES_MAX} bytes",
            hint="Shorten the names of agent, tenant or workspace.",
        )
    if name.startswith(READER_PREFIX):
        raise ContractViolation(f"{READER_PREFIX}… is for readers that keep no position: {name!r}", field="agent")
    return name
