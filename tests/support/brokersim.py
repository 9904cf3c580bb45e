"""A whole broker from a seed: its rules, its log on a simulated disk, its clients, its clock. No thread, no chance.

`Simulation(seed).run(steps)` does so many random steps and returns what is wrong, as sentences; a seed replays exactly.
The clients keep their own ledger of what they were told, and a simple model of what may happen:

    an acknowledged produce is delivered to every group until the group acked it, or is among its dead letters
    an acked message never comes again to its group, whatever crashed
    a (topic, offset) is one message for ever
    a reader gets the first deliveries of a partition in offset order; no more are in flight than may be
    a reader holds no more than its credit, and has all of it again when it holds nothing
    only the last owner settles; attempts never exceed the deliveries that were made
    two messages with one idempotency key are a TTL apart
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from oncewire._ground.contracts.broker import BrokerEnvelope, Delivery, ProduceBody, RetryPolicy
from oncewire._ground.contracts.records import encode
from oncewire._ground.errors import Conflict, ContractViolation, OncewireError, OutcomeUnknown
from oncewire.broker import rules, upkeep
from oncewire.broker.desk import Desk
from oncewire.broker.engine import BufferFull, Consume, Idempotency, Limits, Produced, Settle
from oncewire.broker.image import capture
from oncewire.broker.journal import replay_into
from oncewire.broker.log.writer import Log
from oncewire.broker.progress import LEASED
from oncewire.broker.state import State, Subscriber
from tests.support.disk import SimDisk

GROUPS = ("g", "h")
TOPICS = ("t", "u")
LIMITS = Limits(
    in_flight_max=4,
    partition_messages_max=12,
    partition_bytes_max=400,
    settled_age_ms=3_000,
    idempotency_ttl_ms=20_000,
    dead_letter_age_ms=10**12,
    group_idle_ms=10**12,
    group_trial_ms=10**12,
)


class Client:
    """A reader of a group that remembers what it was given."""

    def __init__(self, world: Simulation, topic: str, group: str, owner: str) -> None:
        self.world, self.topic, self.group, self.owner = world, topic, group, owner
        self.space = world.chance.randint(1, 6)
        self.credit = world.chance.choice([1, 2, 5])
        self.subscriber: Subscriber | None = None

    def room(self) -> int:
        return self.space

    def deliver(self, deliveries: Sequence[Delivery]) -> None:
        if len(deliveries) > self.space:
            self.world.problems.append("a reader got more than it had room for")
        self.space -= len(deliveries)
        for one in deliveries:
            self.world.delivered(self, one)

    def ended(self, error: OncewireError) -> None:
        self.subscriber = None


class Simulation:
    """See the module's head."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.chance = random.Random(seed)
        self.disk = SimDisk(seed)
        self.ids = itertools.count(1)
        self.numbers = itertools.count(1)
        self.now_ms = 1_800_000_000_000
        self.problems: list[str] = []
        # What clients know.
        self.stored: dict[tuple[str, int], str] = {}
        """Messages that were acknowledged."""
        self.seen: dict[tuple[str, int], str] = {}
        """Messages that anyone was shown."""
        self.acked: set[tuple[str, str, int]] = set()
        self.maybe: set[tuple[str, str, int]] = set()
        """Acks whose outcome is unknown."""
        self.buried: set[tuple[str, str, int]] = set()
        self.deliveries: dict[tuple[str, str, int], int] = defaultdict(int)
        self.held: dict[tuple[str, str, int], tuple[str, int]] = {}
        """The last owner of each message of a group, and the partition."""
        self.keys: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
        """By topic and key: (when, offset) of each message that was stored under it."""
        self.first: dict[tuple[Client, int], int] = {}
        self.policies: dict[str, int] = {}
        self.clients: list[Client] = []
        self._start()

    # ---- the machine

    def _start(self) -> None:
        self.state = State(LIMITS)
        self.log = Log(self.disk, lambda: next(self.ids), segment_bytes_max=3_000, snapshot_bytes_min=10_000)
        replay_into(self.state, self.log)
        self.desk = Desk(self.state, encode)
        self.clients = []
        self.first.clear()
        self.held.clear()
        for topic in TOPICS:
            self._ask(rules.create_topic(self.state, self.now_ms, "", topic, 2))
        self.commit()
        for topic in (*TOPICS, *(f"dlq.{topic}" for topic in TOPICS)):
            for group in GROUPS if topic in TOPICS else ("d",):
                if ("", topic) in self.state.topics:
                    self._ask(rules.enter(self.state, self.now_ms, "", Consume(topic, group, "x")))
        self.commit()

    def _ask(self, step: rules.Step, done: Any = None) -> None:
        self.desk.submit(step, done or (lambda _: None))

    def commit(self) -> None:
        while self.desk.can_cut:
            group = self.desk.cut()
            try:
                self.log.commit(group)
            except OncewireError as error:
                self.desk.failed(error)
            else:
                self.desk.applied()
                self.desk.answered()
            self.desk.hand_out(self.now_ms)
        self.desk.hand_out(self.now_ms)

    def crash(self) -> None:
        if self.chance.random() < 0.5 and self.desk.can_cut:  # in the middle of a commit
            self.disk.failing = {"sync"}
            group = self.desk.cut()
            try:
                self.log.commit(group)
            except OncewireError as error:
                self.desk.failed(error if isinstance(error, OutcomeUnknown) else OutcomeUnknown("crash"))
        else:
            self._forget_waiting()
        self.disk.cut_power()
        self.disk.room = 1 << 40
        self._start()

    def _forget_waiting(self) -> None:
        """Nobody who waits is told anything: to them the outcome is unknown."""
        if self.desk.can_cut:
            self.desk.cut()
            self.desk.failed(OutcomeUnknown("crash"))

    def restart(self) -> None:
        self.commit()
        self.log.seal()
        self._start()

    def snapshot(self) -> None:
        self.commit()
        image = capture(self.state)
        with contextlib.suppress(OncewireError):
            self.log.begin_snapshot().write(encode(kept) for part in image for kept in part())

    # ---- clients

    def produce(self) -> None:
        topic = self.chance.choice(TOPICS)
        value = f"{next(self.numbers)}:" + "x" * self.chance.randint(0, 20)
        envelope: dict[str, Any] = {}
        if self.chance.random() < 0.4:
            envelope["idempotency_key"] = f"k{self.chance.randint(0, 5)}"
        if self.chance.random() < 0.3:
            attempts = self.chance.randint(1, 3)
            envelope["retry_policy"] = RetryPolicy(max_attempts=attempts, backoff_ms=300, max_backoff_ms=2_000)
            self.policies[value] = attempts
        if self.chance.random() < 0.1:
            at = datetime.fromtimestamp((self.now_ms + self.chance.randint(1, 4_000)) / 1000, UTC)
            envelope["deadline"] = at
        key = self.chance.choice(["", "a", "b", "c"])
        body = ProduceBody(topic=topic, key=key, value=value, envelope=BrokerEnvelope(**envelope) if envelope else None)
        now_ms = self.now_ms

        def done(answer: Any) -> None:
            if isinstance(answer, Produced) and not answer.is_duplicate:
                self._take_in(topic, answer.offset, value)
                self.stored[topic, answer.offset] = value
                if "idempotency_key" in envelope:
                    self._keyed(topic, envelope["idempotency_key"], now_ms, answer.offset)
            elif (
                isinstance(answer, OncewireError)
                and not isinstance(answer, BufferFull | ContractViolation)
                and not answer.is_retryable
            ):
                self.problems.append(f"a produce was answered {answer!r}")

        self._ask(rules.produce(self.state, now_ms, "", body), done)

    def _take_in(self, topic: str, offset: int, value: str) -> None:
        before = self.seen.setdefault((topic, offset), value)
        if before != value:
            self.problems.append(f"{topic}/{offset} was {before[:9]!r} and is {value[:9]!r}")

    def _keyed(self, topic: str, key: str, at_ms: int, offset: int) -> None:
        for earlier_ms, earlier in self.keys[topic, key]:
            if earlier != offset and abs(at_ms - earlier_ms) < LIMITS.idempotency_ttl_ms:
                self.problems.append(f"{topic}: key {key} was stored at {earlier} and {offset} within its TTL")
        self.keys[topic, key].append((at_ms, offset))

    def delivered(self, client: Client, one: Delivery) -> None:
        topic, group = client.topic, client.group
        name = (topic, group, one.offset)
        self._take_in(topic, one.offset, one.value)
        if name in self.acked:
            self.problems.append(f"{name} was acked and came again")
        self.deliveries[name] += 1
        if one.attempts > self.deliveries[name]:
            self.problems.append(f"{name} says attempt {one.attempts} at its delivery {self.deliveries[name]}")
        limit = self.policies.get(one.value, 0) if topic in TOPICS else 0
        if limit and one.attempts > limit:
            self.problems.append(f"{name} is at attempt {one.attempts} of {limit}")
        self._in_order(client, name, one)
        self.held[name] = (client.owner, one.partition)
        flights = self.state.topics["", topic].groups[group].progress[one.partition].flights
        leased = sum(flight.state == LEASED for flight in flights.values())
        if leased > LIMITS.in_flight_max:
            self.problems.append(f"{leased} are in flight in {topic}/{one.partition}")
        self._in_credit(client)
        if one.envelope and one.envelope.dlq:
            self.buried |= {(one.envelope.dlq.original_topic, g, one.envelope.dlq.original_offset) for g in GROUPS}
            if topic in TOPICS:
                self.problems.append(f"a dead letter stands in {topic}")

    def _in_credit(self, client: Client) -> None:
        """What a reader holds is within its credit, and what counts against that is what it holds."""
        assert client.subscriber is not None
        credit, group = client.subscriber.credit, client.subscriber.group
        flights = [flight for progress in group.progress.values() for flight in progress.flights.values()]
        out = sum(flight.state == LEASED and flight.credit is credit for flight in flights)
        if out > client.credit:
            self.problems.append(f"a reader with a credit of {client.credit} holds {out}")
        if out != credit.out:
            self.problems.append(f"a reader holds {out}, and {credit.out} count against its credit")

    def _in_order(self, client: Client, name: tuple[str, str, int], one: Delivery) -> None:
        """The first time in this process: above all that this reader was given for the first time."""
        place = (client, one.partition)
        if name not in self.held and one.attempts == 1:
            if self.first.get(place, -1) > one.offset:
                self.problems.append(f"{name} came after {self.first[place]}")
            self.first[place] = one.offset

    def settle(self) -> None:
        if not self.held:
            return
        name = self.chance.choice(list(self.held))
        topic, group, offset = name
        owner, partition = self.held[name]
        act = self.chance.choice(["ack", "ack", "ack", "nack", "extend", "begin", "foreign"])
        if act == "foreign":
            step = rules.settle(self.state, self.now_ms, "", Settle("ack", topic, group, partition, offset, "stranger"))
            self._ask(step, lambda answer: self._foreign(name, answer))
        elif act == "begin":
            step_of = self.chance.choice(["begin", "success", "failure"])
            request = Idempotency(step_of, topic, group, owner, partition, offset, f"w{offset % 7}", "", "e")  # type: ignore[arg-type]
            self._ask(rules.idempotency(self.state, self.now_ms, "", request))
        else:
            request_ = Settle(act, topic, group, partition, offset, owner)  # type: ignore[arg-type]
            self._ask(
                rules.settle(self.state, self.now_ms, "", request_), lambda answer: self._settled(name, act, answer)
            )

    def _foreign(self, name: tuple[str, str, int], answer: Any) -> None:
        if not isinstance(answer, Conflict | ContractViolation | OutcomeUnknown) and not (
            isinstance(answer, OncewireError) and answer.is_retryable
        ):
            self.problems.append(f"a stranger's ack of {name} was answered {answer!r}")

    def _settled(self, name: tuple[str, str, int], act: str, answer: Any) -> None:
        if act != "ack":
            return
        if answer is None:
            if name in self.acked:
                self.problems.append(f"{name} was acked twice")
            self.acked.add(name)
            self.held.pop(name, None)
        elif isinstance(answer, OutcomeUnknown):
            self.maybe.add(name)
        elif isinstance(answer, ContractViolation):
            self.held.pop(name, None)

    def join(self) -> None:
        topic = self.chance.choice([*TOPICS, *(f"dlq.{one}" for one in TOPICS)])
        group = self.chance.choice(GROUPS) if topic in TOPICS else "d"
        client = Client(self, topic, group, f"o{self.chance.randint(0, 2)}")
        consume = Consume(topic, group, client.owner, self.chance.choice([500, 1_000, 3_000]), client.credit)

        def entered(refused: Any) -> None:
            if refused is None:
                joined = rules.join(self.state, self.now_ms, "", consume, client)
                if isinstance(joined, Subscriber):
                    client.subscriber = joined
                    self.clients.append(client)

        self._ask(rules.enter(self.state, self.now_ms, "", consume), entered)
        self.desk.hand_out(self.now_ms)

    def leave(self) -> None:
        if self.clients:
            client = self.clients.pop(self.chance.randrange(len(self.clients)))
            if client.subscriber:
                rules.leave(self.now_ms, client.subscriber)

    def breathe(self) -> None:
        for client in self.clients:
            client.space = self.chance.randint(0, 6)
            if client.subscriber:
                self._in_credit(client)
            if client.space and client.subscriber:
                self.state.stirred[client.subscriber.group] = None
        self.desk.hand_out(self.now_ms)

    def tick(self) -> None:
        self.now_ms += self.chance.choice([50, 250, 250, 1_000])
        self.desk.propose(upkeep.tick(self.state, self.now_ms))
        self.desk.hand_out(self.now_ms)

    # ---- a run

    STEPS = (
        ("produce", 30), ("settle", 40), ("commit", 25), ("tick", 10), ("join", 3), ("leave", 2), ("breathe", 8),
        ("snapshot", 0.3), ("restart", 0.1), ("crash", 0.3), ("fault", 0.5),
    )  # fmt: skip

    def fault(self) -> None:
        if self.chance.random() < 0.3:
            self.disk.room = self.chance.randint(0, 100)
        else:
            self.disk.failing = {self.chance.choice(["write", "sync", "create", "sync_names"])}
        self.commit()
        self.disk.failing, self.disk.room = set(), 1 << 40

    def run(self, steps: int) -> list[str]:
        names, weights = zip(*self.STEPS, strict=True)
        for name in self.chance.choices(names, weights, k=steps):
            getattr(self, name)()
            if self.problems:
                break
        if not self.problems:
            self.drain()
        return [f"seed {self.seed}: {problem}" for problem in self.problems[:3]]

    def drain(self) -> None:
        """Let everything be delivered and acked; then nothing may be missing."""
        self.commit()
        for client in self.clients:
            if client.subscriber:
                rules.leave(self.now_ms, client.subscriber)
        self.clients = []
        places = [(topic, group) for topic in TOPICS for group in GROUPS]
        places += [(f"dlq.{topic}", "d") for topic in TOPICS if ("", f"dlq.{topic}") in self.state.topics]
        for _ in range(400):
            for topic, group in places:
                self._ack_all(topic, group)
            self.now_ms += 1_000
            self.desk.propose(upkeep.tick(self.state, self.now_ms))
            self.commit()
            places += [
                (name, "d")
                for topic in TOPICS
                if ("", name := f"dlq.{topic}") in self.state.topics and (name, "d") not in places
            ]
            if self._is_empty(places):
                break
        else:
            self.problems.append("it never became empty")
        self._count()

    def _is_empty(self, places: list[tuple[str, str]]) -> bool:
        return not any(
            progress.lag
            for topic, group in places
            if (found := self.state.topics["", topic].groups.get(group))
            for progress in found.progress.values()
        )

    def _ack_all(self, topic: str, group: str) -> None:
        client = Client(self, topic, group, "o0")
        client.space = 1_000
        client.credit = 1_000
        consume = Consume(topic, group, client.owner, 100_000, client.credit)
        self._ask(rules.enter(self.state, self.now_ms, "", consume))
        self.commit()
        joined = rules.join(self.state, self.now_ms, "", consume, client)
        assert isinstance(joined, Subscriber), joined
        client.subscriber = joined
        self.commit()
        for name, (owner, partition) in list(self.held.items()):
            if name[:2] == (topic, group) and owner == client.owner:
                request = Settle("ack", topic, group, partition, name[2], client.owner)
                self._ask(
                    rules.settle(self.state, self.now_ms, "", request),
                    lambda answer, name=name: self._settled(name, "ack", answer),
                )
        self.commit()
        rules.leave(self.now_ms, joined)

    def _count(self) -> None:
        for topic, offset in self.stored:
            for group in GROUPS:
                name = (topic, group, offset)
                if name not in self.acked | self.maybe | self.buried:
                    self.problems.append(f"{name} was acknowledged and is neither acked nor buried")
