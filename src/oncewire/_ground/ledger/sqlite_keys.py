"""The keys of a SQLite ledger: the newest in memory, the older in sorted runs (`ledger.keys` says why).

What the open transaction adds is kept apart until it is committed, so a rollback drops it and nothing else. Other
processes' blocks and runs are taken in under the write lock: what is known then is complete.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from oncewire._ground.ledger import keys as key_rules
from oncewire._ground.ledger.keys import Filter, Place


class SqliteKeys:
    """The keys of one chain."""

    def __init__(self, db: sqlite3.Connection, chain: int) -> None:
        self._db = db
        self._chain = chain
        self._recent: dict[bytes, int] = {}
        self._added: dict[bytes, int] = {}
        self._seen = 0
        self._seen_then = 0
        self._spilled = 0
        self._base = 0
        """Blocks up to this one were forgotten: their keys may still stand in a run."""
        self._runs: list[int] = []
        self._filter = Filter(4 * key_rules.SPILL_KEYS)

    def take_in(self) -> None:
        """Runs and blocks that others wrote, or that this process has not loaded yet."""
        query = "SELECT spilled, spilled_keys, base FROM ledger_chains WHERE chain = ?"
        spilled, count, self._base = self._db.execute(query, (self._chain,)).fetchone()
        if spilled > self._spilled:
            self._take_runs(count)
            kept = key_rules.encode_place(Place(spilled + 1, 0))
            self._recent = {key: place for key, place in self._recent.items() if place >= kept}
            self._spilled, self._seen = spilled, max(self._seen, spilled)
        rows = self._db.execute(
            "SELECT number, keys FROM ledger_blocks WHERE chain = ? AND number > ? ORDER BY number",
            (self._chain, self._seen),
        )
        for number, keys in rows:
            self._recent.update(key_rules.places_of(number, key_rules.split_keys(keys)))
            self._seen = number

    def _take_runs(self, count: int) -> None:
        """Runs that are not known yet; all of them when the filter has become too small for `count` keys."""
        if count > self._filter.capacity:
            self._filter, self._runs = Filter(2 * count), []
        newest = self._runs[0] if self._runs else 0
        query = "SELECT run, items FROM ledger_runs WHERE chain = ? AND run > ? ORDER BY run, first"
        for run, page in self._db.execute(query, (self._chain, newest)):
            if not self._runs or self._runs[0] != run:
                self._runs.insert(0, run)
            self._filter.add_page(page)

    def find(self, keys: Sequence[bytes]) -> dict[bytes, Place]:
        """Those of the keys that are settled, with where."""
        recent = self._recent
        found = {key: key_rules.decode_place(recent[key]) for key in keys if key in recent}
        for key in self._filter.those_it_may_have(keys):
            place = None if key in found else self._find_in_runs(key)
            if place is not None:
                found[key] = place
        return {key: place for key, place in found.items() if place.block > self._base}  # the others are forgotten

    def _find_in_runs(self, key: bytes) -> Place | None:
        query = "SELECT items FROM ledger_runs WHERE chain = ? AND run = ? AND first <= ? ORDER BY first DESC LIMIT 1"
        for run in self._runs:
            row = self._db.execute(query, (self._chain, run, key)).fetchone()
            place = key_rules.find_in_page(row[0], key) if row else None
            if place is not None:
                return place
        return None

    def add(self, number: int, keys: Sequence[bytes]) -> None:
        """Keys of a block that the open transaction appends."""
        self._added.update(key_rules.places_of(number, keys))
        self._seen_then = number

    def spill_if_full(self) -> None:
        """Before the commit: once in 65,536 inputs the newest keys become a run, in the same transaction."""
        if len(self._recent) + len(self._added) < key_rules.SPILL_KEYS:
            return
        seen = max(self._seen, self._seen_then)
        moved = self._recent | self._added
        query = "SELECT coalesce(max(run), 0) + 1 FROM ledger_runs WHERE chain = ?"
        run = self._db.execute(query, (self._chain,)).fetchone()[0]
        rows = [(self._chain, run, first, items) for first, items in key_rules.pages(moved)]
        self._db.executemany("INSERT INTO ledger_runs VALUES (?, ?, ?, ?)", rows)
        self._db.execute(
            "UPDATE ledger_chains SET spilled = ?, spilled_keys = spilled_keys + ? WHERE chain = ?",
            (seen, len(moved), self._chain),
        )

    def drop_runs(self, base: int) -> None:
        """In the open transaction: runs whose blocks were all forgotten. The newest stays: numbers go on from it."""
        while len(runs := self._oldest_runs()) == 2:
            pages = "SELECT items FROM ledger_runs WHERE chain = ? AND run = ?"
            items = b"".join(row[0] for row in self._db.execute(pages, (self._chain, runs[0])))
            if key_rules.last_block(items) > base:
                return
            self._db.execute("DELETE FROM ledger_runs WHERE chain = ? AND run = ?", (self._chain, runs[0]))
            fewer = "UPDATE ledger_chains SET spilled_keys = spilled_keys - ? WHERE chain = ?"
            self._db.execute(fewer, (len(items) // key_rules.ITEM_BYTES, self._chain))

    def _oldest_runs(self) -> list[int]:
        query = "SELECT DISTINCT run FROM ledger_runs WHERE chain = ? ORDER BY run LIMIT 2"
        return [row[0] for row in self._db.execute(query, (self._chain,))]

    def committed(self) -> None:
        """What was added counts now. A run that was spilled is taken in at the next begin, like another process's."""
        self._recent.update(self._added)
        self._seen = max(self._seen, self._seen_then)
        self._forget_added()

    def rolled_back(self) -> None:
        self._forget_added()

    def _forget_added(self) -> None:
        self._added = {}
        self._seen_then = 0
