"""Agents of OpenAI's Agents SDK, by their names."""

import asyncio
import json
import os
import sys

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled
from pydantic import BaseModel


class Answer(BaseModel):
    name: str


@function_tool
def search(query: str) -> str:
    """Searches."""
    return "Mara Quill"


FIELDS = {"name": "a", "instructions": "Be brief.", "model": os.environ["OPENAI_MODEL"]}


async def responses(question: str) -> str:
    return (await Runner.run(Agent(tools=[search], **FIELDS), question)).final_output


async def responses_stream(question: str) -> str:
    result = Runner.run_streamed(Agent(tools=[search], **FIELDS), question)
    async for _ in result.stream_events():
        pass
    return result.final_output


async def chat(question: str) -> str:
    set_default_openai_api("chat_completions")
    return await responses(question)


async def typed(question: str) -> str:
    return (await Runner.run(Agent(output_type=Answer, **FIELDS), question)).final_output.name


set_tracing_disabled(True)
question = json.load(sys.stdin)["question"]["text"]
print(json.dumps({"answer": asyncio.run(globals()[sys.argv[1]](question))}))
