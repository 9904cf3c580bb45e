"""Kills of a pipeline at chosen points of its batches, and the proof that each message is in the lake once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote

from oncewire._ground.contracts.topics import SUBJECTS
from oncewire._ground.jetstream import Outgoing
from oncewire._ground.jetstream.protocol import parse_time_ns
from oncewire.pipeline.lake.log import SILVER_APP
from oncewire.pipeline.lake.place import place_of
from oncewire.pipeline.tables import open_table
from tests.spark.brokerage import Desk, with_node
from tests.spark.kills import LOCAL, Driver
from tests.spark.lakes import doubled, event, rows, streams
from tests.spark.support import api, publish, stored
from tests.support.lake_job import ROWS
from tests.support.lake_points import LOOK_S, Gate
from tests.support.nats import NatsServer

STREAM = "EVENTS"
NEVER = 10**12
WAIT_S = 240.0
AGAIN = 7
"""Every seventh message comes again under its identity."""
TOPICS_MADE = 3
IN_EACH = 5
BAD = [Outgoing("evt.acme.main.bad", b"no envelope %d" % number) for number in range(3)]


class LakeJob(Driver):
    """A pipeline as a process of its own."""

    def __init__(
        self, server: NatsServer, lake: Path | str, last: int, master: str, folder: Path, streams: Sequence[str]
    ) -> None:
        super().__init__(
            "tests.support.lake_job", [master, server.url, str(lake), str(last), *streams], folder / "lake.log"
        )


@contextmanager
def running(
    server: NatsServer,
    lake: Path | str,
    last: int,
    master: str = LOCAL,
    folder: Path | None = None,
    streams: Sequence[str] = (STREAM,),
) -> Iterator[LakeJob]:
    """`folder` is for its log, where the lake is in none."""
    job = LakeJob(server, lake, last, master, folder or Path(lake).parent, streams)
    try:
        yield job
    finally:
        job.close()


class Strikes:
    """Kills at points, each proven to be where it hurts, as far as that can be seen from outside: a lake in an object
    store (`url`) has only the folder beside it on a disk."""

    def __init__(self, server: NatsServer, lake: Path, url: str = "") -> None:
        self.server = server
        self.lake = lake
        self.tables: Path | str = url or lake
        self.gate = Gate(lake)
        self.published = 0
        self.bad = 0
        self.identities: set[str] = set()
        self.done: list[tuple[str, str]] = []
        self.declare()

    def declare(self) -> None:
        streams(self.server, **{STREAM: ["evt.>"]})

    def more(self) -> None:
        """Another batch: new messages, copies of others, and some that are no messages."""
        first = self.published
        numbers = [number - number % AGAIN // (AGAIN - 1) for number in range(first, first + ROWS - len(BAD))]
        publish(self.server, [event(number) for number in numbers] + BAD)
        self.identities |= {f"key:acme/main/order-{number}" for number in numbers}
        self.published += ROWS
        self.bad += len(BAD)

    def strike(self, job: LakeJob, point: str, what: str, kill: Callable[[], object]) -> None:
        """Kill when the pipeline stands at the point."""
        self.gate.ask(point)
        self.more()
        self._until_reached(job, point)
        seen = IS_THERE.get(point, always) if self.tables == self.lake else always
        assert seen(self.lake), f"{point} is not what it is called"
        kill()
        self.gate.open()
        self.done.append((what, point))
        self.assert_none_doubled()

    def strike_server(self, job: LakeJob, point: str) -> None:
        """The server dies while the pipeline stands at the point, and comes back when that has gone on."""
        self.strike(job, point, "server", self.server.kill)
        self.server.start()

    def strike_driver(self, job: LakeJob, point: str) -> None:
        self.strike(job, point, "driver", job.kill)

    def strike_workers(self, job: LakeJob, point: str) -> None:
        self.strike(job, point, "workers", job.kill_workers)

    def _until_reached(self, job: LakeJob, point: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not self.gate.is_reached:
            assert job.process.poll() is None, f"the pipeline ended before {point}, see lake.log; so far {self.done}"
            assert time.monotonic() < deadline, f"the pipeline did not come to {point}; so far {self.done}"
            time.sleep(LOOK_S)

    def assert_none_doubled(self) -> None:
        if (place_of(self.tables) / "bronze").has_table:
            assert {} == doubled(self.positions()), f"doubled in bronze after {self.done[-1]}"

    def positions(self) -> list[tuple[str, int, int]]:
        """All that bronze has."""
        found = rows(self.tables, "bronze", "stream", "created_ns", "sequence")
        return [(one["stream"], one["created_ns"], one["sequence"]) for one in found]

    def assert_each_once(self) -> None:
        """Each sequence in bronze, each identity in silver, each refusal in quarantine; all batches balance."""
        found = self.positions()
        assert {} == doubled(found), "doubled in bronze"
        assert set() == set(range(1, self.published + 1)) ^ {at for _, _, at in found}, "lost in bronze"
        keys = [one["identity"] for one in rows(self.tables, "silver/runtime", "identity")]
        assert {} == doubled(keys), "doubled in silver"
        assert set() == self.identities ^ set(keys), "lost in silver"
        refused = [one["sequence"] for one in rows(self.tables, "quarantine", "sequence")]
        assert {} == doubled(refused), "doubled in quarantine"
        assert self.bad == len(refused), "lost in quarantine"
        balance = rows(self.tables, "batches")
        assert self.published == sum(one["rows_in"] for one in balance)
        assert len(keys) == sum(one["rows_out"] for one in balance)
        assert self.published - len(keys) - self.bad == sum(one["duplicates"] for one in balance)


class TopicStrikes(Strikes):
    """The same where the broker's topics are read in rounds. Each batch brings new topics, and more in old ones."""

    def __init__(self, server: NatsServer, lake: Path) -> None:
        self.topics: list[str] = []
        self.values: list[tuple[str, str]] = []
        super().__init__(server, lake)

    def declare(self) -> None:
        """Topics are streams that the broker makes."""

    def more(self) -> None:
        new = [f"topic{len(self.topics) + number}" for number in range(TOPICS_MADE)]
        self.topics += new
        written = [(topic, f"{topic} {len(self.values)} {at}") for topic in self.topics for at in range(IN_EACH)]
        self.values += written

        async def produce(desk: Desk) -> None:
            for topic in new:
                await desk.make(topic, partitions=2)
            for topic, value in written:
                await desk.produce(topic, value, key=value)

        with_node(self.server, produce)

    def assert_each_once(self) -> None:
        """Each position of each topic in bronze, each topic in the table of topics, each message in silver."""
        wanted = set()
        for info in api(self.server, "STREAM.LIST", {"subject": SUBJECTS})["streams"]:
            name, created_ns = info["config"]["name"], parse_time_ns(info["created"])
            wanted |= {(name, created_ns, message.metadata.sequence.stream) for message in stored(self.server, name)}
        found = self.positions()
        assert {} == doubled(found), "doubled in bronze"
        assert set() == wanted ^ set(found), "lost in bronze"
        named = [one["topic"] for one in rows(self.lake, "topics", "topic")]
        assert sorted(self.topics) == sorted(named), "lost or doubled among the topics"
        silver = [(one["topic"], one["value"]) for one in rows(self.lake, "silver/broker", "topic", "value")]
        assert sorted(self.values) == sorted(silver), "lost or doubled in silver"


# ---- what is seen in the lake's folder at a point


def is_open(lake: Path) -> bool:
    """A batch of bronze that Spark has begun and not committed."""
    entries = (lake / "_checkpoints").glob("*/*/offsets/[0-9]*")
    return any(not (entry.parents[1] / "commits" / entry.name).exists() for entry in entries)


def uncommitted(table: Path) -> set[str]:
    """Files of a table that are written and in no version yet."""
    log = unquote("".join(path.read_text() for path in (table / "_delta_log").glob("*.json")))
    return {path.name for path in table.glob("[!.]*.parquet") if path.name not in log}


def has_half(table: Path) -> bool:
    return any(table.glob(".*.half"))


def is_staged(lake: Path) -> bool:
    """Rows of silver wait, below the lake or in a file of their table."""
    return any((lake / "_staging").glob("*/*")) or bool(uncommitted(lake / "silver" / "runtime"))


def is_ahead(lake: Path) -> bool:
    """The silver table has a batch that is not noted yet."""
    noted = open_table(lake, "batches").transaction_version(SILVER_APP) if (lake / "batches").exists() else None
    return (open_table(lake, "silver/runtime").transaction_version(SILVER_APP) or 0) > (noted or 0)


def always(_: Path) -> bool:
    return True


IS_THERE: dict[str, Callable[[Path], bool]] = {
    "land:begun": is_open,
    "land:half": lambda lake: is_open(lake) and has_half(lake / "bronze"),
    "land:named": lambda lake: is_open(lake) and bool(uncommitted(lake / "bronze")),
    "land:written": lambda lake: is_open(lake) and bool(uncommitted(lake / "bronze")),
    "land:listed": lambda lake: is_open(lake) and not uncommitted(lake / "bronze"),
    "land:committed": lambda lake: is_open(lake) and not uncommitted(lake / "bronze"),
    "round:half": lambda lake: has_half(lake / "bronze"),
    "round:named": lambda lake: bool(uncommitted(lake / "bronze")),
    "round:written": lambda lake: bool(uncommitted(lake / "bronze")),
    "round:listed": lambda lake: bool(uncommitted(lake / "bronze")),
    "derive:staged": is_staged,
    "derive:half": lambda lake: has_half(lake / "silver" / "runtime") or has_half(lake / "quarantine"),
    "derive:written": lambda lake: is_staged(lake) and bool(uncommitted(lake / "silver" / "runtime")),
    "derive:one": is_ahead,
    "derive:noted": is_staged,
}
