"""TRL's documented environment classes, played as they are: `python -m benchmarks.peers.worlds PAGE ...`.

A page is Markdown, such as docs/source/grpo_trainer.md and openenv.md in TRL's repository. Of its Python blocks, each
class with a `reset` is declared under `env.toolbox` and played: every tool is called once, and the episode is answered.
An object that takes anything stands in for a name that is nowhere defined, such as a client that is not installed.
Prints what became of each, and whether its tools are described as transformers describes them to TRL's models.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import builtins
import json
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import DocstringParsingException

from agent_r1.envs.shared import Shared
from agent_r1.evaluation.comparison import markdown_table
from agent_r1.outside.toolbox_env import ToolboxEnv, require_toolbox
from agent_r1.params import SHIPPED, load
from agent_r1.params.env import EnvParams
from agent_r1.params.sections import override, validated
from agent_r1.records import Question

BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
VALUES: dict[str, Any] = {"string": "a", "integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}
TARGET = {"target": 1}  # the column of the documentation's data set


def documented(page: str) -> Iterator[tuple[str, ModuleType]]:
    """The classes of a page, each by its name in a module of its own."""
    for block in BLOCK.findall(page):
        try:
            tree = ast.parse(block)
        except SyntaxError:
            continue  # a fragment
        defined = [node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
        for node in defined:
            if isinstance(node, ast.ClassDef) and "reset" in {getattr(each, "name", "") for each in node.body}:
                yield node.name, _module(f"documented_{len(sys.modules)}", tree, node)


def _module(name: str, tree: ast.Module, kind: ast.ClassDef) -> ModuleType:
    module = ModuleType(name)
    names = {each.id for each in ast.walk(kind) if isinstance(each, ast.Name)} - set(dir(builtins))
    vars(module).update((each, MagicMock()) for each in names)
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom) and names & {each.name for each in node.names}:
            package = getattr(node, "module", node.names[0].name).partition(".")[0]
            if find_spec(package):
                exec(compile(ast.Module([node], []), name, "exec"), vars(module))
    exec(compile(ast.Module([kind], []), name, "exec"), vars(module))
    sys.modules[name] = module
    return module


def play(name: str, module: ModuleType) -> list[str]:
    """A row of the table: the class, its tools with their calls' statuses, the reward, the descriptions."""
    declared = {"toolbox": {"it": {"class": f"{module.__name__}:{name}"}}, "max_steps": 20}
    limits = validated(EnvParams, override(load(SHIPPED).env.model_dump(), declared), "env")
    fields = {"text": "Do it.", "dataset": "trl", "split": "train", "env": "toolbox", "strata": {}, "answers": ["done"]}
    question = Question(question_id=name, setup=json.dumps({"name": "it", "row": TARGET}), **fields)
    require_toolbox([question], limits)
    statuses, end, env = asyncio.run(_played(question, limits))
    try:
        theirs = [get_json_schema(getattr(env._box, tool["function"]["name"])) for tool in env.tools]
        alike = "yes" if list(map(_described, env.tools)) == list(map(_described, theirs)) else "no"
    except DocstringParsingException:  # such as a class that is printed without its `Args:`
        alike = "transformers refuses it"
    return [
        name,
        ", ".join(statuses),
        json.dumps({each: end[each] for each in ("env", "success") if each in end}),
        alike,
    ]


async def _played(question: Question, limits: EnvParams) -> tuple[list[str], dict[str, float], ToolboxEnv]:
    env, statuses = ToolboxEnv(question, Shared(limits), 0), []
    await env.open()
    for tool in env.tools:
        called, given = tool["function"]["name"], tool["function"]["parameters"]["properties"]
        arguments = {each: VALUES[about["type"]] for each, about in given.items()}
        reply = await env.step(f"<tool_call>{json.dumps({'name': called, 'arguments': arguments})}</tool_call>")
        statuses.append(f"{called} {reply.call_status.value}")
    return statuses, (await env.step("<answer>done</answer>")).rewards, env


def _described(tool: dict[str, Any]) -> Any:
    """The part of a schema that says the same in both: names, and words on one line."""
    about = tool["function"]
    given = {name: " ".join(each["description"].split()) for name, each in about["parameters"]["properties"].items()}
    return about["name"], given, about["parameters"].get("required", [])


def main() -> None:
    parser = argparse.ArgumentParser(description="TRL's documented environment classes, played as they are.")
    parser.add_argument("pages", nargs="+", type=Path)
    found = [each for page in parser.parse_args().pages for each in documented(page.read_text())]
    print(markdown_table(["class", "calls", "reward", "described alike"], [play(*each) for each in found]))


if __name__ == "__main__":
    main()
