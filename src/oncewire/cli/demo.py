"""`oncewire demo`: the tour, against the `up` that runs here, or one that is started for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import click

from oncewire._ground.errors import OncewireError, Refused, Unavailable
from oncewire._ground.jetstream import Client, options_from
from oncewire._ground.settings import Settings
from oncewire.cli import edge, face
from oncewire.embedded.folder import DataFolder, Running
from oncewire.embedded.process import POLL_S, Child, Log
from oncewire.pipeline.lake.place import Place, place_of

START_S_MAX = 90.0
STOP = (signal.SIGTERM, 60.0)
AGENT = "oncewire.demo.biller:agent"
ONCEWIRE = (sys.executable, "-c", "from oncewire.cli import main; main(prog_name='oncewire')")
NEEDED = ("broker", "gateway")


@click.command()
@click.option("--orders", type=click.IntRange(4, 1_000), default=24, show_default=True, help="How many are placed.")
@click.option("--kills", type=click.IntRange(0, 20), default=3, show_default=True, help="How often the agent dies.")
@click.option("--no-spark", "is_short", is_flag=True, help="Leave out the tables and the audit.")
@face.setting_options("data", "lake")
@face.command
def demo(*, orders: int, kills: int, is_short: bool, as_json: bool, **flags: Any) -> None:
    """A tour through every part: orders, an agent that is killed, a room, a dead letter, Spark, an audit.

    It runs against the `oncewire up` of the data folder, or starts one and stops it afterwards. What it makes
    stays in the data folder, for the console and for you to look at.

    \b
    Examples:
      oncewire demo
      oncewire demo --orders 200 --kills 10
      oncewire demo --data /tmp/tour --no-spark --json
    \b
    Exit code 1 when anything was lost or doubled.
    """
    folder = DataFolder.at(face.load(flags).settings.data)
    show = _Show(as_json)
    answers: list[bool] = []
    face.run(_run(folder, flags, show, orders, kills, is_short, answers))
    if not all(answers):
        raise SystemExit(face.EXIT_NOT_WELL)


async def _run(
    folder: DataFolder, flags: dict[str, Any], show: _Show, orders: int, kills: int, is_short: bool, answers: list[bool]
) -> None:
    from oncewire.demo.tour import Tour, Where

    async with _up(folder, show) as running:
        settings = face.load_here(flags).settings
        if edge.asks_who(settings):
            raise Refused("the tour knows no credentials", hint="Take it in a folder of its own: --data /tmp/tour.")
        services = running.services
        console = services.get("console", "")
        lake = None if is_short else _lake(settings)
        where = Where(settings.postgres_url, services["broker"], services["gateway"], console, lake)
        async with (
            Client(options_from(settings, name="oncewire-demo")) as client,
            _Machine(folder, settings) as machine,
        ):
            answers.append(await Tour(client, where, machine, show, orders=orders, kills=kills).run())
    show.end(is_good=answers[0])


def _lake(settings: Settings) -> Place | None:
    from oncewire.cli.pipeline import lake_of, require_spark

    try:
        require_spark()
    except OncewireError:
        return None
    return lake_of(settings).place


# ---- the servers


@contextlib.asynccontextmanager
async def _up(folder: DataFolder, show: _Show) -> AsyncIterator[Running]:
    """The `up` of this folder; one of our own, for as long as the tour takes, where there is none."""
    show.step("The system")
    if folder.holder() is not None:
        running = await _serving(folder, None)
        show.tell(f"`oncewire up` runs on {folder.path} (process {folder.holder()})")
        show.addresses(running)
        yield running
        return
    show.tell(f"starting `oncewire up` on {folder.path}")
    folder.create()
    child = await Child.start(
        "oncewire up",
        [*ONCEWIRE, "up", "--json", "--data", str(folder.path)],
        Log(folder.path / "demo-up.log"),
        death_signal=signal.SIGTERM,
    )
    try:
        running = await _serving(folder, child)
        show.addresses(running)
        yield running
    finally:
        await child.stop(STOP)


async def _serving(folder: DataFolder, child: Child | None) -> Running:
    deadline = time.monotonic() + START_S_MAX
    while time.monotonic() < deadline:
        running = folder.read()
        is_ready = child is None or '"event": "serving"' in child.log.tail()
        if running is not None and is_ready and all(name in running.services for name in NEEDED):
            return running
        if child is not None and not child.is_running:
            raise child.died("before it served")
        await asyncio.sleep(POLL_S)
    raise Unavailable(f"`oncewire up` on {folder.path} serves no broker and gateway", hint="Is it of this version?")


# ---- what the tour runs


class _Agent:
    def __init__(self, child: Child) -> None:
        self._child = child

    async def kill(self) -> None:
        self._child.signal(signal.SIGKILL)
        await self._child.wait()

    async def stop(self) -> None:
        await self._child.stop(STOP)


class _Machine:
    """Runs commands of ours as processes, with the settings of the tour."""

    def __init__(self, folder: DataFolder, settings: Settings) -> None:
        self._folder = folder
        self._settings = settings
        self._started: list[Child] = []
        self._environ = {**os.environ, "ONCEWIRE_DATA": str(folder.path)}
        if settings.lake:
            self._environ["ONCEWIRE_LAKE"] = str(place_of(settings.lake))

    async def __aenter__(self) -> _Machine:
        return self

    async def __aexit__(self, *_: object) -> None:
        for child in self._started:
            if child.is_running:
                await child.stop(STOP)

    async def agent(self) -> _Agent:
        log = Log(self._folder.path / "demo-agent.log")
        words = ("agent", "run", AGENT, "--json")
        child = await Child.start(
            "the agent",
            [*ONCEWIRE, *words],
            log,
            death_signal=signal.SIGTERM,
            environ={**self._environ, "ONCEWIRE_STORE": self._settings.postgres_url},
        )
        self._started.append(child)
        deadline = time.monotonic() + START_S_MAX
        while '"event": "serving"' not in log.tail():
            if not child.is_running:
                raise child.died("before it served")
            if time.monotonic() > deadline:
                raise Unavailable("the agent does not start", hint=f"Its log: {log.path}")
            await asyncio.sleep(POLL_S)
        return _Agent(child)

    async def command(self, *words: str) -> tuple[int, Any]:
        """Its exit code, and what it printed: one JSON value, or the last line's."""
        process = await asyncio.create_subprocess_exec(
            *(*ONCEWIRE, *words, "--json"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self._environ,
        )
        try:
            out, err = await process.communicate()
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()
        text = (out or err).decode()
        try:
            return process.returncode or 0, json.loads(text)
        except json.JSONDecodeError:
            return process.returncode or 0, (err.decode().strip() or text.strip()).rpartition("\n")[2]


# ---- what a person sees


class _Show:
    """Numbered steps for people, an object per line for machines."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._steps = 0
        self._begun = time.monotonic()

    def step(self, title: str) -> None:
        self._steps += 1
        self._print("step", title, f"\n{click.style(f'{self._steps}. {title}', bold=True)}")

    def tell(self, text: str) -> None:
        self._print("told", text, f"   {text}")

    def check(self, text: str, *, holds: bool) -> None:
        sign = click.style("✓", fg="green", bold=True) if holds else click.style("✗", fg="red", bold=True)
        self._print("checked", text, f" {sign} {text}", holds=holds)

    def look(self, text: str) -> None:
        self._print("look", text, f"   {click.style('look:', dim=True)} {text}")

    def addresses(self, running: Running) -> None:
        for name, url in {**{name: one.url for name, one in running.servers.items()}, **running.services}.items():
            self.tell(f"{name:<10} {url}")

    def end(self, *, is_good: bool) -> None:
        seconds = round(time.monotonic() - self._begun, 1)
        self._print("end", "good" if is_good else "not well", f"\n{seconds} s", is_good=is_good, seconds=seconds)

    def _print(self, event: str, text: str, shown: str, **facts: object) -> None:
        click.echo(json.dumps({"event": event, "text": text, **facts}, ensure_ascii=False) if self._as_json else shown)
