"""`promote`: when a challenger takes the champion's place."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from agent_r1.params.sections import Section


class PromoteParams(Section):
    margin: Annotated[float, Field(ge=0, lt=1)]
    level: Annotated[float, Field(ge=0.5, lt=1)]
