"""What the servers say about themselves, over the system account (`$SYS.REQ.SERVER.PING.…`).

Each server of a cluster answers the one question. It takes a user of the system account, so nothing of it is open to
other programs, as a monitoring port is. The connection lives as long as the question: it is asked rarely.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from typing import Any, Final

from oncewire._ground.errors import OncewireError, ProtocolViolation, Unavailable
from oncewire._ground.jetstream import protocol
from oncewire._ground.jetstream.connection import Connection
from oncewire._ground.jetstream.nkeys import holds_jwt
from oncewire._ground.jetstream.options import Options, without_credentials
from oncewire._ground.jetstream.protocol import Message
from oncewire._ground.users import MONITOR, inbox_prefix

ANSWER_S_MAX: Final = 2.0
"""How long the answers of a cluster are waited for; a server that stands alone is not waited for."""


async def jsz(options: Options, key: str) -> list[dict[str, Any]]:
    """What each server says about JetStream, its configuration included. `key` is a file with a seed, or with a JWT and
    its seed, of a user of the system account."""
    answers = await _ask(options, key, "JSZ", {"config": True})
    if not answers:
        raise Unavailable(
            "no server answered on $SYS.REQ.SERVER.PING.JSZ", hint="Is this a user of the system account?"
        )
    return [answer["data"] for answer in answers]


async def healthy_version(options: Options, key: str) -> str:
    """The version of a server that is up, with all of its streams recovered; '' while it is not."""
    try:
        answers = await _ask(options, key, "HEALTHZ", {})
    except Unavailable:
        return ""
    is_healthy = answers and all(answer["data"].get("status") == "ok" for answer in answers)
    return str(answers[0]["server"]["ver"]) if is_healthy else ""


async def _ask(options: Options, key: str, what: str, request: dict[str, Any]) -> list[dict[str, Any]]:
    connection = Connection(_as_system(options, key))
    answers: list[dict[str, Any]] = []
    is_whole = asyncio.Event()
    problems: list[OncewireError] = []

    def take(_: int, message: Message) -> None:
        if message.header_raw:  # nobody listens: this is not the system account
            is_whole.set()
            return
        try:
            answers.append(_read(message.payload))
        except ProtocolViolation as wrong:
            problems.append(wrong)
        if problems or len(answers) >= max(_cluster_size(answer) for answer in answers):
            is_whole.set()

    await connection.open()
    try:
        number = connection.take_numbers()
        connection.replies[number] = take
        subject = protocol.encode_subject(f"$SYS.REQ.SERVER.PING.{what}")
        connection.write(protocol.encode_pub(subject, connection.reply_to(number), json.dumps(request).encode()))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_S_MAX):
                await is_whole.wait()
        if problems:
            raise problems[0]
        return answers
    finally:
        await connection.close()


def _as_system(options: Options, key: str) -> Options:
    """The same servers, by the same TLS, as another user."""
    is_jwt = holds_jwt(key)
    return dataclasses.replace(
        options,
        servers=tuple(without_credentials(server) for server in options.servers),
        name=f"{options.name} facts",
        user="",
        password="",
        token="",
        creds=key if is_jwt else "",
        nkey="" if is_jwt else key,
        inbox_prefix=inbox_prefix(MONITOR),
        on_change=None,
    )


def _read(payload: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(payload)
        is_known = isinstance(answer["data"], dict) and isinstance(answer["server"]["ver"], str)
    except (ValueError, RecursionError, KeyError, TypeError):
        is_known = False
    if not is_known:
        raise ProtocolViolation("a server's answer on $SYS.REQ.SERVER.PING is not what a nats-server says")
    return dict(answer)


def _cluster_size(answer: dict[str, Any]) -> int:
    size = (answer["data"].get("meta_cluster") or {}).get("cluster_size", 1)
    return size if isinstance(size, int) else 1
