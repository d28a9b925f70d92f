"""Whether a relay can serve the workflow runs of another: whether it can decode what the other's codec has encoded.

Setups whose data converters have the same classes share a group, but their keys may differ. So a relay stores a canary
with each record that it claims, and leaves records whose canary it cannot decode to relays that can.
"""

from __future__ import annotations

import asyncio
import base64

from temporalio.api.common.v1 import Payload
from temporalio.converter import DataConverter

from redlease_temporal._common.settings import is_stock

CANARY_TEXT = "redlease"
DECODE_TIMEOUT_S = 5.0  # how long a codec may take: it may request its keys from another service


async def canary_of(converter: DataConverter) -> str:
    """A payload that only a compatible data converter can decode; empty if all of the group can."""
    if is_stock(converter) and converter.payload_codec is None:
        return ""
    (payload,) = await converter.encode([CANARY_TEXT])
    return base64.b64encode(payload.SerializeToString()).decode()


async def can_read(converter: DataConverter, canary: str) -> bool:
    """Whether a data converter can decode a canary. True for an empty one: any relay of the group may take over."""
    if not canary:
        return True
    try:
        async with asyncio.timeout(DECODE_TIMEOUT_S):
            decoded = await converter.decode([Payload.FromString(base64.b64decode(canary))], [str])
    except Exception:  # noqa: BLE001  a codec may raise anything for a missing key
        return False
    return decoded == [CANARY_TEXT]
