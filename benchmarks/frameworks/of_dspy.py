"""Programs of dspy, by their names."""

import json
import os
import sys

import dspy


def search(query: str) -> str:
    """Searches."""
    return "Mara Quill"


PROGRAMS = {
    "predict": lambda: dspy.Predict("question -> answer"),
    "react": lambda: dspy.ReAct("question -> answer", [search]),
}
ADAPTERS = {"predict": dspy.JSONAdapter, "react": dspy.ChatAdapter}
url = os.environ["OPENAI_BASE_URL"]
model = dspy.LM(f"openai/{os.environ['OPENAI_MODEL']}", api_base=url, api_key=os.environ["OPENAI_API_KEY"], cache=False)
dspy.configure(lm=model, adapter=ADAPTERS[sys.argv[1]]())
answer = PROGRAMS[sys.argv[1]]()(question=json.load(sys.stdin)["question"]["text"]).answer
print(json.dumps({"answer": answer}))
