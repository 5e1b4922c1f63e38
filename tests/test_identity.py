"""A run that an earlier version of the project began is the same run today, unless it computes something else.

`earlier` holds what such a version wrote: a parameter file with one of everything that can be declared, and the
identity that its run `ppo` had. A key of today that is missing there has a line in NEUTRAL, and one that has gone since
has a line in CONSTANTS. Otherwise these tests fail, as an unfinished run would be refused.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest

from agent_r1.identity import Identity, read_start
from agent_r1.learn.memory import REMEDIES as REMEDY
from agent_r1.params import Params, RunId, load
from agent_r1.params.env import EnvParams
from agent_r1.params.same_run import UNDEFINING, defines
from agent_r1.params.sections import NEUTRAL, Section, of_today
from agent_r1.params.stages import LearnerParams, ModelParams, TransformersParams, VllmParams, WarmStartParams
from agent_r1.params.train import TrainParams
from tests.cases import cases

EARLIER = Path(__file__).with_name("earlier")
RUN = RunId("ppo")


@pytest.fixture
def stored() -> Identity:
    return read_start(EARLIER)


@pytest.fixture
def settings() -> Params:
    return load(EARLIER / "params.yaml").of(RUN)


@pytest.fixture
def identity(settings: Params, stored: Identity) -> Identity:
    return Identity.of(settings, settings.run(RUN), stored.inputs, {"agent_r1/learn/losses.py": "2"})


def changed(identity: Identity, **parameters: Any) -> Identity:
    """With other parameters, whose names have __ between the keys; ... leaves one out."""
    named = identity.parameters | {name.replace("__", "."): value for name, value in parameters.items()}
    return replace(identity, parameters={name: value for name, value in named.items() if value is not ...})


def test_an_earlier_versions_run_is_the_same_run_today(identity: Identity, stored: Identity) -> None:
    assert identity.differences_from(stored) == []
    defining = {name for name in identity.parameters if defines(name, {}, {})}
    assert defining <= of_today(stored.parameters, identity.parameters).keys()
    assert identity.parameters != stored.parameters


@cases("then, today, difference")
def test_any_other_value_is_another_run(
    identity: Identity, stored: Identity, then: dict[str, Any], today: dict[str, Any], difference: str
) -> None:
    assert changed(identity, **today).differences_from(changed(stored, **then)) == [difference]


@cases("remedy")
def test_a_remedy_for_memory_leaves_the_run_the_same(identity: Identity, remedy: dict[str, Any]) -> None:
    own = replace(identity, parameters={**identity.parameters, **remedy})
    assert own.differences_from(identity) == []
    assert [change.split()[0] for change in own.changes_since(identity)] == [*remedy][:1]


def test_what_a_message_says_that_a_training_goes_on_with_does_not_define_it() -> None:
    named = re.findall(
        r"(?:model|train|engine\.vllm|learner)\.[a-z_.]*[a-z]", REMEDY.partition(", and a training goes")[0]
    )
    assert len(named) == 8
    assert not [name for name in named if defines(name.replace(".vllm.", "."), {}, {})]


def leaves(section: type[Section], prefix: str) -> Iterator[str]:
    """The names of the settings in a section and in those inside, with * for the names of a mapping."""
    for name, field in section.model_fields.items():
        within = list(parts(field.annotation))
        inside = [each for each in within if isinstance(each, type) and issubclass(each, Section) and each.model_fields]
        key = f"{prefix}.{field.alias or name}"
        if inside and list not in within:
            yield from leaves(inside[0], f"{key}.*" if dict in within else key)
        else:
            yield key


def parts(annotation: Any) -> Iterator[Any]:
    yield get_origin(annotation) or annotation
    for each in get_args(annotation):
        yield from parts(each)


def test_settings_that_define_no_experiment_exist_and_stand_in_one_list() -> None:
    sections = {"train": TrainParams, "env": EnvParams, "model": ModelParams, "learner": LearnerParams}
    sections |= {"warm_start": WarmStartParams}
    known = [name for prefix, section in sections.items() for name in leaves(section, prefix)]
    known = [name for name in known if not name.startswith(("train.credit.rewards.", "model.template"))]
    known += ["train.credit.rewards.*", "model.template.*"]
    known += ["engine.kind", *leaves(VllmParams, "engine"), *leaves(TransformersParams, "engine")]
    for pattern in UNDEFINING:
        assert [name for name in known if fnmatchcase(name, pattern)], pattern
    assert len({*UNDEFINING}) == len(UNDEFINING)


def test_a_warm_start_has_the_keys_that_it_had() -> None:
    """Its identity is made of `warm_start` and `model`; the latter is a training's too."""
    had = """seed fine_tune vocab_size hidden_size layers heads demonstrations naive_rag_demonstrations conversations
        stop_early wrong_relation by_relation batch_size max_tokens_per_microbatch steps learning_rate
        observation_weight checkpoint_every contexts"""
    later = {name.removeprefix("warm_start.") for name in NEUTRAL}
    assert WarmStartParams.model_fields.keys() - later == set(had.split())


def test_each_change_of_earlier_parameters_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "params.yaml"
    path.write_text((EARLIER / "params.yaml").read_text() + "# read anew\n")
    found, _ = load(path), load(path)
    assert (found.env.answers, found.warm_start.quotes) == ("tagged", False)
    [line] = caplog.messages
    start, *changes = line.replace("date: ", "date; ").split("; ")
    assert start == "the parameters are an earlier version's"
    gone = [change.split()[0] for change in changes if " is no knob, and " in change]
    missing = [change.split()[0] for change in changes if " is missing, and taken as " in change]
    assert len(gone) + len(missing) == len(changes) - 1, "and to bring them up to date"
    assert {"train.monitor.thoughts_every", "train.monitor.stabilise.rollback"} <= {*gone}
    assert {"env.answers", "env.examples", "warm_start.quotes"} <= {*missing}


def test_another_value_of_what_is_no_knob_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_text((EARLIER / "params.yaml").read_text().replace("thoughts_every: 0", "thoughts_every: 5"))
    with pytest.raises(ValueError, match=r"train\.monitor\.thoughts_every' is no knob: .* in every run; leave it out"):
        load(path)
