"""What an audit concludes about positions, 65,536 of a stream at a time. Pure: values in, results out.

An audit reads the lake at a *cut*: up to a known sequence of each stream. What lies above is pending, not wrong. Below,
each position is in bronze once or in a known gap; what stands in bronze stands in silver or in quarantine, word for
word; it has one outcome or is in progress; and what it adds to the sums of its block is added up (`Bucket`). That needs
memory for one bucket of narrow rows alone. Chains and sums are concluded in chains.py and sums.py.

A result is an *error* (something is wrong, and named), a *note* (worth knowing, nothing is wrong), a *count*, or a part
that a later step puts together: *sum* (what positions add to a block), *link* (what a block adds to its chain),
*absent* and *conflict* (messages without a row of their own in silver: one of their identity must be there, with the
same content or with another), *balance* (rows of a family in a bucket, for the balance of silver's batches).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from oncewire._ground.contracts import blocks, subjects
from oncewire._ground.contracts.blocks import LANES, NO_STATE, Outcome
from oncewire._ground.errors import ContractViolation
from oncewire._ground.jetstream.protocol import parse_time_ns
from oncewire.pipeline.tables import CONFLICT

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
    """Of silver; null where silver must refuse the message."""
    position: pa.Array
    family: pa.Array
    """Of silver; '' where no contract names the subject."""
    row: pa.Array
    """Stands for the row of silver or of quarantine that follows from the message."""
    plain: pa.Array
    """The same by the plain reader; null where it was not asked."""
    wrong: pa.Array
    """Columns of bronze that do not follow from what else stands in the row; null where all do."""


class InSilver(NamedTuple):
    """Rows of silver in one bucket, as Arrow's columns."""

    sequence: pa.Array
    family: pa.Array
    row: pa.Array


class Quarantined(NamedTuple):
    """Rows of quarantine in one bucket, as Arrow's columns."""

    sequence: pa.Array
    family: pa.Array
    row: pa.Array
    reason: pa.Array


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

    def check(self, *, is_derived: bool = True) -> Iterator[Result]:
        """`is_derived`: silver has begun, so what follows from the messages must be there."""
        yield from self._sequences()
        if is_derived:
            yield from self._derived()
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
        wrong = self._rows.wrong
        columns = dict(zip(self._at.tolist(), wrong.to_pylist(), strict=True)) if wrong.null_count < len(wrong) else {}
        does_not_follow = np.zeros(BUCKET, bool)
        does_not_follow[[at for at, names in columns.items() if names]] = True
        yield from self._errors(
            does_not_follow,
            "sequences",
            "differs",
            lambda at: {"detail": f"{columns[at]} is not what the message says"},
        )
        absent = self._gap & self._expected & ~self._present
        yield from self._count(absent & ~self._lost, "sequences", "in_gaps")
        yield from self._count(absent & self._lost, "sequences", "unread")

    # ---- silver and quarantine

    def _derived(self) -> Iterator[Result]:
        """What stands in silver and quarantine for each message: exactly what follows from it, once."""
        rows, facts = self._rows, self._facts
        silver, refused = _Standing(self._low, facts.silver), _Standing(self._low, facts.quarantined)
        accepted = rows.key.is_valid().to_numpy(zero_copy_only=False)
        conflicts = refused.where(pc.equal(facts.quarantined.reason, CONFLICT)) & self._where(accepted)
        differs = self._differs(accepted, silver)
        yield from self._errors(differs, "silver", "differs", self._told("silver says something else than bronze"))
        refused_differs = self._differs(~accepted, refused) | (refused.is_there & self._where(accepted) & ~conflicts)
        yield from self._errors(
            refused_differs, "quarantine", "differs", self._told("quarantine says something else than bronze")
        )
        disagree = self._where(pc.fill_null(pc.not_equal(rows.row, rows.plain), False).to_numpy(zero_copy_only=False))
        yield from self._errors(disagree, "readers", "disagree", self._told("the two readers say different things"))
        is_read_twice = rows.plain.is_valid().to_numpy(zero_copy_only=False)
        yield from self._count(self._where(is_read_twice) & ~disagree, "readers", "agree")
        both = silver.is_there & (refused.is_there | self._where(~accepted))
        yield from self._errors(both, "silver", "refused", self._told("silver has what it must refuse"))
        lost = self._where(~accepted) & ~refused.is_there
        yield from self._errors(lost, "quarantine", "missing", self._told("it was refused, and is not in quarantine"))
        for check, standing in (("silver", silver), ("quarantine", refused)):
            yield from self._errors(standing.times > 1, check, "doubled", self._told("more than one row stands for it"))
            strays = standing.is_there & ~self._present & ~self._lost
            yield from self._errors(
                strays, check, "without_message", lambda _: {"detail": "bronze has no such message"}
            )
            yield from self._count(standing.is_there & self._present, check, "rows")
        alone = self._where(accepted) & ~silver.is_there
        yield from self._elsewhere("conflict", alone & conflicts)
        yield from self._elsewhere("absent", alone & ~refused.is_there)

    def _where(self, is_row: Any) -> Any:
        """Positions of the rows that are marked."""
        found = np.zeros(BUCKET, bool)
        found[self._at[is_row]] = True
        return found

    def _differs(self, is_row: Any, standing: _Standing) -> Any:
        """Positions whose row is not the one that follows from the message, of the messages that are marked."""
        rows = np.flatnonzero(is_row)
        others = standing.row_of[self._at[rows]]
        rows, others = rows[others >= 0], others[others >= 0]
        differs = np.zeros(BUCKET, bool)
        is_other = pc.fill_null(pc.not_equal(self._rows.row.take(pa.array(rows)), standing.take(others)), True)
        differs[self._at[rows]] = is_other.to_numpy(zero_copy_only=False)
        return differs

    def _elsewhere(self, what: str, is_one: Any) -> Iterator[Result]:
        """Messages without a row of their own."""
        at = np.flatnonzero(is_one)
        taken = pa.array(self._row_of[at])
        rows = self._rows
        columns = (one.take(taken).to_pylist() for one in (rows.msg_id, rows.key, rows.digest))
        for sequence, msg_id, key, digest in zip((at + self._low).tolist(), *columns, strict=True):
            yield Result(
                what, "silver", "", *self._place, sequence, sequence, id=msg_id or "", position=key,
                state=digest or b"",
            )  # fmt: skip

    def _told(self, detail: str) -> Callable[[int], dict[str, Any]]:
        """How a finding about a message is named."""

        def told(at: int) -> dict[str, Any]:
            row = int(self._row_of[at])
            return {"id": self._rows.msg_id[row].as_py() or "" if row >= 0 else "", "detail": detail}

        return told

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


class _Standing:
    """Rows of a derived table laid over the positions of a bucket."""

    def __init__(self, low: int, rows: InSilver | Quarantined) -> None:
        self._rows = rows
        self._at = rows.sequence.to_numpy() - low
        self.times = np.bincount(self._at, minlength=BUCKET)
        self.is_there = self.times > 0
        self.row_of = np.full(BUCKET, -1, np.int64)
        self.row_of[self._at] = np.arange(len(self._at))

    def where(self, is_row: pa.Array) -> Any:
        """Positions of the rows that are marked."""
        found = np.zeros(BUCKET, bool)
        found[self._at[pc.fill_null(is_row, False).to_numpy(zero_copy_only=False)]] = True
        return found

    def take(self, rows: Any) -> pa.Array:
        return self._rows.row.take(pa.array(rows))


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
