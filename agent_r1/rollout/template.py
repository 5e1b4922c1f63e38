"""A tokenizer's chat template as it is found: messages that it cannot render are put in another way, or refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import groupby
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

Message = tuple[str, str]  # role (system, user, assistant or tool) and content
Tools = Sequence[dict[str, Any]]  # JSON schemas in the OpenAI function form

logger = logging.getLogger(__name__)

# Placeholders for the texts of a conversation: no template writes them, changes them or strips them.
SYSTEM, USER, ACTION, OBSERVATION = "\u2063SYSTEM\u2063", "\u2063USER\u2063", "\u2063ACTION\u2063", "\u2063TOOL\u2063"
TODAY = datetime(2024, 7, 26)  # for templates that write the date: with the true one no run could be repeated
OPENING: list[Message] = [("system", SYSTEM), ("user", USER)]
SAMPLE: list[Message] = [*OPENING, ("assistant", ACTION), ("tool", OBSERVATION)]
SAMPLE_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
TOOLS_TEXT = """

# Tools

You may call one of these functions at a time:
<tools>
{schemas}
</tools>

To call one, write
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialect:
    """The kinds of messages that a template renders by itself; others are put into messages that it knows."""

    system: bool = True  # else the system text opens the user message
    tools: bool = True  # else their schemas end the system text
    observations: bool = True  # role "tool"; else those of an action are a user message in <tool_response> tags

    def put(self, messages: Sequence[Message], tools: Tools) -> tuple[list[Message], Tools]:
        """A conversation, which opens with a system and a user message, as the template can take it."""
        (_, system), (_, user), *rest = messages
        if tools and not self.tools:
            schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
            system, tools = system + TOOLS_TEXT.format(schemas=schemas), ()
        opening = [("system", system), ("user", user)] if self.system else [("user", f"{system}\n\n{user}")]
        return [*opening, *(rest if self.observations else self._as_users(rest))], tools

    def _as_users(self, messages: Sequence[Message]) -> Iterator[Message]:
        for role, some in groupby(messages, key=lambda message: message[0]):
            if role == "tool":
                yield "user", "\n".join(f"<tool_response>\n{content}\n</tool_response>" for _, content in some)
            else:
                yield from some


class Template:
    """Renders conversations with a tokenizer's own chat template.

    A ValueError refuses one that leaves out or refuses what it is given in whatever way it is put.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        if not tokenizer.chat_template:
            raise ValueError(
                f"the tokenizer {tokenizer.name_or_path!r} has no chat template; use an instruct model, or set "
                "`chat_template` on the tokenizer and save it again"
            )
        self._tokenizer = tokenizer
        self.dialect = Dialect()  # then what a template may lack is tried, one after the other
        self.dialect = replace(self.dialect, system=self._shows(OPENING, (), SYSTEM))
        self.dialect = replace(self.dialect, tools=self._shows(OPENING, [SAMPLE_TOOL], "look_up"))
        self.dialect = replace(self.dialect, observations=self._shows(SAMPLE, (), OBSERVATION))
        if self.dialect != Dialect():
            logger.info("the chat template does not render everything by itself: %s", self.dialect)
        self.after_action = self._after_action()

    def render(self, messages: Sequence[Message], tools: Tools = (), *, generation_prompt: bool = True) -> str:
        """A conversation as text, up to where the assistant's next message begins; a ValueError where it is refused."""
        try:
            return self._render(messages, tools, generation_prompt=generation_prompt)
        except TemplateError as error:
            raise ValueError(
                f"the chat template refuses a conversation of {', '.join(role for role, _ in messages)}: {error}; "
                "use a model whose template takes user and assistant messages in turn"
            ) from error

    def _render(self, messages: Sequence[Message], tools: Tools, *, generation_prompt: bool = True) -> str:
        put, tools = self.dialect.put(messages, tools)
        text = self._tokenizer.apply_chat_template(
            [{"role": role, "content": content} for role, content in put],
            tools=list(tools) or None,
            tokenize=False,
            add_generation_prompt=generation_prompt,
            strftime_now=TODAY.strftime,
        )
        return str(text)

    def _shows(self, messages: Sequence[Message], tools: Tools, text: str) -> bool:
        try:
            return text in self._render(messages, tools)
        except TemplateError:
            return False

    def _after_action(self) -> str:
        """The template's text between an action and the next one, with OBSERVATION in it."""
        prompt = self.render(OPENING, [SAMPLE_TOOL])
        whole = self.render(SAMPLE, [SAMPLE_TOOL])
        for text, where in ((SYSTEM, prompt), (USER, prompt), (ACTION, whole), (OBSERVATION, whole)):
            if where.count(text) != 1:
                raise ValueError(
                    f"the chat template writes the text {text.strip(chr(0x2063))!r} {where.count(text)} times; "
                    "use a template that renders every message once"
                )
        before, _, after = whole.partition(ACTION)
        self._check_generation_prompt(prompt, before)
        return after

    def _check_generation_prompt(self, prompt: str, before: str) -> None:
        """Compares what the policy is given to go on from with what stands before its text once it is history."""
        missing = before.removeprefix(prompt) if before.startswith(prompt) else ""
        unchanged = prompt == self.render(OPENING, [SAMPLE_TOOL], generation_prompt=False)
        if missing.strip() or (unchanged and not before.startswith(prompt)):
            raise ValueError(
                f"the chat template has no generation prompt: it writes {(missing or before)[-40:]!r} before the "
                f"assistant's text, and a prompt ends with {prompt[-40:]!r}; use a template that honours "
                "add_generation_prompt"
            )
