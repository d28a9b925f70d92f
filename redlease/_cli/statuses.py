"""What the commands exit with, besides 0 and 1."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """The first five as in sysexits.h. `redlease run` exits with the status of its command unless with one of these."""

    UNKNOWN = 66  # EX_NOINPUT: nothing is known of a resource of that name
    UNAVAILABLE = 69  # EX_UNAVAILABLE
    BROKEN = 70  # EX_SOFTWARE: the supervisor was killed, or could not be started
    LOST = 74  # EX_IOERR
    NOT_GRANTED = 75  # EX_TEMPFAIL: try again later
    NOT_EXECUTABLE = 126
    NOT_FOUND = 127
