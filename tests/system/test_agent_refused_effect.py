"""An effect that its stream refuses is never called confirmed: nobody would look for it again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from oncewire._ground.contracts.blocks import Announcement, read_announcement
from oncewire.agent import Context, Effect
from tests.support.nats import NatsServer
from tests.support.running import command, counted, new_agent, prepared, run, send, sqlite_in, stored
from tests.support.wait import until_async

FULL = {
    "name": "EXITS", "subjects": ["exit.>"], "allow_direct": True, "allow_atomic": True, "max_msgs_per_subject": 1,
    "discard": "new", "discard_new_per_subject": True,
}  # fmt: skip
"""It takes one message per subject, and refuses every further one for good."""


async def test_an_effect_that_is_refused_in_the_middle_of_a_block_is_not_confirmed_with_its_neighbours(
    server: NatsServer, tmp_path: Path
) -> None:
    agent = new_agent()

    @agent.on("three")
    def three(ctx: Context, payload: dict[str, Any]) -> list[Effect]:
        return [Effect(f"exit.{name}", {}) for name in ("before", "full", "after")]

    @agent.on("nothing")
    def nothing(ctx: Context, payload: dict[str, Any]) -> None:
        """Its block announces how far everything is confirmed."""

    async def announced() -> list[Announcement]:
        return [read_announcement(one.data) for one in await stored(server.url, "LEDGER")]

    async with prepared(server.url) as client:
        await client.api("STREAM.CREATE.EXITS", FULL)
        await client.publish("exit.full", b"it is taken")
        async with run(agent, client, sqlite_in(tmp_path)) as runner:
            await send(client, command(agent, "three"), {})
            await counted(runner, done=1)
            await until_async(announced, "the first block to be announced")
            await send(client, command(agent, "nothing"), {})
            await counted(runner, done=2)
        blocks = await announced()
        refused = blocks[0].effects[1]
        in_stream = {one.headers.get("Nats-Msg-Id") for one in await stored(server.url, "EXITS") if one.headers}
    assert [True, False, True] == [effect in in_stream for effect in blocks[0].effects]
    assert blocks[-1].number > blocks[0].number
    assert [] == [block.number for block in blocks if block.confirmed.block >= blocks[0].number], refused
