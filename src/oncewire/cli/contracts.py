"""`oncewire contracts`: the JSON Schemas of what flows, and whether a message keeps to them."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import msgspec

from oncewire._ground.contracts import evolution, schemas
from oncewire._ground.contracts.codec import BODY_BYTES_MAX
from oncewire._ground.errors import Conflict, ContractViolation, NotFound, Refused, TooLarge
from oncewire.cli import face


@click.group()
def contracts() -> None:
    """What the messages are: export their JSON Schemas, check a message against them."""


@contracts.command()
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Folder to write the schemas to.")
@face.command
def export(*, out: Path | None, as_json: bool) -> None:
    """Write the JSON Schema of every contract, or print them without --out.

    A schema that is already there is only replaced by a compatible one: a breaking change needs a new version.

    \b
    Examples:
      oncewire contracts export --out docs/schemas
      oncewire contracts export --json | jq '."message-envelope-1.0.schema.json".title'
    """
    if out is None:
        face.print_json({one.file_name: schemas.schema(one) for one in schemas.PUBLISHED})
        return
    written = [_write(one, out) for one in schemas.PUBLISHED]
    if as_json:
        face.print_json({"written": written})
        return
    for path in written:
        face.say(str(path))


def _write(published: schemas.Published, out: Path) -> str:
    path = out / published.file_name
    try:
        out.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _refuse_breaking(path, schemas.schema(published))
        path.write_text(schemas.text(published), encoding="utf-8")
    except OSError as error:
        raise Refused(f"{path} cannot be written: {error.strerror}", hint="Check --out.") from None
    return str(path)


def _refuse_breaking(path: Path, new: evolution.Schema) -> None:
    try:
        old = msgspec.json.decode(path.read_bytes(), type=dict)
    except msgspec.DecodeError:
        raise Refused(f"{path} is not a JSON Schema", hint="Remove it, or choose another --out.") from None
    broken = evolution.breaking(old, new)
    if broken:
        first = broken[0]
        raise Conflict(
            f"{path.name}: {first.path or 'the contract'} {first.what}: a breaking change under the same version",
            hint="Raise the version of the contract; if this one was never released, remove the file.",
        )


@contracts.command()
@click.argument("file", type=click.Path(path_type=Path, allow_dash=True, dir_okay=False))
@click.option(
    "--kind",
    type=click.Choice([one.kind for one in schemas.PUBLISHED]),
    required=True,
    help="Which contract the message must keep.",
)
@face.command
def check(*, file: Path, kind: str, as_json: bool) -> None:
    """Check one message; name the field that is wrong. Exit code 1 when it breaks its contract.

    \b
    Examples:
      oncewire contracts check message.json --kind message
      nats stream get sr-events 17 --json | jq -r .data | base64 -d | oncewire contracts check - --kind message
    """
    published = next(one for one in schemas.PUBLISHED if one.kind == kind)
    try:
        published.check(_read(file))
    except (ContractViolation, TooLarge) as error:
        _show_broken(error, as_json)
        sys.exit(face.EXIT_NOT_WELL)
    if as_json:
        face.print_json({"ok": True, "contract": published.name, "version": published.version})
    else:
        face.say(f"ok: {published.name} {published.version}")


def _read(file: Path) -> bytes:
    try:
        if str(file) == "-":
            return sys.stdin.buffer.read(BODY_BYTES_MAX + 1)
        with file.open("rb") as opened:
            return opened.read(BODY_BYTES_MAX + 1)
    except OSError as error:
        raise NotFound(f"{file} cannot be read: {error.strerror}", hint="Give a file, or - for stdin.") from None


def _show_broken(error: ContractViolation | TooLarge, as_json: bool) -> None:
    if as_json:
        face.print_json({"ok": False, "error": error.to_dict()})
        return
    face.say(error.message, sign=click.style("broken: ", fg="red", bold=True))
    if error.hint:
        face.say(f"  {error.hint}")
