"""The agents that runs are compared with: the warm-started model, not yet trained by reinforcement learning."""

BASE_TOOL_CALL = "base_tool_call"  # acts in the same environment as the runs
NAIVE_RAG = "naive_rag"  # the question is the query, the passages are in the prompt, and it answers once
BASELINES = (BASE_TOOL_CALL, NAIVE_RAG)
