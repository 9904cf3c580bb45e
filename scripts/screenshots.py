"""Take the pictures of the documentation: docs/images/*.png, of the console beside a running shop.

It starts `oncewire up --demo` in a temporary folder, waits until the shop is busy, and photographs the console with
headless Chromium. Where Chromium is missing it says so and changes nothing.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from oncewire._ground.database.postgres import connected
from oncewire.demo import shop
from tests.support.browser import CHROMIUM, Tab, browser
from tests.support.up import Up, oncewire, until

IMAGES = Path(__file__).parents[1] / "docs" / "images"
BYTES_MAX = 200_000
SIZE = {"width": 1_360, "height": 810}
BUSY_S = 90.0
"""Long enough that each chart shows a line."""
TEXT = "(document.getElementById('main')?.innerText ?? '')"
LETTER = "gift card"


async def take(up: Up) -> None:
    console = up.running.services["console"]
    async with browser() as chromium:
        overview = await chromium.tab(console, **SIZE)
        opened = time.monotonic()
        await asyncio.to_thread(until, lambda: LETTER in command(up, "dlq", "ls"), "the dead letter")
        letters = await chromium.tab(f"{console}/letters", **SIZE)
        await letters.until(f"{TEXT}.includes('{LETTER}')")
        await save(letters, "letters")
        await sell_gift_cards(up)
        await asyncio.sleep(max(0.0, BUSY_S - (time.monotonic() - opened)))
        await overview.until(f"{TEXT}.includes('All is well')")
        await save(overview, "console")
        await run_of_an_order(up, await chromium.tab(console, **SIZE), console)


async def sell_gift_cards(up: Up) -> None:
    """What a person does about the letter: set the price, replay."""
    async with connected(up.url("postgres")) as connection:
        await connection.execute(shop.SQL["set_shop_price"], LETTER, 5_000)
    command(up, "dlq", "replay", "--all")
    await asyncio.to_thread(until, lambda: LETTER not in command(up, "dlq", "ls"), "no dead letter")


async def run_of_an_order(up: Up, tab: Tab, console: str) -> None:
    async with connected(up.url("postgres")) as connection:
        order = await connection.fetchval("SELECT max(id) FROM oncewire_shop.charges")
    await tab.call("Page.navigate", url=f"{console}/runs/order-{order}")
    await tab.until(f"{TEXT}.includes('billing.charged')")
    await save(tab, "run")


def command(up: Up, *words: str) -> str:
    return oncewire(*words, cwd=up.folder.path.parent).stdout


async def save(tab: Tab, name: str) -> None:
    path = IMAGES / f"{name}.png"
    await tab.screenshot(path)
    size = path.stat().st_size
    if size > BYTES_MAX:
        sys.exit(f"{path} has {size} bytes, more than {BYTES_MAX}")
    print(f"{path.relative_to(Path.cwd())}: {size // 1_000} KB")


def main() -> None:
    if CHROMIUM is None:
        print("no pictures are taken: chromium is not installed")
        return
    with tempfile.TemporaryDirectory(prefix="ow-screenshots-") as folder:
        Path(folder).chmod(0o755)  # PostgreSQL runs as another user when this is root
        with Up(Path(folder) / ".oncewire", "--demo") as up:
            asyncio.run(take(up.ready()))


if __name__ == "__main__":
    main()
