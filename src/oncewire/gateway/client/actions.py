"""What the rules of a client of rooms are told and what they ask for. Pure values, without behaviour."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from msgspec import UNSET, Struct, UnsetType, field

Frame: TypeAlias = dict[str, Any]
"""A frame or an envelope as JSON gave it: envelopes go through untouched."""
Phase = Literal["idle", "connecting", "open", "waiting", "closed"]
PresenceState = Literal["online", "offline", "typing", "idle"]


class Limits(Struct, frozen=True, rename="camel"):
    """Limits and times of a client."""

    backoff_first_ms: int = 2_000
    backoff_most_ms: int = 30_000
    connect_ms: int = 10_000
    heartbeat_ms: int = 15_000
    silence_ms: int = 35_000
    ack_ms: int = 50
    ack_count: int = 64
    queue_most: int = 1_000
    seen_most: int = 1_000
    history_limit: int = 200


class _Action(Struct, frozen=True, rename="camel", tag_field="type", tag=str.lower):
    pass


class Connect(_Action, frozen=True):
    """Open a WebSocket; then say `opened` or `closed`."""


class Close(_Action, frozen=True):
    """Let go of the WebSocket. Its end is not waited for."""

    code: int


class Send(_Action, frozen=True):
    """Send a frame."""

    frame: Frame


class State(_Action, frozen=True):
    """The connection is in another phase."""

    state: Phase
    retry_ms: int | UnsetType = UNSET
    code: int | UnsetType = UNSET
    reason: str | UnsetType = UNSET
    """Why, where the gateway or the credential's source said so."""


class RoomState(_Action, frozen=True, tag="room"):
    """The gateway has this client in a room, has not for now (`waiting`: it is joined again), or will not (`refused`:
    it is joined again with the next connection)."""

    room: str
    state: Literal["joined", "waiting", "refused"]
    epoch: str | UnsetType | None = UNSET
    retry_ms: int | UnsetType = UNSET
    code: str | UnsetType = UNSET
    reason: str | UnsetType = UNSET


class Deliver(_Action, frozen=True):
    """Give a message to the room's handler; then say `processed` or `failed`."""

    room: str
    sequence: int
    envelope: Frame


class Missing(Struct, frozen=True):
    """Sequences that nobody has any more: from..to, both missing."""

    first: int = field(name="from")
    last: int = field(name="to")


class Gap(_Action, frozen=True):
    """Tell the room's handler what is missing; then say `processed` or `failed`."""

    room: str
    sequence: int
    gap: Missing


class Event(_Action, frozen=True):
    """Something else happened in a room: presence, or an answer that begins or ends."""

    room: str
    envelope: Frame


class Fetch(_Action, frozen=True):
    """Ask for history; then say `history` or `history_failed` with the same `repair`."""

    room: str
    after: int
    limit: int
    repair: int


class Problem(_Action, frozen=True, tag="error"):
    """For a person to see. What can be tried again will be."""

    room: str | None
    message: str


Action: TypeAlias = Connect | Close | Send | State | RoomState | Deliver | Gap | Event | Fetch | Problem


class Page(Struct, frozen=True):
    """A page of history."""

    messages: list[Frame]
    next: int | None
    complete: bool


class Position(Struct, frozen=True):
    """How far a room is done: what a later client passes as `resume`."""

    sequence: int
    epoch: str | None
