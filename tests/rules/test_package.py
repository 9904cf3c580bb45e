"""The wheel carries the page and the JavaScript client as they are served; both stand once in git."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
CLIENT = ROOT / "clients" / "js" / "src"


def test_the_wheel_carries_the_client_and_the_page(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        for path in sorted(CLIENT.iterdir()):
            assert path.read_bytes() == opened.read(f"oncewire/gateway/web/client/{path.name}")
        assert {"index.html", "chat.css", "chat.js"} == {
            name.rpartition("/")[2] for name in opened.namelist() if name.startswith("oncewire/demo/page/")
        }


def test_nothing_on_the_page_comes_from_elsewhere() -> None:
    """It works without a network, and tells nobody that it was opened."""
    served = [*CLIENT.glob("*.js"), *(ROOT / "src" / "oncewire" / "demo" / "page").iterdir()]
    for path in served:
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in text, path
        assert "http://" not in text, path
