"""`oncewire publish`: one message into a stream, confirmed."""

from __future__ import annotations

import sys
from typing import Any

import click

from oncewire._ground.errors import ContractViolation
from oncewire._ground.jetstream import Client, PubAck, options_from
from oncewire.cli import face

PAYLOAD_BYTES_MAX = 64 * 1024 * 1024


@click.command()
@click.argument("subject")
@click.argument("payload")
@click.option("--id", "msg_id", default="", help="A repeat under this id within the duplicate window is not stored.")
@click.option("--raw", is_flag=True, help="As it is: not checked, and under no id but --id.")
@click.option("--header", "headers", multiple=True, metavar="NAME=VALUE", help="A header of your own (repeatable).")
@face.setting_options("data", "nats_url")
@face.command
def publish(
    *, subject: str, payload: str, msg_id: str, raw: bool, headers: tuple[str, ...], as_json: bool, **flags: Any
) -> None:
    """Publish one message to a stream and print its sequence. PAYLOAD is the body, or - for standard input.

    On evt., cmd., sr. and the platform's subjects the body must be the envelope of that subject. It
    goes out under an id made of its idempotency key: a repeat within the duplicate window is not
    stored.

    \b
    Examples:
      oncewire publish cmd.default.demo.biller.charge '{"type": "charge", "payload": {"id": "o1", "cents": 4200}}'
      cat event.json | oncewire publish evt.default.demo.orders.placed - --id order-1
    """
    body = sys.stdin.buffer.read(PAYLOAD_BYTES_MAX) if payload == "-" else payload.encode()
    chosen = face.load_here(flags).settings
    stored: list[PubAck] = []

    async def send() -> None:
        async with Client(options_from(chosen, name="oncewire publish")) as client:
            named = _headers(headers) or None
            stored.append(await client.publish(subject, body, msg_id=msg_id, headers=named, raw=raw))

    face.run(send())
    (ack,) = stored
    if as_json:
        face.print_json({"stream": ack.stream, "sequence": ack.sequence, "duplicate": ack.is_duplicate})
    else:
        face.say(f"{ack.stream} {ack.sequence}{' (duplicate: already stored)' if ack.is_duplicate else ''}")


def _headers(given: tuple[str, ...]) -> dict[str, str]:
    headers = {}
    for one in given:
        name, equals, value = one.partition("=")
        if not equals:
            raise ContractViolation(f"{one!r} is not a header", hint="Write it as NAME=VALUE.")
        headers[name] = value
    return headers
