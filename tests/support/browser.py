"""A real browser for tests: Chromium, spoken to over its DevTools protocol with the WebSocket client that we have."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

from tests.support.wait import DEADLINE_S, until, until_async, within

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--disable-background-timer-throttling",
    "--disable-renderer-backgrounding", "--disable-backgrounding-occluded-windows", "--hide-scrollbars",
    "--remote-debugging-port=0",
]  # fmt: skip


class Session:
    """One DevTools connection: commands by number, events as they come."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.problems: list[str] = []
        """Exceptions that nobody caught in the page."""
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for text in self._socket:
            said = json.loads(text)
            if "id" in said:
                self._waiting.pop(said["id"]).set_result(said)
            elif said["method"] == "Runtime.exceptionThrown":
                details = said["params"]["exceptionDetails"]
                self.problems.append(details.get("exception", {}).get("description") or details["text"])

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        said = await within(answer, 2 * DEADLINE_S)
        assert "error" not in said, (method, said["error"])
        result: dict[str, Any] = said["result"]
        return result

    async def close(self) -> None:
        await self._socket.close()
        await asyncio.gather(self._reading, return_exceptions=True)


class Tab(Session):
    """One page."""

    async def open(self, url: str, *, width: int, height: int, is_dark: bool) -> None:
        await self.call("Runtime.enable")
        await self.call("Page.enable")
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}]
        await self.call("Emulation.setEmulatedMedia", features=scheme)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        await self.call("Page.navigate", url=url)

    async def evaluate(self, expression: str) -> Any:
        said = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in said, said["exceptionDetails"]
        return said["result"].get("value")

    async def until(self, expression: str, *, deadline_s: float = 2 * DEADLINE_S) -> Any:
        """Wait until an expression is true in the page. It may speak of what is not there yet."""
        guarded = f"(() => {{ try {{ return ({expression}) }} catch {{ return false }} }})()"
        return await until_async(lambda: self.evaluate(guarded), expression, deadline_s=deadline_s)

    async def type(self, text: str) -> None:
        """As keys do it, where the focus is."""
        await self.call("Input.insertText", text=text)

    async def press(self, key: str) -> None:
        codes = {"Enter": 13, "Tab": 9, "Escape": 27}
        what = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **what, **({"text": "\r"} if key == "Enter" else {}))
        await self.call("Input.dispatchKeyEvent", type="keyUp", **what)

    async def screenshot(self, path: Path) -> None:
        said = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(said["data"]))


class Browser:
    """One Chromium process with its own empty profile."""

    def __init__(self, port: int, session: Session, stack: contextlib.AsyncExitStack) -> None:
        self._port = port
        self._session = session
        self._stack = stack

    async def tab(self, url: str, *, width: int = 900, height: int = 760, is_dark: bool = False) -> Tab:
        made = await self._session.call("Target.createTarget", url="about:blank", newWindow=True)
        socket = await connect(f"ws://127.0.0.1:{self._port}/devtools/page/{made['targetId']}", max_size=None)
        tab = Tab(socket)
        self._stack.push_async_callback(tab.close)
        await tab.open(url, width=width, height=height, is_dark=is_dark)
        return tab


@contextlib.asynccontextmanager
async def browser(*flags: str) -> AsyncIterator[Browser]:
    assert CHROMIUM is not None
    async with contextlib.AsyncExitStack() as stack:
        profile = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="ow-chromium-", ignore_cleanup_errors=True))
        )
        quiet = asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(
            CHROMIUM, *FLAGS, *flags, f"--user-data-dir={profile}", "about:blank", stdout=quiet, stderr=quiet
        )
        stack.push_async_callback(_end, process)
        said = profile / "DevToolsActivePort"
        lines = await until(
            lambda: said.exists() and said.read_text().splitlines(), "chromium", deadline_s=2 * DEADLINE_S
        )
        await until(lambda: len(said.read_text().splitlines()) == 2, "the port of chromium")
        port, path = said.read_text().splitlines()
        assert lines
        session = Session(await connect(f"ws://127.0.0.1:{port}{path}", max_size=None))
        stack.push_async_callback(session.close)
        yield Browser(int(port), session, stack)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
    try:
        await within(process.wait())
    except TimeoutError:
        process.kill()
        await process.wait()
