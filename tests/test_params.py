"""params.yaml: what it holds is accepted, and every mistake is refused by the name of its key."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from agent_r1.params import Params, fingerprint, load
from agent_r1.params.train import WITH_GROUPS, Estimator

FILE = Path(__file__).parents[1] / "params.yaml"
Write = Callable[[dict[str, Any]], Path]


@pytest.fixture
def content() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(FILE.read_text())
    return loaded


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def _write(content: dict[str, Any]) -> Path:
        path = tmp_path / "params.yaml"
        path.write_text(yaml.safe_dump(content))
        return path

    return _write


def put(content: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """A copy with the value at the dotted key, which is made where it is missing."""
    changed = copy.deepcopy(content)
    *parents, last = key.split(".")
    section = changed
    for parent in parents:
        section = section[parent]
    section[last] = value
    return changed


def only_ppo(content: dict[str, Any]) -> dict[str, Any]:
    """A copy in which the other runs' overrides cannot be refused."""
    return put({**content, "runs": {"ppo": {}}, "repro_runs": ["ppo"]}, "ablations.runs", ["ppo"])


def sections(content: dict[str, Any], prefix: str = "") -> list[str]:
    """The dotted names of all mappings with fixed keys."""
    found = []
    for key, value in content.items():
        if isinstance(value, dict) and key not in ("runs", "files"):
            found += [f"{prefix}{key}", *sections(value, f"{prefix}{key}.")]
    return found


MUSIQUE = {"format": "musique", "test": {"file": "x", "questions": 0}}
SECTIONS = sections(yaml.safe_load(FILE.read_text()))


def test_the_projects_own_file_loads() -> None:
    params = load(FILE)
    assert set(params.runs) >= {"ppo", "ppo_no_advantage_mask", "ppo_no_masks", "grpo", "grpo_no_loss_mask"}
    assert params.repro_runs == ["ppo", "ppo_no_advantage_mask", "ppo_no_masks"]


def test_the_full_configuration_loads_and_differs_in_values_alone() -> None:
    own, full = (load(FILE.with_name(name)) for name in ("params.yaml", "params.qwen2.5-3b.yaml"))
    assert full.prepare.files == own.prepare.files
    assert full.model.path == "Qwen/Qwen2.5-3B-Instruct"
    assert set(full.runs) < set(own.runs)
    assert "test" in full.prepare.files["musique"].splits
    assert "train" not in full.prepare.files["musique"].splits


def test_runs_override_only_what_they_name() -> None:
    params = load(FILE)
    assert params.run("ppo") == params.train
    unmasked = params.run("ppo_no_advantage_mask")
    assert not any(unmasked.credit.advantage_mask.model_dump().values())
    assert unmasked.credit.loss_mask
    assert unmasked.credit.rewards == params.train.credit.rewards
    assert unmasked.update == params.train.update
    assert not params.run("ppo_no_masks").credit.loss_mask
    assert params.run("grpo").credit.estimator == "grpo"
    assert params.run("grpo").rollout.samples > 1
    assert params.run("grpo").credit.gamma == params.train.credit.gamma


def test_every_estimator_has_a_run_of_its_name_or_is_ppo() -> None:
    params = load(FILE)
    for estimator in get_args(Estimator):
        run = params.run("ppo" if estimator == "gae" else estimator)
        assert run.credit.estimator == estimator
        assert run.credit.advantage_mask == params.train.credit.advantage_mask
        assert (run.rollout.samples > 1) == (estimator in WITH_GROUPS)


def test_starpos_runs_differ_in_what_they_are_named_after() -> None:
    params = load(FILE)
    starpo, filtered, online = (params.run(name) for name in ("starpo", "starpo_s", "starpo_online_4"))
    assert starpo.credit.estimator == "gae"
    assert starpo.credit.gamma == starpo.credit.lam == 1
    assert starpo.update.clip_low == starpo.update.clip_high < filtered.update.clip_high
    assert (filtered.credit.filter.kind, filtered.credit.filter.share) == ("top_fraction", 0.25)
    assert filtered.rollout == starpo.rollout
    assert params.run("starpo_grpo").rollout == starpo.rollout
    assert online.update.epochs * online.update.minibatches == 4
    shaped = params.run("starpo_32x4").rollout
    assert shaped.questions * shaped.samples == starpo.rollout.questions * starpo.rollout.samples


def test_adding_a_run_is_adding_lines(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    lines = "\n  ppo_hot:\n    update: {learning_rate: 1.0e-3}\n  ppo_again:\n"
    path.write_text(FILE.read_text().replace("\n\nrepro_runs:", f"{lines}\nrepro_runs:"))
    params = load(path)
    assert params.run("ppo_hot").update.learning_rate == 1e-3
    assert params.run("ppo_again") == params.train
    assert params.run("ppo") == load(FILE).run("ppo")


@pytest.mark.parametrize("section", ["", *SECTIONS])
def test_an_unknown_key_is_refused_with_the_nearest_name(content: dict[str, Any], write: Write, section: str) -> None:
    mapping = content
    for part in section.split(".") if section else []:
        mapping = mapping[part]
    # The longest key of the section, with a letter too many: no other key is nearer.
    right = max(mapping, key=len)
    wrong = f"{section}.{right}x".removeprefix(".")
    with pytest.raises(ValueError, match="unknown key") as refusal:
        load(write(put(content, wrong, 1)))
    assert f"unknown key {wrong!r}; did you mean {right!r}?" in str(refusal.value)


def test_an_unknown_key_near_no_other_is_refused_with_all_names(content: dict[str, Any], write: Write) -> None:
    with pytest.raises(ValueError, match=r"unknown key 'model.zzzzzz'; valid names: path, dtype"):
        load(write(put(content, "model.zzzzzz", 1)))


def test_every_mistake_is_named_at_once(content: dict[str, Any], write: Write) -> None:
    changed = put(put(content, "env.topk", 1), "evaluate.seed", -1)
    with pytest.raises(ValueError, match=r"(?s)'env\.topk'.*evaluate\.seed"):
        load(write(changed))


@pytest.mark.parametrize(
    "section", [*SECTIONS, "prepare.files", "runs", "repro_runs", "train.update.clip_low", "model.path"]
)
def test_a_missing_key_is_refused(content: dict[str, Any], write: Write, section: str) -> None:
    *parents, last = section.split(".")
    mapping = content
    for parent in parents:
        mapping = mapping[parent]
    del mapping[last]
    with pytest.raises(ValueError, match="missing") as refusal:
        load(write(content))
    assert f"key {section!r} is missing" in str(refusal.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train.rollout.top_p", 0.95),
        ("train.rollout.top_p", 0.0),
        ("train.rollout.top_p", 1.5),
        ("train.rollout.temperature", 0.7),
        ("train.rollout.temperature", 0.0),
        ("train.rollout.questions", 0),
        ("train.rollout.samples", 0),
        ("train.credit.estimator", "gea"),
        ("train.credit.gamma", 1.1),
        ("train.credit.lam", -0.1),
        ("train.credit.step_gamma", 1.1),
        ("train.credit.step_lam", -0.1),
        ("train.credit.filter.kind", "top_k"),
        ("train.credit.filter.share", 0.0),
        ("train.credit.filter.share", 1.1),
        ("train.credit.filter.refill", -1),
        ("train.credit.rewards.agent_r1", -1.0),
        ("train.credit.rewards.progress", float("nan")),
        ("train.credit.rewards.progress", float("inf")),
        ("train.update.learning_rate", 0.0),
        ("train.update.clip_low", 1.0),
        ("train.update.clip_low", 0.0),
        ("train.update.minibatches", 0),
        ("train.keep.every", 0),
        ("train.keep.learner", "policy"),
        ("train.monitor.on_collapse", "restart"),
        ("train.monitor.patience", 0),
        ("train.monitor.first_iterations", 0),
        ("train.monitor.max_rollbacks", -1),
        ("train.monitor.thresholds.reward_std_fall", 1.5),
        ("train.monitor.thresholds.entropy_rise", 0.5),
        ("train.monitor.thresholds.grad_norm_spike", 1.0),
        ("train.monitor.thresholds.grad_norm_spike", float("inf")),
        ("train.update.ratio", "trajectory"),
        ("train.update.aggregation", "mean"),
        ("train.update.dual_clip", 1.0),
        ("train.update.dual_clip", float("inf")),
        ("train.update.importance_cap", -1.0),
        ("train.update.kl_loss", -0.1),
        ("train.update.entropy_bonus", float("nan")),
        ("train.update.constant_length", -1),
        ("train.credit.kl_reward", float("inf")),
        ("train.iterations", "many"),
        ("prepare.datasets", ["hotpot"]),
        ("prepare.datasets", []),
        ("prepare.datasets", ["atlas", "atlas"]),
        ("prepare.files.musique.test.questions", -1),
        ("prepare.files.musique.format", "hotpot"),
        ("search.kind", "bm52"),
        ("search.cache_entries", -1),
        ("search.bm25.b", 1.5),
        ("search.bm25.k1", 0.0),
        ("search.dense.pooling", "max"),
        ("search.dense.max_tokens", 0),
        ("search.hybrid.candidates", 0),
        ("search.remote.timeout_s", 0.0),
        ("search.remote.backoff_s", float("inf")),
        ("prepare.atlas.people", 3),
        ("model.dtype", "float16"),
        ("engine.kind", "sglang"),
        ("engine.vllm.gpu_memory_utilization", 1.1),
        ("engine.vllm.threads", 0),
        ("engine.vllm.cpu_cache_gib", 0.0),
        ("engine.transformers.batch_size", 0),
        ("engine.server.urls", ["127.0.0.1:8001"]),
        ("engine.server.concurrency", 0),
        ("engine.server.timeout_s", 0.0),
        ("engine.server.retries", -1),
        ("model.lora.rank", -1),
        ("model.lora.alpha", 0),
        ("model.lora.targets", []),
        ("warm_start.stop_early", 2.0),
        ("env.max_tokens", 64),
        ("evaluate.bootstrap_samples", 10),
    ],
)
def test_a_value_out_of_range_is_refused(content: dict[str, Any], write: Write, key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=key.rpartition(".")[2]):
        load(write(put(content, key, value)))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "datasets",
            ["hotpot"],
            r"datasets names 'hotpot', which prepare\.files does not define; did you mean 'hotpotqa'",
        ),
        ("datasets", ["musique", "musique"], "names 'musique' twice"),
        ("dataset", "atlas", r"unknown key 'prepare\.dataset'; did you mean 'datasets'"),
        ("files.musique.tset", {}, r"unknown key 'prepare\.files\.musique\.tset'; did you mean 'test'"),
        ("files.musique.test.fil", "x", r"unknown key 'prepare\.files\.musique\.test\.fil'; did you mean 'file'"),
        ("files.own", {"format": "hotpotqa"}, r"prepare\.files\.own: a data set needs a file of questions"),
        (
            "files.own",
            {"format": "generic", "test": {"file": "x.jsonl", "questions": 0}},
            r"prepare\.files\.own: rows of format generic bring no passages along; name a corpus",
        ),
        (
            "files.atlas",
            MUSIQUE,
            "'atlas' is the built-in data set",
        ),
        ("files.a/b", MUSIQUE, r"prepare\.files\.a/b"),
    ],
)
def test_data_sets_are_checked(content: dict[str, Any], write: Write, key: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(write(put(content, f"prepare.{key}", value)))


def test_a_data_set_has_the_splits_it_names(content: dict[str, Any], write: Write) -> None:
    prepare = load(write(put(content, "prepare.datasets", ["hotpotqa", "musique"]))).prepare
    assert [list(prepare.files[name].splits) for name in prepare.datasets] == [["train", "test"], ["test"]]
    assert prepare.dataset == "hotpotqa+musique"
    assert prepare.files["hotpotqa"].splits["train"].questions == 25600


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"search.dense.nlist": 8}, "nlist 8 and nprobe 0 have no effect with faiss: flat"),
        ({"search.dense.nprobe": 2}, "nlist 0 and nprobe 2 have no effect with faiss: flat"),
        ({"search.dense.faiss": "ivf", "search.dense.nlist": 8}, "nprobe 0 lists out of nlist 8"),
        ({"search.dense.faiss": "ivf", "search.dense.nlist": 8, "search.dense.nprobe": 9}, "nprobe 9 lists"),
        ({"search.kind": "dense"}, r"kind: dense needs an encoder; set dense\.encoder"),
        ({"search.kind": "hybrid"}, r"kind: hybrid needs an encoder; set dense\.encoder"),
        ({"search.kind": "remote", "search.remote.url": "localhost:8700"}, r"set remote\.url .* got 'localhost:8700'"),
    ],
)
def test_a_kind_of_search_that_lacks_something_is_refused(
    content: dict[str, Any], write: Write, changes: dict[str, Any], message: str
) -> None:
    for key, value in changes.items():
        content = put(content, key, value)
    with pytest.raises(ValueError, match=message):
        load(write(content))


def test_all_reward_weights_0_is_refused(content: dict[str, Any], write: Write) -> None:
    with pytest.raises(ValueError, match=r"train\.credit\.rewards: all reward weights are 0"):
        load(write(put(content, "train.credit.rewards.agent_r1", 0.0)))


@pytest.mark.parametrize(("aggregation", "length"), [("token_mean", 512), ("sequence_mean", 1), ("constant_length", 0)])
def test_constant_length_goes_with_its_aggregation(
    content: dict[str, Any], write: Write, aggregation: str, length: int
) -> None:
    changed = put(put(content, "train.update.aggregation", aggregation), "train.update.constant_length", length)
    with pytest.raises(ValueError, match=rf"train\.update: constant_length {length} with aggregation {aggregation}"):
        load(write(changed))


def test_a_cap_that_cuts_agreement_is_refused(content: dict[str, Any], write: Write) -> None:
    with pytest.raises(ValueError, match=r"train\.update: importance_cap 0\.5 cuts .* set it to 1 or more"):
        load(write(put(content, "train.update.importance_cap", 0.5)))


def test_a_penalty_that_grpo_would_scale_up_is_refused(content: dict[str, Any], write: Write) -> None:
    changed = put(put(content, "train.rollout.samples", 4), "train.credit.estimator", "grpo")
    with pytest.raises(
        ValueError, match=r"train\.credit: kl_reward 0\.1 with estimator grpo: .* train\.update\.kl_loss"
    ):
        load(write(put(changed, "train.credit.kl_reward", 0.1)))


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
    content: dict[str, Any], write: Write, key: str, reference: bool, regularised: bool
) -> None:
    train = load(write(put(only_ppo(content), key, 0.01))).train
    assert (train.needs_reference, train.update.regularised) == (reference, regularised)


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"])
def test_a_group_of_one_is_refused(content: dict[str, Any], write: Write, estimator: str) -> None:
    with pytest.raises(ValueError, match=rf"train: estimator {estimator} .*rollout\.samples is 1"):
        load(write(put(content, "train.credit.estimator", estimator)))


@pytest.mark.parametrize(
    ("estimator", "loss_mask", "off", "named"),
    [
        ("gae", False, [], "recursion"),  # nothing at observations to train on
        ("gae", False, ["whitening", "critic"], "recursion"),
        ("grpo", False, [], "recursion"),
        ("grpo", True, ["recursion"], "recursion"),  # a broadcast advantage is the same on action tokens
        ("grpo", True, ["whitening"], "whitening"),
        ("grpo", False, ["recursion", "critic"], "critic"),
        ("dr_grpo", True, ["recursion"], "recursion"),
        ("rloo", True, ["whitening"], "whitening"),
        ("reinforce_pp", True, ["recursion"], "recursion"),  # gamma is 1: returns pass over observations unchanged
        ("reinforce_pp", True, ["critic"], "critic"),
        ("reinforce_pp_baseline", True, ["recursion"], "recursion"),
        ("step_gae", True, ["recursion"], "recursion"),  # an observation belongs to no step
        ("step_gae", True, ["critic"], "critic"),
        ("bi_level_gae", False, ["recursion"], "recursion"),
    ],
)
def test_a_combination_without_effect_is_refused(
    content: dict[str, Any], write: Write, estimator: str, loss_mask: bool, off: list[str], named: str
) -> None:
    changed = put(put(content, "train.rollout.samples", 4), "train.credit", masked(content, estimator, loss_mask, off))
    with pytest.raises(ValueError, match=rf"train\.credit: .*advantage_mask\.{named}"):
        load(write(changed))


@pytest.mark.parametrize(
    ("estimator", "gamma", "lam", "refused"),
    [
        ("gae", 1.0, 1.0, True),  # the deltas telescope
        ("gae", 1.0, 0.95, False),
        ("gae", 0.99, 1.0, False),
        ("reinforce_pp", 1.0, 0.95, True),
        ("reinforce_pp", 0.99, 0.95, False),
    ],
)
def test_recursion_off_is_refused_where_the_discounts_leave_it_no_effect(
    content: dict[str, Any], write: Write, estimator: str, gamma: float, lam: float, refused: bool
) -> None:
    credit = {**masked(content, estimator, True, ["recursion"]), "gamma": gamma, "lam": lam}
    path = write(only_ppo(put(content, "train.credit", credit)))
    if refused:
        with pytest.raises(ValueError, match=rf"recursion: false has no effect on estimator {estimator} at gamma 1"):
            load(path)
    else:
        load(path)


@pytest.mark.parametrize(
    ("estimator", "loss_mask", "off"),
    [
        ("dr_grpo", False, ["recursion"]),
        ("reinforce_pp", True, ["whitening"]),
        ("reinforce_pp", False, ["recursion", "whitening"]),
        ("reinforce_pp_baseline", True, ["recursion", "whitening"]),
        ("bi_level_gae", True, ["whitening"]),
    ],
)
def test_a_combination_with_an_effect_is_accepted(
    content: dict[str, Any], write: Write, estimator: str, loss_mask: bool, off: list[str]
) -> None:
    changed = put(put(content, "train.rollout.samples", 4), "train.credit", masked(content, estimator, loss_mask, off))
    load(write(only_ppo(changed)))


def masked(content: dict[str, Any], estimator: str, loss_mask: bool, off: list[str]) -> dict[str, Any]:
    """The file's credit section with an estimator and masks of its own."""
    return {
        **content["train"]["credit"],
        "estimator": estimator,
        "loss_mask": loss_mask,
        "advantage_mask": {name: name not in off for name in ("recursion", "whitening", "critic")},
    }


@pytest.mark.parametrize(
    ("kind", "urls", "message"),
    [
        ("server", [], "engine: kind: server needs server.urls; start one with"),
        ("vllm", ["http://a:1"], r"engine: server.urls has no effect with kind: vllm; set kind: server, or urls: \[\]"),
        ("transformers", ["http://a:1"], "engine: server.urls has no effect with kind: transformers"),
        ("server", ["http://a:1", "http://a:1/"], "engine.server: urls names a server twice: http://a:1, http://a:1"),
    ],
)
def test_servers_are_named_where_they_are_asked_and_only_there(
    content: dict[str, Any], write: Write, kind: str, urls: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load(write(put(put(content, "engine.kind", kind), "engine.server.urls", urls)))


def test_an_engines_identity_is_what_its_kind_reads(content: dict[str, Any]) -> None:
    """Another kind's settings, and where servers are, start nothing over."""
    changed = put(put(content, "engine.transformers.batch_size", 7), "engine.server.timeout_s", 9.0)
    assert Params.model_validate(changed).engine.identity == Params.model_validate(content).engine.identity
    assert Params.model_validate(content).engine.identity == {"kind": "vllm", **content["engine"]["vllm"]}
    changed = put(changed, "engine.kind", "transformers")
    assert Params.model_validate(changed).engine.identity == {"kind": "transformers", "batch_size": 7}
    changed = put(put(changed, "engine.kind", "server"), "engine.server.urls", ["http://a:1/"])
    assert Params.model_validate(changed).engine.identity == {"kind": "server"}
    assert Params.model_validate(changed).engine.server.urls == ["http://a:1"]


@pytest.mark.parametrize(
    ("monitor", "message"),
    [
        ({"max_rollbacks": 2}, "monitor: max_rollbacks 2 does not go with on_collapse: warn"),
        ({"on_collapse": "stop", "max_rollbacks": 2}, "monitor: max_rollbacks 2 does not go with on_collapse: stop"),
        ({"on_collapse": "rollback"}, "monitor: max_rollbacks 0 does not go with on_collapse: rollback"),
        ({"on_collapse": "stop", "patience": 20}, "train: monitor.on_collapse: stop has no effect: with monitor.pat"),
    ],
)
def test_a_reaction_to_collapse_without_effect_is_refused(
    content: dict[str, Any], write: Write, monitor: dict[str, Any], message: str
) -> None:
    monitored = {**content["train"]["monitor"], **monitor}
    with pytest.raises(ValueError, match=message):
        load(write(put(put(content, "train.iterations", 20), "train.monitor", monitored)))


def test_a_monitor_that_looks_at_nothing_can_only_warn(content: dict[str, Any], write: Write) -> None:
    nothing = put(content, "train.monitor.thresholds", dict.fromkeys(content["train"]["monitor"]["thresholds"], 0))
    assert load(write(nothing)).train.monitor.on_collapse == "warn"
    with pytest.raises(ValueError, match="on_collapse: stop has no effect while every threshold is 0"):
        load(write(put(nothing, "train.monitor.on_collapse", "stop")))


@pytest.mark.parametrize(("warmup", "iterations", "estimator"), [(3, 3, "gae"), (5, 3, "step_gae")])
def test_a_policy_that_never_trains_is_refused(
    content: dict[str, Any], write: Write, warmup: int, iterations: int, estimator: str
) -> None:
    changed = put(only_ppo(content), "train.update.critic_warmup_iterations", warmup)
    changed = put(put(changed, "train.iterations", iterations), "train.credit.estimator", estimator)
    with pytest.raises(ValueError, match=rf"train: update\.critic_warmup_iterations {warmup} .* all {iterations} iter"):
        load(write(changed))
    load(write(put(changed, "train.update.critic_warmup_iterations", iterations - 1)))


def test_a_sweep_whose_policies_never_train_is_refused(content: dict[str, Any], write: Write) -> None:
    """Its iterations stand in for the run's, which are enough. Without a critic there is no warm-up."""
    changed = put(content, "train.update.critic_warmup_iterations", content["ablations"]["iterations"])
    with pytest.raises(ValueError, match=r"ablations: runs\.ppo: update\.critic_warmup_iterations 12 .* all 12"):
        load(write(changed))
    load(write(put(put(changed, "ablations.runs", ["grpo"]), "ablations.iterations", 2)))


@pytest.mark.parametrize(("questions", "samples", "minibatches"), [(1, 1, 2), (3, 4, 13)])
def test_an_iteration_that_fills_no_minibatches_is_refused(
    content: dict[str, Any], write: Write, questions: int, samples: int, minibatches: int
) -> None:
    rollout = {**content["train"]["rollout"], "questions": questions, "samples": samples}
    changed = put(put(only_ppo(content), "train.rollout", rollout), "train.update.minibatches", minibatches)
    with pytest.raises(
        ValueError, match=rf"train: {minibatches - 1} trajectories .* update\.minibatches {minibatches}"
    ):
        load(write(changed))
    load(write(put(changed, "train.update.minibatches", minibatches - 1)))


def test_fine_tuning_the_built_in_model_is_refused(content: dict[str, Any], write: Write) -> None:
    changed = put(content, "warm_start.fine_tune", True)
    with pytest.raises(ValueError, match=r"warm_start\.fine_tune: true has no effect .* set model\.path"):
        load(write(changed))
    load(write(put(changed, "model.path", "Qwen/Qwen2.5-3B-Instruct")))


@pytest.mark.parametrize(
    ("run", "overrides", "named", "estimator"),
    [
        ("grpo", {"credit": {"estimator": "grpo", "lam": 0.5, "gamma": 0.9}}, "credit.gamma, credit.lam", "grpo"),
        ("ppo", {"credit": {"step_gamma": 0.5}}, "credit.step_gamma", "gae"),
        ("ppo", {"credit": {"step_lam": 0.95}}, "credit.step_lam", "gae"),  # the value that it has anyway
        ("step_gae", {"credit": {"estimator": "step_gae", "gamma": 0.9}}, "credit.gamma", "step_gae"),
        ("reinforce_pp", {"credit": {"estimator": "reinforce_pp", "lam": 0.9}}, "credit.lam", "reinforce_pp"),
        (
            "reinforce_pp",
            {"credit": {"estimator": "reinforce_pp"}, "update": {"value_clip": 0.1}},
            "update.value_clip",
            "reinforce_pp",
        ),
        (
            "rloo",
            {"credit": {"estimator": "rloo"}, "update": {"critic_warmup_iterations": 0}},
            "update.critic_warmup_iterations",
            "rloo",
        ),
    ],
)
def test_a_run_that_overrides_what_its_estimator_does_not_read_is_refused(
    content: dict[str, Any], write: Write, run: str, overrides: dict[str, Any], named: str, estimator: str
) -> None:
    """It would be its base under another name. What `train` says serves the estimators of all runs."""
    samples = {"rollout": {"samples": 4}}
    with pytest.raises(ValueError, match=rf"runs\.{run}: estimator {estimator} does not read {named}, which"):
        load(write(put(content, f"runs.{run}", samples | overrides)))


@pytest.mark.parametrize(
    "overrides",
    [
        {"credit": {"lam": 0.5, "gamma": 0.9}, "update": {"value_clip": 0.1, "critic_learning_rate": 1e-4}},
        {"credit": {"estimator": "bi_level_gae", "lam": 0.5, "gamma": 0.9, "step_gamma": 0.9, "step_lam": 0.5}},
        {"credit": {"estimator": "reinforce_pp", "gamma": 0.9}},
        {"credit": {"estimator": "grpo"}, "rollout": {"samples": 4}, "update": {"minibatches": 1}},
    ],
)
def test_a_run_may_override_what_its_estimator_reads(
    content: dict[str, Any], write: Write, overrides: dict[str, Any]
) -> None:
    load(write(put(content, "runs.new", overrides)))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"updat": {}}, r"runs\.new: unknown key 'updat'; did you mean 'update'\?"),
        ({"update": {"clip_hi": 0.3}}, r"runs\.new: unknown key 'update\.clip_hi'; did you mean 'clip_high'\?"),
        ({"credit": {"advantage_mask": {"critc": True}}}, r"'credit\.advantage_mask\.critc'; did you mean 'critic'\?"),
        ({"rollout": {"top_p": 0.9}}, r"runs\.new: rollout: top_p 0\.9"),
        ({"credit": {"estimator": "grpo"}}, r"runs\.new: estimator grpo .*rollout\.samples is 1"),
        ({"credit": {"loss_mask": False}}, r"runs\.new: credit: loss_mask: false has no effect"),
        ({"credit": {"rewards": {"progress": -1}}}, r"runs\.new: credit\.rewards\.progress"),
        ({"credit": {"rewards": {"anwser": 1}}}, r"'credit\.rewards\.anwser'; did you mean 'no_answer'\?"),
        ({"update": 3}, r"runs\.new: update"),
    ],
)
def test_a_run_with_a_mistake_is_refused(
    content: dict[str, Any], write: Write, overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load(write(put(content, "runs.new", overrides)))


def test_repro_baselines_must_be_baselines(content: dict[str, Any], write: Write) -> None:
    assert load(write(put(content, "repro_baselines", []))).repro_baselines == []
    with pytest.raises(ValueError, match=r"repro_baselines\.0: Input should be 'base_tool_call'.*; got 'naive'"):
        load(write(put(content, "repro_baselines", ["naive"])))


def test_a_run_is_not_called_like_a_baseline(content: dict[str, Any], write: Write) -> None:
    with pytest.raises(ValueError, match="runs: 'closed_book' is the name of a baseline; name the run differently"):
        load(write(put(content, "runs.closed_book", {})))


def test_repro_runs_must_be_runs(content: dict[str, Any], write: Write) -> None:
    with pytest.raises(ValueError, match=r"repro_runs names 'gpro'.*did you mean 'grpo'\?"):
        load(write(put(content, "repro_runs", ["ppo", "gpro"])))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("ablations.runs", ["ppo", "gpro"], r"ablations\.runs names 'gpro'.*did you mean 'grpo'\?"),
        ("ablations.runs", ["ppo", "grpo", "ppo"], "runs names 'ppo' more than once"),
        ("ablations.runs", [], "at least 1 item"),
        ("ablations.seeds", [0, 1, 1], "seeds names 1 more than once"),
        ("ablations.seeds", [-1], "greater than or equal to 0"),
        ("runs.ppo-seed1", {}, "'ppo-seed1' is to be a folder and a DVC stage; use letters, digits and _ only"),
    ],
)
def test_a_sweep_that_cannot_be_made_is_refused(
    content: dict[str, Any], write: Write, key: str, value: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load(write(put(content, key, value)))


def test_a_member_of_the_sweep_has_its_seed_and_its_iterations() -> None:
    params = load(FILE)
    member = params.run("grpo", seed=2, sweep="ablations")
    assert (member.seed, member.iterations) == (2, params.ablations.iterations)
    assert member.credit == params.run("grpo").credit
    assert params.run("grpo", seed=2).iterations == params.train.iterations
    with pytest.raises(ValueError, match="no sweep 'ablation'"):
        params.run("grpo", sweep="ablation")


def test_asking_for_an_unknown_run_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no run 'pppo'.*did you mean 'ppo'\?"):
        load(FILE).run("pppo")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"params\.yaml does not exist; run from the project's root"):
        load(tmp_path / "params.yaml")


def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_text("- prepare\n- train\n")
    with pytest.raises(ValueError, match="expected a mapping of sections, found list"):
        load(path)


def test_the_learning_rate_decays_linearly_over_the_iterations() -> None:
    train = load(FILE).train.model_copy(update={"iterations": 4})
    assert [train.rate(iteration) for iteration in range(4)] == [1.0, 0.75, 0.5, 0.25]
    constant = train.model_copy(update={"update": train.update.model_copy(update={"learning_rate_decay": "none"})})
    assert [constant.rate(iteration) for iteration in range(4)] == [1.0] * 4


def test_params_cannot_be_changed() -> None:
    params: Any = load(FILE)
    with pytest.raises(ValueError, match="frozen"):
        params.train.seed = 1


def test_the_fingerprint_follows_every_value_and_no_order(content: dict[str, Any]) -> None:
    params = Params.model_validate(content)
    turned = Params.model_validate(dict(reversed(content.items())))
    changed = Params.model_validate(put(content, "train.update.clip_low", 0.21))
    assert fingerprint(params.train) == fingerprint(turned.train)
    assert fingerprint(params.train) != fingerprint(changed.train)
    assert fingerprint(params.env) == fingerprint(changed.env)
    assert fingerprint(params.train, "a") != fingerprint(params.train, "b")
