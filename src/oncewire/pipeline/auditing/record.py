"""What audits have seen of a lake, kept outside it: who can change the lake, its verdicts included, need not be able to
change this. A file, or an object in another bucket or account.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from oncewire._ground.errors import Corrupt, InvalidSetting
from oncewire.pipeline.auditing.verdict import Known
from oncewire.pipeline.lake.place import Place, place_of


class Record:
    """One lake's."""

    def __init__(self, where: str | Path | Place, lake: str | Path | Place) -> None:
        self.place = place_of(where)
        if f"{self.place}/".startswith(f"{place_of(lake)}/"):
            raise InvalidSetting(
                f"the record of audits {self.place} is inside the lake that it is about",
                hint="Keep it where the lake's writers cannot: see pipeline.audit_record.",
            )

    def read(self) -> Known | None:
        """None before the first audit."""
        try:
            return msgspec.json.decode(self.place.read(), type=Known)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            raise Corrupt(
                f"the record of audits {self.place} cannot be read: {error}",
                hint="Find out who changed it. Without it, the next audit compares the lake with nothing outside it.",
            ) from None

    def write(self, known: Known) -> None:
        self.place.replace(msgspec.json.encode(known))


def default_record(data: Path, lake: Place) -> Path:
    """In the data folder, one for each lake."""
    digest = hashlib.blake2b(str(lake).encode(), digest_size=6).hexdigest()
    return data.expanduser().absolute() / "audits" / f"{str(lake).rpartition('/')[2]}-{digest}.json"
