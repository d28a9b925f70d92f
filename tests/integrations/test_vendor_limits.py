"""Limits of a vendor: what the page's semaphore grants, and what it does not."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

from how_to import blocks

if TYPE_CHECKING:
    from redlease import Redlease, Semaphore


async def vendor_after(client: Redlease) -> Semaphore:
    """Run the page, whose eight calls end at once; return its semaphore."""
    (code,) = blocks("vendor-limits")
    names: dict[str, Any] = {"client": client}
    await eval(compile(code, "vendor-limits.md", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
    vendor: Semaphore = names["vendor"]
    return vendor


async def test_a_customer_has_two_connections_of_five(client: Redlease) -> None:
    """A third call of a customer would have to wait, and one of another customer does not."""
    vendor = await vendor_after(client)
    async with vendor.hold(key="a"), vendor.hold(key="a"):
        assert (await vendor.inspect()).in_use == 2
        assert await vendor.try_acquire(key="a") is None


async def test_after_the_burst_a_call_waits_for_its_token(client: Redlease) -> None:
    """Ten calls begin at once, though each ends at once, and whoever comes then waits less than a second."""
    vendor = await vendor_after(client)
    for _ in range(3):
        if not (permit := await vendor.try_acquire()):
            break
        await vendor.release(permit)
    assert [limit.kind for limit in (await vendor.inspect()).limits] == ["rate"]
    async with vendor.hold(key="b", timeout=30) as hold:
        assert hold.permit.key == "b"
