"""A log on a simulated disk, its crashes, and what must be left of it."""

from __future__ import annotations

import contextlib
import itertools
import random
from dataclasses import dataclass, field

from oncewire._ground.errors import Corrupt, OncewireError, OutcomeUnknown
from oncewire.broker.log.writer import Log
from tests.support.disk import SimDisk


def open_log(disk: SimDisk, segment_bytes_max: int = 400) -> tuple[Log, list[bytes]]:
    """The log and all that is in it."""
    found: list[bytes] = []
    ids = itertools.count(disk.random.getrandbits(62))
    log = Log(disk, lambda: next(ids), segment_bytes_max=segment_bytes_max)
    log.open(found.append, found.append)
    return log, found


@dataclass
class Ledger:
    """What a writer was told of its groups."""

    acked: list[bytes] = field(default_factory=list)
    unknown: list[list[bytes]] = field(default_factory=list)
    """Since the last group that was acked."""

    def problem(self, found: list[bytes]) -> str:
        """Empty when all that was acked is there, and besides at most one whole group whose outcome was unknown."""
        allowed = [self.acked, *(self.acked + group for group in self.unknown)]
        return "" if found in allowed else f"{len(found)} records, {len(self.acked)} acked: {found[-3:]!r}"

    def write(self, log: Log, group: list[bytes]) -> None:
        try:
            log.commit(group)
        except OutcomeUnknown:
            self.unknown.append(group)
        except OncewireError:
            pass  # nothing was written
        else:
            self.acked += group
            self.unknown.clear()


def power_cuts(seed: int, cuts: int = 5, *, is_lying: bool = False) -> str:
    """Write, fail, fill up, snapshot and lose power at random; what is wrong afterwards, '' when nothing is."""
    chance = random.Random(seed)
    disk = SimDisk(seed)
    disk.is_lying = is_lying
    numbers = itertools.count()
    ledger = Ledger()
    for _ in range(cuts):
        try:
            log, found = open_log(disk)
        except Corrupt as error:
            return f"seed {seed}: {error}"
        if problem := ledger.problem(found):
            return f"seed {seed}: {problem}"
        ledger = Ledger(found)
        for _ in range(chance.randint(0, 12)):
            _step(chance, disk, log, ledger, numbers)
        if chance.random() < 0.2:
            disk.failing.clear()
            disk.room = 1 << 40
            try:
                log.seal()
            except OncewireError:
                log.close()
            if chance.random() < 0.5:
                continue  # a clean stop without a power cut
        elif chance.random() < 0.6:  # in the middle of a commit
            group = _group(chance, numbers)
            disk.failing.add("sync")
            ledger.write(log, group)
        disk.cut_power()
        disk.room = 1 << 40
    return ""


def _group(chance: random.Random, numbers: itertools.count[int]) -> list[bytes]:
    return [b"%d:" % next(numbers) + chance.randbytes(chance.randint(0, 90)) for _ in range(chance.randint(1, 4))]


def _step(chance: random.Random, disk: SimDisk, log: Log, ledger: Ledger, numbers: itertools.count[int]) -> None:
    disk.short_writes = chance.random() < 0.2
    disk.failing = {chance.choice(["write", "sync", "create", "sync_names"])} if chance.random() < 0.15 else set()
    disk.room = chance.randint(0, 200) if chance.random() < 0.05 else 1 << 40
    if chance.random() < 0.1:
        with contextlib.suppress(OncewireError):
            log.begin_snapshot().write(iter(list(ledger.acked)))
    else:
        ledger.write(log, _group(chance, numbers))
