"""The options of the source and the sink, read into frozen values. Pure: no file, no socket.

An unknown option, a value that cannot be read and two options that contradict each other are errors that name them.
Nothing here shows a secret: what is printed of an `Access` is its addresses, without credentials.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, Literal
from urllib.parse import urlsplit

from oncewire._ground.errors import ContractViolation, InvalidSetting
from oncewire._ground.jetstream.protocol import encode_filter

DEFAULT_URL: Final = "nats://localhost:4222"
DEFAULT_INBOX_PREFIX: Final = "_INBOX"
SCHEMES: Final = ("nats", "tls")
PARTITIONS_MAX: Final = 10_000
SUBJECTS_MAX: Final = 64
FOREIGN: Final = frozenset({"checkpointlocation", "queryname"})
"""What Spark itself leaves among the options."""

_ACCESS: Final = (
    "url",
    "user",
    "password",
    "token",
    "credentials",
    "credentialsFile",
    "nkey",
    "nkeyFile",
    "tls",
    "tlsFirst",
    "tlsCa",
    "tlsCert",
    "tlsKey",
    "inboxPrefix",
)
_READ: Final = ("stream", "subjects", "startingOffsets", "minPartitions", "failOnDataLoss", "includeHeaders")
_BATCH: Final = (*_ACCESS, *_READ, "endingOffsets")
_STREAM: Final = (*_ACCESS, *_READ, "maxRecordsPerTrigger", "maxBytesPerTrigger")
_WRITE: Final = (*_ACCESS, "stream", "writeId")
ALL: Final = tuple(dict.fromkeys((*_BATCH, *_STREAM, *_WRITE)))

_STREAM_NAME = re.compile(r"[^\s.*>/\\\x00-\x20\x7f]{1,255}")
_INBOX_PREFIX = re.compile(r"[A-Za-z0-9_-]{1,128}(\.[A-Za-z0-9_-]{1,128})*")
_WRITE_ID = re.compile(r"[!-~]{1,128}")
_SECRET_BLOCK = re.compile(r"-{3,}BEGIN (?P<kind>[A-Z ]+)-{3,}\s*(?P<body>[A-Za-z0-9_\-.=]+)\s*-{3,}END [A-Z ]+-{3,}")

Given = Mapping[str, str]
ReadFile = Callable[[str], str]


@dataclass(frozen=True)
class Access:
    """How to reach NATS and as whom. Its text shows no secret."""

    servers: tuple[str, ...] = field(default=(DEFAULT_URL,), repr=False)
    user: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    token: str = field(default="", repr=False)
    creds: tuple[str, str] | None = field(default=None, repr=False)
    """The JWT and the seed."""
    nkey: str = field(default="", repr=False)
    wants_tls: bool = False
    is_tls_first: bool = False
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    inbox_prefix: str = DEFAULT_INBOX_PREFIX


Place = Literal["earliest", "latest"] | int | datetime
"""Where to begin or to end: a word, a sequence, or a time."""


@dataclass(frozen=True)
class ReadOptions:
    """What to read, and how."""

    access: Access
    stream: str
    subjects: tuple[str, ...] = ()
    start: Place = "earliest"
    end: Place = "latest"
    records_per_trigger_max: int = 0
    bytes_per_trigger_max: int = 0
    partitions_min: int = 1
    fails_on_data_loss: bool = True
    includes_headers: bool = False


@dataclass(frozen=True)
class WriteOptions:
    """Where to publish. `write_id` names a batch write, so that running it again publishes nothing twice."""

    access: Access
    stream: str = ""
    write_id: str = ""


def read_options(given: Given, read_file: ReadFile, *, is_streaming: bool, has_admission: bool = True) -> ReadOptions:
    """The options of a read. `has_admission`: whether this Spark can limit a trigger (since 4.2)."""
    values = _known(given, _STREAM if is_streaming else _BATCH, "a streaming read" if is_streaming else "a batch read")
    if "stream" not in values:
        raise InvalidSetting("the option stream is missing", hint='.option("stream", "ORDERS") names the stream.')
    for name in ("maxRecordsPerTrigger", "maxBytesPerTrigger"):
        if name in values and not has_admission:
            raise InvalidSetting(f"the option {name} needs Spark 4.2 or newer", hint="Leave it out on this Spark.")
    options = ReadOptions(
        access=_access(values, read_file),
        stream=_stream_name(values["stream"]),
        subjects=_subjects(values.get("subjects", "")),
        start=_place("startingOffsets", values.get("startingOffsets", "latest" if is_streaming else "earliest")),
        end=_place("endingOffsets", values.get("endingOffsets", "latest")),
        records_per_trigger_max=_count("maxRecordsPerTrigger", values, 0),
        bytes_per_trigger_max=_count("maxBytesPerTrigger", values, 0),
        partitions_min=_count("minPartitions", values, 1),
        fails_on_data_loss=_boolean("failOnDataLoss", values, True),
        includes_headers=_boolean("includeHeaders", values, False),
    )
    _check_span(options)
    return options


def write_options(given: Given, read_file: ReadFile, *, is_streaming: bool) -> WriteOptions:
    values = _known(given, _WRITE, "a write")
    write_id = values.get("writeId", "")
    if "writeId" in values and is_streaming:
        raise InvalidSetting(
            "the option writeId contradicts writeStream", hint="A streaming query has an id of its own: leave it out."
        )
    if "writeId" in values and not _WRITE_ID.fullmatch(write_id):
        raise InvalidSetting(f"the option writeId has 1 to 128 printable ASCII characters, not {write_id[:40]!r}")
    stream = _stream_name(values["stream"]) if "stream" in values else ""
    return WriteOptions(_access(values, read_file), stream, write_id)


def _known(given: Given, names: tuple[str, ...], what: str) -> dict[str, str]:
    """The given options under the names of the table; Spark hands them over in small letters."""
    spelled = {name.lower(): name for name in names}
    others = {name.lower(): name for name in ALL}
    values: dict[str, str] = {}
    for key, value in given.items():
        lower = key.lower()
        if lower in spelled:
            values[spelled[lower]] = str(value)
        elif lower in others:
            raise InvalidSetting(f"the option {others[lower]} means nothing in {what}", hint="Leave it out.")
        elif lower == "path":
            raise InvalidSetting("the option path means nothing here", hint="Call load() or save() without a path.")
        elif lower not in FOREIGN:
            raise InvalidSetting(f"there is no option {key}", hint=f"There are: {', '.join(names)}.")
    return values


def _access(values: Given, read_file: ReadFile) -> Access:
    _one_at_most(values, "token", "user", "credentials", "credentialsFile", "nkey", "nkeyFile")
    _together(values, "password", "user")
    _together(values, "user", "password")
    _together(values, "tlsKey", "tlsCert")
    has_tls = bool(values.get("tlsCa") or values.get("tlsCert"))
    if has_tls and not _boolean("tls", values, True):
        raise InvalidSetting("the option tls is false, which contradicts tlsCa and tlsCert")
    creds = values.get("credentials") or _file("credentialsFile", values, read_file)
    return Access(
        servers=_servers(values.get("url", DEFAULT_URL)),
        user=values.get("user", ""),
        password=values.get("password", ""),
        token=values.get("token", ""),
        creds=_creds(creds) if creds else None,
        nkey=_seed(values.get("nkey") or _file("nkeyFile", values, read_file)),
        wants_tls=_boolean("tls", values, has_tls),
        is_tls_first=_boolean("tlsFirst", values, False),
        tls_ca=values.get("tlsCa", ""),
        tls_cert=values.get("tlsCert", ""),
        tls_key=values.get("tlsKey", ""),
        inbox_prefix=_inbox_prefix(values.get("inboxPrefix", DEFAULT_INBOX_PREFIX)),
    )


def _inbox_prefix(text: str) -> str:
    if not _INBOX_PREFIX.fullmatch(text):
        raise InvalidSetting(
            f"the option inboxPrefix is not tokens of a subject: {text[:80]!r}", hint="Like _INBOX_me."
        )
    return text


def _one_at_most(values: Given, *names: str) -> None:
    found = [name for name in names if name in values]
    if len(found) > 1:
        raise InvalidSetting(f"the options {' and '.join(found)} contradict each other", hint="Give one of them.")


def _together(values: Given, name: str, needed: str) -> None:
    if name in values and needed not in values:
        raise InvalidSetting(f"the option {name} needs {needed}")


def _file(name: str, values: Given, read_file: ReadFile) -> str:
    if name not in values:
        return ""
    try:
        return read_file(values[name])
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSetting(f"the file of the option {name} cannot be read: {error}") from None


def _creds(text: str) -> tuple[str, str]:
    blocks = {match["kind"]: match["body"] for match in _SECRET_BLOCK.finditer(text)}
    jwt, seed = blocks.get("NATS USER JWT"), blocks.get("USER NKEY SEED")
    if not jwt or not seed:
        raise InvalidSetting(
            "the credentials are not those of a creds file", hint="They need a NATS USER JWT and a USER NKEY SEED."
        )
    return jwt, seed


def _seed(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith("S")]
    if text and not lines:
        raise InvalidSetting("the nkey is no seed", hint="A user's seed begins with SU.")
    return lines[0] if lines else ""


def _servers(text: str) -> tuple[str, ...]:
    servers = tuple(one.strip() if "://" in one else f"nats://{one.strip()}" for one in text.split(",") if one.strip())
    if not servers:
        raise InvalidSetting("the option url is empty", hint=f"For example {DEFAULT_URL}.")
    for server in servers:
        try:
            parts = urlsplit(server)
            is_good = parts.scheme in SCHEMES and bool(parts.hostname) and (parts.port is None or parts.port > 0)
        except ValueError:
            is_good = False
        if not is_good:
            shown = server.rpartition("@")[2]
            raise InvalidSetting(f"the option url has an address that is none: {shown}", hint=f"Like {DEFAULT_URL}.")
    return servers


def _stream_name(text: str) -> str:
    if not _STREAM_NAME.fullmatch(text):
        raise InvalidSetting(f"the option stream is not the name of a stream: {text[:80]!r}")
    return text


def _subjects(text: str) -> tuple[str, ...]:
    filters = tuple(dict.fromkeys(one.strip() for one in text.split(",") if one.strip()))
    if len(filters) > SUBJECTS_MAX:
        raise InvalidSetting(f"the option subjects has {len(filters)} filters, {SUBJECTS_MAX} are allowed")
    for one in filters:
        try:
            encode_filter(one)
        except ContractViolation as error:
            raise InvalidSetting(f"the option subjects: {error}", hint=error.hint) from None
    return filters


def _place(name: str, text: str) -> Place:
    word = text.strip()
    if word in ("earliest", "latest"):
        return "earliest" if word == "earliest" else "latest"
    if word.isascii() and word.isdigit():
        if not 1 <= int(word) < 2**62:
            raise InvalidSetting(f"the option {name} is {word[:30]}, and sequences begin at 1")
        return int(word)
    try:
        when = datetime.fromisoformat(word)
    except ValueError:
        raise InvalidSetting(
            f"the option {name} is {word[:60]!r}", hint="Give earliest, latest, a sequence, or a time with its zone."
        ) from None
    if when.tzinfo is None:
        raise InvalidSetting(f"the option {name} is a time without a zone", hint=f"For example {word}Z for UTC.")
    return when


def _count(name: str, values: Given, default: int) -> int:
    if name not in values:
        return default
    text = values[name].strip()
    limit = PARTITIONS_MAX if name == "minPartitions" else 2**62
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text) <= limit:
        raise InvalidSetting(f"the option {name} is a number from 1 to {limit}, not {text[:40]!r}")
    return int(text)


def _boolean(name: str, values: Given, default: bool) -> bool:
    text = values.get(name, str(default)).strip().lower()
    if text not in ("true", "false"):
        raise InvalidSetting(f"the option {name} is true or false, not {text[:40]!r}")
    return text == "true"


def _check_span(options: ReadOptions) -> None:
    """A start behind the end is a contradiction that needs no server to be seen."""
    start, end = options.start, options.end
    is_behind = (isinstance(start, int) and isinstance(end, int) and start > end) or (
        isinstance(start, datetime) and isinstance(end, datetime) and start > end
    )
    if is_behind or end == "earliest":
        raise InvalidSetting(f"the options startingOffsets and endingOffsets contradict each other: {start} to {end}")
