"""An agent behind its endpoint, over real HTTP on loopback: as OpenAI's own client asks it, and as nobody should."""

import asyncio
import re
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from uvicorn import Server

from agent_r1.envs.shared import Shared
from agent_r1.faults import WorldFault
from agent_r1.http.endpoint import ENDPOINT_KEY
from agent_r1.http.guard import configured
from agent_r1.params import SHIPPED, load
from agent_r1.records import Passage
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.sampling import Action, EngineError, Request
from agent_r1.search.base import Search
from agent_r1.seeds import derive
from agent_r1.serving import served as app
from agent_r1.serving.agent import Agent
from agent_r1.serving.served import Lasting, Service, serve
from tests.cases import cases, tables
from tests.fixtures import FreePort

LIMITS = load(SHIPPED).env.model_copy(update={"max_tokens": 400, "max_action_tokens": 100, "max_steps": 3})
CALL = '<think>First.</think><tool_call>{"name": "search", "arguments": {"query": "it"}}</tool_call>'
PATIENCE_S = 60.0


def asked(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


ASKED = {"model": "ppo", **asked("Who?")}
SYSTEM = {"role": "system", "content": "Be brief."}
FRAMEWORKS = tables(Path(__file__).parent)["frameworks"]
Bits = tuple[tuple[int, ...], tuple[int, ...]]


class Film(Search):
    """Finds the same for everything, and is down after so many searches."""

    def __init__(self, searches: int = 1000) -> None:
        self._left = searches

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        self._left -= 1
        if self._left < 0:
            raise WorldFault("the index is down")
        return [[Passage(passage_id="0", title="Low Tide", text="by Mara Quill")]] * len(queries)


class Policy:
    """Searches, and then answers with what only this very context gives; notes the tokens of each action."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self.sampled: set[Bits] = set()
        self.ended = threading.Event()  # somebody who waited for an action is gone
        self.go_on = threading.Event()  # to a second action
        self.go_on.set()

    def sample(self, requests: Sequence[Request]) -> list[Action]:
        return [self._answer(request) for request in requests]

    async def act(self, request: Request) -> Action:
        try:
            await asyncio.sleep(0)
            while request.step and not self.go_on.is_set():
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.ended.set()
            raise
        return self._answer(request)

    def _answer(self, request: Request) -> Action:
        text = f"<answer>{derive(*request.context)}</answer>" if request.step else CALL
        ids = self._chat.encode_action(text, request.context)[: request.max_tokens]
        self.sampled.add((tuple(request.context), tuple(ids)))
        return Action.of(ids, [-0.5] * len(ids), self._chat.end_ids)


@contextmanager
def serving(agent: Agent, port: int) -> Iterator[str]:
    app = Service(agent, "ppo").app()
    server = Server(configured(app, "127.0.0.1", port, Lasting(opens=app.opens)))
    agent.shared.tools(0)
    thread = threading.Thread(target=agent.shared.run, args=(server.serve(),))
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture
def policy(chat: Chat) -> Policy:
    return Policy(chat)


@pytest.fixture
def agent(chat: Chat, policy: Policy) -> Iterator[Agent]:
    with Shared(LIMITS, Film()) as shared:  # type: ignore[arg-type]
        yield Agent(policy, chat, shared)


@pytest.fixture
def url(agent: Agent, free_port: FreePort) -> Iterator[str]:
    with serving(agent, free_port()) as address:
        yield address


@pytest.fixture
def openai() -> ModuleType:
    """Its client. To import it takes a second, for which no other process of the suite is to wait."""
    import openai

    return openai


def client(url: str) -> Any:
    from openai import OpenAI

    return OpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE_S)


def ask(url: str, content: Any = "Who?", **more: Any) -> Any:
    return client(url).chat.completions.create(model="ppo", messages=[{"role": "user", "content": content}], **more)


def test_concurrent_clients_get_tokens_of_one_alone(url: str, chat: Chat, policy: Policy, openai: ModuleType) -> None:
    questions = [f"Who is number {number}?" for number in range(64)]

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE_S) as asking:
            answering = [asking.chat.completions.create(model="ppo", **asked(text)) for text in questions]
            return [str(completion.choices[0].message.content) for completion in await asyncio.gather(*answering)]

    answers = asyncio.run(ask_all())
    alone = Policy(chat)
    with Shared(LIMITS, Film()) as shared:  # type: ignore[arg-type]
        expected = [[*Agent(alone, chat, shared).ask(text, seed=0)][-1].answer for text in questions]
    assert answers == expected
    assert len(set(answers)) == 64
    assert policy.sampled == alone.sampled
    assert len(alone.sampled) == 128


def test_openai_client_reads_answer(url: str) -> None:
    [model] = client(url).models.list().data
    assert (model.id, model) == ("ppo", client(url).models.retrieve("ppo"))
    reply = ask(url)
    [choice] = reply.choices
    assert (choice.finish_reason, choice.message.role) == ("stop", "assistant")
    assert str(choice.message.content).isdigit()
    thought = choice.message.model_extra["reasoning_content"]  # type: ignore[index]
    assert thought == f"{CALL}\nLow Tide: by Mara Quill\n\n"
    assert reply.usage.prompt_tokens + reply.usage.completion_tokens == reply.usage.total_tokens
    steps = reply.model_extra["agent_r1"]["steps"]  # type: ignore[index]
    assert (len(steps), steps[0]["action"]) == (2, CALL)


@pytest.mark.parametrize("body", FRAMEWORKS.values(), ids=FRAMEWORKS)
def test_frameworks_get_answers_at_their_defaults(url: str, body: dict[str, Any]) -> None:
    reply = httpx.post(f"{url}/chat/completions", json=ASKED | body, timeout=PATIENCE_S)
    assert re.search('"finish_reason": ?"stop"', reply.text), reply.text


def test_token_limit_cuts_answer(url: str, chat: Chat) -> None:
    """The first action fits, and three tokens of the second: the tag and two of the answer's letters."""
    full, first = ask(url), len(chat.encode_action(CALL))
    reply = ask(url, max_tokens=first + 3)
    assert (reply.choices[0].finish_reason, reply.usage.completion_tokens) == ("length", first + 3)
    assert reply.choices[0].message.content == full.choices[0].message.content[:2]
    assert reply.choices[0].message.reasoning_content == full.choices[0].message.reasoning_content
    for most in (1, first):
        cut = ask(url, max_tokens=most)
        assert cut.usage.prompt_tokens == full.agent_r1["steps"][0]["step"]["action_start"]
        assert (cut.choices[0].message.content, cut.usage.completion_tokens) == ("", most)
        assert len(cut.agent_r1["steps"]) == 1
    assert ask(url, max_tokens=full.usage.completion_tokens).choices[0].finish_reason == "stop"


def test_stop_sequence_cuts_answer(url: str) -> None:
    full = ask(url).choices[0].message.content
    assert ask(url, stop=["never", full[5:7]]).choices[0].message.content == full.partition(full[5:7])[0]
    assert ask(url, stop=full[3:]).choices[0].message.content == full.partition(full[3:])[0]


def test_system_message_stands_before_question_and_answer_says_so(url: str, policy: Policy, chat: Chat) -> None:
    complete = client(url).chat.completions.create
    reply = complete(model="ppo", messages=[SYSTEM, *ASKED["messages"]])
    streamed = [*complete(model="ppo", messages=[SYSTEM, *ASKED["messages"]], stream=True)]
    assert "system_fingerprint" not in ask(url).model_fields_set
    read = {chat.decode(context).count("Be brief.\n\nWho?") for context, _ in policy.sampled}
    assert read == {0, 1}
    remark = "system message put before the question"
    assert {chunk.system_fingerprint for chunk in (reply, *streamed)} == {remark}


def test_tools_of_a_client_change_nothing_and_it_is_said(url: str) -> None:
    """Open WebUI offers its own with each question."""
    tool: Any = {"type": "function", "function": {"name": "get_current_timestamp", "parameters": {"type": "object"}}}
    reply = ask(url, tools=[tool], tool_choice="auto")
    assert reply.system_fingerprint == "tools of the client not called"
    assert reply.choices[0].message.content == ask(url).choices[0].message.content


@pytest.mark.parametrize("answer", [[], [{"role": "assistant", "content": None}]])
def test_question_without_answer_is_left_out(url: str, policy: Policy, chat: Chat, answer: list[Any]) -> None:
    """Open WebUI keeps no empty answer."""
    messages = [*ASKED["messages"], *answer, *asked("And where?")["messages"]]
    client(url).chat.completions.create(model="ppo", messages=messages)
    assert not [context for context, _ in policy.sampled if "Who?" in chat.decode(context)]


def conversation(url: str, *questions: str, system: bool = False) -> list[str]:
    """The answers of a chat loop, which sends all that was said before with each question."""
    messages, answers = [SYSTEM] * system, list[str]()
    for question in questions:
        messages.append({"role": "user", "content": question})
        reply = client(url).chat.completions.create(model="ppo", messages=messages)
        answers.append(reply.choices[0].message.content)
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


def test_second_question_stands_behind_first_exchange(url: str, policy: Policy, chat: Chat) -> None:
    """The prompt is what `env.examples` would make of that exchange."""
    first, second = conversation(url, "Who?", "And where?", system=True)
    assert first != second
    [prompt] = {
        chat.decode(context)
        for context, _ in policy.sampled
        if "And where?" in chat.decode(context) and CALL not in chat.decode(context)
    }
    places = [prompt.index(text) for text in ("user\nWho?", f"<answer>{first}</answer>", "Be brief.\n\nAnd where?")]
    assert places == sorted(places)


def test_long_conversation_keeps_its_last_exchanges(url: str, policy: Policy, chat: Chat) -> None:
    """A quarter of 400 tokens holds some, and the agent acts in the rest."""
    questions = [f"Who is number {number}?" for number in range(12)]
    answers = conversation(url, *questions)
    assert len(set(answers)) == 12
    last = next(text for context, _ in policy.sampled if questions[-1] in (text := chat.decode(context)))
    read = [question in last for question in questions]
    assert 1 < sum(read) < 12
    assert read == sorted(read)


def test_stream_sends_steps_as_they_are_taken(url: str, policy: Policy) -> None:
    """The first is here before the second action is sampled, which would wait for ever."""
    policy.go_on.clear()
    text = [{"type": "text", "text": "Who?"}]
    stream = ask(url, text, stream=True, stream_options={"include_usage": True})
    first = next(stream)
    assert first.model_extra["agent_r1"]["observations"] == ["Low Tide: by Mara Quill"]  # type: ignore[index]
    assert first.choices[0].delta.content is None
    policy.go_on.set()
    last, used = stream
    assert str(last.choices[0].delta.content).isdigit()
    assert last.choices[0].finish_reason == "stop"
    assert used.usage.total_tokens == last.model_extra["agent_r1"]["tokens"]  # type: ignore[index]


def test_streams_of_responses_and_messages_send_steps_as_they_are_taken(url: str, policy: Policy) -> None:
    """Each client has read the first step before the second action is sampled, and the answer in the end."""
    from anthropic import Anthropic

    policy.go_on.clear()
    with client(url).responses.stream(model="ppo", input="Who?") as of_responses:
        step = next(event.delta for event in of_responses if event.type == "response.reasoning_summary_text.delta")
        policy.go_on.set()
        response = of_responses.get_final_response()
    assert "Low Tide: by Mara Quill" in step
    assert response.output_text.isdigit()
    assert response.output[0].summary[0].text.startswith(step)
    policy.go_on.clear()
    other = Anthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0, timeout=PATIENCE_S)
    messages = [{"role": "user", "content": "Who?"}]
    with other.messages.stream(model="ppo", max_tokens=300, messages=messages) as of_messages:  # type: ignore[arg-type]
        assert next(event.thinking for event in of_messages if event.type == "thinking") == step
        policy.go_on.set()
        message = of_messages.get_final_message()
    assert message.content[-1].text == response.output_text  # type: ignore[union-attr]
    used = response.usage
    assert (message.usage.input_tokens, message.usage.output_tokens) == (used.input_tokens, used.output_tokens)


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_leaves_ends_episode(url: str, policy: Policy, stream: bool) -> None:
    policy.go_on.clear()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/chat/completions", json=ASKED | {"stream": stream}, timeout=httpx.Timeout(60, read=1))
    assert policy.ended.wait(PATIENCE_S)


@cases("changes, status, message")
def test_unsupported_field_is_refused_by_name(url: str, changes: dict[str, Any], status: int, message: str) -> None:
    for stream in (False, True):
        reply = httpx.post(f"{url}/chat/completions", json=ASKED | changes | {"stream": stream}, timeout=PATIENCE_S)
        error = reply.json()["error"]
        assert (reply.status_code, message in error["message"]) == (status, True), reply.text
        assert error["param"] == next(iter(changes))


def test_unknown_address_names_known_ones(url: str, openai: ModuleType) -> None:
    with pytest.raises(openai.NotFoundError, match="there is no model 'org/gpt' here, only 'ppo'"):
        client(url).models.retrieve("org/gpt")
    for path, status in (("completions", 404), ("chat/completions", 405)):
        reply = httpx.get(f"{url}/{path}", timeout=60)
        assert (reply.status_code, "ask GET /v1/models or POST /v1/chat/comp" in reply.text) == (status, True)


def test_question_longer_than_context_gets_openai_code(url: str, openai: ModuleType) -> None:
    with pytest.raises(openai.BadRequestError, match=r"has \d+ tokens with .* is 400") as refused:
        ask(url, "word " * 1000)
    assert refused.value.code == "context_length_exceeded"


@cases("headers, body, status")
def test_foreign_requests_are_refused(url: str, headers: dict[str, str], body: str, status: int) -> None:
    sent = {"content-type": "application/json", **headers}
    assert httpx.post(f"{url}/chat/completions", content=body, headers=sent, timeout=60).status_code == status


def test_server_with_key_refuses_clients_without_it(
    agent: Agent, free_port: FreePort, monkeypatch: pytest.MonkeyPatch, openai: ModuleType
) -> None:
    monkeypatch.setenv(ENDPOINT_KEY, "s3cret")
    with serving(agent, free_port()) as url:
        with pytest.raises(openai.AuthenticationError, match="not this server's; send it"):
            client(url).models.list()
        assert client(url).with_options(api_key="s3cret").models.list().data


def test_fault_of_world_or_engine_is_named(
    chat: Chat, policy: Policy, free_port: FreePort, monkeypatch: pytest.MonkeyPatch, openai: ModuleType
) -> None:
    with Shared(LIMITS, Film(0)) as shared, serving(Agent(policy, chat, shared), free_port()) as url:  # type: ignore[arg-type]
        with pytest.raises(openai.InternalServerError, match="agent's tools ask is down; come again"):
            ask(url)
        policy._answer = broken  # type: ignore[method-assign]
        with pytest.raises(openai.InternalServerError, match="the agent failed to answer; come again"):
            ask(url, stream=True)
        monkeypatch.setattr(app, "MAX_EPISODES", 0)
        with pytest.raises(openai.RateLimitError, match="come again"):
            ask(url)


def test_engine_that_fails_for_good_ends_server(agent: Agent, policy: Policy, free_port: FreePort) -> None:
    policy._answer = broken  # type: ignore[method-assign]
    url = f"http://127.0.0.1:{(port := free_port())}/v1/chat/completions"

    def ask_until_it_is_up() -> int:
        while True:
            try:
                return httpx.post(url, json=ASKED, timeout=PATIENCE_S).status_code
            except httpx.ConnectError:
                time.sleep(0.05)

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask_until_it_is_up)
        with pytest.raises(EngineError, match="secret words"):
            serve(agent, "ppo", host="127.0.0.1", port=port)
        assert answer.result() == 503


def broken(_: Request) -> Action:
    raise EngineError("secret words")


def test_fault_within_stream_is_sent(chat: Chat, policy: Policy, free_port: FreePort, openai: ModuleType) -> None:
    ids = chat.encode_action(CALL)
    policy._answer = lambda _: Action.of(ids, [-0.5] * len(ids), chat.end_ids)  # type: ignore[method-assign]
    with Shared(LIMITS, Film(1)) as shared, serving(Agent(policy, chat, shared), free_port()) as url:  # type: ignore[arg-type]
        stream = ask(url, stream=True)
        assert next(stream).model_extra["agent_r1"]["observations"]
        with pytest.raises(openai.APIError, match="agent's tools ask is down; come again"):
            next(stream)
