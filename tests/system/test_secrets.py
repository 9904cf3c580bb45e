"""Secrets planted in every place that may hold one, a whole run with errors provoked, and a look into all that it said.

What may hold a secret: the files that are made for it (keys of NATS users, the password file of PostgreSQL), and the
environment of the very process that was given it. Payloads may lie where data lies, and be shown to who asks for them;
a refusal may quote to its sender a word that stands where one of a few words must.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import jwt
import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives.asymmetric import ec
from websockets.asyncio.client import connect

from oncewire._ground.trust.keys import KeyFile
from oncewire.cli import main
from tests.support.gateway import new_conversation
from tests.support.planted import Planted, command_and_environ, files_below, processes_of, quoted
from tests.support.ports import free_port
from tests.support.tls import Authority
from tests.support.up import Up, clean_environ, made, oncewire

NOW = int(time.time())
MEANT = re.compile(r"nats/keys/[a-z-]+\.nk|postgres/pgpass")
"""Below the data folder: what is made to hold secrets."""
STORED = re.compile(r"nats/jetstream/.*|postgres/data/.*|lake/.*")
"""Where payloads lie."""


class Run:
    """An `up` with secrets planted, and what it said to whoever asked."""

    def __init__(self, folder: Path, *args: str) -> None:
        self.planted = planted = Planted()
        self.folder = folder
        self.said: list[tuple[str, str | bytes]] = []
        """What was said, and where."""
        self.payload = planted.keep("a payload", f"payload-{planted.make('of the payload')}")
        authority = Authority(folder)
        cert, key = authority.issue("server")
        self._trusting = ssl.create_default_context(cafile=str(authority.path))
        self.keys = KeyFile(folder / "keys.json")
        _, self.key = self.keys.create("all", "acme", ("*",), NOW)
        planted.keep("an API key", self.key.split("_", 2)[2])
        signer = ec.generate_private_key(ec.SECP256R1())
        shown = {**json.loads(jwt.algorithms.ECAlgorithm.to_jwk(signer.public_key())), "kid": "e1"}
        (folder / "jwks.json").write_text(json.dumps({"keys": [shown]}))
        claims = {"iss": "i", "aud": "a", "sub": "u", "tenant": "acme", "scope": "join read speak", "exp": NOW + 3_600}
        self.token = planted.keep("a token", jwt.encode(claims, signer, "ES256", headers={"kid": "e1"}))
        self.up = Up(
            made(folder / "data"),
            *args,
            ONCEWIRE_NATS_ACCESS="keys",
            ONCEWIRE_MONITOR_PORT=str(free_port()),
            ONCEWIRE_AUTH_KEYS=str(self.keys.path),
            ONCEWIRE_AUTH_TICKET_SECRET=planted.make("the secret of tickets"),
            ONCEWIRE_AUTH_ISSUER="i",
            ONCEWIRE_AUTH_AUDIENCE="a",
            ONCEWIRE_AUTH_JWKS=str(folder / "jwks.json"),
            ONCEWIRE_HTTP_TLS_CERT=str(cert),
            ONCEWIRE_HTTP_TLS_KEY=str(key),
        )
        self.up.ready()
        for path in self.up.folder.keys.iterdir():
            planted.keep(f"the seed of {path.stem}", path.read_text().strip())
        planted.keep("the password of PostgreSQL", (self.up.folder.postgres / "pgpass").read_text().strip()[-32:])

    def url(self, part: str) -> str:
        return next(one["url"] for one in self.up.events if one.get("part") == part and one.get("url"))

    def ask(
        self,
        part: str,
        path: str,
        body: object = None,
        *,
        credential: str = "",
        method: str = "",
        is_data: bool = False,
    ) -> bytes:
        """One request; what is answered is kept to be looked at, unless it is the data that was asked for."""
        sent = body if isinstance(body, bytes) else json.dumps(body).encode() if body is not None else None
        headers = {"Authorization": f"Bearer {credential}"} if credential else {}
        request = urllib.request.Request(f"{self.url(part)}{path}", sent, headers, method=method or None)
        try:
            with urllib.request.urlopen(request, timeout=30, context=self._trusting) as answer:
                told: bytes = answer.read()
        except urllib.error.HTTPError as error:
            with error:
                told = error.read() + str(error.headers).encode()
        if not is_data:
            self.said.append((f"{part} {path}", told))
        return told

    def ticket(self) -> str:
        sold = json.loads(self.ask("gateway", "/tickets", b"", credential=self.token, is_data=True))
        return self.planted.keep("a ticket", sold["ticket"])

    async def chat(self, conversation: str) -> None:
        """A room, entered with a ticket, with wrong frames and a payload that is refused."""
        address = self.url("gateway").replace("http", "ws", 1)
        async with connect(f"{address}/ws?ticket={self.ticket()}", ssl=self._trusting) as socket:
            for frame in (
                {"type": "join_room", "conversationId": conversation},
                {"type": "presence", "conversationId": conversation, "state": "flying", "metadata": self.payload},
                {"type": "unknown", "body": self.payload},
                {"type": "ack", "conversationId": conversation, "sequence": self.payload},
                {"type": "ack", "conversationId": "x" * 300 + self.payload, "sequence": 1},
            ):
                await socket.send(json.dumps(frame))
            await socket.send('{"type":"heartbeat"}')
            while '"heartbeat"' not in (told := str(await asyncio.wait_for(socket.recv(), 30))):
                self.said.append(("a frame", told))

    def command(self, *words: str, is_data: bool = False) -> None:
        done = oncewire(*words, "--data", str(self.up.folder.path), cwd=self.folder)
        if not is_data:
            self.said.append((" ".join(words[:2]), done.stdout + done.stderr))

    def leaks(self) -> list[str]:
        """Where a secret stands that should not."""
        return [f"{what} in {where}" for where, said in self.said for what in self.planted.found_in(said)]

    def leaks_of_processes(self) -> list[str]:
        found = []
        for pid in processes_of(self.up.process.pid):
            command, environ = command_and_environ(pid)
            name = command.replace(b"\0", b" ").decode(errors="replace")[-120:]
            found += [f"{what} in the command line of {name}" for what in self.planted.found_in(command)]
            if pid != self.up.process.pid:
                found += [f"{what} in the environment of {name}" for what in self.planted.found_in(environ)]
        return found

    def leaks_of_files(self) -> list[str]:
        found = []
        for path in files_below(self.up.folder.path):
            name = str(path.relative_to(self.up.folder.path))
            if not MEANT.fullmatch(name):
                kept = self.planted.found_in(path.read_bytes())
                payloads = ("a payload", "of the payload")
                found += [f"{what} in {name}" for what in kept if what not in payloads or not STORED.fullmatch(name)]
        return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    one = Run(tmp_path_factory.mktemp("secrets"))
    with one.up:
        yield one


def drive(run: Run) -> None:
    """What clients do, right and wrong."""
    key, secret = run.key, run.payload
    produce = {"topic": "orders", "value": secret, "key": secret}
    run.ask("broker", "/v1/topics", {"name": "orders"}, credential=key)
    run.ask("broker", "/v1/produce", produce, credential=key)
    place = "topic=orders&group=g&owner=o"
    taken = json.loads(run.ask("broker", f"/v1/consume?{place}&max=1&wait_ms=5000", credential=key, is_data=True))
    where = {"topic": "orders", "group": "g", "owner": "o", "partition": taken["partition"], "offset": taken["offset"]}
    run.ask("broker", "/v1/nack", {**where, "reason": secret}, credential=key)
    for body in (
        b'{"topic": "orders", "value": ' + json.dumps(secret).encode(),
        {"topic": "orders", "value": 3, "key": secret},
        {"topic": secret, "value": secret},
        {**produce, "envelope": {"tenant_id": secret}},
        {**produce, "envelope": {"retry_policy": secret}},
    ):
        run.ask("broker", "/v1/produce", body, credential=key)
    run.ask("broker", "/v1/produce", produce, credential=key[:-1])
    run.ask("broker", "/v1/produce", produce, credential=run.token + "x")
    run.ask("broker", "/v1/nothing", credential=key)
    run.ask("gateway", f"/conversations/{secret}/messages", credential=run.token)
    run.ask("gateway", f"/stream/{new_conversation()}/stop", b"{" + secret.encode(), credential=run.token)
    run.ask("gateway", f"/tickets?ticket={run.ticket()}", b"")
    run.ask("gateway", "/tickets", {"grants": ["join"], "more": secret}, credential=run.token)
    for part in ("broker", "gateway"):
        run.ask(part, "/metrics", credential=key)
        run.ask(part, "/metrics", credential=run.token)
    asyncio.run(run.chat(new_conversation()))


def look_on(run: Run) -> None:
    """What operators do, and what the servers show to everybody on this machine."""
    event = json.dumps({"type": "OrderPlaced", "payload": {"secret": run.payload}})
    run.command("publish", "evt.default.demo.orders.placed", event)
    run.command("publish", "evt.default.demo.orders.placed", event[:-1])
    run.command("dlq", "inject", "evt.default.demo.orders.placed", event, "--testing")
    for words in (("dlq", "ls"), ("dlq", "ls", "--each"), ("doctor",), ("config",), ("config", "--json"),
                  ("outbox", "status"), ("keys", "ls", "--json", "--auth-keys", str(run.keys.path))):  # fmt: skip
        run.command(*words)
    monitor = run.up.running.servers["nats"].monitor_url
    for page in ("varz", "connz?subs=1&auth=1", "jsz?consumers=1&config=1", "subsz?subs=1"):
        with urllib.request.urlopen(f"{monitor}/{page}", timeout=10) as answer:
            run.said.append((f"the monitoring port, {page}", answer.read()))


def test_a_whole_run_says_no_secret(run: Run) -> None:
    drive(run)
    look_on(run)
    assert [] == run.leaks_of_processes()
    assert not (found := run.leaks()), "\n".join(found)
    code = run.up.stop()
    run.said.append(("what up says", json.dumps(run.up.events)))
    assert 0 == code
    assert not (found := run.leaks()), "\n".join(found)
    assert [] == run.leaks_of_files()


# ---- errors of commands

PG = "postgresql://app:{}@127.0.0.1:1/db"
WRONG: dict[str, tuple[list[str], dict[str, str]]] = {
    "NATS that is not there": (["doctor"], {"NATS_URL": "nats://me:{}@127.0.0.1:1"}),
    "several addresses of NATS": (["doctor"], {"NATS_URL": "nats://127.0.0.1:1,nats://me:{}@127.0.0.1:2"}),
    "a token in the address": (["publish", "evt.default.demo.a", "{{}}"], {"NATS_URL": "nats://{}@127.0.0.1:1"}),
    "several addresses shown": (["config"], {"NATS_URL": "nats://a:{}@127.0.0.1:1,nats://b:{}@127.0.0.1:2"}),
    "an address of NATS that is none": (["doctor"], {"NATS_URL": "http://me:{}@127.0.0.1:1"}),
    "a port that is none": (["doctor"], {"NATS_URL": "nats://me:{}@127.0.0.1:99999999"}),
    "a password of NATS": (["dlq", "ls"], {"NATS_URL": "nats://127.0.0.1:1", "NATS_PASSWORD": "{}", "NATS_USER": "a"}),
    "a token of NATS": (["topology", "check"], {"NATS_URL": "nats://127.0.0.1:1", "NATS_TOKEN": "{}"}),
    "two ways at once": (["topology", "check"], {"NATS_TOKEN": "{}", "NATS_USER": "a", "NATS_PASSWORD": "{}"}),
    "a seed in place of its file": (["dlq", "ls"], {"NATS_NKEY": "{}"}),
    "creds that are none": (["dlq", "ls"], {"NATS_URL": "nats://127.0.0.1:1", "NATS_CREDS": "FILE"}),
    "a seed that is none": (["dlq", "ls"], {"NATS_URL": "nats://127.0.0.1:1", "NATS_NKEY": "FILE"}),
    "PostgreSQL that is not there": (["outbox", "status"], {"ONCEWIRE_POSTGRES_URL": PG}),
    "the same, migrated": (["migrate"], {"ONCEWIRE_POSTGRES_URL": PG}),
    "the same, examined": (["doctor"], {"ONCEWIRE_POSTGRES_URL": PG, "NATS_URL": "nats://127.0.0.1:1"}),
    "a password in the query": (
        ["outbox", "status"],
        {"ONCEWIRE_POSTGRES_URL": "postgresql://127.0.0.1:1/db?user=a&password={}"},
    ),
    "a query that is none": (["migrate"], {"ONCEWIRE_POSTGRES_URL": "postgresql://a:{}@127.0.0.1:x/db?sslmode=no"}),
    "another database": (["migrate"], {"ONCEWIRE_POSTGRES_URL": "mysql://a:{}@127.0.0.1:1/db"}),
    "the store of an agent": (["agent", "hash", "oncewire.demo.biller:agent", "--store", PG], {}),
    "a store that is none": (["agent", "hash", "oncewire.demo.biller:agent", "--store", "mongo://a:{}@h/x"], {}),
    "a secret of tickets that is too short": (
        ["broker", "run", "--broker-listen", "127.0.0.1:0"],
        {"ONCEWIRE_AUTH_KEYS": "keys.json", "ONCEWIRE_AUTH_TICKET_SECRET": "SHORT"},
    ),
    "keys of a provider that is not there": (
        ["broker", "run", "--broker-listen", "127.0.0.1:0"],
        {
            "ONCEWIRE_AUTH_JWKS": "https://a:{}@127.0.0.1:1/jwks?token={}",
            "ONCEWIRE_AUTH_ISSUER": "i",
            "ONCEWIRE_AUTH_AUDIENCE": "a",
        },
    ),
    "a monitoring address with a password": (
        ["doctor"],
        {"NATS_URL": "nats://127.0.0.1:1", "NATS_MONITOR_URL": "http://a:{}@127.0.0.1:1"},
    ),
    "an unknown section": (["config", "--json"], {"TOML": 'postgres = "{}"'}),
    "an unknown key": (["config"], {"TOML": '[postgres]\npasswort = "{}"'}),
    "a value of another kind": (["config"], {"TOML": '[nats]\npassword = ["{}"]'}),
    "a line that is no TOML": (["config"], {"TOML": '[postgres]\nurl = "{}'}),
    "settings that are shown": (
        ["config", "--json"],
        {
            "TOML": '[postgres]\nurl = "postgresql://a:{}@h/d"\n[nats]\ntoken = "{}"\nurl = "nats://a:{}@h:1,nats://{}@i"'
        },
    ),
    "keys in place of their file": (["keys", "ls"], {"KEYS": '{{"version": 1, "keys": [{{"id": "{}"}}]}}'}),
    "a certificate that is none": (
        ["broker", "run", "--broker-listen", "127.0.0.1:0"],
        {"ONCEWIRE_HTTP_TLS_CERT": "FILE", "ONCEWIRE_HTTP_TLS_KEY": "FILE"},
    ),
    "a payload that is no JSON": (["publish", "evt.default.demo.a", '{{"secret": "{}'], {}),
    "a payload that breaks its contract": (["contracts", "check", "message", "FILE"], {}),
}


@pytest.mark.parametrize("what", WRONG)
def test_an_error_of_a_command_says_no_secret(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On its output, in the log down to its details, and in the machine's form."""
    planted = Planted()
    secret = planted.make(what)
    short = planted.keep("short", secret[:20])
    words, environ = WRONG[what]
    (tmp_path / "secret.txt").write_text(f"-----BEGIN NATS USER JWT-----\n{secret}\n{secret}")

    def filled(text: str) -> str:
        text = text.replace("FILE", str(tmp_path / "secret.txt")).replace("SHORT", short)
        return text.format(*[quoted(secret) if "://" in text else secret] * 9) if "{" in text else text

    for name in set(os.environ) - set(clean_environ()):
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    given = {name: filled(value) for name, value in environ.items()}
    if toml := given.pop("TOML", ""):
        (tmp_path / "oncewire.toml").write_text(toml)
    if keys := given.pop("KEYS", ""):
        (tmp_path / "keys.json").write_text(keys)
        given["ONCEWIRE_AUTH_KEYS"] = str(tmp_path / "keys.json")
    monkeypatch.setenv("ONCEWIRE_DATA", str(tmp_path / "data"))
    caplog.set_level(logging.DEBUG)
    for more in ([], ["--json"]):
        called = [filled(word) for word in words]
        done = CliRunner().invoke(main, called + [one for one in more if one not in called], env=given)
        assert isinstance(done.exception, SystemExit | None), repr(done.exception)
        assert [] == planted.found_in(done.output + done.stderr), done.output + done.stderr
    assert [] == planted.found_in(caplog.text), caplog.text
