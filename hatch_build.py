"""Compiles `src/oncewire/_ground/native/core.c` when a wheel is built or the project is installed from its folder.

Without a compiler or Python's headers the build goes on without it: everything works, some of it slower
(docs/decisions/native.md). ONCEWIRE_NATIVE=0 leaves it out, ONCEWIRE_NATIVE=1 makes a build fail that cannot compile.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path("src/oncewire/_ground/native/core.c")
FLAGS = ["-O3", "-std=c11", "-Wall", "-Wextra", "-fPIC", "-fvisibility=hidden"]


class NativeHook(BuildHookInterface):  # type: ignore[type-arg]  # hatchling's own parameter
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        wanted = os.environ.get("ONCEWIRE_NATIVE", "")
        if self.target_name != "wheel" or wanted == "0":
            return
        try:
            made = compiled(Path(self.root))
        except (OSError, subprocess.CalledProcessError) as error:
            if wanted == "1":
                raise
            told = getattr(error, "stderr", "") or str(error)
            self.app.display_warning(f"oncewire is built without its compiled loops: {told.strip().splitlines()[-1:]}")
            return
        if version == "standard":
            build_data["pure_python"] = False
            build_data["infer_tag"] = True
            build_data["force_include"][str(made)] = str(made.relative_to(Path(self.root) / "src"))


def compiled(root: Path) -> Path:
    """The module, beside its source; one file for each version of Python."""
    source = root / SOURCE
    made = source.with_name(f"core{sysconfig.get_config_var('EXT_SUFFIX')}")
    link = shlex.split(os.environ.get("LDSHARED") or sysconfig.get_config_var("LDSHARED") or "cc -shared")
    include = f"-I{sysconfig.get_paths()['include']}"
    fresh = made.with_name(f"{made.name}.{os.getpid()}")
    try:
        subprocess.run(  # noqa: S603 - Python's own compiler
            [*link, *FLAGS, include, str(source), "-o", str(fresh)], check=True, capture_output=True, text=True
        )
        fresh.replace(made)  # a process that has the old one open keeps it
    finally:
        fresh.unlink(missing_ok=True)
    return made
