"""What is wrong, or risky, in a declaration: each with its place and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from msgspec import Struct


class Severity(StrEnum):
    ERROR = "error"
    WARNING = "warning"


class Finding(Struct, frozen=True, kw_only=True):
    """`code` is stable and meant for machines; `place` is `file:line table.key`."""

    severity: Severity = Severity.ERROR
    code: str
    place: str
    message: str
    remedy: str


def errors(findings: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.severity is Severity.ERROR]
