"""What a driver raises, and which branch of our tree that is: whoever asks must know whether to try again."""

from __future__ import annotations

import asyncpg
import psycopg
import pytest

from oncewire._ground.database.postgres import translate
from oncewire._ground.errors import NotConnected, OncewireError, Refused, TimedOut, Unavailable

LOST = [
    psycopg.OperationalError("the connection is closed"),
    psycopg.errors.ConnectionTimeout("connection timeout expired"),
    psycopg.DatabaseError("SSL SYSCALL error: EOF detected"),
    asyncpg.InterfaceError("cannot perform operation: connection is closed"),
    asyncpg.InterfaceError("cannot call Transaction.rollback(): the underlying connection is closed"),
    asyncpg.InterfaceError("cannot perform operation: another operation is in progress"),
    asyncpg.InternalClientError("got result for unknown protocol state 3"),
    asyncpg.exceptions.ConnectionDoesNotExistError("connection was closed in the middle of operation"),
    asyncpg.exceptions.TargetServerAttributeNotMatched("none of the hosts match the target attribute requirement"),
    ConnectionRefusedError(111, "refused"),
]
REFUSED = [
    psycopg.DataError("PostgreSQL text fields cannot contain NUL (0x00) bytes"),
    psycopg.ProgrammingError("cannot adapt type 'set' using placeholder '%s'"),
    psycopg.NotSupportedError("COPY cannot be used in pipeline mode"),
    psycopg.InterfaceError("the cursor is closed"),
    asyncpg.InterfaceError("the server expects 1 argument for this query, 2 were passed"),
    asyncpg.exceptions.DataError("invalid input for query argument $1: 'x'"),
    asyncpg.exceptions.UnsupportedClientFeatureError("unknown parameter"),
]


@pytest.mark.parametrize("error", LOST, ids=repr)
def test_only_a_session_that_was_lost_is_worth_another_try(error: Exception) -> None:
    assert NotConnected is type(translate(error))


@pytest.mark.parametrize("error", REFUSED, ids=repr)
def test_what_the_driver_refuses_to_send_is_refused_again(error: Exception) -> None:
    assert Refused is type(translate(error))


@pytest.mark.parametrize(
    ("error", "expected"),
    [(TimeoutError(), TimedOut), (psycopg.errors.DeadlockDetected("deadlock detected"), Unavailable)],
    ids=repr,
)
def test_the_others_keep_their_branch(error: Exception, expected: type[OncewireError]) -> None:
    assert expected is type(translate(error))
