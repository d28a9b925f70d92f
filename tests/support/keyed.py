"""A codec class that services share, with keys of their own."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from temporalio.api.common.v1 import Payload
from temporalio.converter import DataConverter, PayloadCodec

if TYPE_CHECKING:
    from collections.abc import Sequence


class Keyed(PayloadCodec):
    """A codec whose output says nothing to whoever has not its key."""

    def __init__(self, key: str, *others: str) -> None:
        self.away = False
        self._keys = [key, *others]

    async def encode(self, payloads: Sequence[Payload]) -> list[Payload]:
        """Encrypt with the first key."""
        key = self._keys[0].encode()
        return [Payload(metadata={"encoding": b"keyed"}, data=key + one.SerializeToString()) for one in payloads]

    async def decode(self, payloads: Sequence[Payload]) -> list[Payload]:
        """Decrypt with whichever key fits."""
        return [self._decoded(one.data) for one in payloads]

    def _decoded(self, data: bytes) -> Payload:
        for key in self._keys:
            if not self.away and data.startswith(key.encode()):
                return Payload.FromString(data.removeprefix(key.encode()))
        raise ValueError("no key fits")


def keyed(key: str) -> DataConverter:
    """Return the data converter of a service with this key."""
    return dataclasses.replace(DataConverter.default, payload_codec=Keyed(key))
