"""What the real chat templates of families do: `python -m benchmarks.templates FOLDER [--store]`.

FOLDER holds them as NAME.jinja, by the names of TRL's package (`trl/chat_templates` of its wheel, 1.16 here); that of
OLMo 3 is in TRL's repository, SmolLM3's in llama.cpp's. A tokenizer of a few hundred words gets the marks that a
template writes. A row says what a run makes of it: how it takes tools, whether a policy's calls are in Hermes'
form or one of its own, whether thinking can be turned off, and whether an earlier message is ever rewritten, after
which a step begins a new context.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from agent_r1.learn import builtin
from agent_r1.learn.model import load_tokenizer
from agent_r1.rollout.chat import Chat
from benchmarks.stored import Row, options, show

TEMPLATES = {
    "Qwen2.5": "qwen2_5",
    "Qwen3, Qwen3-MoE": "qwen3",
    "Qwen3.5": "qwen3_5_nothink",
    "Qwen3.5-MoE": "qwen3_5_think",
    "Gemma 3": "gemma3",
    "Gemma 4": "gemma4_v5",
    "LFM2": "lfm2_v2",
    "OLMo 3": "olmo3",
    "gpt-oss": "gptoss",
    "SmolLM3": "smollm3",
    "Llama 3": "llama3_2",
}
MARK = re.compile(r"<\|[a-z_]+\|?>|<[a-z_]+\|>|<(?:start|end)_of_turn>|</?think>|</?tool_call>|</?tool_response>")


def chat_of(template: str, folder: Path, arguments: Mapping[str, Any]) -> Chat:
    """The chat of a template with arguments, as a run opens it."""
    tokenizer = builtin.train_tokenizer(["a question and an answer"], 400)
    known = tokenizer.get_vocab()
    marks = [mark for mark in dict.fromkeys(MARK.findall(template)) if mark not in known]
    tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    tokenizer.add_special_tokens({"bos_token": "<|bos|>"})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return Chat(load_tokenizer(folder, template=arguments))


def measure(family: str, name: str, template: str) -> Row:
    cells = dict.fromkeys(("tools", "calls", "history", "thinking off"), "refused")
    with tempfile.TemporaryDirectory() as scratch:
        try:
            chat = chat_of(template, Path(scratch), {})
            cells["tools"] = "its own" if chat.template.dialect.tools else "in words"
            cells["calls"] = "its own" if chat.calls else "Hermes"
            cells["history"] = "rewritten" if chat.rewrites else "appended"
            off = chat_of(template, Path(scratch), {"enable_thinking": False})
            cells["thinking off"] = "rewritten" if off.rewrites else "appended"
        except ValueError as refusal:
            print(f"{family}: {refusal}", file=sys.stderr)
            if cells["history"] != "refused" and "enable_thinking" in str(refusal):
                cells["thinking off"] = "-"
    return {"family": family, "template": name, **cells}


def main() -> None:
    parser = options("Measures what the real chat templates of families do.")
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    files = {family: given.folder / f"{name}.jinja" for family, name in TEMPLATES.items()}
    rows = [measure(family, file.stem, file.read_text()) for family, file in files.items() if file.exists()]
    show("templates", rows, store=given.store)


if __name__ == "__main__":
    main()
