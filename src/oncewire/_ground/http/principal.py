"""Who asks. Every handler gets a Principal, also where authentication is off: then it is `ANYONE`."""

from __future__ import annotations

from dataclasses import dataclass

from oncewire._ground.errors import AuthenticationFailed, PermissionDenied

EVERY_TENANT = "metrics:every-tenant"
"""The one grant that reaches beyond a tenant: only who holds it by its full name has it, never through a `*`."""
KNOWN = "known"
"""The action of what every credential allows."""


@dataclass(frozen=True)
class Principal:
    """The tenant whose things are meant, and what may be done with them: an action, or `action:name`, where a `*` at
    the end stands for any rest. `name` is who, as logs and positions know them; '' when nobody said."""

    tenant: str
    actions: frozenset[str]
    name: str = ""
    voucher: str = ""
    """What vouches for it: `key:ID`, or `signer:ID` of a token. Once that is gone, so are its rights."""
    until_s: float = float("inf")
    """Unix time at which its credential ends."""
    is_ticket: bool = False

    def may(self, action: str, thing: str = "") -> bool:
        """Without a thing: whether the action is allowed at all, on whatever it may be."""
        if action == KNOWN:
            return self is not NOBODY
        actions = self.actions
        if "*" in actions or action in actions:
            return True
        begin = f"{action}:"
        named = [one[len(begin) :] for one in actions if one.startswith(begin)]
        if not thing:
            return bool(named)
        return any(thing == one or (one[-1:] == "*" and thing.startswith(one[:-1])) for one in named)

    def holds(self, grant: str) -> bool:
        """Whether it was given exactly this."""
        return grant in self.actions

    def is_bound(self, kind: str) -> bool:
        """Whether it is bound to certain things of this kind: then each must be among them."""
        return any(one.startswith(f"{kind}:") for one in self.actions)

    def require(self, action: str, thing: str = "") -> None:
        """AuthenticationFailed for nobody, PermissionDenied for somebody else."""
        if self.may(action, thing):
            return
        if self is NOBODY:
            raise AuthenticationFailed("a credential is needed: an API key or a token")
        what = f"{action} {thing}" if thing else action
        raise PermissionDenied(f"the credential does not allow to {what}")


ANYONE = Principal("", frozenset({"*"}))
"""Without authentication, which only loopback listeners may do: one tenant, everything allowed."""

NOBODY = Principal("", frozenset())
"""With authentication, who sent no credential: only what is open to all."""
