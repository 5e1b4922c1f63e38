"""Agents of Anthropic's client, by their names."""

import json
import os
import sys

from anthropic import Anthropic

SCHEMA = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
FIELDS = {
    "model": "claude-sonnet-4-5",
    "max_tokens": 400,
    "system": "Be brief.",
    "tools": [{"name": "search", "description": "Searches.", "input_schema": SCHEMA}],
}
client = Anthropic(base_url=os.environ["OPENAI_BASE_URL"].removesuffix("/v1"), api_key=os.environ["OPENAI_API_KEY"])


def whole(messages):
    return client.messages.create(messages=messages, **FIELDS)


def stream(messages):
    with client.messages.stream(messages=messages, **FIELDS) as events:
        return events.get_final_message()


def thinking(messages):
    return client.messages.create(messages=messages, thinking={"type": "enabled", "budget_tokens": 1024}, **FIELDS)


def answer(question: str) -> str:
    messages = [{"role": "user", "content": question}]
    while True:
        message = globals()[sys.argv[1]](messages)
        calls = [block for block in message.content if block.type == "tool_use"]
        if not calls:
            return message.content[-1].text
        messages.append({"role": "assistant", "content": message.content})
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": "Mara Quill"} for call in calls]
        messages.append({"role": "user", "content": results})


print(json.dumps({"answer": answer(json.load(sys.stdin)["question"]["text"])}))
