"""How a reader's credit is lent to the nodes that own its partitions. Pure.

An owner delivers to the reader as far as its loan goes. All loans together never exceed the credit: one is lowered, its
owner says what is still out, and only then another one is raised. Each owner is asked one thing at a time. `due` says
what, and `hear` takes the answer.

    no owner wants more          all have the same, so that a message is delivered at once wherever it comes
    some want more               they divide the credit among them, but for one delivery that each of the others keeps
    more want than there is      they take turns: the one that had it longest gives it to the one that waited longest

A long poll ends with the first deliveries. So it asks one owner after the other, with all that it takes (Visits); after
that every owner may deliver. What comes second finds the poll closed and is recalled.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct


class Account(Struct, array_like=True, frozen=True):
    """What an owner says of its loan."""

    out: int = 0
    """Deliveries that the reader holds."""
    wants: bool = False
    """More messages wait for it."""
    is_late: bool = False
    """A lease ended, and the reader has settled nothing since."""


class Terms(NamedTuple):
    """What an owner is told."""

    node: str
    limit: int
    is_all: bool
    """Whether no other owner has any."""
    is_late: bool


class _Loan:
    """Of one owner."""

    __slots__ = ("held", "is_asked", "is_called", "is_late", "limit", "out", "raised", "target", "wants")

    def __init__(self) -> None:
        self.limit = 0
        """What its owner was told."""
        self.held = 0
        """What its owner may have out until it says otherwise."""
        self.out = 0
        """What it had out when it was asked last."""
        self.target = 0
        """What it should have."""
        self.raised = 0
        """When it got something last, in turns."""
        self.wants = False
        self.is_late = False
        """What its owner believes."""
        self.is_asked = False
        self.is_called = False
        """Its owner has news."""

    @property
    def is_steady(self) -> bool:
        return self.limit == self.held == self.target and not self.is_asked


class Loans:
    """Of a stream. See the module's head."""

    def __init__(self, credit: int) -> None:
        self._credit = credit
        self._is_late = False
        self._loans: dict[str, _Loan] = {}
        self._turn = 0

    @property
    def is_busy(self) -> bool:
        """A stream waits for whatever comes."""
        return False

    def attach(self, node: str) -> None:
        if node not in self._loans:
            self._loans[node] = _Loan()
            self._plan()

    def detach(self, node: str) -> None:
        if self._loans.pop(node, None) is not None:
            self._plan()

    def call(self, node: str) -> None:
        """An owner has news, or should hear of news of the reader's."""
        if (loan := self._loans.get(node)) is not None:
            loan.is_called = True

    def hear(self, node: str, account: Account) -> None:
        """The answer to what was due."""
        loan = self._loans.get(node)
        if loan is None:
            return
        loan.is_asked = False
        loan.out, loan.held = account.out, max(loan.limit, account.out)
        loan.wants = account.wants
        if account.is_late != loan.is_late:  # its owner holds everything back until it hears that this is known
            self._is_late = loan.is_late = account.is_late
            loan.is_called = True
        self._plan()

    def due(self) -> list[Terms]:
        """What to tell whom now. Each must be answered by `hear`, or its node detached."""
        told: list[Terms] = []
        free = self._total - sum(max(loan.limit, loan.held) for loan in self._loans.values())
        for node, loan in self._loans.items():
            if loan.is_asked:
                continue
            limit = loan.target
            if limit > loan.limit:
                more = min(limit - loan.limit, max(0, free))
                limit, free = loan.limit + more, free - more
            if limit == loan.limit and loan.is_late == self._is_late and not loan.is_called:
                continue
            if limit > loan.limit:
                self._turn += 1
                loan.raised = self._turn
            loan.limit, loan.held = limit, max(loan.held, limit)
            loan.is_late, loan.is_asked, loan.is_called = self._is_late, True, False
            told.append(Terms(node, limit, limit == self._total, loan.is_late))
        return told

    @property
    def _total(self) -> int:
        return min(1, self._credit) if self._is_late else self._credit

    def _plan(self) -> None:
        loans = list(self._loans.values())
        wanting = [loan for loan in loans if loan.wants] or loans
        if not loans:
            return
        others = len(loans) - len(wanting) if self._total >= len(loans) else 0
        each, rest = divmod(self._total - others, len(wanting))
        if not each:
            self._take_turns(loans, wanting)
            return
        for loan in loans:
            loan.target = each if loan in wanting else min(1, others)
        for loan in sorted(wanting, key=lambda loan: -loan.limit)[:rest]:  # what is left stays where it is
            loan.target += 1

    def _take_turns(self, loans: list[_Loan], wanting: list[_Loan]) -> None:
        """One each, as far as the credit goes. A loan that is not used yet stays: a reader that does not read would
        send it round without end."""
        holders = sorted((loan for loan in wanting if loan.target), key=lambda loan: -loan.raised)[: self._total]
        waiting = sorted((loan for loan in wanting if loan not in holders), key=lambda loan: loan.raised)
        if waiting and waiting[0].wants and len(holders) == self._total and all(loan.is_steady for loan in loans):
            used = [loan for loan in holders if loan.out]
            if used:
                holders.remove(used[-1])
        holders += waiting[: self._total - len(holders)]
        for loan in loans:
            loan.target = int(loan in holders)


class Visits:
    """Of a long poll. See the module's head."""

    def __init__(self, credit: int) -> None:
        self._credit = credit
        self._waiting: dict[str, None] = {}
        self._asked = ""

    @property
    def is_busy(self) -> bool:
        """Whether there are owners that did not say yet that they have nothing."""
        return bool(self._asked or self._waiting)

    def attach(self, node: str) -> None:
        self._waiting[node] = None

    def detach(self, node: str) -> None:
        self._waiting.pop(node, None)
        if self._asked == node:
            self._asked = ""

    def call(self, node: str) -> None:
        """It has been lent all."""

    def hear(self, node: str, account: Account) -> None:
        """If something is out, it comes, and the poll ends: until then it is not asked further."""
        if node == self._asked and not account.out:
            self._asked = ""

    def due(self) -> list[Terms]:
        if self._asked or not self._waiting:
            return []
        self._asked = next(iter(self._waiting))
        del self._waiting[self._asked]
        return [Terms(self._asked, self._credit, is_all=True, is_late=False)]
