"""Episodes that outlast their contexts: bounded, token for token as sampled, and read alike by the learner."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from agent_r1.costs import Costs
from agent_r1.data.demonstrations import Demonstration
from agent_r1.envs.base import Attempt, Env, Restart, Transition
from agent_r1.envs.shared import Shared
from agent_r1.learn.learner import Learner
from agent_r1.params import SHIPPED, load
from agent_r1.params.env import ContextParams
from agent_r1.records import Outcome, Passage, Question, Source, Trajectory
from agent_r1.rollout.chat import Chat, Dialogue
from agent_r1.rollout.codec import SAMPLE_TOOL
from agent_r1.rollout.episodes import ScriptedSampler, collect
from agent_r1.rollout.sampling import Action, Engine, Request, Sampler
from agent_r1.search.base import Search
from agent_r1.search.index import Cached
from agent_r1.teaching.warm_start import act_out
from agent_r1.training.collection import Collector
from agent_r1.training.watch import StaleWeightsError
from tests.rollout.turns import Recording

SETTINGS = load(SHIPPED)
MOST, STEPS, EPISODES = 400, 30, 2


class Talking(Env):
    """Says much, and ends after `STEPS` steps."""

    system, user = "Be brief.", "Who?"

    def __init__(self, tools: Sequence[dict[str, Any]] = ()) -> None:
        self.tools, self._steps = tools, 0

    async def step(self, action: str) -> Transition:
        self._steps += 1
        if self._steps == STEPS:
            return Transition(outcome=Outcome.TURN_LIMIT)
        said = f"{self._steps} " + "Mara Quill of Tesk " * 6
        return Transition(observations=(said,), rewards_when_read={"progress": 1.0})


class Summing(ScriptedSampler):
    """Goes on and on, and sums up in these words; marks in them are spelled out."""

    def __init__(self, words: str, chat: Chat) -> None:
        super().__init__([["go"] * STEPS] * EPISODES, chat)
        self._summary = chat.encode_action(chat.escape(words))

    def sample(self, requests: Sequence[Request]) -> list[Action]:
        summed = Action.of(self._summary, [0.0] * len(self._summary), self._summary[-1:])
        return [summed if each.summary else super(Summing, self).sample([each])[0] for each in requests]


Played = tuple[Recording, list[Trajectory]]


def play(sampler: Sampler, chat: Chat, kind: str, every: int, *, tools: Any = (), **limits: int) -> Played:
    context = ContextParams(kind=kind, every=every)
    changes = {"max_tokens": MOST, "max_action_tokens": 16, "context": context, **limits}
    attempts = [Attempt(question_id=f"q{n}", group=n, sample=0, env=lambda _: Talking(tools)) for n in range(EPISODES)]
    recording = Recording(sampler)
    with Shared(SETTINGS.env.model_copy(update=changes)) as shared:
        return recording, collect(recording, chat, attempts, shared, seed=7)


@pytest.fixture(scope="module", params=[("window", True), ("window", False), ("summary", True), ("summary", False)])
def rewritten(request: pytest.FixtureRequest, engine: Engine, chat: Chat) -> Played:
    """Episodes of an untrained policy, with tools and without."""
    kind, with_tools = request.param
    return play(engine, chat, kind, 2, tools=[SAMPLE_TOOL] if with_tools else ())


def test_an_episode_of_three_times_the_limit_finishes(rewritten: Played) -> None:
    _, trajectories = rewritten
    for each in trajectories:
        summaries = len(each.steps) - STEPS
        said = int(np.isin(each.source, (Source.ACTION, Source.OBSERVATION)).sum())
        assert (each.outcome, said > 3 * MOST) == (Outcome.TURN_LIMIT, True)
        assert summaries in (0, (STEPS - 1) // 2)
        assert len(each.contexts) == (1 + summaries if summaries else STEPS - 2)
        assert all(span.stop - span.start <= MOST for span in each.contexts)
        assert sum(step.rewards.get("progress", 0) for step in each.steps) == STEPS - 1


def test_every_context_is_what_was_asked_and_every_action_what_was_sampled(rewritten: Played) -> None:
    """Every sampled token stands once in a trajectory, and a context only grows at its end."""
    recording, trajectories = rewritten
    for index, each in enumerate(trajectories):
        for step, (request, action) in zip(each.steps, recording.of(index), strict=True):
            [context] = [span for span in each.contexts if span.start <= step.action_start < span.stop]
            assert each.token_ids[context.start : step.action_start].tolist() == request.context
            assert each.token_ids[step.action_start : step.action_stop].tolist() == action.token_ids
        assert int(each.action_mask.sum()) == sum(len(action.token_ids) for _, action in recording.of(index))


def test_sampler_and_learner_agree_in_every_context(rewritten: Played, tiny_model: Path, tmp_path: Path) -> None:
    """The proof of the weights looks at all of them: one logprob that is off in the last is found."""
    _, trajectories = rewritten
    proof = tmp_path / "proof.parquet"
    update, folder = SETTINGS.train.update, SimpleNamespace(proof=lambda iteration: proof, costs=Costs())
    learner = Learner(tiny_model, update, SETTINGS.model, with_critic=False, seed=0)
    collector = cast(Any, SimpleNamespace(learner=learner, folder=folder, config=SimpleNamespace(update=update)))
    assert Collector.prove(collector, trajectories, 0) < update.canary_tolerance.float32
    last = trajectories[-1]
    off = last.logprobs.copy()
    off[last.steps[-1].action_start] -= 0.1
    with pytest.raises(StaleWeightsError, match=r"off by 0\.1 nats"):
        Collector.prove(collector, [*trajectories[:-1], replace(last, logprobs=off)], 0)


def test_a_summary_is_text_in_the_next_context(chat: Chat, hostile: str) -> None:
    """The summary spells marks out: they stay as sampled in its own context, and are text in the next prompt."""
    _, [each, *_] = play(Summing(hostile, chat), chat, "summary", 1, max_action_tokens=120, max_tokens=512)
    second = each.contexts[1]
    opening = each.source[second].tolist().index(Source.ACTION)
    prompt = each.token_ids[second][:opening]
    assert hostile in chat.decode(prompt.tolist())
    assert set(each.source[second][:opening].tolist()) == {Source.PROMPT}
    marks = np.isin(prompt, chat.encode_action("<|im_start|>"))
    assert int(marks.sum()) == 3 + 2  # the beginnings of system, user and assistant, and two ends


@pytest.mark.parametrize("style", ["built_in", "qwen2_5", "qwen3", "llama3", "mistral"])
@pytest.mark.parametrize("keep", [0, 1, 2, 9])
@pytest.mark.parametrize("with_tools", [True, False])
def test_a_new_context_is_what_the_template_renders(
    style: str,
    keep: int,
    with_tools: bool,
    tiny_tokenizer: PreTrainedTokenizerFast,
    tokenizer_of: Callable[..., PreTrainedTokenizerFast],
) -> None:
    """The context renders the new opening and the kept exchanges; all but the latest observation is PROMPT."""
    chat = Chat(tiny_tokenizer if style == "built_in" else tokenizer_of(style))
    tools = [SAMPLE_TOOL] if with_tools else []
    dialogue = Dialogue(chat, "Be brief.", "Who?", tools)
    for said in ("a", "b"):
        dialogue.reply(chat.encode_action(said), [f"{said} seen"], closed=True)
    said = ["c seen"] if keep else []
    reply = dialogue.reply(chat.encode_action("c"), said, closed=True, restart=Restart(user="Anew?", keep=keep))
    exchanges = [[("assistant", each), ("tool" if with_tools else "user", f"{each} seen")] for each in "abc"]
    kept = [message for exchange in exchanges[-keep:] * bool(keep) for message in exchange]
    whole = chat.template.render([("system", "Be brief."), ("user", "Anew?"), *kept], tools)
    assert (reply.restarts, reply.ids) == (True, chat.encode_sampled(whole))
    spans = [(source, len(list(run))) for source, run in groupby(reply.source)]
    expected = [Source.PROMPT, Source.TEMPLATE, Source.OBSERVATION, Source.TEMPLATE] if keep else [Source.PROMPT]
    assert [source for source, _ in spans] == expected
    observed = [index for index, source in zip(reply.ids, reply.source, strict=True) if source == Source.OBSERVATION]
    assert chat.decode(observed).strip('"') == "".join(said)


def test_demonstrations_are_read_in_each_context_and_sum_up(chat: Chat, bm25_index: Callable[..., Search]) -> None:
    call = '<tool_call>\n{"name": "search", "arguments": {"query": "Tesk"}}\n</tool_call>'
    thoughts = ["I need two.", "Found one. I need the other.", "Found both."]
    asked = Question(question_id="q", text="Who?", answers=["Quill"], split="train", dataset="d", strata={})
    acts = [f"<think>{thought}</think>\n{call}" for thought in thoughts[:2]]
    shown = Demonstration(asked, [*acts, f"<think>{thoughts[2]}</think>\n<answer>Quill</answer>"])
    contexts = [ContextParams(kind=kind, every=1) for kind in ("window", "summary")]
    taught = SETTINGS.warm_start.model_copy(update={"contexts": contexts})
    env = SETTINGS.env.model_copy(update={"max_tokens": 4000})
    settings = SETTINGS.model_copy(update={"warm_start": taught, "env": env})
    index = Cached(bm25_index([Passage(passage_id="p", title="Tesk", text="Quill.")]), "", 0)
    found = act_out([shown] * 5, [], chat, index, settings)
    assert [(len(each.steps), len(each.contexts)) for each in found] == [(3, 1), (3, 1), (3, 2), (3, 2), (5, 3)]
    assert {each.answer for each in found} == {"Quill"}
    said = [found[-1].token_ids[step.action_start : step.action_stop - 1].tolist() for step in found[-1].steps]
    assert [chat.decode(said[number]) for number in (1, 3)] == thoughts[1:]
