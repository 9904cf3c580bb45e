"""The README's first commands work in a fresh clone: they install into an empty environment, and the demo is good."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.up import ANY_PORTS, clean_environ

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]  # it downloads from the package registry

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
COMMAND_S = 600.0


def test_a_fresh_clone_installs_and_shows_what_the_readme_shows(tmp_path: Path) -> None:
    subprocess.run(["git", "clone", "-q", str(ROOT), "clone"], cwd=tmp_path, check=True)
    subprocess.run([sys.executable, "-m", "venv", "empty"], cwd=tmp_path, check=True)
    path = f"{tmp_path / 'empty' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environ = clean_environ(**ANY_PORTS, PATH=path, HOME=str(tmp_path))
    block = next(text for text in re.findall(r"```\n(\$ .*?)```", README, re.DOTALL) if "pip install" in text)
    printed = ""
    for line in block.splitlines():
        command = line.removeprefix("$ ")
        done = subprocess.run(
            command, shell=True, cwd=tmp_path / "clone", env=environ, capture_output=True, text=True, timeout=COMMAND_S
        )
        assert 0 == done.returncode, (command, done.stdout, done.stderr)
        printed = done.stdout
    shown = next(text for text in re.findall(r"```\n(.*?)```", README, re.DOTALL) if "killed (-9)" in text)
    for line in shown.splitlines():  # a kill comes when it comes: how many charges are in the books differs
        pattern = r"\d+ charges in the books".join(map(re.escape, re.split(r"\d+ charges in the books", line)))
        assert re.search(pattern, printed), (line, printed)
    seconds = float(printed.splitlines()[-1].removesuffix(" s"))
    print(f"the demo took {seconds} s")
