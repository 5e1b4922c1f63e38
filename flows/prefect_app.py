"""Prefect's server as this project starts it, a factory for uvicorn."""

from __future__ import annotations

from prefect.server.api.server import create_app
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp

from agent_r1.client import LOOPBACK


def create() -> ASGIApp:
    """Prefect's app behind a check of the Host header: a page whose name was made to lead here is answered 400.

    Around the app and not in it: what Prefect asks of itself comes under a name of its own.
    """
    return TrustedHostMiddleware(create_app(), allowed_hosts=LOOPBACK)
