"""Values of params.yaml that do not go together. Their own ranges are up to the types of the sections."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, get_args

from agent_r1.harmless import without_password
from agent_r1.params import stages
from agent_r1.params.credit import FALLING, OF_ANSWERS, WITH_CRITIC, WITH_WHITENING, CreditParams, FilterParams
from agent_r1.params.env import AgentParams, ContextParams, EnvParams, GymnasiumParams, McpParams
from agent_r1.params.places import SWEEP, RunId
from agent_r1.params.prepare import (
    BUILT_IN,
    HOPS,
    AtlasShares,
    OthersParams,
    PrepareParams,
    SokobanParams,
    WorldSeeds,
)
from agent_r1.params.sections import CHECKS, Section, nearest
from agent_r1.params.train import LARGEST_LOG_RATIO, MonitorParams, TrainParams, UpdateParams
from agent_r1.params.whole import AblationsParams, OneRun, Params

ALIKE = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline")  # one advantage for a whole trajectory
ROUNDING = 1e-9  # by which a sum of shares may miss 1
RUN_NAME = re.compile(r"\w+", re.ASCII)
FILTERS = ("top_p", "top_fraction")
MASKS = ("mask_token", "mask_sequence", "mask_mean")
SHORT = ("auto", "bfloat16", "float16")
CRITIC = tuple(sorted(WITH_CRITIC))
WHITENING = tuple(sorted(WITH_WHITENING))
DECLARE = "; declare it there"
SERVE = "start one with the line of docs/data_and_models.md#vllm-servers and name it there, as http://127.0.0.1:8001"
REWRITES = "set it to the exchanges of a window, or to the steps between two summaries"
DIVIDES = "set it to the tokens that a trajectory's sum is divided by"

Refusals = Iterator[str]


@dataclass(frozen=True, slots=True)
class Needs:
    """A knob that is read only where another one of its section has one of some values."""

    section: type[Section]
    knob: str
    off: Any  # its value where it is not read
    other: str
    values: tuple[Any, ...]  # of `other`, with which the knob is read
    why: str = ""  # nothing reads it with another value
    missing: str = ""  # the remedy if it is off where it is read; "" allows that

    def check(self, section: Section) -> Refusals:
        value, condition = attrgetter(self.knob, self.other)(section)
        choices = " or ".join(map(_shown, self.values))
        if value != self.off and condition not in self.values:
            what = f"{self.knob}: {_shown(value)} has no effect with {self.other}: {_shown(condition)}{self.why}"
            yield f"{what}; set {self.knob}: {_shown(self.off)}, or {self.other}: {choices}"
        if value == self.off and condition in self.values and self.missing:
            yield f"{self.other}: {_shown(condition)} needs {self.knob}, which is {_shown(value)}; {self.missing}"


def _shown(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value, default=str)


NEEDS = [
    Needs(FilterParams, "share", 1.0, "kind", FILTERS, ", which keeps every group"),
    Needs(FilterParams, "refill", 0, "kind", FILTERS, ", which drops no group"),
    Needs(stages.DenseParams, "nlist", 0, "faiss", ("ivf",), ", which looks at every passage"),
    Needs(stages.DenseParams, "nprobe", 0, "faiss", ("ivf",), ", which looks at every passage"),
    Needs(stages.ModelParams, "float32_output", False, "dtype", SHORT, ", in which all layers compute"),
    Needs(stages.EngineParams, "server.urls", [], "kind", ("server",), missing=SERVE),
    Needs(OthersParams, "reset", None, "env", ("openenv",), ", whose rows hold a seed, or a row"),
    Needs(OthersParams, "row", None, "env", ("toolbox",), ", whose rows hold a seed, or a reset"),
    Needs(OthersParams, "file", None, "env", ("openenv", "toolbox", "agent"), ", whose rows hold a seed"),
    Needs(McpParams, "environment", [], "url", (None,), ", which starts no process"),
    Needs(AgentParams, "environment", [], "url", (None,), ", which starts no process"),
    Needs(ContextParams, "every", 0, "kind", ("window", "summary"), ", which keeps everything", REWRITES),
    Needs(UpdateParams, "dual_clip", 0, "loss", ("clip",), ", whose weights clip_high bounds for every advantage"),
    Needs(UpdateParams, "importance_floor", 0, "importance_rule", MASKS, ", which leaves out no weight"),
    Needs(UpdateParams, "constant_length", 0, "aggregation", ("constant_length",), missing=DIVIDES),
    Needs(MonitorParams, "max_rollbacks", 0, "on_collapse", ("rollback",), missing="set it to 1 or more"),
    Needs(CreditParams, "whitening_floor", 0, "estimator", WHITENING, ", which does not whiten over the batch"),
    Needs(CreditParams, "advantage_mask.whitening", True, "estimator", WHITENING, ", which does not whiten"),
    Needs(CreditParams, "advantage_mask.critic", True, "estimator", CRITIC, ", which trains no critic"),
    Needs(CreditParams, "loss_mask", True, "advantage_mask.recursion", (False,), ", as advantages there are 0"),
]


def shares(p: AtlasShares) -> Refusals:
    total = sum(p.model_dump().values())
    if abs(total - 1) > ROUNDING:
        yield f"the kinds of questions together make {total:.4g} of all; give them shares that add up to 1"


def prepare(p: PrepareParams) -> Refusals:
    names = [BUILT_IN, *p.files, *p.worlds]
    if BUILT_IN in {*p.files, *p.worlds}:
        yield f"files and worlds: {BUILT_IN!r} is the built-in data set; name yours differently"
    for name, files in p.files.items():
        if name in p.worlds:
            yield f"{name!r} stands under files and under worlds; name one of them differently"
        if not files.splits:
            yield f"files.{name}: a data set needs a file of questions; give it train, dev or test"
        if files.format == "generic" and files.corpus is None:
            yield f"files.{name}: rows of format generic bring no passages along; name a corpus to search"
    for name in p.datasets:
        if name not in names:
            yield f"datasets names {name!r}, which neither files nor worlds define{nearest(name, names)}"
    yield from repeated(datasets=p.datasets)


def world(p: WorldSeeds) -> Refusals:
    if not p.given:
        yield "a world needs seeds: give it train, dev or test, such as test: [123, 379]"
    for split, (first, stop) in p.given.items():
        if first >= stop:
            yield f"{split} {[first, stop]} holds no seed; the second is the one after the last"


def sokoban(p: SokobanParams) -> Refusals:
    boards = sum(p.test_lengths.values())
    first, stop = p.given.get("test", (0, 0))
    if p.walls > 1 / 2:
        yield f"walls {p.walls} leaves no room to push; take at most .5"
    if boards and boards != stop - first:
        yield f"test_lengths are {boards} boards and test {[first, stop]} holds {stop - first} seeds; make them as many"
    if boards and max(p.test_lengths) > p.most_moves:
        yield f"test_lengths names {max(p.test_lengths)} moves and most_moves is {p.most_moves}; raise that"


def gymnasium(p: GymnasiumParams) -> Refusals:
    mode = p.kwargs.get("render_mode", "ansi")
    if mode != "ansi":
        yield f"kwargs.render_mode {mode!r} draws no text; set it to ansi, or leave it out to show what is observed"
    if p.observation and "render_mode" in p.kwargs:
        yield f"observation {p.observation!r} has no effect where kwargs.render_mode draws; leave out one of the two"
    [(name, times)] = Counter(action.casefold() for action in p.actions or ["any"]).most_common(1)
    if times > 1:
        yield f"actions names {name!r} {times} times, in whatever case; give every move a name of its own"


def search(p: stages.SearchParams) -> Refusals:
    if p.kind in ("dense", "hybrid") and not p.dense.encoder:
        yield f"kind: {p.kind} needs an encoder; set dense.encoder to a Hugging Face folder or hub id"
    if p.kind == "remote" and not p.remote.url.startswith(("http://", "https://")):
        yield f"kind: remote needs a search server; set remote.url to its http:// address; got {p.remote.url!r}"
    if p.dense.faiss == "ivf" and not 1 <= p.dense.nprobe <= p.dense.nlist:
        yield f"dense.nprobe {p.dense.nprobe} is not from 1 to nlist {p.dense.nlist}, as faiss: ivf needs; set one anew"


def learner(p: stages.LearnerParams) -> Refusals:
    if p.optimizer_offload and p.ranks > 1:
        why = f"needs one GPU, and there are {p.ranks} ranks, each with a part of the states"
        yield f"optimizer_offload: true {why}; set it to false, or processes and nodes to 1"
    if p.defer_reduction and p.ranks == 1:
        yield "defer_reduction: true has no effect on one rank; set it to false, or processes to 2 or more"
    if p.replicate and p.nodes == 1:
        yield "replicate: true has no effect on one machine; set it to false, or nodes to 2 or more"


def servers(p: stages.ServerParams) -> Refusals:
    if len(set(p.urls)) < len(p.urls):
        yield f"urls names a server twice: {', '.join(p.urls)}; name it once"


def evaluate(p: stages.EvaluateParams) -> Refusals:
    if p.samples > 1 and p.temperature == 0:
        yield f"samples: {p.samples} at temperature: 0 are one answer as often; set samples: 1, or temperature: 1"


def mcp(p: McpParams) -> Refusals:
    if (p.command is None) == (p.url is None):
        yield "a server is a command that is started or the url of one that runs; give one of the two"


def agent(p: AgentParams) -> Refusals:
    if sum(form is not None for form in (p.function, p.command, p.url)) != 1:
        yield "an agent is a function, a command that is started or the url of a service; give one of the three"
    if (p.url is None) != (not p.version):
        yield f"version is {p.version!r}, and a service has one that changes with it, others none; see to that"
    yield from repeated(rewards=p.rewards)


def outside(p: EnvParams, name: str) -> Refusals:
    """Refuses settings that an agent outside cannot play under, or changes nothing of."""
    if p.order == "rounds":
        why = "would wait for episodes of an agent outside that have not begun"
        yield f"order: rounds {why}, and agent is {name!r}; set it to arrival or exact_arrival"
    if p.context.kind != "append":
        why = f"has no effect on the agent outside {name!r}, which writes its contexts itself"
        yield f"context.kind: {p.context.kind} {why}; set it to append"


def env(p: EnvParams) -> Refusals:
    if p.agent is not None and p.agent not in p.agents:
        close = nearest(p.agent, p.agents) if p.agents else DECLARE
        yield f"agent is {p.agent!r}, which env.agents does not define{close}"
    if p.agent is not None:
        yield from outside(p, p.agent)
    for name, agent in p.agents.items():
        if agent.examples and not p.examples:
            yield f"agents.{name}.examples has no effect without env.examples; name a file there, or leave it out"
    tools = p.tools
    games = p.games
    if not any((tools.functions, tools.mcp)) and {tools.search, tools.calculator, tools.read, tools.python} == {None}:
        yield "tools: a question cannot be answered without any tool; offer one, such as search: {}"
    if tools.read and tools.read.part_characters >= p.max_result_characters:
        setting = f"tools.read.part_characters {tools.read.part_characters}"
        yield f"{setting} would be cut at max_result_characters {p.max_result_characters}; make parts smaller"
    if games.moves_per_step > games.moves:
        setting = f"games.moves_per_step {games.moves_per_step}"
        yield f"{setting} has no effect above an episode's moves, {games.moves}; lower it, or raise moves"
    if p.max_action_tokens >= p.max_tokens:
        setting = f"max_action_tokens {p.max_action_tokens}"
        yield f"{setting} leaves no room for a prompt in max_tokens {p.max_tokens}; raise max_tokens"
    yield from (f"context.{problem}" for problem in reading(p.context, p))


def reading(context: ContextParams, p: EnvParams) -> Refusals:
    """Refuses a rule of the context under which an episode ends before it is rewritten."""
    steps = 2 if context.kind == "window" else 1  # steps that the last rewriting leaves, at least
    if context.every > p.max_steps - steps:
        setting = f"every {context.every} has no effect with kind: {context.kind} and max_steps {p.max_steps}"
        yield f"{setting}, which end an episode before its context is rewritten; lower it, or raise max_steps"


def credit(p: CreditParams) -> Refusals:
    estimator = f"estimator {p.estimator}"
    mask = p.advantage_mask
    if not any(p.rewards.weights.values()) and not p.kl_reward:
        yield "all reward weights are 0: nothing can be learned; set at least one above 0"
    divides_by_std = p.estimator == "grpo" or (p.estimator == "gigpo" and p.gigpo.std)
    if divides_by_std and p.kl_reward:
        why = "would be scaled up to unit variance where a group's rewards are equal"
        yield f"kl_reward {p.kl_reward} with {estimator} {why}; set it to 0, and train.update.kl_loss instead"
    penalties = [f"rewards.{part}" for part in FALLING if p.rewards.weights[part]] + ["kl_reward"] * (p.kl_reward > 0)
    if p.estimator == "maxrl" and penalties:
        why = f"takes returns of 0 and above, and {penalties[0]} may be below; set it to 0"
        yield f"{estimator} {why}, and weigh others, such as success"
    if (p.rewards.overlong > 0) != (p.overlong_buffer > 0):
        setting = f"overlong_buffer {p.overlong_buffer} with rewards.overlong {p.rewards.overlong}"
        yield f"{setting} has no effect; set both above 0, or both to 0"
    if p.rewards.overlong and p.left_out.truncated:
        setting = f"rewards.overlong {p.rewards.overlong} prices episodes that left_out.truncated: true"
        yield f"{setting} leaves out of the policy loss; set overlong and overlong_buffer to 0, or truncated: false"
    if p.on_steps and not (p.loss_mask and mask.recursion and mask.critic):
        masks = "loss_mask, advantage_mask.recursion and advantage_mask.critic"
        yield f"{estimator} works on steps, which hold action tokens only; leave {masks} true"
    if p.loss_mask and mask.whitening and not mask.recursion and p.observations_cannot_matter:
        setting = f"advantage_mask.recursion: false has no effect on {estimator} at gamma {p.gamma} and lam {p.lam}"
        why = "while the loss mask is on: the advantages at action tokens stay the same"
        yield f"{setting} {why}; set loss_mask: false or recursion: true"


def update(p: UpdateParams) -> Refusals:
    if 0 < p.importance_cap < 1:
        why = "cuts the weight even where sampler and learner agree"
        yield f"importance_cap {p.importance_cap} {why}; set it to 1 or more, or to 0 to switch it off"
    if p.importance_rule != "cap" and not p.importance_cap:
        why = "has no upper bound, which importance_cap: 0 switches off; set that to one, such as 5.0 as IcePop does"
        yield f"importance_rule: {p.importance_rule} {why}"
    if p.loss == "cispo" and p.ratio == "sequence_token":
        why = "is ratio: sequence with loss: cispo, which takes no gradient through the ratio"
        yield f"ratio: sequence_token {why}; set ratio: sequence"
    largest = math.exp(LARGEST_LOG_RATIO)  # a ratio's logarithm is clamped
    bounds = {"clip_high": 1 + p.clip_high, "dual_clip": p.dual_clip, "importance_cap": p.importance_cap}
    for name in [name for name, bound in bounds.items() if bound >= largest]:
        yield f"{name} {getattr(p, name):g} never acts: ratios end at e^20, {largest:.3g}; lower it"
    if p.loss == "clip" and 1 - p.clip_low <= 1 / largest:
        yield f"clip_low {p.clip_low:.17g} never acts: ratios begin at e^-20, {1 / largest:.3g}; lower it"
    warmup = p.critic.warmup
    if warmup.explained_variance and warmup.limit <= warmup.iterations:
        setting = f"critic.warmup.explained_variance {warmup.explained_variance} has no effect"
        why = f"with limit {warmup.limit}, which iterations {warmup.iterations} reaches"
        yield f"{setting} {why}; raise the limit, or set both to 0"
    if warmup.limit and not warmup.explained_variance:
        setting = f"critic.warmup.limit {warmup.limit} has no effect without explained_variance"
        yield f"{setting}; set limit: 0, or explained_variance above 0"


def train(p: TrainParams) -> Refusals:
    if not p.validation.every and (p.validation.keep_best or p.validation.patience):
        yield "validation.every: 0 validates nothing for keep_best and patience; set every to 1 or more"
    if "://" in p.reference and not p.reference_at:
        yield f"reference {without_password(p.reference)!r} is no model at a server; write NAME at https://HOST/v1"
    if p.reference and not p.needs_reference:
        setting = f"reference {p.reference!r} has no effect while credit.kl_reward and update.kl_loss are 0"
        yield f"{setting}; set one above 0, or leave it out"
    yield from groups(p)
    yield from minibatches(p)
    yield from warmups(p)
    yield from collapses(p)
    if p.validation.keep_best and p.keep.learner:
        why = "would leave the best policy beside the critic and the optimisers of the last one"
        yield f"validation.keep_best: true with keep.learner: true {why}; choose one of them"


def collapses(p: TrainParams) -> Refusals:
    collapse = f"monitor.on_collapse: {p.monitor.on_collapse}"
    patience = p.monitor.patience
    if p.monitor.on_collapse != "warn" and not any(p.monitor.thresholds.model_dump().values()):
        yield f"{collapse} has no effect while every threshold is 0; set one above 0, or warn"
    if p.monitor.on_collapse != "warn" and p.iterations <= patience:
        why = f"monitor.patience {patience} allows no alarm in {p.iterations} iterations"
        yield f"{collapse} has no effect: {why}; lower the patience"
    if p.validation.keep_best and p.monitor.goes_back:
        why = "the best policy may be of an iteration that the run went back from"
        yield f"validation.keep_best: true with {collapse}: {why}; choose one of them"
    if p.checkpoint.every > 1 and p.monitor.goes_back:
        why = "a run goes back to the checkpoint that an iteration began with, and most would have none"
        yield f"checkpoint.every {p.checkpoint.every} with {collapse}: {why}; set every: 1, or on_collapse: stop"


def groups(p: TrainParams) -> Refusals:
    estimator = f"estimator {p.credit.estimator}"
    selection = p.credit.filter
    few = f"and rollout.samples is {p.rollout.samples}; set it to 2 or more"
    if p.credit.in_groups and p.rollout.samples < 2:
        yield f"{estimator} compares the episodes of a group, {few}"
    if selection.kind != "none" and p.rollout.samples < 2:
        yield f"credit.filter {selection.kind} looks at how returns differ within a group, {few}"
    if p.update.ratio == "sequence_token" and p.credit.in_groups and not p.credit.on_steps:
        why = f"gives the gradient of ratio: sequence with {estimator}, whose advantage is the same at all tokens"
        yield f"update.ratio: sequence_token {why}; set ratio: sequence, or choose another estimator"
    if p.rollout.ahead and selection.refill:
        why = "the groups to replace are known of weights that are an update behind"
        yield f"rollout.ahead: 1 with credit.filter.refill {selection.refill}: {why}; choose one of them"


def minibatches(p: TrainParams) -> Refusals:
    kind = p.credit.filter.kind
    samples = p.rollout.samples
    trajectories = p.rollout.questions * p.rollout.samples
    counts = {"update.minibatches": p.update.minibatches}
    if p.credit.needs_critic:
        counts["update.critic.minibatches"] = p.update.critic.minibatches
    for name, count in counts.items():
        fill = f"do not fill {name} {count}; lower it or raise"
        if kind != "none" and samples < count:
            yield f"credit.filter {kind} may keep a single group, whose {samples} trajectories {fill} rollout.samples"
        if trajectories < count:
            product = "(rollout.questions times rollout.samples)"
            yield f"{trajectories} trajectories per iteration {product} {fill} rollout.questions"


def warmups(p: TrainParams) -> Refusals:
    rise = p.update.learning_rate_warmup
    if rise >= p.iterations:
        yield f"update.learning_rate_warmup {rise} lasts all {p.iterations} iterations; lower it or raise iterations"


def ablations(p: AblationsParams) -> Refusals:
    agents = [*p.runs, *p.baselines]
    closer = p.closer
    yield from repeated(runs=p.runs, seeds=p.seeds, baselines=p.baselines, references=p.references)
    yield from (f"closer.{refusal}" for refusal in repeated(runs=closer.runs, seeds=closer.seeds))
    if bool(closer.runs) != bool(closer.seeds):
        yield "closer: runs and seeds belong together; give both, or [] for both"
    for name in [name for name in p.references if name not in agents]:
        yield f"references names {name!r}, which is none of its runs and baselines{nearest(name, agents)}"
    for run in [run for run in closer.runs if run not in p.runs]:
        yield f"closer.runs names {run!r}, which runs does not{nearest(run, p.runs)}"
    for seed in [seed for seed in closer.seeds if seed in p.seeds]:
        yield f"closer.seeds names {seed}, which every run has already; give it further ones"
    if "seed" in p.train:
        yield "train.seed has no effect, every run is trained with each of `seeds`; leave it out"


def repeated(**lists: Iterable[Any]) -> Refusals:
    for what, values in lists.items():
        for value in [value for value, count in Counter(values).items() if count > 1]:
            yield f"{what} names {value!r} more than once; leave one of them"


def warm_start(p: Params) -> Refusals:
    settings = p.warm_start
    demonstrations = f"warm_start.demonstrations {p.warm_start.demonstrations}"
    passed_through = p.model.path and not settings.fine_tune
    if settings.fine_tune and not p.model.path:
        yield "warm_start.fine_tune: true has no effect on the built-in model; set model.path, or fine_tune: false"
    if settings.conversations and passed_through:
        why = "has no effect on the model of model.path, which is passed through"
        remedy = 'set warm_start.fine_tune: true, or conversations: ""'
        yield f"warm_start.conversations {settings.conversations!r} {why}; {remedy}"
    if settings.demonstrations and p.prepare.asks and p.env.tools.search is None:
        yield f"{demonstrations} show how to search, and env.tools.search is null; set it to {{}}, or demonstrations: 0"
    for context in settings.contexts:
        yield from (f"warm_start.contexts: {problem}" for problem in reading(context, p.env))
    if not (settings.demonstrations or settings.naive_rag_demonstrations or settings.conversations or passed_through):
        remedy = "set demonstrations or naive_rag_demonstrations above 0, or conversations to a file"
        yield f"warm_start has nothing to learn from: {remedy}"


def habits(p: stages.WarmStartParams) -> Refusals:
    if p.by_relation and not (p.stop_early or p.wrong_relation):
        setting = f"by_relation {p.by_relation} has no effect while stop_early and wrong_relation are 0"
        yield f"{setting}; set one of them above 0, or by_relation: 0"


def lengths(p: Params) -> Refusals:
    """Refuses demonstrations that the limit of steps would cut before their answer."""
    shares = p.prepare.atlas.shares.model_dump()
    actions = max(hops for kind, hops in HOPS.items() if shares[kind]) + 1
    if p.warm_start.demonstrations and BUILT_IN in p.prepare.datasets and actions > p.env.max_steps:
        setting = f"warm_start.demonstrations take up to {actions} actions, and env.max_steps is {p.env.max_steps}"
        yield f"{setting}; raise it to {actions}, or set the shares of longer questions to 0"


def worlds(p: Params) -> Refusals:
    for name in p.prepare.datasets:
        match p.prepare.worlds.get(name):
            case OthersParams(env="agent", name=meant) if meant in p.env.agents:
                yield from (f"env.{problem}" for problem in outside(p.env, meant))
            case OthersParams(env=kind, name=meant):
                names = p.env.declared.get(kind, p.env.agents)
                if meant not in names:
                    section = "agents" if kind == "agent" else kind
                    close = nearest(meant, names) if names else DECLARE
                    yield f"prepare.worlds.{name}.name is {meant!r}, which env.{section} does not define{close}"


def base(p: Params) -> Refusals:
    if p.model.base == "four_bit" and not (p.model.adapter and p.learner.ranks == 1):
        what = f"model.lora.rank is {p.model.lora.rank} and learner has processes times nodes: {p.learner.ranks}"
        yield f"model.base: four_bit is for adapters of one process, and {what}; set them to 64 and 1, or base: full"


def whole(p: Params) -> Refusals:
    yield from warm_start(p)
    yield from lengths(p)
    yield from worlds(p)
    yield from base(p)
    if p.engine.kind == "transformers" and p.env.order != "rounds":
        why = "needs an engine that takes requests in while it samples, and engine.kind is transformers"
        yield f"env.order: {p.env.order} {why}; set env.order: rounds, or engine.kind: vllm"
    baselines = {"as_shipped", "with_examples"}.intersection(p.repro_baselines + p.ablations.baselines)
    if baselines and not p.model.path:
        yield f"{' and '.join(sorted(baselines))} need a model that is shipped; set model.path, or leave them out"
    if ("with_examples" in baselines) != bool(p.evaluate.examples):
        yield "evaluate.examples and the baseline with_examples go together; set both, or neither"
    for name in p.runs:
        if not RUN_NAME.fullmatch(name):
            yield f"runs: {name!r} is to be a folder and a DVC stage; use letters, digits and _ only"
        if name in get_args(stages.Baseline):
            yield f"runs: {name!r} is the name of a baseline; name the run differently"
        p.run(RunId(name))
    for where, names in (("repro_runs", p.repro_runs), ("ablations.runs", p.ablations.runs)):
        for name in [name for name in names if name not in p.runs]:
            yield f"{where} names {name!r}, which runs: does not define{nearest(name, p.runs)}"
    for name in p.ablations.runs:
        p.run(RunId(name, sweep=SWEEP))


def run(p: OneRun) -> Refusals:
    credit = p.train.credit
    tokens = p.settings.env.max_tokens
    if credit.overlong_buffer >= tokens:
        setting = f"credit.overlong_buffer {credit.overlong_buffer} leaves nothing of env.max_tokens {tokens}"
        yield f"{setting} that is not too long; lower it"
    if p.train.rollout.ahead:
        yield from ahead(p.settings.engine)
    yield from played_outside(credit, p.settings)
    yield from unstated_rewards(credit, p.settings)


def ahead(engine: stages.EngineParams) -> Refusals:
    """Refuses engines that cannot sample an iteration ahead."""
    if engine.kind == "transformers":
        why = "needs an engine that samples while the learner learns, and engine.kind is transformers"
        yield f"rollout.ahead: 1 {why}; set engine.kind: vllm, or ahead: 0"
    if engine.kind == "vllm" and engine.vllm.sleep:
        why = "samples while the learner learns, and with engine.vllm.sleep: true the sampler sleeps then"
        yield f"rollout.ahead: 1 {why}; set one of them back"


def played_outside(credit: CreditParams, settings: Params) -> Refusals:
    """Refuses credit that the episodes of agents outside do not bear."""
    worlds = [settings.prepare.worlds.get(name) for name in settings.prepare.datasets]
    names = {world.name for world in worlds if isinstance(world, OthersParams) and world.env == "agent"}
    agents = [agent for name, agent in settings.env.agents.items() if name in {settings.env.agent, *names}]
    if any(agent.parallel for agent in agents) and credit.estimator not in ALIKE:
        why = "takes the value of the next step, and steps of requests at the same time have no order"
        yield f"estimator {credit.estimator} {why}; set the agent's parallel: false, or take {' or '.join(ALIKE)}"
    for part in [part for part in ("grounded", "progress") if agents and credit.rewards.weights[part]]:
        yield f"credit.rewards.{part} has no effect: nobody sees what an agent outside shows; set it to 0"


def unstated_rewards(credit: CreditParams, settings: Params) -> Refusals:
    """Refuses parts of the reward that neither a function nor an environment or agent states."""
    stated = {part for agent in settings.env.agents.values() for part in agent.rewards}
    for part, reward in credit.rewards.own.items():
        if (part in stated) == bool(reward.function):
            why = "a function and a part of an agent's" if reward.function else "no function, and no part of an agent's"
            yield f"credit.rewards.{part} is {why}; give it a function, or name it in rewards of one of env.agents"
    data = settings.prepare
    unstated = ([] if data.asks else OF_ANSWERS) + ([] if data.plays else ["env"])
    for part in [part for part in unstated if credit.rewards.weights[part]]:
        why = f"no environment of the data sets {', '.join(data.datasets)} states it"
        remedy = f"set it to 0, and weigh {'success' if data.asks else 'env or success'}"
        yield f"credit.rewards.{part} {credit.rewards.weights[part]} has no effect, because {why}; {remedy}"


TABLE: dict[type[Section], Callable[[Any], Refusals]] = {
    AtlasShares: shares,
    PrepareParams: prepare,
    WorldSeeds: world,
    SokobanParams: sokoban,
    GymnasiumParams: gymnasium,
    stages.SearchParams: search,
    stages.LearnerParams: learner,
    stages.ServerParams: servers,
    stages.WarmStartParams: habits,
    stages.EvaluateParams: evaluate,
    McpParams: mcp,
    AgentParams: agent,
    EnvParams: env,
    CreditParams: credit,
    UpdateParams: update,
    TrainParams: train,
    AblationsParams: ablations,
    Params: whole,
    OneRun: run,
}


def register() -> None:
    """Has the sections ask."""
    for kind, check in (*((need.section, need.check) for need in NEEDS), *TABLE.items()):
        CHECKS[kind].append(check)
