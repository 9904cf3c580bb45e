"""`make size` counts what it says."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "size.py"
spec = importlib.util.spec_from_file_location("size", SCRIPT)
assert spec is not None
assert spec.loader is not None
size = importlib.util.module_from_spec(spec)
spec.loader.exec_module(size)

SHARED = "def f{n}(given):\n" + "".join(f"    step_{at} = given + {at}\n" for at in range(5)) + "    return step_4\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    files = {
        "README.md": "one two\n",
        "docs/glossary.md": "| word | meaning |\n|---|---|\n| **lease, fence** | both |\n| **node** | one |\n",
        "src/oncewire/__init__.py": 'from oncewire.agent.api import Place\n__all__ = ["Place"]\n',
        "src/oncewire/agent/__init__.py": "",
        "src/oncewire/agent/api.py": '__all__ = ["Place"]\nclass Place: ...\nclass Step: ...\n' + SHARED.format(n=1),
        "src/oncewire/agent/other.py": "class Step: ...\nclass _Hidden: ...\n" + SHARED.format(n=2),
        "src/oncewire/broker.py": '__all__ = ["Place"]\nclass Place: ...\nclass Step: ...\n',
        "src/oncewire/_ground/settings.py": "class Settings:\n    a: int = 1\n    b: int = 2\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_every_figure_is_counted_from_the_files(project: Path) -> None:
    measured = size.measure(project)
    source_lines = sum(len(path.read_text().splitlines()) for path in project.rglob("*.py"))
    assert source_lines == measured["lines_of_src"]
    assert (2, 3) == (measured["settings"], measured["words_of_glossary"])
    assert 2 + len((project / "docs" / "glossary.md").read_text().split()) == measured["words_of_docs"]


def test_a_name_that_is_only_handed_on_is_exported_once(project: Path) -> None:
    assert {"Place": ["oncewire.agent.api.Place", "oncewire.broker.Place"]} == size.measure(project)["exported_twice"]


def test_only_classes_of_one_package_have_several_meanings(project: Path) -> None:
    expected = {"agent: Step": ["oncewire.agent.api", "oncewire.agent.other"]}
    assert expected == size.measure(project)["several_meanings"]


def test_a_duplicate_is_as_long_as_it_goes(project: Path) -> None:
    expected = [["oncewire/agent/api.py:5", "oncewire/agent/other.py:4", 6]]
    assert expected == size.measure(project)["duplicate_pairs"]


def test_the_command_measures_this_project(project: Path) -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--json"], capture_output=True, text=True, check=True)
    measured = json.loads(done.stdout)
    assert measured["settings"] > 50
    assert measured["lines_of_src"] > 10_000
    shown = subprocess.run(
        [sys.executable, str(SCRIPT), "--root", str(project)], capture_output=True, text=True, check=True
    )
    assert "several meanings         1  (agent: Step)" in shown.stdout
