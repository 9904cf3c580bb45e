"""Which topics there are: a bucket that all nodes watch, and a stream for each topic.

The entry decides: who writes it first makes the topic, its revision is the topic's number, and deleting it deletes the
topic. All else follows and has the number in its name, which never comes back: whoever needs it makes what a crash left
out, and what a crash or a late node left behind can be taken away at any time, whatever has that name by then. A
deleted topic's stream goes last: as long as it is there, `sweep` finds it and takes away the rest too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any, Final

import msgspec

from oncewire._ground.contracts import topics
from oncewire._ground.errors import Conflict, NotFound, OncewireError, Unavailable
from oncewire._ground.jetstream import Client, StoredMessage, codes
from oncewire._ground.jetstream import Entry as Change
from oncewire.broker.jetstream import names
from oncewire.broker.jetstream.sending import has_ingest

WINDOW_MS_MIN: Final = 100
"""The server's own least duplicate window."""
WATCH_AGAIN_S: Final = 0.25
CATCH_UP_S_MAX: Final = 5.0
SWEEP_S: Final = 3_600.0
_log = logging.getLogger(__name__)


class Entry(msgspec.Struct, frozen=True):
    partitions: int
    at_ms: int


class Listed(msgspec.Struct, frozen=True, weakref=True):
    """A topic as all nodes know it."""

    number: int
    tenant: str
    name: str
    count: int
    at_ms: int
    stream: str
    prefix: str

    @property
    def partitions(self) -> range:
        return range(self.count)


def listed(number: int, tenant: str, name: str, entry: Entry) -> Listed:
    stream, prefix = topics.stream_of(tenant, name, number), topics.prefix_of(tenant, name, number)
    return Listed(number, tenant, name, entry.partitions, entry.at_ms, stream, prefix)


_decode_entry = msgspec.json.Decoder(Entry).decode


def _is_past(last: StoredMessage | None, number: int) -> bool:
    """Whether this says that the topic with the number was deleted."""
    return last is not None and last.sequence > number


class Catalog:
    """See the module's head. `gone` is told each topic that is no more."""

    def __init__(
        self,
        client: Client,
        replicas: int,
        window_ms: int,
        gone: Callable[[Listed], None],
        on_step: Callable[[str], None],
    ) -> None:
        self._client = client
        self._kv = client.kv(names.TOPICS)
        self._replicas = replicas
        self._window_ns = max(window_ms, WINDOW_MS_MIN) * 1_000_000
        self._gone = gone
        self._on_step = on_step
        self._seen = 0
        self._moved = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.topics: dict[tuple[str, str], Listed] = {}
        self.numbered: dict[int, Listed] = {}

    async def open(self) -> None:
        self._task = asyncio.create_task(self._watch(), name="broker-topics")
        await self.catch_up()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    # ---- watching

    async def _watch(self) -> None:
        while True:
            try:
                async with contextlib.aclosing(self._kv.watch()) as changes:
                    async for change in changes:
                        self._hear(change)
                        self._seen = max(self._seen, change.revision)
                        self._moved.set()
            except OncewireError as error:
                _log.warning("the list of topics is watched anew: %s", error)
                await asyncio.sleep(WATCH_AGAIN_S)

    def _hear(self, change: Change) -> None:
        try:
            tenant, name = names.names_of(change.key)
            if change.is_deleted:
                self._drop(tenant, name, change.revision)
            else:
                self._add(listed(change.revision, tenant, name, _decode_entry(change.value)))
        except (ValueError, msgspec.DecodeError) as error:
            _log.warning("%r in the list of topics is not the broker's and is left out: %s", change.key, error)

    def _add(self, topic: Listed) -> None:
        """What was asked for may come late: of what the watch has passed it knows best."""
        key = (topic.tenant, topic.name)
        known = self.topics.get(key)
        if known is None and topic.number <= self._seen:
            return
        if known is not None and known.number < topic.number:
            self._drop(*key, topic.number)
        if known is None or known.number < topic.number:
            self.topics[key] = topic
            self.numbered[topic.number] = topic

    def _drop(self, tenant: str, name: str, revision: int) -> None:
        known = self.topics.get((tenant, name))
        if known is not None and known.number < revision:
            del self.topics[tenant, name]
            self.numbered.pop(known.number, None)
            self._gone(known)

    async def catch_up(self) -> None:
        """Know at least all that stood there when this was asked."""
        info = await self._client.api(f"STREAM.INFO.KV_{names.TOPICS}")
        last = info["state"]["last_seq"] if info["state"]["messages"] else 0
        try:
            async with asyncio.timeout(CATCH_UP_S_MAX):
                while self._seen < last:
                    self._moved.clear()
                    await self._moved.wait()
        except TimeoutError:
            raise Unavailable("the list of topics is not known whole yet", retry_after_s=0.5) from None

    # ---- topics

    async def find(self, tenant: str, name: str) -> Listed | None:
        """A topic, also one that another node has just made."""
        if (known := self.topics.get((tenant, name))) is not None:
            return known
        last = await self._last_of(tenant, name)
        if last is not None and last.payload:  # a deletion is empty
            self._add(listed(last.sequence, tenant, name, _decode_entry(last.payload)))
        return self.topics.get((tenant, name))

    async def create(self, tenant: str, name: str, partitions: int, now_ms: int, window_ms: int = 0) -> Listed:
        """Make a topic, or find the one that is there."""
        entry = Entry(partitions, now_ms)
        try:
            number = await self._kv.create(names.key_of(tenant, name), msgspec.json.encode(entry))
        except Conflict:
            if (known := await self.find(tenant, name)) is None:
                raise Unavailable(f"topic {name!r} is being made or deleted just now", retry_after_s=0.1) from None
        else:
            known = listed(number, tenant, name, entry)
            self._add(known)
            self._on_step("entry")
        await self.ensure(known, window_ms)
        return known

    async def delete(self, topic: Listed) -> None:
        """Its entry goes first: from then on it is gone, whatever is left of it."""
        await self._kv.delete(names.key_of(topic.tenant, topic.name), topic.number)
        self._drop(topic.tenant, topic.name, topic.number + 1)
        self._on_step("unlisted")
        await self._clear(topic.stream, topic.number)

    async def _clear(self, stream: str, number: int) -> None:
        """Take away all that a topic had. Its stream goes last, so that it shows what is left to do."""
        for shared, subject in (
            (topics.RECORDS, f"broker_records.{number}.>"),
            (topics.SNAPSHOTS, f"broker_snapshots.{number}.>"),
            (f"KV_{names.LEASES}", f"$KV.{names.LEASES}.part.{number}.>"),
            (f"KV_{names.LEASES}", f"$KV.{names.LEASES}.group.{number}.>"),
        ):
            await self._client.api(f"STREAM.PURGE.{shared}", {"filter": subject})
        self._on_step("cleared")
        with contextlib.suppress(NotFound):
            await self._client.api(f"STREAM.DELETE.{stream}")

    async def sweep_for_ever(self) -> None:
        while True:
            try:
                await self.sweep()
            except OncewireError as error:
                _log.info("what deleted topics left behind stays for now: %s", error.message)
            await asyncio.sleep(SWEEP_S)

    async def sweep(self) -> None:
        """Finish the deletions that others began. The streams are listed first, so that the entry of each that is a
        topic has been heard of after that."""
        streams: list[str] = []
        is_more = True
        while is_more:
            page = await self._client.api("STREAM.NAMES", {"subject": topics.SUBJECTS, "offset": len(streams)})
            streams += page["streams"] or []
            is_more = bool(page["streams"]) and len(streams) < page["total"]
        await self.catch_up()
        known = {topic.stream for topic in self.topics.values()}
        for stream in streams:
            if stream not in known:
                await self._sweep_stream(stream)

    async def _sweep_stream(self, stream: str) -> None:
        bears = topics.read_metadata((await self._find_stream(stream)).get("metadata") or {})
        if bears is None:
            return
        if _is_past(await self._last_of(bears.tenant, bears.topic), bears.number):
            _log.info("%s is left of a deleted topic and is taken away", stream)
            await self._clear(stream, bears.number)
        else:
            _log.warning("%s is no topic, and nothing says that one was deleted: it stays", stream)

    # ---- streams

    async def ensure(self, topic: Listed, window_ms: int = 0) -> None:
        """See that the topic's stream is there, and that it refuses repeated ids for so long: a dead letter must stay
        single as long as it lives."""
        window_ns = max(self._window_ns, window_ms * 1_000_000)
        found = await self._find_stream(topic.stream) or await self._make(topic, window_ns)
        wanted = self._allowed() | {"duplicate_window": max(window_ns, found.get("duplicate_window", 0))}
        if not wanted.items() <= found.items():
            await self._client.api(f"STREAM.UPDATE.{topic.stream}", found | wanted)

    def _allowed(self) -> dict[str, Any]:
        """What not every server has: a stream may have been made on an older one."""
        return {"allow_batched": True} if has_ingest(self._client.connection) else {}

    async def _find_stream(self, stream: str) -> dict[str, Any]:
        """Its configuration; empty when there is none."""
        try:
            info = await self._client.api(f"STREAM.INFO.{stream}")
        except NotFound:
            return {}
        found: dict[str, Any] = info["config"]
        return found

    async def _make(self, topic: Listed, window_ns: int) -> dict[str, Any]:
        """The topic is looked up after that: one that was deleted meanwhile must not keep a stream."""
        try:
            info = await self._client.api(f"STREAM.CREATE.{topic.stream}", self._config(topic, window_ns))
            made: dict[str, Any] = info["config"]
        except Conflict as error:
            if error.server_code != codes.STREAM_NAME_IN_USE:
                raise
            made = await self._find_stream(topic.stream)  # another node was quicker, with another window
        last = await self._last_of(topic.tenant, topic.name)
        if last is None or last.sequence != topic.number:
            if _is_past(last, topic.number):
                await self._clear(topic.stream, topic.number)
            raise NotFound("topic does not exist")
        return made

    async def _last_of(self, tenant: str, name: str) -> StoredMessage | None:
        """What was written last of a topic, its deletion included. Asked of the leader: a replica may be behind."""
        subject = f"$KV.{names.TOPICS}.{names.key_of(tenant, name)}"
        try:
            return await self._client.get_last(f"KV_{names.TOPICS}", subject, is_exact=True)
        except NotFound as missing:
            if missing.server_code == codes.STREAM_NOT_FOUND:
                raise
            return None

    def _config(self, topic: Listed, window_ns: int) -> dict[str, Any]:
        return {
            "name": topic.stream,
            "description": "A topic of the broker",
            "subjects": [f"{topic.prefix}.>"],
            "retention": "limits",
            "storage": "file",
            "discard": "old",
            "num_replicas": self._replicas,
            "duplicate_window": window_ns,
            "allow_direct": True,
            "allow_atomic": True,
            **self._allowed(),
            "metadata": {
                topics.NUMBER: str(topic.number),
                topics.NAME: topic.name,
                topics.TENANT: topic.tenant,
                topics.PARTITIONS: str(topic.count),
            },
        }
