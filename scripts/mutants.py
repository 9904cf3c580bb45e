"""Breaks the rules on purpose, one small place at a time, and lists what no test noticed. `make mutants`.

A mutant is one change in one pure file: a comparison swapped, a `not` dropped, a number one higher, `and` for `or`, a
function that returns at once, a statement left out. The sample is drawn by `--seed`, so a run can be repeated. Each
mutant is tried in a copy of the project, against the tests in tests/rules that import its module. What survives is
either a test that is missing, or a change that changes nothing: a person decides.

    scripts/mutants.py --seed 7 --count 40
    scripts/mutants.py --module dlq/rules.py --module broker/rules.py --count 20
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
SOURCE: Final = Path("src") / "oncewire"
LIMIT_S: Final = 300.0
"""A mutant whose tests take longer counts as caught: it loops."""
COPIED: Final = ("src", "tests", "docs", "clients", "deploy", "scripts", "infra", "examples", "benchmarks")

_COMPARISONS: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_FUNCTIONS: Final = ast.FunctionDef | ast.AsyncFunctionDef
_DROPPED: Final = ast.AugAssign | ast.Raise | ast.Continue | ast.Break | ast.Delete

Edit = Callable[[], None]


@dataclass(frozen=True)
class Mutant:
    """One change: a file, its whole mutated text, and what a person must know of it."""

    path: Path
    line: int
    change: str
    text: str


def count_mutants(text: str) -> int:
    """How many can be made of a file."""
    return sum(1 for _ in _edits(ast.parse(text)))


def make_mutant(path: Path, text: str, number: int) -> Mutant:
    """One of them."""
    tree = ast.parse(text)
    for at, (line, change, edit) in enumerate(_edits(tree)):
        if at == number:
            edit()
            return Mutant(path, line, change, ast.unparse(ast.fix_missing_locations(tree)) + "\n")
    raise AssertionError(number)


def _edits(tree: ast.Module) -> Iterator[tuple[int, str, Edit]]:
    """Each place with what is done there, in the order of the tree. Annotations and texts are left alone."""
    left_alone = {id(inner) for node in ast.walk(tree) for one in _annotations(node) for inner in ast.walk(one)}
    for node in ast.walk(tree):
        if id(node) in left_alone:
            continue
        if isinstance(node, ast.Compare):
            for at in range(len(node.ops)):
                yield _compared(node, at)
        elif isinstance(node, ast.BoolOp):
            yield _joined(node)
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield _raised(node)
        elif isinstance(node, _FUNCTIONS) and not _is_protocol(node):
            yield node.lineno, f"{node.name} returns at once", lambda node=node: node.body.insert(0, ast.Return())
        yield from _within(node)


def _annotations(node: ast.AST) -> Iterator[ast.expr]:
    for name in ("annotation", "returns"):
        if isinstance(found := getattr(node, name, None), ast.expr):
            yield found


def _is_protocol(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """A body that is only a text or `...` says nothing that could be left out."""
    return all(isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant) for one in node.body)


def _compared(node: ast.Compare, at: int) -> tuple[int, str, Edit]:
    before = ast.unparse(node)
    changed = copy.deepcopy(node)
    changed.ops[at] = _COMPARISONS[type(node.ops[at])]()

    def edit() -> None:
        node.ops[at] = changed.ops[at]

    return node.lineno, f"{before}  →  {ast.unparse(changed)}", edit


def _joined(node: ast.BoolOp) -> tuple[int, str, Edit]:
    other = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
    changed = ast.BoolOp(other, node.values)

    def edit() -> None:
        node.op = other

    return node.lineno, f"{ast.unparse(node)}  →  {ast.unparse(changed)}", edit


def _raised(node: ast.Constant) -> tuple[int, str, Edit]:
    def edit() -> None:
        node.value += 1  # type: ignore[operator]

    return node.lineno, f"{node.value}  →  {node.value + 1}", edit  # type: ignore[operator]


def _within(node: ast.AST) -> Iterator[tuple[int, str, Edit]]:
    """What is done by the parent: a child of it is replaced."""
    for name, value in ast.iter_fields(node):
        if isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.Not):
            yield (
                value.lineno,
                f"{ast.unparse(value)}  →  {ast.unparse(value.operand)}",
                lambda name=name, value=value: setattr(node, name, value.operand),
            )
        for at, child in enumerate(value if isinstance(value, list) else ()):
            if isinstance(child, ast.UnaryOp) and isinstance(child.op, ast.Not):
                operand = child.operand
            elif isinstance(child, ast.stmt) and _may_go(child):
                operand = ast.Pass()
            else:
                continue
            change = f"{ast.unparse(child).splitlines()[0]}  →  {ast.unparse(operand)}"
            yield child.lineno, change, lambda value=value, at=at, operand=operand: value.__setitem__(at, operand)


def _may_go(statement: ast.stmt) -> bool:
    """Without an assignment to a name, what follows would not run at all: that tells nothing about the tests."""
    if isinstance(statement, ast.Assign):
        return all(isinstance(one, ast.Attribute | ast.Subscript) for one in statement.targets)
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Call)
    return isinstance(statement, _DROPPED)


# ---- which tests cover a module


def covering(root: Path) -> dict[str, list[str]]:
    """For each module the files in tests/rules that import it, directly or through tests/support. A module that none of
    them imports is covered by the tests of those that import it."""
    imports = {path: _imports(path) for path in sorted((root / "tests").rglob("*.py"))}
    tests: dict[str, set[str]] = {}
    for path in sorted((root / "tests" / "rules").glob("test_*.py")):
        for module in _reached(path, imports, root):
            tests.setdefault(module, set()).add(str(path.relative_to(root)))
    direct = dict(tests)
    for path in sorted((root / SOURCE).rglob("*.py")):
        importer = module_of(path.relative_to(root))
        for module in _imports(path) - direct.keys():
            tests.setdefault(module, set()).update(direct.get(importer, ()))
    return {module: sorted(files) for module, files in tests.items()}


def _imports(path: Path) -> set[str]:
    """Dotted names; `from a import b` may mean the module `a.b`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def _reached(path: Path, imports: dict[Path, set[str]], root: Path) -> set[str]:
    reached: set[str] = set()
    waiting, seen = [path], {path}
    while waiting:
        for name in imports[waiting.pop()]:
            support = root / f"{name.replace('.', '/')}.py"
            if support in imports and support not in seen:
                seen.add(support)
                waiting.append(support)
            reached.add(name)
    return reached


def module_of(path: Path) -> str:
    """`src/oncewire/dlq/rules.py` is the module `oncewire.dlq.rules`."""
    return ".".join(path.with_suffix("").parts[1:]).removesuffix(".__init__")


# ---- trying them


def choose(files: Iterable[Path], tests: dict[str, list[str]], seed: int, count: int) -> list[Mutant]:
    """A sample of the mutants of all files that have tests; the same for the same seed and the same files."""
    texts = {path: (ROOT / path).read_text("utf-8") for path in files if tests.get(module_of(path))}
    every = [(path, number) for path, text in texts.items() for number in range(count_mutants(text))]
    sample = random.Random(seed).sample(every, min(count, len(every)))  # noqa: S311 - no secret
    return [make_mutant(path, texts[path], number) for path, number in sample]


def copy_project(to: Path) -> None:
    for name in COPIED:
        shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy2(path, to / path.name)


def run(folder: Path, tests: Iterable[str], seed: int) -> bool:
    """Whether all of them pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", f"--hypothesis-seed={seed}"]
    environ = os.environ | {"PYTHONPATH": str(folder / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [*command, *tests], cwd=folder, env=environ, capture_output=True, check=False, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Break the rules in small places, and list what no test noticed.")
    parser.add_argument("--seed", type=int, default=1, help="which sample (default 1)")
    parser.add_argument("--count", type=int, default=30, help="how many mutants (default 30)")
    parser.add_argument("--module", action="append", default=[], help="a file below src/oncewire; may be repeated")
    given = parser.parse_args()
    files = [SOURCE / name for name in given.module] or pure_files()
    if unknown := [str(path) for path in files if not (ROOT / path).is_file()]:
        parser.error(f"there is no {', '.join(unknown)}")
    tests = covering(ROOT)
    for path in files:
        if not tests.get(module_of(path)):
            print(f"no test in tests/rules imports {path}", flush=True)
    chosen = choose(files, tests, given.seed, given.count)
    with tempfile.TemporaryDirectory(prefix="oncewire-mutants-") as name:
        folder = Path(name)
        copy_project(folder)
        needed = sorted({test for mutant in chosen for test in tests[module_of(mutant.path)]})
        if not run(folder, needed, given.seed):
            print(f"without any mutant these tests do not pass: {' '.join(needed)}", file=sys.stderr)
            return 1
        survivors = [mutant for mutant in chosen if not _is_caught(folder, mutant, tests, given.seed)]
    print(f"\n{len(chosen) - len(survivors)} of {len(chosen)} were caught; seed {given.seed}")
    for mutant in survivors:
        print(f"survived: {mutant.path}:{mutant.line}  {mutant.change}")
    return 0


def _is_caught(folder: Path, mutant: Mutant, tests: dict[str, list[str]], seed: int) -> bool:
    place = folder / mutant.path
    before, began = place.read_text("utf-8"), time.monotonic()
    place.write_text(mutant.text, "utf-8")
    try:
        is_caught = not run(folder, tests[module_of(mutant.path)], seed)
    finally:
        place.write_text(before, "utf-8")
    word = "caught  " if is_caught else "SURVIVED"
    print(f"{word} {time.monotonic() - began:5.1f} s  {mutant.path}:{mutant.line}  {mutant.change}", flush=True)
    return is_caught


def pure_files() -> list[Path]:
    """The files that the house calls pure, which is where decisions are made."""
    sys.path.insert(0, str(ROOT))
    from tests.rules.test_house import pure_files as pure

    return [path.relative_to(ROOT) for path in pure()]


if __name__ == "__main__":
    sys.exit(main())
