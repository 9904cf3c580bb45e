"""How a node comes to own a partition, and how it finds out what is stored when it is not sure. In this order:

    1  lease      see that its owner's session is over, and win the partition's entry by compare-and-set
    2  fence      unless its last owner left it in order: write a fence, so that no message of that one can follow
    3  snapshot   and the records behind it
    4  taken      append a record that says so, expecting the last one that was read; if another came between, read on
    5  messages   from the slowest group on; the first page now, the rest while requests are served

Only then is anything delivered. A cell in doubt does the same without the lease and on the state that it has.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from oncewire._ground.contracts import topics
from oncewire._ground.contracts.records import SAME_BATCH, decode_body, decode_packed
from oncewire._ground.errors import Conflict, Corrupt, NotFound, OncewireError, OutcomeUnknown, Unavailable
from oncewire._ground.jetstream import Client, Outgoing, Start, StoredMessage, codes, parse_reply
from oncewire._ground.jetstream.protocol import Message
from oncewire.broker.jetstream import names, packed
from oncewire.broker.jetstream.cell import Cell, Page, Phase

FIRST_PAGE: Final = 256
PAGE: Final = 1_000
TRIES_MAX: Final = 50
LOOK_AGAIN_S: Final = 0.02
READ_S: Final = 10.0
_log = logging.getLogger(__name__)


class Owned(msgspec.Struct, frozen=True):
    """A partition's entry: who has it, '' for nobody, and the fence of who left it in order."""

    node: str
    fence: int = 0


class Taker:
    """Takes partitions for a node. `on_step` is told each step by its name."""

    def __init__(self, client: Client, on_step: Callable[[str], None]) -> None:
        self._client = client
        self._kv = client.kv(names.LEASES)
        self._on_step = on_step

    async def owner_of(self, number: int, partition: int) -> Owned:
        return (await self._entry(number, partition))[0]

    async def _entry(self, number: int, partition: int) -> tuple[Owned, int]:
        entry = await self._kv.get(names.lease_of(number, partition))
        if entry is None:
            return Owned(""), 0
        return msgspec.json.decode(entry.value, type=Owned), entry.revision

    async def take(self, cell: Cell, end: Callable[[str], Awaitable[bool]]) -> str:
        """Make the cell its partition's owner, and open it. The name of the owner when there is one already, whose
        session cannot be ended."""
        owned, revision = await self._entry(*cell.key)
        if owned.node and owned.node != cell.node and not await end(owned.node):
            return owned.node
        self._on_step("lease")
        mine = msgspec.json.encode(Owned(cell.node, owned.fence))
        try:
            cell.lease_revision = await self._kv.update(names.lease_of(*cell.key), mine, revision)
        except Conflict:
            raise Unavailable("another node takes this partition just now", retry_after_s=0.05) from None
        cell.set_fence(owned.fence)
        if owned.node:
            self._on_step("fence")
            await self._write_fence(cell)
        self._on_step("replay")
        await self._read_snapshot(cell)
        await self._read_records(cell)
        self._on_step("taken")
        await self._read_messages(cell)
        cell.opened()
        self._on_step("open")
        return cell.node

    async def release(self, cell: Cell) -> None:
        """Leave a partition in order: who comes next needs no fence."""
        free = msgspec.json.encode(Owned("", cell.fence))
        await self._kv.update(names.lease_of(*cell.key), free, cell.lease_revision)

    async def read_again(self, cell: Cell) -> None:
        """After a commit whose outcome nobody knows: what is stored counts. Conflict when the partition is lost."""
        owned, _ = await self._entry(*cell.key)
        if owned.node != cell.node or not cell.home.is_held:
            raise Conflict(f"{cell.records_subject} belongs to {owned.node or 'nobody'}")
        await self._read_records(cell)
        self._on_step("reread")
        await self._write_fence(cell)
        last = await self._last(cell.topic.stream, cell.subject)
        if last > cell.message_sequence:
            await self._read_up_to(cell, cell.message_sequence + 1, last, is_new=True)
        cell.phase = Phase.OPEN

    async def find(self, cell: Cell, bodies: list[bytes], last: int) -> list[int]:
        """The sequences of messages that only this node can have written, one behind the other, up to the last."""
        found: list[StoredMessage] = []
        sequence = cell.message_sequence + 1
        while sequence <= last:
            page = await self._client.get_batch(cell.topic.stream, sequence=sequence, subject=cell.subject)
            if not page:
                break
            found += [one for one in page if one.sequence <= last]
            sequence = page[-1].sequence + 1
        mine = found[-len(bodies) :]
        if [one.payload for one in mine] != bodies:
            raise OutcomeUnknown(f"something else stands in {cell.subject} up to {last}", retry_after_s=1.0)
        return [one.sequence for one in mine]

    # ---- fences

    async def _write_fence(self, cell: Cell) -> None:
        """A fence behind all that the last owner stored. Its sequence is an offset that no message has."""
        stream, subject = cell.topic.stream, cell.fence_subject
        for _ in range(TRIES_MAX):
            last = await self._last(stream, subject)
            body = cell.node.encode()
            try:
                ack = await self._client.publish_one(
                    Outgoing(subject, body, expected_last_subject_sequence=last), raw=True
                )
            except Conflict:
                continue
            cell.set_fence(ack.sequence)
            return
        raise Unavailable("other nodes write fences for this partition without end", retry_after_s=0.1)

    async def _last(self, stream: str, subject: str) -> int:
        """The last sequence of a subject, asked of the leader: a replica may not have it yet."""
        try:
            answer = await self._client.api(f"STREAM.MSG.GET.{stream}", {"last_by_subj": subject})
        except NotFound as missing:
            if missing.server_code != codes.NO_MESSAGE_FOUND:
                raise
            return 0
        sequence: int = answer["message"]["seq"]
        return sequence

    # ---- records

    async def snapshot_stands_at(self, cell: Cell) -> int:
        return await self._last(topics.SNAPSHOTS, f"{names.snapshot_of(*cell.key)}.0")

    async def _read_snapshot(self, cell: Cell) -> None:
        found = await self._client.get_last_of(topics.SNAPSHOTS, [f"{names.snapshot_of(*cell.key)}.*"])
        parts = sorted(
            ((packed.decode_part(one.payload), one.sequence) for one in found), key=lambda part: part[0].number
        )
        if not parts or parts[0][0].number != 0:
            return
        first = parts[0][0]
        mine = [part for part, _ in parts if part.covers == first.covers and part.number < first.count]
        if len(mine) != first.count:
            raise Unavailable("a snapshot is not whole on this replica yet", retry_after_s=0.1)
        packed.take_in(cell.state, cell.partition, mine)
        cell.snapshot_sequence = parts[0][1]
        cell.snapshot_size = sum(len(part.kept) for part in mine)
        cell.record_sequence, cell.marks = first.covers, first.marks

    async def _read_records(self, cell: Cell) -> None:
        """Let all records count that were not read yet, and append that this node has taken the partition."""
        for _ in range(TRIES_MAX):
            last = await self._last(topics.RECORDS, cell.records_subject)
            while cell.record_sequence < last:
                await self._apply_records(cell, last)
            body = packed.taken(cell.node, last, cell.home.clock(), cell.topic)
            try:
                ack = await self._client.publish_one(
                    Outgoing(cell.records_subject, body, expected_last_subject_sequence=last), raw=True
                )
            except Conflict:
                continue
            cell.record_sequence = ack.sequence
            return
        raise Unavailable("other nodes write records of this partition without end", retry_after_s=0.1)

    async def _apply_records(self, cell: Cell, last: int) -> None:
        found = await self._client.get_batch(
            topics.RECORDS, sequence=cell.record_sequence + 1, subject=cell.records_subject
        )
        if not found:
            await asyncio.sleep(LOOK_AGAIN_S)  # this replica is not as far yet
        for one in found:
            record = decode_packed(one.payload)
            if record.after not in (cell.record_sequence, SAME_BATCH):
                raise Corrupt(
                    f"record {one.sequence} of {cell.records_subject} follows {record.after}, not"
                    f" {cell.record_sequence}",
                    hint="Records of a partition are missing: was the stream purged or restored?",
                )
            if cell.phase is Phase.DOUBTING and record.owner != cell.node:
                raise Conflict(f"node {record.owner} has taken {cell.records_subject}")
            cell.state.apply_all(record.records)
            cell.records_since += len(record.records)
            cell.record_sequence = one.sequence
            if one.sequence >= last:
                break

    # ---- messages

    async def _read_messages(self, cell: Cell) -> None:
        cell.message_sequence = last = await self._last(cell.topic.stream, cell.subject)
        cell.tail.reach(last)
        progress = [group.progress[cell.partition] for group in cell.state.groups.values()]
        floor = min((one.floor for one in progress), default=cell.messages.trimmed)
        cell.loaded_from = floor + 2
        if cell.messages.trimmed >= 0:
            cell.trims.append((cell.home.clock(), cell.messages.trimmed))
        if last < cell.loaded_from:
            cell.load([], is_last=True)
            return
        first = await self._client.get_batch(
            cell.topic.stream, sequence=cell.loaded_from, subject=cell.subject, count=FIRST_PAGE
        )
        page: Page = []
        for one in first:
            _add(
                page, cell, one.sequence, one.timestamp_ns, one.payload, "letter." in one.headers.get("Nats-Msg-Id", "")
            )
        reached = first[-1].sequence if first else cell.loaded_from - 1
        cell.load(page, is_last=reached >= last)
        if reached < last:
            task = asyncio.create_task(self._load_rest(cell, reached + 1, last), name="broker-load")
            cell.on_gone.append(lambda: _cancel(task))

    async def _load_rest(self, cell: Cell, first: int, last: int) -> None:
        while cell.phase is not Phase.GONE:
            try:
                first = await self._read_up_to(cell, first, last, is_new=False)
                return
            except OncewireError as error:
                _log.warning("messages of %s are read anew: %s", cell.subject, error)
                first = max(first, (cell.messages.offsets[-1] + 2) if len(cell.messages) else first)
                await asyncio.sleep(1.0)

    async def _read_up_to(self, cell: Cell, first: int, last: int, *, is_new: bool) -> int:
        """Read messages in order, none behind `last`: those are counted in when they are confirmed. New ones are
        appended, older ones go before those that came meanwhile."""
        start = Start(sequence=first)
        async with self._client.read(cell.topic.stream, subjects=[cell.subject], start=start, batch=PAGE) as reader:
            while first <= last:
                page: Page = []
                for message in await reader.fetch(timeout_s=READ_S):
                    first = _add_message(page, cell, message, last)
                if not page and first <= last:
                    raise Unavailable(f"{cell.subject} could not be read up to {last}")
                if is_new:
                    for one in page:
                        cell.messages.append(*one)
                    cell.load([], is_last=cell.messages.behind is None)
                    cell.message_sequence = first - 1
                else:
                    cell.load(page, is_last=first > last)
                    cell.home.wake(cell)
        return first

    async def read_prefix(self, cell: Cell) -> None:
        """Settled messages that are still kept, for a group that is new: it starts at the oldest."""
        first, end = cell.messages.trimmed + 2, cell.loaded_from
        if first >= end:
            return
        page: Page = []
        sequence = first
        while sequence < end:
            found = await self._client.get_batch(cell.topic.stream, sequence=sequence, subject=cell.subject)
            for one in found:
                if one.sequence < end:
                    _add(page, cell, one.sequence, one.timestamp_ns, one.payload, is_letter=False)
            if found:
                sequence = found[-1].sequence + 1
            elif await self._has_more(cell, sequence, end):
                await asyncio.sleep(LOOK_AGAIN_S)  # this replica is not as far yet
            else:
                break
        if cell.loaded_from == end:
            cell.loaded_from = first
            cell.messages.prepend(page)
            cell.state.hold_again(cell.held)

    async def _has_more(self, cell: Cell, first: int, end: int) -> bool:
        """Whether the partition has a message in there, asked of the leader."""
        try:
            found = await self._client.get_next(cell.topic.stream, first, cell.subject, is_exact=True)
        except NotFound as missing:
            if missing.server_code != codes.NO_MESSAGE_FOUND:
                raise
            return False
        return found.sequence < end


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()


def _add_message(page: Page, cell: Cell, message: Message, last: int) -> int:
    """Returns where to read on."""
    delivery = parse_reply(message.reply)
    if delivery.sequence > last:
        return last + 1
    is_letter = b"Nats-Msg-Id: letter." in message.header_raw
    _add(page, cell, delivery.sequence, delivery.timestamp_ns, message.payload, is_letter)
    return delivery.sequence + 1


def _add(page: Page, cell: Cell, sequence: int, timestamp_ns: int, payload: bytes, is_letter: bool) -> None:
    try:
        body = decode_body(payload)
    except (msgspec.DecodeError, IndexError):
        _log.warning("message %d of %s is not the broker's and is left out", sequence, cell.topic.stream)
        return
    cell.held.is_graveyard |= is_letter
    size = len(body.key.encode()) + len(body.value.encode())
    page.append((sequence - 1, timestamp_ns // 1_000_000, size, payload))
