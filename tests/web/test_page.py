"""The page in a real browser: what it shows as it happens, how it fits, and that no name can do anything to it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from playwright.async_api import Page, expect

from redlease import Redlease

from helpers import cancel, queue_up
from web_view import TOKEN, chromium, complaints_of, served

if TYPE_CHECKING:
    from conftest import OwnServer

# Each starts a browser and the view; on a busy machine both take seconds.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

expect.set_options(timeout=20_000)

# What a name may hold: elements, an entity, quotes that would end an attribute, and what turns the direction of text.
HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>&amp;\'"\u202e\n<b>'
HARMLESS = HOSTILE.replace("\u202e", r"\u202e").replace("\n", r"\n")

SCROLLS = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
GROUND = "getComputedStyle(document.body).backgroundColor"


async def test_what_happens_is_seen_live(client: Redlease, url: str, prefix: str) -> None:
    """A resource appears, its queue grows, a hold ends and the first waiter becomes its holder; the timeline has it."""
    async with served("--url", url, "--prefix", prefix) as view, chromium() as browser:
        page = await browser.new_page(viewport={"width": 1280, "height": 900})
        complaints = complaints_of(page)
        await page.goto(view.url)
        await expect(page.locator("#state")).to_have_text("live")
        await expect(page.locator("#list-note")).to_have_text("No resource is in use under this prefix.")
        pool = client.semaphore("gpu", capacity=2)
        held = [await pool.acquire(owner=name) for name in ("ann", "bob")]
        await expect(page.get_by_role("row", name="gpu")).to_contain_text("2 of 2")
        waiting = await queue_up(pool, 1, owner="cem")
        waiting += await queue_up(pool, 1, owner="dee")
        await page.get_by_role("link", name="gpu").click()
        await expect(page).to_have_url(re.compile(r"\?resource=gpu$"))
        await expect(page.locator("#facts")).to_contain_text("2 of 2 held · 2 waiting")
        await expect(page.locator("#slots .slot")).to_have_count(2)
        await expect(page.locator("#queue .waiter")).to_have_text(["1", "2"])
        await expect(page.locator("#holders .owner")).to_have_text(["ann", "bob"])
        await pool.release(held[0])
        await expect(page.locator("#holders .owner")).to_have_text(["bob", "cem"])
        await expect(page.locator("#waiters .owner")).to_have_text(["dee"])
        await expect(page.locator("#queue .waiter")).to_have_text(["1"])
        await expect(page.locator("#timeline .rows > g > text")).to_have_text(["ann", "bob", "cem", "dee"])
        await expect(page.locator("#timeline .bar.released title")).to_contain_text("owner ann")
        await page.get_by_text("History as a list").click()
        await expect(page.locator("#entries .what")).to_have_text(["granted", "released", "granted", "granted"])
        await pool.set_limit(1, reason="vendor")
        await pool.set_limit(2, key="eu")
        await pool.clear_limit()
        told = ["limit lifted", "limit of key eu is 2", "limit is 1", "granted"]
        await expect(page.locator("#entries .what")).to_have_text([*told, "released", "granted", "granted"])
        await expect(page.locator("#timeline .rows > g > text")).to_have_text(["ann", "bob", "cem", "dee"])
        await expect(page.locator("button:visible")).to_have_count(0)  # it is read-only
        await cancel(*waiting)
        assert complaints == []


@pytest.mark.parametrize(("scheme", "ground"), [("light", "rgb(246, 247, 249)"), ("dark", "rgb(15, 20, 25)")])
async def test_it_fits_phones_and_desktops(client: Redlease, url: str, prefix: str, scheme: str, ground: str) -> None:
    """However long names, owners and metadata are, nothing scrolls sideways, and nothing moves when a queue grows."""
    pool = client.semaphore("n" * 300, capacity=1000)
    await pool.acquire(owner="o" * 200, ticket="t" * 200, metadata={"m" * 100: "v" * 3000}, weight=950)
    await pool.acquire(owner="short")
    async with served("--url", url, "--prefix", prefix) as view, chromium() as browser:
        for width in (390, 1280):
            page = await browser.new_page(viewport={"width": width, "height": 844}, color_scheme=scheme)  # type: ignore[arg-type]
            await page.goto(view.url)
            await page.get_by_role("link", name="nnnn").click()
            await expect(page.locator("#holders .owner").first).to_be_visible()
            assert await page.evaluate(GROUND) == ground
            assert not await page.evaluate(SCROLLS)
            before = await page.locator("#timeline-title").bounding_box()
            waiting = await queue_up(pool, 1, weight=100)
            await expect(page.locator("#queue .waiter")).to_have_count(1)
            assert await page.locator("#timeline-title").bounding_box() == before
            assert not await page.evaluate(SCROLLS)
            await cancel(*waiting)
            await page.close()


async def test_hostile_names_are_text(client: Redlease, url: str, prefix: str) -> None:
    """What would be an element elsewhere is shown letter for letter: in lists, pictures, titles, questions."""
    pool = client.lock(HOSTILE)
    await pool.acquire(owner=HOSTILE, ticket=HOSTILE, metadata={HOSTILE: HOSTILE})
    waiting = await queue_up(pool, 1, owner=HOSTILE, metadata={"k": HOSTILE})
    async with served("--url", url, "--prefix", prefix, "--allow-changes") as view, chromium() as browser:
        page = await browser.new_page()
        complaints = complaints_of(page)
        await page.goto(f"{view.url}#token={TOKEN}")
        await page.locator("#resources a").click()
        await expect(page.locator("#detail-title")).to_have_text(HARMLESS)
        await expect(page.locator("#holders .owner")).to_have_text(HARMLESS)
        await expect(page.locator("#holders .ticket")).to_have_text(HARMLESS)
        await expect(page.locator("#holders .metadata")).to_have_text(f"{HARMLESS}={HARMLESS}")
        await expect(page.locator("#waiters .owner")).to_have_text(HARMLESS)
        await page.get_by_text("History as a list").click()
        await expect(page.locator("#entries .owner")).to_have_text(HARMLESS)
        await page.locator("#holders button").click()
        await expect(page.locator("#question")).to_have_text(f"Release {HARMLESS} of {HARMLESS}?")
        assert await page.evaluate("window.hacked") is None
        assert await page.locator("main img, main script, main b, dialog img, svg script").count() == 0
        forbidden = "(() => { try { document.body.innerHTML = '<p>'; return false } catch { return true } })()"
        assert await page.evaluate(forbidden)
        assert [each for each in complaints if "TrustedHTML" not in each] == []
        await cancel(*waiting)


async def answer(page: Page, *, token: str | None = None) -> None:
    """Agree to a change, with a token where it is asked for."""
    if token is not None:
        await page.locator("#token").fill(token)
    await page.locator("#confirm").click()


async def test_changes_are_asked_for_and_done(client: Redlease, url: str, prefix: str) -> None:
    """A wrong token changes nothing; with the right one the capacity is set and a holder and a waiter are taken out."""
    pool = client.lock("invoice")
    await pool.acquire(ticket="stuck", owner="ann")
    waiting = await queue_up(pool, 2, owner="bob")
    async with served("--url", url, "--prefix", prefix, "--allow-changes") as view, chromium() as browser:
        page = await browser.new_page()
        await page.goto(f"{view.url}?resource=invoice")
        await page.get_by_role("button", name="Release stuck").click()
        await page.locator("#cancel").click()
        await page.get_by_role("button", name="Release stuck").click()
        await answer(page, token="a-token-that-is-wrong")
        await expect(page.locator("#told")).to_contain_text("Not done: the token is missing or wrong")
        assert [permit.ticket for permit in (await pool.inspect()).holders] == ["stuck"]
        await page.get_by_role("button", name="Release stuck").click()
        await answer(page, token=TOKEN)
        await expect(page.locator("#told")).to_have_text("stuck is taken out of invoice.")
        await expect(page.locator("#holders .owner")).to_have_text("bob")
        await page.get_by_role("button", name="Take out").click()
        await answer(page)
        await expect(page.locator("#waiters-note")).to_have_text("Nobody waits.")
        await expect(page.locator("#timeline .bar.forced")).to_have_count(2)
        units = client.semaphore("units", capacity=2)
        await units.acquire()
        await page.goto(f"{view.url}?resource=units")
        await page.get_by_role("button", name="Change capacity").click()
        await page.locator("#capacity").fill("4")
        await answer(page)
        await expect(page.locator("#facts")).to_contain_text("1 of 4 held")
        assert (await units.inspect()).capacity == 4
    await cancel(*waiting)


async def test_an_outage_is_shown_and_ends(own_server: OwnServer, prefix: str) -> None:
    """While the server, or the view itself, is away the page says so; it is live again by itself."""
    server = own_server("valkey9")
    async with chromium() as browser:
        page = await browser.new_page()
        async with served("--url", server.url, "--prefix", prefix) as view:
            await page.goto(view.url)
            await expect(page.locator("#state")).to_have_text("live")
            server.kill()
            await expect(page.locator("#outage")).to_contain_text("The Redis server is out of reach")
            await expect(page.locator("#state")).to_have_text("out of reach")
            server.start()
            await expect(page.locator("#state")).to_have_text("live")
            await expect(page.locator("#outage")).to_be_hidden()
            async with Redlease.from_url(server.url, prefix=prefix) as client:
                await client.lock("after").acquire()
                await expect(page.get_by_role("row", name="after")).to_contain_text("1 of 1")
        await expect(page.locator("#outage")).to_contain_text("lost its connection to redlease web")
