"""What an audit concludes from blocks and rows. Pure: values in, results out; Spark only brings them together.

An audit reads the lake at a *cut*: a version of bronze, which has everything up to a known sequence of each stream.
What lies above is pending, not wrong. Two walks give all conclusions but those about effects and letters:

    blocks of one chain, in order      each follows from the one before it (`walk`)
    positions, 65,536 at a time        each is in bronze once or in a known gap, has one outcome or is in progress, and
                                       stands in silver as it stands in bronze; what it adds to the sums of its block is
                                       added up (`Bucket`)

Both need memory for what is in hand alone: a block and the one before it, or one bucket of narrow rows.

A result is an *error* (something is wrong, and named), a *note* (worth knowing, nothing is wrong), a *count*, or a part
that a later step puts together: *sum* (what positions add to a block), *link* (what a block adds to its chain),
*absent* (a message that has no row of its own in silver: a copy of its identity must), *balance* (rows of a family in
a bucket, for the balance of silver's batches).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from oncewire._ground.contracts import blocks, subjects
from oncewire._ground.contracts.blocks import LANES, NO_HASH, NO_STATE, Outcome
from oncewire._ground.errors import ContractViolation
from oncewire._ground.jetstream.protocol import parse_time_ns

BUCKET: Final = 65_536
"""So many sequences are looked at together."""
RANGES_MAX: Final = 100
"""So many ranges of one problem are named per bucket and agent; the count says how many there are."""
OUTCOMES: Final = tuple(outcome.value for outcome in Outcome)
_COUNTED: Final = np.array([outcome in blocks.COUNTED for outcome in Outcome])
_MASK: Final = blocks.LANE_MASK

Lifetime = tuple[str, int, int]
"""A stream between two breaks: its name, creation time (Unix nanoseconds) and incarnation."""


class Result(NamedTuple):
    """One line of what an audit found. `first` and `last` are sequences of the stream, unless the problem is about
    blocks: then they are block numbers."""

    what: str
    check: str
    problem: str
    stream: str = ""
    created_ns: int = 0
    incarnation: int = 0
    first: int = 0
    last: int = 0
    chain: str = ""
    block: int = 0
    id: str = ""
    detail: str = ""
    amount: int = 0
    position: bytes = b""
    state: bytes = b""


RESULT: Final = (
    "what string, check string, problem string, stream string, created_ns long, incarnation int, first long, "
    "last long, chain string, block long, id string, detail string, amount long, position binary, state binary"
)


def lifetime_of(stream: str, created: str) -> Lifetime:
    """As blocks name it: the creation time, and behind a `#` the number of the incarnation."""
    time, _, number = created.partition("#")
    if number and not number.isdigit():
        raise ContractViolation(f"{created[:60]!r} is not a creation time")
    return stream, parse_time_ns(time), int(number or 0)


def chain_name(agent: str, ledger: str) -> str:
    return f"{agent}@{ledger}"


def agent_of(chain: str) -> str:
    return chain.rpartition("@")[0]


# ---- chains


class Link(NamedTuple):
    """A block as its chain sees it. `sequence` is where the announcement stands."""

    chain: str
    number: int
    previous: bytes
    hash: bytes
    state: bytes
    sequence: int


class Hole(NamedTuple):
    """Why blocks may be missing: what is confirmed must be there, unless a known gap of the stream lies between."""

    confirmed: int
    gaps: Sequence[tuple[int, int]]


def walk(links: Iterable[Link], holes: Mapping[str, Hole]) -> Iterator[Result]:
    """The blocks of chains, in order of chain, number and place: each must follow from the one before."""
    before: Link | None = None
    for link in links:
        if before is None or before.chain != link.chain:
            yield from _begin(link)
        elif link.number == before.number:
            yield from _copy(before, link)
            continue
        elif link.number == before.number + 1:
            yield from _follow(before, link)
        else:
            yield from _hole(before, link, holes[link.chain])
        before = link


def _link(link: Link, before: bytes | None) -> Result:
    added = subtract(link.state, before) if before is not None else b""
    detail = "" if before is not None else "base"
    return _about(link, "link", "chain", "", state=added, detail=detail, position=link.state)


def _about(link: Link, what: str, check: str, problem: str, **more: Any) -> Result:
    return Result(
        what, check, problem, chain=link.chain, block=link.number, first=more.pop("first", link.sequence), **more
    )


def _begin(link: Link) -> Iterator[Result]:
    if link.number == 1:
        if link.previous != NO_HASH:
            yield _about(link, "error", "chain", "broken", detail="the first block names one before it")
        yield _link(link, NO_STATE)
    else:
        yield _about(link, "note", "chain", "begins_later", detail=f"the oldest block in the lake is {link.number}")
        yield _link(link, None)


def _copy(before: Link, link: Link) -> Iterator[Result]:
    if link.hash == before.hash:
        yield _about(link, "note", "chain", "republished", detail=f"the same as at sequence {before.sequence}")
    else:
        text = f"another block {link.number} stands at sequence {before.sequence}"
        yield _about(link, "error", "chain", "forked", last=link.sequence, detail=text)


def _follow(before: Link, link: Link) -> Iterator[Result]:
    if link.previous != before.hash:
        text = (
            f"block {link.number} was made behind a block {before.number} with the hash {link.previous.hex()[:16]}…, "
            f"the one at sequence {before.sequence} has {before.hash.hex()[:16]}…"
        )
        yield _about(link, "error", "chain", "broken", last=link.sequence, detail=text)
    yield _link(link, before.state)


def _hole(before: Link, link: Link, known: Hole) -> Iterator[Result]:
    first, last = before.number + 1, link.number - 1
    low, high = sorted((before.sequence, link.sequence))
    named = {"first": first, "last": last, "amount": last - first + 1}
    if any(start < high and end > low for start, end in known.gaps):
        yield _about(link, "note", "chain", "in_gap", **named, detail="they stood in a known gap of LEDGER")
    elif first <= known.confirmed:
        text = f"blocks {first} to {last} are confirmed and not in the lake"
        yield _about(link, "error", "chain", "missing", **named, detail=text)
    else:
        yield _about(link, "count", "chain", "pending", **named)
    yield _link(link, None)


def subtract(after: bytes, before: bytes) -> bytes:
    """Lane by lane, modulo 2^64."""
    lanes = np.frombuffer(after, "<u8") - np.frombuffer(before, "<u8")
    return bytes(lanes.astype("<u8").tobytes())


# ---- positions


class Reader(NamedTuple):
    """An agent on one lifetime of a stream, as its blocks tell it."""

    agent: str
    filters: tuple[tuple[str, ...], ...]
    """Each set of filters that it had: what all of them match is surely meant for it."""
    start: int
    settled: int
    """Up to here it calls every input settled."""
    since_us: int
    """Blocks from before may be gone: what the stream took in earlier may have its outcome in one of those."""

    def may_read(self, subject: str) -> bool:
        return any(subjects.matches(subject, one) for filters in self.filters for one in filters)

    def must_read(self, subject: str) -> bool:
        return all(any(subjects.matches(subject, one) for one in filters) for filters in self.filters)


class Rows(NamedTuple):
    """Messages of one bucket, as Arrow's columns."""

    sequence: pa.Array
    at_us: pa.Array
    subject: pa.Array
    msg_id: pa.Array
    identity: pa.Array
    digest: pa.Array
    key: pa.Array
    position: pa.Array
    family: pa.Array
    """Of silver; '' where no contract names the subject."""


class InSilver(NamedTuple):
    """Rows of silver in one bucket, as Arrow's columns; some families have no digest."""

    sequence: pa.Array
    key: pa.Array
    digest: pa.Array
    family: pa.Array


class Quarantined(NamedTuple):
    """Rows of quarantine in one bucket, as Arrow's columns."""

    sequence: pa.Array
    family: pa.Array


class Claim(NamedTuple):
    """A closed range of positions that a block settles with one outcome."""

    chain: str
    number: int
    outcome: str
    first: int
    last: int


class Facts(NamedTuple):
    """What else is known of the positions of a bucket."""

    expected: list[tuple[int, int]]
    gaps: list[tuple[int, int]]
    claims: list[Claim]
    listed: list[Claim]
    """Claims on a work queue, whose messages nobody else can read."""
    silver: InSilver
    quarantined: Quarantined
    lost: Sequence[tuple[int, int]] = ()
    """Stood in files of bronze that cannot be read."""


def bucket_of(sequence: int) -> int:
    return (sequence - 1) // BUCKET


class Bucket:
    """All checks on the positions of one bucket."""

    def __init__(self, place: Lifetime, number: int, rows: Rows, facts: Facts, readers: Sequence[Reader]) -> None:
        self._place = place
        self._low = number * BUCKET + 1
        self._rows = rows
        self._facts = facts
        self._readers = readers
        self._at = rows.sequence.to_numpy() - self._low
        self._subject = rows.subject.dictionary_encode()
        self._copies = np.bincount(self._at, minlength=BUCKET)
        self._present = self._copies > 0
        self._expected = self._covered(facts.expected)
        self._lost = self._covered(facts.lost)
        self._gap = self._covered(facts.gaps) | self._lost
        self._row_of = np.full(BUCKET, -1, np.int64)
        self._row_of[self._at] = np.arange(len(self._at))

    def check(self) -> Iterator[Result]:
        yield from self._sequences()
        yield from self._in_silver()
        yield from self._balance()
        for reader in self._readers:
            yield from self._outcomes(
                reader, [one for one in self._facts.claims if agent_of(one.chain) == reader.agent]
            )
            listed = [one for one in self._facts.listed if agent_of(one.chain) == reader.agent]
            if listed:
                yield from self._listed(reader.agent, _Laid(self._low, listed))

    def _covered(self, ranges: Iterable[tuple[int, int]]) -> Any:
        covered = np.zeros(BUCKET, bool)
        for first, last in ranges:
            covered[max(0, first - self._low) : max(0, last - self._low + 1)] = True
        return covered

    def _errors(self, is_bad: Any, check: str, problem: str, tell: Callable[[int], dict[str, Any]]) -> Iterator[Result]:
        """Bad positions as ranges, named up to a limit; one more line counts the rest."""
        found = blocks.ranges((np.flatnonzero(is_bad) + self._low).tolist())
        for first, last in found[:RANGES_MAX]:
            yield Result(
                "error", check, problem, *self._place, first, last, amount=last - first + 1, **tell(first - self._low)
            )
        if len(found) > RANGES_MAX:
            first, last = found[RANGES_MAX][0], found[-1][1]
            count = sum(end - start + 1 for start, end in found[RANGES_MAX:])
            text = f"{len(found) - RANGES_MAX} more ranges"
            yield Result("error", check, problem, *self._place, first, last, amount=count, detail=text)

    def _count(self, is_one: Any, check: str, name: str, chain: str = "") -> Iterator[Result]:
        found = np.flatnonzero(is_one)
        if len(found):
            first, last = int(found[0]) + self._low, int(found[-1]) + self._low
            yield Result("count", check, name, *self._place, first, last, chain, amount=len(found))

    # ---- continuity

    def _sequences(self) -> Iterator[Result]:
        missing = self._expected & ~self._present & ~self._gap
        yield from self._errors(
            missing, "sequences", "missing", lambda _: {"detail": "not in bronze, and no gap is recorded"}
        )
        yield from self._errors(
            self._copies > 1, "sequences", "doubled", lambda at: {"detail": f"{self._copies[at]} rows in bronze"}
        )
        yield from self._errors(
            self._present & ~self._expected, "sequences", "beyond", lambda _: {"detail": "above what bronze has read"}
        )
        yield from self._count(self._present, "sequences", "rows")
        absent = self._gap & self._expected & ~self._present
        yield from self._count(absent & ~self._lost, "sequences", "in_gaps")
        yield from self._count(absent & self._lost, "sequences", "unread")

    # ---- silver

    def _in_silver(self) -> Iterator[Result]:
        rows, silver = self._rows, self._facts.silver
        stands = silver.sequence.to_numpy() - self._low
        silver_of = np.full(BUCKET, -1, np.int64)
        silver_of[stands] = np.arange(len(stands))
        has_key = np.flatnonzero(rows.key.is_valid().to_numpy(zero_copy_only=False))
        found = silver_of[self._at[has_key]]
        both = has_key[found >= 0]
        differs = np.zeros(BUCKET, bool)
        differs[self._at[both]] = self._differs(both, found[found >= 0])
        yield from self._absent(has_key[found < 0])
        yield from self._errors(differs, "silver", "differs", self._silver_differs)
        strays = np.zeros(BUCKET, bool)
        strays[stands] = True
        yield from self._errors(
            strays & ~self._present & ~self._lost,
            "silver",
            "without_message",
            lambda _: {"detail": "bronze has no such message"},
        )
        if len(both):
            yield Result("count", "silver", "rows", *self._place, amount=len(both))

    def _differs(self, row: Any, other: Any) -> Any:
        """Whether rows and the rows of silver at their positions say different things."""
        rows, silver = self._rows, self._facts.silver
        wrong = pc.not_equal(rows.key.take(pa.array(row)), silver.key.take(pa.array(other)))
        told = pc.not_equal(rows.digest.take(pa.array(row)), silver.digest.take(pa.array(other)))
        return pc.or_(wrong, pc.fill_null(told, False)).to_numpy(zero_copy_only=False)

    def _absent(self, row: Any) -> Iterator[Result]:
        """Messages without a row of their own: copies, if all is well."""
        quarantined = np.zeros(BUCKET, bool)
        quarantined[self._facts.quarantined.sequence.to_numpy() - self._low] = True
        missing = pa.array(row[~quarantined[self._at[row]]])
        rows = self._rows
        columns = (rows.sequence, rows.msg_id, rows.key)
        for sequence, msg_id, key in zip(*(one.take(missing).to_pylist() for one in columns), strict=True):
            yield Result("absent", "silver", "", *self._place, sequence, sequence, id=msg_id or "", position=key)

    def _silver_differs(self, at: int) -> dict[str, Any]:
        row = int(self._row_of[at])
        return {
            "id": self._rows.msg_id[row].as_py() or "",
            "detail": "silver says something else than the bytes in bronze",
        }

    def _balance(self) -> Iterator[Result]:
        """How many rows of each family stand where, for the balance of all batches."""
        found = {
            "rows_in": self._rows.family,
            "rows_out": self._facts.silver.family,
            "quarantined": self._facts.quarantined.family,
        }
        for problem, families in found.items():
            for family, count in Counter(families.to_pylist()).items():
                yield Result("balance", family or "", problem, amount=count)

    # ---- outcomes and sums

    def _outcomes(self, reader: Reader, claims: list[Claim]) -> Iterator[Result]:
        laid = _Laid(self._low, claims)
        claimed, within = laid.times > 0, self._expected
        lost = claimed & within & ~self._present & ~self._gap
        yield from self._errors(laid.times > 1, "outcomes", "two_outcomes", laid.all_at)
        yield from self._errors(lost, "outcomes", "not_in_bronze", laid.one_at)
        yield from self._errors(
            claimed & self._subjects(reader.may_read, is_inverted=True), "outcomes", "outside_filter", laid.one_at
        )
        yield from self._count(claimed & within & self._gap & ~self._present, "outcomes", "in_gaps", reader.agent)
        yield from self._count(claimed & ~within, "outcomes", "pending", reader.agent)
        for code, name in enumerate(OUTCOMES):
            yield from self._count(self._present & (laid.outcome == code), "outcomes", name, reader.agent)
        if claims:
            yield from self._sums(reader.agent, laid)
        yield from self._open(reader, claimed)

    def _listed(self, agent: str, laid: _Laid) -> Iterator[Result]:
        """Inputs of a work queue: their blocks alone speak of them."""
        yield from self._errors(laid.times > 1, "outcomes", "two_outcomes", laid.all_at)
        for code, name in enumerate(OUTCOMES):
            yield from self._count(laid.outcome == code, "outcomes", name, agent)

    def _subjects(self, test: Callable[[str], bool], *, is_inverted: bool = False) -> Any:
        """Which positions hold a message whose subject passes."""
        known = np.array([test(subject) is not is_inverted for subject in self._subject.dictionary.to_pylist()], bool)
        found = np.zeros(BUCKET, bool)
        found[self._at] = known[self._subject.indices.to_numpy()]
        return found

    def _open(self, reader: Reader, claimed: Any) -> Iterator[Result]:
        """Messages for the agent without an outcome: lost if it calls them settled, else in progress."""
        numbers = np.arange(BUCKET) + self._low
        open_ = self._subjects(reader.must_read) & ~claimed & (numbers >= reader.start)
        old = np.zeros(BUCKET, bool)
        old[self._at] = self._rows.at_us.to_numpy() <= reader.since_us
        lost = open_ & ~old & (numbers <= reader.settled)
        text = f"{reader.agent} calls all up to {reader.settled} settled"
        yield from self._errors(lost, "outcomes", "no_outcome", lambda _: {"chain": reader.agent, "detail": text})
        yield from self._count(open_ & ~old & ~lost, "outcomes", "in_progress", reader.agent)
        yield from self._count(open_ & old, "outcomes", "before_blocks", reader.agent)

    def _sums(self, agent: str, laid: _Laid) -> Iterator[Result]:
        at = np.flatnonzero((laid.times > 0) & self._present)
        if not len(at):
            return
        code_by_block: dict[tuple[str, int], int] = {}
        codes = np.array([code_by_block.setdefault((one.chain, one.number), len(code_by_block)) for one in laid.claims])
        at = at[np.argsort(codes[laid.claim_of[at]], kind="stable")]
        code, row = codes[laid.claim_of[at]], self._row_of[at]
        where = lanes_of(pc.fill_null(self._rows.position.take(pa.array(row)), NO_STATE).to_pylist())
        starts = np.flatnonzero(np.r_[True, code[1:] != code[:-1]])
        states = self._states(agent, row, laid.outcome[at])
        sums = np.add.reduceat(where, starts, axis=0), np.add.reduceat(states, starts, axis=0)
        counts = np.diff(np.r_[starts, len(code)])
        names = list(code_by_block)
        for one, count, position, state in zip(code[starts].tolist(), counts.tolist(), *sums, strict=True):
            chain, number = names[one]
            yield Result(
                "sum", "sums", "", *self._place, 0, 0, chain, number, amount=count,
                position=position.tobytes(), state=state.tobytes(),
            )  # fmt: skip

    def _states(self, agent: str, row: Any, outcome: Any) -> Any:
        """What each input adds to the state."""
        is_counted = _COUNTED[outcome]
        rows, taken = self._rows, pa.array(row[is_counted])
        elements = blocks.elements(
            agent,
            pc.fill_null(rows.identity.take(taken), "").to_pylist(),
            rows.subject.take(taken).to_pylist(),
            [OUTCOMES[how] for how in outcome[is_counted].tolist()],
            pc.fill_null(rows.digest.take(taken), b"").to_pylist(),
        )
        states = np.zeros((len(row), LANES), "<u8")
        states[is_counted] = lanes_of(elements)
        return states


class _Laid:
    """Claims laid over the positions of a bucket."""

    def __init__(self, low: int, claims: list[Claim]) -> None:
        self.low = low
        self.claims = claims
        self.times = np.zeros(BUCKET, np.int32)
        self.claim_of = np.full(BUCKET, -1, np.int64)
        for index, claim in enumerate(claims):
            part = slice(claim.first - low, claim.last - low + 1)
            self.times[part] += 1
            self.claim_of[part] = index
        outcomes = np.array([*(OUTCOMES.index(claim.outcome) for claim in claims), -1])
        self.outcome = outcomes[self.claim_of]

    def one_at(self, at: int) -> dict[str, Any]:
        claim = self.claims[int(self.claim_of[at])]
        return {"chain": claim.chain, "block": claim.number, "detail": claim.outcome}

    def all_at(self, at: int) -> dict[str, Any]:
        found = [one for one in self.claims if one.first <= at + self.low <= one.last]
        text = ", ".join(f"{one.outcome} in block {one.number}" for one in found)
        return {"chain": found[0].chain, "block": found[0].number, "detail": text}


def lanes_of(elements: Sequence[bytes]) -> Any:
    return np.frombuffer(b"".join(elements), "<u8").reshape(-1, LANES)


# ---- sums of blocks


class Part(NamedTuple):
    """What is known of the sum of a block: what it announces (per stream, and for its chain), or what rows give."""

    chain: str
    block: int
    what: str
    """`link`, `inputs` (announced), `listed` (of a work queue), or `sum` (recomputed)."""
    stream: str
    created_ns: int
    incarnation: int
    amount: int
    position: bytes
    state: bytes


def compare(parts: Iterable[Part]) -> Iterator[Result]:
    """Parts in order of chain and block: what each block announces against what its inputs give."""
    block: list[Part] = []
    for part in parts:
        if block and (block[0].chain, block[0].block) != (part.chain, part.block):
            yield from _compare_block(block)
            block = []
        block.append(part)
    if block:
        yield from _compare_block(block)


def _compare_block(parts: list[Part]) -> Iterator[Result]:
    chain, number = parts[0].chain, parts[0].block
    announced = {part[3:6]: part for part in parts if part.what == "inputs"}
    found: dict[Lifetime, list[Part]] = {}
    for part in parts:
        if part.what in ("sum", "listed"):
            found.setdefault(part[3:6], []).append(part)
    is_whole = True
    for place, told in sorted(announced.items()):
        mine = found.get(place, [])
        is_listed = any(part.what == "listed" for part in mine)
        if sum(part.amount for part in mine) != told.amount:
            is_whole = False
            yield Result("count", "sums", "unproven", *place, chain=chain, block=number, amount=told.amount)
        elif is_listed:
            yield Result("count", "sums", "listed", *place, chain=chain, block=number, amount=told.amount)
        elif blocks.add(NO_STATE, [part.position for part in mine]) != told.position:
            text = f"the bytes of its {told.amount} inputs in bronze are not those that it settled"
            yield Result("error", "sums", "bodies", *place, chain=chain, block=number, amount=told.amount, detail=text)
        else:
            yield Result("count", "sums", "inputs", *place, chain=chain, block=number, amount=told.amount)
    yield from _compare_state(chain, number, parts, found, is_whole)


def _compare_state(
    chain: str, number: int, parts: list[Part], found: dict[Lifetime, list[Part]], is_whole: bool
) -> Iterator[Result]:
    links = [part for part in parts if part.what == "link"]
    if not links or not links[0].state or not is_whole:
        yield Result("count", "state", "unproven", chain=chain, block=number, amount=1)
        return
    given = blocks.add(NO_STATE, [part.state for mine in found.values() for part in mine])
    if given != links[0].state:
        text = "its state hash does not follow from its inputs"
        yield Result("error", "state", "differs", chain=chain, block=number, detail=text, position=links[0].position)
    else:
        yield Result("count", "state", "blocks", chain=chain, block=number, amount=1, state=given)


# ---- balance

Balances = Mapping[tuple[str, str], int]
"""Rows by family and by what became of them: rows_in, rows_out, quarantined."""


def compare_balance(told: Balances, found: Balances) -> Iterator[Result]:
    """What silver's batches say they took in and put out, against what the tables hold below the cut."""
    for family, name in sorted({*told, *found}):
        wanted, there = told.get((family, name), 0), found.get((family, name), 0)
        if wanted != there:
            table = {"rows_in": "bronze", "rows_out": f"silver/{family}", "quarantined": "quarantine"}[name]
            text = f"silver's batches name {wanted:,} rows of {family or 'no family'}, and {table} holds {there:,}"
            yield Result("error", "balance", name, detail=text, amount=abs(wanted - there))
        else:
            yield Result("count", "balance", name, chain=family, amount=there)
