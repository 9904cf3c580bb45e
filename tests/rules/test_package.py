"""The wheel carries the page and the JavaScript client as they are served; both stand once in git. Its loops may be
compiled."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CLIENT = ROOT / "clients" / "js" / "src"


def build(into: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(into)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | environ)


@pytest.mark.parametrize("environ", [{"ONCEWIRE_NATIVE": "0"}, {"LDSHARED": "false"}], ids=["unwanted", "no compiler"])
def test_without_compiled_loops_a_wheel_is_for_every_machine(tmp_path: Path, environ: dict[str, str]) -> None:
    assert build(tmp_path, **environ).returncode == 0
    (wheel,) = tmp_path.glob("*-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as opened:
        assert not [name for name in opened.namelist() if name.endswith(".so")]


def test_who_wants_compiled_loops_is_told_why_there_are_none(tmp_path: Path) -> None:
    assert build(tmp_path, ONCEWIRE_NATIVE="1", LDSHARED="false").returncode != 0
    assert not list(tmp_path.glob("*.whl"))


def test_the_wheel_carries_the_client_and_the_page(tmp_path: Path) -> None:
    assert build(tmp_path).returncode == 0
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        for path in sorted(CLIENT.iterdir()):
            assert path.read_bytes() == opened.read(f"oncewire/gateway/web/client/{path.name}")
        assert {"index.html", "chat.css", "chat.js"} == {
            name.rpartition("/")[2] for name in opened.namelist() if name.startswith("oncewire/demo/page/")
        }


def test_nothing_on_the_page_comes_from_elsewhere() -> None:
    """It works without a network, and tells nobody that it was opened."""
    served = [*CLIENT.iterdir(), *(ROOT / "src" / "oncewire" / "demo" / "page").iterdir()]
    assert {"client.js", "chat.js", "index.html"} <= {path.name for path in served}
    for path in served:
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in text, path
        assert "http://" not in text, path
