"""Audits: what is right is called right, and every kind of damage is found and named."""

from __future__ import annotations

import hashlib
import runpy
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa
import pytest

from oncewire._ground.contracts import blocks
from oncewire._ground.contracts.blocks import Outcome
from oncewire.pipeline.auditing.run import audit, keep_verdict, last_verdicts
from oncewire.pipeline.auditing.verdict import Finding, Verdict
from oncewire.pipeline.decode import decode
from oncewire.pipeline.tables import BRONZE, SILVER
from tests.support.lakes import DLQ, EVENTS, LEDGER, FakeAgent, Lake, bill

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def busy(lake: Lake, name: str) -> FakeAgent:
    """An agent with four blocks: 1 has four inputs with an effect each, 2 two dead ones, 3 four more, 4 closes."""
    agent = FakeAgent(lake, name)
    orders = agent.orders(10)
    agent.settle([orders[0], orders[1], orders[2], orders[4]], effects=1)
    agent.settle([orders[3], orders[5]], Outcome.DEAD)
    agent.settle(orders[6:], effects=2, settled=orders[5])
    agent.close()
    return agent


def named(verdict: Verdict, check: str, problem: str) -> list[Finding]:
    return [one for one in verdict.findings if (one.check, one.problem) == (check, problem)]


# ---- nothing wrong


@pytest.fixture(scope="module")
def good(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Verdict:
    """One lake with everything that may look wrong and is not."""
    lake = Lake(tmp_path_factory.mktemp("good"))
    first = busy(lake, "first")
    for sequence in (4, 6):
        first.letter(sequence)
    slow = FakeAgent(lake, "slow")
    waiting = slow.orders(5)
    slow.settle([waiting[0], waiting[2]], settled=waiting[0])  # the others are in progress
    queue = FakeAgent(lake, "queue", is_work_queue=True)
    commands = {at: ("cmd.default.demo.queue.do", _command(at)) for at in range(1, 5)}
    queue.settle([1, 3], bodies=commands)
    queue.settle([4], Outcome.TERMINATED, bodies=commands)
    again = busy(lake, "again")
    lake.rows.append(lake.row(LEDGER, again.announced[1]) | {"sequence": lake.reached[LEDGER] + 1})
    lake.reached[LEDGER] += 1  # a block that was published again beyond the duplicate window
    twice = lake.row(EVENTS, first.orders(1)[0])
    again_as = {"Nats-Msg-Id": _effect_of(first)}
    lake.add(EVENTS, "evt.default.demo.bills.made", bill(_effect_of(first)), again_as)  # an effect, published again
    lake.add(EVENTS, twice["subject"], b"no json")
    lake.gap(EVENTS, lake.event("gone", "nobody"), lake.reached[EVENTS])
    ahead = FakeAgent(lake, "ahead")
    beyond = ahead.orders(2)
    ahead.settle(beyond)
    for sequence in beyond:  # the block is in the lake before its inputs are
        lake.drop(EVENTS, sequence)
    lake.reached[EVENTS] = beyond[0] - 1
    return audit(spark, lake.write())


def _command(number: int) -> bytes:
    return msgspec.json.encode({"type": "Do", "payload": {"n": number}, "idempotency_key": f"do-{number}"})


def _effect_of(agent: FakeAgent) -> str:
    row = agent.lake.row(LEDGER, agent.announced[0])
    return blocks.read_announcement(row["payload"]).effects[0]


def test_a_lake_in_order_is_called_good(good: Verdict) -> None:
    assert ([], True, 0) == (good.findings, good.is_good, good.errors)


def test_outcomes_are_counted_by_agent(good: Verdict) -> None:
    told = {
        name: good.counted("outcomes", name, "default/demo/first")
        for name in ("done", "dead", "in_progress", "duplicate")
    }
    assert {"done": 8, "dead": 2, "in_progress": 2, "duplicate": 0} == told
    assert 3 == good.counted("outcomes", "in_progress", "default/demo/slow")


def test_a_work_queue_is_proven_through_its_blocks(good: Verdict) -> None:
    assert 2 == good.counted("outcomes", "done", "default/demo/queue")
    assert 1 == good.counted("outcomes", "terminated", "default/demo/queue")
    assert 3 == good.counted("sums", "listed")
    assert 2 == good.counted("state", "blocks", "default/demo/queue@queue-ledger")


def test_what_lies_above_the_cut_is_pending(good: Verdict) -> None:
    assert 2 == good.counted("outcomes", "pending", "default/demo/ahead")
    assert 1 == good.counted("state", "unproven", "default/demo/ahead@ahead-ledger")
    assert {EVENTS, LEDGER, DLQ} == {stop.stream for stop in good.cut}


def test_what_breaks_its_contract_is_accounted_for_by_quarantine(good: Verdict) -> None:
    assert 0 == sum(1 for one in good.findings if one.check == "silver")
    assert good.counted("silver", "rows") > 30


def test_copies_are_told_and_not_called_wrong(good: Verdict) -> None:
    assert ["republished"] == [one.problem for one in good.notes]
    assert 1 == good.counted("effects", "republished")
    assert 1 == good.counted("sequences", "in_gaps")


def test_effects_on_sr_are_found_by_their_idempotency_keys(spark: SparkSession, tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    agent = FakeAgent(lake, "biller")
    agent.is_on_sr = True
    agent.settle(agent.orders(3), effects=2)
    agent.close()
    lake.drop("sr-events", 2)
    lake.derive()
    found = audit(spark, lake.write())
    assert 5 == found.counted("effects", "once")
    assert ["missing"] == [one.problem for one in found.findings if one.check == "effects"]


def test_a_verdict_is_kept(good: Verdict, tmp_path: Path) -> None:
    assert [] == last_verdicts(tmp_path)
    keep_verdict(tmp_path, good)
    keep_verdict(tmp_path, msgspec.structs.replace(good, at_ms=good.at_ms + 1, is_good=False))
    assert [False, True] == [one.is_good for one in last_verdicts(tmp_path, 5)]
    assert good == last_verdicts(tmp_path, 5)[1]


# ---- damage

Damage = Callable[[FakeAgent], object]


def change_a_byte(agent: FakeAgent) -> int:
    row = agent.lake.row(EVENTS, _first(agent) + 1)
    row["payload"] = row["payload"].replace(b"OrderPlaced", b"OrderPlaceD")
    return _first(agent) + 1


def drop_a_row(agent: FakeAgent) -> int:
    agent.lake.drop(EVENTS, _first(agent) + 2)
    return _first(agent) + 2


def double_a_row(agent: FakeAgent) -> int:
    agent.lake.rows.append(dict(agent.lake.row(EVENTS, _first(agent) + 7)))
    return _first(agent) + 7


def drop_a_block(agent: FakeAgent) -> int:
    agent.lake.drop(LEDGER, agent.announced[1])
    return agent.announced[1]


def forge_a_block(agent: FakeAgent) -> int:
    """It claims one effect less, and nothing else is changed."""
    _rewrite(agent, 0, lambda told: msgspec.structs.replace(told, effects=told.effects[1:]))
    return 1


def forge_a_chain(agent: FakeAgent) -> int:
    """Block 2 says that its inputs were done, not dead, and the hashes behind it are mended."""
    _rewrite(agent, 1, _dead_to_done)
    before = agent.lake.row(LEDGER, agent.announced[1])["payload"]
    for at in (2, 3):
        digest = hashlib.sha256(before).hexdigest()
        _rewrite(agent, at, lambda told, digest=digest: msgspec.structs.replace(told, previous=digest))
        before = agent.lake.row(LEDGER, agent.announced[at])["payload"]
    return 2


def _dead_to_done(told: blocks.Announcement) -> blocks.Announcement:
    [inputs] = told.inputs
    return msgspec.structs.replace(told, inputs=[msgspec.structs.replace(inputs, done=inputs.dead, dead=[])])


def drop_an_effect(agent: FakeAgent) -> str:
    id_ = _effect_of(agent)
    [row] = [row for row in agent.lake.rows if any(one["value"] == id_.encode() for one in row["headers"])]
    agent.lake.rows.remove(row)
    return id_


def forget_a_gap(agent: FakeAgent) -> int:
    sequence = agent.lake.event("gap", "nobody")
    agent.lake.gap(EVENTS, sequence, sequence)
    agent.lake.gaps.pop()
    return sequence


def record_a_gap_elsewhere(agent: FakeAgent) -> int:
    """A gap that is known. It excuses nothing but what may have stood in it: no effect of the agents before."""
    sequence = agent.lake.event("elsewhere", "nobody")
    agent.lake.gap(EVENTS, sequence, sequence)
    return sequence


def make_up_a_gap(agent: FakeAgent) -> int:
    """A message is removed, and somebody writes down that the stream did not have it."""
    agent.lake.silver["runtime"].remove(agent.lake.silver_row("runtime", EVENTS, _first(agent)))
    agent.lake.gap(EVENTS, _first(agent), _first(agent))
    agent.lake.gaps[-1] |= dict.fromkeys(("first_sequence", "last_sequence", "messages", "deleted", "limits"))
    return _first(agent)


def lose_an_input(agent: FakeAgent) -> int:
    """The agent calls everything settled, and one input has no outcome."""
    orders = agent.orders(3)
    agent.settle([orders[0], orders[2]], settled=orders[2])
    return orders[1]


def settle_twice(agent: FakeAgent) -> int:
    agent.settle([_first(agent)], Outcome.TERMINATED)
    return _first(agent)


def change_a_letter(agent: FakeAgent) -> int:
    sequence = agent.letter(_first(agent) + 3)
    agent.lake.row(DLQ, sequence)["payload"] += b" "
    return sequence


def bury_what_is_done(agent: FakeAgent) -> int:
    return agent.letter(_first(agent))


def drop_from_silver(agent: FakeAgent) -> int:
    agent.lake.silver["runtime"].remove(agent.lake.silver_row("runtime", EVENTS, _first(agent) + 8))
    return _first(agent) + 8


def double_in_silver(agent: FakeAgent) -> int:
    """Under another position, so that only its key gives it away."""
    row = agent.lake.silver_row("runtime", EVENTS, _first(agent) + 8)
    before = agent.lake.silver_row("runtime", EVENTS, _first(agent) + 9)
    agent.lake.silver["runtime"].append(row | {"sequence": _first(agent) + 9})
    agent.lake.silver["runtime"].remove(before)
    return _first(agent) + 8


def change_in_silver(agent: FakeAgent) -> int:
    agent.lake.silver_row("runtime", EVENTS, _first(agent) + 8)["digest"] = bytes(32)
    return _first(agent) + 8


def change_a_payload_in_silver(agent: FakeAgent) -> int:
    """Key and digest stay as they were."""
    agent.lake.silver_row("runtime", EVENTS, _first(agent))["payload"] = '{"order":1,"cents":999999}'
    return _first(agent)


def change_a_tenant_in_silver(agent: FakeAgent) -> int:
    """The column of row filters."""
    agent.lake.silver_row("runtime", EVENTS, _first(agent) + 1)["tenant"] = "evil"
    return _first(agent) + 1


def change_a_time_in_silver(agent: FakeAgent) -> int:
    agent.lake.silver_row("runtime", EVENTS, _first(agent) + 2)["event_time"] += timedelta(days=30)
    return _first(agent) + 2


def change_a_block_in_silver(agent: FakeAgent) -> int:
    """A column that holds rows in rows."""
    row = agent.lake.silver_row("ledger", LEDGER, agent.announced[0])
    row["inputs"] = [one | {"start": one["start"] + 1} for one in row["inputs"]]
    return agent.announced[0]


def change_a_time_in_bronze(agent: FakeAgent) -> int:
    """Silver has the time that the stream gave."""
    row = agent.lake.row(EVENTS, _first(agent) + 3)
    row["timestamp"] += timedelta(days=30)
    row["date"] = row["timestamp"].date()
    return _first(agent) + 3


def change_a_tenant_in_bronze(agent: FakeAgent) -> int:
    """In silver too, where it is that of the subject."""
    agent.lake.row(EVENTS, _first(agent) + 4)["tenant"] = "evil"
    return _first(agent) + 4


def change_a_date_in_bronze(agent: FakeAgent) -> int:
    agent.lake.row(EVENTS, _first(agent) + 4)["date"] -= timedelta(days=30)
    return _first(agent) + 4


def change_a_header_in_bronze(agent: FakeAgent) -> int:
    agent.lake.row(EVENTS, _first(agent) + 5)["headers"][0]["value"] = b"in.another"
    return _first(agent) + 5


def refuse(agent: FakeAgent) -> int:
    """A message that silver refuses."""
    return agent.lake.add(EVENTS, f"evt.default.demo.{agent.ledger.agent}.made", b"no json")


def drop_from_quarantine(agent: FakeAgent) -> int:
    [row] = [row for row in agent.lake.quarantine if row["subject"].split(".")[3] == agent.ledger.agent]
    agent.lake.quarantine.remove(row)
    return int(row["sequence"])


def change_in_quarantine(agent: FakeAgent) -> int:
    [row] = [row for row in agent.lake.quarantine if row["subject"].split(".")[3] == agent.ledger.agent]
    row["reason"] = "subject"
    return int(row["sequence"])


def hide_in_quarantine(agent: FakeAgent) -> int:
    """As if another message had its identity."""
    row = agent.lake.silver_row("runtime", EVENTS, _first(agent))
    agent.lake.silver["runtime"].remove(row)
    told = {"family": "runtime", "reason": "identity_conflict", "detail": "its identity stands for another one"}
    agent.lake.quarantine.append(agent.lake.row(EVENTS, _first(agent)) | told)
    return _first(agent)


def keep_the_later_copy(agent: FakeAgent) -> int:
    """Silver must keep the first one in its stream."""
    first, copy = _copied(agent)
    kept = agent.lake.silver_row("runtime", EVENTS, first)
    later = decode(pa.Table.from_pylist([agent.lake.row(EVENTS, copy)], BRONZE.schema)).parts["runtime"].to_pylist()[0]
    agent.lake.silver["runtime"][agent.lake.silver["runtime"].index(kept)] = later
    return first


def copy(agent: FakeAgent) -> int:
    """A message comes again, under its identity."""
    row = agent.lake.row(EVENTS, _first(agent))
    return agent.lake.add(EVENTS, row["subject"], row["payload"])


def _copied(agent: FakeAgent) -> tuple[int, int]:
    body = agent.lake.row(EVENTS, _first(agent))["payload"]
    first, later = (row["sequence"] for row in agent.lake.rows if row["payload"] == body)
    return first, later


def drop_other_content_as_a_copy(agent: FakeAgent) -> int:
    """It belongs in quarantine, as the other content of an identity."""
    first, later = _copied(agent)
    agent.lake.row(EVENTS, later)["payload"] = agent.lake.row(EVENTS, later)["payload"].replace(b"Placed", b"PlaceD")
    assert first < later
    return later


def file_under_another_family(agent: FakeAgent) -> int:
    row = agent.lake.silver_row("runtime", EVENTS, _first(agent))
    agent.lake.silver["runtime"].remove(row)
    names = [name for name, _ in SILVER["message"].columns]
    agent.lake.silver.setdefault("message", []).append({name: row.get(name) for name in names})
    return _first(agent)


def _first(agent: FakeAgent) -> int:
    told = blocks.read_announcement(agent.lake.row(LEDGER, agent.announced[0])["payload"])
    return told.inputs[0].done[0][0]


def _rewrite(agent: FakeAgent, at: int, change: Callable[[blocks.Announcement], blocks.Announcement]) -> None:
    row = agent.lake.row(LEDGER, agent.announced[at])
    row["payload"] = blocks.write_announcement(change(blocks.read_announcement(row["payload"])))


DAMAGE: dict[str, Damage] = {
    one.__name__: one
    for one in (
        change_a_byte, drop_a_row, double_a_row, drop_a_block, forge_a_block, forge_a_chain, drop_an_effect,
        forget_a_gap, record_a_gap_elsewhere, make_up_a_gap, lose_an_input, settle_twice, change_a_letter,
        bury_what_is_done, drop_from_silver, double_in_silver, change_in_silver, change_a_payload_in_silver,
        change_a_tenant_in_silver, change_a_time_in_silver, change_a_block_in_silver, change_a_time_in_bronze,
        change_a_tenant_in_bronze, change_a_date_in_bronze, change_a_header_in_bronze, drop_from_quarantine,
        change_in_quarantine, hide_in_quarantine, keep_the_later_copy, drop_other_content_as_a_copy,
        file_under_another_family,
    )
}  # fmt: skip
BEFORE: dict[Damage, Callable[[FakeAgent], int]] = {
    drop_from_quarantine: refuse,
    change_in_quarantine: refuse,
    keep_the_later_copy: copy,
    drop_other_content_as_a_copy: copy,
}
"""What a damage needs in a lake that is in order."""
DERIVED: dict[Damage, tuple[str, str, str]] = {
    change_in_silver: ("silver", "differs", EVENTS),
    change_a_payload_in_silver: ("silver", "differs", EVENTS),
    change_a_tenant_in_silver: ("silver", "differs", EVENTS),
    change_a_time_in_silver: ("silver", "differs", EVENTS),
    change_a_block_in_silver: ("silver", "differs", LEDGER),
    change_a_time_in_bronze: ("silver", "differs", EVENTS),
    change_a_tenant_in_bronze: ("sequences", "differs", EVENTS),
    change_a_date_in_bronze: ("sequences", "differs", EVENTS),
    change_a_header_in_bronze: ("silver", "differs", EVENTS),
    drop_from_quarantine: ("quarantine", "missing", EVENTS),
    change_in_quarantine: ("quarantine", "differs", EVENTS),
    hide_in_quarantine: ("silver", "no_conflict", EVENTS),
    keep_the_later_copy: ("silver", "later_copy", EVENTS),
    drop_other_content_as_a_copy: ("silver", "dropped", EVENTS),
    file_under_another_family: ("silver", "differs", EVENTS),
}
"""Damage that shows between bronze and what was derived from it, with its finding."""


class Damaged:
    """One lake with one agent per kind of damage, audited once."""

    def __init__(self, spark: SparkSession, path: Path) -> None:
        lake = Lake(path)
        agents = {name: busy(lake, name.replace("_", "")) for name in DAMAGE}
        self.agents = agents
        for name, damage in DAMAGE.items():
            if damage in BEFORE:
                BEFORE[damage](agents[name])
        lake.derive()
        self.done = {name: damage(agents[name]) for name, damage in DAMAGE.items()}
        self.verdict = audit(spark, lake.write())

    def found(self, name: str, check: str, problem: str) -> Finding:
        """The finding about an agent's chain, or about positions."""
        agent = self.agents[name]
        mine = [one for one in named(self.verdict, check, problem) if one.chain in ("", agent.chain, agent.ledger.name)]
        assert mine, [one.sentence for one in self.verdict.findings]
        return mine[0]

    def at(self, name: str, check: str, problem: str) -> list[tuple[str, int, int]]:
        return [(one.stream, one.first, one.last) for one in named(self.verdict, check, problem)]


@pytest.fixture(scope="module")
def damaged(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Damaged:
    return Damaged(spark, tmp_path_factory.mktemp("damaged"))


def test_damage_is_not_called_good(damaged: Damaged) -> None:
    assert not damaged.verdict.is_good
    assert damaged.verdict.errors == len(damaged.verdict.findings)


def test_a_changed_byte_is_found_in_its_block(damaged: Damaged) -> None:
    """By the block's sums, and by its position: silver read the message before it was changed."""
    assert 1 == damaged.found("change_a_byte", "sums", "bodies").block
    assert 1 == damaged.found("change_a_byte", "state", "differs").block
    at = damaged.done["change_a_byte"]
    assert (EVENTS, at, at) in damaged.at("change_a_byte", "silver", "differs")


def test_a_dropped_row_is_named(damaged: Damaged) -> None:
    at = damaged.done["drop_a_row"]
    assert (EVENTS, at, at) in damaged.at("drop_a_row", "sequences", "missing")
    found = damaged.found("drop_a_row", "outcomes", "not_in_bronze")
    assert (at, 1) == (found.first, found.block)


def test_a_doubled_row_is_named(damaged: Damaged) -> None:
    at = damaged.done["double_a_row"]
    assert [(EVENTS, at, at)] == damaged.at("double_a_row", "sequences", "doubled")


def test_a_dropped_block_is_named(damaged: Damaged) -> None:
    at = damaged.done["drop_a_block"]
    assert (LEDGER, at, at) in damaged.at("drop_a_block", "sequences", "missing")
    found = damaged.found("drop_a_block", "chain", "missing")
    assert (2, 2) == (found.first, found.last)


def test_a_forged_block_breaks_its_chain(damaged: Damaged) -> None:
    found = damaged.found("forge_a_block", "chain", "broken")
    assert 2 == found.block
    assert "behind a block 1 " in found.detail


def test_a_forged_chain_with_mended_hashes_does_not_add_up(damaged: Damaged) -> None:
    assert 2 == damaged.found("forge_a_chain", "state", "differs").block
    chain = damaged.agents["forge_a_chain"].chain
    assert [] == [one for one in named(damaged.verdict, "chain", "broken") if one.chain == chain]


def test_a_dropped_effect_is_named_by_its_id(damaged: Damaged) -> None:
    found = damaged.found("drop_an_effect", "effects", "missing")
    assert (damaged.done["drop_an_effect"], 1, EVENTS) == (found.id, found.block, found.stream)


def test_a_gap_without_its_record_is_named(damaged: Damaged) -> None:
    at = damaged.done["forget_a_gap"]
    assert (EVENTS, at, at) in damaged.at("forget_a_gap", "sequences", "missing")


def test_a_gap_without_cause_excuses_nothing(damaged: Damaged) -> None:
    at = damaged.done["make_up_a_gap"]
    assert [(EVENTS, at, at)] == damaged.at("make_up_a_gap", "sequences", "unknown_gap")
    assert (EVENTS, at, at) in damaged.at("make_up_a_gap", "sequences", "missing")
    assert at == damaged.found("make_up_a_gap", "outcomes", "not_in_bronze").first
    at = damaged.done["record_a_gap_elsewhere"]
    assert (EVENTS, at, at) not in damaged.at("record_a_gap_elsewhere", "sequences", "missing")


def test_an_input_that_nobody_settles_is_lost_not_in_progress(damaged: Damaged) -> None:
    at = damaged.done["lose_an_input"]
    assert [(EVENTS, at, at)] == damaged.at("lose_an_input", "outcomes", "no_outcome")


def test_two_outcomes_are_named_with_their_blocks(damaged: Damaged) -> None:
    found = damaged.found("settle_twice", "outcomes", "two_outcomes")
    assert damaged.done["settle_twice"] == found.first
    assert "done in block 1, terminated in block 5" == found.detail


def test_damage_in_silver_is_named_by_position_and_id(damaged: Damaged) -> None:
    at = damaged.done["drop_from_silver"]
    [missing] = [one for one in named(damaged.verdict, "silver", "missing") if one.first == at]
    assert (EVENTS, "in.dropfromsilver-8") == (missing.stream, missing.id)
    at = damaged.done["double_in_silver"]
    assert {at, at + 1} == {one.first for one in named(damaged.verdict, "silver", "doubled")}
    at = damaged.done["change_in_silver"]
    assert (EVENTS, at, at) in damaged.at("change_in_silver", "silver", "differs")


@pytest.mark.parametrize("damage", DERIVED, ids=lambda damage: damage.__name__)
def test_what_does_not_follow_from_bronze_is_named_by_its_place(damaged: Damaged, damage: Damage) -> None:
    check, problem, stream = DERIVED[damage]
    at = damaged.done[damage.__name__]
    assert (stream, at) in {
        (one.stream, sequence)
        for one in named(damaged.verdict, check, problem)
        for sequence in range(one.first, one.last + 1)
    }


@pytest.mark.parametrize(
    ("damage", "column"),
    [
        (change_a_payload_in_silver, "payload"),
        (change_a_tenant_in_silver, "tenant"),
        (change_a_time_in_silver, "event_time"),
        (change_a_block_in_silver, "inputs"),
        (change_a_time_in_bronze, "timestamp and event_time and date"),
        (change_in_quarantine, "reason"),
    ],
    ids=lambda damage: getattr(damage, "__name__", None),
)
def test_the_columns_that_differ_are_named(damaged: Damaged, damage: Damage, column: str) -> None:
    check, problem, stream = DERIVED[damage]
    at = damaged.done[damage.__name__]
    (found,) = [one for one in named(damaged.verdict, check, problem) if (one.stream, one.first) == (stream, at)]
    assert found.detail.endswith(f"says something else than bronze: {column}")


def test_letters_must_be_their_originals(damaged: Damaged) -> None:
    at = damaged.done["change_a_letter"]
    assert [(DLQ, at, at)] == damaged.at("change_a_letter", "letters", "other_bytes")
    buried = damaged.found("bury_what_is_done", "letters", "contradicted")
    assert (damaged.done["bury_what_is_done"], 1) == (buried.first, buried.block)


def test_the_example_audits_a_lake(
    spark: SparkSession,  # the example's own call finds it: a process has one session
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lake = Lake(tmp_path)
    agent = FakeAgent(lake, "biller")
    agent.settle(agent.orders(3), effects=1)
    lake.silver = {"message": [], "realtime": []}
    lake.derive()
    monkeypatch.setenv("ONCEWIRE_LAKE", str(lake.write()))
    runpy.run_path(str(EXAMPLE))
    assert "good\nMESHFORGE_EVENTS: 6 messages\n" == capsys.readouterr().out


EXAMPLE = Path(__file__).parents[2] / "examples" / "lake_audit.py"
