"""Writes what is made of the code: docs/reference (commands, settings, errors, metrics) and the outbox as one SQL file,
under the name that the realtime protocol gives it. `make reference`; a test sees drift."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from oncewire._ground import errors, settings
from oncewire._ground.database import migrate
from oncewire._ground.http.rules import answer_of
from oncewire._ground.metrics.table import PARTS
from oncewire.cli import NOUNS, face, main

ROOT = Path(__file__).parents[1]
MADE = "<!-- Made by `make reference` from the code: change it there. -->"


def pages() -> dict[str, str]:
    """Each file's text by its path in the project."""
    return {
        "docs/reference/cli.md": _cli(),
        "docs/reference/settings.md": _settings(),
        "docs/reference/errors.md": _errors(),
        "docs/reference/metrics.md": _metrics(),
        "infra/scripts/create-outbox.sql": _outbox(),
    }


def _page(title: str, *parts: str) -> str:
    return "\n\n".join([f"# {title}", MADE, *parts]) + "\n"


def _table(heads: str, rows: Iterable[Sequence[object]]) -> str:
    """A table of Markdown; `heads` are parted by bars."""
    lines = [heads.split("|"), ["---"] * (heads.count("|") + 1), *([str(one) for one in row] for row in rows)]
    return "\n".join(f"| {' | '.join(cell.strip().replace('|', _BAR) for cell in line)} |" for line in lines)


_BAR = "\\|"


# ---- commands


def _cli() -> str:
    root = click.Context(main, info_name="oncewire")
    nouns = [(f"[`oncewire {name}`](#oncewire-{name})", about) for name, (_, about) in sorted(NOUNS.items())]
    codes = textwrap.dedent((sys.modules["oncewire.cli"].__doc__ or "").partition("every command:\n")[2]).rstrip()
    return _page(
        "Commands",
        "Every command has `--help` and `--json`; flags that are settings stand in [settings](settings.md) too.",
        _table("command|it does", nouns),
        f"## Exit codes\n\n```\n{codes}\n```",
        *(_section(context) for context in _commands(root) if context is not root),
    )


def _commands(context: click.Context) -> Iterator[click.Context]:
    """The context of each command below, with its whole name."""
    yield context
    if isinstance(context.command, click.Group):
        for name in context.command.list_commands(context):
            command = context.command.get_command(context, name)
            assert command is not None
            yield from _commands(click.Context(command, info_name=name, parent=context, max_content_width=100))


def _section(context: click.Context) -> str:
    command, path = context.command, context.command_path
    told = inspect.cleandoc(command.help or "").replace("\n\b\n", "\n\n").replace("\n\n\n", "\n\n")
    usage = " ".join([path, *command.collect_usage_pieces(context)])
    rows = [_option(one) for one in command.params if isinstance(one, click.Option) and one.name not in _COMMON]
    options = "\n\n" + _table("option|it means", rows) if rows else ""
    return f"{'#' * len(path.split())} {path}\n\n```\n{usage}\n\n{told}\n```{options}"


_COMMON = {"as_json", "help"}
_ROWS = {row.flag: row for row in settings.table()}


def _option(option: click.Option) -> tuple[str, str]:
    flag = option.opts[0]
    if flag in _ROWS:
        return f"`{flag}`", f"the setting `{_ROWS[flag].key}`"
    takes = "" if option.is_flag else f" {option.make_metavar(click.Context(main))}"
    more = " Required." if option.required else ""
    if not option.is_flag and isinstance(option.default, str | int | float | Path) and option.default != "":
        more += f" Default {option.default}."
    return f"`{flag}{takes}`", f"{option.help or ''}{more}"


# ---- settings


def _settings() -> str:
    rows = [
        (f"`{row.key}`", f"`{row.flag}`", ", ".join(f"`{one}`" for one in row.variables), _default(row), _about(row))
        for row in settings.table()
    ]
    return _page(
        "Settings",
        "A value is taken from the first of: a flag, an environment variable, `oncewire.toml` (`--config` or\n"
        "`ONCEWIRE_CONFIG` names another file), the default. `oncewire config` prints each with its origin. In the\n"
        "file, `nats.url` is the key `url` in the table `[nats]`; unknown keys are errors.\n\n"
        "The library follows the same rule: what is not passed to `oncewire.connect`, `agent.running`,\n"
        "`init_streams`, `ensure_consumers`, `tokens.stream` or `outbox.RelayOptions` comes from here. Spark's\n"
        "readers and writers take options alone.",
        _table("key|flag|variable|default|it is", rows),
    )


def _default(row: settings.Setting) -> str:
    return f"`{row.default}`" if str(row.default) else "not set"


def _about(row: settings.Setting) -> str:
    return row.help + (" Secret: masked wherever it is shown." if row.is_secret else "")


# ---- errors


def _errors() -> str:
    kinds = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, errors.OncewireError)]
    return _page(
        "Errors",
        "One tree, `oncewire.errors`. `code` is stable; commands with `--json` show it with a message and a hint. The\n"
        "exit code is that of a command which ends with the error; status and word are what broker and gateway answer.",
        _table(
            "error|below|code|try again|exit code|HTTP|word|it means",
            (_error(kind) for kind in kinds if kind is not errors.OncewireError),
        ),
    )


def _error(kind: type[errors.OncewireError]) -> tuple[object, ...]:
    example = _made(kind)
    status, word = answer_of(example)
    above = kind.__base__.__name__ if kind.__base__ else ""
    about = inspect.cleandoc(kind.__doc__ or "").partition("\n")[0]
    again = "yes" if kind.is_retryable else "no"
    return f"`{kind.__name__}`", above, f"`{kind.code}`", again, face.exit_code(example), status, f"`{word}`", about


def _made(kind: type[errors.OncewireError]) -> errors.OncewireError:
    wanted: dict[str, Any] = {
        name: "" for name, one in inspect.signature(kind).parameters.items()
        if one.kind is one.KEYWORD_ONLY and one.default is one.empty
    }  # fmt: skip
    return kind("", **wanted)


# ---- metrics


def _metrics() -> str:
    heads = "name|kind|labels|meaning"
    parts = []
    for part, metrics in PARTS.items():
        rows = [
            (f"`{one.name}`", one.kind, ", ".join(f"`{name}`" for name in one.labels), one.about) for one in metrics
        ]
        parts.append(f"## {part}\n\n{_table(heads, rows)}")
    return _page(
        "Metrics",
        "How to scrape them, and what to do about them: [observability](../observability.md).",
        "Times are seconds, sizes bytes. A histogram has `_bucket`, `_sum` and `_count`. A label that others choose\n"
        "(`topic`, `group`, `cause`) has at most 1,000 values per metric; the rest is added up under `other`.",
        *parts,
    )


# ---- SQL


def _outbox() -> str:
    told = (
        "-- Made by `make reference` from src/oncewire/outbox/sql: change it there.\n"
        "-- The tables and functions of the outbox. `oncewire migrate` applies the same, and the ledger's tables too.\n"
        "-- Either may be run again, and after the other.\n\n"
    )
    return told + migrate.script(parts=("outbox",))


if __name__ == "__main__":
    for name, text in pages().items():
        (ROOT / name).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / name).write_text(text, "utf-8")
        click.echo(f"written: {name}")
