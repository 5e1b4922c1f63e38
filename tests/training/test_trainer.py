"""A training from Python objects: refused before it begins, and stopped and gone on with."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agent_r1.credit.own import Episode
from agent_r1.files import model_hash
from agent_r1.rollout.sampling import Beneath
from agent_r1.training import trainer as module
from agent_r1.training.trainer import Trainer

QUESTIONS = [{"question": f"Which number follows {number}?", "answers": [str(number + 1)]} for number in range(4)]
SMALL = {
    "model": {"threads": 1},
    "engine": {"kind": "transformers"},
    "env": {"max_steps": 1, "max_tokens": 256, "max_action_tokens": 4},
    "train": {"iterations": 2, "rollout": {"questions": 2, "samples": 2}},
}
HELD = {"train": {"reference": "models:/agent_r1/1", "update": {"kl_loss": 0.1}}}


def follows(number: int) -> str:
    """Tells the number after another one."""
    return str(number + 1)


def short(episode: Episode) -> float:
    return 1.0 - len(episode.answer) / 100


def made(folder: Path, model: Path, **changes: Any) -> Trainer:
    given = {"questions": QUESTIONS, "tools": [follows], "rewards": [short], "changes": SMALL} | changes
    return Trainer(model=str(model), folder=folder, **given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tools": [lambda number: number]}, r"lambda.* cannot be found by a name; define it with def"),
        ({"rewards": [partial(short)]}, r"functools.partial.* cannot be found by a name; define it with def"),
        ({"tools": []}, "Trainer: env: tools: a question cannot be answered without any tool"),
        ({"questions": [{"question": "Who?"}]}, "questions.jsonl, row 1: field 'answer' must be a text"),
        ({"questions": ["Who?"]}, "questions.jsonl, row 1: field 'answer' must be a text"),
        ({"questions": [{**QUESTIONS[0], "id": "one"}] * 2}, "row 2: the id 'one' is that of an earlier question"),
        ({"questions": []}, "questions.jsonl holds no rows"),
        ({"passages": [{"title": "Veld"}]}, "passages.jsonl, row 1: field 'text' must be a text"),
        ({"run": "grop"}, "there is no run 'grop' under runs:; did you mean 'grpo'?"),
        ({"changes": {"train": {"iteration": 1}}}, "Trainer: runs.grpo: unknown key 'iteration'; did you mean"),
        ({"changes": HELD}, "train.reference models:/agent_r1/1 is a registered version, which only a stage asks"),
    ],
)
def test_bad_input_is_refused_before_anything_is_loaded(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        made(tmp_path / "run", tmp_path / "nowhere", **changes)
    assert not (tmp_path / "run").exists()


def test_a_stopped_cell_goes_on_with_the_same_bits(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    passages = [{"title": "Veld", "text": "Tesk is a city in Veld."}]
    whole = made(tmp_path / "whole", tiny_model, passages=passages)
    before = whole.ask(QUESTIONS[0]["question"])
    history = whole.train()
    assert before[-1].outcome is not None
    assert str(before[0]).endswith(" (no call, no answer)")
    assert "iteration 0: 4 of 4 actions are neither a call nor an answer, the first " in caplog.text
    stopped, first = made(tmp_path / "stopped", tiny_model, passages=passages), [True]

    def stop_once(training: Any) -> None:
        as_task = (lambda verb: lambda *given: stop() if given[0] and first.pop() else verb(*given)) if first else None
        module_iterate(training, as_task=as_task) if as_task else module_iterate(training)

    def stop() -> None:
        raise KeyboardInterrupt

    module_iterate = module.iterate
    monkeypatch.setattr(module, "iterate", stop_once)
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    again = stopped.train()
    assert [*again["reward/short"]] == [*history["reward/short"]]
    assert model_hash(stopped.policy) == model_hash(whole.policy) != model_hash(str(tiny_model))
    with pytest.raises(ValueError, match=r"another run's: .*; .*start over with --fresh \(in Python fresh=True\)"):
        made(tmp_path / "whole", tiny_model).train()
    assert len(made(tmp_path / "whole", tiny_model).train(fresh=True)) == 2
    assert [each.name[:5] for each in (tmp_path / "aside").iterdir()] == ["whole"]


def test_adapters_answer_beside_the_model_that_they_were_trained_on(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Merged weights would be rounded on a GPU. Without handlers of the program's own, lines tell of the training."""
    monkeypatch.setattr(module.LOGGER, "propagate", False)  # pytest has handlers
    monkeypatch.setattr(module.LOGGER, "handlers", [])
    level = module.LOGGER.level
    opened, open_agent = list[Any](), module.open_agent

    def noted(*given: Any, beneath: Beneath | None, **others: Any) -> Any:
        opened.append(beneath)
        return open_agent(*given, beneath=beneath, **others)

    monkeypatch.setattr(module, "open_agent", noted)
    adapters = {"model": {"threads": 1, "lora": {"rank": 2}}}
    trainer = made(tmp_path / "run", tiny_model, changes=SMALL | adapters)
    assert len(trainer.train()) == 2
    assert "iteration 1: exact match 0.000, " in capsys.readouterr().err
    assert (module.LOGGER.handlers, module.LOGGER.level) == ([], level)
    assert trainer.ask("Which number follows 3?")[-1].outcome is not None
    assert opened == [Beneath(str(tiny_model), 2)]
