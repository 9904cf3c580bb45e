"""Reads the shipped catalogs and the user's files. The thin shell around files.py and lint.py."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path

from oncewire._ground import settings as settings_of
from oncewire._ground.errors import InvalidSetting
from oncewire._ground.settings import Settings
from oncewire._ground.topology.files import FILE_BYTES_MAX, Declared, Source, declare
from oncewire._ground.topology.findings import errors
from oncewire._ground.topology.lint import lint
from oncewire._ground.topology.model import Env, Topology

CATALOGS = ("runtime", "contracts", "platform", "chat", "buckets", "dlq", "broker", "released")
"""In the order in which streams are made: dead letters last, since they come out of all others."""

SHOWN_MAX = 5


@cache
def shipped() -> tuple[Source, ...]:
    folder = resources.files("oncewire._ground.topology") / "catalogs"
    return tuple(Source(f"{name}.toml", (folder / f"{name}.toml").read_text("utf-8")) for name in CATALOGS)


def examine(files: Sequence[Path] = (), settings: Settings | None = None) -> Declared:
    """The declared topology with every finding, right or wrong."""
    chosen = settings if settings is not None else settings_of.load().settings
    named = [Path(one.strip()) for one in chosen.topology_files.split(",") if one.strip()]
    topology, found = declare(shipped(), [read(path) for path in (*named, *files)], chosen)
    return Declared(topology, (*found, *lint(topology)))


def load(files: Sequence[Path] = (), settings: Settings | None = None, env: Env | None = None) -> Topology:
    """The declared topology, refused when lint finds an error. Without settings: those of this process."""
    chosen = settings if settings is not None else settings_of.load().settings
    topology, findings = examine(files, chosen)
    wrong = errors(findings)
    if wrong:
        shown = "; ".join(f"{one.place}: {one.message}" for one in wrong[:SHOWN_MAX])
        more = f"; and {len(wrong) - SHOWN_MAX} more" if len(wrong) > SHOWN_MAX else ""
        raise InvalidSetting(
            f"the declared topology has {len(wrong)} error{'s' * (len(wrong) > 1)}: {shown}{more}",
            hint="See `oncewire topology lint`.",
        )
    return topology.for_env(env or Env(chosen.env))


def read(path: Path) -> Source:
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise InvalidSetting(f"{path} cannot be read: {error.strerror}", hint="Check --file.") from None
    if len(content) > FILE_BYTES_MAX:
        raise InvalidSetting(f"{path} is larger than {FILE_BYTES_MAX >> 10} KiB", hint="Is it a topology?")
    try:
        return Source(str(path), content.decode())
    except UnicodeDecodeError as error:
        raise InvalidSetting(
            f"{path} is not UTF-8: bad byte at position {error.start}", hint="Save it as UTF-8 text."
        ) from None
