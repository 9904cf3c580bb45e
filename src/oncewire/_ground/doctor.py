"""The judgement of `oncewire doctor` and of /readyz: from facts to ok, warning or broken, each with its remedy. Pure.

The facts are gathered by `oncewire.cli.facts`. Broken means that something does not work or that data can be damaged;
a warning is a promise that does not hold, or a part that is missing and may not be needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from oncewire._ground.monitor import Promise, durability

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

DISK_FREE_BYTES_LOW = GIB
DISK_FREE_SHARE_LOW = 0.1
STORAGE_SHARE_HIGH = 0.8
MAX_PAYLOAD_BYTES_LOW = MIB
MAX_PAYLOAD_BYTES_MIN = 64 * KIB
JAVA_MAJOR_MIN = 17
POSTGRES_MAJOR_MIN = 14
NATS_MENDED = ((2, 11, 15), (2, 12, 6))
"""The first versions of their lines without the known holes; later lines have them mended."""

JETSTREAM_REMEDY = "Put a `jetstream { … }` block into the server's config, and enable it for this account."


class Verdict(StrEnum):
    OK = "ok"
    WARNING = "warning"
    BROKEN = "broken"


@dataclass(frozen=True)
class Check:
    """One line of the doctor. `remedy` says what to do; it is empty when all is well."""

    name: str
    verdict: Verdict
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class Held:
    """What a stream holds; `bytes_max` 0 means as much as there is room for."""

    messages: int
    bytes: int
    bytes_max: int


@dataclass(frozen=True)
class Nats:
    """A NATS server as its client and its system account or monitoring ports show it. `error` is why it cannot be
    reached."""

    url: str
    error: str = ""
    hint: str = ""
    version: str = ""
    server_id: str = ""
    max_payload: int = 0
    jetstream_error: str = ""
    jsz: Sequence[Mapping[str, Any]] = ()
    monitor_error: str = ""
    topology: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Streams and consumers that are missing, drifted or filling, by that word."""
    held: Mapping[str, Held] = field(default_factory=dict)
    """What declared streams hold."""


@dataclass(frozen=True)
class Postgres:
    """A PostgreSQL. `options` holds what it says about fsync, full_page_writes, synchronous_commit."""

    url: str
    error: str = ""
    hint: str = ""
    version: str = ""
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Folder:
    """The data folder. `problem` is why `up` could not use it, `up_pid` the process that does."""

    path: str
    problem: str = ""
    hint: str = ""
    exists: bool = True
    up_pid: int | None = None
    free_bytes: int = 0
    total_bytes: int = 0
    start_bytes_min: int = 0


@dataclass(frozen=True)
class Facts:
    """Everything that the doctor looks at. None means not there."""

    python: str
    folder: Folder
    nats: Nats
    postgres: Postgres | None
    java: tuple[int, str] | None
    pyspark: str | None


def examine(facts: Facts) -> list[Check]:
    """All lines, in the order in which they are shown."""
    return [
        Check("Python", Verdict.OK, facts.python),
        _folder(facts.folder),
        _disk(facts.folder),
        *_nats(facts.nats, facts.folder),
        *_postgres(facts.postgres),
        _java(facts.java),
        _pyspark(facts.pyspark),
    ]


def own(parts: Mapping[str, str]) -> list[Check]:
    """For a service that needs no server: by part, what keeps it from its work, '' when nothing does."""
    return [_part(name, trouble) for name, trouble in parts.items()]


def ready(
    nats: Nats, postgres: Postgres | None, folder: Folder, losses: Sequence[str] | None, parts: Mapping[str, str]
) -> list[Check]:
    """Whether a service may get work: the same judgement, and what is its own.

    A stream that is missing is broken here: nothing can be stored in it. A loss that a person has not looked at yet is
    a warning: its reader says by itself that it does not go on. `postgres` and `losses` are None where nobody asked.
    """
    return [
        *_nats(nats, folder, is_missing_broken=True),
        *(_postgres(postgres) if postgres is not None else ()),
        *(_losses(losses) if losses is not None else ()),
        *own(parts),
    ]


def _losses(losses: Sequence[str]) -> Iterator[Check]:
    if losses:
        remedy = "Look at it; then `oncewire agent apply --accept-loss STREAM`, `pipeline run --accept-loss STREAM`."
        yield Check("losses", Verdict.WARNING, f"{len(losses)} not acknowledged: {_first(losses)}", remedy)
    else:
        yield Check("losses", Verdict.OK, "none that nobody has acknowledged")


def _part(name: str, trouble: str) -> Check:
    if trouble:
        return Check(name, Verdict.BROKEN, trouble, "See its log; it goes on by itself once this is mended.")
    return Check(name, Verdict.OK, "works")


def worst(checks: Sequence[Check]) -> Verdict:
    found = {check.verdict for check in checks}
    return next(verdict for verdict in (Verdict.BROKEN, Verdict.WARNING, Verdict.OK) if verdict in found | {Verdict.OK})


def _folder(folder: Folder) -> Check:
    if folder.problem:
        return Check("data folder", Verdict.BROKEN, folder.problem, folder.hint)
    if folder.up_pid is not None:
        return Check("data folder", Verdict.OK, f"{folder.path}, `oncewire up` runs on it (process {folder.up_pid})")
    state = "`oncewire up` does not run on it" if folder.exists else "not there yet, `oncewire up` makes it"
    return Check("data folder", Verdict.OK, f"{folder.path}, {state}")


def _disk(folder: Folder) -> Check:
    text = f"{human(folder.free_bytes)} free of {human(folder.total_bytes)}"
    remedy = "Free some room, or choose a folder on another disk with --data."
    if folder.free_bytes < folder.start_bytes_min:
        return Check("disk", Verdict.BROKEN, f"full: {text}", remedy)
    if folder.free_bytes < max(DISK_FREE_BYTES_LOW, DISK_FREE_SHARE_LOW * folder.total_bytes):
        return Check("disk", Verdict.WARNING, f"filling up: {text}", remedy)
    return Check("disk", Verdict.OK, text)


def _nats(nats: Nats, folder: Folder, *, is_missing_broken: bool = False) -> Iterator[Check]:
    if nats.error:
        yield Check("NATS", Verdict.BROKEN, nats.error, nats.hint or "Start one with `oncewire up`, or set NATS_URL.")
        return
    yield _nats_version(nats)
    yield _max_payload(nats)
    if nats.jetstream_error:
        yield Check("JetStream", Verdict.BROKEN, f"cannot be used: {nats.jetstream_error}", JETSTREAM_REMEDY)
        return
    yield Check("JetStream", Verdict.OK, "on")
    yield _topology(nats, is_missing_broken=is_missing_broken)
    yield from _storage(nats, folder)
    yield _durability(nats)


def _topology(nats: Nats, *, is_missing_broken: bool) -> Check:
    """Declared against found. A service starts all the same, degraded: so it is a warning."""
    missing = [one for word in ("missing", "jetstream") for one in nats.topology.get(word, ())]
    told = [f"{len(items)} {trouble} ({_first(items)})" for trouble, items in nats.topology.items() if items]
    if told:
        verdict = Verdict.BROKEN if missing and is_missing_broken else Verdict.WARNING
        return Check("topology", verdict, ", ".join(told), "See `oncewire topology plan`, then `apply`.")
    return Check("topology", Verdict.OK, "streams and consumers are as declared")


def _first(items: Sequence[str], most: int = 3) -> str:
    return ", ".join(items[:most]) + (", …" if len(items) > most else "")


def _nats_version(nats: Nats) -> Check:
    text = f"{nats.version} at {nats.url}"
    version = _numbers(nats.version)
    if version is None:
        return Check("NATS", Verdict.WARNING, f"{text}: a version that cannot be judged", "Use a released nats-server.")
    mended = next((first for first in NATS_MENDED if first[:2] == version[:2]), NATS_MENDED[-1])
    if version < mended:
        wanted = ".".join(map(str, mended))
        return Check("NATS", Verdict.WARNING, f"{text} has known holes", f"Upgrade nats-server to {wanted} or later.")
    return Check("NATS", Verdict.OK, text)


def _numbers(version: str) -> tuple[int, ...] | None:
    found = re.match(r"v?(\d+)\.(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else None


def _max_payload(nats: Nats) -> Check:
    text = f"{human(nats.max_payload)} at most per message"
    remedy = "Raise max_payload in the config of nats-server; the embedded one has 8 MiB."
    if nats.max_payload < MAX_PAYLOAD_BYTES_MIN:
        return Check("payload", Verdict.BROKEN, text, remedy)
    if nats.max_payload < MAX_PAYLOAD_BYTES_LOW:
        return Check("payload", Verdict.WARNING, text, remedy)
    return Check("payload", Verdict.OK, text)


def _storage(nats: Nats, folder: Folder) -> Iterator[Check]:
    for answer in nats.jsz:
        used, config = answer.get("storage", 0), answer.get("config") or {}
        limit, store = config.get("max_storage", 0), str(config.get("store_dir", ""))
        if limit <= 0:
            continue
        text = f"{human(used)} of {human(limit)} used"
        if used >= limit:
            yield Check("storage", Verdict.BROKEN, f"full: {text}", "Free some streams, or raise max_file.")
        elif used >= STORAGE_SHARE_HIGH * limit:
            yield Check("storage", Verdict.WARNING, text, "Free some streams, or raise max_file, before it is full.")
        elif store.startswith(folder.path + "/") and limit - used > folder.free_bytes:
            yield Check(
                "storage",
                Verdict.WARNING,
                f"{text}, and the disk has only {human(folder.free_bytes)} left",
                "Free some room, then restart `oncewire up`: it sets the limit below the room there is.",
            )
        else:
            yield Check("storage", Verdict.OK, text)


def _durability(nats: Nats) -> Check:
    found = durability(nats.jsz, nats.server_id)
    if found.promise is Promise.POWER:
        return Check("durability", Verdict.OK, found.text)
    if found.promise is Promise.CRASH:
        return Check(
            "durability",
            Verdict.WARNING,
            found.text,
            "Set `sync_interval: always` in the jetstream block of the server.",
        )
    text = f"{found.text} ({nats.monitor_error})" if nats.monitor_error else found.text
    return Check(
        "durability",
        Verdict.WARNING,
        text,
        "Set NATS_SYSTEM_KEY to the key file of a user of the system account, or NATS_MONITOR_URL to the monitoring "
        "addresses of all servers, joined by commas (http://host:8222).",
    )


def _postgres(postgres: Postgres | None) -> Iterator[Check]:
    name = "PostgreSQL"
    if postgres is None:
        yield Check(name, Verdict.WARNING, "none", "Start one with `oncewire up`, or set ONCEWIRE_POSTGRES_URL.")
        return
    if postgres.error:
        yield Check(name, Verdict.BROKEN, postgres.error, postgres.hint)
        return
    text = f"{postgres.version} at {postgres.url}"
    if int(postgres.version.partition(".")[0]) < POSTGRES_MAJOR_MIN:
        yield Check(name, Verdict.WARNING, f"{text} is out of support", f"Upgrade to {POSTGRES_MAJOR_MIN} or later.")
    else:
        yield Check(name, Verdict.OK, text)
    yield _commits(postgres)


def _commits(postgres: Postgres) -> Check:
    off = [name for name in ("fsync", "full_page_writes") if postgres.options.get(name) != "on"]
    if off:
        return Check(
            "commits",
            Verdict.BROKEN,
            f"a power cut can damage the database ({' and '.join(off)} off)",
            f"Set {' and '.join(off)} to on in postgresql.conf.",
        )
    if postgres.options.get("synchronous_commit", "off") == "off":
        return Check(
            "commits",
            Verdict.WARNING,
            "a crash loses commits that were confirmed (synchronous_commit is off)",
            "Set synchronous_commit to on for this role.",
        )
    return Check("commits", Verdict.OK, "what is committed survives a power cut (fsync is on)")


def _java(java: tuple[int, str] | None) -> Check:
    remedy = (
        f"Only the Spark pipeline needs it: pip install 'oncewire[local-spark]', or Java {JAVA_MAJOR_MIN} or later."
    )
    if java is None:
        return Check("Java", Verdict.WARNING, "none", remedy)
    major, origin = java
    if major < JAVA_MAJOR_MIN:
        return Check("Java", Verdict.WARNING, f"{major} ({origin}) is too old for Spark", remedy)
    return Check("Java", Verdict.OK, f"{major} ({origin})")


def _pyspark(version: str | None) -> Check:
    if version is None:
        remedy = "Only the Spark pipeline needs it: pip install 'oncewire[local-spark]'."
        return Check("pyspark", Verdict.WARNING, "none", remedy)
    return Check("pyspark", Verdict.OK, version)


def human(size: int) -> str:
    """A size for people: 512 B, 8.0 MiB, 76 GiB."""
    value, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} {units[0]}" if value >= 10 or units[0] == "B" else f"{value:.1f} {units[0]}"
