"""params.yaml: what it holds is accepted, and every mistake is refused by the name of its key."""

from __future__ import annotations

import copy
import json
import math
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from agent_r1.facts import differences
from agent_r1.files import write_text
from agent_r1.params import SHIPPED, Params, fingerprint, load
from agent_r1.params.credit import STEP_LEVEL, WITH_GROUPS, Estimator
from agent_r1.params.places import RunId
from agent_r1.params.sections import flatten, override, validated

FILE = Path(__file__).parents[1] / "params.yaml"
INF, NAN = float("inf"), float("nan")
NO_OTHERS = {"ablations.closer": {"runs": [], "seeds": []}, "ablations.references": []}
# The other runs' overrides cannot be refused then.
ONLY_PPO = {"runs": {"ppo": {}}, "repro_runs": ["ppo"], "ablations.runs": ["ppo"], **NO_OTHERS}
PRESETS: dict[str, dict[str, Any]] = {
    "GROUP": {"train.rollout.samples": 4},
    "UNTAUGHT": {"warm_start.demonstrations": 0, "warm_start.naive_rag_demonstrations": 0},
    "BACK": {"train.monitor.on_collapse": "rollback", "train.monitor.max_rollbacks": 1},
    "ICE": {"prepare.worlds.ice": {"env": "gymnasium", "name": "lake", "test": [0, 2]}},
    "CODER": {"prepare.worlds.ice": {"env": "agent", "name": "coder", "test": [0, 2]}},
    "ROOM": {"prepare.worlds.ice": {"env": "sokoban", "size": 6, "walls": 0.1, "most_moves": 5, "test": [0, 9]}},
}
# Keys that params.yaml may leave out. DVC sees no default: a changed one would leave the outputs of stages as they are.
DEFAULTS = {
    "places.scale": "",
    "search.cache_entries": 10_000,
    "search.hybrid.rrf_constant": 60,
    "search.remote.backoff_s": 0.5,
    **{f"env.tools.{name}": None for name in ("calculator", "read", "python")},
    **{f"train.credit.rewards.{name}": 0.0 for name in load(FILE).train.credit.rewards.weights if name != "agent_r1"},
    "train.update.critic.value_clip": 0.5,
    "train.update.proved_trajectories": 16,
    "train.monitor.first_iterations": 3,
    "train.monitor.thresholds.reward_std_fall": 0.4,
    "train.monitor.thresholds.entropy_fall": 0.1,
    "train.monitor.thresholds.entropy_rise": 4.0,
    "train.monitor.thresholds.grad_norm_spike": 5.0,
    "train.monitor.thresholds.valid_call_fall": 0.7,
    "train.monitor.thresholds.answer_repetition": 0.5,
    "train.monitor.thresholds.thought_repetition": 0.5,
    "operate.retry_delay_s": 30.0,
}


@pytest.fixture(scope="module")
def content() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(FILE.read_text())
    return loaded


@pytest.fixture(scope="module")
def params() -> Params:
    return load(FILE)


def put(content: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A copy with the values at the dotted keys, which are made where they are missing."""
    changed = copy.deepcopy(content)
    for key, value in changes.items():
        *parents, last = key.split(".")
        section = changed
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = copy.deepcopy(value)
    return changed


def check(content: dict[str, Any], changes: dict[str, Any]) -> Params:
    """The parameters with changes, as `load` would take them from a file."""
    return validated(Params, put(content, changes), "params.yaml")


def changes_in(line: str, section: str = "") -> dict[str, Any]:
    """The changes of a line like `+PRESET, KEY: VALUE, /KEY: VALUE`; a key after / is no key of the section."""
    preset, _, rest = line.partition(", ") if line.startswith("+") else ("", "", line)
    given = yaml.safe_load(f"{{{rest}}}").items()
    named = {key[1:] if key.startswith("/") else f"{section}.{key}".strip("."): value for key, value in given}
    return PRESETS.get(preset[1:], {}) | named


def pattern(message: str) -> str:
    """The pattern of a message with gaps, which are written as ` ... `."""
    return ".*".join(map(re.escape, message.split(" ... ")))


def test_the_projects_own_file_loads_and_travels_with_the_package(params: Params) -> None:
    assert set(params.runs) >= {"ppo", "ppo_no_advantage_mask", "ppo_no_masks", "grpo", "grpo_no_loss_mask"}
    assert params.repro_runs == ["ppo", "ppo_no_advantage_mask", "ppo_no_masks"]
    assert load(SHIPPED) == params
    with pytest.raises(ValueError, match="frozen"):
        params.train.seed = 1  # type: ignore[misc]


def test_keys_that_may_be_left_out_have_these_values(content: dict[str, Any], params: Params) -> None:
    given = {key for key in flatten(content) if not key.startswith(("runs.", "prepare.files."))}
    whole = flatten(params.model_dump(mode="json", exclude={"runs": True, "prepare": {"files"}}))
    assert {key: value for key, value in whole.items() if key not in given} == DEFAULTS
    assert params.prepare.files["musique"].splits["test"].questions == 0
    assert params.operate.timeout_s("index") == 600
    assert params.operate.timeout_s("train_closer") == params.operate.timeouts_s["train"]


def test_runs_override_only_what_they_name(params: Params) -> None:
    assert params.run(RunId("ppo")) == params.train
    unmasked = params.run(RunId("ppo_no_advantage_mask"))
    assert not any(unmasked.credit.advantage_mask.model_dump().values())
    assert unmasked.credit.loss_mask
    assert unmasked.credit.rewards == params.train.credit.rewards
    assert unmasked.update == params.train.update
    assert not params.run(RunId("ppo_no_masks")).credit.loss_mask
    grpo = params.run(RunId("grpo"))
    assert grpo.credit.estimator == "grpo"
    assert grpo.rollout.samples > 1
    assert grpo.credit.gamma == params.train.credit.gamma


def test_every_estimator_has_a_run_of_its_name_or_is_ppo(params: Params) -> None:
    for estimator in get_args(Estimator):
        run = params.run(RunId("ppo" if estimator == "gae" else estimator))
        assert run.credit.estimator == estimator
        assert run.credit.advantage_mask == params.train.credit.advantage_mask
        assert (run.rollout.samples > 1) == (estimator in WITH_GROUPS)


def test_starpos_runs_differ_in_what_they_are_named_after(params: Params) -> None:
    starpo, filtered, online = (params.run(RunId(name)) for name in ("starpo", "starpo_s", "starpo_online_4"))
    assert starpo.credit.estimator == "gae"
    assert starpo.credit.gamma == starpo.credit.lam == 1
    assert starpo.update.clip_low == starpo.update.clip_high < filtered.update.clip_high
    assert (filtered.credit.filter.kind, filtered.credit.filter.share) == ("top_fraction", 0.25)
    assert filtered.rollout == starpo.rollout
    later = params.run(RunId("ragen2"))
    assert (later.credit.filter.kind, later.credit.filter.share) == ("top_p", 0.9)
    assert later.credit.model_copy(update={"filter": filtered.credit.filter}) == filtered.credit
    assert (later.rollout, later.update) == (filtered.rollout, filtered.update)
    assert params.run(RunId("starpo_grpo")).rollout == starpo.rollout
    assert online.update.epochs * online.update.minibatches == 4
    shaped = params.run(RunId("starpo_32x4")).rollout
    assert shaped.questions * shaped.samples == starpo.rollout.questions * starpo.rollout.samples


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("dapo", {"credit.estimator": "grpo", "credit.filter.share": 1.0, "credit.rewards.overlong": 1.0}),
        ("dapo", {"update.clip_low": 0.2, "update.clip_high": 0.28, "update.aggregation": "token_mean"}),
        ("gspo", {"credit.estimator": "grpo", "update.ratio": "sequence", "update.minibatches": 4}),
        ("gspo", {"update.clip_low": 3e-4, "update.clip_high": 4e-4, "update.aggregation": "sequence_mean"}),
        ("gspo", {"update.dual_clip": 0.0}),
        ("dapo", {"update.dual_clip": 0.0}),
        ("cispo", {"update.loss": "cispo", "update.clip_low": 1.0, "update.clip_high": 4.0, "update.dual_clip": 0.0}),
        ("gigpo", {"credit.step_gamma": 0.95, "credit.gigpo.weight": 1.0, "credit.gigpo.std": False}),
        ("steppo", {"credit.estimator": "step_gae", "credit.step_gamma": 0.99, "credit.step_lam": 1.0}),
        ("steppo", {"update.ratio": "step", "update.minibatches": 1, "update.clip_low": 0.2, "update.clip_high": 0.2}),
    ],
)
def test_presets_have_the_published_values(params: Params, name: str, published: dict[str, Any]) -> None:
    run = flatten(params.run(RunId(name)).model_dump())
    assert {key: run[key] for key in published} == published
    assert run["update.kl_loss"] == run["credit.kl_reward"] == 0


def test_adding_a_run_is_adding_lines(tmp_path: Path, params: Params) -> None:
    path = tmp_path / "params.yaml"
    lines = "\n  ppo_hot:\n    update: {learning_rate: 1.0e-3}\n  ppo_again:\n"
    path.write_text(FILE.read_text().replace("\n\nrepro_runs:", f"{lines}\nrepro_runs:"))
    added = load(path)
    assert added.run(RunId("ppo_hot")).update.learning_rate == 1e-3
    assert added.run(RunId("ppo_again")) == added.train
    assert added.run(RunId("ppo")) == params.run(RunId("ppo"))


def test_every_mistake_is_named_at_once(content: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"(?s)'env\.topk'.*evaluate\.seed"):
        check(content, {"env.topk": 1, "evaluate.seed": -1})


@pytest.mark.parametrize("key", ["train", "runs", "prepare.files", "train.credit.rewards", "model.path"])
def test_a_missing_key_is_refused(content: dict[str, Any], key: str) -> None:
    content = copy.deepcopy(content)
    *parents, last = key.split(".")
    mapping = content
    for parent in parents:
        mapping = mapping[parent]
    del mapping[last]
    with pytest.raises(ValueError, match=f"key '{key}' is missing"):
        check(content, {})


OUT_OF_RANGE: list[tuple[Any, str, str]] = [
    (0, "train.credit.gigpo", "weight"),
    ("board", "train.credit.gigpo", "state"),
    (1e-9, "train.credit.filter", "share"),
    (INF, "train.credit.gigpo", "weight"),
    (0, "train.rollout", "questions samples"),
    (0, "train.update", "learning_rate clip_low minibatches"),
    (0, "train.monitor", "patience first_iterations"),
    (0, "search", "bm25.k1 dense.max_tokens hybrid.candidates remote.timeout_s"),
    (0, "engine", "vllm.threads vllm.cpu_cache_gib transformers.batch_size server.concurrency server.timeout_s"),
    (0, "train", "keep.every checkpoint.every credit.filter.share"),
    (0, "model", "threads lora.alpha"),
    (-1, "train.credit", "lam step_lam filter.refill rewards.agent_r1 overlong_buffer whitening_floor"),
    (-1, "train.update", "importance_cap kl_loss constant_length weight_decay learning_rate_warmup"),
    ([0.9, 1.0], "train.update", "betas"),
    ([0.9], "train.update", "betas"),
    (-1, "", "search.cache_entries engine.server.retries train.monitor.max_rollbacks model.lora.rank"),
    (-1, "prepare.files.musique.test", "questions"),
    (0.5, "train.monitor.thresholds", "entropy_rise"),
    (1.0, "train.update", "dual_clip"),
    (1.5, "train.update", "clip_low"),
    (1.0, "train.monitor.thresholds", "grad_norm_spike"),
    (1.5, "train", "credit.gamma credit.step_gamma credit.filter.share"),
    (1.5, "search", "bm25.b"),
    (1.5, "engine.vllm", "gpu_memory_utilization"),
    (1.5, "train.monitor.thresholds", "reward_std_fall"),
    (2.0, "warm_start", "stop_early"),
    (3, "prepare.atlas", "people"),
    (10, "evaluate", "bootstrap_samples"),
    (-1, "evaluate", "price_per_device_hour"),
    (64, "env", "max_tokens"),
    (INF, "train", "credit.rewards.progress credit.kl_reward update.dual_clip monitor.thresholds.grad_norm_spike"),
    (INF, "search.remote", "backoff_s"),
    (NAN, "train", "credit.rewards.progress update.entropy_bonus"),
    (NAN, "evaluate", "price_per_device_hour"),
    ("other", "train", "credit.estimator credit.filter.kind keep.learner monitor.on_collapse update.ratio iterations"),
    ("other", "train.credit.left_out", "truncated void_step"),
    ("other", "train.update", "aggregation loss"),
    ("other", "", "search.kind search.dense.pooling model.dtype engine.kind prepare.files.musique.format"),
    ([], "prepare", "datasets"),
    ([], "model.lora", "targets"),
    (["127.0.0.1:8001"], "engine.server", "urls"),
    (True, "train", "monitor.thoughts_every iterations update.learning_rate"),
]


@pytest.mark.parametrize(
    ("key", "value"),
    [(f"{section}.{key}".strip("."), value) for value, section, keys in OUT_OF_RANGE for key in keys.split()],
)
def test_a_value_out_of_range_is_refused(content: dict[str, Any], key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=key.rpartition(".")[2]):
        check(content, {key: value})


# Section -> changes of its keys | what is said, in parts. For `train` there is no run but ppo.
REFUSED = {
    "prepare": r"""
        datasets: [hotpot] | prepare: datasets names 'hotpot', which neither files nor ... did you mean 'hotpotqa'
        datasets: [musique, musique] | datasets names 'musique' more than once
        files.own: {format: hotpotqa} | prepare: files.own: a data set needs a file of questions; give it train, dev or
        files.own: {format: generic, test: {file: x}} | files.own: rows of format generic bring no passages ... a corpus
        files.atlas: {format: musique, test: {file: x}} | 'atlas' is the built-in data set; name yours differently
        files.a/b: {format: musique, test: {file: x}} | prepare.files.a/b
        worlds.atlas: {env: bandit, test: [0, 9]} | 'atlas' is the built-in data set; name yours differently
        worlds.musique: {env: bandit, test: [0, 9]} | 'musique' stands under files and under worlds; name one
        atlas.shares.age: 0.5 | prepare.atlas.shares: the kinds ... make 1.5 of all; give them shares that add up to 1
    """,
    "search": r"""
        dense.nlist: 8 | search.dense: nlist: 8 has no effect with faiss: flat, which ... set nlist: 0, or faiss: ivf
        dense.nprobe: 2 | nprobe: 2 has no effect with faiss: flat, which looks at every passage
        dense.faiss: ivf, dense.nlist: 8 | dense.nprobe 0 is not from 1 to nlist 8, as faiss: ivf needs
        dense.faiss: ivf, dense.nlist: 8, dense.nprobe: 9 | dense.nprobe 9 is not from 1 to nlist 8
        kind: dense | kind: dense needs an encoder; set dense.encoder
        kind: hybrid | kind: hybrid needs an encoder; set dense.encoder
        kind: remote, remote.url: "localhost:8700" | set remote.url ... got 'localhost:8700'
        remote.url: "http://me:k@a" | keep the password ... AGENT_R1_SEARCH_KEY, ... ; got 'http://a'
    """,
    "engine": r"""
        kind: server, server.urls: ["http://me:k@a"] | keep the password ... _ENGINE_KEY ... ; got 'http://a'
        kind: server | engine: kind: server needs server.urls, which is []; start one with
        server.urls: ["http://a:1"] | server.urls: ["http://a:1"] has no effect with kind: vllm; ... or kind: server
        kind: server, server.urls: ["http://a:1", "http://a:1/"] | urls names a server twice: http://a:1, http
    """,
    "env": r"""
        context.every: 2 | env.context: every: 2 has no effect with kind: append, which keeps everything; set every: 0
        context.kind: window | env.context: kind: window needs every, which is 0; set it to the exchanges of a window
        context: {kind: window, every: 4} | env: context.every 4 has no effect with kind: window and max_steps 5
        context: {kind: summary, every: 5} | context.every 5 has no effect with kind: summary and max_steps 5
        /warm_start.contexts: [{kind: window, every: 9}] | warm_start.contexts: every 9 has no effect ... max_steps
        order: arrival, /engine.kind: transformers | env.order: arrival needs an engine ... set env.order: rounds
        tools.search: null, tools.calculator: {} | demonstrations 6000 show how to search, ... search is null
        tools.search: null | env: tools: a question cannot be answered without any tool; offer one
        tools.read: {part_characters: 4000} | part_characters 4000 would be cut at max_result_characters 4000
        games.moves: 4 | games.moves_per_step 5 has no effect above an episode's moves, 4; lower it, or raise moves
        max_tokens: 64 | env: max_action_tokens 64 leaves no room for a prompt in max_tokens 64; raise max_tokens
        too_long_share: 1.5 | env.too_long_share: Input should be less than or equal to 1; got 1.5
        agents.x: {timeout_s: 1} | env.agents.x: an agent is a function, a command that is started or the url of a
        agents.x: {timeout_s: 1, function: "a:f", command: [a]} | agents.x: an agent is a function, ... one of the three
        agents.x: {timeout_s: 1, function: a.f} | agents.x.function: String should match pattern
        agents.x: {timeout_s: 1, command: []} | agents.x.command: List should have at least 1 item
        agents.x: {timeout_s: 0, command: [a]} | agents.x.timeout_s: Input should be greater than 0
        agents.x: {timeout_s: 1, url: "http://10.0.0.1:80", version: "1"} | 'http://10.0.0.1:80' is on another machine
        agents.x: {timeout_s: 1, url: "http://127.0.0.1.evil.com", version: "1"} | is on another machine
        agents.x: {timeout_s: 1, url: "http://127.0.0.1:80@evil.com", version: "1"} | keep the password of this address
        agents.x: {timeout_s: 1, url: "http://localhost:1"} | version is '', and a service has one that changes with it
        agents.x: {timeout_s: 1, command: [a], version: "1"} | version is '1', and a service has one that changes
        agents.x: {timeout_s: 1, url: "http://[::1]:1", version: "1", environment: [A]} | environment: ["A"]
        agents.x: {timeout_s: 1, command: [a], environment: ["A=1"]} | agents.x.environment.0: String should match
        agents.x: {timeout_s: 1, command: [a], rewards: [p, p]} | rewards names 'p' more than once
        agents.x: {timeout_s: 1, command: [a], history: kept} | agents.x.history: Input should be 'sampled' or 'sent'
        agents.x: {timeout_s: 1, command: [a]}, agent: y | agent is 'y', which env.agents does not define
        agent: y | agent is 'y', which env.agents does not define; declare it there
        tools.mcp.x: {timeout_s: 1} | env.tools.mcp.x: a server is a command that is started or the url of one
        tools.mcp.x: {timeout_s: 1, url: "http://a", environment: [A]} | environment: ["A"] has no effect with url: http
        gymnasium.x: {id: X-v1, kwargs: {render_mode: human}} | kwargs.render_mode 'human' draws no text; set it to ansi
        gymnasium.x: {id: X-v1, actions: [up, Up]} | actions names 'up' 2 times, in whatever case; give every move
    """,
    "train.credit": r"""
        rewards.agent_r1: 0 | train.credit: all reward weights are 0
        rewards.agent_r1: 0, rewards.own: {function: a.b:c, weight: 0} | weights are 0
        rewards.agent_r2: 1 | rewards: unknown key 'agent_r2'; did you mean 'agent_r1'?; a reward of one's own is
        rewards.em: {function: a.b:c, weight: 1} | 'em' cannot be the name of a reward of one's own; take letters
        rewards.total: {function: a.b:c, weight: 1} | 'total' cannot be the name of a reward of one's own
        rewards.a-b: {function: a.b:c, weight: 1} | 'a-b' cannot be the name of a reward of one's own
        rewards.own: {function: a.b, weight: 1} | own.function: name a function as package.module
        rewards.own: {weight: 1} | credit.rewards.own is no function, and no part of an agent's; give it a function, or
        rewards.own: {function: a.b:c, wight: 1} | key 'train.credit.rewards.own.wight'; did you mean
        rewards.own: {function: a.b:c} | key 'train.credit.rewards.own.weight' is missing
        rewards.env: 1 | runs.ppo: credit.rewards.env 1.0 has no effect, because ... atlas states it; ... weigh success
        rewards.overlong: 1 | train.credit: overlong_buffer 0 with rewards.overlong 1.0 has no effect; set both
        overlong_buffer: 9 | train.credit: overlong_buffer 9 with rewards.overlong 0.0 has no effect; set both
        rewards.overlong: 1, overlong_buffer: 9, left_out.truncated: true | overlong 1.0 prices ... truncated: false
        rewards.overlong: 1, overlong_buffer: 512 | runs.ppo: ... _buffer 512 leaves nothing of env.max_tokens 512
        estimator: rloo | train: estimator rloo compares the episodes of a group, and rollout.samples is 1
        estimator: gigpo | train: estimator gigpo compares the episodes of a group, and rollout.samples is 1
        estimator: grpo, kl_reward: 0.1 | credit: kl_reward 0.1 with estimator grpo ... train.update.kl_loss instead
        estimator: gigpo, gigpo.std: true, kl_reward: 0.1 | kl_reward 0.1 with estimator gigpo ... train.update.kl_loss
        estimator: maxrl | estimator maxrl takes returns of 0 and above, and rewards.agent_r1 may be below; set
        estimator: maxrl, rewards.agent_r1: 0, rewards.em: 1, kl_reward: 0.1 | and kl_reward may be below; ... success
        estimator: maxrl, rewards.agent_r1: 0, rewards.em: 1 | estimator maxrl compares the episodes of a group
        estimator: rloo, whitening_floor: 0.1 | whitening_floor: 0.1 has no effect with estimator: rloo, which ... : 0
        filter.share: 0.5 | train.credit.filter: share: 0.5 has no effect with kind: none, which ... or kind: top_p
        filter.refill: 1 | train.credit.filter: refill: 1 has no effect with kind: none, which drops no group
        filter.kind: top_p | train: credit.filter top_p looks at how returns differ within a group, and ... samples is 1
    """,
    "train": r"""
        update.constant_length: 512 | train.update: constant_length: 512 has no effect with aggregation: token_mean
        update.aggregation: constant_length | aggregation: constant_length needs constant_length, which is 0; set it
        update.clip_high: 4.9e+8 | clip_high 4.9e+08 never acts: ratios end at e^20, 4.85e+08
        update.dual_clip: 1.0e+9 | dual_clip 1e+09 never acts
        update.importance_cap: 1.0e+9 | importance_cap 1e+09 never acts
        reference: "https://h/v1" | reference 'https://h/v1' is no model at a server; write NAME at https://HOST/v1
        reference: "m at https://u:pw@h/v1" | dvc.lock and git would keep the password of this address
        reference: outputs/teacher | reference 'outputs/teacher' has no effect while credit.kl_reward and update.kl_loss
        update.importance_cap: 0.5 | importance_cap 0.5 cuts ... set it to 1 or more
        update.clip_low: 0.999999999 | clip_low 0.999999999000 ... never acts: ratios begin at e^-20
        update.clip_low: 1.0 | clip_low 1 never acts: ratios begin at e^-20, 2.06e-09
        update.loss: cispo | dual_clip: 3.0 has no effect with loss: cispo, ... set dual_clip: 0
        update.loss: cispo, update.dual_clip: 0, update.ratio: sequence_token | is ratio: sequence with loss: cispo
        monitor.max_rollbacks: 2 | train.monitor: max_rollbacks: 2 has no effect with on_collapse: warn; set
        monitor.max_rollbacks: 2, monitor.on_collapse: stop | max_rollbacks: 2 has no effect with on_collapse: stop
        monitor.on_collapse: rollback | on_collapse: rollback needs max_rollbacks, which is 0; set it to 1 or more
        monitor.on_collapse: stop, monitor.patience: 20 | on_collapse: stop has no effect: monitor.patience 20 allows no
        +BACK, checkpoint.every: 3 | checkpoint.every 3 with monitor.on_collapse: rollback: a run goes back
        +BACK, validation.every: 1, validation.keep_best: true | keep_best: true with monitor.on_collapse: rollback: the
        validation.keep_best: true | validation.every: 0 validates nothing for keep_best and patience; set every
        validation.patience: 1 | validation.every: 0 validates nothing
        validation.every: 1, validation.keep_best: true, keep.learner: true | keep.learner: true would leave the best
        iterations: 20, update.learning_rate_warmup: 20 | learning_rate_warmup 20 ... lasts all 20 iterations; lower
        update.critic.warmup: {iterations: 1, explained_variance: 0.2, limit: 1} | 0.2 has no effect with limit 1
        update.critic.warmup: {iterations: 1, explained_variance: 0, limit: 3} | limit 3 has no effect without explained
        +GROUP, credit.estimator: grpo, update.ratio: sequence_token | gives the gradient of ... estimator grpo
        +GROUP, credit.estimator: rloo, update.ratio: sequence_token | gives the gradient of ... estimator rloo
        rollout.questions: 1 | train: 1 trajectories per iteration ... do not fill update.minibatches 2; lower it or
        rollout: {questions: 1, samples: 3, ahead: 0, demonstrate: 0} | train: 3 trajectories ... fill update.critic
        +GROUP, rollout.questions: 3, update.minibatches: 13 | 12 trajectories ... do not fill update.minibatches 13
        rollout.samples: 2, credit.filter.kind: top_p | top_p may keep a single group, whose 2 trajectories do not fill
    """,
    "ablations": r"""
        runs: [ppo, grppo], closer: {runs: [], seeds: []}, references: [] | ablations.runs names 'grppo' ... mean 'grpo'
        runs: [ppo, grpo, ppo] | runs names 'ppo' more than once
        runs: [] | at least 1 item
        seeds: [0, 1, 1] | seeds names 1 more than once
        seeds: [-1] | greater than or equal to 0
        seeds: ["1\n"] | ablations.seeds.0: Input should be a valid integer; got '1\n'
        seeds: [true] | ablations.seeds.0: Input should be a valid integer; got True
        baselines: [random, random] | baselines names 'random' more than once
        closer: {runs: [ppo], seeds: []} | closer: runs and seeds belong together
        closer: {runs: [ppo], seeds: [9, 9]} | closer.seeds names 9 more than once
        closer: {runs: [dapo], seeds: [9]} | closer.runs names 'dapo', which runs does not
        closer.seeds: [2, 3] | closer.seeds names 2, which every run has already
        references: [ppo, gpro] | references names 'gpro', which is none ... did you mean 'grpo'?
        train.seed: 3 | train.seed has no effect
        train: {iteration: 3} | ablations: runs.ppo ... iteration ... did you mean 'iterations'
    """,
    "runs": r"""
        closed_book: {} | runs: 'closed_book' is the name of a baseline; name the run differently
        ppo;id: {} | 'ppo;id' is to be a folder and a DVC stage; use letters, digits and _ only
        "ppo\n": {} | 'ppo\n' is to be a folder and a DVC stage; use letters, digits and _ only
        ppo-seed1: {} | 'ppo-seed1' is to be a folder and a DVC stage; use letters, digits and _ only
        new: {updat: {}} | runs.new: unknown key 'updat'; did you mean 'update'?
        new: {update: {clip_hi: 1}} | runs.new: unknown key 'update.clip_hi'; did you mean 'clip_high'?
        new: {update: 3} | runs.new: update
        new: {rollout: {top_p: 0.9}} | runs.new: 'rollout.top_p' is no knob: it is 1.0 in every run
        new: {credit: {estimator: grpo}} | runs.new: estimator grpo ... rollout.samples is 1
        new: {credit: {loss_mask: false}} | runs.new: credit: loss_mask: false has no effect
        new: {credit: {rewards: {em: -1}}} | runs.new: credit.rewards.em
        new: {env: {tols: {}}} | runs.new: env: unknown key 'tols'; did you mean 'tools'?
        new: {env: {tools: {serch: {}}}} | new: env: unknown key 'tools.serch'; did you mean 'search'
        new: {env: {tools: {search: null}}} | runs.new: env: tools: a question cannot be answered without any
        new: {env: {max_tokens: 64}} | runs.new: env: max_action_tokens 64 leaves no room
        new: {env: null} | runs.new: env: Input should be a valid dictionary
        dapo.env: {max_tokens: 102} | runs.dapo: credit.overlong_buffer 102 leaves nothing of env.max_tokens 102
        starpo_s_refill.rollout.ahead: 1 | runs.starpo_s_refill: rollout.ahead: 1 with credit.filter.refill ... one of
        gigpo.rollout.ahead: 1, /engine.kind: transformers | runs.gigpo: rollout.ahead: 1 needs ... or ahead: 0
        gigpo.rollout.ahead: 1, /engine.vllm.sleep: true | runs.gigpo: rollout.ahead: 1 samples while the learner learns
    """,
    "": r"""
        reproruns: 1 | unknown key 'reproruns'; did you mean 'repro_runs'?
        model.lora.target: 1 | unknown key 'model.lora.target'; did you mean 'targets'?
        model.zzzzzz: 1 | unknown key 'model.zzzzzz'; valid names: path, threads, dtype
        train.credit.advantage_mask.critc: 1 | unknown key 'train.credit.advantage_mask.critc'; did you mean 'critic'?
        train.rollout.temperature: 1.0 | 'train.rollout.temperature' is no knob: it is 1.0 in every run; leave it out
        prepare.dataset: 1 | unknown key 'prepare.dataset'; did you mean 'datasets'?
        prepare.files.musique.tset: 1 | unknown key 'prepare.files.musique.tset'; did you mean 'test'?
        prepare.files.musique.test.fil: 1 | unknown key 'prepare.files.musique.test.fil'; did you mean 'file'?
        places.data: ../data | name a folder inside the project
        places.outputs: $(id) | name a folder inside the project
        model.dtype: float32, model.float32_output: true | float32_output: true has no effect with dtype: float32
        learner.optimizer_offload: true, learner.processes: 2 | offload: true needs one GPU, and there are 2 ranks
        repro_baselines: [naive] | repro_baselines.0: Input should be 'base_tool_call' ... ; got 'naive'
        repro_runs: [ppo, grppo] | repro_runs names 'grppo' ... did you mean 'grpo'?
        repro_runs: [ppo; id] | repro_runs names 'ppo; id', which runs: does not define
        warm_start.fine_tune: true | warm_start.fine_tune: true has no effect ... set model.path
        warm_start.conversations: x, model.path: own | conversations 'x' has no effect ... fine_tune: true, or conv
        env.max_steps: 3 | demonstrations take up to 4 actions, and env.max_steps is 3; raise it to 4
        warm_start.by_relation: 1, warm_start.stop_early: 0, warm_start.wrong_relation: 0 | 1.0 has no effect while stop
        +UNTAUGHT | warm_start has nothing to learn from: set demonstrations or naive_rag_demonstrations above 0
        +UNTAUGHT, warm_start.fine_tune: true, model.path: own | warm_start has nothing to learn from
        +CODER, prepare.datasets: [ice] | worlds.ice.name is 'coder', which env.agents does not define; declare it
        +CODER, prepare.datasets: [ice], env.agents.code: {timeout_s: 1, command: [a]} | does not define; did you mean
        +CODER, prepare.datasets: [ice], env.agents.coder: {timeout_s: 1, command: [a]} | env.order: rounds would
        +ICE, prepare.datasets: [atlas, ice] | worlds.ice.name is 'lake', which env.gymnasium does not ... declare it
        +ICE, prepare.datasets: [atlas, ice], env.gymnasium: {laki: {id: X-v1}} | does not define; did you mean 'laki'
        prepare.worlds.ice: {env: bandit, test: [0, 9]}, prepare.datasets: [ice] | agent_r1 1.0 has no ... sets ice
        prepare.worlds.ice: {env: bandit} | a world needs seeds: give it train, dev or test
        prepare.worlds.ice: {env: bandit, test: [9, 9]} | test [9, 9] holds no seed; the second is the one after
        +ROOM, prepare.worlds.ice.walls: 0.6 | walls 0.6 leaves no room to push; take at most .5
        +ROOM, prepare.worlds.ice.test_lengths: {1: 2} | test_lengths are 2 boards and test [0, 9] holds 9 seeds
        +ROOM, prepare.worlds.ice.test_lengths: {7: 9} | test_lengths names 7 moves and most_moves is 5; raise that
    """,
}


@pytest.mark.parametrize(
    ("section", "line"),
    [(section, line.strip()) for section, table in REFUSED.items() for line in table.split("\n") if line.strip()],
)
def test_values_that_do_not_go_together_are_refused(content: dict[str, Any], section: str, line: str) -> None:
    given, _, message = line.partition(" | ")
    others: dict[str, Any] = ONLY_PPO if section.startswith("train") else {}
    with pytest.raises(ValueError, match=pattern(message)):
        check(content, {**others, **changes_in(given, section)})


# Changes of keys that are accepted, for a `train` without any run but ppo.
ACCEPTED = """
    warm_start.fine_tune: true, model.path: own/model, repro_baselines: []
    +UNTAUGHT, warm_start.conversations: teacher.jsonl
    +UNTAUGHT, model.path: own/model
    env.context: {kind: window, every: 3}
    train.update.loss: cispo, train.update.dual_clip: 0, train.update.clip_low: 1.0
    train.update.ratio: sequence_token
    train.update.ratio: sequence_token, train.credit.estimator: step_gae
    train.update.critic.warmup: {iterations: 20, explained_variance: 0, limit: 0}, train.iterations: 3
    train.update.learning_rate_warmup: 7
    train.reference: outputs/teacher, train.update.kl_loss: 0.1
    train.reference: outputs/teacher, train.credit.kl_reward: 1.0, train.credit.rewards.agent_r1: 0
    train.reference: m at https://h/v1, train.update.kl_loss: 0.1
    train.update.learning_rate_warmup: 2
    +GROUP, train.update.learning_rate_warmup: 2, train.credit.estimator: grpo
    train.rollout.questions: 1, train.update.minibatches: 1, train.update.critic.minibatches: 1
    +GROUP, train.rollout.questions: 3, train.update.minibatches: 12, train.update.critic.minibatches: 12
    train.rollout.questions: 2, train.update.critic.minibatches: 3, train.credit.estimator: reinforce_pp
    train.monitor.thresholds.entropy_rise: 0, train.monitor.thresholds.grad_norm_spike: 0
"""


@pytest.mark.parametrize("line", ACCEPTED.strip().splitlines())
def test_values_that_go_together_are_accepted(content: dict[str, Any], line: str) -> None:
    check(content, {**ONLY_PPO, **changes_in(line.strip())})


# Overrides of a run | those that its estimator does not read. What `train` says serves the estimators of all runs.
READ = """
    credit: {estimator: grpo, lam: 0.5, gamma: 0.9} | credit.lam, credit.gamma
    credit: {estimator: gae, step_gamma: 0.5} | credit.step_gamma
    credit: {estimator: gae, step_lam: 0.95} | credit.step_lam
    credit: {estimator: step_gae, gamma: 0.9} | credit.gamma
    credit: {estimator: reinforce_pp, lam: 0.9} | credit.lam
    credit: {estimator: step_return, step_lam: 0.9, gigpo: {weight: 2.0}} | credit.step_lam, credit.gigpo
    credit: {estimator: gigpo, gamma: 0.9} | credit.gamma
    credit: {estimator: rloo, target_lam: 1.0} | credit.target_lam
    credit: {estimator: reinforce_pp}, update: {critic: {value_clip: 0.1}} | update.critic
    credit: {estimator: rloo}, update: {critic: {warmup: {iterations: 0}}} | update.critic
    credit: {estimator: gigpo, step_gamma: 0.9, gigpo: {weight: 2.0}}
    credit: {estimator: step_gae, target_lam: 1.0}
    credit: {estimator: gae, lam: 0.5, gamma: 0.9}, update: {critic: {value_clip: 0.1}}
    credit: {estimator: bi_level_gae, lam: 0.5, gamma: 0.9, step_gamma: 0.9, step_lam: 0.5}
    credit: {estimator: reinforce_pp, gamma: 0.9}
    credit: {estimator: grpo}, update: {minibatches: 1}
"""


@pytest.mark.parametrize("line", READ.strip().splitlines())
def test_a_run_overrides_what_its_estimator_reads_and_nothing_else(content: dict[str, Any], line: str) -> None:
    """It would be its base under another name."""
    overrides, _, unread = line.strip().partition(" | ")
    changes = {"runs.new": {"rollout": {"samples": 4}, **yaml.safe_load(f"{{{overrides}}}")}}
    message = rf"runs\.new: estimator \w+ does not read {re.escape(unread)}, which would change nothing"
    with pytest.raises(ValueError, match=message) if unread else nullcontext():
        check(content, changes)


def test_a_reward_of_ones_own_stands_beside_the_parts(content: dict[str, Any], params: Params) -> None:
    reward = {"function": "package.module:name", "weight": 0.5}
    changes = {"train.credit.rewards.own": reward, "runs.new": {"credit": {"rewards": {"own": {"weight": 2}}}}}
    rewards = check(content, changes).run(RunId("new")).credit.rewards
    assert rewards.weights == {**params.train.credit.rewards.weights, "own": 2.0}
    assert not rewards.own["own"].batched
    assert rewards.built_in == params.train.credit.rewards


def test_a_data_set_has_the_splits_it_names(content: dict[str, Any]) -> None:
    prepare = check(content, {"prepare.datasets": ["hotpotqa", "musique"]}).prepare
    assert [list(prepare.files[name].splits) for name in prepare.datasets] == [["train", "test"], ["test"]]
    assert prepare.dataset == "hotpotqa+musique"
    assert prepare.files["hotpotqa"].splits["train"].questions == 25600


@pytest.mark.parametrize(
    ("key", "reference", "regularised"),
    [
        ("train.update.kl_loss", True, True),
        ("train.credit.kl_reward", True, False),
        ("train.update.entropy_bonus", False, True),
        ("train.update.clip_low", False, False),
    ],
)
def test_what_a_run_needs_follows_from_its_coefficients(
    content: dict[str, Any], key: str, reference: bool, regularised: bool
) -> None:
    train = check(content, {**ONLY_PPO, key: 0.01}).train
    assert (train.needs_reference, train.update.regularised) == (reference, regularised)


@pytest.mark.parametrize(
    ("estimator", "loss_mask", "off", "discounts", "named"),
    [
        ("gae", False, "", {}, "recursion"),  # nothing at observations to train on
        ("gae", False, "whitening critic", {}, "recursion"),
        ("gae", True, "recursion", {"gamma": 1.0, "lam": 1.0}, "recursion: false has no effect on estimator gae at"),
        ("gae", True, "recursion", {"gamma": 1.0, "lam": 0.95}, ""),  # the deltas telescope at 1 and 1 alone
        ("gae", True, "recursion", {"gamma": 0.99, "lam": 1.0}, ""),
        ("grpo", False, "", {}, "recursion"),
        ("grpo", True, "recursion", {}, "recursion"),  # a broadcast advantage is the same on action tokens
        ("grpo", True, "whitening", {}, "whitening"),
        ("grpo", False, "recursion critic", {}, "critic"),
        ("dr_grpo", True, "recursion", {}, "recursion"),
        ("dr_grpo", False, "recursion", {}, ""),
        ("rloo", True, "whitening", {}, "whitening"),
        ("reinforce_pp", True, "recursion", {"gamma": 1.0}, "recursion: false has no effect on estimator reinforce_pp"),
        ("reinforce_pp", True, "recursion", {"gamma": 0.99}, ""),  # at 1 returns pass over observations unchanged
        ("reinforce_pp", True, "critic", {}, "critic"),
        ("reinforce_pp", True, "whitening", {}, ""),
        ("reinforce_pp", False, "recursion whitening", {}, ""),
        ("reinforce_pp_baseline", True, "recursion", {}, "recursion"),
        ("reinforce_pp_baseline", True, "recursion whitening", {}, ""),
        ("step_gae", True, "recursion", {}, "recursion"),  # an observation belongs to no step
        ("step_gae", True, "critic", {}, "critic"),
        ("step_return", True, "recursion", {}, "recursion"),
        ("gigpo", True, "whitening", {}, "whitening"),
        ("gigpo", True, "critic", {}, "critic"),
        ("bi_level_gae", False, "recursion", {}, "recursion"),
        ("bi_level_gae", True, "whitening", {}, ""),
    ],
)
def test_masks_are_refused_where_they_would_have_no_effect(
    content: dict[str, Any], estimator: str, loss_mask: bool, off: str, discounts: dict[str, float], named: str
) -> None:
    mask = {name: name not in off.split() for name in ("recursion", "whitening", "critic")}
    credit = {"estimator": estimator, "loss_mask": loss_mask, "advantage_mask": mask, **discounts}
    changes = {**ONLY_PPO, **PRESETS["GROUP"], **{f"train.credit.{key}": value for key, value in credit.items()}}
    with pytest.raises(ValueError, match=rf"train\.credit: .*advantage_mask\.{named}") if named else nullcontext():
        check(content, changes)


@pytest.mark.parametrize("off", ["loss_mask", "advantage_mask.recursion", "advantage_mask.critic"])
@pytest.mark.parametrize("estimator", sorted(STEP_LEVEL))
def test_an_estimator_of_steps_is_refused_without_a_mask(content: dict[str, Any], estimator: str, off: str) -> None:
    changes = {**ONLY_PPO, **PRESETS["GROUP"], "train.credit.estimator": estimator, f"train.credit.{off}": False}
    with pytest.raises(ValueError, match=rf"train\.credit: .*{off}"):
        check(content, changes)


@pytest.mark.parametrize(
    ("off", "said"),
    [
        ("", []),
        ("whitening", ["advantage_mask.whitening: false counts"]),
        ("recursion", ["advantage_mask.recursion: false with critic: true reads"]),
        ("recursion whitening", ["advantage_mask.recursion: false with critic: true reads"]),
        ("recursion whitening critic", []),
    ],
)
def test_settings_that_do_more_than_their_names_say_are_remarked_on(
    content: dict[str, Any], off: str, said: list[str]
) -> None:
    masks = {f"train.credit.advantage_mask.{name}": False for name in off.split()}
    remarks = list(check(content, {**ONLY_PPO, **masks}).train.credit.remarks)
    assert [remark.startswith(start) for remark, start in zip(remarks, said, strict=True)] == [True] * len(said)


def test_how_many_gpus_a_stage_holds(content: dict[str, Any]) -> None:
    def gpus(kind: str, replicas: int, parts: int) -> int:
        changes = {"kind": kind, "vllm.replicas": replicas, "vllm.tensor_parallel_size": parts}
        return check(content, {f"engine.{key}": value for key, value in changes.items()}).engine.gpus

    assert [gpus("vllm", *each) for each in ((1, 1), (3, 2), (0, 2))] == [1, 6, 0]
    assert gpus("transformers", 3, 2) == 1
    ranks = {"learner.processes": 4, "engine.vllm.tensor_parallel_size": 2}
    assert [check(content, {**ranks, "engine.vllm.replicas": replicas}).gpus for replicas in (1, 3, 0)] == [4, 6, 0]


def test_an_engines_identity_is_what_its_kind_reads(content: dict[str, Any], params: Params) -> None:
    """Another kind's settings, and where servers are, are not."""
    others = {"engine.transformers.batch_size": 7, "engine.server.timeout_s": 9.0}
    assert check(content, others).engine.identity == params.engine.identity
    assert params.engine.identity == {"kind": "vllm", **content["engine"]["vllm"]}
    own = check(content, {**others, "engine.kind": "transformers"}).engine.identity
    assert own == {"kind": "transformers", "batch_size": 7}
    ahead = {"engine.vllm.sleep": True, "runs.gigpo.rollout.ahead": 1}  # which a server knows nothing of
    served = check(content, {**ahead, "engine.kind": "server", "engine.server.urls": ["http://a:1/"]}).engine
    assert served.identity == {"kind": "server"}
    assert served.server.urls == ["http://a:1"]


def test_a_monitor_that_looks_at_nothing_can_only_warn(content: dict[str, Any], params: Params) -> None:
    nothing = {"train.monitor.thresholds": dict.fromkeys(params.train.monitor.thresholds.model_dump(), 0)}
    assert check(content, nothing).train.monitor.on_collapse == "warn"
    with pytest.raises(ValueError, match="on_collapse: stop has no effect while every threshold is 0"):
        check(content, {**nothing, "train.monitor.on_collapse": "stop"})


def test_a_warm_up_waits_for_what_the_critic_explains_up_to_a_limit(content: dict[str, Any], params: Params) -> None:
    off = {"explained_variance": 0.0, "limit": 0}
    plain = params.train.update.critic.warmup.model_copy(update=off)
    assert plain.longest == plain.iterations
    assert [plain.is_over(iteration, -1.0) for iteration in range(4)] == [False, False, True, True]
    key = "train.update.critic.warmup."
    patient = {f"{key}iterations": 1, f"{key}explained_variance": 0.2, f"{key}limit": 3}
    warmup = check(content, patient).train.update.critic.warmup
    assert warmup.longest == 3
    assert [warmup.is_over(iteration, 0.2) for iteration in range(4)] == [False, True, True, True]
    assert [warmup.is_over(iteration, 0.1) for iteration in range(4)] == [False, False, False, True]


def test_a_member_of_the_sweep_has_its_seed_and_its_iterations(params: Params) -> None:
    member = params.run(RunId("grpo", seed=2, sweep="ablations"))
    assert (member.seed, member.iterations) == (2, params.ablations.train["iterations"])
    assert member.validation.every == 5 != params.train.validation.every
    assert member.credit == params.run(RunId("grpo")).credit
    assert params.run(RunId("grpo", seed=2)).iterations == params.train.iterations
    own = params.model_copy(update={"runs": {"grpo": {**(params.runs["grpo"] or {}), "iterations": 7}}})
    found = own.run(RunId("grpo", seed=2, sweep="ablations"))
    assert (found.iterations, found.validation.every) == (7, 5), "the run's own values hold in a sweep"
    with pytest.raises(ValueError, match="no sweep 'ablation'"):
        params.run(RunId("grpo", sweep="ablation"))
    with pytest.raises(ValueError, match=r"no run 'pppo'.*did you mean 'ppo'\?"):
        params.run(RunId("pppo"))


@pytest.mark.parametrize(
    ("label", "run"),
    [
        ("ppo", RunId("ppo")),
        ("ppo-seed3", RunId("ppo", 3)),
        ("ppo_no_masks-0a1b2c3d-seed3", RunId("ppo_no_masks", 3, variant="0a1b2c3d")),
    ],
)
def test_a_training_is_read_back_from_its_label(label: str, run: RunId) -> None:
    assert run.label == label
    assert RunId.parse(label) == run
    with pytest.raises(ValueError, match="is no label of a training; labels look like ppo or ppo-seed3"):
        RunId.parse(f"{label}-")


def test_a_variant_is_a_run_of_its_own_that_its_file_tells(
    params: Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    further = {"iterations": 25, "credit": {"lam": 0.5}}
    varied = params.varied(RunId("ppo", 3), further)
    assert varied == RunId("ppo", 3, variant=fingerprint(further)[:8])
    assert RunId.meant(varied.word) == varied
    with pytest.raises(ValueError, match=rf"variants/{varied.name}\.json is not here, which says how .* train it here"):
        params.run(varied)
    file = params.places.variant(varied)
    write_text(file, json.dumps(further))
    trained = params.run(varied)
    assert (trained.seed, trained.iterations, trained.credit.lam) == (3, 25, 0.5)
    assert trained.update == params.run(RunId("ppo")).update
    write_text(file, "{}")
    with pytest.raises(ValueError, match="holds other overrides than its name stands for"):
        params.run(varied)


# A run: further overrides of it | what is said.
VARIED = """
    ppo: {} | overrides of ppo change nothing; name a value of train, or leave them out
    ppo: {credit: {}} | overrides of ppo change nothing
    ppo: {update: {epochs: 1}} | update.epochs is 1 already, which changes nothing; leave that out
    ppo: {seed: 3} | seed is no override; give the training its seed
    ppo: {iteration: 5} | unknown key 'iteration'; did you mean 'iterations'?
    ppo: {iterations: 0} | iterations: Input should be greater than or equal to 1; got 0
    ppo: {env: {top_k: 2}} | unknown key 'env'
    ppo: {credit: {rewards: {mine: {function: "os:abort", weight: 1.0}}}} | names code to run; add it
    grpo: {credit: {lam: 0.5}} | estimator grpo does not read credit.lam, which would change nothing
    pppo: {iterations: 5} | no run 'pppo' ... did you mean 'ppo'?
"""


@pytest.mark.parametrize("line", VARIED.strip().splitlines())
def test_overrides_for_one_training_are_values_of_train_that_change_something(params: Params, line: str) -> None:
    given, _, message = line.strip().partition(" | ")
    [(run, further)] = yaml.safe_load(given).items()
    with pytest.raises(ValueError, match=pattern(message)):
        params.varied(RunId(run), further)


def test_a_file_that_is_missing_or_no_mapping_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    with pytest.raises(FileNotFoundError, match=r"params\.yaml does not exist; run from the project's root"):
        load(path)
    path.write_text("- prepare\n- train\n")
    with pytest.raises(ValueError, match="expected a mapping of sections, found list"):
        load(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train:\n  seed: [1\n", r" at line 3, column 1: expected ',' or ']'"),
        ("train: !!python/object:os.system x", r" at line 1, column 8: could not determine a constructor for the tag"),
        ("train: \x07", ": unacceptable character"),
        ("train: !!timestamp x", ": 'NoneType'"),
        ("train: !!int ''", ": string index"),
        ("train: 2001-99-99", ": month must be in 1..12"),
        ("train: " + "[" * 10**5, ": maximum recursion depth exceeded"),
    ],
)
def test_a_file_that_is_no_yaml_is_refused_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"params.yaml cannot be read as YAML{message}"):
        load(path)


def test_what_is_refused_is_shown_in_short_and_without_a_password(content: dict[str, Any]) -> None:
    many: Any = "x"
    for _ in range(9):
        many = [many] * 9
    with pytest.raises(ValueError, match=r"params.yaml: train.seed: .*; got \[\[\[\[?\.\.\.\], ") as refused:
        check(content, {"train.seed": many})
    assert len(str(refused.value)) < 5000
    with pytest.raises(ValueError, match=r"unknown key 'train\.http://host'"):
        check(content, {"train.http://user:secret@host": 1})


def test_a_name_that_no_disk_can_have_is_refused(content: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"places\.data: name a folder inside"):
        check(content, {"places.data": "a" * 300})
    with pytest.raises(ValueError, match="is no label of a training"):
        RunId.parse("ppo-seed" + "9" * 5000)


@pytest.mark.parametrize(
    ("decay", "warmup", "rates"),
    [
        ("none", 0, [1, 1, 1, 1]),
        ("linear", 0, [1, 0.75, 0.5, 0.25]),
        ("cosine", 0, [1, 0.5 + 0.5 * math.sqrt(0.5), 0.5, 0.5 - 0.5 * math.sqrt(0.5)]),
        ("none", 1, [1 / 2, 1, 1, 1]),
        ("linear", 2, [1 / 3 * 1, 2 / 3 * 0.75, 0.5, 0.25]),
    ],
)
def test_rates_rise_and_decay_by_hand(params: Params, decay: str, warmup: int, rates: list[float]) -> None:
    update = params.train.update.model_copy(update={"learning_rate_decay": decay, "learning_rate_warmup": warmup})
    train = params.train.model_copy(update={"iterations": 4, "update": update})
    assert [train.rate(iteration, 0, begun=0) for iteration in range(4)] == pytest.approx(rates)
    assert [train.rate(iteration, 3, begun=3) for iteration in range(3, 7)] == pytest.approx(rates)
    longer = train.model_copy(update={"iterations": 6})
    extended = [longer.rate(iteration, 0, begun=0, decays_over=4) for iteration in range(6)]
    assert extended == pytest.approx([*rates, rates[-1], rates[-1]]), "its schedule to the end, and then its last rate"


def test_mappings_are_laid_over_flattened_and_compared_by_hand() -> None:
    base = {"a": {"b": 1, "c": [1, 2]}, "d": 2}
    laid = override(base, {"a": {"c": [3]}, "e": None})
    assert laid == {"a": {"b": 1, "c": [3]}, "d": 2, "e": None}
    assert flatten(laid) == {"a.b": 1, "a.c": [3], "d": 2, "e": None}
    assert differences(flatten(base), flatten(laid)) == ["a.c [1, 2] -> [3]"]


def test_the_fingerprint_follows_every_value_and_no_order(content: dict[str, Any], params: Params) -> None:
    turned = Params.model_validate(dict(reversed(content.items())))
    changed = check(content, {"train.update.clip_low": 0.21})
    assert fingerprint(params.train) == fingerprint(turned.train)
    assert fingerprint(params.train) != fingerprint(changed.train)
    assert fingerprint(params.env) == fingerprint(changed.env)
    assert fingerprint(params.train, "a") != fingerprint(params.train, "b")


def test_a_run_may_have_an_env_of_its_own(content: dict[str, Any]) -> None:
    """Laid over `env` key by key; a null takes a tool away. All else is as it stands, and so are the other runs."""
    own = {"env": {"tools": {"calculator": {}, "search": None}, "max_steps": 3}, "credit": {"lam": 0.9}}
    params = check(content, {"runs.new": own})
    env = params.of(RunId("new")).env
    assert (env.tools.calculator is None, env.tools.search is None, env.max_steps) == (False, True, 3)
    assert env.model_copy(update={"tools": params.env.tools, "max_steps": params.env.max_steps}) == params.env
    assert params.of(RunId("new")).model_copy(update={"env": params.env}) == params
    assert params.of(RunId("ppo", seed=3)) == params
    assert params.run(RunId("new", seed=1)).credit.lam == 0.9
    whole = params.of(RunId("new"))
    assert (whole.of(RunId("new")), whole.run(RunId("new"))) == (whole, params.run(RunId("new")))
    with pytest.raises(ValueError, match="there is no run 'nw' under runs:; did you mean 'new'"):
        params.of(RunId("nw"))


def test_a_part_that_an_agent_states_is_weighed_by_its_name(content: dict[str, Any]) -> None:
    agent = {"url": "http://localhost:1", "version": "1", "timeout_s": 1, "rewards": ["speed"]}
    weighed = ONLY_PPO | {"env.agents.mine": agent, "train.credit.rewards.speed": {"weight": 0.5}}
    rewards = check(content, weighed).train.credit.rewards
    assert (rewards.weights["speed"], rewards.functions) == (0.5, {})
    with pytest.raises(ValueError, match=r"rewards.speed is a function and a part of an agent's; give"):
        check(content, weighed | {"train.credit.rewards.speed.function": "a.b:c"})


def test_a_run_takes_functions_and_servers_from_itself_with_null(content: dict[str, Any]) -> None:
    both = {"functions": {"add": {"module": "own"}}, "mcp": {"files": {"command": ["files"], "timeout_s": 1.0}}}
    without = {"env": {"tools": {name: dict.fromkeys(entries) for name, entries in both.items()}}}
    params = check(content, {f"env.tools.{name}": entries for name, entries in both.items()} | {"runs.new": without})
    ours = params.of(RunId("new")).env.tools
    assert ([*params.env.tools.functions, *params.env.tools.mcp], ours.functions, ours.mcp) == (
        ["add", "files"],
        {},
        {},
    )


@pytest.mark.parametrize(
    ("datasets", "files", "conversations", "read"),
    [
        (["atlas"], {}, "", "data/raw/README.md"),
        (["atlas"], {}, "data/raw/teacher.jsonl", "data/raw/teacher.jsonl"),
        (["own"], {"train": "data/raw/own/train.jsonl"}, "", "data/raw/own/train.jsonl"),
        (["own"], {"train": "data/raw/own/a.jsonl", "test": "data/raw/own/b.jsonl"}, "", "data/raw/own"),
        (["own"], {"train": "data/raw/own/train-*.parquet", "test": "/mnt/b.jsonl"}, "", "data/raw/own"),
        (["own", "atlas"], {"train": "data/raw/own/a.jsonl"}, "data/raw/teacher.jsonl", "data/raw"),
        (["own"], {"train": "elsewhere/train.jsonl"}, "", "data/raw/README.md"),
        (["2wikimultihopqa"], {}, "", "data/raw/2wikimultihopqa"),  # id_aliases.json, beside the splits
        (["atlas", "tasks"], {}, "", "data/raw/tasks.jsonl"),
    ],
)
def test_the_path_that_holds_all_that_is_read_in_data_raw_by_hand(
    content: dict[str, Any], datasets: list[str], files: dict[str, str], conversations: str, read: str
) -> None:
    own = {"format": "hotpotqa", **{split: {"file": file} for split, file in files.items()}}
    changes = {"prepare.datasets": datasets, "warm_start.conversations": conversations}
    changes |= {"prepare.files.own": own} if files else {}
    rows = {"env": "toolbox", "name": "box", "file": "data/raw/tasks.jsonl", "test": [0, 2]}
    changes |= {"prepare.worlds.tasks": rows, "env.toolbox.box": {"class": "boxes:Box"}}
    params = check(content, changes)
    assert params.read_of_raw == read
    if read == params.places.raw:
        params.require_watched()
        return
    with pytest.raises(ValueError, match=f"would not notice an edit of {read}; set `raw: {read}` under places"):
        params.require_watched()
    for raw in (read, "data/raw"):
        check(content, {**changes, "places.raw": raw}).require_watched()
