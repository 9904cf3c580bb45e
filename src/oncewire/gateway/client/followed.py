"""What a client knows about a room that it follows: changed by `rules` alone."""

from __future__ import annotations

from collections import deque

from msgspec import Struct

from oncewire.gateway.client.actions import Frame, Missing


class Item(Struct, frozen=True):
    """In a room's queue: a message, a gap, or (neither) a number that needs no handler."""

    sequence: int
    envelope: Frame | None = None
    gap: Missing | None = None


class Repair(Struct):
    """History is being fetched. The number tells its answer from an answer to an earlier one."""

    number: int
    up_to: int
    after: int
    failures: int
    retry_at: int | None = None


class Followed:
    """What is known about one room."""

    def __init__(self, name: str, sequence: int | None, epoch: str | None, mode: str, client_id: str | None) -> None:
        self.name = name
        self.mode = mode
        self.client_id = client_id
        self.epoch = epoch
        self.received = sequence
        """The last sequence that was taken in."""
        self.done = sequence
        """The last sequence whose handler is done."""
        self.acked: int | None = None
        """The last sequence that this connection acknowledged."""
        self.is_joined = False
        self.is_open = False
        """It had no message when it was joined: the gateway says where it begins once it has one."""
        self.queue: deque[Item] = deque()
        """The first one may be in the handler's hands."""
        self.is_busy = False
        self.is_behind = False
        """The queue was full: what came then is asked for again."""
        self.failures = 0
        self.retry_at: int | None = None
        self.refusals = 0
        """Joins in a row that the gateway refused for now."""
        self.join_at: int | None = None
        """When the next one is sent."""
        self.asked_after: int | None = None
        """The position at which a jump was already asked about."""
        self.asked_at = 0
        """When that was: what was on its way then may still come."""
        self.repair: Repair | None = None
        self.unhelped = 0
        """Repairs in a row after which no message came: then the next one waits."""
        self.seen: dict[str, None] = {}
        self.new_epoch: str | None = None
        """What the gateway said on joining."""
        self.presence: Frame | None = None
