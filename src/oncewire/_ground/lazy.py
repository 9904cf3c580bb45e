"""Names of a package that are imported when they are first used.

`oncewire --help` need not load TLS and cryptography, and a Spark worker that needs the NATS parser need not load the
client: a package's `__init__` lists where its names live, and this finds them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping


def exports(
    package: str, homes: Mapping[str, str], modules: Mapping[str, str] | None = None
) -> Callable[[str], object]:
    """A module's `__getattr__`: `homes` maps each public name to the module that defines it, `modules` each public
    module to the place where it is."""

    def find(name: str) -> object:
        if modules and name in modules:
            return importlib.import_module(modules[name])
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(home), name)

    return find
