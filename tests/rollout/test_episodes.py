"""Episodes by hand, by script and by an untrained policy: training gets the sampled tokens, id for id."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from agent_r1.envs.base import Attempt, Env, Transition
from agent_r1.envs.shared import Shared
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.faults import ContextFull, TooManyAborted, WorldFault
from agent_r1.params import SHIPPED, load
from agent_r1.records import CallStatus, Outcome, Question, Source, StopReason, Trajectory
from agent_r1.rollout import episode, episodes
from agent_r1.rollout.chat import Chat, Dialogue
from agent_r1.rollout.episode import Play, PromptTooLong, StepView
from agent_r1.rollout.episodes import ScriptedSampler, collect, follow
from agent_r1.rollout.sampling import Action, Engine, EngineError, Request, Sampler
from agent_r1.search.base import Search
from agent_r1.seeds import derive
from agent_r1.tools.search import search_tool
from tests.cases import cases
from tests.rollout.turns import Recording

CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "Tide"}}\n</tool_call>'
LIMITS = load(SHIPPED).env.model_copy(
    update={"max_steps": 1, "max_tokens": 512, "max_action_tokens": 64, "aborted_share": 0.0}
)

TokenizerOf = Callable[..., PreTrainedTokenizerFast]


@dataclass
class Echo(Env):
    """An environment that answers every action with the same text, `steps` times."""

    observation: str
    steps: int
    seen: list[str] = field(default_factory=list)
    system: str = "Be brief."
    user: str = "Who?"
    tools: list[dict[str, Any]] = field(default_factory=list)

    async def step(self, action: str) -> Transition:
        self.seen.append(action)
        if len(self.seen) > self.steps:
            return Transition(outcome=Outcome.ANSWERED, answer="a", rewards={"em": 1.0})
        return Transition(observations=(self.observation,), rewards={"think": 1.0}, rewards_when_read={"progress": 1.0})


@dataclass
class ScriptThenEngine:
    """Every episode searches first; the policy takes over from there."""

    script: ScriptedSampler
    engine: Engine

    def sample(self, requests: Sequence[Request]) -> list[Action]:
        return self.script.sample(requests) if requests[0].step == 0 else self.engine.sample(requests)


def _same(env: Any, seed: int) -> Any:
    return env


def attempts(envs: Sequence[Any]) -> list[Attempt]:
    pairs = enumerate(envs)
    return [Attempt(question_id=f"q{i // 2}", group=i // 2, sample=i % 2, env=partial(_same, env)) for i, env in pairs]


def run(sampler: Sampler, chat: Chat, envs: Sequence[Any], iteration: int = 0, **limits: float) -> list[Trajectory]:
    with Shared(LIMITS.model_copy(update=limits)) as shared:
        return collect(sampler, chat, attempts(envs), shared, seed=7, play=Play(iteration=iteration))


class Stating(Echo):
    """States none, then a short key, one that is not ASCII, and one that is long."""

    @property
    def state(self) -> str:
        return ["", "_P", "é", "x" * 300][len(self.seen)]


def test_a_step_keeps_the_state_that_its_action_met(chat: Chat) -> None:
    [trajectory] = run(ScriptedSampler(["abcd"], chat), chat, [Stating("seen", steps=3)])
    *kept, accented, long = [step.state for step in trajectory.steps]
    assert kept == ["", "_P"]
    assert len(accented) == len(long) == 32
    assert accented != long


def test_a_call_that_is_read_leniently_is_one_for_the_environment_and_counted(chat: Chat) -> None:
    """The tokens are those that were sampled."""
    bare = '{"name": "search", "parameters": {"query": "Tide"}}'
    schema = {"type": "object", "properties": {}}
    tool = {"type": "function", "function": {"name": "search", "description": "", "parameters": schema}}
    for calls, read, counted in (("strict", bare, {}), ("lenient", CALL, {"rollout/lenient_actions": 1})):
        env = Echo("seen", steps=1, tools=[tool])
        with Shared(LIMITS.model_copy(update={"calls": calls})) as shared:
            sampler = ScriptedSampler([[bare, "stop"]], chat)
            [trajectory] = collect(sampler, chat, attempts([env]), shared, seed=7, play=Play())
            assert shared.take_measures() == counted
        step = trajectory.steps[0]
        assert trajectory.ids(slice(step.action_start, step.action_stop)) == chat.encode_action(bare)
        assert env.seen == [read, "stop"]


def test_one_episode_by_hand(chat: Chat) -> None:
    env = Echo("seen", steps=1)
    [trajectory] = run(ScriptedSampler([["<think>x</think>go", "stop"]], chat), chat, [env], iteration=3)
    dialogue = Dialogue(chat, "Be brief.", "Who?")
    opening = dialogue.opening.ids
    first, second = chat.encode_action("<think>x</think>go"), chat.encode_action("stop")
    reply = dialogue.reply(first, ["seen"], closed=True)
    assert trajectory.token_ids.tolist() == opening + first + reply.ids + second
    assert trajectory.source.tolist() == (
        [Source.PROMPT] * len(opening) + [Source.ACTION] * len(first) + reply.source + [Source.ACTION] * len(second)
    )
    assert env.seen == ["<think>x</think>go", "stop"]  # without the end tokens
    assert trajectory.trajectory_id == "3/q0/0"
    assert trajectory.seed == derive(7, 3, "q0", 0)
    assert trajectory.outcome is Outcome.ANSWERED
    assert trajectory.answer == "a"
    assert [step.rewards for step in trajectory.steps] == [{"think": 1.0, "progress": 1.0}, {"em": 1.0}]
    assert [step.stop_reason for step in trajectory.steps] == [StopReason.END, StopReason.END]
    starts = [len(opening), len(opening + first + reply.ids)]
    assert [(step.action_start, step.action_stop) for step in trajectory.steps] == [
        (starts[0], starts[0] + len(first)),
        (starts[1], starts[1] + len(second)),
    ]


def test_durations_of_steps_add_up_to_the_episodes(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opened at second 2; its actions are answered at 3 and 7."""
    monkeypatch.setattr(episode, "time", SimpleNamespace(monotonic=iter([2.0, 3.0, 7.0]).__next__))
    [trajectory] = run(ScriptedSampler([["go", "stop"]], chat), chat, [Echo("seen", steps=1)])
    assert [step.duration_s for step in trajectory.steps] == [1.0, 4.0]


def watch(sampler: Sampler, chat: Chat, env: Any, **limits: int) -> list[StepView]:
    [attempt] = attempts([env])
    with Shared(LIMITS.model_copy(update=limits)) as shared:
        return list(follow(sampler, chat, attempt, shared, seed=7))


def test_an_episode_is_followed_step_by_step(chat: Chat) -> None:
    """Each step is seen before the next is sampled."""
    sampler = Recording(ScriptedSampler([["<think>x</think>go", "stop"]], chat))
    [attempt] = attempts([Echo("seen", steps=1)])
    with Shared(LIMITS) as shared:
        views = [(view, len(sampler.rounds)) for view in follow(sampler, chat, attempt, shared, seed=7)]
    [trajectory] = run(ScriptedSampler([["<think>x</think>go", "stop"]], chat), chat, [Echo("seen", steps=1)])
    (first, sampled), (second, then_sampled) = views
    assert (sampled, then_sampled) == (1, 2)
    assert [view.step.rewards for view in (first, second)] == [step.rewards for step in trajectory.steps]
    assert (first.tokens, second.tokens) == (trajectory.steps[1].action_start, len(trajectory.token_ids))
    assert (first.action, first.observations, first.outcome) == ("<think>x</think>go", ("seen",), None)
    assert (second.action, second.observations, second.outcome, second.answer) == ("stop", (), Outcome.ANSWERED, "a")


def test_rounds_seeds_and_order(chat: Chat) -> None:
    """Episodes of 1, 3 and 2 actions: rounds of 3, 2 and 1 requests; a seed for every action of its own."""
    sampler = Recording(ScriptedSampler([["a"] * 3] * 3, chat))
    trajectories = run(sampler, chat, [Echo("o", steps) for steps in (0, 2, 1)])
    assert sampler.batches == [[0, 1, 2], [1, 2], [1]]
    assert [len(trajectory.steps) for trajectory in trajectories] == [1, 3, 2]
    requests = [request for pairs in sampler.rounds for request, _ in pairs]
    assert len({request.seed for request in requests}) == 6
    assert next(r.seed for r in requests if (r.episode, r.step) == (1, 2)) == derive(7, 0, "q0", 1, 2)


@pytest.mark.parametrize(("order", "most"), [("arrival", 3), ("rounds", 10)])
def test_open_episodes_are_as_room_allows(chat: Chat, monkeypatch: pytest.MonkeyPatch, order: str, most: int) -> None:
    """The tokens are those of all at once; rounds wait for all, which none could begin behind."""
    monkeypatch.setattr(episodes, "room", lambda: 3)
    living, counted = set[int](), list[int]()

    class Counted(Echo):
        async def open(self) -> None:
            living.add(id(self))
            counted.append(len(living))

        async def close(self) -> None:
            living.discard(id(self))

    class Patient(ScriptedSampler):
        async def act(self, request: Request) -> Action:
            await asyncio.sleep(0)
            return await super().act(request)

    def played(order: Any) -> list[list[int]]:
        envs = [Counted("x", steps=1) for _ in range(10)]
        return [row.token_ids.tolist() for row in run(Patient([["a", "b"]] * 10, chat), chat, envs, order=order)]

    found = played(order)
    assert max(counted) == most
    assert found == played("rounds")


def test_who_looks_on_is_told_as_each_episode_ends(chat: Chat) -> None:
    ended: list[int] = []

    class Watched(ScriptedSampler):
        def sample(self, requests: Sequence[Request]) -> list[Action]:
            ended.append(over.call_count)
            return super().sample(requests)

    envs, over = [Echo("seen", steps=steps) for steps in (2, 1)], Mock()
    with Shared(LIMITS) as shared:
        collect(Watched([["go"] * 3] * 2, chat), chat, attempts(envs), shared, seed=7, play=Play(over=over))
    assert (ended, over.call_count) == ([0, 0, 1], 2)


def test_a_cut_action_is_closed_by_the_template(chat: Chat) -> None:
    """The action has more than 4 tokens: 4 are actions, the end token after them is TEMPLATE."""
    env = Echo("o", steps=1)
    [trajectory] = run(ScriptedSampler([["Mara Quill of Tesk", "a"]], chat), chat, [env], max_action_tokens=4)
    step = trajectory.steps[0]
    assert step.stop_reason is StopReason.LENGTH
    assert step.action_stop - step.action_start == 4
    assert trajectory.token_ids[step.action_stop] == chat.end_id
    assert trajectory.source[step.action_stop] == Source.TEMPLATE
    assert trajectory.token_ids[step.action_stop + 1] != chat.end_id
    assert env.seen[0] == chat.decode(chat.encode_action("Mara Quill of Tesk")[:4])


class EndedOtherwise(ScriptedSampler):
    """Ends every action with a token of the model's that is not the template's."""

    def sample(self, requests: Sequence[Request]) -> list[Action]:
        other = self._chat.end_ids[1]
        return [replace(each, token_ids=[*each.token_ids[:-1], other]) for each in super().sample(requests)]


def test_another_end_token_is_sampled_and_the_templates_follows(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """The environment reads neither; the action's last token is the sampled end, with its logprob and its reward."""
    other = tiny_tokenizer.pad_token_id
    chat, env = Chat(tiny_tokenizer, [other]), Echo("o", steps=1)
    [trajectory] = run(EndedOtherwise([["go", "stop"]], chat), chat, [env])
    step = trajectory.steps[0]
    assert (step.stop_reason, env.seen[0]) == (StopReason.END, "go")
    around = slice(step.action_stop - 1, step.action_stop + 1)
    assert trajectory.token_ids[around].tolist() == [other, chat.end_id]
    assert trajectory.source[around].tolist() == [Source.ACTION, Source.TEMPLATE]


@pytest.mark.parametrize("spare", [0, 1])
def test_an_observation_without_room_is_not_appended(chat: Chat, spare: int) -> None:
    """Room for the observation alone ends the episode; one token more, and an action of one token follows."""
    dialogue, action = Dialogue(chat, "Be brief.", "Who?"), chat.encode_action("go")
    opening, reply = dialogue.opening.ids, dialogue.reply(action, ["seen"], closed=True).ids
    sampler = Recording(ScriptedSampler([["go", "go"]], chat))
    limit = len(opening) + len(action) + len(reply) + spare
    [trajectory] = run(sampler, chat, [Echo("seen", steps=9)], max_tokens=limit)
    assert trajectory.outcome is Outcome.TOKEN_LIMIT
    assert trajectory.answer == ""
    if spare:
        assert trajectory.token_ids.tolist() == [*opening, *action, *reply, action[0]]
        assert [request.max_tokens for request, _ in sampler.of(0)] == [min(64, limit - len(opening)), 1]
    else:
        assert trajectory.token_ids.tolist() == opening + action
    read = {"progress": 1.0} if spare else {}  # an observation that nobody reads earns nothing
    assert trajectory.steps[0].rewards == {"think": 1.0} | read
    view, *_ = watch(ScriptedSampler([["go", "go"]], chat), chat, Echo("seen", steps=9), max_tokens=limit)
    assert view.observations == ("seen",) * spare


@pytest.mark.parametrize("order", ["rounds", "arrival"])
def test_prompt_without_room_ends_its_episode_alone(order: str, chat: Chat, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is sampled for it, it holds nothing, and succeeds in nothing."""
    sampler = ScriptedSampler([["a"], [], ["a"]], chat)
    length = len(Dialogue(chat, "Be brief.", "Who was it?").opening.ids)
    asked = [Echo("o", 0), Echo("o", 0, user="Who was it?"), Echo("o", 0)]
    first, long, last = run(sampler, chat, asked, max_tokens=length, order=order)
    assert (long.outcome, long.steps, len(long.token_ids), long.answer) == (Outcome.TOKEN_LIMIT, [], 0, "")
    assert (long.success, long.counts) == (0.0, False)
    assert {first.outcome, last.outcome} == {Outcome.ANSWERED}
    assert f"no room left: the prompt of question 'q0' has {length}" in caplog.text


def test_a_person_whose_question_leaves_no_room_is_told_so(chat: Chat) -> None:
    length = len(Dialogue(chat, "Be brief.", "Who?").opening.ids)
    with pytest.raises(PromptTooLong, match=rf"'q0' has {length} tokens and max_tokens is {length}.*raise env.max_tok"):
        watch(ScriptedSampler([["a"]], chat), chat, Echo("o", 0), max_tokens=length)


@cases("count, logprobs, stop_reason, message")
def test_an_action_that_is_no_answer_to_its_request_is_refused(
    chat: Chat, count: int, logprobs: float, stop_reason: str, message: str
) -> None:
    values = np.zeros(logprobs, np.float32) if isinstance(logprobs, int) else np.array([logprobs], np.float32)
    action = Action(token_ids=[7] * count, logprobs=values, stop_reason=StopReason(stop_reason))
    with pytest.raises(EngineError, match=message):
        run(SimpleNamespace(sample=lambda _: [action]), chat, [Echo("o", steps=1)], max_action_tokens=64)


@dataclass
class Flaky(Echo):
    """The world fails in the second step, `faults` times."""

    faults: int = 0

    async def step(self, action: str) -> Transition:
        if self.seen and self.faults:
            self.faults -= 1
            self.seen.clear()
            return Transition(outcome=Outcome.ABORTED, fault="the search is down")
        return await super().step(action)


def test_an_episode_that_the_world_cut_short_is_made_again(chat: Chat) -> None:
    """The second attempt has the same question and seeds, and nothing of the first attempt."""
    scripts = [["a", "b"], ["c", "d"]]
    [calm, beside] = run(ScriptedSampler(scripts, chat), chat, [Echo("o", 1), Echo("p", 1)])
    recorded = Recording(ScriptedSampler(scripts, chat))
    [again, unharmed] = run(recorded, chat, [Flaky("o", 1, faults=1), Echo("p", 1)])
    assert (repr(again), repr(unharmed)) == (repr(calm), repr(beside))
    assert [len(requests) for requests in recorded.rounds] == [2, 2, 1, 1]
    first, _, second, _ = recorded.of(0)
    assert first[0] == second[0]


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [(WorldFault("it is down"), Outcome.ABORTED), (ContextFull("513 of 512"), Outcome.TOKEN_LIMIT)],
)
def test_failed_round_ends(chat: Chat, fault: Exception, outcome: Outcome, caplog: pytest.LogCaptureFixture) -> None:
    class Once(ScriptedSampler):
        def sample(self, requests: Sequence[Request]) -> list[Action]:
            if requests[0].step:
                raise fault
            return super().sample(requests)

    sampler = Once([["a", "b"], ["c", "d"]], chat)
    found = run(sampler, chat, [Echo("o", 9), Echo("p", 9)], aborted_share=1.0)
    assert [(each.outcome, len(each.steps)) for each in found] == [(outcome, 1)] * 2
    assert str(fault) in caplog.text


@pytest.mark.parametrize(("share", "kept"), [(0.5, True), (0.49, False)])
def test_what_the_world_cuts_short_twice_is_aborted_and_only_so_often(chat: Chat, share: float, kept: bool) -> None:
    envs, sampler = [Flaky("o", 1, faults=2), Echo("p", 1)], ScriptedSampler([["a", "b"], ["c", "d"]], chat)
    if not kept:
        with pytest.raises(TooManyAborted, match=r"1 of 2 episodes short.*aborted_share is 0\.49: the search is down"):
            run(sampler, chat, envs, aborted_share=share)
        return
    [aborted, answered] = run(sampler, chat, envs, aborted_share=share)
    assert (aborted.outcome, aborted.answer, len(aborted.steps)) == (Outcome.ABORTED, "", 2)
    assert aborted.token_ids[-1] == chat.end_id  # the call is the last that is kept
    assert answered.outcome is Outcome.ANSWERED


def test_an_episode_of_several_contexts(tokenizer_of: TokenizerOf) -> None:
    """Three steps: a thought is dropped after the first, the second has none, the third ends the episode."""
    chat = Chat(tokenizer_of("qwen3"))
    sampler = Recording(ScriptedSampler([["<think>Who?</think>Tesk.", "Veld.", "<think>x</think>end"]], chat))
    [trajectory] = run(sampler, chat, [Echo("seen", 2)], max_tokens=400)
    first, second = (trajectory.token_ids[span].tolist() for span in trajectory.contexts)
    contexts = [request.context for request, _ in sampler.of(0)]
    actions = [action.token_ids for _, action in sampler.of(0)]
    assert first == contexts[0] + actions[0]
    assert second[: len(contexts[1])] == contexts[1]
    assert second == contexts[2] + actions[2]
    assert contexts[2][: len(contexts[1]) + len(actions[1])] == contexts[1] + actions[1]
    assert trajectory.token_ids[trajectory.action_mask].tolist() == [index for ids in actions for index in ids]
    for step, ids in zip(trajectory.steps, actions, strict=True):
        assert trajectory.token_ids[step.action_start : step.action_stop].tolist() == ids
    assert "<think>" not in chat.decode(contexts[2])
    assert not trajectory.logprobs.any()
    assert trajectory.outcome is Outcome.ANSWERED


def test_opened_thought_keeps_tag(hostile_question: Question, hostile_index: Search, tokenizer_of: TokenizerOf) -> None:
    """Only the environment reads the tag; the policy goes on after it, and its sampled tokens stay as they were."""
    chat = Chat(tokenizer_of("qwen3_thinking"))
    script = [f"<think>Whose?\n</think>\n\n{CALL}", CALL, "<think>x</think><answer>Q</answer>"]
    sampler = Recording(ScriptedSampler([script], chat))
    env = ToolEnv(hostile_question, [search_tool(hostile_index, top_k=1)], max_steps=3)
    [trajectory] = run(sampler, chat, [env], max_tokens=4000, max_action_tokens=200)
    assert all(chat.decode(request.context).endswith("assistant\n<think>\n") for request, _ in sampler.of(0))
    actions = [action.token_ids for _, action in sampler.of(0)]
    assert [chat.decode(ids[:-1]) for ids in actions] == [
        f"Whose?\n</think>\n\n{CALL}",
        f"</think>{CALL}",
        "x</think><answer>Q</answer>",
    ]
    assert trajectory.token_ids[trajectory.action_mask].tolist() == [index for ids in actions for index in ids]
    assert [step.call_status for step in trajectory.steps] == [CallStatus.OK, CallStatus.OK, CallStatus.NONE]
    assert [step.rewards["think"] for step in trajectory.steps] == [1.0, 0.0, 1.0]
    assert (trajectory.outcome, trajectory.answer) == (Outcome.ANSWERED, "Q")


@pytest.fixture(scope="module")
def sampled(
    engine: Engine, chat: Chat, hostile_question: Question, hostile_index: Search
) -> tuple[Recording, list[Trajectory]]:
    """200 episodes of the untrained policy, which writes garbage, each after a search with a hostile result."""
    tools = [search_tool(hostile_index, top_k=1)]
    envs = [ToolEnv(hostile_question, tools, max_steps=2 + index % 4) for index in range(200)]
    sampler = Recording(ScriptThenEngine(ScriptedSampler([[CALL]] * len(envs), chat), engine))
    return sampler, run(sampler, chat, envs, max_action_tokens=24, max_tokens=480)


def test_trained_tokens_are_the_sampled_ones(sampled: tuple[Recording, list[Trajectory]]) -> None:
    """Where source is ACTION stand the ids and logprobs that the sampler returned, and nowhere else a logprob.

    The episodes are worth their name: cut and closed actions, and both ways to end without an answer.
    """
    sampler, trajectories = sampled
    for index, trajectory in enumerate(trajectories):
        actions = [action for _, action in sampler.of(index)]
        mask = trajectory.action_mask
        assert trajectory.token_ids[mask].tolist() == [token for action in actions for token in action.token_ids]
        assert np.array_equal(trajectory.logprobs[mask], np.concatenate([action.logprobs for action in actions]))
        assert not trajectory.logprobs[~mask].any()
        spans = [range(step.action_start, step.action_stop) for step in trajectory.steps]
        assert np.flatnonzero(mask).tolist() == [position for span in spans for position in span]
    steps = [step for trajectory in trajectories for step in trajectory.steps]
    assert {step.stop_reason for step in steps} == {StopReason.END, StopReason.LENGTH}
    assert {trajectory.outcome for trajectory in trajectories} >= {Outcome.MALFORMED, Outcome.TOKEN_LIMIT}
