"""`oncewire topology`: what is declared, what the server has, and how the one becomes the other."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click
import msgspec

from oncewire._ground import topology as declared
from oncewire._ground.errors import InvalidSetting, Refused
from oncewire._ground.jetstream import Client, options_from
from oncewire._ground.settings import Settings
from oncewire._ground.topology import Plan, Step, Topology, permissions, text
from oncewire._ground.topology.export import FORMATS, export_as
from oncewire._ground.topology.findings import errors
from oncewire._ground.topology.text import Line
from oncewire.cli import face
from oncewire.cli.access import make_keys

Run = Callable[..., None]
_FOLDER = click.Path(path_type=Path, file_okay=False)


@click.group()
def topology() -> None:
    """Streams and consumers as declared: lint, plan, apply, check, export.

    The catalogs that ship with Oncewire are declared already; --file adds streams, buckets, consumers and services of
    your own, or overrides single keys of those that are there.

    \b
    Examples:
      oncewire topology plan
      oncewire topology apply --file orders.toml
      oncewire topology check --env prod --json
    """


def _declaring(run: Run) -> Run:
    """The options that say what is declared."""
    where = click.Path(path_type=Path)
    run = click.option("--file", "files", type=where, multiple=True, help="A TOML file of your own (repeatable).")(run)
    return face.setting_options("data", "nats_url", "topology_files")(run)


def _scoped(run: Run) -> Run:
    run = click.option("--service", help="Only this service's consumers and streams.")(run)
    return face.setting_options("env")(run)


@topology.command()
@_declaring
@face.command
def lint(*, files: tuple[Path, ...], as_json: bool, **flags: Any) -> None:
    """Prove the declaration, without a server: each mistake with its place and what to do.

    Exit code 0 with warnings, 1 with errors.

    \b
    Examples:
      oncewire topology lint
      oncewire topology lint --file streams.toml --json
    """
    found = declared.examine(files, face.load(flags).settings)
    if as_json:
        face.print_json(msgspec.to_builtins(found.findings))
    else:
        _print(text.finding_lines(found.findings))
        face.say(text.findings_summary(found))
    sys.exit(face.EXIT_NOT_WELL if errors(found.findings) else 0)


@topology.command()
@_declaring
@_scoped
@face.command
def plan(*, files: tuple[Path, ...], service: str | None, as_json: bool, **flags: Any) -> None:
    """Show what apply would do, and what each change would cost. Changes nothing.

    \b
      +  create         ~  change in place
      !  only with the flag that is shown: messages or a position would be lost
      ?  there and not declared: never touched
    \b
    Examples:
      oncewire topology plan
      oncewire topology plan --service billing-worker --env prod
    """
    settings = face.load_here(flags).settings
    _show(_compare(settings, _load(files, settings), service), as_json)


@topology.command()
@_declaring
@_scoped
@face.command
def check(*, files: tuple[Path, ...], service: str | None, as_json: bool, **flags: Any) -> None:
    """Like plan, for scripts: exit code 1 when the server is not as declared.

    \b
    Example:
      oncewire topology check --env prod --json
    """
    settings = face.load_here(flags).settings
    found = _compare(settings, _load(files, settings), service)
    _show(found, as_json)
    sys.exit(face.EXIT_NOT_WELL if found.steps else 0)


@topology.command()
@_declaring
@_scoped
@click.option("--recreate", multiple=True, metavar="ITEM", help="Delete and make anew, such as stream:BILLING.")
@click.option("--accept", multiple=True, metavar="ITEM", help="Change in place although it loses what plan says.")
@click.option("--yes", is_flag=True, help="Do not ask before messages are deleted.")
@face.command
def apply(
    *,
    files: tuple[Path, ...],
    service: str | None,
    recreate: tuple[str, ...],
    accept: tuple[str, ...],
    yes: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """Make the server as declared. Safe to repeat, and from many places at once.

    What would lose messages or a durable's position is done only when --recreate or --accept names it; without that
    it is left as it is, and the exit code is 1.

    \b
    Examples:
      oncewire topology apply
      oncewire topology apply --service billing-worker --env prod
      oncewire topology apply --recreate consumer:BILLING/billing_worker_usage_metered
    """
    settings = face.load_here(flags).settings
    wanted = _load(files, settings)
    named = frozenset(recreate), frozenset(accept)
    _check_items(wanted, *named)
    if not yes:
        _confirm(_compare(settings, wanted, service), named[0], is_mute=as_json)
    left, done = _apply(settings, wanted, service, *named, as_json)
    if as_json:
        face.print_json({"done": [_facts(step) for step in done], **_plan_facts(left)})
    else:
        _print(text.plan_lines(left))
        face.say(text.outcome(left, done))
    sys.exit(face.EXIT_NOT_WELL if left.steps else 0)


@topology.command()
@_declaring
@click.option("--format", "form", type=click.Choice(FORMATS), default=FORMATS[0], show_default=True)
@click.option("--nats-permissions", is_flag=True, help="Write a NATS user per service instead.")
@click.option("--keys", type=_FOLDER, help="With --nats-permissions: folder of the users' keys; makes what is missing.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="File to write (else stdout).")
@face.command
def export(
    *,
    files: tuple[Path, ...],
    form: str,
    nats_permissions: bool,
    keys: Path | None,
    out: Path | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Write what is declared: as an AsyncAPI 3 document, as JSON, as one TOML file, or as users for nats-server.

    With --nats-permissions --keys DIR each user has a key: its seed stays in DIR (DIR/<user>.nk, for NATS_NKEY), its
    public half stands in what is written. Without --keys nats-server finds the public keys in its environment.

    \b
    Examples:
      oncewire topology export --out asyncapi.json
      oncewire topology export --format toml
      oncewire topology export --nats-permissions --keys ./keys --out oncewire-users.conf
    """
    settings = face.load(flags).settings
    wanted = declared.load(files, settings)
    if keys is not None and not nats_permissions:
        raise InvalidSetting("--keys goes with --nats-permissions", hint="Other exports have no users.")
    if nats_permissions:
        written = _permissions(permissions.users(wanted, settings), keys, as_json)
    else:
        written = export_as("json" if as_json else form, wanted)
    if out is None:
        click.echo(written, nl=False)
        return
    try:
        out.write_text(written, "utf-8")
    except OSError as error:
        raise InvalidSetting(f"{out} cannot be written: {error.strerror}", hint="Check --out.") from None


def _permissions(users: list[permissions.User], keys: Path | None, as_json: bool) -> str:
    public = make_keys(keys, users) if keys is not None else {}
    nkey = public.__getitem__ if public else permissions.variable
    if as_json:
        shown = [{**msgspec.to_builtins(user), "nkey": nkey(user.name)} for user in users]
        return json.dumps(shown, indent=2, ensure_ascii=False) + "\n"
    return permissions.document(users, nkey)


def _load(files: tuple[Path, ...], settings: Settings) -> Topology:
    return declared.load(files, settings)


def _compare(settings: Settings, wanted: Topology, service: str | None) -> Plan:
    found: list[Plan] = []

    async def look() -> None:
        async with Client(options_from(settings, name="oncewire topology")) as client:
            found.append(await declared.compare(client, wanted, service=service))

    face.run(look())
    return found[0]


def _apply(
    settings: Settings,
    wanted: Topology,
    service: str | None,
    recreate: frozenset[str],
    accept: frozenset[str],
    is_mute: bool,
) -> tuple[Plan, list[Step]]:
    left: list[Plan] = []
    done: list[Step] = []

    def on_step(step: Step) -> None:
        done.append(step)
        if not is_mute:
            _print([text.done_line(step)])

    async def act() -> None:
        async with Client(options_from(settings, name="oncewire topology")) as client:
            left.append(
                await declared.apply(client, wanted, service=service, recreate=recreate, accept=accept, on_step=on_step)
            )

    face.run(act())
    return left[0], done


def _check_items(wanted: Topology, *named: frozenset[str]) -> None:
    """A flag for something that nobody declared is a typo."""
    items = {stream.item for stream in wanted.streams} | {consumer.item for consumer in wanted.consumers}
    for item in sorted(frozenset().union(*named) - items):
        raise InvalidSetting(
            f"nothing that is called {item!r} is declared",
            hint="Write stream:NAME or consumer:STREAM/NAME, as plan does.",
        )


def _confirm(found: Plan, recreate: frozenset[str], *, is_mute: bool) -> None:
    """Ask before messages are deleted."""
    deleting = [step for step in found.steps if step.item in recreate and step.flag.startswith("--recreate stream:")]
    for step in deleting:
        if is_mute or not sys.stdin.isatty():
            raise Refused(f"{step.item}: recreating it {step.cost}", hint="Add --yes if that is what you want.")
        click.confirm(f"Recreating {step.item} {step.cost}. Go on?", abort=True)


def _show(found: Plan, as_json: bool) -> None:
    if as_json:
        face.print_json(_plan_facts(found))
    else:
        _print(text.plan_lines(found))
        face.say(text.summary(found))


def _plan_facts(found: Plan) -> dict[str, Any]:
    return {
        "steps": [_facts(step) for step in found.steps],
        "same": list(found.same),
        "undeclared": list(found.extras),
        "notes": list(found.notes),
    }


def _facts(step: Step) -> dict[str, Any]:
    changes = [{"key": one.key, "found": one.found, "declared": one.declared, "cost": one.cost} for one in step.changes]
    return {"item": step.item, "act": step.act, "changes": changes, "needs": step.flag, "cost": step.cost}


def _print(lines: Iterable[Line]) -> None:
    """Aligned columns; on a terminal the details of what is new end in `…` instead of wrapping."""
    shown = list(lines)
    sign_width = max((len(line.sign) for line in shown), default=0)
    name_width = max((len(line.name) for line in shown), default=0)
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    for line in shown:
        padded = f"{line.sign:<{sign_width}}"
        sign = click.style(padded, fg=line.color, bold=True) if line.sign else padded
        rest = f"{line.name:<{name_width}}  {line.text}" if name_width else line.text
        room = columns - sign_width - 2
        is_clipped = line.sign == "+" and 0 < room < len(rest)
        face.say(f"{rest[: room - 1]}…" if is_clipped else rest, sign=f"{sign}  ")
