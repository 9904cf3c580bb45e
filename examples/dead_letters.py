"""Look at dead letters, fix what was wrong, bring them back: the same as `oncewire dlq ls` and `replay`, from code.

Run it beside `oncewire up`, in the same folder:  python examples/dead_letters.py
Only the dead-letter service and the operator may write dead letters: a program that does so brings such a key.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import oncewire
from oncewire.dlq.letters import Filter, group, read_letters
from oncewire.dlq.replay import Replay, ReplayOptions, inject

SUBJECT = "evt.default.demo.dead-letters.placed"
KEY = Path(os.environ.get("ONCEWIRE_DATA", ".oncewire"), "nats/keys/operator.nk")  # made by `oncewire up`
IDENTITY = {"nkey": str(KEY), "inbox_prefix": "_INBOX_operator"} if KEY.exists() else {}


async def main() -> None:
    async with oncewire.connect(**IDENTITY) as client:
        body = b'{"type": "OrderPlaced", "payload": {"order": 1}}'
        await inject(client, SUBJECT, body, consumer="biller_consumer", cause="TimeoutError: the bank did not answer")
        mine = Filter(consumer="biller_consumer", cause="TimeoutError")
        letters = [found.letter async for found in read_letters(client, mine)]
        for one in group(letters, {}):
            print(f"{one.count} × {one.cause} on {one.subject} for {one.consumer}")
        report = await Replay(client, mine, ReplayOptions(rate_per_s=100)).run()
        print(f"{report.replayed} of {report.matched} replayed")


if __name__ == "__main__":
    asyncio.run(main())
