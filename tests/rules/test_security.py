"""docs/security.md says what is defended: each line has a test that exists, and its tables are those of the code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from oncewire._ground import topology
from oncewire._ground.settings import Settings
from oncewire._ground.trust.grants import ACTIONS
from oncewire._ground.users import DEVELOPER, OPERATOR
from oncewire.broker.routes import BrokerRoutes
from oncewire.cli import main
from oncewire.cli.rights import RIGHTS, Right
from oncewire.console.routes import ConsoleRoutes
from oncewire.gateway.routes import GatewayRoutes
from oncewire.gateway.websocket import RULES

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "security.md").read_text()
TESTS = {path: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
HERE: Any = None
"""Routes are made without the part behind them: they are only looked at."""


def threats() -> list[list[str]]:
    tables = TEXT.split("\n| threat |")[1:]
    lines = [line for table in tables for line in table.partition("\n\n")[0].splitlines()[2:]]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_every_line_of_the_threat_model_names_a_test_that_exists() -> None:
    assert len(threats()) > 25
    before = ""
    for row in threats():
        threat, _, shown = row
        if shown == "the same":
            shown = before
        before = shown
        names = re.findall(r"`(test_[a-z0-9_*]+(?:\.py)?)`", shown)
        assert names, f"no test is named for: {threat}"
        for name in names:
            if name.endswith(".py"):
                assert any(one.match(name) for one in TESTS), name
            else:
                assert any(re.search(rf"def {name}\(", text) for text in TESTS.values()), f"{name} does not exist"


def commands(command: click.Command, path: str = "") -> Iterator[str]:
    if not isinstance(command, click.Group):
        yield path
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        found = command.get_command(context, name)
        assert found is not None
        yield from commands(found, f"{path} {name}".strip())


def test_every_command_has_a_right() -> None:
    assert set(RIGHTS) == set(commands(main)), "a new command says in cli/rights.py what it may touch"


@pytest.mark.parametrize("path", RIGHTS)
def test_a_command_speaks_as_a_user_that_there_is_and_takes_only_what_its_right_says(path: str) -> None:
    right, known = RIGHTS[path], {one.name for one in topology.load(settings=Settings()).services}
    assert right.nats in {"", OPERATOR, DEVELOPER, *known}
    command: click.Command = main
    for word in path.split():
        assert isinstance(command, click.Group)
        found = command.get_command(click.Context(command), word)
        assert found is not None
        command = found
    taken = {one.name for one in command.params}
    if path != "config":  # it shows every setting, and uses none
        assert right.postgres or "postgres_url" not in taken
        assert right.keys or "auth_keys" not in taken


def test_the_tables_of_routes_frames_and_commands_are_those_of_the_code() -> None:
    routes = {
        **{("broker", *one): action for one, action in BrokerRoutes(HERE).routes().rules.items()},
        **{("gateway", *one): action for one, action in GatewayRoutes(HERE).routes().rules.items()},
        ("gateway", "POST", "/tickets"): "known",
        **{("console", *one): action for one, action in ConsoleRoutes(HERE, HERE, HERE).routes().rules.items()},
    }
    shown = {f"| {who} | `{method} {path}` | {action or 'open'} |" for (who, method, path), action in routes.items()
             if method not in ("HEAD", "OPTIONS")}  # fmt: skip
    shown |= {f"| `{kind.__struct_config__.tag}` | {action or 'open'} |" for kind, action in RULES.items()}
    shown |= {_row(path, right) for path, right in RIGHTS.items()}
    section = TEXT.partition("## Every route, frame and command")[2].partition("\n## ")[0]
    told = {line for line in section.splitlines() if line.startswith("|") and "`" in line}
    assert shown == told, f"missing: {sorted(shown - told)}; too much: {sorted(told - shown)}"
    assert {action for action in routes.values() if action} <= {*ACTIONS, "known"}


def _row(path: str, right: Right) -> str:
    return f"| `{path}` | {right.nats or 'no'} | {'yes' if right.postgres else 'no'} | {right.keys or 'no'} |"
