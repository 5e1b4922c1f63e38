"""Agents of instructor, by the modes of its client."""

import json
import os
import sys

import instructor
from anthropic import Anthropic
from openai import OpenAI
from pydantic import BaseModel


class Answer(BaseModel):
    name: str


URL = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")


def calls():
    return instructor.from_openai(OpenAI())


def schema():
    return instructor.from_openai(OpenAI(), mode=instructor.Mode.JSON_SCHEMA)


def anthropic():
    return instructor.from_anthropic(Anthropic(base_url=URL, api_key=os.environ["OPENAI_API_KEY"]))


question = json.load(sys.stdin)["question"]["text"]
messages = [{"role": "user", "content": question}]
fields = {"max_tokens": 200} if sys.argv[1] == "anthropic" else {}
client = globals()[sys.argv[1]]()
answer = client.create(model="gpt-5", response_model=Answer, messages=messages, max_retries=2, **fields)
print(json.dumps({"answer": answer.name}))
