"""Runs a page of the documentation as a reader would: files are saved, commands typed into one shell, answers compared.

```python shop.py        is saved under that name
```console               is typed; what is shown must come, `…` stands for anything
```console long          the same, in the long form alone
```console elsewhere     runs already (`oncewire up`), or cannot be run by a test (`pip install`)
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ANSWER_S = 120.0
_BLOCK = re.compile(r"^```(?P<kind>\w+)(?P<more>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)

_ABOUT_JOBS = re.compile(r"^bash: line \d+: +\d+ (?:Killed|Terminated) .*\n", re.MULTILINE)
"""What a shell says of a job in the background when it likes."""


class Block(NamedTuple):
    kind: str
    more: str
    text: str


def blocks(page: Path) -> list[Block]:
    return [Block(one["kind"], one["more"].strip(), one["text"]) for one in _BLOCK.finditer(page.read_text("utf-8"))]


def typed(text: str) -> Iterator[tuple[str, str]]:
    """Each command of a console, with what is shown below it."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, shown = part.partition("\n")
        yield command, shown


def fits(shown: str, said: str) -> bool:
    """Columns may be wider than on the page: how wide depends on rows that it does not show, such as a full disk's."""
    shown, said = (re.sub(r" {2,}", "  ", text.strip()) for text in (shown, said))
    pattern = ".*".join(re.escape(one) for one in shown.split("…"))
    return re.fullmatch(pattern, said, re.DOTALL) is not None


class Shell:
    """One bash in a folder: variables, jobs and `$!` last from command to command."""

    END = "-- end of the answer --"

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        self._said = folder / ".said"
        self._process = subprocess.Popen(
            ["bash"], cwd=folder, env=dict(environ), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, command: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # Into a file: a job in the background must not keep the answer open.
        self._process.stdin.write(f"{{ {command}\n}} > {self._said} 2>&1 < /dev/null; echo '{self.END}'\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.strip() == self.END:
                return _ABOUT_JOBS.sub("", self._said.read_text("utf-8"))
        raise AssertionError(f"the shell ended at: {command}")

    def close(self) -> None:
        """Whatever is still in the background ends with the shell."""
        self.run("kill $(jobs -p) 2>/dev/null; wait")
        self._process.communicate(timeout=ANSWER_S)


def follow(page: Path, folder: Path, environ: Mapping[str, str], *, nats_url: str, is_long: bool = False) -> None:
    """`nats_url` is for programs, which look for the server at its usual port; commands ask the folder."""
    shell = Shell(folder, environ)
    try:
        for block in blocks(page):
            if block.kind == "console" and block.more in (("", "long") if is_long else ("",)):
                for command, shown in typed(block.text):
                    said = shell.run(re.sub(r"^python ", f"NATS_URL={nats_url} python ", command))
                    assert fits(shown, said), f"$ {command}\n{said}\n-- the page shows --\n{shown}"
            elif block.kind in ("python", "toml") and block.more:
                (folder / block.more).write_text(block.text)
    finally:
        shell.close()
