"""What a credential may allow: an action, or an action on certain things. Pure.

    produce              every topic of the tenant
    produce:orders       this topic
    produce:orders.*     topics whose names begin with `orders.`
    *                    everything within the tenant

A grant never crosses tenants: the tenant is the credential's, and every store key begins with it. The one exception is
for whoever watches the server: `metrics:every-tenant`, which no other grant holds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from oncewire._ground.errors import InvalidSetting
from oncewire._ground.http.principal import EVERY_TENANT

ACTIONS: Final = {
    "read": "see topics, groups, streams, letters, runs and how they stand",
    "produce": "put messages into a topic",
    "consume": "take messages of a topic for a group, and settle them",
    "group": "as group:NAME only: consume for these groups and no others",
    "join": "hear a conversation: rooms, history, tokens",
    "speak": "show presence in a conversation, and stop a running answer",
    "replay": "bring dead letters back, or drop them; acknowledge losses",
    "metrics": "read metrics: the server's, and of topics its tenant's; metrics:every-tenant for everybody's",
    "admin": "make and delete topics, change what is declared",
}
GRANT_CHARS_MAX: Final = 300
GRANTS_MAX: Final = 100


def check_grants(sent: Iterable[str]) -> frozenset[str]:
    """The grants as they are kept. InvalidSetting when one of them could mean nothing."""
    grants = frozenset(one.strip() for one in sent)
    if not grants:
        raise InvalidSetting("a credential without a grant may do nothing", hint=_known())
    if len(grants) > GRANTS_MAX:
        raise InvalidSetting(f"a credential holds at most {GRANTS_MAX} grants")
    for grant in grants:
        action, colon, thing = grant.partition(":")
        if len(grant) > GRANT_CHARS_MAX or not grant.isprintable():
            raise InvalidSetting("a grant is one line of at most 300 printable characters")
        if grant != "*" and action not in ACTIONS:
            raise InvalidSetting(f"{action[:80]!r} is not something that can be allowed", hint=_known())
        if colon and (not thing or "*" in thing[:-1]):
            raise InvalidSetting(f"{grant!r} names nothing: a `*` stands at the end or nowhere")
    return grants


def covers(held: Iterable[str], wanted: str) -> bool:
    """Whether who holds these grants has all that the wanted one allows, and not just a part of it."""
    if wanted == EVERY_TENANT:
        return wanted in set(held)
    for grant in held:
        if grant in ("*", wanted, wanted.partition(":")[0]):
            return True
        if grant.endswith("*") and ":" in grant and wanted.startswith(grant[:-1]):
            return True
    return False


def is_bound_to_groups(held: Iterable[str]) -> bool:
    """A `group:NAME` takes away what it does not name: who leaves it out would hold more, not less."""
    grants = set(held)
    return not grants & {"*", "group"} and any(one.startswith("group:") for one in grants)


def is_within(wanted: Iterable[str], held: Iterable[str]) -> bool:
    """Whether who holds the second may do all that the first allows."""
    asked, grants = list(wanted), list(held)
    if is_bound_to_groups(grants) and not is_bound_to_groups(asked):
        return False
    return all(covers(grants, one) for one in asked)


def _known() -> str:
    return f"Known are: {', '.join(ACTIONS)}; each alone, or with a name as in produce:orders."
