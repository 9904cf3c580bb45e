"""What a CONNECT says about who we are. The witness for nkeys is the `nkeys` package."""

from __future__ import annotations

import base64
from pathlib import Path

import nkeys
import pytest

from oncewire._ground.errors import AuthenticationFailed
from oncewire._ground.jetstream.auth import credentials
from oncewire._ground.jetstream.nkeys import NKey, read_creds, read_nkey
from oncewire._ground.jetstream.options import Options
from tests.support.jwt import creds_text, make_seed

NONCE = "PXoWU7zWAMt75FY"


def test_a_seed_gives_the_public_key_that_the_witness_gives() -> None:
    seed = make_seed(nkeys.PREFIX_BYTE_USER)

    assert nkeys.from_seed(seed.encode()).public_key.decode() == NKey(seed).public


def test_a_signature_is_what_the_witness_accepts() -> None:
    seed = make_seed(nkeys.PREFIX_BYTE_USER)
    signature = NKey(seed).sign(NONCE)
    raw = base64.urlsafe_b64decode(signature + "=" * (-len(signature) % 4))

    assert nkeys.from_seed(seed.encode()).verify(NONCE.encode(), raw)


def test_a_seed_may_stand_between_blanks() -> None:
    seed = make_seed(nkeys.PREFIX_BYTE_USER)

    assert NKey(seed).public == NKey(f"  {seed}\n").public


@pytest.mark.parametrize("kind", [nkeys.PREFIX_BYTE_ACCOUNT, nkeys.PREFIX_BYTE_OPERATOR, nkeys.PREFIX_BYTE_SERVER])
def test_a_seed_of_another_kind_is_refused(kind: int) -> None:
    with pytest.raises(AuthenticationFailed, match="not a user's"):
        NKey(make_seed(kind))


@pytest.mark.parametrize("position", range(0, 57, 3))
def test_a_damaged_seed_is_refused(position: int) -> None:
    seed = make_seed(nkeys.PREFIX_BYTE_USER)
    other = "A" if seed[position] != "A" else "B"

    with pytest.raises(AuthenticationFailed):
        NKey(seed[:position] + other + seed[position + 1 :])


@pytest.mark.parametrize("seed", ["", "SU", "S", "not base32!", "SUAAA", "ü" * 58, "UAAA" * 14])
def test_what_is_no_seed_is_refused(seed: str) -> None:
    with pytest.raises(AuthenticationFailed):
        NKey(seed)


def test_an_error_never_shows_the_seed() -> None:
    seed = make_seed(nkeys.PREFIX_BYTE_ACCOUNT)
    with pytest.raises(AuthenticationFailed) as caught:
        NKey(seed)

    assert seed not in str(caught.value)
    assert seed not in repr(NKey(make_seed(nkeys.PREFIX_BYTE_USER)))


def test_a_creds_file_holds_the_jwt_and_the_seed(tmp_path: Path) -> None:
    seed = make_seed(nkeys.PREFIX_BYTE_USER)
    path = tmp_path / "user.creds"
    path.write_text(creds_text("eyJ0.eyJh.c2ln-_", seed))

    jwt, key = read_creds(str(path))

    assert jwt == "eyJ0.eyJh.c2ln-_"
    assert key.public == NKey(seed).public


@pytest.mark.parametrize(
    "text",
    ["", "nonsense", "-----BEGIN NATS USER JWT-----\nabc\n------END NATS USER JWT------\n", "\x00" * 100],
)
def test_a_file_that_is_no_creds_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "user.creds"
    path.write_text(text)

    with pytest.raises(AuthenticationFailed, match="not a creds file"):
        read_creds(str(path))


@pytest.mark.parametrize("reading", [read_creds, read_nkey])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, reading: object) -> None:
    assert callable(reading)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xff")
    for path in (str(tmp_path / "missing"), str(tmp_path / "binary"), str(tmp_path), "~no-such-user/file", "\x00"):
        with pytest.raises(AuthenticationFailed, match="cannot be read"):
            reading(path)


def test_an_nkey_file_may_have_comments_above_the_seed(tmp_path: Path) -> None:
    seed = make_seed(nkeys.PREFIX_BYTE_USER)
    path = tmp_path / "user.nk"
    path.write_text(f"# a comment\n\n{seed}\n")

    assert NKey(seed).public == read_nkey(str(path)).public
    path.write_text("# nothing here\n")
    with pytest.raises(AuthenticationFailed, match="holds no nkey seed"):
        read_nkey(str(path))


def test_each_way_to_authenticate_fills_its_own_fields(tmp_path: Path) -> None:
    seed = make_seed(nkeys.PREFIX_BYTE_USER)
    nkey, creds = tmp_path / "u.nk", tmp_path / "u.creds"
    nkey.write_text(seed)
    creds.write_text(creds_text("a.b.c", seed))
    key = NKey(seed)
    server = "nats://a:1"

    assert credentials(Options(), server, NONCE) == {}
    assert credentials(Options(token="t"), server, NONCE) == {"auth_token": "t"}
    assert credentials(Options(user="u", password="p"), server, NONCE) == {"user": "u", "pass": "p"}
    assert credentials(Options(nkey=str(nkey)), server, NONCE) == {"nkey": key.public, "sig": key.sign(NONCE)}
    assert credentials(Options(creds=str(creds)), server, NONCE) == {"jwt": "a.b.c", "sig": key.sign(NONCE)}
    assert credentials(Options(creds=str(creds)), "nats://u:p@a:1", NONCE) == {"user": "u", "pass": "p"}


def test_a_file_is_read_at_each_attempt(tmp_path: Path) -> None:
    """A renewed credential is taken up by the next reconnect."""
    path = tmp_path / "u.nk"
    options = Options(nkey=str(path))
    seen = set()
    for _ in range(2):
        path.write_text(make_seed(nkeys.PREFIX_BYTE_USER))
        seen.add(credentials(options, "nats://a:1", NONCE)["nkey"])

    assert len(seen) == 2
