"""Which policy is evaluated, how, and what the results are called."""

from pathlib import Path
from typing import Any

import pytest

from agent_r1.learn import checkpoint
from agent_r1.learn.checkpoint import Progress
from agent_r1.params import Params, load
from flows import evaluate as evaluate_module
from flows.commands.execute import evaluate
from flows.evaluate import Subject
from tests.cases import cases
from tests.fixtures import WriteParams

POLICIES = ("outputs/warm_start", "outputs/train/ppo/checkpoint/policy", "outputs/train/ppo-seed3/checkpoint/policy")


class Asked(Exception):
    """The subject, and the folder of its results."""


def model_at(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for file in ("config.json", "tokenizer_config.json"):
        (path / file).write_text("{}")


def trained_at(policy: Path) -> None:
    model_at(policy)
    checkpoint.seal(policy.parent, Progress(iterations=3, policy_version=2))


@pytest.fixture
def choose(tmp_path: Path, write_params: WriteParams, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Who is evaluated, and into which folder, in a project with a warm start, two trainings of `ppo` and a model."""
    write_params(tmp_path, {})
    for policy in (POLICIES[0], "others/mine"):
        model_at(tmp_path / policy)
    for policy in POLICIES[1:]:
        trained_at(tmp_path / policy)

    def ask(_: Params, subject: Subject) -> None:
        raise Asked(subject, subject.folder)

    monkeypatch.setattr(evaluate_module, "_examine", ask)
    monkeypatch.chdir(tmp_path)

    def make(**choice: Any) -> Any:
        try:
            evaluate(**choice)
        except Asked as asked:
            return asked.args
        raise AssertionError("nobody was asked")

    return make


@cases("choice, label, policy, protocol")
def test_label_names_what_differs(choose: Any, choice: dict[str, Any], label: str, policy: str, protocol: str) -> None:
    subject, folder = choose(**choice)
    assert (subject.label, subject.policy.path, subject.protocol) == (label, policy, protocol)
    assert folder == Path("outputs/evaluate") / label


def test_only_a_run_as_it_was_trained_adds_to_its_training(choose: Any) -> None:
    plain, _ = choose(policy="ppo")
    assert (plain.training, plain.name) == (Path("outputs/train/ppo"), "ppo")
    for changed in ({"protocol": "naive_rag"}, {"dataset": "atlas"}, {"as_label": "mine"}):
        subject, folder = choose(policy="ppo", **changed)
        assert (subject.training, subject.name) == (None, folder.name)
        assert subject.parameters(subject.policy.as_trained(load()))["variant"] == subject.name


@cases("choice, message")
def test_unfit_options_are_refused(choose: Any, choice: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        choose(**choice)


@cases("choice, message")
def test_missing_policy_is_named(choose: Any, choice: dict[str, Any], message: str) -> None:
    with pytest.raises(FileNotFoundError, match=message.replace(".", r"\.")):
        choose(**choice)


@pytest.mark.parametrize("choice", [{"policy": "ppo"}, {"policy": POLICIES[1]}])
def test_damaged_policy_is_refused(choose: Any, choice: dict[str, Any]) -> None:
    (Path(POLICIES[1]) / "config.json").write_text('{"vocab_size": 9}')
    with pytest.raises(ValueError, match=f"{POLICIES[1]}/config.json is missing or not as it was written"):
        choose(**choice)


def test_word_that_means_two_policies_names_both(choose: Any) -> None:
    """A folder of code takes no label away."""
    Path("ppo").mkdir()
    assert choose(policy="ppo")[0].policy.path == POLICIES[1]
    model_at(Path("ppo"))
    with pytest.raises(ValueError, match=r"^ppo means 2 policies; name one of them: repro/ppo, \./ppo$"):
        choose(policy="ppo")
    assert choose(policy="repro/ppo")[0].policy.path == POLICIES[1]
    assert choose(policy="./ppo", as_label="mine")[0].policy.path == "ppo"


def test_members_of_a_sweep_have_their_places_there(choose: Any) -> None:
    """A label that two trainings have names both; one that the sweep alone has means the sweep's."""
    for label, word in (("ppo-seed3", "ablations/ppo-seed3"), ("ppo-seed4", "ppo-seed4")):
        policy = Path("outputs/ablations/train") / label / "checkpoint/policy"
        trained_at(policy)
        subject, folder = choose(policy=word)
        assert (subject.policy.path, folder) == (str(policy), Path("outputs/ablations/evaluate") / label)
    with pytest.raises(ValueError, match=r"ppo-seed3 means 2 policies; .*: repro/ppo-seed3, ablations/ppo-seed3"):
        choose(policy="ppo-seed3")
    subject, folder = choose(policy="ablations/naive_rag")
    assert {subject.label, subject.protocol, folder.name} == {"naive_rag"}
    assert folder.parent == Path("outputs/ablations/evaluate")
