"""From TOML files to declarations. Pure: takes texts, gives values and findings, each with file, line and key.

Files lie over each other: a later one adds tables and overrides single keys. The shipped catalogs come first, then what
the settings say, then the user's files. A bad value is a finding and the default takes its place, so that one look
shows every mistake and one mistake does not look like ten.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from oncewire._ground.contracts import catalog, subjects
from oncewire._ground.settings import Settings
from oncewire._ground.topology import values
from oncewire._ground.topology.findings import Finding
from oncewire._ground.topology.model import SERVICE_STREAMS, Consumer, Service, Stream, Topology, bucket, dotted
from oncewire._ground.topology.values import Key

FILE_BYTES_MAX = 256 << 10
TABLES_MAX = 2_000
"""Streams, buckets, consumers and services of one file: beyond that something else was named by mistake."""

KEY_PARTS_MAX = 64
"""Parts of a key with dots. The work for a key grows with their square, in the TOML parser too; ours have four."""

SECTIONS = ("streams", "buckets", "consumers", "services", "released")
Path = tuple[str, ...]
_BARE = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_QUOTED = re.compile(r"\"[^\"]*\"|'[^']*'")


class Source(NamedTuple):
    """A file by name and content."""

    name: str
    text: str


class Declared(NamedTuple):
    topology: Topology
    findings: tuple[Finding, ...]


def declare(shipped: Sequence[Source], own: Sequence[Source], settings: Settings) -> Declared:
    """Read all, lay them over each other, decode, and give streams and subjects the prefixes of the settings."""
    layers = _Layers()
    for source in shipped:
        layers.add(source)
    layers.follow(settings)
    for source in own:
        layers.add(source)
    topology = _Decoder(layers).topology()
    return Declared(_prefixed(topology, settings), tuple(layers.findings))


class _Layers:
    """The merged tables, where each key stands, and what was wrong so far."""

    def __init__(self) -> None:
        self.tables: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
        self.places: dict[Path, str] = {}
        self.findings: list[Finding] = []

    def add(self, source: Source) -> None:
        if number := _crowded_line(source.text):
            place = f"{source.name}:{number}"
            self.wrong("too-many", place, f"has a key of more than {KEY_PARTS_MAX} parts", "Shorten the key.")
            return
        try:
            content = tomllib.loads(source.text)
        except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
            self.wrong("not-toml", source.name, f"is not valid TOML: {error}"[:300], "Mend that line.")
            return
        lines = line_numbers(source.text)
        for section, tables in content.items():
            self._add_section(source.name, lines, section, tables)

    def _add_section(self, file: str, lines: Mapping[Path, int], section: str, tables: Any) -> None:
        at = _Marker(file, lines)
        if section not in SECTIONS:
            self.wrong("unknown-section", at(section), "is no section of a topology", _near(section, SECTIONS))
        elif not isinstance(tables, dict):
            self.wrong("not-a-table", at(section), "must be a table", f"Write [{section}.NAME].")
        elif len(tables) > TABLES_MAX:
            self.wrong("too-many", at(section), f"has more than {TABLES_MAX} entries", "Is this a topology?")
        elif section == "released":
            self._add_released(at, tables)
        elif section == "consumers":
            for stream, consumers in tables.items():
                self._add_tables(at, ("consumers", stream), consumers)
        else:
            self._add_tables(at, (section,), tables)

    def _add_released(self, at: _Marker, tables: dict[str, Any]) -> None:
        """Released names only ever grow: a file adds to what others have released."""
        own = self.read(("released",), tables, values.RELEASED, at)
        for field, names in own.items():
            known = self.tables["released"].setdefault(field, {})
            known.update({name: at("released", field.removeprefix("released_")) for name in names})

    def _add_tables(self, at: _Marker, path: Path, tables: Any) -> None:
        if not isinstance(tables, dict):
            self.wrong("not-a-table", at(*path), "must be a table", f"Write [{dotted(path)}.NAME].")
            return
        for name, table in tables.items():
            if not isinstance(table, dict):
                self.wrong("not-a-table", at(*path, name), "must be a table", f"Write [{dotted((*path, name))}].")
                continue
            self._add_table(at, (*path, name), table)

    def _add_table(self, at: _Marker, path: Path, table: dict[str, Any]) -> None:
        into = self.tables[path[0]]
        for name in path[1:]:
            into = into.setdefault(name, {})
        into.update(table)
        self.places.setdefault(path, at(*path))
        self.places.update({(*path, key): at(*path, key) for key in table})

    def follow(self, settings: Settings) -> None:
        """What the settings say about streams that follow them; a user's file may still override it."""
        limit = settings.max_msgs_per_subject
        said = {
            "max_age": ("message_ttl_s", f"{settings.message_ttl_s}s"),
            "duplicate_window": ("duplicate_window_s", f"{settings.duplicate_window_s}s"),
            "max_msgs_per_subject": ("max_msgs_per_subject", limit if limit > 0 else "unlimited"),
        }
        for name, table in self.tables["streams"].items():
            if table.get("follows") == "message-settings":
                for key, (setting, value) in said.items():
                    table[key] = value
                    self.places["streams", name, key] = f"setting streams.{setting}"

    def read(self, path: Path, table: Mapping[str, Any], keys: Mapping[str, Key], at: _Marker) -> dict[str, Any]:
        """The fields that the table fills; each key that it gets wrong is a finding."""
        fields: dict[str, Any] = {}
        for key, value in table.items():
            place = at(*path, key)
            if key in values.REFUSED and key not in keys:
                self.wrong("refused-key", place, f"is refused: {values.REFUSED[key]}", "Remove the key.")
            elif key not in keys:
                self.wrong("unknown-key", place, f"is no key of {_kind(path)}", _near(key, keys))
            else:
                try:
                    fields[keys[key].field] = keys[key].read(value)
                except ValueError as error:
                    self.wrong("bad-value", place, str(error), f"For example {key} = {keys[key].example}.")
        return fields

    def wrong(self, code: str, place: str, message: str, remedy: str) -> None:
        self.findings.append(Finding(code=code, place=place, message=message, remedy=remedy))


class _Marker(NamedTuple):
    """Says where a key stands: `file:line table.key`."""

    file: str
    lines: Mapping[Path, int]
    known: Mapping[Path, str] = {}

    def __call__(self, *path: str) -> str:
        if path in self.known:
            return self.known[path]
        for length in range(len(path), 0, -1):
            if path[:length] in self.lines:
                return f"{self.file}:{self.lines[path[:length]]} {dotted(path)}"
        return f"{self.file} {dotted(path)}".strip()


class _Decoder:
    """From merged tables to the model."""

    def __init__(self, layers: _Layers) -> None:
        self._layers = layers
        self._tables = layers.tables
        self._at = _Marker("", {}, layers.places)

    def topology(self) -> Topology:
        released = self._tables["released"]
        places = dict(self._layers.places)
        for field, names in released.items():
            places |= {("released", field.removeprefix("released_"), name): place for name, place in names.items()}
        return Topology(
            streams=(*self._streams(), *self._buckets()),
            consumers=tuple(self._consumers()),
            services=tuple(self._services()),
            released_streams=tuple(released.get("released_streams", ())),
            released_consumers=tuple(released.get("released_consumers", ())),
            places=places,
        )

    def _streams(self) -> Iterable[Stream]:
        for name, table in self._tables["streams"].items():
            path = ("streams", name)
            fields = self._layers.read(path, table, values.STREAM, self._at)
            if "subjects" not in table and not table.get("mirror") and not table.get("sources"):
                self._missing(path, "subjects", values.STREAM)
            yield Stream(key=name, name=name, **fields)

    def _buckets(self) -> Iterable[Stream]:
        for name, table in self._tables["buckets"].items():
            path = ("buckets", name)
            fields = self._layers.read(path, table, values.BUCKET, self._at)
            defaults = {"description": "", "history": 1, "max_age_ns": 0, "max_bytes": -1, "replicas": 0}
            yield bucket(name, **{**defaults, **fields})

    def _consumers(self) -> Iterable[Consumer]:
        for stream, consumers in self._tables["consumers"].items():
            for name, table in consumers.items():
                path = ("consumers", stream, name)
                fields = self._layers.read(path, table, values.CONSUMER, self._at)
                if "filters" not in table:
                    self._missing(path, "filters", values.CONSUMER)
                yield Consumer(stream_key=stream, stream=stream, name=name, **fields)

    def _services(self) -> Iterable[Service]:
        for name, table in self._tables["services"].items():
            fields = self._layers.read(("services", name), table, values.SERVICE, self._at)
            yield Service(name=name, **fields)

    def _missing(self, path: Path, key: str, keys: Mapping[str, Key]) -> None:
        self._layers.wrong("missing-key", self._at(*path), f"has no {key}", f"For example {key} = {keys[key].example}.")


def _prefixed(topology: Topology, settings: Settings) -> Topology:
    """Names of `sr-*` streams and subjects of conversations, as the settings want them."""
    names = {
        stream.key: settings.stream_prefix + stream.key.removeprefix("sr")
        for stream in topology.streams
        if stream.follows == "message-settings" and stream.key.startswith("sr-")
    }
    moved = {
        f"{subjects.CHAT_EVENTS_PREFIX}.*": f"{settings.chat_events_prefix}.*",
        f"{subjects.CHAT_TOKENS_PREFIX}.*": f"{settings.chat_tokens_prefix}.*",
    }
    chat = {stream.key for stream in topology.streams if stream.follows == "chat-settings"}
    replace = msgspec.structs.replace
    return replace(
        topology,
        streams=tuple(
            replace(one, name=names.get(one.key, one.name), subjects=_moved(one.subjects, moved, one.key in chat))
            for one in topology.streams
        ),
        consumers=tuple(
            replace(
                one,
                stream=names.get(one.stream_key, one.stream_key),
                filters=_moved(one.filters, moved, one.stream_key in chat),
            )
            for one in topology.consumers
        ),
        services=tuple(_prefixed_service(one, names, moved) for one in topology.services),
        contracts=tuple(one._replace(pattern=moved.get(one.pattern, one.pattern)) for one in catalog.CATALOG),
    )


def _prefixed_service(service: Service, names: Mapping[str, str], moved: Mapping[str, str]) -> Service:
    streams = {key: tuple(names.get(one, one) for one in getattr(service, key)) for key in SERVICE_STREAMS}
    patterns = {key: _moved(getattr(service, key), moved, True) for key in ("publishes", "handles")}
    return msgspec.structs.replace(service, **streams, **patterns)


def _moved(patterns: tuple[str, ...], moved: Mapping[str, str], is_chat: bool) -> tuple[str, ...]:
    return tuple(moved.get(one, one) for one in patterns) if is_chat else patterns


def _crowded_line(text: str) -> int:
    """The number of the first line that could hold a key of too many parts; 0 when there is none."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.count(".") >= KEY_PARTS_MAX and _QUOTED.sub("", line).partition("#")[0].count(".") >= KEY_PARTS_MAX:
            return number
    return 0


def line_numbers(text: str) -> dict[Path, int]:
    """Where each table and key begins, from 1. What a scan by lines cannot see (inline tables) is left out."""
    found: dict[Path, int] = {}
    table: Path = ()
    for number, line in enumerate(text.split("\n"), 1):
        line = line.strip()
        if line.startswith("[") and "]" in line:
            header = _key_path(line.strip("[").partition("]")[0])
            table = header or table
            path = header
        else:
            key = _key_path(line.partition("=")[0]) if "=" in line and not line.startswith("#") else ()
            path = (*table, *key) if key else ()
        for length in range(1, len(path) + 1):
            found.setdefault(path[:length], number)
    return found


def _key_path(text: str) -> Path:
    """`a."b.c".d` as its parts, () when it is no key."""
    text = text.strip()
    if _BARE.fullmatch(text):
        return tuple(text.split("."))
    try:
        inner: Any = tomllib.loads(f"{text} = 0")
    except (ValueError, RecursionError):
        return ()
    path: list[str] = []
    while isinstance(inner, dict) and len(inner) == 1:
        name, inner = next(iter(inner.items()))
        path.append(name)
    return tuple(path)


def _kind(path: Path) -> str:
    return {"streams": "a stream", "buckets": "a bucket", "consumers": "a consumer", "services": "a service"}.get(
        path[0], f"[{path[0]}]"
    )


def _near(name: str, known: Iterable[str]) -> str:
    options = sorted(known)
    near = difflib.get_close_matches(name[:100], options, n=1)
    return f"Did you mean {near[0]!r}?" if near else f"There are: {', '.join(options)}."
