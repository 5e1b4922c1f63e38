"""Agents of LangChain, by their names."""

import json
import os
import sys

from langchain.agents import create_agent
from langchain.tools import tool
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Answer(BaseModel):
    name: str


@tool
def search(query: str) -> str:
    """Searches."""
    return "Mara Quill"


MODEL = os.environ["OPENAI_MODEL"]


def answer(model, question: str) -> str:
    messages = {"messages": [{"role": "user", "content": question}]}
    return create_agent(model, tools=[search], system_prompt="Be brief.").invoke(messages)["messages"][-1].text


def chat(question: str) -> str:
    return answer(ChatOpenAI(model=MODEL, temperature=0), question)


def responses(question: str) -> str:
    return answer(ChatOpenAI(model=MODEL, use_responses_api=True), question)


def anthropic(question: str) -> str:
    url = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
    return answer(ChatAnthropic(model="claude-x", base_url=url, api_key=os.environ["OPENAI_API_KEY"]), question)


def typed(question: str) -> str:
    return ChatOpenAI(model=MODEL).with_structured_output(Answer).invoke(question).name


def typed_call(question: str) -> str:
    return ChatOpenAI(model=MODEL).with_structured_output(Answer, method="function_calling").invoke(question).name


print(json.dumps({"answer": globals()[sys.argv[1]](json.load(sys.stdin)["question"]["text"])}))
