"""What to type next, as it can be pasted into the terminal of the reader."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

from oncewire._ground.settings import Settings, mask_url

DATA = Path(".oncewire")
EVENT = '{"type": "OrderPlaced", "payload": {"order": 1}}'
ORDER = '{"type": "charge", "payload": {"id": "mine-1", "item": "bicycle"}}'


def next_commands(chosen: Settings, *, has_shop: bool) -> str:
    """Three commands beside a running `up`: look at the agent or the system, list dead letters, publish an order."""
    data = "" if chosen.data == DATA else f" --data {shlex.quote(str(chosen.data))}"
    lines = _of_the_shop(chosen) if has_shop else _of_any_system()
    return "\n".join(["Next, in another terminal:", *(f"  {_program()} {line}{data}" for line in lines), ""])


def _of_any_system() -> list[str]:
    return ["doctor", "dlq ls", f"publish evt.default.demo.orders.placed {shlex.quote(EVENT)} --id order-1"]


def _of_the_shop(chosen: Settings) -> list[str]:
    from oncewire.demo.shop import COMMAND

    has_password = mask_url(chosen.postgres_url) != chosen.postgres_url
    store = '"$ONCEWIRE_POSTGRES_URL"' if has_password else shlex.quote(chosen.postgres_url)
    return [
        f"agent status oncewire.demo.shop:agent --store {store}",
        "dlq ls",
        f"publish {COMMAND} {shlex.quote(ORDER)} --id mine-1",
    ]


def _program() -> str:
    """How the reader started us, unless the plain name finds the same."""
    program, typed = shutil.which("oncewire"), Path(sys.argv[0])
    if typed.name != "oncewire" or (program is not None and typed.exists() and typed.samefile(program)):
        return "oncewire"
    return shlex.quote(sys.argv[0])
