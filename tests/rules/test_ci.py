"""The workflows are valid: actions are pinned by commit, and what they name is there."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
CI = ROOT / ".github" / "workflows" / "ci.yml"
workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)


def load(path: Path) -> dict[str, Any]:
    return dict(yaml.safe_load(path.read_text("utf-8")))


def steps(path: Path) -> Iterator[dict[str, Any]]:
    for job in load(path)["jobs"].values():
        yield from job["steps"]


@workflow
def test_it_may_only_read_and_every_job_ends(path: Path) -> None:
    loaded = load(path)
    assert {"contents": "read"} == loaded["permissions"]
    assert all(job["timeout-minutes"] <= 360 for job in loaded["jobs"].values())


@workflow
def test_every_action_is_pinned_by_its_commit(path: Path) -> None:
    actions = [step["uses"] for step in steps(path) if "uses" in step]
    assert actions
    assert [] == [action for action in actions if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action)]


@workflow
def test_every_command_names_targets_and_tests_that_exist(path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for command in (step["run"] for step in steps(path) if "run" in step):
        for target in re.findall(r"\bmake ([a-z-]+)", command):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
        for pattern in re.findall(r"tests/[\w/*.]+", command):
            assert list(ROOT.glob(pattern)), pattern


def test_every_folder_of_tests_runs_on_every_python_that_is_supported() -> None:
    matrix = load(CI)["jobs"]["tests"]["strategy"]["matrix"]
    folders = {folder for part in matrix["include"] for folder in part["folders"].split()}
    assert set(matrix["part"]) == {part["part"] for part in matrix["include"]}
    with_tests = {path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "tests").glob("*/test_*.py")}
    assert with_tests == folders | {"tests/faults"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    supported = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    assert supported == matrix["python"]
