"""Programs in which gevent or eventlet has replaced threads by greenlets."""

from __future__ import annotations

import sys

from redlease.errors import RedleaseError

REPLACED = ("thread", "threading", "socket", "select")


def check_threads() -> None:
    """Raises RedleaseError if greenlets have replaced what the background thread stands on.

    Its event loop would run in the thread of the program: a greenlet that computes would stop the renewals, and what
    looks for a running loop, as Django does, would find it in every greenlet. If only threads are left as they are, a
    greenlet that waits would stop the one that holds.
    """
    for name, module in (("gevent", "gevent.monkey"), ("eventlet", "eventlet.patcher")):
        patcher = sys.modules.get(module)
        is_replaced = getattr(patcher, "is_module_patched", None) or getattr(patcher, "is_monkey_patched", None)
        if is_replaced is not None and any(is_replaced(each) for each in REPLACED):
            raise RedleaseError(
                f"redlease.sync needs threads and sockets as they are, and {name} has replaced them in this process: "
                "use workers with threads or processes, for example `celery --pool threads` or `gunicorn -k gthread`"
            )
