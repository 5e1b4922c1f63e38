"""Supervised learning on demonstrations: what it minimises, what it leaves alone, and that it repeats."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from agent_r1.identity import Identity
from agent_r1.learn.model import load_policy
from agent_r1.params import load
from agent_r1.params.stages import WarmStartParams
from agent_r1.records import Passage, Question, Source, Trajectory
from agent_r1.teaching.supervised import Lessons, Unfinished, fit
from agent_r1.teaching.warm_start import demonstrate_examples
from tests.cases import cases
from tests.fixtures import MakeIndex
from tests.learn.learning import CPU, make_trajectory, same_bits, weights
from tests.trajectories import question_fields

P, A, O, T, _ = map(int, Source)  # noqa: E741
SETTINGS = load(Path(__file__).parents[2] / "params.yaml")
BASE = SETTINGS.warm_start
Fitted = tuple[list[torch.Tensor], list[float]]


def params(**changes: float) -> WarmStartParams:
    small = {"seed": 0, "batch_size": 4, "steps": 5, "learning_rate": 1e-3, "observation_weight": 0.3}
    return BASE.model_copy(update=small | changes)


@pytest.fixture
def rows() -> list[Trajectory]:
    """Twelve of different lengths and random bytes: nothing to learn but by heart."""
    drafts = [make_trajectory(i, [P, P, T, A, A, A, O, O, T, *[A] * (2 + i % 3)]) for i in range(12)]
    return [replace(row, token_ids=row.token_ids % 256) for row in drafts]


@pytest.fixture
def model(tiny_model: Path) -> PreTrainedModel:
    return load_policy(tiny_model, device=CPU)


@pytest.fixture
def fitted(tiny_model: Path) -> Callable[..., Fitted]:
    """The weights of the tiny model after a training, and its losses."""

    def learn(
        demonstrations: Sequence[Trajectory],
        conversations: Sequence[Trajectory] = (),
        unfinished: Unfinished | None = None,
        **changes: float,
    ) -> Fitted:
        model, given = load_policy(tiny_model, device=CPU), params(**changes)
        lessons = Lessons.of(demonstrations, conversations, given.observation_weight)
        losses = fit(model, lessons, given, unfinished=unfinished)
        assert not model.training
        return weights(model), losses

    return learn


def test_the_first_loss_by_hand(model: PreTrainedModel, rows: list[Trajectory]) -> None:
    """Sum of weight times negative logprob over the sum of the weights: 1 at actions, 0.3 at observations, else 0."""
    weighted, total = 0.0, 0.0
    for each in rows:
        ids = torch.as_tensor(each.token_ids, dtype=torch.long)
        logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        for logprob, source in zip(logprobs.tolist(), each.source[1:].tolist(), strict=True):
            weight = {P: 0.0, A: 1.0, O: 0.3, T: 0.0}[source]
            weighted, total = weighted - weight * logprob, total + weight
    losses = fit(model, Lessons.of(rows, [], 0.3), params(steps=1, batch_size=12))
    assert losses == [pytest.approx(weighted / total, abs=1e-5)]


class Killed(BaseException):
    """What a process that is killed does not live to see."""


@pytest.fixture
def left(
    tmp_path: Path, fitted: Callable[..., Fitted], rows: list[Trajectory], monkeypatch: pytest.MonkeyPatch
) -> Unfinished:
    """A training of five steps that wrote down how far it was after two and four, and was killed after the fourth."""
    unfinished = Unfinished(tmp_path / "left", tmp_path / "aside", 2, Identity(parameters={"steps": 5}))
    keep = Unfinished.keep

    def keep_and_die(self: Unfinished, model: Any, optimizer: Any, steps: int, ranks: Any) -> None:
        keep(self, model, optimizer, steps, ranks)
        if steps == 4:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Unfinished, "keep", keep_and_die)
        with pytest.raises(Killed):
            fitted(rows, unfinished=unfinished)
    return unfinished


def test_killed_it_takes_the_steps_that_are_left_and_ends_with_the_same_bits(
    left: Unfinished, fitted: Callable[..., Fitted], rows: list[Trajectory], caplog: pytest.LogCaptureFixture
) -> None:
    """Under changed code too, which is said."""
    whole, losses = fitted(rows)
    edited = replace(left, every=0, identity=replace(left.identity, code={"agent_r1/x.py": "0"}))
    resumed, last = fitted(rows, unfinished=edited)
    assert (same_bits(whole, resumed), last) == (True, losses[4:])
    assert "left: going on, though the code has changed: agent_r1/x.py" in caplog.text


def test_what_another_training_left_is_moved_aside(
    left: Unfinished, fitted: Callable[..., Fitted], rows: list[Trajectory], caplog: pytest.LogCaptureFixture
) -> None:
    taken = replace(left, identity=Identity(parameters={"steps": 6}))
    _, losses = fitted(rows[:11], unfinished=taken)
    assert len(losses) == 5
    assert "is another run's: steps 5 -> 6, lessons " in caplog.text
    [aside] = left.aside.iterdir()
    assert (aside / "SHA256SUMS").exists()


def test_changed_checkpoint_is_refused(left: Unfinished, fitted: Callable[..., Fitted], rows: list[Trajectory]) -> None:
    [shard] = (left.folder / "learner").glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"not as it was written, by SHA256SUMS; remove \S+left to begin anew$"):
        fitted(rows, unfinished=left)


def test_micro_batches_add_up_to_the_batch(tiny_model: Path) -> None:
    """Rows of 4, 5 and 7 tokens: 20 of them, padding included, hold 7 and 5 together, and 4 alone.

    Loss and gradient are those of the whole batch, not of a mean of means.
    """
    lessons = Lessons.of([make_trajectory(i, [P, P, *[A] * (2 + i + i // 2)]) for i in range(3)], [], 0.3)
    sizes: list[tuple[int, ...]] = []
    models = [load_policy(tiny_model, device=CPU) for _ in range(2)]
    models[1].base_model.layers[0].register_forward_pre_hook(lambda _, inputs: sizes.append(tuple(inputs[0].shape[:2])))
    whole, parts = (
        fit(model, lessons, params(steps=1, batch_size=3, max_tokens_per_microbatch=budget))
        for model, budget in zip(models, (21, 20), strict=True)
    )
    assert sizes == [(2, 7), (1, 4)]
    assert parts == pytest.approx(whole, abs=1e-5)
    gradients = [
        torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None]) for model in models
    ]
    assert torch.allclose(*gradients, atol=1e-6)


@cases("source, observation_weight, conversation, trained")
def test_what_is_not_acted_is_not_trained_on(
    fitted: Callable[..., Fitted], source: str, observation_weight: float, conversation: bool, trained: bool
) -> None:
    """What comes after the last action cannot change a prediction of it: only a loss of its own could tell."""
    rows, others = ([make_trajectory(i, [P, A, A, A, *[Source[source]] * 4]) for i in range(4)] for _ in range(2))
    for row in others:
        row.token_ids[4:] += 1
    (one, losses), (other, other_losses) = (
        fitted(*(([], each) if conversation else (each, [])), observation_weight=observation_weight)
        for each in (rows, others)
    )
    assert (losses != other_losses) == trained
    assert same_bits(one, other) != trained


def test_an_example_begins_with_its_call_and_thinks_of_what_it_read(bm25_index: MakeIndex) -> None:
    texts_by_title = {"Low Tide": "Low Tide is a film by Mara Quill.", "Mara Quill": "Mara Quill was born in Tesk."}
    index = bm25_index([Passage(passage_id=title, title=title, text=text) for title, text in texts_by_title.items()])
    texts = ["Where was the director of Low Tide born?", "In which city was the director of the film Low Tide born?"]
    of_real_data = {"dataset": "own", "split": "train", "gold_titles": [*texts_by_title], "answers": ["Tesk"]}
    questions = [Question(**question_fields(text, text=text, **of_real_data)) for text in texts]
    for row, text in zip(demonstrate_examples(SETTINGS, questions, index, 2), texts, strict=True):
        question, call, passages, further_call, _, answer = (message["content"] for message in row["messages"])
        assert (question, texts_by_title["Low Tide"] in passages) == (text, True)
        assert call == '<tool_call>\n{"name": "search", "arguments": {"query": "Low Tide"}}\n</tool_call>'
        assert further_call.startswith("<think>Found Mara Quill.</think>\n<tool_call>")
        assert answer.endswith("That answers it.</think>\n<answer> Tesk </answer>")
