"""One table of settings: where each value comes from, what it may be, what it is for.

A value is taken from the first of: a flag, an environment variable, `oncewire.toml`, the default. The fields of
`Settings` are that table; nothing else in the package reads the environment. Unknown keys in the file are errors
(a typo must not pass in silence); unknown environment variables are not ours to judge.
"""

from oncewire._ground.masking import MASK, mask_url
from oncewire._ground.settings.rows import Setting, Settings, table
from oncewire._ground.settings.sources import CONFIG_BYTES_MAX, CONFIG_VARIABLE, Resolved, load, read_file, resolve

__all__ = [
    "CONFIG_BYTES_MAX",
    "CONFIG_VARIABLE",
    "MASK",
    "Resolved",
    "Setting",
    "Settings",
    "load",
    "mask_url",
    "read_file",
    "resolve",
    "table",
]
