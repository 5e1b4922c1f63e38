"""Servers that speak OpenEnv's JSON over real sockets: an honest one, and ones that are not."""

import asyncio
import http
import json
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from websockets.asyncio.server import Response, ServerConnection, serve
from websockets.datastructures import Headers

from agent_r1.faults import WorldFault
from agent_r1.outside import openenv
from agent_r1.outside.openenv import OpenEnv, OpenEnvTools, require_openenv
from agent_r1.records import CallStatus, Outcome
from agent_r1.rollout.chat import Chat
from tests.cases import cases
from tests.outside.worlds import asked, call, collected, limits, play, shared

FIELDS = {"observation": "prompt", "action": "message", "timeout_s": 5}
SCHEMA = {
    "action": {"properties": {"message": {}, "metadata": {}}, "required": ["message"]},
    "observation": {"properties": {"prompt": {}}},
}
NAMED = {"name": "w", "reset": {"seed": 7}}
Session = Callable[[ServerConnection], Awaitable[None]]


def frame(prompt: Any = "go on", reward: Any = 0.0, done: Any = False, **more: Any) -> str:
    state = {"observation": {"prompt": prompt}, "reward": reward, "done": done}
    return json.dumps({"type": "observation", "data": state | more})


def error(code: str, message: str = "no", **more: Any) -> str:
    return json.dumps({"type": "error", "data": {"code": code, "message": message, **more}})


async def guessing(socket: ServerConnection) -> None:
    """A number is to be guessed, the seed; every guess costs a half."""
    async for text in socket:
        match json.loads(text):
            case {"type": "reset", "data": data}:
                secret = str(data["seed"])
                await socket.send(frame(f"I think of a number. {socket.request.headers.get('Authorization')}", None))
            case {"type": "step", "data": {"message": guess}} if not guess.isdecimal():
                errors = [{"msg": "not a number", "loc": ["message"]}]
                await socket.send(error("VALIDATION_ERROR", "Invalid message", errors=errors))
            case {"type": "step", "data": {"message": guess}}:
                right = guess == secret
                await socket.send(frame("no", 1.0 if right else -0.5, right))


def by_hand(*frames: Any) -> Session:
    """Sends the next frame whenever it is asked; then it closes, and where a number stands it waits so many seconds."""

    async def answer(socket: ServerConnection) -> None:
        for each in frames:
            await socket.recv()
            await (asyncio.sleep(each) if isinstance(each, int) else socket.send(each))

    return answer


@contextmanager
def serving(session: Session, schema: Any = SCHEMA, status: int = 200) -> Iterator[str]:
    """The address of a server, which runs in a thread of its own."""
    ready, loop, address = threading.Event(), asyncio.new_event_loop(), list[str]()
    body = schema if isinstance(schema, bytes) else json.dumps(schema).encode()

    def page(_: ServerConnection, request: Any) -> Response | None:
        if request.path != "/schema":
            return None
        headers = Headers({"Content-Length": str(len(body)), "Connection": "close"})
        return Response(status, http.HTTPStatus(status).phrase, headers, body)

    async def run() -> None:
        async with serve(session, "127.0.0.1", 0, process_request=page, close_timeout=5) as server:
            address.append(f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}/")
            ready.set()
            await stop.wait()

    stop = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    try:
        assert ready.wait(10)
        yield address[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()


def made(url: str, setup: Any = NAMED, seed: int = 0, max_steps: int = 4, **changes: Any) -> OpenEnv:
    declared = {"w": FIELDS | {"url": url} | changes}
    return OpenEnv(asked("openenv", setup), shared(openenv=declared, max_steps=max_steps), seed)


def required(url: str, setup: Any = NAMED, **changes: Any) -> None:
    require_openenv([asked("openenv", setup)], limits(openenv={"w": FIELDS | {"url": url} | changes}))


def test_an_episode_with_an_honest_server(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("AGENT_R1_OPENENV_KEY_W", "k3y")
    caplog.set_level(logging.DEBUG)
    with serving(guessing) as url:
        env = made(url)
        wrong, refused, right = play(env, "3", "seven", "7")
    assert env.user == "Win.\n\nI think of a number. Bearer k3y"
    logged = [record for record in caplog.records if record.name != "websockets.server"]  # which is the test's
    assert not any("k3y" in record.getMessage() for record in logged)
    assert (wrong.observations, wrong.rewards) == (("no",), {"think": 0.0, "env": -0.5})
    assert refused.observations == ("Error: Invalid message; not a number",)
    assert (refused.call_status, refused.rewards["env"]) == (CallStatus.FAILED, 0.0)
    assert (right.outcome, right.rewards) == (Outcome.ENDED, {"think": 0.0, "env": 1.0, "success": 1.0})
    assert (right.calls[0].tool, right.calls[0].arguments, right.calls[0].status) == ("move", '"7"', CallStatus.OK)


@cases("success_above, guess, outcome, success")
def test_success_is_a_matter_of_the_reward(success_above: float, guess: str, outcome: str, success: float) -> None:
    """A row without a seed is sent the episode's own. An end needs no observation, and a text need not be one."""
    with serving(guessing) as url:
        [end] = play(made(url, success_above=success_above, max_steps=1), guess)
        [own] = play(made(url, {"name": "w"}, seed=(1 << 40) + 12), "12")
    assert (end.outcome, end.rewards["success"]) == (outcome, success)
    assert own.outcome is Outcome.ENDED
    with serving(by_hand(frame({"a": 1}), frame(reward=True, done=True, observation={}))) as url:
        env = made(url)
        [last] = play(env, "7")
    assert env.user == 'Win.\n\n{"a": 1}'
    assert last.rewards == {"think": 0.0, "env": 1.0, "success": 1.0}


def spelled(sent: Any) -> Any:
    """What a case sends: an error where it has a code, else a state; texts and waits stand as they are."""
    if not isinstance(sent, dict):
        return sent
    return error(**sent) if "code" in sent else frame(**sent)


@cases("frames, message")
def test_what_a_server_does_wrong_is_named_and_the_worlds_fault(frames: list[Any], message: str) -> None:
    limit = 0.5 if frames[-1:] == [1] else 20
    fault = pytest.raises(WorldFault, match=rf"the OpenEnv server w \(http://127.*{message}")
    with serving(by_hand(*map(spelled, frames))) as url, fault:
        play(made(url, timeout_s=limit), "7", "7")


class Late(OpenEnv):
    async def _connected(self) -> Any:
        session = await super()._connected()
        await asyncio.sleep(0.2)
        return session


def test_a_server_that_says_that_it_is_full_before_it_is_asked_is_heard() -> None:
    async def full(socket: ServerConnection) -> None:
        await socket.send(error("CAPACITY_REACHED", "1/1"))

    with serving(full) as url, pytest.raises(WorldFault, match="CAPACITY_REACHED: 1/1"):
        play(Late(asked("openenv", NAMED), shared(openenv={"w": FIELDS | {"url": url}}), 0))


def test_an_episode_that_a_server_leaves_is_aborted(chat: Chat) -> None:
    """The first session ends after one step, whenever it is begun; the other episode is none the worse."""

    async def leaving(socket: ServerConnection) -> None:
        await socket.recv()
        await socket.send(frame("begun"))
        guess = json.loads(await socket.recv())["data"]["message"]
        if guess != "leave":
            await socket.send(frame(reward=1.0, done=True))

    with serving(leaving) as url:
        known = shared(openenv={"w": FIELDS | {"url": url}}, max_tokens=2000, aborted_share=0.5)
        found = collected(OpenEnv, asked("openenv", NAMED), known, chat, "leave", "stay")
    assert [(each.outcome, each.success) for each in found] == [(Outcome.ABORTED, 0.0), (Outcome.ENDED, 1.0)]


def test_a_server_that_is_not_there_is_the_worlds_fault() -> None:
    with serving(guessing) as url:
        pass
    with pytest.raises(WorldFault, match=r"OpenEnv server w .* failed in a connection: ConnectionRefusedError"):
        play(made(url))
    with pytest.raises(WorldFault, match=r"OpenEnv server w .* does not say its schema: ConnectionError"):
        required(url)
    with serving(guessing, status=503) as url, pytest.raises(WorldFault, match="schema: OSError: status 503"):
        required(url)


@cases("schema, changes, message")
def test_a_server_of_another_kind_is_refused(schema: Any, changes: dict[str, Any], message: str) -> None:
    refused = pytest.raises(ValueError, match=rf"the OpenEnv server w \(http://127.*{message}")
    with serving(guessing, schema.encode() if isinstance(schema, str) else SCHEMA | schema) as url, refused:
        required(url, **changes)
    with serving(guessing) as url:
        required(url)


@cases("setup, changes, message")
def test_rows_and_settings_that_are_refused(setup: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        required(setup=setup, **{"url": "http://127.0.0.1:1"} | changes)
    for url in ("https://a/b", "https://a/b/", "wss://a/b", "wss://a/b/ws"):  # may be that of the socket
        assert limits(openenv={"w": FIELDS | {"url": url}}).openenv["w"].url == "https://a/b"


LISTED = [
    {"name": name, "description": "", "input_schema": {"type": "object", "properties": {"word": {"type": "string"}}}}
    for name in ("guess", "fail", "break", "wait")
]
SPLITS = {"train": ["crane"], "test": ["pilot", "ghost"]}


def called(result: Any = None, reward: Any = None, done: bool = False, **error: str) -> str:
    observed = {"tool_name": "t", "result": result, "error": error or None}
    return frame(reward=reward, done=done, observation=observed)


def texts(*texts: str, is_error: bool = False) -> dict[str, Any]:
    content = [{"type": "text", "text": text, "annotations": None, "meta": None} for text in texts]
    return {"content": content, "structured_content": None, "meta": None, "data": texts, "is_error": is_error}


async def with_tools(socket: ServerConnection) -> None:
    """A word of a task set is to be guessed, as an environment with tools lets it be; a guess costs a half."""
    async for text in socket:
        match json.loads(text):
            case {"type": "reset", "data": {"split": split, "index": index}}:
                word = SPLITS[split][index]
                await socket.send(frame(len(word), None))
            case {"data": {"type": "list_tools"}}:
                await socket.send(frame(observation={"tools": LISTED}))
            case {"data": {"tool_name": "guess", "arguments": {"word": str(guess)}}}:
                right = guess == word
                await socket.send(called(texts(str(right), guess), 1.0 if right else -0.5, right))
            case {"data": {"tool_name": "guess"}}:
                await socket.send(called(texts("no word", is_error=True)))
            case {"data": {"tool_name": "fail"}}:
                await socket.send(called(error_type="execution_error", message="as asked"))
            case {"data": {"tool_name": "break"}}:
                await socket.send(called(error_type="transport_error", message="gone"))
            case {"data": {"tool_name": "wait"}}:
                await socket.send(called({"at": 1}))


def tools_at(url: str, index: int = 1, **changes: Any) -> OpenEnvTools:
    known = shared(openenv={"w": {"url": url, "timeout_s": 5} | changes}, max_steps=6, parallel_calls=2)
    made = openenv.played(asked("openenv", {"name": "w", "reset": {"split": "test", "index": index}}), known, 0)
    assert isinstance(made, OpenEnvTools)
    return made


def test_an_environment_with_tools_and_a_task_of_a_split() -> None:
    calls = [call("wait"), call("fail"), call("guess"), call("guess", word="a") * 2, call("guess", word="ghost")]
    with serving(with_tools) as url:
        env = tools_at(url)
        *replies, last = play(env, *calls)
        [lost] = play(tools_at(url), call("break"))
        first = play(tools_at(url, 0, observation="prompt", success_above=-1), call("guess", word="b"), "done")
    assert env.user == 'Win.\n\n{"prompt": 5}'
    assert [tool["function"]["name"] for tool in env.tools] == ["guess", "fail", "break", "wait"]
    told = [reply.observations for reply in replies]
    assert told == [('{"at": 1}',), ("Error: as asked",), ("Error: no word",), ("False\na", "False\na")]
    assert [reply.rewards["env"] for reply in (*replies, last)] == [0.0, 0.0, 0.0, -1.0, 1.0]
    assert (last.outcome, last.rewards["success"]) == (Outcome.ENDED, 1.0)
    assert lost.outcome is Outcome.ABORTED
    assert lost.fault.endswith("failed in a call of break: WorldFault: gone")
    assert (first[1].outcome, first[1].rewards["env"], first[1].rewards["success"]) == (Outcome.ANSWERED, 0.0, 1.0)


@cases("reply, kind, message")
def test_environments_without_tools_are_refused(reply: dict[str, Any], kind: str, message: str) -> None:
    kinds = {"ValueError": ValueError, "WorldFault": WorldFault}
    fault = pytest.raises(kinds[kind], match=rf"the OpenEnv server w \(http://127.*{message}")
    with serving(by_hand(frame("begun"), spelled(reply))) as url, fault:
        required(url, action=None, observation=None)


def test_what_an_environment_with_tools_lacks_is_named_before_a_model_is_loaded() -> None:
    setup = {"name": "w", "reset": {"split": "train", "index": 0}}
    with serving(with_tools, {"action": {"properties": {"tool_name": {}}}, "observation": {}}) as url:
        required(url, setup, action=None, observation=None)
        with pytest.raises(ValueError, match=r"its action has no field 'message'.*leave out `action`"):
            required(url, setup)
