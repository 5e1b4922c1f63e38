"""Two evaluations side by side: `agent-r1 compare ppo base_tool_call`."""

from __future__ import annotations

from agent_r1 import params
from agent_r1.inspection.side_by_side import compared, rendered
from flows.terminal import output


def compare(a: str, b: str, *, sweep: str = "", anyway: bool = False) -> None:
    """Prints what sets evaluation A apart from B; see `compared`."""
    found = compared(params.load(), a, b, sweep=sweep, anyway=anyway)
    output().print(rendered(found))
