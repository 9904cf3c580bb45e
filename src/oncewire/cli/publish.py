"""`oncewire publish`: one message into a stream, confirmed."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import click

from oncewire._ground.errors import ContractViolation, Refused
from oncewire._ground.jetstream import Client, PubAck, options_from
from oncewire._ground.topology.units import parse_duration_ns
from oncewire.cli import face

PAYLOAD_BYTES_MAX = 64 * 1024 * 1024


@click.command()
@click.argument("subject")
@click.argument("payload")
@click.option(
    "--id", "msg_id", default="", help="Publishing again under this id within the duplicate window stores nothing."
)
@click.option(
    "--once",
    is_flag=True,
    help="Also look for the id in the stream first: a repeat after the window stores nothing either.",
)
@click.option("--id-age", metavar="1h", default="", help="With --once: the id is at most this old; look so far back.")
@click.option("--raw", is_flag=True, help="As it is: not checked, and under no id but --id.")
@click.option("--header", "headers", multiple=True, metavar="NAME=VALUE", help="A header of your own (repeatable).")
@face.setting_options("data", "nats_url")
@face.command
def publish(
    *,
    subject: str,
    payload: str,
    msg_id: str,
    once: bool,
    id_age: str,
    raw: bool,
    headers: tuple[str, ...],
    as_json: bool,
    **flags: Any,
) -> None:
    """Publish one message to a stream and print its sequence. PAYLOAD is the body, or - for standard input.

    On evt., cmd., sr. and the platform's subjects the body must be the envelope of that subject. It
    goes out under an id made of its idempotency key: a repeat within the duplicate window is not
    stored.

    \b
    Examples:
      oncewire publish cmd.default.demo.biller.charge '{"type": "charge", "payload": {"id": "o1", "cents": 4200}}'
      cat event.json | oncewire publish evt.default.demo.orders.placed - --id order-1 --once
    \b
    --once costs about eight small requests and a scan of the headers on SUBJECT, which grows with its messages. It
    refuses, and stores nothing, where a look cannot know: on work queues, with limits per subject or times to live,
    and once the stream has removed messages. --id-age says how old the id can be, and shortens the scan.
    """
    reach = _reach(once, id_age)
    body = sys.stdin.buffer.read(PAYLOAD_BYTES_MAX) if payload == "-" else payload.encode()
    chosen = face.load_here(flags).settings
    stored: list[PubAck] = []

    async def send() -> None:
        async with Client(options_from(chosen, name="oncewire publish")) as client:
            named = _headers(headers) or None
            stored.append(await client.publish(subject, body, msg_id=msg_id, headers=named, once=reach, raw=raw))

    face.run(send())
    (ack,) = stored
    if as_json:
        face.print_json({"stream": ack.stream, "sequence": ack.sequence, "duplicate": ack.is_duplicate})
    else:
        face.say(f"{ack.stream} {ack.sequence}{' (duplicate: already stored)' if ack.is_duplicate else ''}")


def _reach(once: bool, id_age: str) -> bool | timedelta:
    if not id_age:
        return once
    if not once:
        raise Refused("--id-age says how far back --once looks", hint="Add --once.")
    try:
        return timedelta(microseconds=parse_duration_ns(id_age) // 1_000)
    except ValueError as wrong:
        raise Refused(f"--id-age {wrong}", hint="Write 1h, 30m or 7d.") from None


def _headers(given: tuple[str, ...]) -> dict[str, str]:
    headers = {}
    for one in given:
        name, equals, value = one.partition("=")
        if not equals:
            raise ContractViolation(f"{one!r} is not a header", hint="Write it as NAME=VALUE.")
        headers[name] = value
    return headers
