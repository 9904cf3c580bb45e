"""Where Spark keeps the offsets of each stream's query, and what it means when they are gone.

    <lake>/_checkpoints/<stream>/from-<sequence>    a query that began at this sequence; 0: wherever the stream began

The one with the highest sequence counts. A lake with rows of a stream whose checkpoint is gone is filled no further:
from the stream's beginning it would all be read again, and nobody could tell what is missing. `backfill` makes a new
checkpoint that begins right behind what the lake has.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final
from urllib.parse import quote

from oncewire._ground.errors import Corrupt
from oncewire._ground.files import make_folder

FOLDER: Final = "_checkpoints"
_FROM: Final = "from-"


def folder_of(lake: Path, stream: str) -> Path:
    return lake / FOLDER / quote(stream, safe="")


def current(lake: Path, stream: str) -> tuple[Path, int] | None:
    """The checkpoint that counts and where it began."""
    found = [path for path in folder_of(lake, stream).glob(f"{_FROM}*") if path.name.removeprefix(_FROM).isdigit()]
    starts = {int(path.name.removeprefix(_FROM)): path for path in found}
    return (starts[max(starts)], max(starts)) if starts else None


def has_offsets(checkpoint: Path) -> bool:
    return any((checkpoint / "offsets").glob("[0-9]*"))


def is_midway(checkpoint: Path) -> bool:
    """Whether a batch was begun and not ended: a query that starts there repeats it first."""
    begun = [int(path.name) for path in (checkpoint / "offsets").glob("[0-9]*")]
    return bool(begun) and not (checkpoint / "commits" / str(max(begun))).exists()


def usable(lake: Path, stream: str, reached: int | None) -> tuple[Path, int]:
    """The checkpoint to go on with, a new one where nothing was read yet; Corrupt when it was lost."""
    check(lake, stream, reached)
    return current(lake, stream) or begin(lake, stream, 0)


def check(lake: Path, stream: str, reached: int | None) -> None:
    """Corrupt when the lake has rows of the stream, and its checkpoint is gone."""
    found = current(lake, stream)
    is_lost = found is None or (found[1] == 0 and not has_offsets(found[0]))
    if is_lost and reached is not None:
        raise Corrupt(
            f"the lake has stream {stream} up to sequence {reached}, but its checkpoint is gone: "
            f"{folder_of(lake, stream)}",
            hint=f"`oncewire pipeline backfill {stream}` goes on from what the lake has.",
        )


def begin(lake: Path, stream: str, sequence: int) -> tuple[Path, int]:
    """A fresh checkpoint; whatever stood under its name or behind it goes."""
    folder = folder_of(lake, stream)
    found = current(lake, stream)
    while found is not None and found[1] >= sequence:
        shutil.rmtree(found[0])
        found = current(lake, stream)
    checkpoint = folder / f"{_FROM}{sequence}"
    make_folder(checkpoint)
    return checkpoint, sequence
