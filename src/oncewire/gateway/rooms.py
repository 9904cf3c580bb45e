"""The rules of a room: who gets which envelope, and when. Pure: no clock, no I/O, no chance.

A room is one conversation on one node. It follows the conversation's subject in the order of the stream, so that it
knows everything up to its `place` (a stream sequence), and keeps the last messages as its backlog. Numbered messages
(`chat.message.created`) have sequences 1, 2, 3 … in their conversation; everything else is unnumbered and carries the
last sequence that its producer knew.

A member is one connection in the room, in one of three phases:

    live      has everything up to the room's last message: gets what comes, in the same write as all the others
    behind    is being brought up, from the backlog or page by page from the stream; or does not read fast enough
    waiting   was told that messages are missing (control frame); gets nothing until it says where to resume

    join, resume_from_seq ──► behind ──has the room's last──► live ──its buffer is full──► behind
    behind, live ──a gap that is not in the stream, or another history──► waiting ──resume_from_seq, join──► behind

What every member gets from one join on is last + 1, last + 2, …: nothing twice, nothing left out, nothing in another
order, and an unnumbered envelope only after the message whose sequence it carries. Where that cannot be kept the member
gets the control frame, which names the last sequence that cannot be had here, or a later one: in a lively room that
edge moves while the member fetches history.

A stream forgets: the messages of a conversation that was quiet for long are only in the archive. Then the room begins
with what the archive says of its last message, and members that have less get the control frame.

Methods return what the shell must do, in this order. `Load` and `Fetch` are answered later by `loaded` and `fetched`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from itertools import islice
from operator import attrgetter
from typing import Final, NamedTuple, Protocol

from oncewire._ground.errors import OncewireError
from oncewire.gateway.frames import Conversation, Envelope, control_frame, joined_frame
from oncewire.gateway.slabs import Slab, Slabs

HELD_MAX: Final = 256
"""Unnumbered envelopes that wait for a message, in a room and for a member. Beyond that the oldest are dropped."""

_sequence = attrgetter("sequence")

Write = Callable[[bytes], None]
"""A member's way out: the shell's, called by the shell."""


class Archived(NamedTuple):
    """The newest message of a conversation that the archive knows; sequence 0 when it knows none."""

    sequence: int = 0
    epoch: str | None = None


NOTHING_ARCHIVED: Final = Archived()


class Phase(Enum):
    """Where a member stands. See the module's head."""

    LIVE = "live"
    BEHIND = "behind"
    WAITING = "waiting"


class Owner(Protocol):
    """The connection behind a member, as the shell tells it what became of a frame."""

    def refused(self, conversation_id: str, frame: str, error: OncewireError) -> None:
        """It is not in the room, and has to send the frame again."""


class Member:
    """One connection in a room. `last` is the sequence of the last message that it got, or said it has."""

    __slots__ = ("epoch", "held", "is_full", "is_open", "last", "owner", "phase", "place", "write")

    def __init__(self, owner: Owner, write: Write) -> None:
        self.owner = owner
        self.write = write
        self.phase = Phase.BEHIND
        self.last = 0
        self.epoch: str | None = None
        self.is_open = False
        """It asked for what comes, in a room of which nothing is known: any message may be its first. A second `joined`
        then says where it began."""
        self.place = 0
        """A stream sequence at or before which `last` stands; 0 when that is not known."""
        self.held: deque[Envelope] | None = None
        self.is_full = False
        """The shell says that its buffer is full."""


class Say:
    """Write these bytes, the same to each."""

    __slots__ = ("data", "writes")

    def __init__(self, writes: Sequence[Write], data: bytes) -> None:
        self.writes = writes
        self.data = data


class Load:
    """Read the subject and answer with `loaded`: behind the stream sequence `after`, or, when that is None, as much of
    its end as fills the backlog. In any case up to its end, and at least to `up_to`."""

    __slots__ = ("after", "up_to")

    def __init__(self, after: int | None, up_to: int) -> None:
        self.after = after
        self.up_to = up_to


class Fetch:
    """Read a page of messages above the sequence `after`, up to the place `end`, and answer with `fetched`: one page
    for all members that need it. `place` is where `after` stands or before that, 0 when it is not known."""

    __slots__ = ("after", "end", "place")

    def __init__(self, after: int, place: int, end: int) -> None:
        self.after = after
        self.place = place
        self.end = end


class Pump:
    """Call `step` for this member, soon and in turn with others, until it returns None."""

    __slots__ = ("member",)

    def __init__(self, member: Member) -> None:
        self.member = member


Act = Say | Load | Fetch | Pump


class Joining:
    """What a client asked for: `after` is None for live only. Who resumes is in the room already,
    and is told the epoch only if it names none."""

    __slots__ = ("after", "epoch", "is_looked_for", "is_resume", "member")

    def __init__(self, member: Member, after: int | None, epoch: str | None, is_resume: bool) -> None:
        self.member = member
        self.after = after
        self.epoch = epoch
        self.is_resume = is_resume
        self.is_looked_for = False
        """A reading began since it was asked."""

    @property
    def frame(self) -> str:
        """The frame in which it was asked."""
        return "resume_from_seq" if self.is_resume else "join_room"


class Room:
    """See the module's head."""

    def __init__(self, conversation: Conversation, backlog_size: int, slabs: Slabs | None = None) -> None:
        self.conversation = conversation
        self.slabs = slabs or Slabs()
        self.backlog: deque[Envelope] = deque(maxlen=backlog_size)
        """Numbered messages without a gap; the newest is the room's last."""
        self.last = 0
        """The sequence of the newest message, 0 when neither the stream nor the archive holds one."""
        self.epoch: str | None = None
        self.place = 0
        """Everything on the subject up to this stream sequence is known here."""
        self.last_place = 0
        """Where the newest message stands, 0 when it is not in the stream."""
        self.live: dict[Member, Write] = {}
        self.members: dict[Member, None] = {}
        self.dropped = 0
        """Unnumbered envelopes that waited in vain."""
        self._arrived: list[Envelope] = []
        """What came while the subject was being read."""
        self._joining: dict[Member, Joining] = {}
        self._held: deque[Envelope] = deque()
        self._loading: Load | None = None
        self._fetching: Fetch | None = None
        self._needing: dict[Member, None] = {}
        """Members that need what only the stream has."""
        self._is_fresh = True
        """Nothing is known yet, or nothing that was known counts any more."""

    @property
    def is_empty(self) -> bool:
        return not self.members and not self._joining

    @property
    def _backlog_first(self) -> int:
        return self.backlog[0].sequence if self.backlog else self.last + 1

    @property
    def _later_position(self) -> int:
        """Where a member that must fetch history may resume although the room goes on meanwhile: what follows stays
        here for as long as the room gets no more than half a backlog."""
        return self.last - (self.backlog.maxlen or 0) // 2

    # ---- reading the stream

    def open(self) -> list[Act]:
        """Begin: read the last messages. What arrives meanwhile waits."""
        return self._load(None)

    def restart(self) -> list[Act]:
        """The stream was made anew or went back: nothing that is known counts, and every member is looked at again."""
        for member in self.members:
            member.epoch = member.epoch or self.epoch
            member.held = None
        self._needing.clear()
        self._fetching = None
        self.slabs.forget(self)
        self.backlog.clear()
        self._held.clear()
        self._arrived.clear()
        self.last = self.place = self.last_place = 0
        self.epoch = None
        self._is_fresh = True
        return self._load(None)

    def _load(self, after: int | None) -> list[Act]:
        for joining in self._joining.values():
            joining.is_looked_for = True
        self._loading = Load(after, self._arrived[-1].place if self._arrived else 0)
        return [self._loading]

    @property
    def is_loading(self) -> bool:
        return self._loading is not None

    def is_waiting_for(self, reading: Load | Fetch) -> bool:
        """Whether the answer to this reading still counts."""
        return reading is self._loading or reading is self._fetching

    def arrived(self, envelopes: Sequence[Envelope]) -> list[Act]:
        """What the node's reader brought, in the order of the stream."""
        if self.is_loading:
            self._arrived += envelopes
            return []
        acts: list[Act] = []
        together: list[bytes] = []
        for at, one in enumerate(envelopes):
            if one.place <= self.place and not one.is_passing:
                continue
            if self._is_gap(one):
                self._say_live(acts, together)
                self._arrived = list(envelopes[at:])
                return acts + self._load(self.last_place)
            self._take(one, acts, together)
        self._say_live(acts, together)
        return acts

    def loaded(self, envelopes: Sequence[Envelope], up_to: int, archived: Archived = NOTHING_ARCHIVED) -> list[Act]:
        """What the subject holds, up to a stream sequence: a gap in it is a gap for good. Of a subject that holds no
        message, what the archive says."""
        acts: list[Act] = []
        arrived, self._arrived = self._arrived, []
        self._loading = None
        if self._is_fresh:
            self._is_fresh = False
            for one in envelopes:
                self._note(one)
            if self.last == 0:
                self.last, self.epoch = archived
            acts += self._look_again()
        else:
            self._catch_up(envelopes, acts)
        self.place = max(self.place, up_to)
        acts += self.arrived(arrived)
        if not self.is_loading:
            joining, self._joining = self._joining, {}
            for asked in joining.values():
                if self._is_ahead(asked):
                    self._joining[asked.member] = asked
                else:
                    acts += self._enter(asked)
            acts += self._load(self.last_place) if self._joining else []
        return sorted(acts, key=_is_pump)  # a pump goes by what is known now: what was decided before it is said first

    def _catch_up(self, envelopes: Sequence[Envelope], acts: list[Act]) -> None:
        """What was read behind the last message. Unnumbered envelopes among it may have gone out already."""
        together: list[bytes] = []
        seen = self.place
        for one in envelopes:
            if one.place > seen or (one.is_numbered and one.sequence > self.last):
                self._take(one, acts, together)
        self.place = max(self.place, seen)
        self._say_live(acts, together)

    def _is_gap(self, one: Envelope) -> bool:
        return one.is_numbered and one.sequence > self.last + 1 > 1 and not self._is_other_history(one)

    def _is_other_history(self, one: Envelope) -> bool:
        return one.epoch is not None and self.epoch is not None and one.epoch != self.epoch

    def _note(self, one: Envelope) -> None:
        """Remember what stands in the stream; nobody is told."""
        self.place = one.place
        if not one.is_numbered or (one.sequence <= self.last and not self._is_other_history(one)):
            return
        if one.sequence != self.last + 1 or self._is_other_history(one):
            self.backlog.clear()
        self.backlog.append(one)
        self.last, self.last_place = one.sequence, one.place
        self.epoch = one.epoch or self.epoch

    def _take(self, one: Envelope, acts: list[Act], together: list[bytes]) -> None:
        """One more envelope, of which the stream holds nothing before it that is not known."""
        if not one.is_numbered:
            self.place = max(self.place, one.place)
            if one.sequence > self.last:
                self._hold(one)
            else:
                self._pass_on(one, together)
            return
        is_other = self._is_other_history(one)
        if one.sequence <= self.last and not is_other:
            self.place = one.place
            if one.sequence == self.last:
                self.last_place = one.place  # the archive knew of it before the stream had it
            return
        is_new_epoch = self.epoch is None and one.epoch is not None
        if is_other or one.sequence != self.last + 1 or self.last == 0 or is_new_epoch:
            self._say_live(acts, together)
            self._break(one, acts, is_other)
        self._note(one)
        together.append(one.frame)
        while self._held and self._held[0].sequence <= self.last:
            self._pass_on(self._held.popleft(), together)

    def _break(self, one: Envelope, acts: list[Act], is_other: bool) -> None:
        """A message that does not follow on what was: whoever does not stand right before it is told.

        Who is behind finds a gap by itself when it comes there.
        """
        for member in list(self.members):
            if member.phase is Phase.WAITING:
                continue
            if is_other:
                acts.append(self._control(member, one.sequence - 1, one.epoch))
            elif self.last == 0:
                if member.is_open:
                    member.last, member.epoch = one.sequence - 1, one.epoch
                    acts.append(self._joined(member, one.epoch))
                elif member.last != one.sequence - 1 or _differ(member.epoch, one.epoch):
                    acts.append(self._control(member, one.sequence - 1, one.epoch))
            elif member.phase is Phase.LIVE and one.sequence != self.last + 1:
                acts.append(self._control(member, one.sequence - 1, one.epoch or self.epoch))
            member.is_open = False
            acts += self._tell_epoch(member, one.epoch)

    def _tell_epoch(self, member: Member, epoch: str | None) -> list[Act]:
        """A member that came before the epoch was known learns it by a second `joined`."""
        if epoch is None or member.epoch is not None or member.phase is Phase.WAITING:
            return []
        member.epoch = epoch
        return [self._joined(member, epoch)]

    def _joined(self, member: Member, epoch: str | None) -> Act:
        return Say((member.write,), joined_frame(self.conversation.id, epoch, member.last))

    def _hold(self, one: Envelope) -> None:
        if len(self._held) >= HELD_MAX:
            self._held.popleft()
            self.dropped += 1
        self._held.append(one)

    def _pass_on(self, one: Envelope, together: list[bytes]) -> None:
        """An unnumbered envelope whose time has come, for those who are live; for who is behind it waits."""
        together.append(one.frame)
        if len(self.live) == len(self.members):
            return
        for member in self.members:
            if member.phase is Phase.BEHIND:
                if member.held is None:
                    member.held = deque()
                elif len(member.held) >= HELD_MAX:
                    member.held.popleft()
                    self.dropped += 1
                member.held.append(one)

    def _say_live(self, acts: list[Act], together: list[bytes]) -> None:
        """One write for everything that goes to everybody."""
        if together and self.live:
            acts.append(Say(tuple(self.live.values()), together[0] if len(together) == 1 else b"".join(together)))
            for member in self.live:
                member.last = self.last
        together.clear()

    # ---- members

    def join(
        self, member: Member, after: int | None, epoch: str | None = None, *, is_resume: bool = False
    ) -> list[Act]:
        """A connection enters, or says anew where it stands: what it said before and still waits counts no more."""
        waiting = self._joining.pop(member, None)
        joining = Joining(member, after, epoch, is_resume and (waiting is None or waiting.is_resume))
        if not self.is_loading and not self._is_ahead(joining):
            return self._enter(joining)
        self.live.pop(member, None)
        self._needing.pop(member, None)
        member.phase = Phase.WAITING
        self._joining[member] = joining
        return [] if self.is_loading else self._load(self.last_place)

    def _is_ahead(self, joining: Joining) -> bool:
        """Whether it may have been elsewhere, where more was known: then the stream is read first."""
        return joining.after is not None and joining.after > self.last and not joining.is_looked_for

    def _enter(self, joining: Joining) -> list[Act]:
        member = joining.member
        self.members[member] = None
        self.live.pop(member, None)
        member.phase = Phase.BEHIND
        self._needing.pop(member, None)
        member.held = None
        member.place = 0
        member.is_open = joining.after is None and (self.last, self.epoch) == NOTHING_ARCHIVED
        member.last = self.last if joining.after is None else joining.after
        member.epoch = self.epoch if joining.after is None else joining.epoch
        acts: list[Act] = []
        if not joining.is_resume or (joining.epoch is None and self.epoch is not None):
            acts.append(self._joined(member, self.epoch))
        wrong = self._contradiction(member)
        if wrong is not None:
            return [*acts, self._control(member, wrong, self.epoch)]
        member.epoch = self.epoch or member.epoch
        return [*acts, Pump(member)]

    def _contradiction(self, member: Member) -> int | None:
        """Up to where a member must look elsewhere because its history is not the stream's; None when it may be."""
        if _differ(member.epoch, self.epoch):
            return self.last
        return self.last if member.last > self.last > 0 else None

    def _look_again(self) -> list[Act]:
        """The stream is not the one that it was: nobody is left in silence."""
        acts: list[Act] = []
        for member in list(self.members):
            if member.phase is Phase.WAITING:
                continue
            wrong = self._contradiction(member)
            if wrong is not None or (self.last == 0 and member.last > 0):
                acts.append(self._control(member, member.last if wrong is None else wrong, self.epoch))
            else:
                self._fall_behind(member)
                member.place = 0
                member.is_open = member.is_open and self.last == 0
                acts += [*self._tell_epoch(member, self.epoch), Pump(member)]
        return acts

    def _control(self, member: Member, up_to: int, epoch: str | None) -> Act:
        self.live.pop(member, None)
        self._needing.pop(member, None)
        member.phase = Phase.WAITING
        member.held = None
        return Say((member.write,), control_frame(self.conversation.id, up_to, epoch))

    def refuse_joining(self) -> list[Joining]:
        """The subject cannot be read now: who waits for that is not in the room, and has to ask again."""
        joining, self._joining = self._joining, {}
        for member in joining:
            self.leave(member)
        return list(joining.values())

    def leave(self, member: Member) -> None:
        self.members.pop(member, None)
        self.live.pop(member, None)
        self._needing.pop(member, None)
        self._joining.pop(member, None)

    def full(self, member: Member) -> None:
        """Its buffer is full: nothing more is written to it before `drained`."""
        member.is_full = True
        if member.phase is Phase.LIVE:
            self._fall_behind(member)

    def drained(self, member: Member) -> list[Act]:
        member.is_full = False
        return [Pump(member)] if member.phase is Phase.BEHIND else []

    def _fall_behind(self, member: Member) -> None:
        if member.phase is Phase.LIVE:
            member.place = self.last_place
        self.live.pop(member, None)
        member.phase = Phase.BEHIND

    def step(self, member: Member) -> Act | None:
        """The next thing for a member that is behind; None when there is nothing to do for it now."""
        if member.phase is not Phase.BEHIND or member.is_full or member not in self.members or member in self._needing:
            return None
        if self._is_fresh:
            return None  # nobody knows yet what there is
        if member.last >= self.last:
            return self._go_live(member)
        slab = self.slabs.find(self, member.last + 1)
        if slab is not None:
            return self._replay(member, slab)
        first = self._backlog_first
        if member.last + 1 < first:
            self._needing[member] = None
            return self._fetch_next()
        following = islice(self.backlog, member.last + 1 - first, None)
        return self._replay(member, self.slabs.add(Slab(self, following)))

    def _go_live(self, member: Member) -> Act | None:
        member.phase = Phase.LIVE
        self.live[member] = member.write
        held, member.held = member.held, None
        return Say((member.write,), b"".join([one.frame for one in held])) if held else None

    def _replay(self, member: Member, slab: Slab) -> Act:
        """What follows on the member's last, as much as one write takes."""
        data = slab.behind(member.last)
        member.last, member.place = slab.last, slab.place
        return Say((member.write,), data)

    def _fetch_next(self) -> Fetch | None:
        """One page at a time, from the member on that is furthest behind; those who need it too wait for it."""
        if self._fetching is not None or not self._needing:
            return None
        lowest = min(self._needing, key=lambda member: member.last)
        self._fetching = Fetch(lowest.last, lowest.place, self.last_place)
        return self._fetching

    def fetched(self, fetch: Fetch, envelopes: Sequence[Envelope]) -> list[Act]:
        """A page from the stream, which reaches further back than the backlog. What the room itself does not have yet
        is left out: it comes to all, and would come to these members twice.

        An empty page says that the stream holds nothing between `after` and the backlog.
        """
        if self._fetching is not fetch:
            return []
        self._fetching = None
        page: list[Envelope] = []
        for one in envelopes:
            if one.is_numbered and (page[-1].sequence if page else fetch.after) < one.sequence <= self.last:
                page.append(one)
        self._shelve(page)
        acts: list[Act] = []
        for member in list(self._needing):
            if member.last >= fetch.after and (not page or member.last < page[-1].sequence):
                del self._needing[member]
                acts.append(self._after_fetch(member, page))
        following = self._fetch_next()
        return [*acts, following] if following is not None else acts

    def _shelve(self, page: list[Envelope]) -> None:
        at = 0
        while at < len(page):
            slab = self.slabs.find(self, page[at].sequence) or self.slabs.add(Slab(self, islice(page, at, None)))
            at += slab.last - page[at].sequence + 1

    def _after_fetch(self, member: Member, page: list[Envelope]) -> Act:
        """On with it, or, where the page does not follow on what it has, the control frame."""
        at = bisect_right(page, member.last, key=_sequence)
        if at < len(page) and page[at].sequence == member.last + 1:
            return Pump(member)
        edge = min([self._backlog_first, *(one.sequence for one in page[at : at + 1])]) - 1
        return self._control(member, max(edge, self._later_position), self.epoch)


def _is_pump(act: Act) -> bool:
    return isinstance(act, Pump)


def _differ(one: str | None, other: str | None) -> bool:
    """Whether two epochs are known, and are two."""
    return one is not None and other is not None and one != other
