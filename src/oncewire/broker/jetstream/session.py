"""Who is there, and for how long: a key for each node, written again every third of its lease.

A node holds its partitions as long as it holds its session. It counts the lease from before it sent the write that was
confirmed last; the others count from when they saw that write, so all need no clock but a monotonic one. But a watch
may be late, or broken: that nothing was heard of a node does not say that it is gone. Whoever wants what it has ends
its session first (`end`): takes its key away, on the revision that was seen a lease ago. That fails when the node has
renewed it, and when it succeeds the node can renew no more. A session that ended is not taken up again: its node begins
another one, under another name, and has to win its partitions anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from typing import Final

import msgspec

from oncewire._ground.errors import Conflict, OncewireError, Unavailable
from oncewire._ground.jetstream import Client, State
from oncewire._ground.jetstream.pull import HEARTBEAT_S
from oncewire.broker.jetstream import names

RENEW_SHARE: Final = 3
HEARTBEAT_S_MIN: Final = 0.5
FORGET_LEASES: Final = 10
"""So many leases after its end a session's key is taken away."""
ENDED_MAX: Final = 1_000
LEAVE_S: Final = 1.0
WATCH_AGAIN_S: Final = 0.1
_log = logging.getLogger(__name__)


class Sign(msgspec.Struct, frozen=True):
    """What a node writes of itself."""

    lease_ms: int


class _Peer:
    __slots__ = ("heard_at", "lease_s", "revision")

    def __init__(self, revision: int, lease_s: float, heard_at: float) -> None:
        self.revision = revision
        self.lease_s = lease_s
        self.heard_at = heard_at


class Session:
    """See the module's head. `lost` is called when the lease ran out, `begun` when there is a new one, `changed` when
    nodes came or went."""

    def __init__(
        self,
        client: Client,
        lease_ms: int,
        lost: Callable[[], None],
        begun: Callable[[], None],
        changed: Callable[[], None],
    ) -> None:
        self._client = client
        self._kv = client.kv(names.LEASES)
        self._lease_s = lease_ms / 1000
        self._sign = msgspec.json.encode(Sign(lease_ms))
        self._lost = lost
        self._begun = begun
        self._changed = changed
        self._peers: dict[str, _Peer] = {}
        self._ended: dict[str, None] = {}
        """Sessions that are over, the latest: they never come back."""
        self._tasks: list[asyncio.Task[None]] = []
        self._revision = 0
        self._ends_at = 0.0
        self.node = ""
        self.begun = 0
        """How many leases, so far."""

    async def open(self) -> None:
        await self._begin()
        self._tasks = [
            asyncio.create_task(self._watch(), name="broker-nodes"),
            asyncio.create_task(self._keep(), name="broker-session"),
        ]

    async def close(self) -> None:
        """Leave, so that nobody has to wait for the lease to end."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        is_held, self._ends_at = self.is_held, 0.0
        if is_held and self._client.state is State.CONNECTED:
            with contextlib.suppress(OncewireError, TimeoutError):
                async with asyncio.timeout(LEAVE_S):
                    await self._kv.delete(f"node.{self.node}", self._revision)

    @property
    def is_held(self) -> bool:
        return time.monotonic() < self._ends_at

    @property
    def nodes(self) -> list[str]:
        """All that are there, this one included."""
        now = time.monotonic()
        others = [name for name, peer in self._peers.items() if now < peer.heard_at + peer.lease_s]
        return [*others, self.node] if self.node not in others else others

    def is_there(self, node: str) -> bool:
        if node == self.node:
            return self.is_held
        peer = self._peers.get(node)
        return peer is not None and time.monotonic() < peer.heard_at + peer.lease_s

    async def end(self, node: str) -> bool:
        """See that a session is over; False when it is not, as far as anybody can know."""
        if node in self._ended:
            return True
        peer = self._peers.get(node)
        if peer is not None and time.monotonic() < peer.heard_at + peer.lease_s:
            return False
        is_ended = peer is not None and await self._clear(node, peer.revision)
        if not is_ended and (entry := await self._kv.get(f"node.{node}", is_exact=True)) is not None:
            self._hear(node, entry.revision, entry.value, is_deleted=False)
            return False
        self._is_over(node)
        return True

    def _is_over(self, node: str) -> None:
        self._peers.pop(node, None)
        self._ended[node] = None
        if len(self._ended) > ENDED_MAX:
            del self._ended[next(iter(self._ended))]

    # ---- keeping it

    async def _begin(self) -> None:
        node, sent_at = secrets.token_hex(6), time.monotonic()
        self._revision = await self._kv.create(f"node.{node}", self._sign)
        self.node = node
        self._ends_at = sent_at + self._lease_s
        self.begun += 1
        self._begun()

    async def _keep(self) -> None:
        pause_s = self._lease_s / RENEW_SHARE
        while True:
            await asyncio.sleep(pause_s)
            self._forget_dead()
            try:
                if self.is_held:
                    await self._renew(pause_s)
                else:
                    self._is_over(self.node)
                    self._lost()
                    await self._begin()
            except Conflict:
                await self._look_again()
            except (OncewireError, TimeoutError) as error:
                _log.info("the session was not renewed: %s", error)

    async def _look_again(self) -> None:
        """Nobody else writes our key: it is gone, or a write of ours went through without an answer."""
        with contextlib.suppress(OncewireError):
            entry = await self._kv.get(f"node.{self.node}", is_exact=True)
            self._revision = entry.revision if entry is not None else 0
            if entry is None:
                self._ends_at = 0.0

    async def _renew(self, timeout_s: float) -> None:
        sent_at = time.monotonic()
        async with asyncio.timeout(timeout_s):
            self._revision = await self._kv.update(f"node.{self.node}", self._sign, self._revision)
        self._ends_at = sent_at + self._lease_s

    # ---- the others

    async def _watch(self) -> None:
        while True:
            try:
                heartbeat_s = min(HEARTBEAT_S, max(HEARTBEAT_S_MIN, self._lease_s / RENEW_SHARE))
                async with contextlib.aclosing(self._kv.watch("node.>", heartbeat_s=heartbeat_s)) as changes:
                    async for change in changes:
                        self._hear(change.key.removeprefix("node."), change.revision, change.value, change.is_deleted)
            except Unavailable as error:
                _log.info("the nodes are watched anew: %s", error)
            except OncewireError as error:
                _log.warning("the nodes are watched anew: %s", error)
            await asyncio.sleep(WATCH_AGAIN_S)

    def _hear(self, node: str, revision: int, value: bytes, is_deleted: bool) -> None:
        if node == self.node:
            return
        known = self._peers.get(node)
        if is_deleted:
            self._is_over(node)
        elif node in self._ended:
            return  # what was asked for has come before what the watch brings
        elif known is None or known.revision < revision:
            try:
                lease_s = msgspec.json.decode(value, type=Sign).lease_ms / 1000
            except msgspec.DecodeError as error:
                _log.warning("%r in the list of nodes is not the broker's and is left out: %s", node, error)
                return
            self._peers[node] = _Peer(revision, lease_s, time.monotonic())
        if is_deleted or known is None:
            self._changed()

    def _forget_dead(self) -> None:
        now = time.monotonic()
        for name, peer in list(self._peers.items()):
            if now > peer.heard_at + FORGET_LEASES * peer.lease_s:
                del self._peers[name]
                task = asyncio.create_task(self._forget(name, peer.revision))
                self._tasks = [*(one for one in self._tasks if not one.done()), task]

    async def _forget(self, node: str, revision: int) -> None:
        with contextlib.suppress(OncewireError):
            await self._clear(node, revision)

    async def _clear(self, node: str, revision: int) -> bool:
        """Take its key away, unless it was written again."""
        try:
            await self._kv.delete(f"node.{node}", revision)
        except Conflict:
            return False
        return True
