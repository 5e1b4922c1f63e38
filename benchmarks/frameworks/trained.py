"""Agents that `python -m benchmarks.frameworks.trainings` trains, by their frameworks' interpreters."""

import json
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

FRAMEWORKS = ("pydantic_ai.models.openai", "smolagents", "dspy", "openai", "anthropic")
for module in FRAMEWORKS:  # the episodes' processes are forked behind this
    if find_spec(module.partition(".")[0]):
        import_module(module)

PASSAGES = json.loads(Path("passages.json").read_text())
SYSTEM = "Answer the question. Search when facts are missing."
SCHEMA = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}


def search(query: str) -> str:
    """Searches the passages.

    Args:
        query: What to look for.
    """
    words = {*query.casefold().split()}
    return PASSAGES[max(PASSAGES, key=lambda title: len(words & {*title.casefold().split()}))]


def typed(task):
    from pydantic import BaseModel
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class Answer(BaseModel):
        name: str

    model = OpenAIChatModel(task.model, provider=OpenAIProvider(base_url=task.base_url, api_key=task.key))
    return Agent(model, instructions=SYSTEM, output_type=Answer, tools=[search]).run_sync(task.text).output.name


def tool_calling(task):
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    model = OpenAIServerModel(task.model, api_base=task.base_url, api_key=task.key)
    return str(ToolCallingAgent(tools=[tool(search)], model=model, verbosity_level=0).run(task.text))


def react(task):
    import dspy

    model = "openai/gpt-4o"  # dspy demands a form of models that it knows alone
    dspy.configure(lm=dspy.LM(model, api_base=task.base_url, api_key=task.key, cache=False))
    return dspy.ReAct("question -> answer", [search])(question=task.text).answer


def responses(task):
    from openai import OpenAI

    client = OpenAI(base_url=task.base_url, api_key=task.key)
    tools = [{"type": "function", "name": "search", "description": "Searches the passages.", "parameters": SCHEMA}]
    items = [{"role": "user", "content": task.text}]
    while True:
        response = client.responses.create(model=task.model, instructions=SYSTEM, input=items, tools=tools)
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text.removeprefix("<answer>").removesuffix("</answer>")
        items += response.output
        results = [(call.call_id, search(**json.loads(call.arguments))) for call in calls]
        items += [{"type": "function_call_output", "call_id": call, "output": text} for call, text in results]


def messages(task):
    from anthropic import Anthropic

    client = Anthropic(base_url=task.base_url.removesuffix("/v1"), api_key=task.key)
    tools = [{"name": "search", "description": "Searches the passages.", "input_schema": SCHEMA}]
    history = [{"role": "user", "content": task.text}]
    while True:
        fields = {"model": task.model, "max_tokens": 400, "system": SYSTEM, "tools": tools}
        content = client.messages.create(messages=history, **fields).content
        calls = [block for block in content if block.type == "tool_use"]
        if not calls:
            return content[-1].text.removeprefix("<answer>").removesuffix("</answer>")
        history.append({"role": "assistant", "content": content})
        results = [(call.id, search(**call.input)) for call in calls]
        results = [{"type": "tool_result", "tool_use_id": call, "content": text} for call, text in results]
        history.append({"role": "user", "content": results})
