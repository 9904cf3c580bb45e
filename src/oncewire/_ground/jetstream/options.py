"""How to reach NATS, as one frozen value."""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import unquote, urlsplit

from oncewire._ground.checks import is_nats_url
from oncewire._ground.errors import InvalidSetting, Unavailable
from oncewire._ground.settings import Settings

DEFAULT_URL = "nats://localhost:4222"
DEFAULT_PORT = 4222
DEFAULT_INBOX_PREFIX = "_INBOX"
ADDRESS_MAX = 300
_ADDRESS = re.compile(
    r"(\[[0-9A-Fa-f:.%]+\]|[^\s\x00-\x20\x7f.:@/\[\]?#]{1,63}(\.[^\s\x00-\x20\x7f.:@/\[\]?#]{1,63})*\.?)(:\d{1,5})?"
)


class State(StrEnum):
    """The visible state of a connection."""

    CONNECTING = "connecting"
    CONNECTED = "connected"
    RECONNECTING = "reconnecting"
    DRAINING = "draining"
    CLOSED = "closed"


OnChange = Callable[[State, str], None]
"""Told of each change of state, with the reason in words."""


@dataclass(frozen=True)
class TlsFiles:
    """PEM files: the authority of the servers, '' for the system's; the own certificate and its key."""

    ca: str = ""
    cert: str = ""
    key: str = ""

    def read(self) -> ssl.SSLContext:
        """A context with what they hold now; InvalidSetting when that is nothing of use."""
        try:
            context = ssl.create_default_context(cafile=self.ca or None)
            if self.cert:
                context.load_cert_chain(self.cert, self.key or None)
        except (OSError, ssl.SSLError) as error:
            raise InvalidSetting(
                f"the TLS files for NATS cannot be used: {error}", hint="Check nats.ca, nats.cert, nats.key."
            ) from None
        return context


@dataclass(frozen=True)
class Options:
    """Everything that a connection needs to know. One of user and password, token, creds, nkey at most."""

    servers: tuple[str, ...] = (DEFAULT_URL,)
    name: str = "oncewire"
    user: str = ""
    password: str = ""
    token: str = ""
    creds: str = ""
    nkey: str = ""
    inbox_prefix: str = DEFAULT_INBOX_PREFIX
    """All answers come below it. A user of its own prefix can be kept from listening to others' answers."""
    tls: ssl.SSLContext | TlsFiles | None = None
    tls_first: bool = False
    connect_timeout_s: float = 5.0
    reconnect_delay_min_s: float = 0.05
    reconnect_delay_max_s: float = 2.0
    ping_interval_s: float = 20.0
    pings_unanswered_max: int = 2
    write_bytes_max: int = 64 * 1024 * 1024
    on_change: OnChange | None = None

    def __repr__(self) -> str:
        """Without credentials: options end up in logs."""
        return f"Options(servers={[address_of(server) for server in self.servers]}, name={self.name!r})"

    def trust(self) -> ssl.SSLContext:
        """For a connection that is made now: files are read again, so that a renewed certificate needs no restart."""
        if not isinstance(self.tls, TlsFiles):
            return self.tls or ssl.create_default_context()
        try:
            return self.tls.read()
        except InvalidSetting as wrong:  # they were good at the start: somebody may be writing them
            raise Unavailable(wrong.message, hint=wrong.hint) from None

    def credentials_of(self, server: str) -> tuple[str, str, str]:
        """User, password and token for one server: its address wins, `nats://token@host` is a token."""
        parts = urlsplit(server)
        if parts.username and parts.password is not None:
            return unquote(parts.username), unquote(parts.password), ""
        if parts.username:
            return "", "", unquote(parts.username)
        return self.user, self.password, self.token


def parse_servers(url: str | Sequence[str]) -> tuple[str, ...]:
    """Addresses from one text with commas or from a list; each gets its scheme."""
    given = url.split(",") if isinstance(url, str) else list(url)
    servers = tuple(one.strip() if "://" in one else f"nats://{one.strip()}" for one in given if one.strip())
    if not servers:
        raise InvalidSetting("no NATS server is given", hint=f"For example {DEFAULT_URL}.")
    for server in servers:
        shown = server.rpartition("@")[2]
        try:
            wrong = is_nats_url(server)
        except ValueError:
            wrong = "has a host that is none"
        if wrong or not is_address(urlsplit(server).netloc.rpartition("@")[2]):
            raise InvalidSetting(f"the NATS address {shown} {wrong or 'has a host that is none'}")
    return servers


def without_credentials(server: str) -> str:
    """The address alone."""
    scheme, mark, rest = server.partition("://")
    return f"{scheme}{mark}{rest.rpartition('@')[2]}"


def is_address(text: str) -> bool:
    """Whether this can be a host or host:port: plain text, no blanks, labels of the length that DNS allows."""
    if len(text) > ADDRESS_MAX or not _ADDRESS.fullmatch(text):
        return False
    try:
        parts = urlsplit(f"nats://{text}")
        return bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return False


def address_of(server: str) -> str:
    """host:port, without credentials."""
    host, port = host_and_port(server)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_and_port(server: str) -> tuple[str, int]:
    parts = urlsplit(server)
    try:
        return parts.hostname or "localhost", parts.port or DEFAULT_PORT
    except ValueError:
        return parts.hostname or "localhost", DEFAULT_PORT


def options_from(settings: Settings, *, name: str = "oncewire", on_change: OnChange | None = None) -> Options:
    """The options that the settings ask for."""
    return Options(
        servers=parse_servers(settings.nats_url),
        name=name,
        user=settings.nats_user,
        password=settings.nats_password,
        token=settings.nats_token,
        creds=settings.nats_creds,
        nkey=settings.nats_nkey,
        inbox_prefix=settings.nats_inbox_prefix,
        tls=tls_files(settings.nats_ca, settings.nats_cert, settings.nats_key),
        on_change=on_change,
    )


def tls_files(ca: str = "", cert: str = "", key: str = "") -> TlsFiles | None:
    """The given files, looked at once; None when none is given (a server that asks for TLS gets the system's trust)."""
    if not (ca or cert):
        return None
    files = TlsFiles(ca, cert, key)
    files.read()
    return files
