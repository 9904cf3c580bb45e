"""`make mutants` breaks what it says, in the same places for the same seed."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "mutants.py"
spec = importlib.util.spec_from_file_location("mutants", SCRIPT)
assert spec is not None
assert spec.loader is not None
mutants = importlib.util.module_from_spec(spec)
sys.modules["mutants"] = mutants  # dataclasses look their module up
spec.loader.exec_module(mutants)

HERE = Path("src/oncewire/x.py")


def made_of(text: str) -> list[str]:
    """What each mutant of a text says, without the text that all of them keep."""
    return [mutants.make_mutant(HERE, text, number).text for number in range(mutants.count_mutants(text))]


@pytest.mark.parametrize(
    ("expression", "mutated"),
    [
        ("a == b", ["a != b"]),
        ("a < b <= c", ["a <= b <= c", "a < b < c"]),
        ("a is not b", ["a is b"]),
        ("a in b", ["a not in b"]),
        ("not a", ["a"]),
        ("f(not a)", ["f(a)"]),
        ("a and b", ["a or b"]),
        ("a or b", ["a and b"]),
        ("7", ["8"]),
        ("True", []),
        ("'7'", []),
    ],
)
def test_an_expression_is_changed_in_one_place(expression: str, mutated: list[str]) -> None:
    assert [f"x = {one}\n" for one in mutated] == made_of(f"x = {expression}")


@pytest.mark.parametrize(
    "statement", ["self.x = y", "x[y] = z", "x += y", "f(x)", "raise x", "del x"], ids=lambda text: text
)
def test_a_statement_is_left_out(statement: str) -> None:
    whole = f"def g():\n    {statement}\n"
    left_out, at_once = "def g():\n    pass\n", f"def g():\n    return\n    {statement}\n"
    assert {left_out, at_once} == set(made_of(whole))


def test_names_annotations_and_texts_are_left_alone() -> None:
    text = '"""Text."""\nfrom a import b\nclass C:\n    x: Annotated[int, 5]\n    def f(self) -> tuple[3]: ...\ny = b\n'
    assert [] == made_of(text)


def test_a_mutant_says_where_it_is_and_is_python() -> None:
    text = "def f(a, b):\n    if a and not b:\n        return 1\n    return a\n"
    made = [mutants.make_mutant(HERE, text, number) for number in range(mutants.count_mutants(text))]
    assert all(ast.unparse(ast.parse(one.text)) != ast.unparse(ast.parse(text)) for one in made)
    assert {(1, "f returns at once"), (2, "not b  →  b"), (3, "1  →  2")} <= {(one.line, one.change) for one in made}


def test_a_module_is_covered_by_the_tests_that_import_it_or_what_imports_it(tmp_path: Path) -> None:
    files = {
        "tests/rules/test_a.py": "from oncewire.a import f\n",
        "tests/rules/test_b.py": "from tests.support.kit import g\n",
        "tests/rules/test_c.py": "import json\n",
        "tests/support/kit.py": "from oncewire import b\n",
        "src/oncewire/a.py": "from oncewire.hidden import f\n",
        "src/oncewire/b.py": "",
        "src/oncewire/hidden.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = mutants.covering(tmp_path)
    assert ["tests/rules/test_a.py"] == found["oncewire.a"] == found["oncewire.hidden"]
    assert ["tests/rules/test_b.py"] == found["oncewire.b"]


def test_a_seed_draws_the_same_sample_and_another_one_another() -> None:
    files = [mutants.SOURCE / "topology" / "units.py", mutants.SOURCE / "dlq" / "rules.py"]
    tests = mutants.covering(mutants.ROOT)
    first, again, other = [mutants.choose(files, tests, seed, 12) for seed in (1, 1, 2)]
    assert 12 == len(first)
    assert first == again
    assert first != other


def test_what_survives_is_listed_and_what_a_test_sees_is_not(tmp_path: Path) -> None:
    """In a project of two lines, of which its tests look at one."""
    rules = "def seen(a):\n    return not a\n\n\ndef unseen(a):\n    return not a\n"
    files = {
        "src/oncewire/__init__.py": "",
        "src/oncewire/rules.py": rules,
        "tests/rules/test_it.py": "from oncewire.rules import seen\n\n\n"
        "def test_it():\n    assert [False, True] == [seen(True), seen(False)]\n",
        "scripts/mutants.py": SCRIPT.read_text(),
        "pyproject.toml": "[tool.pytest.ini_options]\n"
        "addopts = ['--disable-plugin-autoload', '-p', '_hypothesis_pytestplugin']\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for name in mutants.COPIED:
        (tmp_path / name).mkdir(exist_ok=True)
    command = [sys.executable, str(tmp_path / "scripts" / "mutants.py"), "--module", "rules.py", "--count", "99"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    survived = {line for line in done.stdout.splitlines() if line.startswith("survived: ")}
    place = "survived: src/oncewire/rules.py"
    assert {f"{place}:5  unseen returns at once", f"{place}:6  not a  →  a"} == survived
    assert "2 of 4 were caught" in done.stdout
