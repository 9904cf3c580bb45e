"""Every command that stands in the documentation does something: each is run, on real servers and a real lake.

What a page shows to be typed step by step is followed in tests/system/test_docs.py; here are the others, one by one.
Commands end with the code that their page says; services serve, and stop when they are told to.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from oncewire import connect
from oncewire._ground.jetstream import losses
from oncewire._ground.jetstream.losses import Cause, Loss
from tests.support.up import ANY_PORTS, Up, clean_environ, made, oncewire, until

pytestmark = pytest.mark.faults

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
COMMAND_S = 300.0
COMMAND = re.compile(r"\s*(?:\$ )?((?:[A-Z_]+=\S+ )*(?:oncewire|curl|python|pip|scripts/\S+) [^#]*)")
SERVES = re.compile(r"oncewire (?:up|(?:agent|broker|dlq|gateway|pipeline|relay) run)(?! --once)")
ANY_CODE = re.compile(r"oncewire (?:dlq|pipeline audit|topology plan)|replay-dlq")
"""Those tell by exit code 1 that there is something to look at."""
MAPS = ("docs/how-to/deploy.md",)
"""Its first block is a picture."""
JOBS = {"python job.py": "tests/faults/test_spark_submit.py"}
LETTER = ("evt.default.demo.orders.placed", '{"type": "OrderPlaced", "payload": {"order": 1}}')


def commands() -> list[tuple[str, str]]:
    """Page and command, without those that are followed elsewhere and those that the reference repeats."""
    found = []
    for page in sorted(DOCS.rglob("*.md")):
        name = page.relative_to(ROOT).as_posix()
        blocks = re.findall(r"^```([^\n]*)\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
        texts = [text for kind, text in blocks if not kind.startswith("console") and "reference/" not in name]
        for text in texts[1:] if name in MAPS else texts:
            found += [(name, one[1].strip()) for line in text.splitlines() if (one := COMMAND.match(line))]
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Up]]:
    folder = tmp_path_factory.mktemp("docs")
    with Up(made(folder / ".oncewire")) as up:
        up.ready()
        for number in range(1, 21):  # number 17 is of another cause: it stays when the others are replayed
            cause = "ValueError" if number == 17 else "TimeoutError"
            words = ("dlq", "inject", *LETTER, "--testing", "--cause", f"{cause}: {number}")
            assert 0 == oncewire(*words, cwd=folder).returncode
        (folder / "fixed.json").write_text('{"type": "OrderPlaced", "payload": {"order": 2}}')
        (folder / ".env.prod").write_text(f"NATS_URL={up.url('nats')}\n")
        declared = re.search(
            r"^```toml\n(# orders.toml.*?)^```$", (DOCS / "topology.md").read_text(), re.MULTILINE | re.DOTALL
        )
        assert declared is not None
        (folder / "orders.toml").write_text(declared[1])
        asyncio.run(lose(up))
        done = oncewire_long("pipeline run --once", folder)
        assert 0 == done.returncode, done.stderr
        yield folder, up


async def lose(up: Up) -> None:
    """A loss as a reader records it, for a person to look at."""
    async with connect(up.url("nats")) as client:
        await losses.record(client, Loss("MESHFORGE_EVENTS", "", "reader", Cause.TRIMMED, 1, 2, found_ms=1))


def oncewire_long(words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        f"oncewire {words}", shell=True, cwd=folder, env=environ(), capture_output=True, text=True, timeout=COMMAND_S
    )


def environ(**more: str) -> dict[str, str]:
    return clean_environ(PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", **ANY_PORTS, **more)


def here(command: str, folder: Path, up: Up) -> str:
    """The command with what stands for the reader's own: servers, keys, a stream."""
    keys = up.folder.keys
    for shown, real in {
        r"nats://localhost:4222": up.url("nats"),
        r"127\.0\.0\.1:(?:9001|9002|3006)": "127.0.0.1:0",
        r"localhost:9464": up.running.services["metrics"].removeprefix("http://"),
        r"/run/secrets/relay\.nk|relay\.nk(?= )": str(keys / "relay.nk"),
        r"(?<==)operator\.nk": str(keys / "operator.nk"),
        r"\bSTREAM\b": "MESHFORGE_EVENTS",
        r"--master \S+ --lake \S+": f"--lake {folder / 'other-lake'}",
        r"--lake s3://\S+": f"--lake {folder / 'store-lake'}",  # tests/faults/test_lake_store.py types it
        r"--env prod": "--env dev",  # one server keeps one copy
        r"^scripts/": f"{ROOT}/scripts/",
    }.items():
        command = re.sub(shown, real, command)
    return command


@pytest.mark.parametrize(("page", "command"), commands(), ids=lambda one: one[:60])
def test_it_does_something(page: str, command: str, place: tuple[Path, Up]) -> None:
    folder, up = place
    if command in JOBS:
        assert (ROOT / JOBS[command]).exists()
    elif command.startswith("pip install"):
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert set(re.search(r"\[(.*)\]", command)[1].split(",")) <= set(extras)  # type: ignore[index]
    elif SERVES.search(command):
        _serve(here(command, folder, up), folder)
    else:
        if "drop" in command:
            command += " --yes"
        done = subprocess.run(
            here(command, folder, up), shell=True, cwd=folder, env=environ(), capture_output=True, text=True,
            timeout=COMMAND_S,
        )  # fmt: skip
        codes = (0, 1) if ANY_CODE.search(command) else (0,)
        assert done.returncode in codes, f"{page}: {command}\n{done.stdout}{done.stderr}"


def _serve(command: str, folder: Path) -> None:
    """Until it says that it serves, in a folder of its own where it would take another's place."""
    own = {"ONCEWIRE_DATA": str(folder / "own")} if "oncewire up" in command else {}
    if "pipeline run" in command and "--lake" not in command:
        command += f" --lake {folder / 'own-lake'}"
    log = folder / "service.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            f"exec env {command} --json", shell=True, cwd=folder, env=environ(**own), stdout=out, stderr=out
        )
    try:
        serving = '"event": "running"' if "pipeline run" in command else '"event": "serving"'
        until(lambda: serving in log.read_text() or process.poll() is not None, command, deadline_s=COMMAND_S)
        assert process.poll() is None, f"{command}\n{log.read_text()}"
    finally:
        process.send_signal(signal.SIGTERM)
        assert 0 == process.wait(COMMAND_S), f"{command}\n{log.read_text()}"
