"""Reports unexpected exceptions; the caller retries what failed."""

from __future__ import annotations

import asyncio


def report(error: Exception) -> None:
    """Passes the exception to the event loop's exception handler, which logs it by default."""
    message = "redlease: an exception that it did not expect; what failed is done again"
    asyncio.get_running_loop().call_exception_handler({"message": message, "exception": error})
