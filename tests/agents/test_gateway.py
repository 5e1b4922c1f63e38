"""The gateway over real HTTP: as OpenAI's own client asks it, and as nobody should."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from agent_r1.agents import playing
from agent_r1.agents.task import Ending, Task
from agent_r1.envs.kinds import attempts_at
from agent_r1.http import completions
from agent_r1.records import CallStatus, Outcome
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.episode import PLAY
from agent_r1.rollout.sampling import Action, Request
from tests.agents.conftest import QUESTION, Policy, http_of
from tests.agents.test_session import CALL, SEARCH


def client(task: Task) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=task.base_url, api_key=task.key)


def ask(task: Task, **fields: Any) -> Any:
    messages = [{"role": "user", "content": task.text}]
    return client(task).chat.completions.create(**{"model": task.model, "messages": messages, **fields})


def test_the_official_client_whole_and_streamed(play: Callable[..., Any]) -> None:
    async def solve(task: Task) -> Ending:
        assert [each.id async for each in client(task).models.list()] == [task.model]
        whole = await ask(task, tools=[SEARCH], temperature=0.7, user="me", metadata={"a": "b"}, tool_choice="auto")
        [choice] = whole.choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        assert choice.message.model_extra == {"reasoning_content": "So."}
        [call] = choice.message.tool_calls
        assert (call.type, call.function.name) == ("function", "search")
        assert json.loads(call.function.arguments) == {"query": "it"}
        assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
        with_usage = {"stream": True, "stream_options": {"include_usage": True}, "seed": 1}
        events = [event async for event in await ask(task, tools=[SEARCH], **with_usage)]
        assert events[0].choices[0].delta.role == "assistant"
        assert events[1].choices[0].delta.content == "<answer>Quill</answer>"
        assert [event.choices[0].finish_reason for event in events[:3]] == [None, None, "stop"]
        assert (events[3].choices, events[3].usage.completion_tokens > 0) == ([], True)
        streamed = [event async for event in await ask(task, tools=[SEARCH], stream=True)]
        assert streamed[1].choices[0].delta.tool_calls[0].index == 0
        return Ending(answer="Quill")

    row, policy = play(solve, [CALL, "<answer>Quill</answer>"])
    assert (row.outcome, row.success, len(row.steps), len(policy.log)) == (Outcome.ANSWERED, 1.0, 3, 3)


FLAT = {"type": "function", **SEARCH["function"]}
OF_ANTHROPIC = {"name": "search", "description": "Searches.", "input_schema": SEARCH["function"]["parameters"]}


def test_the_responses_client_whole_and_streamed(play: Callable[..., Any]) -> None:
    """Two steps by the response before, and a third that sends its items again; the last is streamed."""

    async def solve(task: Task) -> Ending:
        asking = client(task).responses
        fields = {"model": "gpt-5", "tools": [FLAT], "reasoning": {"effort": "low"}}
        first = await asking.create(input=task.text, **fields)
        thought, call = first.output
        assert (thought.summary[0].text, call.name, call.arguments) == ("So.", "search", '{"query": "it"}')
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "Quill."}
        second = await asking.create(input=[result], previous_response_id=first.id, **fields)
        assert (second.output_text, second.status) == ("<answer>Quill</answer>", "completed")
        assert second.usage.input_tokens > first.usage.total_tokens
        items = [item.model_dump(exclude_none=True) for item in first.output]
        async with asking.stream(input=[{"role": "user", "content": task.text}, *items, result], **fields) as stream:
            kinds = [event.type async for event in stream]
            last = await stream.get_final_response()
        assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
        assert [item.type for item in last.output] == ["reasoning", "function_call"]
        return Ending(answer="Quill")

    row, policy = play(solve, [CALL, "<answer>Quill</answer>"])
    assert [len(request.context) for request, _ in policy.log][1:] == [len(policy.log[1][0].context)] * 2
    assert row.success == 1.0


def test_anthropics_client_whole_and_streamed(play: Callable[..., Any]) -> None:
    import anthropic  # takes a second, for which no other process of the suite is to wait

    async def solve(task: Task) -> Ending:
        address = task.base_url.removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=address, api_key=task.key, max_retries=0) as asking:
            fields = {"model": "claude", "max_tokens": 300, "system": "Be brief.", "tools": [OF_ANTHROPIC]}
            history: list[Any] = [{"role": "user", "content": task.text}]
            whole = await asking.messages.create(messages=history, **fields)
            thought, call = whole.content
            assert (thought.thinking, call.input, whole.stop_reason) == ("So.", {"query": "it"}, "tool_use")
            history.append({"role": "assistant", "content": whole.content})
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": "Quill."}]
            history.append({"role": "user", "content": results})
            async with asking.messages.stream(messages=history, **fields) as stream:
                last = await stream.get_final_message()
            assert (last.content[0].text, last.stop_reason) == ("<answer>Quill</answer>", "end_turn")
            assert last.usage.input_tokens > whole.usage.input_tokens + whole.usage.output_tokens
            with pytest.raises(anthropic.BadRequestError, match="n: null or 1 alone") as fault:
                await asking.messages.create(messages=history, extra_body={"n": 2}, **fields)
            assert fault.value.body["error"]["type"] == "invalid_request_error"
            with pytest.raises(anthropic.AuthenticationError):
                await asking.with_options(api_key="x").messages.create(messages=history, **fields)
        return Ending(answer="Quill")

    row, _ = play(solve, [CALL, "<answer>Quill</answer>"])
    assert (row.success, row.context_starts, len(row.steps)) == (1.0, [0], 2)


def test_a_response_of_another_episode_is_not_found(play: Callable[..., Any]) -> None:
    names = list[str]()

    async def solve(task: Task) -> Ending:
        asking = client(task).responses
        for name in names:
            with pytest.raises(openai.BadRequestError) as fault:
                await asking.create(model="m", input="And?", previous_response_id=name)
            assert (fault.value.param, fault.value.code) == ("previous_response_id", "previous_response_not_found")
        kept = await asking.create(model="m", input="Who?")
        unkept = await asking.create(model="m", input="Where?", store=False)
        with pytest.raises(openai.BadRequestError, match="is stored in this episode"):
            await asking.create(model="m", input="And?", previous_response_id=unkept.id)
        names.append(kept.id)
        return Ending(answer="x")

    for _ in range(2):
        play(solve, ["yes"])


def test_a_stream_that_waits_shows_signs_of_life(play: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its events, or before a refusal that comes late; who leaves one has the answer when it asks again."""
    monkeypatch.setattr(completions, "KEEP_ALIVE_S", 0.05)
    answers = list[str]()

    async def solve(task: Task) -> Ending:
        body = {"model": "m", "messages": [{"role": "user", "content": "Who?"}], "stream": True}
        async with http_of(task) as http:
            async with http.stream("POST", "/chat/completions", json=body) as left:
                assert (await anext(left.aiter_text())).startswith(": it is acting")
            answers.append((await http.post("/chat/completions", json=body)).text)
            both = (http.post("/chat/completions", json=body | {"seed": seed}) for seed in (1, 2))
            answers.extend([answer.text for answer in await asyncio.gather(*both)])
        return Ending(answer="x")

    _, policy = play(solve, ["yes"], wait_s=0.5, env={"max_steps": 2})
    assert len(policy.log) == 2
    assert all(answer.startswith(": it is acting\n\n") for answer in answers)
    assert sum(answer.endswith("data: [DONE]\n\n") for answer in answers) == 2
    assert any('"code": "turn_limit"' in answer for answer in answers)


def test_errors_are_the_official_clients_own(play: Callable[..., Any]) -> None:
    async def solve(task: Task) -> Ending:
        for key in ("", "another", task.reward_key):
            with pytest.raises(openai.AuthenticationError):
                await openai.AsyncOpenAI(base_url=task.base_url, api_key=key or "none").models.list()
        await ask(task)
        with pytest.raises(openai.BadRequestError) as over:
            await ask(task)
        assert over.value.code == "turn_limit"
        with pytest.raises(openai.APIStatusError) as large:
            await ask(task, messages=[{"role": "user", "content": "x" * (9 << 20)}])
        assert large.value.status_code == 413
        return Ending()

    row, policy = play(solve, ["yes"], env={"max_steps": 1})
    assert (row.outcome, len(policy.log)) == (Outcome.TURN_LIMIT, 1)


def test_a_request_that_is_sent_again_counts_once(play: Callable[..., Any]) -> None:
    async def solve(task: Task) -> Ending:
        body = {"model": task.model, "messages": [{"role": "user", "content": "Who?"}]}
        async with http_of(task) as http:
            with pytest.raises(httpx.ReadTimeout):
                await http.post("/chat/completions", json=body, timeout=0.2)
            first = (await http.post("/chat/completions", json=body)).json()
            retried = {"x-stainless-retry-count": "1"}
            again = (await http.post("/chat/completions", json=body, headers=retried)).json()
            other = (await http.post("/chat/completions", json=body)).json()
        assert first["id"] == again["id"] != other["id"]
        return Ending(answer="no")

    row, policy = play(solve, ["yes"], wait_s=0.5)
    assert len(policy.log) == len(row.steps) == 2
    assert len(row.context_starts) == 2


def test_rewards_are_posted_once_with_a_key_of_their_own(play: Callable[..., Any]) -> None:
    async def solve(task: Task) -> Ending:
        await ask(task)
        async with httpx.AsyncClient(base_url=task.base_url, timeout=60) as http:

            async def post(key: str, body: Any) -> int:
                content = body if isinstance(body, bytes) else json.dumps(body).encode()
                head = {"authorization": f"Bearer {key}", "content-type": "application/json"}
                return (await http.post("/reward", content=content, headers=head)).status_code

            told = {"parts": {"tidy": 0.5}, "success": True}
            assert await post(task.key, told) == 401
            bad = [b'{"parts": {"tidy": NaN}}', {"parts": {"x": 1}}]
            assert [await post(task.reward_key, each) for each in bad] == [400, 400]
            assert [await post(task.reward_key, told) for _ in range(2)] == [200, 409]
        return Ending(answer="Mara")

    row, _ = play(solve, ["yes"], rewards=["tidy"])
    assert row.steps[-1].rewards == {"think": 0.0, "tidy": 0.5, "success": 1.0, "em": 0.0, "f1": 0.0}
    assert (row.success, row.outcome, row.answer) == (1.0, Outcome.ANSWERED, "Mara")


def test_how_episodes_end(play: Callable[..., Any]) -> None:
    async def silent(task: Task) -> Ending:
        return Ending(answer="Quill")

    async def mute(task: Task) -> Ending:
        await ask(task)
        return Ending()

    async def failing(task: Task) -> Ending:
        await ask(task, tools=[SEARCH])
        return Ending(fault="exit code 3")

    row, _ = play(silent, ["yes"])
    assert (row.outcome, row.steps, row.counts) == (Outcome.ANSWERED, [], False)
    assert play(mute, ["yes"])[0].outcome is Outcome.ENDED
    row, _ = play(failing, ["<tool_call>{"])
    assert (row.outcome, row.steps[0].call_status) == (Outcome.MALFORMED, CallStatus.MALFORMED)
    with pytest.raises(ValueError, match="first 1 episodes all failed, the last with exit code 3"):
        play(failing, ["yes"])


def test_requests_of_an_episode_wait_for_each_other_unless_it_is_parallel(play: Callable[..., Any]) -> None:
    async def two(task: Task) -> Ending:
        asked = [[{"role": "user", "content": text}] for text in ("Who?", "Where?")]
        await asyncio.gather(*(ask(task, messages=messages) for messages in asked))
        return Ending(answer="x")

    row, _ = play(two, ["yes"], parallel=True)
    assert len(row.context_starts) == 2
    row, _ = play(two, ["yes"])
    assert len(row.steps) == 2


def test_an_episode_that_is_over_is_not_played_again(chat: Chat, outside: Callable[..., Any], tmp_path: Any) -> None:
    played: list[str] = []

    async def solve(task: Task) -> Ending:
        played.append(task.question_id)
        answer = await ask(task)
        if task.question_id == "b" and len(played) < 3:
            return Ending(fault="killed")
        return Ending(answer=answer.choices[0].message.content)

    questions = [replace(QUESTION, question_id=name) for name in "ab"]
    rows = []
    for _ in range(2):
        policy = Policy(chat, ["yes"])
        with outside(solve, concurrency=2) as shared, shared.journaled(tmp_path / "000.jsonl"):
            rows.append(playing.collect(policy, chat, attempts_at(questions, shared), shared, seed=3, play=PLAY))
            measured = shared.take_measures()
    assert sorted(played) == ["a", "b", "b"], "b is made again once, and nothing is played by the second stage"
    assert [each.token_ids.tolist() for each in rows[0]] == [each.token_ids.tolist() for each in rows[1]]
    assert rows[0][0].steps == rows[1][0].steps
    assert measured["agent/requests"] == 1.0


def test_a_policy_that_fails_ends_the_stage(play: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    async def stubborn(task: Task) -> Ending:
        with pytest.raises(openai.InternalServerError):
            await ask(task)
        await asyncio.sleep(60)
        return Ending()

    async def act(self: Policy, request: Request) -> Action:
        raise RuntimeError("the engine is gone")

    monkeypatch.setattr(Policy, "act", act)
    with pytest.raises(RuntimeError, match="the engine is gone"):
        play(stubborn, ["yes"])
