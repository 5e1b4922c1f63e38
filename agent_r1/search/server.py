"""Serves an index to many clients: `python -m agent_r1.search.server --index FOLDER --port 8700`."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from threading import Lock

import uvicorn
from fastapi import FastAPI

from agent_r1.search.base import Search
from agent_r1.search.index import describe, open_local
from agent_r1.search.remote import Health, SearchReply, SearchRequest

logger = logging.getLogger(__name__)


def create_app(index: Search, health: Health) -> FastAPI:
    """The server's two routes: POST /search and GET /health."""
    app = FastAPI(title="agent_r1 search")
    one_at_a_time = Lock()  # tokenizers are not made for threads

    @app.post("/search")
    def search(request: SearchRequest) -> SearchReply:
        with one_at_a_time:
            return SearchReply(index_hash=health.index_hash, results=index.search(request.queries, request.k))

    @app.get("/health")
    async def report() -> Health:
        return health

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description="Serves an index that the index stage has built.")
    parser.add_argument("--index", type=Path, default=Path("data/index"), help="the index's folder")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8700)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        health = describe(arguments.index)
        app = create_app(open_local(arguments.index), health)
    except (ValueError, OSError) as fault:
        parser.exit(1, f"{fault}\n")
    logger.info("serving the %s index of %d passages at port %d", health.kind, health.size, arguments.port)
    uvicorn.run(app, host=arguments.host, port=arguments.port, log_level="warning")


if __name__ == "__main__":
    main()
