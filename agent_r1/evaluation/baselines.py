"""The agents that runs are compared with: the warm-started model, not yet trained by reinforcement learning."""

from __future__ import annotations

from agent_r1.params import Baseline, Protocol

BASE_TOOL_CALL: Baseline = "base_tool_call"
NAIVE_RAG: Baseline = "naive_rag"
BASELINES: dict[str, Protocol] = {  # by name, what the model is evaluated under
    BASE_TOOL_CALL: "tool_call",
    NAIVE_RAG: "naive_rag",
    "closed_book": "closed_book",
    "gold_passages": "gold_passages",
}
OF_A_SWEEP = (BASE_TOOL_CALL, NAIVE_RAG)  # those in the report of a sweep
