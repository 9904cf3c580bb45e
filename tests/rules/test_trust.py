"""Keys, tokens, tickets and grants: who gets in, and as whom."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import jwt
import msgspec
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from oncewire._ground.errors import (
    AuthenticationFailed,
    Corrupt,
    InvalidSetting,
    NotFound,
    PermissionDenied,
    Unavailable,
)
from oncewire._ground.files import write_whole
from oncewire._ground.http.principal import ANYONE, NOBODY, Principal
from oncewire._ground.trust import jwts
from oncewire._ground.trust.gate import Gate
from oncewire._ground.trust.grants import check_grants, covers
from oncewire._ground.trust.keys import KeyFile
from oncewire._ground.trust.tickets import LIVES_S, Tickets

NOW = 1_800_000_000


# ---- grants


@pytest.mark.parametrize(
    ("held", "action", "thing", "is_allowed"),
    [
        ("*", "produce", "orders", True),
        ("produce", "produce", "orders", True),
        ("produce", "consume", "orders", False),
        ("produce:orders", "produce", "orders", True),
        ("produce:orders", "produce", "orders2", False),
        ("produce:orders", "produce", "", True),
        ("produce:orders.*", "produce", "orders.eu", True),
        ("produce:orders.*", "produce", "orders", False),
        ("produce:*", "produce", "anything", True),
        ("produce:orders", "produce", "orders*", False),
        ("read", "reader", "", False),
    ],
)
def test_a_grant_covers_its_action_and_names(held: str, action: str, thing: str, is_allowed: bool) -> None:
    assert is_allowed is Principal("t", frozenset({held})).may(action, thing)


def test_nobody_is_asked_for_a_credential_and_somebody_is_refused() -> None:
    with pytest.raises(AuthenticationFailed):
        NOBODY.require("read")
    with pytest.raises(PermissionDenied, match="produce orders"):
        Principal("t", frozenset({"read"})).require("produce", "orders")
    ANYONE.require("admin")


@pytest.mark.parametrize("sent", ["", "fly", "produce:", "produce:a*b", "re\nad", "x" * 400, ":", "produce:*x"])
def test_a_grant_that_could_mean_nothing_is_refused(sent: str) -> None:
    with pytest.raises(InvalidSetting):
        check_grants(["read", sent] if sent else [])


@pytest.mark.parametrize(
    ("held", "wanted", "is_covered"),
    [
        ("*", "produce", True),
        ("produce", "produce:orders", True),
        ("produce:orders", "produce", False),
        ("produce:orders.*", "produce:orders.eu", True),
        ("produce:orders.*", "produce:orders.eu*", True),
        ("produce:orders.eu", "produce:orders.*", False),
        ("produce", "*", False),
    ],
)
def test_a_part_of_a_grant_does_not_cover_the_whole(held: str, wanted: str, is_covered: bool) -> None:
    assert is_covered is covers([held], wanted)


# ---- API keys


@pytest.fixture
def keys(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "keys.json")


def test_a_key_speaks_for_its_tenant_with_its_grants(keys: KeyFile) -> None:
    made, text = keys.create("checkout", "acme", ("produce:orders", "read"), NOW)
    found = keys.principal(text, NOW)
    assert ("acme", {"produce:orders", "read"}, f"key:{made.id}") == (found.tenant, found.actions, found.name)


def test_the_file_holds_no_secret_and_is_its_owners_alone(keys: KeyFile) -> None:
    _, text = keys.create("checkout", "acme", ("read",), NOW)
    assert text.split("_", 2)[2] not in keys.path.read_text()
    assert 0o600 == keys.path.stat().st_mode & 0o777


def test_a_running_server_sees_new_and_revoked_keys_within_a_second(keys: KeyFile) -> None:
    server = KeyFile(keys.path)
    made, text = keys.create("checkout", "acme", ("read",), NOW)
    assert "acme" == server.principal(text, NOW).tenant
    keys.revoke(made.id, NOW)
    with pytest.raises(AuthenticationFailed):
        server.principal(text, NOW + 1.0)


def test_an_expired_key_no_longer_works(keys: KeyFile) -> None:
    _, text = keys.create("checkout", "acme", ("read",), NOW, lives_s=60)
    keys.principal(text, NOW + 59)
    with pytest.raises(AuthenticationFailed):
        keys.principal(text, NOW + 60)


def test_a_key_with_another_secret_or_id_is_unknown_with_the_same_words(keys: KeyFile) -> None:
    made, text = keys.create("checkout", "acme", ("read",), NOW)
    _, other = keys.create("other", "acme", ("read",), NOW)
    wrong = [
        f"ow_{made.id}_{other.rpartition('_')[2]}",
        "ow_000000000000_" + text[16:],
        text[:-1],
        "",
        "ow_",
        text + "x",
        text + "\n",
        f" {text}",
        text.upper(),
        f"{text},{text}",
        f"ow_{text}",
        text.replace("ow_", "\u043ew_"),
    ]
    told = set()
    for sent in wrong:
        with pytest.raises(AuthenticationFailed) as caught:
            keys.principal(sent, NOW)
        told.add(caught.value.message)
    assert 1 == len(told)


@pytest.mark.parametrize(
    ("name", "tenant"), [("", "acme"), ("x" * 81, "acme"), ("a\nb", "acme"), ("a", ""), ("a", "b c")]
)
def test_a_key_without_a_name_or_a_tenant_is_refused(keys: KeyFile, name: str, tenant: str) -> None:
    with pytest.raises(InvalidSetting):
        keys.create(name, tenant, ("read",), NOW)
    assert [] == keys.keys()


@pytest.mark.parametrize("content", ['{"version": 1, "keys": [{"id": 3}]}', '{"version": 2, "keys": []}'])
def test_a_damaged_file_or_one_of_another_version_lets_nobody_in(keys: KeyFile, content: str) -> None:
    keys.path.write_text(content)
    with pytest.raises(Corrupt, match=r"keys\.json"):
        keys.principal("ow_x", NOW)


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_can_write_lets_nobody_in(keys: KeyFile, mode: int) -> None:
    _, text = keys.create("checkout", "acme", ("read",), NOW)
    keys.principal(text, NOW)
    keys.path.chmod(mode)
    with pytest.raises(Corrupt, match="written by others"):
        keys.principal(text, NOW + 1)
    keys.path.chmod(0o600)
    assert "acme" == keys.principal(text, NOW + 2).tenant


def test_revoking_what_is_not_there_is_refused(keys: KeyFile) -> None:
    with pytest.raises(NotFound):
        keys.revoke("000000000000", NOW)


def test_writers_at_once_lose_no_key(keys: KeyFile) -> None:
    makers = [
        threading.Thread(target=lambda n=n: KeyFile(keys.path).create(f"k{n}", "acme", ("read",), NOW))
        for n in range(16)
    ]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    assert {f"k{n}" for n in range(16)} == {key.name for key in KeyFile(keys.path).keys()}  # noqa: SIM118


# ---- tokens

RSA = rsa.generate_private_key(public_exponent=65_537, key_size=2_048)
EC = ec.generate_private_key(ec.SECP256R1())
ED = ed25519.Ed25519PrivateKey.generate()
CLAIMS = {"iss": "https://id", "aud": "oncewire", "sub": "u-1", "tenant": "acme", "scope": "read openid produce:orders"}


def jwks(**keys: Any) -> str:
    shown = []
    for kid, key in keys.items():
        kind = {"r": jwt.algorithms.RSAAlgorithm, "e": jwt.algorithms.ECAlgorithm, "d": jwt.algorithms.OKPAlgorithm}[
            kid[0]
        ]
        shown.append({**json.loads(kind.to_jwk(key.public_key())), "kid": kid})
    return json.dumps({"keys": shown})


def sign(key: Any, kid: str | None, algorithm: str, **claims: Any) -> str:
    body = {**CLAIMS, "exp": NOW + 60, **claims}
    body = {name: value for name, value in body.items() if value is not None}
    return jwt.encode(body, key, algorithm, headers={"kid": kid} if kid else None)


@pytest.fixture
def rules(tmp_path: Path) -> jwts.Rules:
    (tmp_path / "jwks.json").write_text(jwks(r1=RSA, e1=EC, d1=ED))
    return jwts.Rules(issuer="https://id", audience="oncewire", jwks=str(tmp_path / "jwks.json"))


@pytest.mark.parametrize(("key", "kid", "algorithm"), [(RSA, "r1", "RS256"), (EC, "e1", "ES256"), (ED, "d1", "EdDSA")])
async def test_a_signed_token_speaks_for_its_tenant(rules: jwts.Rules, key: Any, kid: str, algorithm: str) -> None:
    async with jwts.Tokens(rules) as tokens:
        found = tokens.principal(sign(key, kid, algorithm), NOW)
    assert ("acme", {"read", "produce:orders"}, "jwt:u-1") == (found.tenant, found.actions, found.name)


STRAY = rsa.generate_private_key(65_537, 2_048)


def stray(**head: Any) -> str:
    """Signed by a stranger, with a head that says where the key is to be found."""
    return jwt.encode({**CLAIMS, "exp": NOW + 60}, STRAY, "RS256", headers={"kid": "r1", **head})


PUBLIC_PEM = RSA.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
BAD = {
    "expired": lambda: sign(RSA, "r1", "RS256", exp=NOW - 31),
    "no exp": lambda: sign(RSA, "r1", "RS256", exp=None),
    "exp is text": lambda: sign(RSA, "r1", "RS256", exp="tomorrow"),
    "not yet": lambda: sign(RSA, "r1", "RS256", nbf=NOW + 100),
    "another issuer": lambda: sign(RSA, "r1", "RS256", iss="https://evil"),
    "another audience": lambda: sign(RSA, "r1", "RS256", aud="other"),
    "no audience": lambda: sign(RSA, "r1", "RS256", aud=None),
    "no subject": lambda: sign(RSA, "r1", "RS256", sub=None),
    "unknown key": lambda: sign(RSA, "r9", "RS256"),
    "no key id among several": lambda: sign(RSA, None, "RS256"),
    "another's key under a known id": lambda: sign(rsa.generate_private_key(65_537, 2_048), "r1", "RS256"),
    "an algorithm off the list": lambda: sign(RSA, "r1", "RS512"),
    "no signature": lambda: jwt.encode({**CLAIMS, "exp": NOW + 60}, None, "none", headers={"kid": "r1"}),
    "another kind of key under a known id": lambda: sign(EC, "r1", "ES256"),
    "a known key under another kind": lambda: sign(RSA, "e1", "RS256"),
    "a key that lies elsewhere": lambda: stray(jku="https://evil/jwks", x5u="https://evil/cert"),
    "a key of its own": lambda: stray(jwk=json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(STRAY.public_key()))),
    "a path for a key": lambda: stray(kid="../../dev/null"),
    "an expiry without end": lambda: sign(RSA, "r1", "RS256", exp=float("inf")),
    "an expiry that is no number": lambda: sign(RSA, "r1", "RS256", exp=float("nan")),
    "an unknown critical header": lambda: jwt.encode(
        {**CLAIMS, "exp": NOW + 60}, RSA, "RS256", headers={"kid": "r1", "crit": ["x"], "x": 1}
    ),
    "cut": lambda: sign(RSA, "r1", "RS256")[:-5],
    "changed": lambda: sign(RSA, "r1", "RS256").replace(".", ".e30", 1),
    "garbage": lambda: "a.b.c",
    "nothing": lambda: "",
    "huge": lambda: "x" * 10_000,
    "not ASCII": lambda: "\u00e4.\u00f6.\u00fc",
}


@pytest.mark.parametrize("what", BAD)
async def test_a_token_that_is_not_whole_lets_nobody_in(rules: jwts.Rules, what: str) -> None:
    async with jwts.Tokens(rules) as tokens:
        with pytest.raises(AuthenticationFailed):
            tokens.principal(BAD[what](), NOW)


async def test_a_public_key_cannot_be_used_as_a_shared_secret(rules: jwts.Rules) -> None:
    """The old trick: sign with HMAC and the public key as its secret."""
    import base64
    import hashlib
    import hmac

    def part(value: dict[str, Any]) -> bytes:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=")

    signed = part({"alg": "HS256", "kid": "r1"}) + b"." + part({**CLAIMS, "exp": NOW + 60})
    signature = base64.urlsafe_b64encode(hmac.new(PUBLIC_PEM, signed, hashlib.sha256).digest()).rstrip(b"=")
    async with jwts.Tokens(rules) as tokens:
        with pytest.raises(AuthenticationFailed):
            tokens.principal((signed + b"." + signature).decode(), NOW)


@pytest.mark.parametrize("tenant", [None, "", "a b", 3, ["acme"], "x" * 129])
async def test_a_token_without_a_tenant_may_do_nothing(rules: jwts.Rules, tenant: object) -> None:
    async with jwts.Tokens(rules) as tokens:
        with pytest.raises(PermissionDenied):
            tokens.principal(sign(RSA, "r1", "RS256", tenant=tenant), NOW)


@pytest.mark.parametrize("algorithms", [("HS256",), ("none",), (), ("RS256", "HS512")])
def test_only_signatures_with_public_keys_can_be_allowed(rules: jwts.Rules, algorithms: tuple[str, ...]) -> None:
    with pytest.raises(InvalidSetting):
        jwts.Tokens(msgspec.structs.replace(rules, algorithms=algorithms))


@pytest.mark.parametrize("where", ["http://id.example/jwks", "ftp://x/y", ""])
def test_keys_come_from_a_file_or_over_https(rules: jwts.Rules, where: str) -> None:
    with pytest.raises(InvalidSetting):
        jwts.Tokens(msgspec.structs.replace(rules, jwks=where))


async def test_keys_that_cannot_be_read_are_said_at_the_start(rules: jwts.Rules, tmp_path: Path) -> None:
    with pytest.raises(Unavailable):
        await jwts.Tokens(msgspec.structs.replace(rules, jwks=str(tmp_path / "none"))).__aenter__()
    (tmp_path / "bad").write_text("[]")
    with pytest.raises(InvalidSetting):
        await jwts.Tokens(msgspec.structs.replace(rules, jwks=str(tmp_path / "bad"))).__aenter__()


class _Keys(BaseHTTPRequestHandler):
    body = b""
    asked = 0

    def do_GET(self) -> None:
        type(self).asked += 1
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None:
        pass


async def test_a_key_that_is_new_at_the_provider_is_fetched(rules: jwts.Rules) -> None:
    _Keys.body = jwks(r1=RSA).encode()
    server = HTTPServer(("127.0.0.1", 0), _Keys)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        where = f"http://127.0.0.1:{server.server_port}/jwks"
        async with jwts.Tokens(msgspec.structs.replace(rules, jwks=where)) as tokens:
            assert "acme" == tokens.principal(sign(RSA, "r1", "RS256"), NOW).tenant
            _Keys.body = jwks(r1=RSA, e2=EC).encode()
            token = sign(EC, "e2", "ES256")
            with pytest.raises(AuthenticationFailed, match="unknown key"):
                tokens.principal(token, NOW)
            deadline = time.monotonic() + 30
            while True:
                try:
                    assert "acme" == tokens.principal(token, NOW).tenant
                    break
                except AuthenticationFailed:
                    assert time.monotonic() < deadline
                    await asyncio.sleep(0.02)
            for _ in range(50):
                with pytest.raises(AuthenticationFailed):
                    tokens.principal(sign(RSA, "r7", "RS256"), NOW)
                await asyncio.sleep(0)
            assert 2 == _Keys.asked, "unknown keys must not let a stranger drive requests to the provider"
    finally:
        server.shutdown()
        server.server_close()


# ---- tickets


def test_a_ticket_speaks_for_its_buyer_for_a_minute() -> None:
    tickets = Tickets()
    buyer = Principal("acme", frozenset({"join", "read"}), "jwt:u-1", "signer:r1", NOW + 600.5)
    ticket = tickets.sell(buyer, NOW)
    assert replace(buyer, is_ticket=True) == tickets.principal(ticket, NOW + LIVES_S - 1)
    with pytest.raises(AuthenticationFailed):
        tickets.principal(ticket, NOW + LIVES_S)


def test_a_ticket_holds_at_most_what_its_buyer_may() -> None:
    tickets = Tickets()
    buyer = Principal("acme", frozenset({"join:room-1"}), "jwt:u-1")
    assert {"join:room-1"} == tickets.principal(tickets.sell(buyer, NOW, ("join:room-1",)), NOW).actions
    for wanted in ("join", "join:room-2", "*", "read"):
        with pytest.raises(PermissionDenied):
            tickets.sell(buyer, NOW, (wanted,))


def test_a_ticket_buys_no_ticket() -> None:
    """Else one that is found in a log would be good for ever."""
    tickets = Tickets()
    bought = tickets.principal(tickets.sell(Principal("acme", frozenset({"join"})), NOW), NOW)
    with pytest.raises(PermissionDenied, match="buys no ticket"):
        tickets.sell(bought, NOW)


def test_a_ticket_stays_bound_to_the_groups_of_its_buyer() -> None:
    """A group takes away what it does not name: to leave it out must not widen anything."""
    tickets = Tickets()
    buyer = Principal("acme", frozenset({"consume", "group:billing", "group:a*"}))
    found = tickets.principal(tickets.sell(buyer, NOW, ("consume",)), NOW)
    assert {"consume", "group:billing", "group:a*"} == found.actions
    found = tickets.principal(tickets.sell(buyer, NOW, ("consume:orders", "group:ab")), NOW)
    assert {"consume:orders", "group:ab"} == found.actions
    for wanted in ("group:shipping", "group"):
        with pytest.raises(PermissionDenied):
            tickets.sell(buyer, NOW, ("consume", wanted))


def test_no_ticket_reaches_beyond_a_tenant_unless_its_buyer_does() -> None:
    everything = Principal("acme", frozenset({"*"}))
    with pytest.raises(PermissionDenied):
        Tickets().sell(everything, NOW, ("metrics:every-tenant",))
    assert Tickets().sell(Principal("ops", frozenset({"metrics:every-tenant"})), NOW)


def test_a_ticket_of_another_node_counts_only_with_the_shared_secret() -> None:
    buyer = Principal("acme", frozenset({"join"}), "jwt:u-1")
    with pytest.raises(AuthenticationFailed):
        Tickets().principal(Tickets().sell(buyer, NOW), NOW)
    shared = "s" * 32
    assert "acme" == Tickets(shared).principal(Tickets(shared).sell(buyer, NOW), NOW).tenant
    with pytest.raises(InvalidSetting):
        Tickets("short")


# ---- the gate


class _Asked:
    """A request's head, as far as the gate looks."""

    def __init__(self, query: str = "", **headers: str) -> None:
        self._headers = {name.replace("_", "-").encode(): value for name, value in headers.items()}
        self.query_string = query.encode()
        self.query = dict(pair.split("=", 1) for pair in query.split("&") if pair)

    def header(self, name: bytes) -> str:
        return self._headers.get(name, "")


@pytest.fixture
def gate(keys: KeyFile) -> Gate:
    return Gate(keys, None, Tickets(), clock=lambda: NOW)


def test_the_gate_takes_a_key_in_either_header_and_a_ticket_in_the_query(gate: Gate, keys: KeyFile) -> None:
    _, text = keys.create("checkout", "acme", ("join",), NOW)
    ticket = gate.tickets.sell(keys.principal(text, NOW), NOW)
    for asked in (
        _Asked(authorization=f"Bearer {text}"),
        _Asked(authorization=f"bearer  {text}"),
        _Asked(x_api_key=text),
        _Asked(f"ticket={ticket}"),
    ):
        assert "acme" == gate(asked).tenant  # type: ignore[arg-type]


def test_without_a_credential_one_is_nobody(gate: Gate) -> None:
    assert NOBODY is gate(_Asked("a=b"))  # type: ignore[arg-type]


def test_the_gate_refuses_what_it_cannot_read_or_choose_between(gate: Gate, keys: KeyFile) -> None:
    _, text = keys.create("checkout", "acme", ("join",), NOW)
    for asked in (
        _Asked(authorization="Basic dXNlcjpwYXNz"),
        _Asked(authorization="Bearer"),
        _Asked(authorization=text),
        _Asked(authorization="Bearer a.b.c"),
        _Asked(authorization=f"Bearer {text}", x_api_key=text),
        _Asked("ticket=x"),
        _Asked(f"ticket={gate.tickets.sell(keys.principal(text, NOW), NOW)}&ticket=x"),
        _Asked(authorization=f"Bearer {gate.tickets.sell(keys.principal(text, NOW), NOW)}"),
        _Asked(x_api_key="ow_nothing"),
    ):
        with pytest.raises(AuthenticationFailed):
            gate(asked)  # type: ignore[arg-type]


# ---- who is still good


def _regrant(keys: KeyFile, *grants: str) -> None:
    document = json.loads(keys.path.read_text())
    document["keys"][0]["grants"] = grants
    write_whole(keys.path, json.dumps(document).encode())


@pytest.mark.parametrize(
    ("held", "now_held", "is_good"),
    [
        (("read", "join"), ("join", "read"), True),
        (("read:a",), ("read",), True),
        (("read",), ("*",), True),
        (("read", "join"), ("read",), False),
        (("read",), ("read:a",), False),
        (("consume",), ("consume", "group:billing"), False),
        (("consume", "group:billing"), ("consume", "group:bill*"), True),
        (("consume", "group:billing"), ("consume", "group:shipping"), False),
        (("consume", "group:billing"), ("*",), True),
    ],
)
def test_a_key_vouches_as_long_as_it_allows_what_it_allowed(
    keys: KeyFile, held: tuple[str, ...], now_held: tuple[str, ...], is_good: bool
) -> None:
    _, text = keys.create("checkout", "acme", held, NOW)
    server = KeyFile(keys.path)
    principal = server.principal(text, NOW)
    _regrant(keys, *now_held)
    assert is_good is server.vouches_for(principal, NOW + 1)


def test_a_key_that_is_revoked_expired_or_gone_vouches_for_nobody_and_neither_for_its_tickets(keys: KeyFile) -> None:
    clock = [float(NOW)]
    made, text = keys.create("checkout", "acme", ("join",), NOW, lives_s=100)
    gate = Gate(KeyFile(keys.path), None, Tickets(), clock=lambda: clock[0])
    principal = gate(_Asked(x_api_key=text))  # type: ignore[arg-type]
    ticket = gate.tickets.sell(principal, NOW)
    through = gate(_Asked(f"ticket={ticket}"))  # type: ignore[arg-type]
    assert gate.vouches_for(principal)
    clock[0] += LIVES_S + 1
    assert gate.vouches_for(through), "a ticket's end is not the end of what it opened"
    clock[0] = NOW + 100
    assert not gate.vouches_for(principal)
    assert not gate.vouches_for(through)
    clock[0] = NOW
    keys.revoke(made.id, NOW)
    clock[0] += 2
    assert not gate.vouches_for(principal)
    assert not gate.vouches_for(through)
    with pytest.raises(AuthenticationFailed, match="bought the ticket"):
        gate(_Asked(f"ticket={ticket}"))  # type: ignore[arg-type]
    keys.path.unlink()
    clock[0] += 2
    assert not gate.vouches_for(principal)


def test_a_file_of_keys_that_cannot_be_read_ends_nothing_that_is_open(keys: KeyFile) -> None:
    clock = [float(NOW)]
    _, text = keys.create("checkout", "acme", ("join",), NOW)
    gate = Gate(KeyFile(keys.path), None, Tickets(), clock=lambda: clock[0])
    principal = gate(_Asked(x_api_key=text))  # type: ignore[arg-type]
    ticket = gate.tickets.sell(principal, NOW)
    keys.path.write_text("{")
    clock[0] += 2
    assert gate.vouches_for(principal)
    with pytest.raises(Corrupt):  # nobody is let in meanwhile, with a ticket neither
        gate(_Asked(f"ticket={ticket}"))  # type: ignore[arg-type]


async def test_a_token_vouches_until_it_ends_or_its_signer_is_withdrawn(rules: jwts.Rules, tmp_path: Path) -> None:
    clock = [float(NOW)]
    async with jwts.Tokens(rules) as tokens:
        gate = Gate(None, tokens, Tickets(), clock=lambda: clock[0])
        principal = gate(_Asked(authorization=f"Bearer {sign(EC, 'e1', 'ES256')}"))  # type: ignore[arg-type]
        through = gate(_Asked(f"ticket={gate.tickets.sell(principal, NOW)}"))  # type: ignore[arg-type]
        for one in (principal, through):
            assert gate.vouches_for(one)
        clock[0] = NOW + 60 + jwts.LEEWAY_S
        for one in (principal, through):
            assert not gate.vouches_for(one)
        clock[0] = NOW
        (tmp_path / "jwks.json").write_text(jwks(r1=RSA))
        await tokens._load()
        for one in (principal, through):
            assert not gate.vouches_for(one)


async def test_an_answer_that_sends_elsewhere_is_no_list_of_keys(rules: jwts.Rules) -> None:
    class Elsewhere(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(302)
            self.send_header("Location", f"http://127.0.0.1:{keys_at.server_port}/jwks")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    _Keys.body = jwks(r1=RSA).encode()
    keys_at, server = HTTPServer(("127.0.0.1", 0), _Keys), HTTPServer(("127.0.0.1", 0), Elsewhere)
    for one in (keys_at, server):
        threading.Thread(target=one.serve_forever, daemon=True).start()
    try:
        where = f"http://127.0.0.1:{server.server_port}/jwks"
        with pytest.raises(Unavailable, match="302"):
            await jwts.Tokens(msgspec.structs.replace(rules, jwks=where)).__aenter__()
    finally:
        for one in (keys_at, server):
            one.shutdown()
            one.server_close()
