"""How large the project is, and what of it is there more than once. `make size`, `scripts/size.py --json`.

A direction, not a limit: nothing here fails. Every figure is counted from the files alone, so another commit's checkout
can be measured too (`--root`).

    lines of src       lines of Python below src/oncewire
    settings           fields of the class Settings
    words of docs      of README, ARCHITECTURE, CONTRIBUTING, SECURITY and docs/, split at spaces
    words of glossary  terms that docs/glossary.md explains
    exported twice     names that two `__all__` lists give to different things
    several meanings   class names that two modules of one package define
    duplicate pairs    pairs of places with the same five lines or more (without blank lines, comments and imports)
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any, Final

WINDOW_LINES: Final = 5
PAGES: Final = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md")
_TERM: Final = re.compile(r"^\| \*\*(.+?)\*\*", re.MULTILINE)

Place = tuple[str, int]
"""A file and a line in it."""


class Module:
    """One file of the source and its syntax tree."""

    def __init__(self, path: Path, source: Path) -> None:
        self.path = path
        self.text = path.read_text("utf-8")
        self.tree = ast.parse(self.text)
        parts = path.relative_to(source).with_suffix("").parts
        self.name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def package(self) -> str:
        """The part of the project: `agent` of `oncewire.agent.batch`."""
        return self.name.split(".")[1] if "." in self.name else self.name

    def exports(self) -> list[str]:
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and any(getattr(one, "id", "") == "__all__" for one in node.targets):
                return list(ast.literal_eval(node.value))
        return []

    def imports(self) -> dict[str, tuple[str, str]]:
        """Names that come from another module: which one, and what they are called there."""
        return {
            alias.asname or alias.name: (node.module or "", alias.name)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }

    def classes(self) -> list[ast.ClassDef]:
        return [node for node in self.tree.body if isinstance(node, ast.ClassDef)]


def measure(root: Path) -> dict[str, Any]:
    source = root / "src"
    modules = [Module(path, source) for path in sorted((source / "oncewire").rglob("*.py"))]
    twice = exported_twice(modules)
    meanings = several_meanings(modules)
    pairs = duplicate_pairs(modules, source)
    return {
        "lines_of_src": sum(one.text.count("\n") for one in modules),
        "settings": count_settings(modules),
        "words_of_docs": sum(len(path.read_text("utf-8").split()) for path in doc_pages(root)),
        "words_of_glossary": len(glossary(root)),
        "exported_twice": twice,
        "several_meanings": meanings,
        "duplicate_pairs": [[f"{file}:{line}" for file, line in pair[:2]] + [pair[2]] for pair in pairs],
    }


def count_settings(modules: list[Module]) -> int:
    found = [one for module in modules for one in module.classes() if one.name == "Settings"]
    fields = [[node for node in one.body if isinstance(node, ast.AnnAssign)] for one in found]
    return max(map(len, fields), default=0)


def doc_pages(root: Path) -> list[Path]:
    return [path for name in PAGES if (path := root / name).exists()] + sorted((root / "docs").rglob("*.md"))


def glossary(root: Path) -> list[str]:
    """A row may explain several terms: `**lease, fence**`."""
    rows = _TERM.findall((root / "docs" / "glossary.md").read_text("utf-8"))
    return [term.strip() for row in rows for term in row.split(",")]


def exported_twice(modules: list[Module]) -> dict[str, list[str]]:
    """Names with the modules that define them, where those are several."""
    by_name = {module.name: module for module in modules}

    def home(module: str, name: str) -> str:
        known = by_name.get(module)
        there = known.imports().get(name) if known else None
        return home(*there) if there and there[0] in by_name and there != (module, name) else f"{module}.{name}"

    homes: dict[str, set[str]] = defaultdict(set)
    for module in modules:
        for name in module.exports():
            homes[name].add(home(module.name, name))
    return {name: sorted(found) for name, found in sorted(homes.items()) if len(found) > 1}


def several_meanings(modules: list[Module]) -> dict[str, list[str]]:
    """Classes of one package that share a name, private ones left out."""
    homes: dict[tuple[str, str], list[str]] = defaultdict(list)
    for module in modules:
        for one in module.classes():
            if not one.name.startswith("_"):
                homes[module.package, one.name].append(module.name)
    return {f"{package}: {name}": found for (package, name), found in sorted(homes.items()) if len(found) > 1}


def duplicate_pairs(modules: list[Module], source: Path) -> list[tuple[Place, Place, int]]:
    """Two places and how many lines they share, each pair as long as it goes."""
    files = {str(one.path.relative_to(source)): list(_lines(one)) for one in modules}
    windows: dict[tuple[str, ...], list[tuple[str, int]]] = defaultdict(list)
    for file, lines in files.items():
        for at in range(len(lines) - WINDOW_LINES + 1):
            windows[tuple(text for _, text in lines[at : at + WINDOW_LINES])].append((file, at))
    equal = {pair for places in windows.values() for pair in combinations(places, 2)}
    pairs = []
    for (file, at), (other, there) in sorted(equal):
        if ((file, at - 1), (other, there - 1)) in equal:
            continue
        length = WINDOW_LINES
        while ((file, at + length - WINDOW_LINES + 1), (other, there + length - WINDOW_LINES + 1)) in equal:
            length += 1
        pairs.append(((file, files[file][at][0]), (other, files[other][there][0]), length))
    return pairs


def _lines(module: Module) -> Iterator[tuple[int, str]]:
    """Lines that say something of their own, with their numbers: no imports, strings that stand alone, brackets."""
    silent: set[int] = set()
    for node in ast.walk(module.tree):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or isinstance(node, ast.Import | ast.ImportFrom):
            silent |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for number, line in enumerate(module.text.splitlines(), 1):
        text = line.strip()
        if number not in silent and not text.startswith("#") and any(sign.isalnum() for sign in text):
            yield number, text


def main() -> None:
    parser = argparse.ArgumentParser(description="Lines, settings, words, and what is there more than once.")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="another checkout")
    parser.add_argument("--json", action="store_true", help="with every name and place")
    given = parser.parse_args()
    found = measure(given.root)
    if given.json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
        return
    for name, value in found.items():
        names = f"  ({', '.join(value)})" if isinstance(value, dict) and value else ""
        count = value if isinstance(value, int) else len(value)
        sys.stdout.write(f"{name.replace('_', ' '):<18} {count:>7,}{names}\n")


if __name__ == "__main__":
    main()
