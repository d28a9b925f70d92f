"""The garbage collection after each test, kept short over thousands of them."""

from __future__ import annotations

import gc
import itertools

EVERY = 50  # collections after which what has survived them is left out of the later ones

_numbers = itertools.count(1)


def collect() -> None:
    """Collect garbage: the exception of a task that nobody awaited shows when the task is collected.

    A collection looks at all that there is, and pytest keeps some objects of each test: after a thousand of them it
    would take a tenth of the time of the tests.
    """
    gc.collect()
    if next(_numbers) % EVERY == 0:
        gc.freeze()
