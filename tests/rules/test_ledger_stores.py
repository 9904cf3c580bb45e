"""Addresses of stores: what each form means, and clear words for anything else."""

from __future__ import annotations

import pytest

from oncewire._ground.errors import Refused
from oncewire._ground.ledger.postgres import PostgresStore
from oncewire._ground.ledger.sqlite import SqliteStore
from oncewire._ground.ledger.stores import open_store


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("sqlite:///ledger.db", "ledger.db"),
        ("sqlite:///folder/ledger.db", "folder/ledger.db"),
        ("sqlite:////var/ledger.db", "/var/ledger.db"),
        ("sqlite:///:memory:", ":memory:"),
    ],
)
def test_three_slashes_are_relative_and_four_absolute(url: str, path: str) -> None:
    store = open_store(url)
    assert isinstance(store, SqliteStore)
    assert (path, url) == (store.path, store.url)


@pytest.mark.parametrize("url", ["postgresql://u@h/d", "postgres://u@h/d?sslmode=require"])
def test_postgresql_has_two_names(url: str) -> None:
    store = open_store(url, schema="agents")
    assert isinstance(store, PostgresStore)
    assert url == store.url


@pytest.mark.parametrize(
    "url", ["", "ledger.db", "mysql://h/d", "sqlite://ledger.db", "sqlite:///", "sqlite:", "sqlite:///a.db?mode=ro"]
)
def test_anything_else_is_refused_with_the_forms_that_are_known(url: str) -> None:
    with pytest.raises(Refused) as caught:
        open_store(url)
    assert "sqlite:///file.db" in caught.value.hint


def test_a_refused_address_shows_no_password() -> None:
    with pytest.raises(Refused) as caught:
        open_store("mysql://user:secret@host/db")
    assert "secret" not in str(caught.value)


def test_sqlite_has_no_schema() -> None:
    with pytest.raises(Refused, match="schema"):
        open_store("sqlite:///ledger.db", schema="x")
