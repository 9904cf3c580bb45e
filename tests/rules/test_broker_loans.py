"""A reader's credit over several owners: never exceeded, never lost, and whoever has work for it gets some."""

from __future__ import annotations

import random
from collections import deque

import pytest

from oncewire.broker.jetstream.loans import Account, Loans, Visits


class Owner:
    """A node with work for the reader: holds what it was lent, and says how it stands when it is asked."""

    def __init__(self) -> None:
        self.limit = self.out = self.work = self.done = 0
        self.is_late = self.told_late = self.is_paused = False

    def take(self) -> None:
        room = (min(1, self.limit) if self.is_late else self.limit) - self.out
        taken = 0 if self.is_paused else max(0, min(room, self.work))
        self.out, self.work = self.out + taken, self.work - taken

    def lent(self, limit: int, *, is_late: bool) -> Account:
        if is_late != self.told_late:
            self.is_late = is_late
        self.limit = limit if is_late == self.is_late else 0
        self.take()
        self.told_late = self.is_late
        return self.account()

    def account(self) -> Account:
        return Account(self.out, self.work > 0, self.is_late)

    def settle(self) -> None:
        self.out, self.done, self.is_late = self.out - 1, self.done + 1, False
        self.take()

    def lapse(self) -> None:
        if not self.is_late:
            self.is_late, self.limit = True, 0
        self.out, self.work = self.out - 1, self.work + 1
        self.take()


class World:
    """A fan and its owners, with requests that take their time."""

    def __init__(self, credit: int, nodes: int, seed: int = 0) -> None:
        self.chance = random.Random(seed)
        self.credit = credit
        self.loans = Loans(credit)
        self.owners = {f"n{number}": Owner() for number in range(nodes)}
        self.asked: dict[str, deque[tuple[int, bool]]] = {node: deque() for node in self.owners}
        self.answers: dict[str, deque[Account]] = {node: deque() for node in self.owners}
        for node in self.owners:
            self.loans.attach(node)
            self.ask()

    def ask(self) -> None:
        for terms in self.loans.due():
            self.asked[terms.node].append((terms.limit, terms.is_late))
        self.check()

    def check(self) -> None:
        """Whatever is still on its way, the owners together may hold no more than the credit."""
        most = sum(
            max([owner.out, owner.limit, *(limit for limit, _ in self.asked[node])])
            for node, owner in self.owners.items()
        )
        assert most <= self.credit
        assert all(len(self.asked[node]) + len(self.answers[node]) <= 1 for node in self.owners)

    def call(self) -> None:
        """All owners tell their news."""
        for node in self.owners:
            self.loans.call(node)
        self.ask()

    def step(self) -> bool:
        """One request or answer arrives; False when none is on its way."""
        arriving = [node for node in self.owners if self.asked[node] or self.answers[node]]
        if not arriving:
            return False
        node = self.chance.choice(arriving)
        if self.asked[node]:
            limit, is_late = self.asked[node].popleft()
            self.answers[node].append(self.owners[node].lent(limit, is_late=is_late))
        else:
            self.loans.hear(node, self.answers[node].popleft())
            self.ask()
        return True

    def rest(self) -> None:
        """Until there is nothing more to say."""
        for _ in range(1_000):
            if not self.step():
                return
        raise AssertionError("they never come to rest")


def limits(world: World) -> list[int]:
    return [owner.limit for owner in world.owners.values()]


@pytest.mark.parametrize(
    ("credit", "nodes", "expected"), [(2, 1, [2]), (6, 3, [2, 2, 2]), (7, 3, [2, 2, 3]), (2, 3, [0, 1, 1])]
)
def test_where_nobody_wants_more_all_have_the_same(credit: int, nodes: int, expected: list[int]) -> None:
    world = World(credit, nodes)
    world.rest()
    assert expected == sorted(limits(world))


def test_an_owner_that_wants_more_gets_all_but_one_for_each_of_the_others() -> None:
    world = World(30, 3)
    world.rest()
    world.owners["n1"].work = 100
    world.call()
    world.rest()
    assert [1, 28, 1] == limits(world)
    assert 28 == world.owners["n1"].out


def test_two_that_want_more_share_it_once_the_first_has_settled_what_is_too_much() -> None:
    world = World(30, 3)
    world.rest()
    for node in ("n1", "n2"):
        world.owners[node].work = 1_000
        world.call()
        world.rest()
    for _ in range(60):
        for owner in world.owners.values():
            if owner.out:
                owner.settle()
        world.call()
        world.rest()
    assert [1, 14, 15] == sorted(limits(world))


def test_what_is_no_longer_wanted_is_spread_again() -> None:
    world = World(30, 3)
    world.rest()
    world.owners["n1"].work = 5
    for _ in range(2):
        world.call()
        world.rest()
    assert [10, 10, 10] == limits(world)


def test_with_less_than_one_for_each_all_have_their_turn() -> None:
    world = World(2, 5)
    world.rest()
    for owner in world.owners.values():
        owner.work = 1_000
    for _ in range(200):
        world.call()
        world.rest()
        busy = [owner for owner in world.owners.values() if owner.out]
        world.chance.choice(busy).settle()
    done = [owner.done for owner in world.owners.values()]
    assert 200 == sum(done)
    assert max(done) <= 1.5 * min(done)


def test_a_reader_that_does_not_read_sends_nothing_round() -> None:
    world = World(1, 3)
    for owner in world.owners.values():
        owner.work, owner.is_paused = 10, True
    world.rest()
    before = limits(world)
    for _ in range(10):
        world.call()
        world.rest()
    assert before == limits(world)


def test_where_nobody_wants_more_nothing_goes_round() -> None:
    world = World(1, 3)
    world.rest()
    before = limits(world)
    for _ in range(10):
        world.call()
        world.rest()
    assert before == limits(world)


def test_a_late_reader_has_one_delivery_in_all_until_it_settles_something_anywhere() -> None:
    world = World(6, 3)
    world.rest()
    for owner in world.owners.values():
        owner.work = 10
        owner.take()
    world.owners["n0"].lapse()
    world.call()
    world.rest()
    assert 1 == sum(limits(world))
    while sum(owner.out for owner in world.owners.values()) > 1:
        next(owner for owner in world.owners.values() if owner.out).lapse()
        world.call()
        world.rest()
    next(owner for owner in world.owners.values() if owner.out).settle()
    world.call()
    world.rest()
    assert 6 == sum(owner.out for owner in world.owners.values())
    assert not any(owner.is_late for owner in world.owners.values())


def test_a_late_reader_whose_share_stays_as_it_is_gets_its_one_delivery() -> None:
    world = World(1, 1)
    world.rest()
    world.owners["n0"].work = 3
    world.owners["n0"].take()
    world.owners["n0"].lapse()
    world.call()
    world.rest()
    assert 1 == world.owners["n0"].out


def test_what_a_lost_owner_had_goes_to_the_others() -> None:
    world = World(4, 2)
    world.rest()
    del world.owners["n0"], world.asked["n0"], world.answers["n0"]
    world.loans.detach("n0")
    world.ask()
    world.rest()
    assert [4] == limits(world)


@pytest.mark.parametrize("seed", range(60))
def test_the_credit_is_never_exceeded_and_all_work_is_done(seed: int) -> None:
    chance = random.Random(seed)
    world = World(chance.choice([1, 2, 3, 7]), chance.randint(1, 4), seed)
    for _ in range(400):
        what = chance.random()
        owner = chance.choice(list(world.owners.values()))
        if what < 0.2:
            owner.work += 1
            owner.take()
        elif what < 0.5 and owner.out:
            owner.settle() if chance.random() < 0.8 else owner.lapse()
        elif what < 0.7:
            world.call()
        else:
            world.step()
        world.check()
    for _ in range(3_000):
        world.call()
        world.rest()
        busy = [owner for owner in world.owners.values() if owner.out]
        if not busy:
            break
        chance.choice(busy).settle()
    assert not any(owner.work or owner.out for owner in world.owners.values())
    world.call()
    world.rest()
    assert world.credit == sum(limits(world))


def test_a_poll_asks_one_owner_after_the_other() -> None:
    visits = Visits(5)
    visits.attach("n0"), visits.attach("n1")
    (first,) = visits.due()
    assert ("n0", 5) == (first.node, first.limit)
    assert [] == visits.due()
    visits.hear("n0", Account(0))
    (second,) = visits.due()
    assert "n1" == second.node
    assert visits.is_busy
    visits.hear("n1", Account(0))
    assert not visits.is_busy


def test_a_poll_asks_no_further_while_something_comes_to_it() -> None:
    visits = Visits(5)
    visits.attach("n0"), visits.attach("n1")
    visits.due()
    visits.hear("n0", Account(2))
    assert [] == visits.due()
    assert visits.is_busy
    visits.detach("n0")
    assert ["n1"] == [terms.node for terms in visits.due()]
