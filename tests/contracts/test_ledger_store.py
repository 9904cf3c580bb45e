"""What every ledger store keeps, sentence by sentence; each test runs on a SQLite file and on a real PostgreSQL."""

from __future__ import annotations

import contextlib
import hashlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest

from oncewire._ground.contracts import blocks
from oncewire._ground.contracts.blocks import Outcome
from oncewire._ground.errors import OncewireError, Refused
from oncewire._ground.ledger import rules
from oncewire._ground.ledger.processes import process_name
from oncewire._ground.ledger.rules import Delayed
from oncewire._ground.ledger.store import Attempt, Block, Mark, Store
from tests.support.ledgers import (
    AGENT,
    NAME,
    NOW_MS,
    SOURCES,
    TENANT,
    WORKSPACE,
    LedgerKit,
    PostgresKit,
    SqliteKit,
    content,
    entry,
    found_by,
    handle,
    insert,
    key_of,
    mark,
    sending,
    settle,
)

WAIT_S = 30.0


@pytest.fixture(params=["sqlite", "postgres"])
def kit(request: pytest.FixtureRequest, tmp_path: Path) -> LedgerKit:
    return SqliteKit(tmp_path) if request.param == "sqlite" else PostgresKit()


@pytest.fixture
def store(kit: LedgerKit) -> Iterator[Store]:
    opened = kit.new()
    yield opened
    opened.close()


@pytest.fixture
def other(kit: LedgerKit) -> Iterator[Store]:
    """Another process's view of the same ledger."""
    opened = kit.new()
    yield opened
    opened.close()


# ---- keys


def test_a_settled_input_is_found_with_its_place(store: Store) -> None:
    settle(store, [1, 2, 3])
    settle(store, [4])
    assert found_by(store, [2, 4, 5]) == {2: (1, 1), 4: (2, 0)}


def test_keys_that_are_only_looked_for_are_found_and_not_claimed(store: Store, other: Store) -> None:
    settle(store, [1])
    store.begin()
    assert {key_of(1)} == set(store.claim([key_of(2)], [key_of(1), key_of(3)]))
    store.commit()
    assert found_by(other, [2, 3]) == {}


def test_an_input_that_did_not_settle_is_free_again_after_the_commit(store: Store, other: Store) -> None:
    store.begin()
    store.claim([key_of(1), key_of(2)])
    store.append(content([entry(2)]), SOURCES, [])
    store.commit()
    assert found_by(other, [1, 2]) == {2: (1, 0)}


def test_a_claim_alone_leaves_nothing(store: Store, other: Store) -> None:
    store.begin()
    store.claim([key_of(1)])
    store.commit()
    assert found_by(other, [1]) == {}
    settle(other, [1])
    assert found_by(store, [1]) == {1: (1, 0)}


def test_an_input_that_is_given_up_is_found_by_its_position(store: Store, other: Store) -> None:
    store.begin()
    store.claim([key_of(7)], [entry(7, Outcome.DEAD).key])
    store.append(content([entry(7, Outcome.DEAD)]), SOURCES, [])
    store.commit()
    other.begin()
    assert {entry(7, Outcome.DEAD).key} == set(other.claim([key_of(7)], [entry(7, Outcome.DEAD).key]))
    other.rollback()


def test_keys_survive_a_restart(kit: LedgerKit) -> None:
    first = kit.new()
    settle(first, [1, 2])
    first.close()
    second = kit.new()
    assert found_by(second, [1, 2, 3]) == {1: (1, 0), 2: (1, 1)}
    second.close()


def test_another_process_sees_what_was_settled_after_it_opened(store: Store, other: Store) -> None:
    settle(store, [1])
    settle(other, [2])
    settle(store, [3])
    assert found_by(other, [1, 2, 3]) == found_by(store, [1, 2, 3]) == {1: (1, 0), 2: (2, 0), 3: (3, 0)}


def test_agents_in_one_ledger_do_not_see_each_other(kit: LedgerKit, store: Store) -> None:
    elsewhere = kit.new("shipper")
    settle(store, [1])
    settle(elsewhere, [5])
    assert (store.head().number, elsewhere.head().number) == (1, 1)
    assert store.head().hash != elsewhere.head().hash
    assert elsewhere.unconfirmed() == [(1, [(0, 0)])]
    elsewhere.close()


# ---- two at once


def in_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_only_the_first_of_two_concurrent_transactions_settles_an_input(
    kit: LedgerKit, store: Store, other: Store
) -> None:
    """The second waits for the first and finds the input settled; its own rows are rolled back."""
    asking = threading.Event()
    seen: list[list[bytes]] = []

    def second() -> None:
        asking.set()
        other.begin()
        seen.append(list(other.claim([key_of(1), key_of(2)])))
        other.rollback()

    store.begin()
    assert store.claim([key_of(2), key_of(1)]) == {}
    handle(store, 1)
    thread = in_thread(second)
    assert asking.wait(WAIT_S)
    store.append(content([entry(1)]), SOURCES, [])
    store.commit()
    thread.join(WAIT_S)
    assert [[key_of(1)]] == seen
    assert kit.rows() == [1]


def test_many_threads_settle_each_input_once(kit: LedgerKit) -> None:
    """Eight processes go through the same 40 inputs in their own orders: 40 rows, each entry in one block."""
    errors: list[BaseException] = []

    def work(start: int) -> None:
        mine = kit.new()
        try:
            for number in [(start * 7 + step) % 40 for step in range(40)]:
                settle_if_new(mine, number)
        except BaseException as error:
            errors.append(error)
        finally:
            mine.close()

    threads = [in_thread(partial(work, start)) for start in range(8)]
    for thread in threads:
        thread.join(WAIT_S * 3)
    assert errors == []
    assert list(range(40)) == kit.rows()
    store = kit.new()
    assert sorted(one.sequence for number in range(1, 41) for one in entries_of(store, number)) == list(range(40))
    assert_chain_holds(store)
    store.close()


def settle_if_new(store: Store, number: int) -> None:
    store.begin()
    if store.claim([key_of(number)]):
        store.rollback()
        return
    handle(store, number)
    store.append(content([entry(number)]), SOURCES, [])
    store.commit()


def entries_of(store: Store, number: int) -> list[rules.Entry]:
    block = store.block(number)
    assert block is not None
    return block.content.entries


# ---- rollback


def test_a_rollback_leaves_nothing(kit: LedgerKit, store: Store, other: Store) -> None:
    settle(store, [1])
    before = store.head()
    store.begin()
    store.claim([key_of(2)])
    handle(store, 2)
    store.mark([Mark(1, 0, 0, "LEDGER", 9)])
    store.append(content([entry(2)], 1), SOURCES, [Delayed(5, sending("late"))])
    store.rollback()
    assert (before, [], None, []) == (store.head(), kit.rows(), store.block(2), store.due(10, 10))
    assert store.confirmed().block == 0
    assert found_by(store, [1, 2]) == found_by(other, [1, 2]) == {1: (1, 0)}
    settle(store, [3])
    assert found_by(store, [1, 2, 3]) == {1: (1, 0), 3: (2, 0)}


def test_a_number_is_given_again_after_a_rollback(store: Store) -> None:
    store.begin()
    store.claim([key_of(1)])
    assert store.append(content([entry(1)]), SOURCES, []).number == 1
    assert store.block(1) is not None
    store.rollback()
    settle(store, [2])
    assert [one.identity for one in entries_of(store, 1)] == ["key:2"]


def test_a_rollback_without_a_transaction_changes_nothing(store: Store) -> None:
    settle(store, [1])
    store.rollback()
    assert found_by(store, [1]) == {1: (1, 0)}
    settle(store, [2])


def test_a_savepoint_is_kept_or_undone_by_itself(kit: LedgerKit, store: Store) -> None:
    store.begin()
    store.claim([key_of(1)])
    for number, finish in ((1, store.keep), (2, store.undo), (3, store.keep)):
        insert(store.savepoint(), number)
        finish()
    store.append(content([entry(1)]), SOURCES, [])
    store.commit()
    assert kit.rows() == [1, 3]


def test_a_failed_statement_is_undone_with_its_savepoint(kit: LedgerKit, store: Store) -> None:
    store.begin()
    handle(store, 1)
    tx = store.savepoint()
    with pytest.raises(Exception, match=r"(?i)unique"):
        insert(tx, 1)
    store.undo()
    store.append(content([entry(1)]), SOURCES, [])
    store.commit()
    assert kit.rows() == [1]


@pytest.mark.parametrize(
    "end", ["commit()", "rollback()", "close()", "COMMIT", "ROLLBACK", "  commit", "COMMIT -- x", "END", "BEGIN"]
)
def test_a_handler_cannot_end_the_transaction(kit: LedgerKit, store: Store, end: str) -> None:
    """It is refused there and then; the other inputs of the group go on."""
    store.begin()
    store.claim([key_of(1)])
    tx = store.savepoint()
    insert(tx, 1)
    with pytest.raises(Refused, match=r"a handler may not (end or begin|close) the ledger's"):
        getattr(tx, end.removesuffix("()"))() if end.endswith("()") else tx.execute(end)
    store.undo()
    store.append(content([entry(1)]), SOURCES, [])
    store.commit()
    assert kit.rows() == []
    assert found_by(store, [1]) == {1: (1, 0)}


# ---- the chain


def assert_chain_holds(store: Store) -> None:
    """Each announcement names the hash of the one before; the state is what all entries add up to, in any order."""
    head, previous = store.head(), blocks.NO_HASH
    elements: list[bytes] = []
    for number in range(1, head.number + 1):
        block = store.block(number)
        assert block is not None
        announced = blocks.read_announcement(block.announcement)
        assert (number, previous.hex()) == (announced.number, announced.previous)
        previous = hashlib.sha256(block.announcement).digest()
        elements += [rules.element(NAME, one) for one in block.content.entries if one.outcome in blocks.COUNTED]
        assert announced.state == blocks.add(blocks.NO_STATE, elements[::-1]).hex()
    assert (previous, blocks.add(blocks.NO_STATE, sorted(elements))) == (head.hash, head.state)


def test_blocks_chain_and_states_add_up(store: Store, other: Store) -> None:
    settle(store, [1, 2], effects=2)
    settle(other, [3])
    store.begin()
    given_up = [entry(4, Outcome.DEAD), entry(5, Outcome.DUPLICATE), entry(6, Outcome.TERMINATED)]
    store.append(content(given_up, 1), SOURCES, [])
    store.commit()
    settle(other, [])
    assert_chain_holds(store)


def test_a_block_is_read_as_it_was_written(store: Store) -> None:
    appended = settle(store, [1, 2], effects=3)
    block = store.block(1)
    assert block is not None
    assert (content([entry(1), entry(2)], 3), appended.announcement) == (block.content, block.announcement)
    assert store.block(2) is None


# ---- what is confirmed


def test_what_is_not_marked_is_unconfirmed(store: Store) -> None:
    """The announcement counts as the last effect."""
    settle(store, [1], effects=3)
    settle(store, [2])
    assert store.unconfirmed() == [(1, [(0, 3)]), (2, [(0, 0)])]
    mark(store, Mark(1, 1, 1, "EVENTS", 10), Mark(1, 3, 3, "LEDGER", 1))
    assert store.unconfirmed() == [(1, [(0, 0), (2, 2)]), (2, [(0, 0)])]


def test_confirmed_stops_at_the_first_hole_whoever_marked_what(store: Store, other: Store) -> None:
    """Without this, one process's mark would skip the other's block, and its effects would be lost."""
    settle(store, [1], effects=1)
    settle(other, [2], effects=1)
    mark(other, Mark(2, 0, 1, "EVENTS", 20))
    assert (store.confirmed().block, store.confirmed().streams) == (0, {})
    mark(store, Mark(1, 0, 0, "EVENTS", 19))
    assert store.confirmed().block == 0
    mark(store, Mark(1, 1, 1, "LEDGER", 4))
    assert (other.confirmed().block, other.confirmed().streams) == (2, {"EVENTS": 20, "LEDGER": 4})
    assert store.unconfirmed() == []


def test_no_marks_are_no_error(store: Store) -> None:
    store.begin()
    store.mark([])
    store.commit()

    assert 0 == store.confirmed().block


def test_marks_that_overlap_do_not_count_twice(store: Store, other: Store) -> None:
    """Two processes that sent the same effects again: five marked of four, and one is still missing."""
    settle(store, [1], effects=3)
    mark(store, Mark(1, 0, 2, "EVENTS", 3))
    mark(other, Mark(1, 1, 2, "EVENTS", 3))
    assert (store.confirmed().block, store.unconfirmed()) == (0, [(1, [(3, 3)])])


def test_a_shorter_mark_takes_nothing_away(store: Store) -> None:
    settle(store, [1], effects=3)
    mark(store, Mark(1, 0, 2, "EVENTS", 9))
    mark(store, Mark(1, 0, 0, "EVENTS", 7))
    mark(store, Mark(1, 3, 3, "LEDGER", 1))
    assert (store.confirmed().block, store.confirmed().streams) == (1, {"EVENTS": 9, "LEDGER": 1})


def test_a_mark_that_comes_late_changes_nothing(store: Store) -> None:
    settle(store, [1])
    mark(store, Mark(1, 0, 0, "LEDGER", 5))
    mark(store, Mark(1, 0, 0, "LEDGER", 5))
    settle(store, [2])
    mark(store, Mark(2, 0, 0, "LEDGER", 6))
    assert (store.confirmed().block, store.confirmed().streams) == (2, {"LEDGER": 6})


def test_the_next_announcement_says_what_is_confirmed(store: Store) -> None:
    settle(store, [1])
    mark(store, Mark(1, 0, 0, "LEDGER", 5))
    announced = blocks.read_announcement(settle(store, [2]).announcement)
    assert announced.confirmed == blocks.Confirmed(1, {"LEDGER": 5})


# ---- small facts


def attempt(number: int, deliveries: int = 1, error: str = "") -> Attempt:
    return Attempt(key_of(number), "EVENTS", "biller_consumer", number, deliveries, 1_000, error)


def test_an_attempt_is_there_until_it_is_forgotten(store: Store, other: Store) -> None:
    store.begun([attempt(2), attempt(1)])
    store.begun([attempt(1, 2, "ValueError: x")])
    assert sorted(other.attempts()) == sorted([attempt(1, 2, "ValueError: x"), attempt(2)])
    other.forget_attempts([key_of(1), key_of(3)])
    assert [attempt(2)] == store.attempts()


def test_an_attempt_is_renewed_only_while_it_is_there(store: Store, other: Store) -> None:
    """One that another process has settled meanwhile must not come back: it would be given up some time later."""
    store.begun([attempt(1, 2, "ValueError: x"), attempt(2)])
    other.forget_attempts([key_of(2)])
    store.renew_attempts([key_of(2), key_of(1), key_of(3)], 5_000)
    assert [attempt(1, 2, "ValueError: x")._replace(started_ms=5_000)] == store.attempts()


def test_an_attempt_in_a_transaction_goes_with_it(store: Store) -> None:
    store.begin()
    store.begun([attempt(1)])
    store.rollback()
    assert store.attempts() == []
    store.begun([])
    store.begun([attempt(1)])
    store.forget_attempts([key_of(1)])
    assert store.attempts() == []


def test_the_first_recorded_result_of_a_call_stays(store: Store, other: Store) -> None:
    store.keep_call(key_of(1), "charge", b"1")
    other.keep_call(key_of(1), "charge", b"2")
    assert (other.call_result(key_of(1), "charge"), other.call_result(key_of(1), "refund")) == (b"1", None)


def test_delayed_effects_are_due_in_order(store: Store) -> None:
    later = [Delayed(30, sending("c")), Delayed(10, sending("a")), Delayed(20, sending("b"))]
    settle(store, [1], delayed=later)
    assert store.next_due_ms() == 10
    assert [one.sending.id for one in store.due(20, 10)] == ["a", "b"]
    assert [one.sending.id for one in store.due(20, 1)] == ["a"]
    assert [one.due_ms for one in store.waiting()] == [10, 20, 30]


def test_a_delayed_effect_is_taken_by_one_process(store: Store, other: Store) -> None:
    settle(store, [1], delayed=[Delayed(10, sending("a")), Delayed(10, sending("b"))])
    assert {"a"} == store.drop_due(["a"])
    assert {"b"} == other.drop_due(["a", "b"])
    assert (store.next_due_ms(), store.due(100, 10)) == (None, [])


# ---- processes


def test_a_process_that_left_was_clean_and_one_that_died_was_not(kit: LedgerKit, store: Store) -> None:
    assert not store.enter(process_name(), 1)
    with killed_after(kit, ENTER):
        pass
    second = kit.new()
    assert second.enter(process_name(), 2)
    third = kit.new()
    name = process_name()
    assert not third.enter(name, 3)
    third.leave(name)
    third.close()
    second.close()


def test_a_living_process_is_not_taken_for_dead(kit: LedgerKit, store: Store) -> None:
    with killed_after(kit, ENTER):
        assert not store.enter(process_name(), 2)


# ---- faults


PROCESS = """
import sys
from oncewire._ground.ledger.stores import open_store
from oncewire._ground.ledger.processes import process_name
from tests.support.ledgers import *
store = open_store(sys.argv[1])
store.open(TENANT, WORKSPACE, AGENT)
"""
ENTER = PROCESS + "store.enter(process_name(), 1)\nprint('ready', flush=True)\nsys.stdin.read()\n"
INSIDE = PROCESS + (
    "store.begin()\nstore.claim([key_of(1)])\nhandle(store, 1)\n"
    "store.append(content([entry(1)], 1), SOURCES, [])\nprint('ready', flush=True)\nsys.stdin.read()\n"
)


@contextlib.contextmanager
def killed_after(kit: LedgerKit, code: str) -> Iterator[None]:
    """A process that stands still once it has said that it is ready, and is killed at the end of the block."""
    command = [sys.executable, "-c", code, kit.url]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield
        finally:
            process.kill()


def test_nothing_is_left_of_a_process_that_was_killed_inside_its_transaction(kit: LedgerKit, store: Store) -> None:
    settle(store, [7])
    with killed_after(kit, INSIDE):
        pass
    assert found_by(store, [1, 7]) == {7: (1, 0)}
    assert (kit.rows(), store.head().number) == ([], 1)
    settle(store, [1], rows=True)
    assert kit.rows() == [1]


def test_a_ledger_keeps_its_id_and_a_store_of_its_own_tells_it(kit: LedgerKit, store: Store, other: Store) -> None:
    assert store.identity() == other.identity()
    assert store.ledger_id == other.ledger_id == store.identity()["ledger"]
    ledger = other.open(TENANT, WORKSPACE, AGENT)
    assert (NAME, store.ledger_id) == (ledger.name, ledger.id.rpartition("-")[0])


@pytest.mark.parametrize("found", ["2", "99"])
def test_a_ledger_of_another_format_is_refused(kit: LedgerKit, store: Store, found: str) -> None:
    """One that knows what is done by names without tenants would run all of it again."""
    kit.sql(f"UPDATE ledger_meta SET value = '{found}' WHERE name = 'format'")
    with pytest.raises(Refused, match=f"format {found}"):
        kit.new()


def test_a_large_block_is_kept_compressed_and_read_as_it_was(kit: LedgerKit, store: Store, other: Store) -> None:
    settle(store, list(range(1, 201)))
    [[stored]] = kit.sql("SELECT length(content) FROM ledger_blocks WHERE number = 1")
    read = other.block(1)
    assert read is not None
    assert list(range(1, 201)) == [entry.sequence for entry in read.content.entries]
    assert 2 * stored < len(msgspec.msgpack.encode(read.content))


def test_a_closed_store_says_so(kit: LedgerKit) -> None:
    closed = kit.new()
    closed.close()
    with pytest.raises(OncewireError, match="closed"):
        closed.begin()


def test_a_note_is_kept_per_agent_and_replaced(kit: LedgerKit, store: Store, other: Store) -> None:
    store.note("EVENTS", "1")
    store.note("EVENTS", "2")

    with contextlib.closing(kit.new("somebody")) as stranger:
        assert ("2", None) == (other.noted("EVENTS"), stranger.noted("EVENTS"))


# ---- forgetting


def settle_old(store: Store, count: int, *, effects: int = 0) -> None:
    """Blocks 1 … count, all sent at NOW_MS, confirmed but for the last."""
    for number in range(1, count + 1):
        settle(store, [2 * number, 2 * number + 1], effects=effects)
    mark(store, *(Mark(block, 0, effects, "EVENTS", block) for block in range(1, count)))


def test_old_blocks_are_forgotten_with_their_keys_and_calls_and_the_base_stands_for_them(
    kit: LedgerKit, store: Store, other: Store
) -> None:
    settle_old(store, 5)
    for number in (2, 9):
        store.keep_call(key_of(number), "charge", b"1")
    third = blocks.read_announcement(read(store, 3).announcement)

    assert 3 == store.forget(NOW_MS + 1, 3)

    for one in (store, other):
        base = one.base()
        assert (3, third.state) == (base.number, base.state.hex())
        assert base.hash.hex() == blocks.read_announcement(read(one, 4).announcement).previous
        assert [None, None, None] == [one.block(number) for number in (1, 2, 3)]
        assert {8: (4, 0), 9: (4, 1), 10: (5, 0), 11: (5, 1)} == found_by(one, range(2, 12))
        assert (None, b"1") == (one.call_result(key_of(2), "charge"), one.call_result(key_of(9), "charge"))
    assert 6 == settle(other, [2]).number


def test_what_is_young_unconfirmed_or_the_newest_is_never_forgotten(store: Store) -> None:
    settle_old(store, 4)

    assert 0 == store.forget(NOW_MS, 10)
    assert 3 == store.forget(NOW_MS + 1, 10)
    assert 0 == store.forget(NOW_MS + 1, 10)

    mark(store, Mark(4, 0, 0, "LEDGER", 4))
    assert 0 == store.forget(NOW_MS + 1, 10)
    assert 4 == read(store, 4).number


def test_attempts_and_delayed_effects_outlive_the_blocks_before_them(store: Store) -> None:
    settle(store, [1], delayed=[Delayed(NOW_MS + 5, sending("fx.late"))])
    settle(store, [2])
    mark(store, Mark(1, 0, 0, "LEDGER", 1))
    store.begun([Attempt(b"k" * 16, "EVENTS", "biller_consumer", 9, 2, NOW_MS, "")])

    assert 1 == store.forget(NOW_MS + 1, 10)
    assert ["fx.late"] == [one.sending.id for one in store.waiting()]
    assert [9] == [one.sequence for one in store.attempts()]


def test_two_processes_that_forget_at_once_forget_the_same(store: Store, other: Store) -> None:
    settle_old(store, 60)
    counts: list[int] = []
    threads = [
        threading.Thread(target=lambda one=one: counts.append(one.forget(NOW_MS + 1, 50))) for one in (store, other)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)

    assert (len(counts), max(counts)) == (2, 50)
    assert store.base() == other.base()
    assert store.base().number >= 50
    assert {120: (60, 0)} == found_by(store, [2, 120])


def read(store: Store, number: int) -> Block:
    block = store.block(number)
    assert block is not None
    return block
