"""The README's commands print what it shows, and its examples run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import oncewire
from oncewire._ground.topology import ensure
from tests.support.nats import NatsServer
from tests.support.up import clean_environ

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SHELL = re.findall(r"```\n(\$ .*?)```", README, re.DOTALL)
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
ELSEWHERE = ("oncewire up", "oncewire demo", "agent run")
RUN_HERE = [block for block in SHELL if not any(words in block for words in ELSEWHERE)]


def test_the_readme_has_blocks_to_run() -> None:
    assert 2 <= len(RUN_HERE)


@pytest.mark.parametrize("block", RUN_HERE, ids=lambda block: block.splitlines()[0][2:40])
async def test_commands_print_what_the_readme_shows(block: str, server: NatsServer, tmp_path: Path) -> None:
    async with oncewire.connect(server.url) as client:
        await ensure(client)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for part in block.strip().split("$ ")[1:]:
        command, _, shown = part.partition("\n")
        done = subprocess.run(
            command,
            shell=True,
            cwd=tmp_path,
            env=clean_environ(NATS_URL=server.url, PATH=path),
            capture_output=True,
            text=True,
        )
        assert shown.strip() == (done.stdout + done.stderr).strip()


def test_the_readme_s_test_of_an_agent_passes() -> None:
    """The code as it stands there, on the agent of the examples."""
    (code,) = [block for block in PYTHON if "AgentTest" in block]
    names: dict[str, object] = {}
    exec("from examples.biller import agent\nfrom oncewire.testing import AgentTest\n" + code, names)
    test = names["test_a_redelivered_order_is_charged_once"]
    assert callable(test)
    test()
