"""Agents of OpenAI's client, by their names."""

import json
import os
import sys

from openai import OpenAI
from pydantic import BaseModel

SCHEMA = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
CHAT_TOOL = {"type": "function", "function": {"name": "search", "description": "Searches.", "parameters": SCHEMA}}
TOOL = {"type": "function", "name": "search", "description": "Searches.", "parameters": SCHEMA}
MODEL = os.environ["OPENAI_MODEL"]
client = OpenAI()


class Answer(BaseModel):
    name: str


def chat(question: str) -> str:
    messages = [{"role": "user", "content": question}]
    while True:
        message = client.chat.completions.create(model=MODEL, messages=messages, tools=[CHAT_TOOL]).choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message)
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "Mara Quill"} for call in message.tool_calls]


def chat_stream(question: str) -> str:
    messages = [{"role": "user", "content": question}]
    while True:
        with client.chat.completions.stream(model=MODEL, messages=messages, tools=[CHAT_TOOL]) as stream:
            message = stream.get_final_completion().choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message.model_dump(exclude_none=True, exclude={"parsed": True}))
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "Mara Quill"} for call in message.tool_calls]


def chat_typed(question: str) -> str:
    messages = [{"role": "user", "content": question}]
    answer = client.chat.completions.parse(model=MODEL, messages=messages, response_format=Answer)
    return answer.choices[0].message.parsed.name


def responses(question: str) -> str:
    items = [{"role": "user", "content": question}]
    while True:
        response = client.responses.create(model=MODEL, input=items, tools=[TOOL])
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        items += response.output
        items += [{"type": "function_call_output", "call_id": call.call_id, "output": "Mara Quill"} for call in calls]


def responses_stored(question: str) -> str:
    """Streamed, each behind the response before."""
    items = question
    previous = None
    while True:
        fields = {"model": MODEL, "input": items, "tools": [TOOL], "previous_response_id": previous}
        with client.responses.stream(**fields) as stream:
            response = stream.get_final_response()
        previous = response.id
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        items = [{"type": "function_call_output", "call_id": call.call_id, "output": "Mara Quill"} for call in calls]


def responses_typed(question: str) -> str:
    return client.responses.parse(model=MODEL, input=question, text_format=Answer).output_parsed.name


print(json.dumps({"answer": globals()[sys.argv[1]](json.load(sys.stdin)["question"]["text"])}))
