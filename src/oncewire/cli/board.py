"""How `up` shows what it does: live lines in a terminal, plain lines elsewhere, one JSON object per line with --json.
With log.format json those objects are log lines: they have a time, a level and a part.

What is shown is for the reader; a reader who went away (a closed terminal, `| head`) must not stop the servers, so
after the first failed write the board is silent.
"""

from __future__ import annotations

import shutil
import sys
import time
from contextlib import suppress
from typing import TextIO

import click

from oncewire._ground.logs import json_line, printable, time_of
from oncewire._ground.settings import Settings

NAME_WIDTH = 11
VERSION_WIDTH = 7


class Board:
    """Prints lines and events. One row per part is rewritten in place when the reader is a terminal."""

    def __init__(self, as_json: bool, out: TextIO | None = None, *, log_part: str = "") -> None:
        self._as_json = as_json or bool(log_part)
        self._log_part = log_part
        self._out = out or sys.stdout
        self._is_live = not self._as_json and self._out.isatty()
        self._rows: dict[str, str] = {}
        self._is_gone = False
        self._begun = time.monotonic()

    def ready(self, **facts: object) -> None:
        """Everything serves."""
        seconds = round(time.monotonic() - self._begun, 1)
        self.line(f"\nready in {seconds} s; Ctrl-C stops everything\n")
        self.event("serving", seconds=seconds, **facts)

    def line(self, text: str = "") -> None:
        """For people: a line of its own; the rows above it are final."""
        if not self._as_json:
            self._rows.clear()
            self._write("".join(f"{printable(line)}\n" for line in text.split("\n")))

    def event(self, name: str, **facts: object) -> None:
        """For machines."""
        if self._as_json:
            self._write(json_line(self._log_facts(facts) | {"event": name, **facts}) + "\n")

    def _log_facts(self, facts: dict[str, object]) -> dict[str, object]:
        if not self._log_part:
            return {}
        return {
            "time": time_of(time.time()),
            "level": "warning" if "warning" in facts else "info",
            "part": self._log_part,
        }

    def part(self, name: str, state: str, /, **facts: str) -> None:
        """A part changed its state: for both."""
        self.event(state, part=name, **facts)
        if not self._as_json:
            self._row(name, _row(name, state, {key: printable(told) for key, told in facts.items()}))

    def _row(self, name: str, row: str) -> None:
        if self._is_live and self._rows:
            self._write(f"\x1b[{sum(_height(shown) for shown in self._rows.values())}F\x1b[J")
            self._rows[name] = row
            self._write("".join(f"{shown}\n" for shown in self._rows.values()))
        else:
            self._rows[name] = row
            self._write(f"{row}\n")

    def _write(self, text: str) -> None:
        if self._is_gone:
            return
        try:
            click.echo(text, file=self._out, nl=False)
        except OSError:
            self._is_gone = True
            with suppress(OSError, ValueError):
                self._out.close()


def board_of(settings: Settings, as_json: bool, part: str) -> Board:
    """For a command that runs a service."""
    return Board(as_json, log_part=part if settings.log_format == "json" else "")


def _row(name: str, state: str, facts: dict[str, str]) -> str:
    sign = _sign(state, facts)
    if "version" not in facts:
        return f"  {sign} {name:<{NAME_WIDTH}}  {facts.get('text', state)}"
    places = [facts["url"], *(f"monitoring {facts[name]}" for name in ("monitor_url",) if facts.get(name))]
    return f"  {sign} {name:<{NAME_WIDTH}}  {facts['version']:<{VERSION_WIDTH}}  {', '.join(places)}"


def _sign(state: str, facts: dict[str, str]) -> str:
    if "warning" in facts:
        return click.style("!", fg="yellow", bold=True)
    return click.style("·", fg="yellow") if state.endswith("ing") else click.style("✓", fg="green", bold=True)


def _height(row: str) -> int:
    """Lines that a row takes in the terminal: a long address wraps."""
    columns = shutil.get_terminal_size().columns
    return max(1, -(-len(click.unstyle(row)) // columns))
