"""Agents whose loops are outside, for `python -m benchmarks.agents`: each keeps its history in a way of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any

import aiohttp
from openai import APIStatusError, AsyncOpenAI

from agent_r1.agents.task import Task
from agent_r1.envs.base import parse_action
from agent_r1.envs.tool_env import SYSTEM, advice
from agent_r1.params import load
from agent_r1.search.index import open_index
from agent_r1.tools.search import search_tool

Message = dict[str, Any]
Ask = Callable[..., Awaitable[Message | None]]  # None: the episode is over
Remember = Callable[[list[Message], Message, list[Message]], list[Message]]  # history, message, its results

SETTINGS = load()
INDEX = open_index(SETTINGS.search, SETTINGS.places.passages, SETTINGS.places.index)
TOOL = search_tool(INDEX, top_k=SETTINGS.env.top_k)
ILL_FORMED = {"role": "tool", "content": f"Error: {advice('', 'tagged')}"}


async def bare(task: Task) -> str | None:
    """Over HTTP alone, with one client for all episodes; sends back what it was answered."""
    return await _answered(task)


async def official(task: Task) -> str | None:
    """With the official client, one for all episodes."""
    return await _answered(task, by_client)


async def forgetful(task: Task) -> str | None:
    """Sends no thought back."""
    return await _answered(task, remember=_without_thought)


async def brief(task: Task) -> str | None:
    """Asks anew after every search, with the results so far behind the question."""
    return await _answered(task, remember=_as_notes)


async def twofold(task: Task) -> str | None:
    """Tries twice at the same time, and takes the first answer."""
    found = await asyncio.gather(*(_answered(task, seed=seed) for seed in (1, 2)))
    return next((each for each in found if each is not None), None)


async def over_http(task: Task, messages: list[Message], **further: Any) -> Message | None:
    asked = {"model": task.model, "messages": messages, "tools": [TOOL.schema], **further}
    header = {"authorization": f"Bearer {task.key}"}
    async with _http().post(f"{task.base_url}/chat/completions", json=asked, headers=header) as answer:
        found = await answer.json()
    return found["choices"][0]["message"] if answer.ok else None


async def by_client(task: Task, messages: list[Message], **further: Any) -> Message | None:
    client = _client().with_options(api_key=task.key, base_url=task.base_url)
    try:
        answer = await client.chat.completions.create(
            model=task.model,
            messages=messages,  # type: ignore[arg-type]
            tools=[TOOL.schema],  # type: ignore[list-item]
            **further,
        )
    except APIStatusError as refused:
        if refused.status_code != 400:
            raise
        return None
    return answer.choices[0].message.model_dump(exclude_none=True)


@cache
def _http() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None), connector=aiohttp.TCPConnector(limit=0))


@cache
def _client() -> AsyncOpenAI:
    return AsyncOpenAI(api_key="one for each episode", base_url="http://127.0.0.1")


def _all(history: list[Message], said: Message, results: list[Message]) -> list[Message]:
    return [*history, said, *results]


def _without_thought(history: list[Message], said: Message, results: list[Message]) -> list[Message]:
    return [*history, {name: of for name, of in said.items() if name != "reasoning_content"}, *results]


def _as_notes(history: list[Message], said: Message, results: list[Message]) -> list[Message]:
    system, user = history
    notes = [user["content"], *(each["content"] for each in results)]
    return [system, {**user, "content": "\n".join(notes)}]


async def _answered(task: Task, ask: Ask = over_http, remember: Remember = _all, **further: Any) -> str | None:
    """Searches until there is an answer, as the built-in loop does; None without one."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task.text}]
    while said := await ask(task, messages, **further):
        calls = said.get("tool_calls") or []
        answer = parse_action(said.get("content") or "").answer
        if answer is not None and not calls:
            return answer
        messages = remember(messages, said, [await _result(each) for each in calls] or [ILL_FORMED])
    return None


async def _result(call: Message) -> Message:
    asked = call["function"]
    known = asked["name"] == TOOL.name
    text = (await TOOL.call(json.loads(asked["arguments"]))).text if known else f"Error: there is only {TOOL.name}"
    return {"role": "tool", "tool_call_id": call["id"], "content": text}
