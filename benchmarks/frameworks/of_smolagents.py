"""Agents of smolagents, by their names."""

import contextlib
import json
import os
import sys

from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool


@tool
def search(query: str) -> str:
    """Searches.

    Args:
        query: What to look for.
    """
    return "Mara Quill"


KINDS = {"calls": ToolCallingAgent, "code": CodeAgent}
url = os.environ["OPENAI_BASE_URL"]
model = OpenAIServerModel(os.environ["OPENAI_MODEL"], api_base=url, api_key=os.environ["OPENAI_API_KEY"])
with contextlib.redirect_stdout(sys.stderr):
    answer = KINDS[sys.argv[1]](tools=[search], model=model).run(json.load(sys.stdin)["question"]["text"])
print(json.dumps({"answer": str(answer)}))
