"""A run that an earlier version of the project began is the same run today, unless it computes something else.

`earlier` holds what such a version wrote: a parameter file with one of everything that can be declared, and the
identity that its run `ppo` had. A key of today that is missing there has a line in NEUTRAL, and one that has gone since
has a line in CONSTANTS. Otherwise these tests fail, as an unfinished run would be refused.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent_r1.params import Params, RunId, load
from agent_r1.params.sections import NEUTRAL, of_today, validated
from agent_r1.params.stages import WarmStartParams
from agent_r1.training.folder import RunFolder
from agent_r1.training.identity import START, Identity, read_start

EARLIER = Path(__file__).with_name("earlier")
RUN = RunId("ppo")


@pytest.fixture
def stored() -> Identity:
    """The identity as it was written."""
    found = read_start(EARLIER)
    assert found
    return found


@pytest.fixture
def settings() -> Params:
    return load(EARLIER / "params.yaml").of(RUN)


@pytest.fixture
def identity(settings: Params, stored: Identity) -> Identity:
    """The identity of the same run today."""
    return Identity.of(settings, settings.run(RUN), stored.inputs, {"agent_r1/learn/losses.py": "2"})


def changed(identity: Identity, **parameters: Any) -> Identity:
    """With other parameters, whose names have __ between the keys; ... leaves one out."""
    named = identity.parameters | {name.replace("__", "."): value for name, value in parameters.items()}
    return replace(identity, parameters={name: value for name, value in named.items() if value is not ...})


def test_an_earlier_versions_run_is_the_same_run_today(identity: Identity, stored: Identity) -> None:
    assert identity.differences_from(stored) == []
    assert identity.parameters.keys() == of_today(stored.parameters, identity.parameters).keys()
    assert identity.parameters != stored.parameters


@pytest.mark.parametrize("replaces", [False, True])
def test_it_is_gone_on_with_and_not_moved_aside(
    tmp_path: Path, settings: Params, identity: Identity, replaces: bool, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "ppo").mkdir()
    shutil.copy(EARLIER / START, tmp_path / "ppo")
    with RunFolder(tmp_path / "ppo", identity, settings.train).opened(tmp_path / "aside", replace=replaces):
        assert not (tmp_path / "aside").exists()
    assert "going on, though the code has changed: agent_r1/learn/losses.py, agent_r1/policy/losses.py" in caplog.text


@pytest.mark.parametrize(
    ("then", "today", "difference"),
    [
        ({"train__rollout__temperature": 0.7}, {}, "train.rollout.temperature 0.7 -> none"),
        ({"train__rollout__top_p": 0.95}, {}, "train.rollout.top_p 0.95 -> none"),
        ({"train__gone": 1}, {}, "train.gone 1 -> none"),
        ({}, {"model__packing": True}, "model.packing False -> True"),
        ({"model__packing": True}, {}, "model.packing True -> False"),
        ({}, {"env__gymnasium__lake__success": "truncated"}, "env.gymnasium.lake.success none -> truncated"),
        ({}, {"train__new": 0}, "train.new none -> 0"),
        ({"train__credit__lam": 0.95}, {}, "train.credit.lam 0.95 -> 0.99"),
    ],
)
def test_any_other_value_is_another_run(
    identity: Identity, stored: Identity, then: dict[str, Any], today: dict[str, Any], difference: str
) -> None:
    assert changed(identity, **today).differences_from(changed(stored, **then)) == [difference]


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("vllm", "replicas tensor_parallel_size threads max_num_seqs cpu_cache_gib gpu_memory_utilization"),
        ("transformers", "batch_size"),
        ("server", ""),
    ],
)
def test_every_kind_of_engine_has_the_keys_that_it_had(settings: Params, kind: str, keys: str) -> None:
    engine = settings.engine.model_copy(update={"kind": kind})
    assert engine.identity.keys() - {name.removeprefix("engine.") for name in NEUTRAL} == {"kind", *keys.split()}


def test_a_warm_start_has_the_keys_that_it_had() -> None:
    """Its identity is made of `warm_start` and `model`; the latter is a training's too."""
    had = """seed fine_tune vocab_size hidden_size layers heads demonstrations naive_rag_demonstrations conversations
        stop_early wrong_relation batch_size max_tokens_per_microbatch steps learning_rate observation_weight"""
    later = {name.removeprefix("warm_start.") for name in NEUTRAL}
    assert WarmStartParams.model_fields.keys() - later == set(had.split())


def test_an_earlier_versions_parameters_are_taken_as_it_took_them(caplog: pytest.LogCaptureFixture) -> None:
    text = (EARLIER / "params.yaml").read_text()
    found = load(EARLIER / "params.yaml")
    assert (found.model.packing, found.warm_start.checkpoint_every) == (False, 0)
    content = yaml.safe_load(text)
    del content["train"]["rollout"]["top_p"], content["train"]["rollout"]["temperature"]
    content["model"]["packing"] = False
    content["warm_start"] |= {"checkpoint_every": 0, "by_relation": 0.0, "contexts": []}
    content["train"]["credit"]["gigpo"] |= {"history": 0, "state": "context"}
    content["train"]["reference"] = ""
    content["train"]["monitor"]["thoughts_every"] = 0
    content["train"]["monitor"]["thresholds"] |= {"long_step": 0, "surprisal_jump": 0}
    assert validated(Params, content, "by hand") == found


def test_each_change_of_earlier_parameters_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "params.yaml"
    path.write_text((EARLIER / "params.yaml").read_text() + "# read anew\n")
    load(path)
    load(path)
    assert caplog.messages == [
        "the parameters are an earlier version's; bring them up to date: "
        "train.rollout.temperature is no knob, and 1.0 in every run; train.rollout.top_p is no knob, and 1.0 in every "
        "run; env.agent is missing, and taken as null; model.packing is missing, and taken as false; "
        "train.credit.gigpo.history is missing, and taken as 0; "
        'train.credit.gigpo.state is missing, and taken as "context"; '
        "train.monitor.thresholds.long_step is missing, and taken as 0.0; "
        "train.monitor.thresholds.surprisal_jump is missing, and taken as 0.0; "
        "train.monitor.thoughts_every is missing, and taken as 0; "
        'train.reference is missing, and taken as ""; '
        "train.validation.samples is missing, and taken as 1; warm_start.checkpoint_every is missing, and taken as 0; "
        "warm_start.by_relation is missing, and taken as 0.0; warm_start.contexts is missing, and taken as []"
    ]


def test_another_value_of_what_is_no_knob_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_text((EARLIER / "params.yaml").read_text().replace("top_p: 1.0", "top_p: 0.9"))
    with pytest.raises(ValueError, match=r"'train\.rollout\.top_p' is no knob: it is 1\.0 in every run; leave it out"):
        load(path)
