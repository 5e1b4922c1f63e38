"""A teacher at a real server of vLLM, and at servers that answer with something else."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from agent_r1.faults import WorldFault
from agent_r1.learn.builtin import new_model, train_tokenizer
from agent_r1.learn.learner import frozen
from agent_r1.learn.scoring import Compute
from agent_r1.params.stages import ServerParams
from agent_r1.records import Credit, Source, Trajectory
from agent_r1.tables import read_rows
from agent_r1.teaching.teacher import ServedTeacher
from tests.answering import Heard, Said, answering
from tests.cases import cases
from tests.fixtures import Task, vllm_server
from tests.trajectories import from_parts

WINDOW = 512
LIMITS = ServerParams(urls=[], concurrency=8, timeout_s=60, retries=0)
HERE = Compute(device=torch.device("cpu"), dtype=torch.float32, max_tokens=2048)


@pytest.fixture(scope="module")
def teacher_server(
    tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerFast
) -> Iterator[tuple[Path, str]]:
    """The folder of a model, and where vLLM's own API has it under the name `teacher`."""
    folder = tmp_path_factory.mktemp("teacher")
    model = new_model(tiny_tokenizer, hidden_size=64, layers=2, heads=2, max_tokens=WINDOW, seed=3)
    model.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    with vllm_server(folder, "--served-model-name", "teacher", VLLM_CPU_KVCACHE_SPACE="1") as url:
        yield folder, f"{url}/v1"


def episode(*lengths: int, context_starts: list[int] | None = None) -> Trajectory:
    """Random tokens: a prompt, an action, an observation, an action."""
    drawn = np.random.default_rng(lengths)
    sources = [Source.PROMPT, Source.ACTION, Source.OBSERVATION, Source.ACTION]
    ids = [drawn.integers(20, 260, length).tolist() for length in lengths]
    parts = list(zip(sources, ids, strict=True))
    return from_parts(parts, context_starts=context_starts or [0])


def masks(rows: list[Trajectory]) -> list[Any]:
    return [row.action_mask for row in rows]


def test_served_teacher_scores_alike(teacher_server: tuple[Path, str], tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """Of one context, of several, and of one that fills the window."""
    folder, url = teacher_server
    rows = [episode(9, 5, 7, 6), episode(5, 3, 6, 4, context_starts=[0, 8]), episode(300, 100, 100, WINDOW - 500)]
    found = ServedTeacher(("teacher", url), LIMITS, tiny_tokenizer).logprobs(rows, masks(rows))
    here = frozen(folder, HERE)
    for row, ours, theirs in zip(rows, here.logprobs(rows, masks(rows)), found, strict=True):
        assert theirs.dtype == np.float32
        assert not theirs[~row.action_mask].any()
        assert theirs[row.action_mask].max() < 0
        np.testing.assert_allclose(theirs, ours, atol=1e-3)


def test_a_training_learns_from_a_teacher_at_a_server(
    teacher_server: tuple[Path, str], one_action_task: Callable[..., Task], open_training: Callable[..., Any]
) -> None:
    """And holds no reference of its own."""
    folder, url = teacher_server
    task = one_action_task({"Where is it?": "Tesk"}, lambda answer: f"<answer>{answer}</answer>", steps=20)
    credit = {"estimator": "reinforce_pp", "gamma": 0.0, "kl_reward": 1.0, "rewards": {"agent_r1": 0.0}}
    with open_training(task, {"reference": f"teacher at {url}", "credit": credit}) as training:
        assert training.learner.reference is None
        training.rollout(0)
        training.credit(0)
        rows = read_rows(training.folder.trajectories(0), Trajectory)
        found = read_rows(training.folder.credit(0), Credit)
    here = frozen(folder, HERE)
    for each, told in zip(found, here.logprobs(rows, masks(rows)), strict=True):
        np.testing.assert_allclose(each.reference_logprobs, told, atol=1e-3)
        assert each.reference_logprobs.any()


def test_a_teacher_with_other_tokens_or_another_name_is_refused(teacher_server: tuple[Path, str]) -> None:
    others = train_tokenizer(["zyx wvu tsr"] * 9, vocab_size=512)
    rows = [from_parts([(Source.PROMPT, [40, 41]), (Source.ACTION, [258, 42])])]
    url = teacher_server[1]
    with pytest.raises(ValueError, match=r"token 258 is 'vu' here and ' i' for .*: train.reference has other tokens"):
        ServedTeacher(("teacher", url), LIMITS, others).logprobs(rows, masks(rows))
    with pytest.raises(ValueError, match=r"http\S+ refused with status 404: .*`nobody` does not exist"):
        ServedTeacher(("nobody", url), LIMITS, others)


@cases("choices")
def test_odd_scores_are_servers_fault(choices: list[dict[str, Any]], tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [from_parts([(Source.PROMPT, [6, 7]), (Source.ACTION, [8, 9])])]
    last = {"tokens": ["x"], "token_logprobs": [-1.0]}
    probed: list[dict[str, Any]] = [{"prompt_logprobs": [None], "logprobs": last}]

    def answer(asked: Heard) -> Said:
        is_probe = asked.body["prompt"] == [0]
        return 200, json.dumps({"choices": probed if is_probe else choices}).encode()

    with answering(answer) as url:
        teacher = ServedTeacher(("m", url), LIMITS, tiny_tokenizer)
        with pytest.raises(WorldFault, match=r"the endpoint http.* answers in another form than vLLM's"):
            teacher.logprobs(rows, masks(rows))
