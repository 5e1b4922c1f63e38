"""Which policy is evaluated, how, and what the results are called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent_r1.learn import checkpoint
from agent_r1.learn.checkpoint import Progress
from agent_r1.params import Params, load
from flows import evaluate as evaluate_module
from flows.commands.execute import evaluate
from flows.evaluate import Subject
from tests.fixtures import WriteParams

POLICIES = ("outputs/warm_start", "outputs/train/ppo/checkpoint/policy", "outputs/train/ppo-seed3/checkpoint/policy")


class Asked(Exception):
    """The subject, and the folder of its results."""


@pytest.fixture
def choose(tmp_path: Path, write_params: WriteParams, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Who is evaluated, and into which folder, in a project with a warm start, two trainings of `ppo` and a model."""
    write_params(tmp_path, {})
    for policy in (*POLICIES, "others/mine"):
        (tmp_path / policy).mkdir(parents=True)
        for file in ("config.json", "tokenizer_config.json"):
            (tmp_path / policy / file).write_text("{}")
    for policy in POLICIES[1:]:
        checkpoint.seal((tmp_path / policy).parent, Progress(iterations=3, policy_version=2))

    def ask(_: Params, subject: Subject, folder: Path, *__: Any, **___: Any) -> None:
        raise Asked(subject, folder)

    monkeypatch.setattr(evaluate_module, "_ask", ask)
    monkeypatch.chdir(tmp_path)

    def make(**choice: Any) -> Any:
        try:
            evaluate(**choice)
        except Asked as asked:
            return asked.args
        raise AssertionError("nobody was asked")

    return make


@pytest.mark.parametrize(
    ("choice", "label", "policy", "protocol"),
    [
        ({"run": "ppo"}, "ppo", POLICIES[1], "tool_call"),
        ({"model": "ppo-seed3"}, "ppo-seed3", POLICIES[2], "tool_call"),
        ({"run": "ppo", "seed": 3, "protocol": "naive_rag"}, "ppo-seed3-naive_rag", POLICIES[2], "naive_rag"),
        ({"run": "ppo", "dataset": "atlas"}, "ppo-atlas", POLICIES[1], "tool_call"),
        ({"run": "ppo", "dataset": "atlas", "as_label": "mine"}, "mine", POLICIES[1], "tool_call"),
        ({"baseline": "gold_passages"}, "gold_passages", POLICIES[0], "gold_passages"),
        ({"baseline": "closed_book", "dataset": "atlas"}, "closed_book-atlas", POLICIES[0], "closed_book"),
        ({"model": "ppo-lab/tiny"}, "ppo-lab--tiny", "ppo-lab/tiny", "tool_call"),
        (
            {"model": "others/mine/", "protocol": "closed_book"},
            "others--mine-closed_book",
            "others/mine",
            "closed_book",
        ),
        ({"model": "./others/mine", "as_label": "v2.1"}, "v2.1", "others/mine", "tool_call"),
    ],
)
def test_a_label_says_what_is_evaluated(
    choose: Any, choice: dict[str, Any], label: str, policy: str, protocol: str
) -> None:
    subject, folder = choose(**choice)
    assert (subject.label, subject.policy.path, subject.protocol) == (label, policy, protocol)
    assert folder == Path("outputs/evaluate") / label


def test_only_a_run_as_it_was_trained_adds_to_its_training(choose: Any) -> None:
    plain, _ = choose(run="ppo")
    assert (plain.training, plain.name) == (Path("outputs/train/ppo"), "ppo")
    for changed in ({"protocol": "naive_rag"}, {"dataset": "atlas"}, {"as_label": "mine"}):
        subject, folder = choose(run="ppo", **changed)
        assert (subject.training, subject.name) == (None, folder.name)
        assert subject.shown(subject.policy.as_trained(load()))["variant"] == subject.name


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({}, "say what to evaluate: one of --run, --baseline and --model"),
        ({"run": "ppoo"}, "no run 'ppoo' under runs:; did you mean 'ppo'"),
        ({"run": "ppo", "protocol": "naive"}, "no protocol 'naive'; did you mean 'naive_rag'"),
        ({"run": "ppo", "dataset": "musique"}, "no data set is prepared called 'musique'; valid names: atlas"),
        (
            {"baseline": "naive_rag", "protocol": "tool_call"},
            "the warm-started model under a protocol of its own; leave out --protocol, or",
        ),
        ({"baseline": "naive_rag", "seed": 1}, "--seed and --sweep tell apart runs; give --run, or leave them out"),
        ({"model": "org/tiny", "sweep": "ablations"}, "--seed and --sweep tell apart runs"),
        ({"model": "org/tiny", "as_label": "ppo"}, "'ppo' is the label of ppo's own evaluation; choose another"),
        (
            {"run": "ppo", "protocol": "naive_rag", "as_label": "naive_rag"},
            "'naive_rag' is the label of naive_rag's own",
        ),
        ({"model": "org/tiny", "as_label": "../up"}, "'../up' is to be a folder; give --as a name of letters"),
        ({"model": "org/my model"}, "'org--my model' is to be a folder; give --as"),
    ],
)
def test_what_cannot_be_meant_is_refused(choose: Any, choice: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        choose(**choice)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"run": "ppo", "seed": 4}, "no checkpoint at outputs/train/ppo-seed4/checkpoint; train it first"),
        ({"model": "."}, ". has no config.json; save a model and its tokenizer into one folder"),
        ({"model": "./nowhere"}, "there is no folder ./nowhere; --model takes one, or a hub id such as owner/name"),
    ],
)
def test_a_policy_that_is_not_there_is_named(choose: Any, choice: dict[str, Any], message: str) -> None:
    with pytest.raises(FileNotFoundError, match=message.replace(".", r"\.")):
        choose(**choice)


@pytest.mark.parametrize("choice", [{"run": "ppo"}, {"model": POLICIES[1]}])
def test_a_policy_that_is_not_as_it_was_written_is_refused(choose: Any, choice: dict[str, Any]) -> None:
    (Path(POLICIES[1]) / "config.json").write_text('{"vocab_size": 9}')
    with pytest.raises(ValueError, match=f"{POLICIES[1]}/config.json is missing or not as it was written"):
        choose(**choice)
