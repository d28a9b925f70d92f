"""Who may see and change what: hosts, other sites, the token, and what every response says to the browser."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

from redlease import Redlease

from web_view import TOKEN

Asked = Callable[[str | None], httpx.AsyncClient]

CHANGES = [
    ("/release", {"resource": "gpu", "ticket": "stuck"}),
    ("/resize", {"resource": "gpu", "capacity": 7}),
]


async def state_of(client: Redlease) -> tuple[int, list[str]]:
    """Return the capacity and the holders of the resource that is to be changed."""
    snapshot = await client.semaphore("gpu", capacity=2).inspect()
    return snapshot.capacity, [permit.ticket for permit in snapshot.holders]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8420", 200),
        ("localhost:8420", 200),
        ("LOCALHOST.", 200),
        ("[::1]:8420", 200),
        ("10.0.0.7", 200),
        ("view.example:80", 200),
        ("attacker.example:8420", 403),
        ("localhost.attacker.example", 403),
        ("127.0.0.1.attacker.example", 403),
        ("127.0.0.1@attacker.example", 403),
        ("[attacker.example]", 403),
        ("[::1]attacker.example", 403),
        ("[::1]:80:attacker.example", 403),
        ("localhost:attacker.example", 403),
        ("[localhost]", 403),
        ("", 403),
    ],
)
async def test_only_its_own_names_lead_to_the_view(asked: Asked, host: str, status: int) -> None:
    """Localhost, IP addresses and names that were allowed; a name that another site has made lead here is refused."""
    async with asked(TOKEN) as http:
        for path in ("/", "/facts", "/main.js"):
            assert (await http.get(path, headers={"Host": host})).status_code == status
        change = await http.post("/release", headers={"Host": host, "X-Redlease-Token": TOKEN}, json=CHANGES[0][1])
        assert change.status_code == status


async def test_other_sites_may_link_to_the_page_and_load_nothing(asked: Asked, client: Redlease) -> None:
    """A browser says where a request comes from; a change from elsewhere is refused even with the token."""
    pool = client.semaphore("gpu", capacity=2)
    await pool.acquire(ticket="stuck")
    async with asked(TOKEN) as http:
        for site in ("cross-site", "same-site"):
            headers = {"Sec-Fetch-Site": site, "X-Redlease-Token": TOKEN}
            assert (await http.get("/", headers=headers)).status_code == 200
            for path in ("/facts", "/main.js", "/events"):
                assert (await http.get(path, headers=headers)).status_code == 403
            for path, order in CHANGES:
                assert (await http.post(path, headers=headers, json=order)).status_code == 403
        assert (await http.options("/release", headers={"Origin": "http://attacker.example"})).status_code == 405
    assert await state_of(client) == (2, ["stuck"])


async def test_every_response_has_the_headers_of_a_locked_page(asked: Asked) -> None:
    """Refusals and missing files too: only own files, no frames, no inline scripts or styles, nothing kept."""
    async with asked(None) as http:
        for path, headers in (("/", {}), ("/style.css", {}), ("/nothing", {}), ("/", {"Host": "attacker.example"})):
            told = (await http.get(path, headers=headers)).headers
            policy = told["content-security-policy"]
            assert "default-src 'none'; script-src 'self'; style-src 'self';" in policy
            assert "frame-ancestors 'none'" in policy
            assert "require-trusted-types-for 'script'" in policy
            assert "unsafe" not in policy
            assert told["x-content-type-options"] == "nosniff"
            assert told["referrer-policy"] == "no-referrer"
            assert told["cache-control"] == "no-store"
            assert "access-control-allow-origin" not in told


@pytest.mark.parametrize(("path", "order"), CHANGES)
async def test_a_change_needs_the_flag_and_the_token(
    asked: Asked, client: Redlease, path: str, order: dict[str, object]
) -> None:
    """Without --allow-changes nothing helps; with it no token, a wrong one and one that is not ASCII are refused."""
    await client.semaphore("gpu", capacity=2).acquire(ticket="stuck")
    async with asked(None) as http:
        refused = await http.post(path, json=order, headers={"X-Redlease-Token": TOKEN})
        assert (refused.status_code, "--allow-changes" in refused.json()["error"]) == (403, True)
    async with asked(TOKEN) as http:
        for token in (b"", TOKEN[:-1].encode(), f"{TOKEN}x".encode(), b"\xff\xfe"):
            refused = await http.post(path, json=order, headers={b"X-Redlease-Token": token})
            assert refused.status_code == 401
        assert (await http.post(path, json=order)).status_code == 401
        assert (await http.get(path, headers={"X-Redlease-Token": TOKEN})).status_code == 404  # a link changes nothing
        assert await state_of(client) == (2, ["stuck"])
        done = await http.post(path, json=order, headers={"X-Redlease-Token": TOKEN})
        assert done.status_code == 200
    assert await state_of(client) == ((2, []) if path == "/release" else (7, ["stuck"]))


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"[]", 400),
        (b"{", 400),
        (b"\xff", 400),
        (b'{"resource": ' + b"[" * 9_000, 400),
        (b'{"resource": "gpu", "ticket": "' + b"x" * 20_000 + b'", "capacity": 0}', 400),
        (b'{"resource": "gpu"}', 422),
        (b'{"resource": "", "ticket": "stuck", "capacity": 3}', 422),
        (b'{"resource": "gpu", "ticket": "", "capacity": "3"}', 422),
        (b'{"resource": "gpu", "ticket": 7, "capacity": true}', 422),
        (b'{"resource": ["gpu"], "ticket": "stuck", "capacity": 3}', 422),
    ],
)
async def test_an_order_that_makes_no_sense_changes_nothing(
    asked: Asked, client: Redlease, body: bytes, status: int
) -> None:
    """What is no JSON object, lacks a field, or has one that cannot be, is refused with the reason."""
    await client.semaphore("gpu", capacity=2).acquire(ticket="stuck")
    async with asked(TOKEN) as http:
        for path in ("/release", "/resize"):
            refused = await http.post(path, content=body, headers={"X-Redlease-Token": TOKEN})
            assert (refused.status_code, bool(refused.json()["error"])) == (status, True)
    assert await state_of(client) == (2, ["stuck"])


async def test_a_lock_is_not_resized(asked: Asked, client: Redlease) -> None:
    """It is refused with the reason, and nothing is changed."""
    await client.lock("gpu").acquire(ticket="stuck")
    async with asked(TOKEN) as http:
        order = {"resource": "gpu", "capacity": 3}
        refused = await http.post("/resize", json=order, headers={"X-Redlease-Token": TOKEN})
    assert (refused.status_code, "it is a lock" in refused.json()["error"]) == (422, True)
    assert await state_of(client) == (1, ["stuck"])


async def test_only_files_of_the_page_are_served(asked: Asked) -> None:
    """A path leads to none elsewhere, and a resource whose name cannot be has no stream."""
    async with asked(None) as http:
        for path in ("/../gatherer.py", "/%2e%2e%2fgatherer.py", "/gatherer.py", "/page/index.html"):
            assert (await http.get(path)).status_code == 404
        assert (await http.get("/events", params={"resource": "x" * 5000})).status_code == 400
