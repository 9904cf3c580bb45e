"""Where the value of a setting comes from: the first of a flag, an environment variable, the file, the default.

`resolve` reads no file and no environment by itself, it takes them as values; `load` is the thin shell.
"""

from __future__ import annotations

import dataclasses
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oncewire._ground.errors import InvalidSetting
from oncewire._ground.masking import MASK, mask_url
from oncewire._ground.settings.rows import Setting, Settings, table

CONFIG_FILE = "oncewire.toml"
CONFIG_VARIABLE = "ONCEWIRE_CONFIG"
CONFIG_BYTES_MAX = 1 << 20


@dataclass(frozen=True)
class Resolved:
    """The settings in force, with where each value came from (by field name)."""

    settings: Settings
    origins: Mapping[str, str]

    def is_set(self, name: str) -> bool:
        """Somebody chose this value; it is not the default."""
        return self.origins[name] != "default"

    def with_values(self, values: Mapping[str, Any], origin: str) -> Resolved:
        """The same with these fields replaced."""
        return Resolved(dataclasses.replace(self.settings, **values), {**self.origins, **dict.fromkeys(values, origin)})

    def shown(self, row: Setting) -> str:
        """The value as a person may see it: secrets masked, passwords inside addresses too."""
        value = str(getattr(self.settings, row.name))
        if row.is_secret and value and "://" not in value:
            return MASK
        return mask_url(value)


def resolve(
    flags: Mapping[str, Any], environ: Mapping[str, str], file: Mapping[str, Any], file_name: str = CONFIG_FILE
) -> Resolved:
    """Pick each value from the first place that has it. `flags` is by field name, None meaning not given."""
    from_file = _flatten(file, file_name)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for row in table():
        raw, origin = _first(row, flags, environ, from_file, file_name)
        values[row.name] = row.default if origin == "default" else _parse(row, raw, origin)
        origins[row.name] = origin
    return Resolved(Settings(**values), origins)


def _first(
    row: Setting, flags: Mapping[str, Any], environ: Mapping[str, str], from_file: Mapping[str, Any], file_name: str
) -> tuple[Any, str]:
    if flags.get(row.name) is not None:
        return flags[row.name], f"flag {row.flag}"
    found = [(name, environ[name]) for name in row.variables if environ.get(name, "") != ""]
    if len({value for _, value in found}) > 1:
        raise InvalidSetting(
            f"{' and '.join(name for name, _ in found)} differ, and both mean {row.key}",
            hint="Set one of them, or both to the same value.",
        )
    if found:
        return found[0][1], f"variable {found[0][0]}"
    if row.key in from_file:
        return from_file[row.key], f"file {file_name}"
    return row.default, "default"


def _flatten(file: Mapping[str, Any], file_name: str) -> dict[str, Any]:
    known = {row.key for row in table()}
    sections = {key.partition(".")[0] for key in known if "." in key}
    flat: dict[str, Any] = {}
    for name, value in file.items():
        if name in sections:
            if not isinstance(value, Mapping):
                raise InvalidSetting(f"{file_name}: {name} must be a section", hint=f"Write it as [{name}].")
            flat |= {f"{name}.{inner}": given for inner, given in value.items()}
        else:
            flat[name] = value
    for key in flat:
        if key not in known:
            raise InvalidSetting(
                f"{file_name}: there is no setting {key!r}", hint=_nearest(key, known) or "See `oncewire config`."
            )
    return flat


def _nearest(key: str, known: set[str]) -> str:
    import difflib  # only on the way to an error

    near = difflib.get_close_matches(key, sorted(known), n=1)
    return f"Did you mean {near[0]!r}?" if near else ""


def _parse(row: Setting, raw: Any, origin: str) -> Any:
    value = _convert(row, raw)
    wrong = f"must be {_KIND[row.type]}" if value is None else row.check(value) if row.check else None
    if wrong:
        got = MASK if row.is_secret else repr(mask_url(raw) if isinstance(raw, str) else raw)
        raise InvalidSetting(f"{row.key} {wrong}, not {got} (from {origin})", hint=row.help)
    return value


_KIND: dict[type, str] = {str: "text", int: "a whole number", Path: "a path"}


def _convert(row: Setting, raw: Any) -> Any:
    """The raw value as the row's type, None when it is not of that type."""
    if row.type is int:
        if isinstance(raw, int) and not isinstance(raw, bool):
            return raw
        return int(raw) if isinstance(raw, str) and re.fullmatch(r"[+-]?[0-9]{1,18}", raw.strip()) else None
    if not isinstance(raw, str | Path) or "\0" in str(raw):
        return None
    return row.type(raw)


def read_file(path: Path) -> dict[str, Any]:
    """Parse a config file; every way in which it can be bad is one sentence."""
    try:
        with path.open("rb") as file:
            content = file.read(CONFIG_BYTES_MAX + 1)
        if len(content) > CONFIG_BYTES_MAX:
            raise InvalidSetting(f"{path} is larger than {CONFIG_BYTES_MAX} bytes", hint="Is it a config file?")
        return tomllib.loads(content.decode())
    except OSError as error:
        raise InvalidSetting(f"{path} cannot be read: {error.strerror}", hint="Check --config and the file.") from None
    except UnicodeDecodeError as error:
        raise InvalidSetting(
            f"{path} is not UTF-8: bad byte at position {error.start}", hint="Save it as UTF-8 text."
        ) from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InvalidSetting(f"{path} is not valid TOML: {error}", hint="Mend that line, or remove the file.") from None


def load(flags: Mapping[str, Any] | None = None, config: Path | None = None) -> Resolved:
    """The settings of this process: flags, its environment, and the file named or found in the current folder."""
    environ = os.environ
    path = config or (Path(environ[CONFIG_VARIABLE]) if environ.get(CONFIG_VARIABLE) else None)
    if path is None:
        path = Path(CONFIG_FILE)
        file = read_file(path) if path.exists() else {}
    else:
        file = read_file(path)
    return resolve(flags or {}, environ, file, str(path))
