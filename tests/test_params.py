"""params.yaml: what it holds is accepted, and every mistake is refused by the name of its key."""

from __future__ import annotations

import copy
import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from agent_r1.facts import differences
from agent_r1.files import write_text
from agent_r1.params import SHIPPED, Params, fingerprint, load
from agent_r1.params.credit import WITH_GROUPS, Estimator
from agent_r1.params.places import RunId
from agent_r1.params.sections import flatten, override, validated

FILE = Path(__file__).parents[1] / "params.yaml"
PPO_EPOCHS = load(FILE).train.update.epochs
INF, NAN = float("inf"), float("nan")
OTHERS = {"env": "gymnasium", "name": "lake", "test": [0, 2]}
LAKE = {"env": "frozen_lake", "size": 4, "frozen": 0.8, "intended": 1.0, "test": [0, 9]}
MUSIQUE = {"format": "musique", "test": {"file": "x", "questions": 0}}
GENERIC = {"format": "generic", "test": {"file": "x.jsonl", "questions": 0}}
GROUPS = {"train.rollout.samples": 4}
NO_OTHERS = {"ablations.closer": {"runs": [], "seeds": []}, "ablations.references": []}
# The other runs' overrides cannot be refused then.
ONLY_PPO = {"runs": {"ppo": {}}, "repro_runs": ["ppo"], "ablations.runs": ["ppo"], **NO_OTHERS}


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
            section = section[parent]
        section[last] = value
    return changed


def check(content: dict[str, Any], changes: dict[str, Any]) -> Params:
    """The parameters with changes, as `load` would take them from a file."""
    return validated(Params, put(content, changes), "params.yaml")


def test_the_projects_own_file_loads_and_travels_with_the_package(params: Params) -> None:
    assert set(params.runs) >= {"ppo", "ppo_no_advantage_mask", "ppo_no_masks", "grpo", "grpo_no_loss_mask"}
    assert params.repro_runs == ["ppo", "ppo_no_advantage_mask", "ppo_no_masks"]
    assert load(SHIPPED) == params
    with pytest.raises(ValueError, match="frozen"):
        params.train.seed = 1  # type: ignore[misc]


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


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("reproruns", "repro_runs"),
        ("model.lora.target", "targets"),
        ("train.credit.advantage_mask.critc", "critic"),
        ("prepare.dataset", "datasets"),
        ("prepare.files.musique.tset", "test"),
        ("prepare.files.musique.test.fil", "file"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_name(content: dict[str, Any], wrong: str, right: str) -> None:
    with pytest.raises(ValueError, match="unknown key") as refusal:
        check(content, {wrong: 1})
    assert f"unknown key {wrong!r}; did you mean {right!r}?" in str(refusal.value)


def test_an_unknown_key_near_no_other_is_refused_with_all_names(content: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"unknown key 'model.zzzzzz'; valid names: path, threads, dtype"):
        check(content, {"model.zzzzzz": 1})
    with pytest.raises(ValueError, match=r"(?s)'env\.topk'.*evaluate\.seed"):  # every mistake is named at once
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
    (64, "env", "max_tokens"),
    (INF, "train", "credit.rewards.progress credit.kl_reward update.dual_clip monitor.thresholds.grad_norm_spike"),
    (INF, "search.remote", "backoff_s"),
    (NAN, "train", "credit.rewards.progress update.entropy_bonus"),
    ("other", "train", "credit.estimator credit.filter.kind keep.learner monitor.on_collapse update.ratio iterations"),
    ("other", "train.credit.left_out", "truncated void_step"),
    ("other", "train.update", "aggregation loss"),
    ("other", "", "search.kind search.dense.pooling model.dtype engine.kind prepare.files.musique.format"),
    ([], "prepare", "datasets"),
    ([], "model.lora", "targets"),
    (["127.0.0.1:8001"], "engine.server", "urls"),
]


@pytest.mark.parametrize(
    ("key", "value"),
    [(f"{section}.{key}".strip("."), value) for value, section, keys in OUT_OF_RANGE for key in keys.split()],
)
def test_a_value_out_of_range_is_refused(content: dict[str, Any], key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=key.rpartition(".")[2]):
        check(content, {key: value})


IVF = {"search.dense.faiss": "ivf", "search.dense.nlist": 8}
UNTAUGHT = {"warm_start.demonstrations": 0, "warm_start.naive_rag_demonstrations": 0}
STOP = {"train.iterations": 20, "train.monitor.on_collapse": "stop"}
ROLL_BACK = {"train.monitor.on_collapse": "rollback", "train.monitor.max_rollbacks": 1}
STABILISE = {**ONLY_PPO, "train.rollout.samples": 4, "train.monitor.on_collapse": "stabilise"}
STARPO_S = {"rollout": {"samples": 4}, "credit": {"filter": {"kind": "top_fraction", "share": 0.25}}}
SERVER = {"engine.kind": "server"}
OWN = {"function": "package.module:name", "weight": 0.5}
GIGPO = {"train.credit.estimator": "gigpo"}
OVERLONG = {"train.credit.rewards.overlong": 1.0, "train.credit.overlong_buffer": 128}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prepare.datasets": ["hotpot"]}, r"names 'hotpot', which neither files nor worlds .*did you mean 'hotpotqa'"),
        ({"prepare.datasets": ["musique", "musique"]}, "names 'musique' twice"),
        ({"prepare.files.own": {"format": "hotpotqa"}}, r"prepare\.files\.own: a data set needs a file of questions"),
        ({"prepare.files.own": GENERIC}, r"files\.own: rows of format generic bring no passages along; name a corpus"),
        (
            {"prepare.worlds.ice": OTHERS, "prepare.datasets": ["atlas", "ice"]},
            r"prepare\.worlds\.ice\.name is 'lake', which env\.gymnasium does not define; declare it there",
        ),
        (
            {
                "prepare.worlds.ice": OTHERS,
                "prepare.datasets": ["atlas", "ice"],
                "env.gymnasium": {"laki": {"id": "FrozenLake-v1"}},
            },
            r"which env\.gymnasium does not define; did you mean 'laki'",
        ),
        ({"prepare.worlds.musique": LAKE}, "'musique' stands under files and under worlds; name one"),
        ({"prepare.worlds.atlas": LAKE}, r"prepare\.worlds: 'atlas' is the built-in data set"),
        (
            {"prepare.worlds.ice": LAKE, "prepare.datasets": ["ice"]},
            r"runs\.ppo: credit\.rewards\.agent_r1 1\.0 has no .* ice",
        ),
        (
            {"train.credit.rewards.env": 1.0},
            r"runs\.ppo: credit\.rewards\.env 1\.0 has no .* atlas states it; .*success$",
        ),
        ({"prepare.files.atlas": MUSIQUE}, r"prepare\.files: 'atlas' is the built-in data set"),
        ({"prepare.files.a/b": MUSIQUE}, r"prepare\.files\.a/b"),
        ({"search.dense.nlist": 8}, "nlist 8 and nprobe 0 have no effect with faiss: flat"),
        ({"search.dense.nprobe": 2}, "nlist 0 and nprobe 2 have no effect with faiss: flat"),
        (IVF, "nprobe 0 lists out of nlist 8"),
        ({**IVF, "search.dense.nprobe": 9}, "nprobe 9 lists"),
        ({"search.kind": "dense"}, r"kind: dense needs an encoder; set dense\.encoder"),
        ({"search.kind": "hybrid"}, r"kind: hybrid needs an encoder; set dense\.encoder"),
        ({"search.kind": "remote", "search.remote.url": "localhost:8700"}, r"set remote\.url .* got 'localhost:8700'"),
        ({"search.remote.url": "http://me:k@a"}, r"keep the password .*AGENT_R1_SEARCH_KEY, .*; got 'http://a'"),
        ({**SERVER, "engine.server.urls": ["http://me:k@a"]}, r"keep the password .*_ENGINE_KEY.*; got 'http://a'"),
        ({"train.credit.rewards.agent_r1": 0.0}, r"train\.credit\.rewards: all reward weights are 0"),
        ({"train.update.constant_length": 512}, r"train\.update: constant_length 512 with aggregation token_mean"),
        ({"train.update.aggregation": "constant_length"}, "constant_length 0 with aggregation constant_length"),
        ({"train.update.clip_high": 4.9e8}, r"clip_high 4\.9e\+08 never acts: ratios end at e\^20, 4\.85e\+08"),
        ({"train.update.dual_clip": 1e9}, r"dual_clip 1e\+09 never acts"),
        ({"train.update.importance_cap": 1e9}, r"importance_cap 1e\+09 never acts"),
        ({"train.update.clip_low": 0.999999999}, r"clip_low 0\.9999999990+3 never acts: ratios begin at e\^-20"),
        ({"train.update.clip_low": 1.0}, r"clip_low 1 never acts: ratios begin at e\^-20, 2\.06e-09"),
        ({"train.update.loss": "cispo"}, r"dual_clip 3\.0 has no effect with loss: cispo.*set dual_clip: 0"),
        (
            {"train.update.loss": "cispo", "train.update.dual_clip": 0, "train.update.ratio": "sequence_token"},
            "sequence_token is ratio: sequence with loss: cispo",
        ),
        ({"model.dtype": "float32", "model.float32_output": True}, r"float32_output: true has no effect with dtype: f"),
        ({"train.update.importance_cap": 0.5}, r"importance_cap 0\.5 cuts .* set it to 1 or more"),
        (
            {**GROUPS, "train.credit.estimator": "grpo", "train.credit.kl_reward": 0.1},
            r"train\.credit: kl_reward 0\.1 with estimator grpo: .* train\.update\.kl_loss",
        ),
        (
            {**GROUPS, **GIGPO, "train.credit.gigpo.std": True, "train.credit.kl_reward": 0.1},
            r"train\.credit: kl_reward 0\.1 with estimator gigpo: .* train\.update\.kl_loss",
        ),
        (
            {"train.credit.rewards.agent_r2": 1},
            r"rewards: unknown key 'agent_r2'; did you mean 'agent_r1'\?; a reward of",
        ),
        ({"train.credit.rewards.em": OWN}, "'em' cannot be the name of a reward of one's own; take letters"),
        ({"train.credit.rewards.total": OWN}, "'total' cannot be the name of a reward of one's own"),
        ({"train.credit.rewards.a-b": OWN}, "'a-b' cannot be the name of a reward of one's own"),
        ({"train.credit.rewards.own": {**OWN, "function": "a.b"}}, r"own\.function: name a function as package\.mod"),
        ({"train.credit.rewards.own": {**OWN, "wight": 1}}, r"key 'train\.credit\.rewards\.own\.wight'; did you mean"),
        ({"train.credit.rewards.own": {"function": "a:b"}}, r"key 'train\.credit\.rewards\.own\.weight' is missing"),
        ({"train.credit.rewards.agent_r1": 0, "train.credit.rewards.own": {**OWN, "weight": 0}}, "weights are 0"),
        (
            {**GROUPS, "train.credit.estimator": "rloo", "train.credit.whitening_floor": 0.1},
            r"train\.credit: whitening_floor 0\.1 has no effect on estimator rloo, which does not whiten",
        ),
        (GIGPO, r"train: estimator gigpo compares the episodes of a group, and rollout\.samples is 1"),
        ({"train.credit.rewards.overlong": 1.0}, r"train\.credit: overlong_buffer 0 with rewards\.overlong 1\.0"),
        ({"train.credit.overlong_buffer": 9}, r"train\.credit: overlong_buffer 9 with rewards\.overlong 0\.0"),
        (
            {**OVERLONG, "train.credit.left_out.truncated": True},
            r"train\.credit: rewards\.overlong 1\.0 prices episodes that left_out\.truncated: true leaves out",
        ),
        ({**OVERLONG, "env.max_tokens": 128}, r"runs\.ppo: credit\.overlong_buffer 128 leaves nothing .* 128 that"),
        ({"train.credit.estimator": "rloo"}, r"train: estimator rloo .*rollout\.samples is 1"),
        (SERVER, "engine: kind: server needs server.urls; start one with"),
        (
            {"engine.server.urls": ["http://a:1"]},
            r"server.urls has no effect with kind: vllm; set kind: server, or url",
        ),
        (
            {**SERVER, "engine.server.urls": ["http://a:1", "http://a:1/"]},
            "urls names a server twice: http://a:1, http",
        ),
        ({"train.monitor.max_rollbacks": 2}, "monitor: max_rollbacks 2 does not go with on_collapse: warn"),
        ({**STOP, "train.monitor.max_rollbacks": 2}, "max_rollbacks 2 does not go with on_collapse: stop"),
        ({**ROLL_BACK, "train.checkpoint.every": 3}, r"train: checkpoint\.every 3 with monitor\.on_collapse: rollback"),
        (
            {**STABILISE, "train.monitor.stabilise.rollback": True, "train.checkpoint.every": 3},
            r"checkpoint\.every 3 with monitor\.on_collapse: stabilise: a run goes back",
        ),
        (
            {**STABILISE, "train.monitor.stabilise.filter": {"kind": "none", "share": 1.0, "refill": 0}},
            r"train: monitor\.on_collapse: stabilise changes nothing: the run has the filter and the clip_high of",
        ),
        (
            {**STABILISE, "train.rollout.samples": 1},
            r"train: once monitor\.stabilise holds: credit\.filter top_fraction looks at .* set it to 2 or more",
        ),
        (
            {"runs.new": {"monitor": {"stabilise": {"clip_high": 0.3}}}},
            r"runs\.new: monitor\.stabilise would change nothing with on_collapse: warn; leave that out, or set",
        ),
        (
            {"runs.new": {**STARPO_S, "monitor": {"on_collapse": "stabilise"}}},
            r"runs\.new: .*stabilise changes nothing",
        ),
        ({"train.monitor.on_collapse": "rollback"}, "max_rollbacks 0 does not go with on_collapse: rollback"),
        ({**STOP, "train.monitor.patience": 20}, "train: monitor.on_collapse: stop has no effect: with monitor.pat"),
        ({"warm_start.fine_tune": True}, r"warm_start\.fine_tune: true has no effect .* set model\.path"),
        (
            {"warm_start.conversations": "teacher.jsonl", "model.path": "own/model"},
            r"warm_start\.conversations 'teacher\.jsonl' has no effect .* set warm_start\.fine_tune: true, or conv",
        ),
        (
            {**UNTAUGHT},
            "warm_start has nothing to learn from: set demonstrations or naive_rag_demonstrations above 0, or",
        ),
        ({**UNTAUGHT, "warm_start.fine_tune": True, "model.path": "own/model"}, "warm_start has nothing to learn from"),
        ({"repro_baselines": ["naive"]}, r"repro_baselines\.0: Input should be 'base_tool_call'.*; got 'naive'"),
        ({"runs.closed_book": {}}, "runs: 'closed_book' is the name of a baseline; name the run differently"),
        ({"repro_runs": ["ppo", "grppo"]}, r"repro_runs names 'grppo'.*did you mean 'grpo'\?"),
        (
            {**NO_OTHERS, "ablations.runs": ["ppo", "grppo"]},
            r"ablations\.runs names 'grppo'.*did you mean 'grpo'\?",
        ),
        ({"ablations.runs": ["ppo", "grpo", "ppo"]}, "runs names 'ppo' more than once"),
        ({"ablations.runs": []}, "at least 1 item"),
        ({"ablations.seeds": [0, 1, 1]}, "seeds names 1 more than once"),
        ({"ablations.baselines": ["random", "random"]}, "baselines names 'random' more than once"),
        ({"ablations.seeds": [-1]}, "greater than or equal to 0"),
        ({"ablations.seeds": ["1\n"]}, r"ablations\.seeds\.0: Input should be a valid integer; got '1\\n'"),
        ({"env.context.every": 2}, r"env\.context: every 2 does not go with kind: append; it is 0 with append"),
        ({"env.context.kind": "window"}, r"env\.context: every 0 does not go with kind: window"),
        (
            {"env.context": {"kind": "window", "every": 4}},
            r"context\.every 4 has no effect with kind: window and max_st",
        ),
        (
            {"env.context": {"kind": "summary", "every": 5}},
            r"context\.every 5 has no effect with kind: summary and max",
        ),
        (
            {"env.context": {"kind": "summary", "every": 4}},
            r"demonstrations 6000 hold no summaries, .* runs\.NAME\.env",
        ),
        (
            {"engine.kind": "transformers", "train.rollout.ahead": 1},
            r"runs\.\w+: rollout\.ahead: 1 needs an engine .* set engine\.kind: vllm, or ahead: 0",
        ),
        (
            {"engine.vllm.sleep": True, "runs.gigpo.rollout.ahead": 1},
            r"runs\.gigpo: rollout\.ahead: 1 samples while the learner learns, .* engine\.vllm\.sleep: true",
        ),
        (
            {"learner.optimizer_offload": True, "learner.processes": 2},
            r"learner: optimizer_offload: true is for a learner on one GPU, and there are 2 ranks",
        ),
        (
            {"runs.starpo_s_refill.rollout.ahead": 1},
            r"runs\.starpo_s_refill: rollout\.ahead: 1 with credit\.filter\.refill \d: .* choose one of them",
        ),
        (
            {"engine.kind": "transformers", "env.order": "arrival"},
            r"order: arrival needs an engine .* set env.order: rounds",
        ),
        (
            {"env.tools.search": None, "env.tools.calculator": {}},
            r"demonstrations 6000 show how to search, .*search is null",
        ),
        ({"ablations.closer": {"runs": ["ppo"], "seeds": []}}, "runs and seeds belong together"),
        ({"ablations.closer": {"runs": ["ppo"], "seeds": [9, 9]}}, "seeds names 9 more than once"),
        ({"ablations.closer": {"runs": ["dapo"], "seeds": [9]}}, r"closer\.runs names 'dapo', which runs does not"),
        ({"ablations.references": ["ppo", "gpro"]}, r"references names 'gpro', which is none.*did you mean 'grpo'\?"),
        ({"ablations.closer.seeds": [2, 3]}, r"closer\.seeds names 2, which every run has already"),
        ({"ablations.train.seed": 3}, r"train\.seed has no effect"),
        ({"ablations.train": {"iteration": 3}}, r"ablations: runs\.ppo.*iteration.*did you mean 'iterations'"),
        ({"ablations.seeds": [True]}, r"ablations\.seeds\.0: Input should be a valid integer; got True"),
        ({"repro_runs": ["ppo; id"]}, r"repro_runs names 'ppo; id', which runs: does not define"),
        ({"runs.ppo;id": {}}, "'ppo;id' is to be a folder and a DVC stage; use letters, digits and _ only"),
        ({"runs.ppo\n": {}}, r"'ppo\\n' is to be a folder and a DVC stage; use letters, digits and _ only"),
        ({"places.outputs": "$(id)"}, "name a folder inside the project"),
        ({"runs.ppo-seed1": {}}, "'ppo-seed1' is to be a folder and a DVC stage; use letters, digits and _ only"),
        ({"runs.new": {"updat": {}}}, r"runs\.new: unknown key 'updat'; did you mean 'update'\?"),
        ({"runs.new": {"update": {"clip_hi": 1}}}, r"new: unknown key 'update\.clip_hi'; did you mean 'clip_high'\?"),
        (
            {"runs.new": {"rollout": {"top_p": 0.9}}},
            r"runs\.new: 'rollout\.top_p' is no knob: it is 1\.0 in every run",
        ),
        ({"runs.new": {"credit": {"estimator": "grpo"}}}, r"runs\.new: estimator grpo .*rollout\.samples is 1"),
        ({"runs.new": {"credit": {"loss_mask": False}}}, r"runs\.new: credit: loss_mask: false has no effect"),
        ({"runs.new": {"credit": {"rewards": {"em": -1}}}}, r"runs\.new: credit\.rewards\.em"),
        ({"runs.new": {"update": 3}}, r"runs\.new: update"),
        ({"runs.new": {"env": {"tols": {}}}}, r"runs\.new: env: unknown key 'tols'; did you mean 'tools'\?"),
        (
            {"runs.new": {"env": {"tools": {"serch": {}}}}},
            r"new: env: unknown key 'tools\.serch'; did you mean 'search'",
        ),
        (
            {"runs.new": {"env": {"tools": {"search": None}}}},
            r"runs\.new: env: tools: .* cannot be answered without any",
        ),
        ({"runs.new": {"env": {"max_tokens": 64}}}, r"runs\.new: env: max_action_tokens 64 leaves no room"),
        ({"runs.new": {"env": None}}, r"runs\.new: env: Input should be a valid dictionary"),
        (
            {**OVERLONG, "runs.new": {"env": {"max_tokens": 128}}},
            r"runs\.new: credit\.overlong_buffer 128 leaves nothing of env\.max_tokens 128 ",
        ),
        ({"places.data": "../data"}, "name a folder inside the project"),
    ],
)
def test_what_does_not_go_together_is_refused(content: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(content, changes)


def test_what_goes_together_is_accepted(content: dict[str, Any]) -> None:
    tuned = check(content, {"warm_start.fine_tune": True, "model.path": "own/model", "repro_baselines": []})
    assert tuned.repro_baselines == []
    taught = check(content, {**UNTAUGHT, "warm_start.conversations": "teacher.jsonl"}).warm_start
    assert taught.conversations == "teacher.jsonl"
    check(content, {**UNTAUGHT, "model.path": "own/model"})  # which is passed through


def test_a_reward_of_ones_own_stands_beside_the_parts(content: dict[str, Any], params: Params) -> None:
    own = check(content, {"train.credit.rewards.own": OWN, "runs.new": {"credit": {"rewards": {"own": {"weight": 2}}}}})
    rewards = own.run(RunId("new")).credit.rewards
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
    changes = {**ONLY_PPO, **GROUPS, **{f"train.credit.{key}": value for key, value in credit.items()}}
    with pytest.raises(ValueError, match=rf"train\.credit: .*advantage_mask\.{named}") if named else nullcontext():
        check(content, changes)


@pytest.mark.parametrize(
    ("estimator", "refused"), [("grpo", True), ("rloo", True), ("gae", False), ("step_gae", False)]
)
def test_gspo_token_needs_advantages_that_differ_within_a_trajectory(
    content: dict[str, Any], estimator: str, refused: bool
) -> None:
    changes = {**ONLY_PPO, **GROUPS, "train.credit.estimator": estimator, "train.update.ratio": "sequence_token"}
    message = rf"update\.ratio: sequence_token gives the gradient of ratio: sequence with estimator {estimator}"
    with pytest.raises(ValueError, match=message) if refused else nullcontext():
        check(content, changes)


def test_cispo_may_leave_weights_without_a_lower_bound(content: dict[str, Any]) -> None:
    cispo = {"train.update.loss": "cispo", "train.update.dual_clip": 0, "train.update.clip_low": 1.0}
    assert check(content, cispo).train.update.loss == "cispo"


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
    """Another kind's settings, where servers are, and whether a sampler sleeps start nothing over."""
    others = {"engine.transformers.batch_size": 7, "engine.server.timeout_s": 9.0, "engine.vllm.sleep": True}
    assert check(content, others).engine.identity == params.engine.identity
    bits = {name: value for name, value in content["engine"]["vllm"].items() if name != "sleep"}
    assert params.engine.identity == {"kind": "vllm", **bits}
    own = check(content, {**others, "engine.kind": "transformers"}).engine.identity
    assert own == {"kind": "transformers", "batch_size": 7}
    ahead = {"engine.vllm.sleep": True, "runs.gigpo.rollout.ahead": 1}  # which a server knows nothing of
    served = check(content, {**SERVER, **ahead, "engine.server.urls": ["http://a:1/"]}).engine
    assert served.identity == {"kind": "server"}
    assert served.server.urls == ["http://a:1"]


def test_a_monitor_that_looks_at_nothing_can_only_warn(content: dict[str, Any]) -> None:
    nothing = {"train.monitor.thresholds": dict.fromkeys(content["train"]["monitor"]["thresholds"], 0)}
    assert check(content, nothing).train.monitor.on_collapse == "warn"
    with pytest.raises(ValueError, match="on_collapse: stop has no effect while every threshold is 0"):
        check(content, {**nothing, "train.monitor.on_collapse": "stop"})


@pytest.mark.parametrize(("warmup", "iterations", "estimator"), [(3, 3, "gae"), (5, 3, "step_gae")])
def test_a_policy_that_never_trains_is_refused(
    content: dict[str, Any], warmup: int, iterations: int, estimator: str
) -> None:
    """Nor may the iterations of the sweep be too few, which stand in for the run's. Without a critic none are."""
    key = "train.update.critic.warmup.iterations"
    plain = {"train.update.critic.warmup.explained_variance": 0, "train.update.critic.warmup.limit": 0}
    changes = {**ONLY_PPO, **plain, "train.iterations": iterations, "train.credit.estimator": estimator}
    with pytest.raises(
        ValueError, match=rf"train: update\.critic\.warmup .* {warmup} iterations, .* all {iterations},"
    ):
        check(content, {**changes, key: warmup})
    check(content, {**changes, key: iterations - 1})
    with pytest.raises(ValueError, match=r"ablations: runs\.ppo: update\.critic\.warmup .* 12 iterations, .* all 12"):
        check(content, {**plain, key: content["ablations"]["train"]["iterations"]})
    without_critic = {"ablations.runs": ["grpo"], **NO_OTHERS, "ablations.train.iterations": 2}
    check(content, {**plain, key: 12, **without_critic})


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
    with pytest.raises(ValueError, match=r"explained_variance 0\.2 has no effect with limit 1"):
        check(content, {**patient, f"{key}limit": 1})
    with pytest.raises(ValueError, match="limit 3 has no effect without explained_variance"):
        check(content, {**patient, f"{key}explained_variance": 0})
    with pytest.raises(ValueError, match=r"warmup may train the critic alone for 20 iterations, which are all 20,"):
        check(content, {**ONLY_PPO, **patient, f"{key}limit": 20})


@pytest.mark.parametrize(("questions", "samples", "minibatches"), [(1, 1, 2), (3, 4, 13)])
def test_an_iteration_that_fills_no_minibatches_is_refused(
    content: dict[str, Any], questions: int, samples: int, minibatches: int
) -> None:
    changes = {**ONLY_PPO, "train.rollout.questions": questions, "train.rollout.samples": samples}
    full = minibatches - 1
    with pytest.raises(ValueError, match=rf"train: {full} trajectories .* update\.minibatches {minibatches}"):
        check(content, {**changes, "train.update.minibatches": minibatches})
    fitting = {**changes, "train.update.minibatches": full, "train.update.critic.minibatches": full}
    check(content, fitting)
    with pytest.raises(ValueError, match=rf"train: {full} trajectories .* update\.critic\.minibatches {minibatches}"):
        check(content, {**fitting, "train.update.critic.minibatches": minibatches})
    check(
        content, {**fitting, "train.update.critic.minibatches": minibatches, "train.credit.estimator": "reinforce_pp"}
    )


@pytest.mark.parametrize(
    ("estimator", "overrides", "named"),
    [
        ("grpo", {"credit": {"lam": 0.5, "gamma": 0.9}}, "credit.lam, credit.gamma"),
        ("gae", {"credit": {"step_gamma": 0.5}}, "credit.step_gamma"),
        ("gae", {"credit": {"step_lam": 0.95}}, "credit.step_lam"),  # the value that it has anyway
        ("step_gae", {"credit": {"gamma": 0.9}}, "credit.gamma"),
        ("reinforce_pp", {"credit": {"lam": 0.9}}, "credit.lam"),
        ("step_return", {"credit": {"step_lam": 0.9, "gigpo": {"weight": 2.0}}}, "credit.step_lam, credit.gigpo"),
        ("gigpo", {"credit": {"gamma": 0.9}}, "credit.gamma"),
        ("gigpo", {"credit": {"step_gamma": 0.9, "gigpo": {"weight": 2.0}}}, ""),
        ("rloo", {"credit": {"target_lam": 1.0}}, "credit.target_lam"),
        ("step_gae", {"credit": {"target_lam": 1.0}}, ""),
        ("reinforce_pp", {"update": {"critic": {"value_clip": 0.1}}}, "update.critic"),
        ("rloo", {"update": {"critic": {"warmup": {"iterations": 0}}}}, "update.critic"),
        ("gae", {"credit": {"lam": 0.5, "gamma": 0.9}, "update": {"critic": {"value_clip": 0.1}}}, ""),
        ("bi_level_gae", {"credit": {"lam": 0.5, "gamma": 0.9, "step_gamma": 0.9, "step_lam": 0.5}}, ""),
        ("reinforce_pp", {"credit": {"gamma": 0.9}}, ""),
        ("grpo", {"update": {"minibatches": 1}}, ""),
    ],
)
def test_a_run_overrides_what_its_estimator_reads_and_nothing_else(
    content: dict[str, Any], estimator: str, overrides: dict[str, Any], named: str
) -> None:
    """It would be its base under another name. What `train` says serves the estimators of all runs."""
    plain = {"rollout": {"samples": 4}, "credit": {"estimator": estimator}}
    changes = {"runs.new": override(plain, overrides)}
    refused = pytest.raises(ValueError, match=rf"runs\.new: estimator {estimator} does not read {named}, which")
    with refused if named else nullcontext():
        check(content, changes)


def test_a_member_of_the_sweep_has_its_seed_and_its_iterations(params: Params) -> None:
    member = params.run(RunId("grpo", seed=2, sweep="ablations"))
    assert (member.seed, member.iterations) == (2, params.ablations.train["iterations"])
    assert member.validation.every == 4 != params.train.validation.every
    assert member.credit == params.run(RunId("grpo")).credit
    assert params.run(RunId("grpo", seed=2)).iterations == params.train.iterations
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
    assert RunId.named(varied.name, 3) == varied
    assert varied.words == ["--run", varied.name, "--seed", "3"]
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


@pytest.mark.parametrize(
    ("run", "further", "message"),
    [
        ("ppo", {}, "overrides of ppo change nothing; name a value of train, or leave them out"),
        ("ppo", {"credit": {}}, "overrides of ppo change nothing"),
        (
            "ppo",
            {"update": {"epochs": PPO_EPOCHS}},
            r"update\.epochs is \d already, which would change nothing; leave that out",
        ),
        ("ppo", {"seed": 3}, "seed is no override; give the training its seed"),
        ("ppo", {"iteration": 5}, r"unknown key 'iteration'; did you mean 'iterations'\?"),
        ("ppo", {"iterations": 0}, "iterations: Input should be greater than or equal to 1; got 0"),
        ("ppo", {"env": {"top_k": 2}}, "unknown key 'env'"),
        (
            "ppo",
            {"credit": {"rewards": {"mine": {"function": "os:abort", "weight": 1.0}}}},
            "names code to run; add it",
        ),
        ("grpo", {"credit": {"lam": 0.5}}, r"estimator grpo does not read credit\.lam, which would change nothing"),
        ("pppo", {"iterations": 5}, r"no run 'pppo'.*did you mean 'ppo'\?"),
    ],
)
def test_overrides_for_one_training_are_values_of_train_that_change_something(
    params: Params, run: str, further: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
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


def test_the_learning_rate_decays_linearly_over_the_iterations(params: Params) -> None:
    train = params.train.model_copy(update={"iterations": 4})
    assert [train.rate(iteration) for iteration in range(4)] == [1.0, 0.75, 0.5, 0.25]


@pytest.mark.parametrize(
    ("decay", "warmup", "rates"),
    [
        ("none", 0, [1, 1, 1, 1]),
        ("cosine", 0, [1, 0.5 + 0.5 * math.sqrt(0.5), 0.5, 0.5 - 0.5 * math.sqrt(0.5)]),
        ("none", 1, [1 / 2, 1, 1, 1]),
        ("linear", 2, [1 / 3 * 1, 2 / 3 * 0.75, 0.5, 0.25]),
    ],
)
def test_rates_rise_and_decay_by_hand(params: Params, decay: str, warmup: int, rates: list[float]) -> None:
    update = params.train.update.model_copy(update={"learning_rate_decay": decay, "learning_rate_warmup": warmup})
    train = params.train.model_copy(update={"iterations": 4, "update": update})
    assert [train.rate(iteration) for iteration in range(4)] == pytest.approx(rates)


def test_a_warm_up_of_the_rates_that_the_policy_never_sees_or_never_leaves_is_refused(content: dict[str, Any]) -> None:
    key = "train.update.learning_rate_warmup"
    with pytest.raises(ValueError, match=r"learning_rate_warmup 20 lasts all 20 iterations"):
        check(content, {**ONLY_PPO, key: 20})
    with pytest.raises(
        ValueError, match=r"learning_rate_warmup 2 is over before the policy is first trained, after the 2 iter"
    ):
        check(content, {**ONLY_PPO, key: 2, "train.update.critic.warmup.iterations": 2})
    check(content, {**ONLY_PPO, key: 3, "train.update.critic.warmup.iterations": 2})
    check(content, {**ONLY_PPO, **GROUPS, key: 2, "train.credit.estimator": "grpo"})


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


def test_a_run_may_have_its_contexts_rewritten(content: dict[str, Any]) -> None:
    """A window of three exchanges slides once in an episode of five steps; demonstrations are not in its way."""
    window, summary = ({"kind": kind, "every": every} for kind, every in (("window", 3), ("summary", 4)))
    check(content, {"env.context": window})
    params = check(content, {"runs.new": {"env": {"context": summary}}})
    assert params.of(RunId("new")).env.context.model_dump() == summary


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
