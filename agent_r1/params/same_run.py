"""The three kinds of settings: whether a run that was begun is the same under another value of each."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

# Kind -> its settings, by their names among a run's parameters; * is any name. A setting that is in no list, such as an
# argument of somebody's own environment, defines the experiment.
KINDS = {
    # Another value is another run.
    "experiment": """
        train.seed train.reference train.rollout.questions train.rollout.samples train.rollout.ahead
        train.rollout.demonstrate
        train.credit.estimator train.credit.gamma train.credit.lam train.credit.step_gamma train.credit.step_lam
        train.credit.target_lam train.credit.gigpo.weight train.credit.gigpo.std train.credit.gigpo.state
        train.credit.gigpo.history train.credit.loss_mask train.credit.advantage_mask.recursion
        train.credit.advantage_mask.whitening train.credit.advantage_mask.critic train.credit.whitening_floor
        train.credit.kl_reward train.credit.rewards.* train.credit.overlong_buffer train.credit.left_out.truncated
        train.credit.left_out.void_step train.credit.filter.kind train.credit.filter.share train.credit.filter.refill
        train.update.learning_rate train.update.learning_rate_decay train.update.learning_rate_warmup
        train.update.weight_decay train.update.betas train.update.epochs train.update.minibatches train.update.loss
        train.update.ratio train.update.clip_low train.update.clip_high train.update.dual_clip
        train.update.importance_cap train.update.importance_rule train.update.importance_floor
        train.update.kl_loss train.update.entropy_bonus train.update.aggregation train.update.constant_length
        train.update.critic.learning_rate train.update.critic.epochs
        train.update.critic.minibatches train.update.critic.value_clip train.update.critic.warmup.iterations
        train.update.critic.warmup.explained_variance train.update.critic.warmup.limit train.update.max_grad_norm
        train.monitor.on_collapse train.monitor.max_rollbacks train.monitor.patience
        train.monitor.first_iterations train.monitor.thresholds.reward_std_fall
        train.monitor.thresholds.entropy_fall train.monitor.thresholds.entropy_rise
        train.monitor.thresholds.surprisal_jump train.monitor.thresholds.long_step
        train.monitor.thresholds.grad_norm_spike train.monitor.thresholds.valid_call_fall
        train.monitor.thresholds.answer_repetition train.monitor.thresholds.thought_repetition
        train.validation.keep_best train.validation.patience
        env.agent env.instructions env.examples env.answers env.calls env.agents.*.examples
        env.max_result_characters env.top_k env.max_steps env.context.kind
        env.context.every env.parallel_calls env.games.protocol env.games.moves_per_step env.games.moves
        env.tools.search env.tools.calculator env.tools.read.part_characters env.tools.functions.*.module
        env.tools.mcp.*.command env.tools.mcp.*.url env.tools.mcp.*.scope env.tools.mcp.*.tools
        env.tools.mcp.*.environment env.gymnasium.*.task env.gymnasium.*.id env.gymnasium.*.success
        env.gymnasium.*.kwargs env.gymnasium.*.observation env.gymnasium.*.actions env.openenv.*.task
        env.openenv.*.url env.openenv.*.action env.openenv.*.observation env.openenv.*.success_above
        env.toolbox.*.task env.toolbox.*.class env.toolbox.*.success_above env.agents.*.function
        env.agents.*.command env.agents.*.url env.agents.*.version env.agents.*.environment env.agents.*.rewards
        env.agents.*.parallel env.agents.*.repeats env.agents.*.history
        model.path model.base model.template.* model.dtype model.lora.rank model.lora.alpha model.lora.targets
        warm_start.seed warm_start.fine_tune warm_start.vocab_size warm_start.hidden_size warm_start.layers
        warm_start.heads warm_start.demonstrations warm_start.naive_rag_demonstrations warm_start.conversations
        warm_start.stop_early warm_start.quotes warm_start.wrong_relation warm_start.by_relation warm_start.batch_size
        warm_start.steps warm_start.learning_rate warm_start.observation_weight warm_start.contexts
    """,
    # Another value computes the same but for rounding.
    "rounding": """
        train.update.max_tokens_per_microbatch warm_start.max_tokens_per_microbatch env.order
        model.threads model.float32_output model.gradient_checkpointing model.packing
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
        env.openenv.*.timeout_s env.toolbox.*.timeout_s env.tools.functions.*.timeout_s env.tools.mcp.*.timeout_s
        env.tools.python.timeout_s env.tools.python.memory_mib env.tools.python.workers
    """,
}
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
    return not any(fnmatchcase(name, pattern) for pattern in f"{KINDS['rounding']} {KINDS['room']}".split())
