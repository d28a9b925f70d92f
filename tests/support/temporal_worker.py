"""A worker that tests start as a process: it serves the workflows and activities of one module until SIGTERM.

Its argument is a JSON object:

    address, namespace, task_queue    where it works
    module                            the module, found as a test finds it; all it defines is served
    serve                             "both" (the default), "workflows" or "activities"; or "locks", the lock service
    redis_url, prefix                 given to the plugin
    key                               of the codec that its data converter has; none by default
    plugin                            the plugin's other options; false for a worker without it
    worker                            options of `Worker`; where it takes a timedelta, seconds are given
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import logging
import os
import signal
import sys
import traceback
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from keyed import keyed
from temporalio.client import Client
from temporalio.converter import DataConverter
from temporalio.worker import Worker

from children import say
from quiet import hear_the_core

if TYPE_CHECKING:
    from collections.abc import Sequence

    from temporalio.client import Plugin


def plugins_of(config: dict[str, Any]) -> Sequence[Plugin]:
    """Return the plugin that the configuration asks for."""
    options = config.get("plugin", {})
    if options is False:
        return []
    # A worker without the plugin does not need its package.
    from redlease_temporal.worker import RedleasePlugin  # noqa: PLC0415

    plugin: Plugin = RedleasePlugin(config["redis_url"], prefix=config["prefix"], **options)
    return [plugin]


def worker_options(given: dict[str, Any]) -> dict[str, Any]:
    """Return the options of `Worker`, with the durations as it wants them."""
    parameters = inspect.signature(Worker.__init__).parameters
    return {
        name: timedelta(seconds=value) if "timedelta" in str(parameters[name].annotation) else value
        for name, value in given.items()
    }


def defined(module: str, mark: str) -> list[Any]:
    """Return what a module defines itself and the SDK has marked."""
    found = vars(importlib.import_module(module)).values()
    return [one for one in found if hasattr(one, mark) and one.__module__ == module]


async def main() -> None:
    """Work until SIGTERM, then end what runs as a deployed worker does."""
    config: dict[str, Any] = json.loads(sys.argv[1])
    logging.basicConfig(level=logging.WARNING)
    hear_the_core()
    asked_to_end = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asked_to_end.set)
    namespace = config.get("namespace", "default")
    converter = keyed(config["key"]) if "key" in config else DataConverter.default
    client = await Client.connect(
        config["address"], namespace=namespace, plugins=plugins_of(config), data_converter=converter
    )
    serve = config.get("serve", "both")
    workflows = defined(config["module"], "__temporal_workflow_definition") if serve != "activities" else []
    activities = defined(config["module"], "__temporal_activity_definition") if serve != "workflows" else []
    options = worker_options(config.get("worker", {}))
    if serve == "locks":
        from redlease_temporal.worker import RedleasePlugin  # noqa: PLC0415

        (plugin,) = client.config()["plugins"]
        assert isinstance(plugin, RedleasePlugin)
        worker = plugin.nexus_worker(client, config["task_queue"], **options)
    else:
        queue = config["task_queue"]
        worker = Worker(client, task_queue=queue, workflows=workflows, activities=activities, **options)
    async with worker:
        say("ready")
        await asked_to_end.wait()
    say("ended")


if __name__ == "__main__":
    status = 1
    try:
        asyncio.run(main())
        status = 0
    except Exception:  # noqa: BLE001
        traceback.print_exc()
    # In some of a hundred processes a thread of the SDK's core that is still about crashes the interpreter as it goes
    # down (temporalio/sdk-python#300), so it does not go down that way.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
