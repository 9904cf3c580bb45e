"""Text for users is plain English: the list of phrases to avoid, and counts of them that only fall."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "words.py"
spec = importlib.util.spec_from_file_location("words", SCRIPT)
assert spec is not None
assert spec.loader is not None
words = importlib.util.module_from_spec(spec)
spec.loader.exec_module(words)


def test_no_file_has_more_of_these_phrases_than_it_had() -> None:
    """`make words` says where they are, and what to write instead."""
    known, found = words.allowed(), words.counts()
    assert {} == {file: count for file, count in found.items() if count > known.get(file, 0)}


def test_the_counts_are_those_of_today() -> None:
    """So that none comes back where one went: `scripts/words.py --lower` writes them down."""
    known, found = words.allowed(), words.counts()
    assert {} == {file: count for file, count in known.items() if count > found.get(file, 0)}


@pytest.mark.parametrize(
    "text",
    [
        "Who resumes is in the room already.", "It is kept. Who asks is answered.", "Whoever comes next has it.",
        "The terminal of who looks at it.", "What cannot be processed is kept.", "It stands in the ledger.",
        "It stood there.", "List so many at most.", "So long a batch may hold it.", "Nobody pulls.",
        "for somebody else", "This is no UUID.", "Replicas are no backup.", "It is made\nanew.", "Mend the subject.",
        "once this is mended", "It is told so.", "A message that was given up.", "The node is gone.",
        "It was taken in.", "requests in hand", "It is said at the top.", "when it is asked of NATS",
        "It goes on by itself.", "Kept for ever.", "They start at once.", "replaced as\na whole", "where 4× is wanted",
    ],
)  # fmt: skip
def test_a_phrase_is_found(text: str) -> None:
    assert any(phrase.pattern.search(text) for phrase in words.phrases())


@pytest.mark.parametrize(
    "text",
    [
        "Who may read this?", "What does it promise?", "## What it promises", "It stands for a service.",
        "Process 7 stands still.", "as long as it lives", "so long as it lives", "There is no UUID in it.",
        "It is no longer there.", "0 is no limit.", "A message is taken from the stream.", "The user who asked.",
        "It is asking for more.", "the ones that were wanting", "a whole number", "understands", "amended",
    ],
)  # fmt: skip
def test_plain_english_is_not(text: str) -> None:
    assert [] == [phrase.pattern.pattern for phrase in words.phrases() if phrase.pattern.search(text)]


def test_what_users_read_is_looked_at_and_nothing_else(tmp_path: Path) -> None:
    files = {
        "README.md": "It stands.\n\n```\nIt stands.\n```\n\n`it stands` [here](it stands)\n",
        "docs/reference/cli.md": "It stands.\n",
        "src/oncewire/_ground/errors.py": (
            'class Gone(Exception):\n    """It stands."""\n\n\nclass A:\n    x = "stands"\n'
        ),
        "src/oncewire/part.py": '"""It stands."""\n# it stands\n\n\ndef f():\n    """It stands."""\n'
        '    raise ValueError("it stands")\n\n\n@click.command()\ndef g():\n    """It stands."""\n',
        "src/oncewire/demo/page/a.js": '// it stands\nconst stands = "it stands";\n/* it stands */ x("stands");\n',
        str(words.PHRASES): (words.ROOT / words.PHRASES).read_text("utf-8"),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert [
        ("README.md", 1), ("src/oncewire/_ground/errors.py", 2), ("src/oncewire/demo/page/a.js", 2),
        ("src/oncewire/part.py", 7), ("src/oncewire/part.py", 12),
    ] == sorted((hit.file, hit.line) for hit in words.hits(tmp_path))  # fmt: skip


def test_counts_are_written_down_and_never_up(tmp_path: Path) -> None:
    (tmp_path / "tests" / "words").mkdir(parents=True)
    (tmp_path / words.PHRASES).write_text((words.ROOT / words.PHRASES).read_text("utf-8"))
    (tmp_path / words.ALLOWED).write_text(json.dumps({"A.md": 3, "B.md": 1, "C.md": 1}))
    (tmp_path / "A.md").write_text("It stands. It stood.\n")
    (tmp_path / "B.md").write_text("It stands. It stood.\n")
    (tmp_path / "C.md").write_text("It is.\n")
    assert ["B.md"] == words.lower(tmp_path)
    assert {"A.md": 2, "B.md": 1} == words.allowed(tmp_path)
