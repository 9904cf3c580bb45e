"""`oncewire outbox`: what waits in PostgreSQL to be published, what is stuck, and what to do about it."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from uuid import UUID

import click
import msgspec

from oncewire._ground.database.postgres import connected
from oncewire._ground.errors import Refused
from oncewire._ground.settings import Settings
from oncewire.cli import face
from oncewire.cli.migrate import require_postgres
from oncewire.outbox import inspect
from oncewire.outbox.inspect import Status
from oncewire.outbox.purge import purge as purge_rows

T = TypeVar("T")
Run = Callable[..., None]


@click.group()
def outbox() -> None:
    """What waits in PostgreSQL to be published: status, retry, void, purge.

    \b
    Examples:
      oncewire outbox status
      oncewire outbox retry 7c0f3a52-6a53-4b0e-8a55-0d3f1f1e7f10
      oncewire outbox void 7c0f3a52-6a53-4b0e-8a55-0d3f1f1e7f10 42 --reason "larger than the server takes"
    """


def _command(run: Run) -> Run:
    """The options of every command here."""
    run = click.option("--schema", default="", help="Schema of the tables (else the search path's first).")(
        face.command(run)
    )
    return face.setting_options("data", "postgres_url")(run)


def _ask(flags: dict[str, Any], work: Callable[[Any], Awaitable[T]]) -> T:
    """Run `work` on a connection of its own."""
    url = require_postgres(face.load_here(flags).settings)
    answers: list[T] = []

    async def ask() -> None:
        async with connected(url, cache_statements=False) as connection:
            answers.append(await work(connection))

    face.run(ask())
    return answers[0]


@outbox.command()
@_command
def status(*, schema: str, as_json: bool, **flags: Any) -> None:
    """How many messages wait, how old the oldest is, and what is stuck and why.

    \b
    Example:
      oncewire outbox status --json
    \b
    Exit code 1 when something is stuck.
    """
    found = _ask(flags, lambda connection: inspect.status(connection, schema=schema))
    if as_json:
        face.print_json(msgspec.to_builtins(found))
    else:
        _print_status(found)
    sys.exit(0 if found.is_well else face.EXIT_NOT_WELL)


def _print_status(found: Status) -> None:
    for one in found.counts:
        age = f", the oldest for {one.oldest_s:.0f} s" if one.pending + one.failed else ""
        face.say(f"{one.outbox:<14} {one.pending} pending, {one.failed} failed{age}")
    for stuck in found.conversations:
        behind = f"{stuck.waiting} waiting, {stuck.attempts} attempts"
        face.say(f"conversation {stuck.conversation_id} stops at {stuck.sequence} ({behind}): {stuck.error}")
    for message in found.messages:
        face.say(f"message {message.id} to {message.subject} ({message.attempts} attempts): {message.error}")
    if not found.is_well:
        face.say("`oncewire outbox retry` tries again now; `oncewire outbox void` gives up on one.")


@outbox.command()
@click.argument("conversation", required=False, type=click.UUID)
@click.option("--message", type=int, default=0, help="Id of a message of the general outbox.")
@click.option("--all", "is_all", is_flag=True, help="Everything that waits for another attempt.")
@_command
def retry(*, conversation: UUID | None, message: int, is_all: bool, schema: str, as_json: bool, **flags: Any) -> None:
    """Try again now what waits for its next attempt.

    \b
    Examples:
      oncewire outbox retry --all
      oncewire outbox retry --message 17
    """
    if bool(conversation) + bool(message) + is_all != 1:
        raise Refused("name one conversation, one --message, or --all", hint="See `oncewire outbox status`.")
    done = _ask(
        flags,
        lambda connection: inspect.retry(
            connection, conversation_id=str(conversation or ""), message_id=message, schema=schema
        ),
    )
    _report(as_json, {"retried": done}, f"{done} to be tried again now")


@outbox.command()
@click.argument("conversation", required=False, type=click.UUID)
@click.argument("sequence", required=False, type=int)
@click.option("--message", type=int, default=0, help="Id of a failed message of the general outbox.")
@click.option("--reason", default="", help="Stands in the tombstone, for those who read the conversation.")
@_command
def void(
    *,
    conversation: UUID | None,
    sequence: int | None,
    message: int,
    reason: str,
    schema: str,
    as_json: bool,
    **flags: Any,
) -> None:
    """Give up on a message, so that those behind it can go on.

    In a conversation an empty message with metadata {"voided": true, "reason": …} is published under its sequence, so
    that readers see no gap; the message itself stays in the database.

    \b
    Examples:
      oncewire outbox void 7c0f3a52-6a53-4b0e-8a55-0d3f1f1e7f10 42 --reason "larger than the server takes"
      oncewire outbox void --message 17
    """
    if message and not conversation:
        _ask(flags, lambda connection: inspect.void_message(connection, message, schema=schema))
        _report(as_json, {"voided": message}, f"message {message} will not be published")
        return
    if conversation is None or sequence is None or message or not reason:
        raise Refused("name a conversation, a sequence and a --reason, or a --message", hint="See --help.")
    where = str(conversation)
    _ask(flags, lambda connection: inspect.void(connection, where, sequence, reason, schema=schema))
    _report(
        as_json,
        {"conversation": where, "voided": sequence},
        f"{where}: a tombstone goes out in the place of {sequence}",
    )


@outbox.command()
@click.option("--older-than-s", type=int, default=Settings.outbox_keep_s, show_default=True, help="Age in seconds.")
@_command
def purge(*, older_than_s: int, schema: str, as_json: bool, **flags: Any) -> None:
    """Delete outbox rows that were dispatched long ago. Relays do this by themselves; messages stay.

    \b
    Example:
      oncewire outbox purge --older-than-s 3600
    """
    gone = _ask(flags, lambda connection: purge_rows(connection, older_than_s, schema=schema))
    _report(as_json, gone, ", ".join(f"{count} rows of {table}" for table, count in gone.items()) + " deleted")


def _report(as_json: bool, facts: dict[str, Any], text: str) -> None:
    face.print_json(facts) if as_json else face.say(text)
