"""What all commands share: the settings, `--json`, and how an error looks to a person and to a machine."""

from __future__ import annotations

import asyncio
import functools
import importlib
import json
import logging
import sys
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from oncewire._ground import logs, settings
from oncewire._ground.errors import Corrupt, OncewireError, Refused, Unavailable
from oncewire._ground.users import MONITOR, identity, key_path
from oncewire.cli.rights import right_of

if TYPE_CHECKING:
    from oncewire.embedded.folder import Server

log = logging.getLogger("oncewire.cli")

EXIT_NOT_WELL = 1
EXIT_REFUSED = 2
EXIT_UNAVAILABLE = 3
EXIT_CORRUPT = 4
EXIT_FAILED = 5
EXIT_INTERRUPTED = 130

Run = Callable[..., None]


def command(run: Run) -> Run:
    """Give a command `--json` and turn our errors into one sentence, a hint and an exit code.

    The command gets `as_json`. What it prints goes to stdout; errors go to stderr, as JSON when `--json` is given.
    """

    @click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")
    @functools.wraps(run)
    def wrapped(*args: Any, as_json: bool, **kwargs: Any) -> None:
        try:
            run(*args, as_json=as_json, **kwargs)
        except OncewireError as error:
            fail(error, as_json)
        except KeyboardInterrupt:
            sys.exit(EXIT_INTERRUPTED)
        except BrokenPipeError:  # `oncewire … | head`: the reader has seen enough
            sys.stderr.close()
            sys.exit(0)

    return wrapped


def setting_options(*names: str) -> Callable[[Run], Run]:
    """Flags for rows of the settings table, with the table's own help; collect them with `load`."""
    rows = {row.name: row for row in settings.table()}

    def add(run: Run) -> Run:
        for name in reversed(names):
            row = rows[name]
            shown = f"{row.help} [{', '.join(row.variables)}; default {row.default or 'not set'}]"
            run = click.option(row.flag, name, default=None, help=shown)(run)
        return run

    return add


def load(flags: dict[str, Any]) -> settings.Resolved:
    """The settings in force for the command that is running."""
    context = click.get_current_context(silent=True)
    return settings.load(flags, context.find_root().obj if context else None)


def load_here(flags: dict[str, Any]) -> settings.Resolved:
    """The settings for a command that talks to servers: where nobody chose one, those of the `up` that runs here, and
    of its NATS as the user that the command's right names."""
    from oncewire.embedded.folder import DataFolder  # only commands that talk to servers pay for it

    resolved = load(flags)
    folder = DataFolder.at(resolved.settings.data)
    running = folder.read() if folder.holder() is not None else None
    user = right_of(click.get_current_context()).nats
    return with_servers(resolved, running.servers if running else {}, f"up in {resolved.settings.data}", user)


def load_service(flags: dict[str, Any]) -> settings.Settings:
    """The same for a command that runs a service: its process, and so its log, is ours."""
    chosen = load_here(flags).settings
    logs.set_up(chosen.log_format, chosen.log_level)
    return chosen


def without_secrets(environ: Mapping[str, str], *but: str) -> dict[str, str]:
    """An environment for a process that needs none of our secrets, but those of these settings."""
    hidden = {name for row in settings.table() if row.is_secret and row.name not in but for name in row.variables}
    return {name: value for name, value in environ.items() if name not in hidden}


def with_servers(
    resolved: settings.Resolved, servers: Mapping[str, Server], origin: str, user: str
) -> settings.Resolved:
    """The settings with the addresses of the servers that `up` started itself, where nobody chose others; without a
    user, also without a key for its NATS."""
    found: dict[str, str] = {}
    nats, postgres = servers.get("nats"), servers.get("postgres")
    if nats and nats.mark and not resolved.is_set("nats_url"):
        found |= {"nats_url": nats.url, "nats_monitor_url": nats.monitor_url}
        if nats.keys and user and not resolved.is_set("nats_system_key"):
            found["nats_system_key"] = str(key_path(Path(nats.keys), MONITOR))
        if nats.keys and user and not any(resolved.is_set(f"nats_{way}") for way in ("user", "token", "creds", "nkey")):
            found |= identity(Path(nats.keys), user)
    if postgres and postgres.mark and not resolved.is_set("postgres_url"):
        found["postgres_url"] = postgres.url
    return resolved.with_values(found, origin)


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run a command's coroutine to its end, on uvloop where it exists."""
    with new_runner() as runner:
        runner.run(work)


def run_through(work: Coroutine[Any, Any, None]) -> None:
    """The same where other people's code runs in the loop. A task of theirs that calls `sys.exit()` breaks the loop
    off; whoever awaits that task is told, and the loop goes on."""

    async def ended(task: asyncio.Task[None]) -> None:
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:  # Ctrl-C
            task.cancel()
            await asyncio.wait([task])
            raise

    with new_runner() as runner:
        task = runner.get_loop().create_task(work)
        while not task.done():
            try:
                runner.run(ended(task))
            except SystemExit as error:
                log.error("a task called sys.exit(%s): it ends, the process goes on", error.code, exc_info=error)
        task.result()


def new_runner() -> asyncio.Runner:
    try:
        import uvloop
    except ImportError:
        return asyncio.Runner()
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


def exit_code(error: OncewireError) -> int:
    if isinstance(error, Unavailable):
        return EXIT_UNAVAILABLE
    return EXIT_CORRUPT if isinstance(error, Corrupt) else EXIT_REFUSED


def fail(error: OncewireError, as_json: bool) -> NoReturn:
    show_error(error.message, error.hint, error.to_dict(), as_json)
    sys.exit(exit_code(error))


def show_error(message: str, hint: str, facts: Mapping[str, object], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"error": facts}), err=True)
        return
    first, *more = message.split("\n")
    say(first, sign=click.style("error: ", fg="red", bold=True), err=True)
    for line in (*more, *([hint] if hint else [])):
        say(f"  {line}", err=True)


def say(text: str = "", *, sign: str = "", is_dim: bool = False, err: bool = False) -> None:
    """One line for a person. What stands in it may be anybody's, a stranger's dead letter say: what would steer a
    terminal or break the line is shown by its number. `sign` stands before it, and is ours, with its colours."""
    shown = logs.printable(text)
    click.echo(f"{sign}{click.style(shown, dim=True) if is_dim else shown}", err=err)


def print_json(value: object) -> None:
    """The same for machines: escaped, so that it means the same."""
    for line in json.dumps(value, indent=2, ensure_ascii=False).split("\n"):
        click.echo(logs.escaped(line))


def load_named(target: str, what: str, *, hint: str) -> object:
    """What stands behind `module:name`, looked for in the current folder first, or None."""
    module, _, name = target.partition(":")
    if not all(part.isidentifier() for part in module.split(".")) or not name:
        raise Refused(f"{target!r} is not MODULE:{what}", hint=hint)
    sys.path.insert(0, str(Path.cwd()))
    try:
        return getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there; something that it imports is not
        raise Refused(f"there is no module {module!r}", hint="Run it in the folder that holds the module.") from None
    finally:
        sys.path.pop(0)
