"""The FastAPI example: HTTP in, one effect out, drained with the service."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.nats import NatsServer
from tests.support.running import EVENTS, payload_of, prepared, stored
from tests.support.wait import until_async

pytest.importorskip("fastapi", reason="FastAPI is not a dependency: pip install fastapi httpx")
httpx = pytest.importorskip("httpx", reason="FastAPI's own test client needs it: pip install httpx")


async def test_an_order_over_http_is_charged_once(
    server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from examples.fastapi_service import app, lifespan

    monkeypatch.setenv("NATS_URL", server.url)
    monkeypatch.setenv("BILLER_STORE", f"sqlite:///{tmp_path}/biller.db")
    transport = httpx.ASGITransport(app=app)
    async with (
        prepared(server.url),
        lifespan(app),
        httpx.AsyncClient(transport=transport, base_url="http://service") as http,
    ):
        for _ in range(2):
            answer = await http.post("/orders", json={"id": "o1", "cents": 4200})
            assert answer.status_code == 202
        await until_async(lambda: stored(server.url, EVENTS))
        assert (await http.get("/ready")).json()["is_ready"]
    assert [payload_of(one) for one in await stored(server.url, EVENTS)] == [{"order": "o1", "cents": 4200}]
