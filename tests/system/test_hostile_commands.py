"""The thousand hostile names through topology files and command lines: refused at their place, or taken as they are.

A refusal is a sentence and an exit code: no traceback, nothing that would steer a terminal, nothing changed anywhere.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from click.testing import CliRunner, Result

import oncewire
from oncewire._ground.contracts.letters import CAUSE, ERROR, SUBJECT
from oncewire._ground.contracts.subjects import check_filter
from oncewire._ground.errors import ContractViolation, OncewireError
from oncewire._ground.jetstream import Client, Outgoing, losses
from oncewire._ground.jetstream.losses import Cause, Loss
from oncewire._ground.settings import Settings
from oncewire._ground.topology import ensure
from oncewire._ground.topology.declared import shipped
from oncewire._ground.topology.files import Declared, Source, declare
from oncewire._ground.topology.findings import errors
from oncewire._ground.topology.lint import lint
from oncewire._ground.topology.permissions import users
from oncewire.cli import main
from tests.support import hostile
from tests.support.nats import NatsServer, nats_server

T = TypeVar("T")
NAMES = list(dict.fromkeys(["", "\t", *hostile.names(), "x" * 10_000]))
SOME = [*hostile.PIECES, *hostile.LONG, "", "x" * 10_000]
WORST = ["", " ", "*", ">", "a.>", "..", "../x", "/etc/passwd", "\x1b[2J", "a\nb", "\u202e", "\u0430dmin", "x" * 10_000]
STEERING = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]")
STEERED = "x\x1b[2Jy"
BATCH = 60
MINE = '[streams.MINE]\nsubjects = ["mine.>"]\n[services.mine]\npublishes = ["mine.a"]\n'
LEGAL = re.compile(r"[A-Za-z0-9_-]{1,128}")


def toml(name: str) -> str:
    """As a key or a value."""
    return re.sub("[\x7f-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", json.dumps(name, ensure_ascii=False))


def found_in(text: str) -> Declared:
    topology, findings = declare(shipped(), [Source("own.toml", MINE + text)], Settings())
    return Declared(topology, tuple(errors((*findings, *lint(topology)))))


# ---- topology files

TABLES = {
    "streams": '[streams.{name}]\nsubjects = ["other.{at}.>"]\n',
    "buckets": "[buckets.{name}]\n",
    "consumers.MINE": '[consumers.MINE.{name}]\nfilters = ["mine.{at}"]\nservices = ["mine"]\n'
    'dlq_subject = "dlq.mine.{at}"\n',
    "services": '[services.{name}]\npublishes = ["mine.b"]\n',
}


@pytest.mark.parametrize("table", TABLES)
def test_a_name_in_a_topology_file_is_legal_or_refused_at_its_place(table: str) -> None:
    """Each is one error of its own, however many stand in the file."""
    for start in range(0, len(NAMES), BATCH):
        names = NAMES[start : start + BATCH]
        text = "".join(TABLES[table].format(name=toml(name), at=at) for at, name in enumerate(names))
        topology, wrong = found_in(text)
        illegal = [one for one in wrong if one.code == "illegal-name"]
        refused = [name for name in names if not LEGAL.fullmatch(name)]
        assert len(refused) == len(illegal), (refused, illegal)
        assert all(f" {table}." in one.place and one.place.startswith("own.toml") for one in illegal)
        kept = {one.name for one in (*topology.streams, *topology.consumers, *topology.services)}
        assert {name if table != "buckets" else f"KV_{name}" for name in names} <= kept, "taken as it is"


REFERENCES = {
    "streams": ("mirror = {}", "sources = [{}]"),
    "consumers.MINE": ("services = [{}]", "filters = [{}]", "dlq_subject = {}", "deliver_subject = {}"),
    "services": ("buckets = [{}]", "durables = [{}]", "deletes = [{}]", "purges = [{}]", "handles = [{}]"),
}


@pytest.mark.parametrize(("table", "line"), [(table, line) for table, lines in REFERENCES.items() for line in lines])
def test_a_reference_in_a_topology_file_is_to_something_declared(table: str, line: str) -> None:
    """No `*` and no `>` takes effect where a name belongs; the error names the table, and mostly the key."""
    needed = {"filters": '["mine.a"]', "services": '["mine"]', "dlq_subject": '"dlq.mine.a"'}
    more = {key: value for key, value in needed.items() if table == "consumers.MINE" and not line.startswith(key)}
    rest = "".join(f"{key} = {value}\n" for key, value in more.items())
    for start in range(0, len(NAMES), BATCH):
        names = [name for name in NAMES[start : start + BATCH] if name or line.startswith(("services", "sources"))]
        text = "".join(f"[{table}.n{at}]\n{rest}{line.format(toml(name))}\n" for at, name in enumerate(names))
        places = " ".join(one.place for one in found_in(text).findings)
        for at, name in enumerate(names):
            assert re.search(rf" {re.escape(table)}\.n{at}\b", places), f"{line}: {name!r} was taken"


def is_own_subject(name: str) -> bool:
    """What a service may name: subjects that are neither the server's nor an inbox nor dead letters."""
    try:
        check_filter(name)
    except ContractViolation:
        return False
    first = name.split(".")[0]
    if first == "$KV":
        return name.split(".")[1:2] not in ([], ["*"], [">"])
    return name.isprintable() and first[0] not in "$*>" and not first.startswith("_INBOX") and first != "dlq"


@pytest.mark.parametrize("word", ["publishes", "asks", "answers", "makes_streams"])
def test_a_subject_of_a_service_is_its_users_exactly_or_refused(word: str) -> None:
    for start in range(0, len(NAMES), BATCH):
        names = NAMES[start : start + BATCH]
        text = "".join(f"[services.n{at}]\n{word} = [{toml(name)}]\n" for at, name in enumerate(names))
        topology, wrong = found_in(text)
        refused = {found[1] for one in wrong if (found := re.search(rf"services\.(n\d+)\.{word}$", one.place))}
        rights = {one.name: one for one in users(topology, Settings())}
        for at, name in enumerate(names):
            if word == "answers" and name.startswith("dlq."):
                continue  # who answers there writes nothing
            assert is_own_subject(name) == (f"n{at}" not in refused), repr(name)
            if f"n{at}" not in refused:
                allowed = rights[f"n{at}"].subscribe if word == "answers" else rights[f"n{at}"].publish
                assert name in allowed.allow


# ---- commands


@pytest.fixture(scope="module")
def nats() -> Iterator[NatsServer]:
    with nats_server() as running:
        asking(running, ensure)
        yield running


def asking(server: NatsServer, work: Callable[[Client], Awaitable[T]]) -> T:
    async def ask() -> T:
        async with oncewire.connect(server.url) as client:
            return await work(client)

    return asyncio.run(ask())


def run(words: list[str], folder: Path, *codes: int, **environ: str) -> Result:
    """A command line with hostile words ends in one of these codes and a sentence."""
    given = {**dict.fromkeys(("NATS_URL", "ONCEWIRE_POSTGRES_URL")), "ONCEWIRE_DATA": str(folder), **environ}
    done = CliRunner().invoke(main, words, env=given)
    told = done.output + done.stderr
    shown = [word[:60] for word in words]
    assert isinstance(done.exception, SystemExit | None), f"{shown}: {done.exception!r}"
    assert done.exit_code in codes, f"{shown}: {done.exit_code} {told[:500]}"
    assert not STEERING.search(told), f"{shown}: {told[:500]!r}"
    return done


def sendable(names: list[str]) -> list[str]:
    """The kernel itself hands no NUL to a program."""
    return [name for name in names if "\0" not in name]


async def everything(client: Client) -> dict[str, Any]:
    """What stands on the server: streams with their ends and consumers."""
    listed = (await client.api("STREAM.LIST"))["streams"]
    return {one["config"]["name"]: (one["config"], one["state"]) for one in listed}


def test_a_file_with_a_hostile_name_changes_nothing_with_any_command(nats: NatsServer, tmp_path: Path) -> None:
    before = asking(nats, everything)
    file = tmp_path / "own.toml"
    for at, name in enumerate(WORST):
        table = list(TABLES)[at % len(TABLES)]
        file.write_text(MINE + TABLES[table].format(name=toml(name), at=0))
        for command, code in (("lint", 1), ("plan", 2), ("apply", 2), ("check", 2), ("export", 2)):
            words = ["topology", command, "--file", str(file), *(["--yes"] if command == "apply" else [])]
            told = run(words, tmp_path, code, NATS_URL=nats.url)
            assert f"{table}." in told.output + told.stderr, "it says where"
        run(["topology", "export", "--nats-permissions", "--file", str(file)], tmp_path, 2)
    assert before == asking(nats, everything)


TOPOLOGY: list[Callable[[str], list[str]]] = [
    lambda name: ["apply", "--yes", "--recreate", name],
    lambda name: ["apply", "--yes", "--recreate", f"stream:{name}"],
    lambda name: ["apply", "--yes", "--accept", f"consumer:{name}"],
    lambda name: ["apply", "--yes", "--service", name],
    lambda name: ["plan", "--service", name],
    lambda name: ["check", "--service", name],
    lambda name: ["plan", "--file", name],
    lambda name: ["export", "--format", name],
]


@pytest.mark.parametrize("at", range(len(TOPOLOGY)))
def test_a_hostile_word_of_a_topology_command_changes_nothing(nats: NatsServer, tmp_path: Path, at: int) -> None:
    before = asking(nats, everything)
    for name in sendable(WORST):
        run(["topology", *TOPOLOGY[at](name)], tmp_path, 2, NATS_URL=nats.url)
    assert before == asking(nats, everything)


DLQ: dict[str, Callable[[str], list[str]]] = {
    "show a letter": lambda name: ["show", "--", name],
    "replay a letter": lambda name: ["replay", "--", name],
    "drop a letter": lambda name: ["drop", "--yes", "--reason", "r", "--", name],
    "by cause": lambda name: ["drop", "--yes", "--reason", "r", "--cause", name],
    "by tenant": lambda name: ["drop", "--yes", "--reason", "r", "--tenant", name],
    "by consumer": lambda name: ["replay", "--consumer", name],
    "by stream": lambda name: ["drop", "--yes", "--reason", "r", "--stream", name],
    "by time": lambda name: ["replay", "--tenant", "nobody", "--since", name],
    "until a time": lambda name: ["drop", "--yes", "--reason", "r", "--tenant", "nobody", "--until", name],
    "acknowledge": lambda name: ["losses", "--acknowledge", name],
    "the body's file": lambda name: ["replay", "1", "--body", f"/nowhere/{name}"],
    "whose ledger": lambda name: ["replay", "1", "--store", "sqlite:///none.db", "--agent", name],
    "which ledger": lambda name: ["replay", "1", "--store", name, "--agent", "a/b"],
}


@pytest.fixture(scope="module")
def letters(nats: NatsServer) -> NatsServer:
    """With letters and an open loss that no hostile name may touch."""
    for subject in ("evt.default.demo.a", "evt.default.demo.b"):
        done = CliRunner().invoke(main, ["dlq", "inject", subject, STEERED, "--testing"], env={"NATS_URL": nats.url})
        assert 0 == done.exit_code, done.output
    loss = Loss(stream="MESHFORGE_EVENTS", reader="r", cause=Cause.WENT_BACK, created="c", first=1, last=2, found_ms=1)
    asking(nats, lambda client: losses.record(client, loss))
    return nats


@pytest.mark.parametrize("what", DLQ)
def test_a_hostile_word_of_a_dead_letter_command_finds_nothing_and_changes_nothing(
    letters: NatsServer, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No letter is found by `*`, none by an empty word, and no loss is acknowledged."""
    monkeypatch.chdir(tmp_path)
    before = asking(letters, everything)
    for name in sendable(WORST if what not in ("drop a letter", "acknowledge") else SOME):
        run(["dlq", *DLQ[what](name)], tmp_path, 0, 1, 2, NATS_URL=letters.url)
    assert before == asking(letters, everything)
    assert not any(one.is_acknowledged for one in asking(letters, losses.losses))
    if what == "acknowledge":
        for name in ("", "*", ">", "MESHFORGE_EVENTS.r", "MESH*"):  # as the console would ask
            with pytest.raises(OncewireError):
                asking(letters, lambda client, name=name: losses.acknowledge(client, name, 1))
        assert not any(one.is_acknowledged for one in asking(letters, losses.losses))
    assert [] == [one for one in tmp_path.iterdir() if one.name != "none.db"]


@pytest.mark.parametrize("name", sendable(WORST))
def test_a_filter_of_subjects_means_what_it_says_or_is_refused(letters: NatsServer, tmp_path: Path, name: str) -> None:
    """It is the one word in which `*` and `>` match."""
    done = run(["dlq", "ls", "--json", "--subject", name], tmp_path, 0, 1, 2, NATS_URL=letters.url)
    if done.exit_code == 2:
        assert "--subject" in json.loads(done.stderr)["error"]["message"]
    else:
        assert json.loads(done.stdout)["letters"] == (2 if name == ">" else 0)


def test_what_stands_in_a_letter_cannot_steer_the_terminal_of_who_looks_at_it(
    letters: NatsServer, tmp_path: Path
) -> None:
    """A letter that a service wrote, and one that somebody else made up, to its headers."""

    async def make_up(client: Client) -> None:
        told = {CAUSE: "a\u009b2Jb", ERROR: "c\u202ed", SUBJECT: "made.up"}
        await client.publisher.publish(Outgoing("dlq.made.up", b"x", headers=told))

    asking(letters, make_up)
    for words in (["show", "1"], ["show", "3"], ["ls"], ["ls", "--letters"], ["ls", "--letters", "--json"]):
        told = run(["dlq", *words], tmp_path, 0, 1, NATS_URL=letters.url)
        assert "made.up" in told.stdout or "1b[2Jy" in told.stdout
    assert STEERED == json.loads(run(["dlq", "show", "1", "--json"], tmp_path, 0, NATS_URL=letters.url).stdout)["body"]


def test_a_letter_by_hand_says_what_it_was_given_or_is_refused(nats: NatsServer, tmp_path: Path) -> None:
    """Subjects, consumers and causes: none becomes another header or another subject."""
    accepted = 0
    for name in sendable(SOME):
        run(["dlq", "inject", "--testing", "--", name, "{}"], tmp_path, 0, 2, NATS_URL=nats.url)
        words = ["dlq", "inject", "evt.default.demo.c", "{}", "--testing", "--consumer", name, "--cause", name]
        told = run([*words, "--json"], tmp_path, 0, 2, NATS_URL=nats.url)
        if told.exit_code == 0:
            accepted += 1
            letter = json.loads(told.stdout)["letter"]
            shown = json.loads(run(["dlq", "show", letter, "--json"], tmp_path, 0, NATS_URL=nats.url).stdout)
            assert name == shown["consumer"]
            assert not {one for one in shown["headers"] if "evil" in one.lower()}
    assert 0 < accepted < len(sendable(SOME))


COMMANDS: dict[str, Callable[[str, Path], list[str]]] = {
    "revoke": lambda name, _: ["keys", "revoke", "--", name],
    "a tenant": lambda name, _: ["keys", "create", "--tenant", name, "--name", "x", "--allow", "read"],
    "a key's name": lambda name, _: ["keys", "create", "--tenant", "t", "--name", name, "--allow", "read"],
    "a grant": lambda name, _: ["keys", "create", "--tenant", "t", "--name", "x", "--allow", name],
    "days": lambda name, _: ["keys", "create", "--tenant", "t", "--name", "x", "--allow", "read", "--days", name],
    "a contract": lambda name, _: ["contracts", "check", "--kind", "message", "--", name],
    "a config": lambda name, folder: ["--config", f"{folder}/{name[:50]}", "config"],
    "an agent": lambda name, _: ["agent", "hash", "--store", "sqlite:///none.db", "--", name],
    "an agent's name": lambda name, _: ["agent", "status", "--store", "sqlite:///none.db", "--", f"json:{name}"],
    "a module": lambda name, _: ["agent", "apply", "--", f"{name}:agent"],
    "a loss": lambda name, _: ["agent", "apply", "--accept-loss", name, "oncewire.demo.biller:agent"],
    "a place": lambda name, _: ["agent", "adopt", "--store", name, "oncewire.demo.biller:agent"],
    "a store": lambda name, _: ["agent", "replay", "--store", name, "oncewire.demo.biller:agent"],
    "an address": lambda name, _: ["broker", "run", "--listen", name],
    "an engine": lambda name, _: ["broker", "run", "--engine", name],
    "a router": lambda name, _: ["broker", "run", "--listen", "127.0.0.1:0", "--router", name or ":"],
    "a limit": lambda name, _: ["broker", "run", "--broker-topics-max", name],
    "a log": lambda name, folder: ["broker", "wal", "verify", f"{folder}/{name}"],
    "a look at a log": lambda name, folder: ["broker", "wal", "inspect", f"{folder}/{name}"],
    "a conversation": lambda name, _: ["outbox", "retry", "--", name],
    "a message": lambda name, _: ["outbox", "void", "--message", name],
    "an age": lambda name, _: ["outbox", "purge", "--older-than-s", name],
    "a stream": lambda name, _: ["pipeline", "run", "--once", "--stream", name],
    "a lost stream": lambda name, _: ["pipeline", "run", "--once", "--accept-loss", name],
    "backfill": lambda name, _: ["pipeline", "backfill", "--", name],
    "a subject": lambda name, _: ["publish", "--", name, "{}"],
}  # fmt: skip


@pytest.mark.parametrize("what", COMMANDS)
def test_a_command_refuses_a_hostile_argument_with_a_sentence(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3 is for what may be right and finds no server. Whatever is written lies in the folder that it was told."""
    (tmp_path / "in").mkdir()
    monkeypatch.chdir(tmp_path / "in")
    away = {"NATS_URL": "nats://127.0.0.1:1", "ONCEWIRE_POSTGRES_URL": "postgresql://127.0.0.1:1/x"}
    environ = {"ONCEWIRE_AUTH_KEYS": str(tmp_path / "keys.json"), **away}
    for name in sendable(SOME if what in ("a tenant", "a grant", "revoke", "a module") else WORST):
        run(COMMANDS[what](name, tmp_path), tmp_path / "data", 0, 1, 2, 3, **environ)
    written = {one.name for one in tmp_path.rglob("*") if one.is_file()}
    assert written <= {"keys.json", "keys.json.lock", "none.db"}, written


def test_a_lake_that_cannot_be_there_is_said(tmp_path: Path) -> None:
    told = run(["pipeline", "status", "--lake", "x" * 10_000], tmp_path, 2, NATS_URL="nats://127.0.0.1:1")
    assert "--lake" in told.stderr
