"""A policy served without episodes, over real HTTP."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest

from agent_r1.agents.gateway import MODEL, Unhurried
from agent_r1.http.endpoint import ENDPOINT_KEY
from agent_r1.http.guard import Unsignalled, configured
from agent_r1.params import SHIPPED, load
from agent_r1.params.agents import AgentParams
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.sampling import Action, EngineError, EngineUnavailable, Request
from agent_r1.serving import policy_server
from agent_r1.serving.policy_server import Conversations, declared_as
from tests.agents.conftest import Policy
from tests.agents.test_session import CALL, SEARCH
from tests.fixtures import FreePort

LIMITS = load(SHIPPED).env.model_copy(update={"max_tokens": 400, "max_steps": 1})
AGENT = AgentParams(function="mine:solve", timeout_s=60.0)
ANSWER = "<answer>Quill</answer>"
QUESTION = {"role": "user", "content": "Who?"}


def asking(
    chat: Chat,
    use: Callable[[openai.AsyncOpenAI, Conversations], Awaitable[None]],
    act: Callable[[Request], Awaitable[Action]],
    port: int,
) -> Conversations:
    conversations = Conversations(chat, LIMITS, AGENT, act)

    async def run() -> None:
        app = conversations.app()
        server = Unsignalled(configured(app, "127.0.0.1", port, Unhurried(opens=app.opens)))
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="k", max_retries=0)
        try:
            await use(client, conversations)
        finally:
            server.should_exit = True
            await serving

    asyncio.run(run())
    return conversations


async def ask(client: openai.AsyncOpenAI, *messages: Any, **fields: Any) -> Any:
    completion = await client.chat.completions.create(model=MODEL, messages=messages, tools=[SEARCH], **fields)
    return completion.choices[0].message


def test_history_is_read_as_it_was_sampled_beyond_steps_of_training(chat: Chat, free_port: FreePort) -> None:
    policy = Policy(chat, [CALL, CALL, ANSWER])

    async def use(client: openai.AsyncOpenAI, _: Conversations) -> None:
        history: list[Any] = [QUESTION]
        for _ in range(2):
            message = await ask(client, *history)
            [call] = message.tool_calls
            history += [message, {"role": "tool", "tool_call_id": call.id, "content": "Low Tide is by Quill."}]
        assert (await ask(client, *history)).content == ANSWER
        assert [model.id async for model in client.models.list()] == [MODEL]

    asking(chat, use, policy.act, free_port())
    for (first, action), (second, _) in zip(policy.log, policy.log[1:], strict=False):
        context = [*first.context, *action.token_ids]
        assert second.context[: len(context)] == context


def test_old_and_long_conversations_restart(chat: Chat, free_port: FreePort, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_server, "MOST_CONVERSATIONS", 2)
    monkeypatch.setattr(policy_server, "MOST_ACTIONS", 2)

    async def use(client: openai.AsyncOpenAI, conversations: Conversations) -> None:
        for text in "abc":
            message = await ask(client, {"role": "user", "content": text})
        assert len(conversations._episodes) == 2
        assert message.tool_calls
        for _ in range(2):
            await ask(client, {"role": "user", "content": "c"})
        assert [len(episode.session.drawn) for episode in conversations._episodes.values()] == [1, 1]

    asking(chat, use, Policy(chat, [CALL]).act, free_port())


@pytest.mark.parametrize(("fault", "ends"), [(EngineError("it is gone"), True), (EngineUnavailable("later"), False)])
def test_engine_that_fails_for_good_ends_server(chat: Chat, free_port: FreePort, fault: Exception, ends: bool) -> None:
    async def act(_: Request) -> Action:
        raise fault

    async def use(client: openai.AsyncOpenAI, _: Conversations) -> None:
        with pytest.raises(openai.InternalServerError) as refused:
            await ask(client, QUESTION)
        assert refused.value.status_code == 503

    assert asking(chat, use, act, free_port()).broken is (fault if ends else None)


def test_web_pages_and_keyless_are_refused(chat: Chat, free_port: FreePort, monkeypatch: pytest.MonkeyPatch) -> None:
    async def page(client: openai.AsyncOpenAI, _: Conversations) -> None:
        with pytest.raises(openai.PermissionDeniedError, match="not for web pages"):
            await ask(client, QUESTION, extra_headers={"origin": "http://evil.example"})

    async def stranger(client: openai.AsyncOpenAI, _: Conversations) -> None:
        with pytest.raises(openai.AuthenticationError):
            await ask(client, QUESTION)
        assert (await ask(client.with_options(api_key="s3cret"), QUESTION)).content == ANSWER

    asking(chat, page, Policy(chat, [ANSWER]).act, free_port())
    monkeypatch.setenv(ENDPOINT_KEY, "s3cret")
    asking(chat, stranger, Policy(chat, [ANSWER]).act, free_port())


def test_declaration_is_named_one_or_that_of_training() -> None:
    other = AGENT.model_copy(update={"history": "sent"})
    env = LIMITS.model_copy(update={"agents": {"mine": AGENT, "other": other}})
    assert declared_as("other", env) is other
    assert declared_as(None, env.model_copy(update={"agent": "mine"})) is AGENT
    with pytest.raises(ValueError, match="declares no 'othr'; did you mean 'other'"):
        declared_as("othr", env)
    with pytest.raises(ValueError, match=r"name one of env\.agents with --agent"):
        declared_as(None, LIMITS)
