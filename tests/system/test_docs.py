"""The documentation is true: its commands exist, its pages can be followed, its links lead somewhere."""

from __future__ import annotations

import ast
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from oncewire import connect
from oncewire.cli import main
from tests.support.nats import NatsServer, nats_cluster
from tests.support.pages import Block, Shell, blocks, follow, typed
from tests.support.postgres import shared_postgres
from tests.support.up import ANY_PORTS, Up, clean_environ, made, until

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *(ROOT / "examples").glob("*.md")])
IDS = [str(page.relative_to(ROOT)) for page in PAGES]
ELSEWHERE = ("oncewire up", "pip install ")


def words_of(page: Path) -> list[list[str]]:
    """Every call of `oncewire` in a block of the page, as words."""
    lines = [
        line
        for block in re.findall(r"^```[^\n]*\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
    ]
    found = []
    for line in lines:
        for part in re.split(r"\|\||&&|[|;>&]|\$\(|\bdo\b|\bthen\b", line.removeprefix("$ ").partition(" #")[0]):
            text = re.sub(r"^\s*(?:until |[A-Z_]+=\S+ )*", "", part)
            if re.match(r"oncewire [a-z]", text):
                try:
                    found.append(shlex.split(text)[1:])
                except ValueError:  # quotes that a split tore apart
                    found.append(text.split()[1:2])
    return found


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_command_in_it_exists_with_these_options(page: Path) -> None:
    for words in words_of(page):
        if "[OPTIONS]" in words:  # a usage line
            continue
        command: click.Command = main
        context = click.Context(main, info_name="oncewire")
        while isinstance(command, click.Group) and words:
            name, *words = words
            if name.startswith("-"):  # an option of `oncewire` itself, and its value
                words = words[1:]
                continue
            found = command.get_command(context, name)
            assert found is not None, f"{page.name}: no command {name}"
            command, context = found, click.Context(found, info_name=name, parent=context)
        known = {flag for one in command.params for flag in one.opts} | {"--help"}
        used = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert used <= known, f"{page.name}: {command.name} has no {used - known}"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_link_in_it_leads_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / link).exists(), f"{page.name} links to {link}"


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.name)
def test_the_contents_name_it(page: Path) -> None:
    contents = (DOCS / "README.md").read_text()
    assert page.name == "README.md" or f"({page.relative_to(DOCS)})" in contents


def test_what_a_page_leaves_to_the_reader_is_known() -> None:
    for page in PAGES:
        for block in blocks(page):
            if block.kind == "console" and block.more == "elsewhere":
                for command, _ in typed(block.text):
                    assert command.startswith(ELSEWHERE), f"{page.name}: {command} is run by no test"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a reader who has `oncewire up` in it."""
    made(tmp_path / ".oncewire")
    return tmp_path


def environ() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return clean_environ(PATH=path, PYTEST_ADDOPTS="-p no:cacheprovider -p no:asyncio")


def _follow_tutorial(folder: Path, *, is_long: bool) -> None:
    with Up(folder / ".oncewire", **ANY_PORTS) as up:
        up.ready()
        follow(DOCS / "tutorial.md", folder, environ(), nats_url=up.url("nats"), is_long=is_long)


def test_the_tutorial_can_be_followed(folder: Path) -> None:
    _follow_tutorial(folder, is_long=False)


@pytest.mark.faults
@pytest.mark.timeout(900)  # Spark starts three times
def test_the_tutorial_can_be_followed_to_the_proof(folder: Path) -> None:
    _follow_tutorial(folder, is_long=True)


def test_upgrading_can_be_followed(folder: Path) -> None:
    with Up(folder / ".oncewire", **ANY_PORTS) as up:
        up.ready()
        follow(DOCS / "how-to" / "upgrade.md", folder, environ(), nats_url=up.url("nats"))


@pytest.mark.faults
async def test_a_backup_brings_back_what_there_was(folder: Path) -> None:
    page = blocks(DOCS / "how-to" / "backup.md")
    save, restore = (list(typed(block.text)) for block in page if block.kind == "console")
    shell = Shell(folder, environ())
    subject, body = "evt.default.demo.backup.made", {"type": "Made", "payload": {}}

    async def publish(id_: str) -> tuple[int, bool]:
        with Up(folder / ".oncewire", **ANY_PORTS) as up:
            async with connect(up.ready().url("nats")) as client:
                ack = await client.publish(subject, body, msg_id=id_)
        return ack.sequence, ack.is_duplicate

    try:
        first = await publish("before")
        for command, _ in save:
            shell.run(command)
        await publish("after")
        for command, _ in restore:
            shell.run(command)
        assert (first[0], True) == await publish("before")
        assert (first[0] + 1, False) == await publish("after")
    finally:
        shell.close()


SERVES = ("relaying from", "keeping dead letters", "gateway on", "broker on")


@pytest.mark.faults
async def test_deploying_on_a_cluster_can_be_followed(tmp_path: Path) -> None:
    """On three real servers and a real PostgreSQL, which stand for those that the page names."""
    page = blocks(DOCS / "how-to" / "deploy.md")
    with nats_cluster() as cluster:
        found = {
            '"nats:.*"': ",".join(cluster.urls),
            '"http:.*"': ",".join(server.monitor_url for server in cluster.servers),
            '"postgresql:.*"': await shared_postgres().new_database(),
        }
        (config,) = (block.text for block in page if block.more == "oncewire.toml")
        for named, url in found.items():
            config = re.sub(named, f'"{url}"', config)
        (tmp_path / "oncewire.toml").write_text(config)
        shell = Shell(tmp_path, environ() | ANY_PORTS)
        try:
            for block in page:
                if block.kind == "console":
                    _type(shell, block, tmp_path)
        finally:
            shell.close()


def _type(shell: Shell, block: Block, folder: Path) -> None:
    """Commands must end well, services must serve."""
    for number, (command, _) in enumerate(typed(block.text)):
        if block.more == "service":
            log = folder / f"service-{number}.log"
            shell.run(f"{command} > {log} 2>&1 &")
            until(lambda log=log, sign=SERVES[number]: log.exists() and sign in log.read_text(), f"{command} to serve")
        else:
            said = shell.run(f'{command}\necho "ended with $?"')
            codes = "01" if command == "oncewire doctor" else "0"  # the tests' PostgreSQL does not sync, and it says so
            assert said.rpartition("ended with ")[2].strip() in codes, f"$ {command}\n{said}"


async def test_a_service_makes_its_streams_and_durables_as_the_page_says(
    server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/topology.md: its orders.toml, and the lines of `In a service`."""
    found = blocks(DOCS / "topology.md")
    (tmp_path / "orders.toml").write_text(next(one.text for one in found if "[streams.ORDERS]" in one.text))
    monkeypatch.chdir(tmp_path)
    lines = next(one.text for one in found if "init_streams(client" in one.text)
    async with connect(server.url) as client:
        names: dict[str, Any] = {"client": client}
        await eval(compile(lines, "topology.md", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)  # type: ignore[misc]
        assert [] == names["problems"]
        info = await client.api("CONSUMER.INFO.ORDERS.biller")
    assert "orders.placed" == info["config"]["filter_subject"]


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_where_a_page_says_to_look_at_an_agent_it_names_one(page: Path) -> None:
    """`oncewire agent status` alone is a usage error."""
    assert "`oncewire agent status`" not in page.read_text("utf-8")
