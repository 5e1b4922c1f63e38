"""What the search server and its clients say to each other, as JSON."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from agent_r1.records import Passage


class SearchRequest(BaseModel):
    """POST /search"""

    queries: Annotated[list[str], Field(max_length=1024)]
    k: Annotated[int, Field(ge=1, le=1000)]


class SearchReply(BaseModel):
    """The answer to it."""

    index_hash: str
    results: list[list[Passage]]  # for each query, best first


class Health(BaseModel):
    """GET /health"""

    kind: str
    index_hash: str
    passages_hash: str  # of the Parquet file that the index was built from
    size: int  # passages
