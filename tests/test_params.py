"""params.yaml: what it holds is accepted, and every mistake is refused by the name of its key."""

import copy
import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from agent_r1.files import write_text
from agent_r1.params import SHIPPED, Params, fingerprint, load
from agent_r1.params.credit import STEP_LEVEL, WITH_GROUPS, Estimator
from agent_r1.params.places import RunId
from agent_r1.params.sections import flatten, validated
from tests.cases import cases

FILE = Path(__file__).parents[1] / "params.yaml"
CASES: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("params_cases.yaml").read_text())
NO_OTHERS = {"ablations.closer": {"runs": [], "seeds": []}, "ablations.references": []}
# The other runs' overrides cannot be refused then.
ONLY_PPO = {"runs": {"ppo": {}}, "repro_runs": ["ppo"], "ablations.runs": ["ppo"], **NO_OTHERS}
PRESETS: dict[str, dict[str, Any]] = CASES["presets"]
DEFAULTS = {
    **CASES["defaults"],
    **{f"env.tools.{name}": None for name in ("calculator", "read", "python")},
    **{f"train.credit.rewards.{name}": 0.0 for name in load(FILE).train.credit.rewards.weights if name != "agent_r1"},
}


@pytest.fixture(scope="module")
def content() -> dict[str, Any]:
    return yaml.safe_load(FILE.read_text())


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


@pytest.mark.parametrize(("name", "published"), CASES["published"])
def test_presets_have_the_published_values(params: Params, name: str, published: dict[str, Any]) -> None:
    run = flatten(params.run(RunId(name)).model_dump())
    assert {key: run[key] for key in published} == published
    assert run["update.kl_loss"] == run["credit.kl_reward"] == 0


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


@pytest.mark.parametrize(
    ("key", "value"),
    [(f"{section}.{key}".strip("."), value) for value, section, keys in CASES["out_of_range"] for key in keys.split()],
)
def test_a_value_out_of_range_is_refused(content: dict[str, Any], key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=key.rpartition(".")[2]):
        check(content, {key: value})


@pytest.mark.parametrize(
    ("section", "line"), [(section, line) for section, lines in CASES["refused"].items() for line in lines.splitlines()]
)
def test_values_that_do_not_go_together_are_refused(content: dict[str, Any], section: str, line: str) -> None:
    given, _, message = line.partition(" | ")
    others: dict[str, Any] = ONLY_PPO if section.startswith("train") else {}
    with pytest.raises(ValueError, match=pattern(message)):
        check(content, {**others, **changes_in(given, section)})


@pytest.mark.parametrize("line", CASES["accepted"].splitlines())
def test_values_that_go_together_are_accepted(content: dict[str, Any], line: str) -> None:
    check(content, {**ONLY_PPO, **changes_in(line)})


@pytest.mark.parametrize("line", CASES["unread"].splitlines())
def test_a_run_overrides_what_its_estimator_reads_and_nothing_else(content: dict[str, Any], line: str) -> None:
    """It would be its base under another name."""
    overrides, _, unread = line.partition(" | ")
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


@pytest.mark.parametrize(("estimator", "loss_mask", "off", "discounts", "named"), CASES["masks"])
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


@cases("off, said")
def test_settings_that_do_more_than_they_say_are_noted(content: dict[str, Any], off: str, said: list[str]) -> None:
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


@cases("label, fields")
def test_a_training_is_read_back_from_its_label(label: str, fields: dict[str, Any]) -> None:
    run = RunId(**fields)
    assert run.label == label
    assert RunId.parse(label) == run
    with pytest.raises(ValueError, match="is no label of a training; labels look like ppo or ppo-seed3"):
        RunId.parse(f"{label}-")


def test_variant_is_a_run_of_its_own(params: Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("line", CASES["varied"].splitlines())
def test_overrides_for_one_training_are_values_of_train_that_change_something(params: Params, line: str) -> None:
    given, _, message = line.partition(" | ")
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


@cases("text, message")
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


@cases("decay, warmup, rates")
def test_rates_rise_and_decay_by_hand(params: Params, decay: str, warmup: int, rates: list[float]) -> None:
    update = params.train.update.model_copy(update={"learning_rate_decay": decay, "learning_rate_warmup": warmup})
    train = params.train.model_copy(update={"iterations": 4, "update": update})
    assert [train.rate(iteration, 0, begun=0) for iteration in range(4)] == pytest.approx(rates)
    assert [train.rate(iteration, 3, begun=3) for iteration in range(3, 7)] == pytest.approx(rates)
    longer = train.model_copy(update={"iterations": 6})
    extended = [longer.rate(iteration, 0, begun=0, decays_over=4) for iteration in range(6)]
    assert extended == pytest.approx([*rates, rates[-1], rates[-1]]), "its schedule to the end, and then its last rate"


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


@pytest.mark.parametrize(("datasets", "files", "conversations", "read"), CASES["raw"])
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
