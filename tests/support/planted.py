"""Secrets that a test plants everywhere where one may stand, and looks for everywhere where none may."""

from __future__ import annotations

import base64
import secrets
from pathlib import Path
from urllib.parse import quote


class Planted:
    """Secrets by what they are. Each is random, so that a find is no accident."""

    def __init__(self) -> None:
        self._kept: dict[str, str] = {}

    def make(self, what: str) -> str:
        """A new one, with characters that must be quoted in an address."""
        return self.keep(what, f"{secrets.token_hex(12)}@/{secrets.token_hex(6)}")

    def keep(self, what: str, text: str) -> str:
        self._kept[what] = text
        return text

    def found_in(self, said: str | bytes) -> list[str]:
        """Which of them stand there, plainly or in a form that anybody can turn back."""
        text = said.encode() if isinstance(said, str) else said
        return [what for what, secret in self._kept.items() if any(form in text for form in _forms(secret))]

    def __getitem__(self, what: str) -> str:
        return self._kept[what]


def _forms(secret: str) -> list[bytes]:
    raw = secret.encode()
    coded = [base64.b64encode(raw), base64.urlsafe_b64encode(raw)]
    return [raw, quote(secret).encode(), quote(secret, safe="").encode(), raw.hex().encode(),
            *(one.rstrip(b"=")[:-1] for one in coded)]  # fmt: skip


def quoted(secret: str) -> str:
    return quote(secret, safe="")


def files_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def processes_of(pid: int) -> list[int]:
    """A process and all that it has started, with what those have started."""
    found, children = [pid], [pid]
    while children:
        listed = Path(f"/proc/{children[0]}/task").glob("*/children")
        more = [int(one) for path in listed for one in _words(path)]
        children = [*children[1:], *more]
        found += more
    return found


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:  # it has ended meanwhile
        return []


def command_and_environ(pid: int) -> tuple[bytes, bytes]:
    """What everybody can read of a process, and what its own user can; empty when it has ended meanwhile."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes(), Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b"", b""
