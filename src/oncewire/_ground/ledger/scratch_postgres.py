"""A scratch place in PostgreSQL: temporary tables, in one transaction that is always rolled back."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

from psycopg import IsolationLevel, sql

from oncewire._ground.errors import Refused
from oncewire._ground.ledger.postgres import PostgresStore
from oncewire._ground.ledger.scratch import ROWS_SHOWN, Scratch, TableDifference, Touched, difference
from oncewire._ground.ledger.store import Store

_TABLES = """
SELECT c.relname FROM pg_class c WHERE c.relnamespace = %s::regnamespace AND c.relkind IN ('r', 'p')
AND NOT c.relispartition AND c.relname NOT LIKE 'ledger\\_%%' AND c.relname <> 'oncewire_migrations'
"""
_SERIALS = """
SELECT a.attname FROM pg_attribute a JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
WHERE a.attrelid = %s::regclass AND pg_get_expr(d.adbin, d.adrelid) LIKE 'nextval(%%'
"""
_TOUCHED = """
SELECT relname, n_tup_ins + n_tup_upd + n_tup_del, coalesce(seq_scan, 0) + coalesce(idx_scan, 0)
FROM pg_stat_xact_user_tables WHERE relid IN (
    SELECT oid FROM pg_class WHERE relnamespace = pg_my_temp_schema()
)
"""


@contextlib.contextmanager
def postgres_scratch(store: Store, filled: Collection[str]) -> Iterator[Scratch]:
    if not isinstance(store, PostgresStore):
        raise Refused(f"no scratch place is known for {store.url.partition('://')[0]}")
    connection = store.connection
    connection.isolation_level = IsolationLevel.REPEATABLE_READ
    try:
        store.begin()
        store.spare_temporary_tables()
        yield PostgresScratch(store, filled)
    finally:
        store.rollback()
        if not connection.closed:
            connection.isolation_level = None


class PostgresScratch:
    """Temporary tables come before all others in a search path: handlers that name no schema find them."""

    def __init__(self, store: PostgresStore, filled: Collection[str]) -> None:
        self.store = store
        self._schema = store.schema
        self._tables: list[str] = [row[0] for row in self._rows(_TABLES, self._schema)]
        for table in self._tables:
            self._copy(table, is_filled=table in filled)
        self._before = self._counts()

    def _rows(self, query: Any, *params: Any) -> list[Any]:
        cursor = self.store.connection.execute(query, params or None)
        return cursor.fetchall() if cursor.description else []

    def _names(self, table: str) -> dict[str, sql.Composable]:
        schema = sql.SQL(self._schema)  # quoted by the server
        return {"real": sql.SQL(".").join([schema, sql.Identifier(table)]), "copy": sql.Identifier("pg_temp", table)}

    def _copy(self, table: str, *, is_filled: bool) -> None:
        names = self._names(table)
        self._rows(sql.SQL("CREATE TEMPORARY TABLE {copy} (LIKE {real} INCLUDING ALL) ON COMMIT DROP").format(**names))
        real = f"{self._schema}.{names['copy'].as_string().partition('.')[2]}"
        for (column,) in self._rows(_SERIALS, real):
            # The copied default would count up the real table's sequence.
            sequence = sql.Identifier("pg_temp", f"{table}_{column}_replay")
            self._rows(sql.SQL("CREATE TEMPORARY SEQUENCE {}").format(sequence))
            self._rows(
                sql.SQL("ALTER TABLE {copy} ALTER COLUMN {column} SET DEFAULT nextval({sequence})").format(
                    column=sql.Identifier(column), sequence=sql.Literal(sequence.as_string()), **names
                )
            )
        if is_filled:
            self._rows(sql.SQL("INSERT INTO {copy} OVERRIDING SYSTEM VALUE SELECT * FROM {real}").format(**names))

    def _counts(self) -> dict[str, tuple[int, int]]:
        return {name: (writes, reads) for name, writes, reads in self._rows(_TOUCHED)}

    def touched(self) -> Touched:
        none = (0, 0)
        now = self._counts()
        written = {name for name, (writes, _) in now.items() if writes > self._before.get(name, none)[0]}
        read = {name for name, (_, reads) in now.items() if reads > self._before.get(name, none)[1]}
        return Touched(written, read - written)

    def compare(self, table: str) -> TableDifference | None:
        names = self._names(table)
        query = "SELECT t::text FROM {one} t EXCEPT ALL SELECT t::text FROM {other} t ORDER BY 1 LIMIT {limit}"
        found = [
            [row[0] for row in self._rows(sql.SQL(query).format(one=one, other=other, limit=ROWS_SHOWN))]
            for one, other in ((names["real"], names["copy"]), (names["copy"], names["real"]))
        ]
        return difference(table, *found)
