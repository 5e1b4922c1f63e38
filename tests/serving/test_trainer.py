"""A training from Python objects: refused before it begins, and stopped and gone on with."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agent_r1.credit.own import Episode
from agent_r1.files import model_hash
from agent_r1.params import Params
from agent_r1.records import Question, Trajectory
from agent_r1.rollout.sampling import Beneath, PolicyWeights
from agent_r1.serving import trainer as module
from agent_r1.serving.trainer import Trainer
from agent_r1.tables import read_rows
from agent_r1.training.questions import draw
from tests.cases import cases
from tests.trajectories import question_fields

QUESTIONS = [{"question": f"Which number follows {number}?", "answers": [str(number + 1)]} for number in range(4)]
SMALL: dict[str, Any] = {
    "model": {"threads": 1},
    "engine": {"kind": "transformers"},
    "env": {"max_steps": 1, "max_tokens": 256, "max_action_tokens": 4},
    "train": {"iterations": 2, "rollout": {"questions": 2, "samples": 2}},
}
ROOMY = {**SMALL, "env": {**SMALL["env"], "max_tokens": 512}}


def follows(number: int) -> str:
    """Tells the number after another one."""
    return str(number + 1)


def short(episode: Episode) -> float:
    return 1.0 - len(episode.answer) / 100


def made(folder: Path, model: Path, **changes: Any) -> Trainer:
    arguments = {"questions": QUESTIONS, "tools": [follows], "rewards": [short], "changes": SMALL} | changes
    return Trainer(model=str(model), folder=folder, **arguments)


@cases("changes, message")
def test_bad_input_is_refused_before_anything_is_loaded(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    nameless = {"lambda": [lambda number: number], "partial": [partial(short)]}
    given = {name: nameless.get(str(value), value) for name, value in changes.items()}
    with pytest.raises(ValueError, match=message):
        made(tmp_path / "run", tmp_path / "nowhere", **given)
    assert not (tmp_path / "run").exists()


def stop_in_its_second_iteration(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    def halting(verb: Any) -> Any:
        def call(iteration: int, *others: Any) -> Any:
            if iteration:
                raise KeyboardInterrupt
            return verb(iteration, *others)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(module, "iterate", partial(module.iterate, as_task=halting))
        with pytest.raises(KeyboardInterrupt):
            trainer.train()


def test_a_stopped_cell_goes_on_with_the_same_bits(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    passages = [{"title": "Veld", "text": "Tesk is a city in Veld."}]
    uninterrupted = made(tmp_path / "whole", tiny_model, passages=passages)
    answer_before = uninterrupted.ask(QUESTIONS[0]["question"])
    history = uninterrupted.train()
    assert answer_before[-1].outcome is not None
    assert str(answer_before[0]).endswith(" (no call, no answer)")
    assert "iteration 0: 4 of 4 actions are neither a call nor an answer, the first " in caplog.text
    stopped = made(tmp_path / "stopped", tiny_model, passages=passages)
    stop_in_its_second_iteration(stopped, monkeypatch)
    again = stopped.train()
    assert [*again["reward/short"]] == [*history["reward/short"]]
    assert model_hash(stopped.policy) == model_hash(uninterrupted.policy) != model_hash(str(tiny_model))
    with pytest.raises(ValueError, match=r"another run's: .*; .*start over with --fresh \(in Python fresh=True\)"):
        made(tmp_path / "whole", tiny_model).train()
    assert len(made(tmp_path / "whole", tiny_model).train(fresh=True)) == 2
    assert [folder.name[:5] for folder in (tmp_path / "aside").iterdir()] == ["whole"]


def asked_in(folder: Path, iteration: int) -> list[str]:
    rows = read_rows(folder / "trajectories" / f"{iteration:03d}.parquet", Trajectory)
    return list(dict.fromkeys(row.question_id for row in rows))


def test_a_question_without_room_is_left_out_and_asked_once_the_limit_is_raised(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One of 240 would be asked in iteration 1; an uninterrupted training, and one that is stopped before that."""
    pool = [Question(**question_fields(f"q{at}", dataset="own")) for at in range(240)]
    first, second = ([question.question_id for question in draw(pool, 2, iteration=at, seed=0)] for at in range(2))
    rows = [
        {"id": question.question_id, "question": f"Who is {question.question_id}?", "answers": ["x"]}
        for question in pool
    ]
    rows[int(second[0][1:])]["question"] = "Who? " * 60
    unlimited = made(tmp_path / "whole", tiny_model, questions=rows)
    assert len(unlimited.train()) == 2
    assert f"env.max_tokens 256, such as '{second[0]}'" in caplog.text
    assert asked_in(tmp_path / "whole", 0) == first
    assert asked_in(tmp_path / "whole", 1)[0] == second[1]
    assert second[0] not in asked_in(tmp_path / "whole", 1)
    stop_in_its_second_iteration(made(tmp_path / "raised", tiny_model, questions=rows), monkeypatch)
    assert len(made(tmp_path / "raised", tiny_model, questions=rows, changes=ROOMY).train()) == 2
    assert "settings change after 1 finished iterations: env.max_tokens 256 -> 512" in caplog.text
    assert [asked_in(tmp_path / "raised", at) for at in range(2)] == [first, second]


def test_too_many_questions_without_room_are_refused_before_anything_is_begun(tiny_model: Path, tmp_path: Path) -> None:
    """One of 4, which is more than .01; a run that is finished is none the worse."""
    rows = [*QUESTIONS[:3], {"question": "Who? " * 60, "answers": ["x"]}]
    with pytest.raises(ValueError, match=r"1 of 4 .*raise env\.max_tokens, or raise env\.too_long_share 0\.01"):
        made(tmp_path / "run", tiny_model, questions=rows).train()
    assert not (tmp_path / "run").exists()
    for _ in range(2):
        assert len(made(tmp_path / "run", tiny_model, questions=rows, changes=ROOMY).train()) == 2
    with pytest.raises(ValueError, match="1 of 4"):
        made(tmp_path / "run", tiny_model, questions=rows).train(fresh=True)
    assert not (tmp_path / "aside").exists()


def test_adapters_answer_beside_the_model_that_they_were_trained_on(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Merged weights would be rounded on a GPU. Without handlers of the program's own, lines tell of the training."""
    monkeypatch.setattr(module.LOGGER, "propagate", False)  # pytest has handlers
    monkeypatch.setattr(module.LOGGER, "handlers", [])
    level = module.LOGGER.level
    opened, open_agent = list[Any](), module.open_agent

    def noted(settings: Params, weights: PolicyWeights, temperature: float) -> Any:
        opened.append(weights.beneath)
        return open_agent(settings, weights, temperature)

    monkeypatch.setattr(module, "open_agent", noted)
    adapters = {"model": {"threads": 1, "lora": {"rank": 2}}}
    trainer = made(tmp_path / "run", tiny_model, changes=SMALL | adapters)
    assert len(trainer.train()) == 2
    assert "iteration 1: exact match 0.000, " in capsys.readouterr().err
    assert (module.LOGGER.handlers, module.LOGGER.level) == ([], level)
    assert trainer.ask("Which number follows 3?")[-1].outcome is not None
    assert opened == [Beneath(str(tiny_model), 2)]
