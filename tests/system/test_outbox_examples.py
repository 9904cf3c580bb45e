"""The examples of the outbox run as they are written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.outbox import open_rows
from tests.support.postgres import shared_postgres
from tests.support.up import clean_environ

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(("name", "rows"), [("psycopg", 2), ("asyncpg", 2), ("sqlalchemy", 2), ("django", 1)])
async def test_the_example_commits_its_messages(name: str, rows: int) -> None:
    url = await shared_postgres().new_database()
    command = [sys.executable, str(EXAMPLES / f"outbox_{name}.py")]
    done = subprocess.run(command, env=clean_environ(ONCEWIRE_POSTGRES_URL=url), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("message 1 of ")
    assert await open_rows(url) == rows
