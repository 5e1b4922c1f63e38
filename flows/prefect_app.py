"""Prefect as this project starts it: `create` is the server's app, `python -m flows.prefect_app` the command line.

Both end with the process that started them, however that ended.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Coroutine
from typing import Any

from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp

from agent_r1.http.client import LOOPBACK
from flows.processes import IMPORTING, end_with_parent

_scheduled = set[asyncio.Task[None]]()  # the event loop itself keeps no task alive


def create() -> ASGIApp:
    """Wraps Prefect's app in a check of the Host header: a page whose name was made to lead here is answered 400.

    The check is around the app and not in it, because Prefect sends requests to itself under a name of its own.
    """
    end_with_parent()
    os.umask(0o077)  # its database holds logs and parameters
    gc.set_threshold(*IMPORTING)  # for good: the first start makes as many objects again for its tables
    from prefect.server.api.server import create_app
    from prefect.server.events.models import automations

    # Prefect 3.7 stops its event loop here until a lock is free that the same loop may hold, and answers nobody any
    # more: issue 23055. 3.8.6 does not, but needs a fastapi that vLLM refuses.
    automations.run_coro_as_sync = _schedule  # type: ignore[attr-defined, assignment]
    return TrustedHostMiddleware(create_app(), allowed_hosts=LOOPBACK)


def _schedule(update: Coroutine[Any, Any, None]) -> None:
    task = asyncio.get_running_loop().create_task(update)
    _scheduled.add(task)
    task.add_done_callback(_scheduled.discard)


if __name__ == "__main__":
    end_with_parent()
    from prefect.cli import app

    app()
