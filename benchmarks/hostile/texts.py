"""What a policy writes and reads: actions that are hardly any, and texts that would be tokens of the template."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from agent_r1.envs.base import parse_action, split_action
from agent_r1.envs.tool_env import ToolEnv, canonical
from agent_r1.learn.builtin import train_tokenizer
from agent_r1.records import CallStatus, Passage, Question
from agent_r1.rollout.chat import Chat, Dialogue
from agent_r1.rollout.codec import SAMPLE_TOOL
from agent_r1.search.base import Search
from agent_r1.tools.search import search_tool
from benchmarks.hostile.kind import Kind, Refused, require
from benchmarks.hostile.mutations import MARKS, TAGS, as_json, mutated, odd_text, odd_value

_TEMPLATES = Path(__file__).parents[2] / "tests" / "rollout" / "templates"
_CALL = {"name": "search", "arguments": {"query": "Who directed Kiss?"}}
_MANY = (3, 100, 20_000)  # tags
_QUESTION = Question(
    question_id="q", dataset="own", split="test", text="Who?", answers=["Mara"], gold_titles=["Kiss"],
    strata={"hops": "1", "kind": "x"},
)  # fmt: skip


class Echo(Search):
    """Finds a passage of what it is asked."""

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        return [[Passage(passage_id="0", title=query, text=query)] for query in queries]


class Actions(Kind):
    """Texts of actions: whatever they are, the environment answers them."""

    name, tried = "actions", 4000

    def make(self, rng: Random) -> str:
        honest = f"<think>Hm.</think><tool_call>{as_json(_CALL, rng)}</tool_call>"
        match rng.randrange(8):
            case 0:
                return f"<answer>{odd_text(rng)}</answer>".encode(errors="replace").decode()
            case 1:
                return rng.choice(TAGS) * rng.choice(_MANY) + rng.choice((honest, "x"))
            case 2:
                return "".join(rng.choice((*TAGS, " ", "x", honest)) for _ in range(rng.choice((6, 2000))))
            case 3:
                at = rng.randrange(len(honest))
                return honest[:at] + rng.choice(TAGS) + honest[at:]
        made = odd_value(rng) if rng.random() < 0.1 else mutated(_CALL, rng, rng.choice((1, 2)))
        return f"{rng.choice(('', '<think>Hm.</think>'))}<tool_call>{as_json(made, rng)}</tool_call>".encode(
            errors="replace"
        ).decode()

    def judge(self, made: str) -> None:
        require("".join(piece.text for piece in split_action(made)) == made, "the pieces of an action are not its text")
        parsed = parse_action(made)
        for call in parsed.calls:
            kept = json.loads(canonical(call.arguments), parse_constant=_no_json)
            require(kept == call.arguments, "arguments are kept as others")
        step = asyncio.run(ToolEnv(_QUESTION, [search_tool(Echo(), top_k=1)], max_steps=2).step(made))
        called = [[call.tool, call.arguments] for call in step.calls]
        said = json.dumps([called, step.answer, step.observations], ensure_ascii=False)
        require(said == said.encode(errors="replace").decode(), "half of a character, which no table can keep")
        require(step.observations or step.answer == parsed.answer, "the answer is another one")
        if step.call_status not in (CallStatus.OK, CallStatus.NONE):
            raise Refused(step.observations[0])


class Conversation(NamedTuple):
    """All texts of a dialogue."""

    template: str
    texts: tuple[str, str, str]  # system, user, observation
    tool: dict[str, Any]


class Chats(Kind):
    """Texts with marks of templates in system message, question, observation and schema of a tool."""

    name, tried = "chats", 800

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        tokenizer = train_tokenizer([], 384)
        tokenizer.add_special_tokens({"additional_special_tokens": [*MARKS], "bos_token": "<s>"})
        self._added = tokenizer.added_tokens_decoder
        built_in = str(tokenizer.chat_template)
        self._chats = {}
        for name, template in {"built_in": built_in, **_templates()}.items():
            tokenizer.chat_template = template
            self._chats[name] = Chat(tokenizer)  # reads the template at once, and renders with it from then on

    def make(self, rng: Random) -> Conversation:
        def attack() -> str:
            odd = [odd_text(rng)[:2000] if rng.random() < 0.3 else rng.choice((*MARKS, *TAGS)) for _ in range(4)]
            mark = rng.choice(MARKS)
            cut = rng.randrange(len(mark))
            return "".join([*odd, mark[:cut], rng.choice((mark, "\0", "\U0010ff00", "\u200b", "")), mark[cut:]])

        schema = json.loads(json.dumps(SAMPLE_TOOL).replace("word", attack_key(rng)).replace("Looks", "ATTACK"))
        schema["function"]["description"] = attack()
        schema["function"]["parameters"]["properties"] |= {attack(): {"type": "string", "enum": [attack()]}}
        return Conversation(rng.choice([*self._chats]), (attack(), attack(), attack()), schema)

    def judge(self, made: Conversation) -> None:
        attacked = self._marks(made)
        harmless = self._marks(made._replace(texts=("a", "b", "c"), tool=_harmless(made.tool)))
        require(attacked == harmless, "a text became a token of the template")

    def names(self, made: Conversation) -> tuple[str, ...]:
        return ("template", "character")

    def _marks(self, given: Conversation) -> list[list[int]]:
        """The added tokens of the contexts of a conversation."""
        chat = self._chats[given.template]
        system, user, observation = given.texts
        dialogue = Dialogue(chat, system, user, [given.tool])
        reply = dialogue.reply(chat.encode_action("x", dialogue.opening.ids), [observation], closed=True)
        return [[index for index in ids if index in self._added] for ids in (dialogue.opening.ids, reply.ids)]


def attack_key(rng: Random) -> str:
    """A name for a parameter that is a mark."""
    return rng.choice((*MARKS, *TAGS, "word"))


def _harmless(schema: Any) -> Any:
    """The schema with other texts in place of what was put into it."""
    made = json.loads(json.dumps(SAMPLE_TOOL))
    made["function"]["parameters"]["properties"] |= {"b": {"type": "string", "enum": ["c"]}}
    return made


def _templates() -> dict[str, str]:
    return {path.stem: path.read_text() for path in sorted(_TEMPLATES.glob("*.jinja"))}


def _no_json(constant: str) -> None:
    require(False, f"{constant} is kept as JSON")
