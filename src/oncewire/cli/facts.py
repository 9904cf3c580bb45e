"""Asks servers, disk and machine what `doctor` and `up` need to know. Judges nothing: that is `_ground.doctor`."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from importlib import metadata
from typing import Any

from oncewire._ground import doctor, extras, java, monitor, native, topology
from oncewire._ground.database.postgres import unreadable
from oncewire._ground.errors import AuthenticationFailed, NotConnected, OncewireError
from oncewire._ground.jetstream import Client, system
from oncewire._ground.jetstream.losses import losses
from oncewire._ground.jetstream.options import Options, options_from
from oncewire._ground.settings import Settings, mask_url
from oncewire.embedded.folder import ROOM_BYTES_MIN, DataFolder

CONNECT_S_MAX = 5.0
AWAY_HINT = "It is tried all the time. Start that server, or check NATS_URL."


async def gather(settings: Settings) -> doctor.Facts:
    """Everything, side by side; what cannot be reached is a fact too."""
    finding_java = asyncio.to_thread(java.find)
    nats, postgres, found_java = await asyncio.gather(
        nats_facts(settings), postgres_facts(settings.postgres_url), finding_java
    )
    return doctor.Facts(
        python=f"{platform.python_version()} on {platform.system()} {platform.machine()}, {_loops()}",
        folder=folder_facts(DataFolder.at(settings.data)),
        nats=nats,
        postgres=postgres,
        java=(found_java.major, found_java.origin) if found_java else None,
        pyspark=_version_of("pyspark"),
    )


def _version_of(package: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def folder_facts(folder: DataFolder) -> doctor.Folder:
    """Looks without making anything."""
    problem = hint = ""
    try:
        folder.check_usable()
    except OncewireError as error:
        problem, hint = error.message, error.hint
    room = folder.room()
    return doctor.Folder(
        path=str(folder.path),
        problem=problem,
        hint=hint,
        exists=folder.path.exists(),
        up_pid=folder.holder(),
        free_bytes=room.free_bytes,
        total_bytes=room.total_bytes,
        start_bytes_min=ROOM_BYTES_MIN,
    )


def _loops() -> str:
    """How the loops over every message run: they need a compiler when the package is built."""
    return "loops compiled" if native.messages is not None else "loops not compiled (slower)"


async def nats_facts(settings: Settings) -> doctor.Nats:
    try:
        async with Client(options_from(settings, name="oncewire doctor")) as client:
            return await nats_facts_by(client, settings)
    except OncewireError as error:
        return doctor.Nats(shown(settings), error=error.message, hint=error.hint)


Part = Callable[[topology.Topology], topology.Topology]
"""What somebody uses of all that is declared."""


async def nats_facts_by(client: Client, settings: Settings, part: Part = lambda whole: whole) -> doctor.Nats:
    """By a client that is there already."""
    url = shown(settings)
    if not client.connection.is_ready:
        return doctor.Nats(url, error=f"NATS is away: the connection to {url} is {client.state}", hint=AWAY_HINT)
    server, jetstream_error = client.server, await _jetstream_error(client)
    whole = _declared(settings)
    found = topology.Survey([]) if jetstream_error else await topology.survey(client, whole, part(whole))
    answers, monitor_error = await ask_servers(settings, client.connection.options)
    return doctor.Nats(
        url,
        version=server.version,
        server_id=server.server_id,
        max_payload=server.max_payload,
        jetstream_error=jetstream_error,
        jsz=answers,
        monitor_error=monitor_error,
        topology=_troubles(found.problems),
        held={name: _held(one.messages, one.bytes, one.config) for name, one in found.streams.items()},
    )


def shown(settings: Settings) -> str:
    return mask_url(settings.nats_url)


async def open_losses(client: Client) -> dict[str, list[str]]:
    """Losses that nobody has acknowledged, in sentences, by stream."""
    found: dict[str, list[str]] = {}
    for one in await losses(client):
        if not one.is_acknowledged:
            found.setdefault(one.stream, []).append(one.sentence)
    return found


@lru_cache(maxsize=1)
def _declared(settings: Settings) -> topology.Topology:
    return topology.load(settings=settings)


def _held(messages: int, size: int, config: Mapping[str, Any]) -> doctor.Held:
    return doctor.Held(messages, size, max(0, config.get("max_bytes") or 0))


def _troubles(problems: Sequence[topology.Problem]) -> dict[str, list[str]]:
    """What is not as declared, by kind of trouble."""
    found: dict[str, list[str]] = {}
    for problem in problems:
        found.setdefault(problem.trouble.value, []).append(problem.item)
    return found


async def _jetstream_error(client: Client) -> str:
    """Why this account cannot use JetStream, '' when it can."""
    if not client.server.jetstream:
        return "the server runs without it"
    try:
        await client.api("INFO", None)
    except OncewireError as error:
        return error.message
    return ""


async def ask_servers(settings: Settings, options: Options) -> tuple[list[dict[str, Any]], str]:
    """What all servers say about JetStream, and why nothing is known. The system account is asked where there is a key
    for it, else the monitoring ports."""
    if not settings.nats_system_key:
        return await _ask_monitors(settings.nats_monitor_url, options.trust)
    try:
        return await system.jsz(options, settings.nats_system_key), ""
    except OncewireError as error:
        return [], f"the system account: {error.message}"


async def _ask_monitors(urls: str, trust: monitor.Trust) -> tuple[list[dict[str, Any]], str]:
    """The `/jsz` of each address; with one that fails, none: a part of a cluster proves nothing. It is the same servers
    that the client trusts."""
    addresses = [one.strip() for one in urls.split(",") if one.strip()]
    try:
        return list(await asyncio.gather(*(monitor.ask_json(one, "/jsz", trust) for one in addresses))), ""
    except OncewireError as error:
        return [], error.message


async def postgres_facts(url: str) -> doctor.Postgres | None:
    if not url:
        return None
    try:
        return await _ask_postgres(url, mask_url(url))
    except OncewireError as error:
        return doctor.Postgres(mask_url(url), error=error.message, hint=error.hint)


async def _ask_postgres(url: str, shown_url: str) -> doctor.Postgres:
    asyncpg = extras.asyncpg()
    try:
        connection = await asyncpg.connect(url, timeout=CONNECT_S_MAX)
        try:
            names = ("fsync", "full_page_writes", "synchronous_commit")
            options = {name: await connection.fetchval(f"SHOW {name}") for name in names}
            version = str(await connection.fetchval("SHOW server_version")).split()[0]
        finally:
            await connection.close()
    except asyncpg.InvalidAuthorizationSpecificationError as error:
        raise AuthenticationFailed(f"{shown_url} refuses the login: {error}", hint="Check user and password.") from None
    except asyncpg.PostgresError as error:
        raise NotConnected(f"{shown_url} cannot be used: {error}", hint="Mend what the server says.") from None
    except (OSError, TimeoutError, asyncpg.InterfaceError) as error:
        raise NotConnected(
            f"{shown_url} cannot be reached: {error or type(error).__name__}",
            hint="Start that server, or check ONCEWIRE_POSTGRES_URL.",
        ) from None
    except ValueError:
        raise unreadable() from None
    return doctor.Postgres(shown_url, version=version, options=options)
