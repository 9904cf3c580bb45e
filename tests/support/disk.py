"""A disk in memory that can lose power, tear and reorder what was not synced, fail and fill up.

`cut_power` keeps what was synced, and of the rest a random part: sectors of unsynced writes survive one by one (holes
read as zeros), names that were not synced survive up to a random one. After a sync that failed, the pages look written
and are not: a later sync succeeds and makes nothing durable, as on Linux.
"""

from __future__ import annotations

import errno
import os
import random

SECTOR = 64


class SimFile:
    """What is seen of a file, and what is durable of it."""

    def __init__(self) -> None:
        self.seen = bytearray()
        self.durable = bytearray()
        self.unsynced: list[tuple[int, bytes]] = []


class SimHandle:
    def __init__(self, disk: SimDisk, name: str, file: SimFile) -> None:
        self._disk, self._name, self._file = disk, name, file

    def write(self, content: bytes) -> int:
        self._disk.check("write", self._name)
        count = min(len(content), self._disk.room)
        if count == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self._disk.short_writes and len(content) > 1:
            count = min(count, self._disk.random.randint(1, len(content)))
        self._disk.room -= count
        file = self._file
        file.unsynced.append((len(file.seen), bytes(content[:count])))
        file.seen += content[:count]
        return count

    def sync(self) -> None:
        file = self._file
        try:
            self._disk.check("sync", self._name)
        except OSError:
            file.unsynced.clear()
            raise
        if not self._disk.is_lying:
            for at, content in file.unsynced:
                file.durable.extend(bytes(max(0, at + len(content) - len(file.durable))))
                file.durable[at : at + len(content)] = content
            file.unsynced.clear()

    def close(self) -> None:
        pass


class SimDisk:
    """See the module's head."""

    path = "sim"

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.seen: dict[str, SimFile] = {}
        self.durable: dict[str, SimFile] = {}
        self._names: list[tuple[str, str, SimFile | None]] = []
        self.room = 1 << 40
        self.failing: set[str] = set()
        """Kinds of operations that fail with EIO."""
        self.short_writes = False
        self.is_lying = False
        """A sync that does nothing: for tests of the tests."""

    def check(self, operation: str, name: str) -> None:
        if operation in self.failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO), name)

    def names(self) -> list[str]:
        return list(self.seen)

    def size(self, name: str) -> int:
        return len(self._file(name).seen)

    def read(self, name: str, start: int, count: int) -> bytes:
        return bytes(self._file(name).seen[start : start + count])

    def _file(self, name: str) -> SimFile:
        if name not in self.seen:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return self.seen[name]

    def create(self, name: str) -> SimHandle:
        self.check("create", name)
        if name in self.seen:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
        file = self.seen[name] = SimFile()
        self._names.append(("put", name, file))
        return SimHandle(self, name, file)

    def rename(self, old: str, new: str) -> None:
        file = self._file(old)
        del self.seen[old]
        self.seen[new] = file
        self._names.append((old, new, file))

    def remove(self, name: str) -> None:
        file = self._file(name)
        self.room += len(file.seen)
        del self.seen[name]
        self._names.append(("remove", name, None))

    def sync_names(self) -> None:
        self.check("sync_names", "")
        if not self.is_lying:
            self._settle(len(self._names))

    def _settle(self, count: int) -> None:
        for kind, name, file in self._names[:count]:
            if file is None:
                self.durable.pop(name, None)
            else:
                if kind != "put":
                    self.durable.pop(kind, None)
                self.durable[name] = file
        del self._names[:count]

    def cut_power(self) -> None:
        """From now on only what survived is there."""
        self._settle(self.random.randint(0, len(self._names)))
        self._names.clear()
        survived: dict[str, SimFile] = {}
        for name, file in self.durable.items():
            after = SimFile()
            after.durable = bytearray(file.durable)
            for at, content in file.unsynced:
                self._survive(after.durable, at, content)
            after.seen = bytearray(after.durable)
            survived[name] = after
        self.seen, self.durable = survived, dict(survived)
        self.failing.clear()

    def _survive(self, durable: bytearray, at: int, content: bytes) -> None:
        mode = self.random.random()
        for start in range(0, len(content), SECTOR):
            if mode < 0.3 or (mode < 0.8 and self.random.random() < 0.5):
                continue
            piece = content[start : start + SECTOR]
            end = at + start + len(piece)
            durable.extend(bytes(max(0, end - len(durable))))
            durable[at + start : end] = piece

    def copy(self) -> SimDisk:
        """The same durable files on another disk."""
        other = SimDisk()
        for name, file in self.seen.items():
            twin = SimFile()
            twin.seen, twin.durable = bytearray(file.seen), bytearray(file.seen)
            other.seen[name] = other.durable[name] = twin
        return other
