"""Looks for phrases that read as if translated in everything that users read. `make words`.

The phrases, and what to write instead, are in tests/words/phrases.toml. How many of them are still in each file is in
tests/words/allowed.json: a count may only go down. `make check` compares; `make words` shows where they are;
`scripts/words.py --lower` writes the counts down once there are fewer.

    Markdown         without code; docs/reference is made of the code and left out
    Python           texts in the code (errors, hints, help, log lines), and docstrings that are shown: those of
                     commands and of errors
    console, demo    what their pages show
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[1]
PHRASES: Final = Path("tests") / "words" / "phrases.toml"
ALLOWED: Final = Path("tests") / "words" / "allowed.json"
PAGES: Final = ("*.md", "docs/**/*.md", "clients/**/*.md", "examples/**/*.md", "benchmarks/**/*.md")
MADE: Final = Path("docs") / "reference"
SHOWN: Final = ("src/oncewire/*/page/**/*.js", "src/oncewire/*/page/**/*.html")
_FENCED: Final = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_CODE: Final = re.compile(r"`[^`\n]*`|\]\([^)\n]*\)")
_SCRIPT: Final = re.compile(
    r"""//.*?$ | /\*.*?\*/ | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*' | `(?:\\.|[^`\\])*`""",
    re.MULTILINE | re.DOTALL | re.VERBOSE,
)
_INSERTED: Final = re.compile(r"\$\{[^{}]*\}")


class Phrase(NamedTuple):
    pattern: re.Pattern[str]
    write: str


class Hit(NamedTuple):
    """A phrase in a file."""

    file: str
    line: int
    found: str
    write: str


def phrases(root: Path = ROOT) -> list[Phrase]:
    rows = tomllib.loads((root / PHRASES).read_text("utf-8"))["phrases"]
    return [Phrase(re.compile(row["avoid"].replace(" ", r"\s"), re.MULTILINE), row["write"]) for row in rows]


def hits(root: Path = ROOT) -> Iterator[Hit]:
    """All of them, file after file."""
    avoided = phrases(root)
    for path in files(root):
        for line, text in texts(path):
            for phrase in avoided:
                for match in phrase.pattern.finditer(text):
                    at = line + text.count("\n", 0, match.start())
                    yield Hit(str(path.relative_to(root)), at, match[0].strip(" .;:"), phrase.write)


def files(root: Path) -> list[Path]:
    pages = {path for pattern in PAGES for path in root.glob(pattern) if root / MADE not in path.parents}
    code = {path for pattern in ("src/oncewire/**/*.py", *SHOWN) for path in root.glob(pattern)}
    return sorted(pages) + sorted(code)


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """What a user may read of a file, each text with the line where it begins."""
    whole = path.read_text("utf-8")
    if path.suffix == ".py":
        yield from _python_texts(ast.parse(whole), is_errors=path.name == "errors.py")
    elif path.suffix == ".md":
        yield 1, _CODE.sub(_blank, _FENCED.sub(_blank, whole))
    elif path.suffix == ".js":
        for match in _SCRIPT.finditer(whole):
            if match[0][0] != "/" and " " in match[0]:
                yield 1 + whole.count("\n", 0, match.start()), _INSERTED.sub("…", match[0][1:-1])
    else:
        yield 1, whole


def _blank(match: re.Match[str]) -> str:
    """Lines keep their numbers."""
    return "\n" * match[0].count("\n")


def _python_texts(tree: ast.Module, *, is_errors: bool) -> Iterator[tuple[int, str]]:
    silent: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            is_shown = _is_command(node) or (is_errors and isinstance(node, ast.ClassDef))
            silent |= set() if is_shown else {id(one.value) for one in node.body if isinstance(one, ast.Expr)}
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and id(node) not in silent and " " in node.value:
            yield node.lineno, node.value


def _is_command(node: ast.AST) -> bool:
    """Its docstring is what `--help` prints."""
    decorators = getattr(node, "decorator_list", [])
    return any(re.search(r"\b(?:command|group)\b", ast.unparse(one)) for one in decorators)


def counts(root: Path = ROOT) -> dict[str, int]:
    """How many by file, without the files that have none."""
    found: dict[str, int] = {}
    for hit in hits(root):
        found[hit.file] = found.get(hit.file, 0) + 1
    return dict(sorted(found.items()))


def allowed(root: Path = ROOT) -> dict[str, int]:
    known: dict[str, int] = json.loads((root / ALLOWED).read_text("utf-8"))
    return known


def lower(root: Path = ROOT) -> list[str]:
    """Write down what is fewer; returns the files that have more, which stay as they were."""
    known, found = allowed(root), counts(root)
    kept = {file: min(count, known.get(file, 0)) for file, count in found.items()}
    written = {file: count for file, count in kept.items() if count}
    (root / ALLOWED).write_text(json.dumps(written, indent=2) + "\n", "utf-8")
    return [file for file, count in found.items() if count > known.get(file, 0)]


def main() -> int:
    parser = argparse.ArgumentParser(description="Phrases that users should not have to read.")
    parser.add_argument("files", nargs="*", help="only in these files")
    parser.add_argument("--lower", action="store_true", help="write the counts down where there are fewer")
    given = parser.parse_args()
    if given.lower:
        more = lower()
        print(*[f"more than allowed: {file}" for file in more], sep="\n", file=sys.stderr)
        return 1 if more else 0
    for hit in hits():
        if not given.files or hit.file in given.files:
            print(f"{hit.file}:{hit.line}: {hit.found!r}: write {hit.write}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
