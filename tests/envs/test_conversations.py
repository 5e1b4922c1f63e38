"""Examples: conversations that open every context of an episode, and what makes one unfit."""

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from agent_r1.envs.base import Attempt
from agent_r1.envs.conversations import read_examples
from agent_r1.envs.kinds import attempts_at, openings
from agent_r1.envs.shared import Shared
from agent_r1.envs.tool_env import asked_attempt
from agent_r1.params import load
from agent_r1.params.env import ContextParams, EnvParams
from agent_r1.records import Passage, Question, Source, Trajectory
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.episode import PromptTooLong
from agent_r1.rollout.episodes import ScriptedSampler, collect, follow
from agent_r1.search.base import Search
from tests.cases import cases, tables

CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "Tesk"}}\n</tool_call>'
EXAMPLE, OPENING = (tables(Path(__file__).parent)[name] for name in ("example", "example_opening"))
FILM = Question(question_id="q", dataset="films", split="train", text="Who made Low Tide?", answers=["Mara"], strata={})

Write = Callable[..., EnvParams]


@pytest.fixture(scope="session")
def index(bm25_index: Callable[[Sequence[Passage]], Search]) -> Search:
    return bm25_index([Passage(passage_id="0", title="Low Tide", text="Low Tide is by Mara.")])


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def settings(*examples: Any, **limits: Any) -> EnvParams:
        path = tmp_path / "examples.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in examples))
        env = load(Path(__file__).parents[2] / "params.yaml").env
        return env.model_copy(update={"examples": str(path), "max_tokens": 1024, **limits})

    return settings


def play(attempt: Callable[[Shared], Attempt], limits: EnvParams, chat: Chat, index: Search) -> Trajectory:
    script = [CALL, CALL, "<answer>Mara</answer>"]
    with Shared(limits, index) as shared:
        [trajectory] = collect(ScriptedSampler([script], chat), chat, [attempt(shared)], shared, seed=0)
    return trajectory


def test_examples_open_every_context_and_are_prompt(write: Write, chat: Chat, index: Search) -> None:
    limits = write({"messages": EXAMPLE})
    whole = play(lambda shared: attempts_at([FILM], shared)[0], limits, chat, index)
    first = whole.token_ids[: whole.steps[0].action_start]
    assert OPENING in chat.decode(first.tolist())
    assert {*whole.source[: len(first)].tolist()} == {Source.PROMPT}
    assert int(whole.action_mask.sum()) == sum(step.action_stop - step.action_start for step in whole.steps)
    chatted = play(lambda shared: asked_attempt("Who made Low Tide?", shared), limits, chat, index)
    assert chatted.token_ids.tolist() == whole.token_ids.tolist()
    window = limits.model_copy(update={"context": ContextParams(kind="window", every=1)})
    renewed = play(lambda shared: attempts_at([FILM], shared)[0], window, chat, index)
    starts = [*renewed.context_starts, len(renewed.token_ids)]
    contexts = [chat.decode(renewed.token_ids[start:stop].tolist()) for start, stop in pairwise(starts)]
    assert len(contexts) == 2
    assert all(OPENING in context for context in contexts)


def test_the_hash_of_a_prompt_covers_its_examples(write: Write, chat: Chat, index: Search) -> None:
    hashes = set()
    for examples in ([], [{"messages": EXAMPLE}], [{"messages": EXAMPLE}] * 2):
        limits = write(*examples).model_copy(update={} if examples else {"examples": ""})
        with Shared(limits, index) as shared:
            hashes.add(chat.prompts_hash(openings(attempts_at([FILM], shared), [FILM], shared)))
    assert len(hashes) == 3


def test_examples_that_leave_no_room_are_refused_with_the_numbers(write: Write, chat: Chat, index: Search) -> None:
    limits = write({"messages": EXAMPLE}, max_tokens=100)
    refused = pytest.raises(PromptTooLong, match=r"\d+ of them for env\.examples, and max_tokens is 100")
    with Shared(limits, index) as shared, refused:
        [*follow(ScriptedSampler([[]], chat), chat, attempts_at([FILM], shared)[0], shared, seed=0)]


@cases("row, message")
def test_an_unfit_example_is_refused_with_its_row(write: Write, row: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_examples(write(row))


def test_plain_answers_are_examples_where_answers_are_plain(write: Write, chat: Chat, index: Search) -> None:
    limits = write({"messages": [EXAMPLE[0], {"role": "assistant", "content": "Veld"}]}, answers="plain")
    assert [example.actions for example in read_examples(limits)] == [["Veld"]]
    script = ["no tags", "<think>Seen.</think>Mara"]
    with Shared(limits, index) as shared:
        attempts = attempts_at([FILM, FILM], shared)
        sampler = ScriptedSampler([[script[0]], [CALL, script[1]]], chat)
        wrong, right = collect(sampler, chat, attempts, shared, seed=0)
    assert (wrong.answer, wrong.steps[-1].rewards["em"]) == ("no tags", 0.0)
    assert (right.answer, right.steps[-1].rewards["em"]) == ("Mara", 1.0)
