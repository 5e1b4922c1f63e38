"""Agents of pydantic-ai, by their names."""

import json
import os
import sys

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider


class Answer(BaseModel):
    name: str


MODEL = os.environ["OPENAI_MODEL"]
URL = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")


def answer(model, question: str, **fields):
    agent = Agent(model, instructions="Be brief.", **fields)
    if not fields:

        @agent.tool_plain
        def search(query: str) -> str:
            """Searches."""
            return "Mara Quill"

    return agent.run_sync(question).output


def chat(question: str) -> str:
    return answer(OpenAIChatModel(MODEL), question)


def responses(question: str) -> str:
    return answer(OpenAIResponsesModel(MODEL), question)


def anthropic(question: str) -> str:
    provider = AnthropicProvider(api_key=os.environ["OPENAI_API_KEY"], base_url=URL)
    return answer(AnthropicModel("claude-sonnet-4-5", provider=provider), question)


def typed(question: str) -> str:
    return answer(OpenAIChatModel(MODEL), question, output_type=Answer).name


def typed_responses(question: str) -> str:
    return answer(OpenAIResponsesModel(MODEL), question, output_type=Answer).name


def native(question: str) -> str:
    return answer(OpenAIChatModel("gpt-5"), question, output_type=NativeOutput(Answer)).name


def prompted(question: str) -> str:
    return answer(OpenAIChatModel(MODEL), question, output_type=PromptedOutput(Answer)).name


print(json.dumps({"answer": globals()[sys.argv[1]](json.load(sys.stdin)["question"]["text"])}))
