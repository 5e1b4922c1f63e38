"""The three kinds of settings: whether a run that was begun is the same under another value of each."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

# Kind -> its settings, by their names among a run's parameters; * is any name. A setting that is in no list, such as an
# argument of somebody's own environment, defines the experiment: another value is another run.
KINDS = {
    # Another value computes the same but for rounding.
    "rounding": """
        train.update.max_tokens_per_microbatch warm_start.max_tokens_per_microbatch env.order
        model.threads model.portable model.float32_output model.gradient_checkpointing model.packing model.compile
        learner.processes learner.nodes learner.optimizer_offload learner.defer_reduction learner.replicate
        engine.kind engine.replicas engine.tensor_parallel_size engine.threads engine.max_num_seqs
        engine.cpu_cache_gib engine.gpu_memory_utilization engine.sleep engine.batch_size
    """,
    # How long, how often, and how much room.
    "room": """
        train.iterations train.validation.every train.validation.questions train.validation.samples
        train.checkpoint.every train.keep.learner train.keep.every
        train.update.proved_trajectories train.update.canary_tolerance.float32
        train.update.canary_tolerance.bfloat16 warm_start.checkpoint_every learner.silence_s
        env.max_tokens env.max_action_tokens env.aborted_share env.too_long_share env.agents.*.timeout_s
        env.agents.*.concurrency
        env.openenv.*.timeout_s env.toolbox.*.timeout_s env.tools.*.timeout_s
        env.tools.python.memory_mib env.tools.python.workers
    """,
}
UNDEFINING = " ".join(KINDS.values()).split()
NOT_ONE_RUN = "where these round or set a limit, the bits are not those of one uninterrupted run"
ITERATIONS = "train.iterations"
RAISED = (ITERATIONS, "env.max_tokens", "env.max_action_tokens")  # of one run while they rise
# Settings that define the experiment where another one lets them.
DECIDED = {
    "train.validation.*": ("train.validation.keep_best", "train.validation.patience"),
    "env.max_tokens": ("train.credit.rewards.overlong",),
}


def defines(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether two values of a setting make two runs, of which these are all parameters by their names."""
    if name in RAISED and old.get(name, 0) > new.get(name, 0):
        return True
    deciders = [decider for pattern, names in DECIDED.items() if fnmatchcase(name, pattern) for decider in names]
    if any(side.get(decider) for decider in deciders for side in (old, new)):
        return True
    return not any(fnmatchcase(name, pattern) for pattern in UNDEFINING)
