"""Forms of tool calls, found by templates in the styles of real model families: written, read and refused."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from agent_r1.envs.base import ParsedCall, hermes, parse_action
from agent_r1.rollout.calls import CallForm, form_of, is_hermes, leniently, types_of
from tests.cases import cases

Render = Callable[[Sequence[ParsedCall]], str | None]
CALLS = [ParsedCall("find", {"what": "the tide", "most": 3}), ParsedCall("stop", {"now": True})]
BARE = ParsedCall("stop", {})


def _objects(begin: str, end: str, shape: str, between: str = "\n") -> Render:
    """A template that writes arguments as JSON."""

    def render(calls: Sequence[ParsedCall]) -> str:
        said = [
            shape.replace("NAME", call.tool).replace("ARGS", json.dumps(call.arguments, ensure_ascii=False))
            for call in calls
        ]
        return begin + between.join(said) + end

    return render


def _keyed(begin: str, argument: str, end: str, around: tuple[str, str] = ("", "")) -> Render:
    """A template that writes arguments one by one."""

    def spell(key: str, value: Any) -> str:
        kind, said = ("true", value) if isinstance(value, str) else ("false", json.dumps(value))
        return argument.replace("KEY", key).replace("KIND", kind).replace("VALUE", said)

    def render(calls: Sequence[ParsedCall]) -> str:
        said = (
            begin.replace("NAME", tool) + "".join(spell(*each) for each in given.items()) + end for tool, given in calls
        )
        return around[0] + "\n".join(said) + around[1]

    return render


TEMPLATES = {
    "llama": _objects("", "", '{"name": "NAME", "parameters": ARGS}', between="; "),
    "list": _objects("[TOOL_CALLS][", "]", '{"name": "NAME", "arguments": ARGS, "id": "call00001"}', between=", "),
    "named": _objects("", "", "[TOOL_CALLS]NAME[GIVEN]ARGS", between=""),
    "numbered": _objects("<|calls|>", "<|end|>", "<|call|>functions.NAME:0<|args|>ARGS<|called|>", between=""),
    "fenced": _objects("<calls>", "</calls>", "function<sep>NAME\n```json\nARGS\n```"),
    "tags": _keyed(
        "<tool_call>\n<function=NAME>\n", "<parameter=KEY>\nVALUE\n</parameter>\n", "</function>\n</tool_call>"
    ),
    "pairs": _keyed("<tool_call>NAME", "<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>", "</tool_call>"),
    "lines": _keyed('<invoke name="NAME">\n', '<p name="KEY">VALUE</p>', "\n</invoke>"),
    "typed": _keyed(
        '<invoke name="NAME">\n', '<p name="KEY" text="KIND">VALUE</p>\n', "</invoke>", ("<all>\n", "\n</all>")
    ),
}


def form(style: str) -> CallForm:
    return form_of([TEMPLATES[style]])


@pytest.mark.parametrize("style", TEMPLATES)
@pytest.mark.parametrize(
    "calls",
    [CALLS[:1], CALLS, [BARE], [BARE, *CALLS, BARE], [ParsedCall("a.b-c", {"what": 'say "<answer>" é\n{x}'})]],
    ids=["one", "two", "no arguments", "some without arguments", "text"],
)
def test_a_form_writes_as_its_template_and_reads_what_it_writes(style: str, calls: list[ParsedCall]) -> None:
    written = form(style).write(calls)
    assert written == TEMPLATES[style](calls)
    said = form(style).read(f"<think>so</think>{written}", {})
    assert said == f"<think>so</think>{hermes(calls)}"
    assert form(style).native(said) == f"<think>so</think>{written}"


def test_blanks_numbers_and_ids_may_be_others() -> None:
    read = hermes([ParsedCall("find", {"what": "x"})])
    assert form("llama").read('{"name":"find","parameters":{"what":"x"}}', {}) == read
    assert form("list").read('[TOOL_CALLS] [{"name": "find", "arguments": {"what": "x"}, "id": "9"}]', {}) == read
    numbered = '<|calls|><|call|>functions.find:12<|args|>{"what": "x"}<|called|><|end|>'
    assert form("numbered").read(numbered, {}) == read
    assert (
        form("tags").read("<tool_call><function=find><parameter=what>x</parameter></function></tool_call>", {}) == read
    )


def test_the_schema_decides_whether_a_value_is_text() -> None:
    said = form("pairs").write([ParsedCall("find", {"what": "2020", "most": 3})])
    schema = {"type": "object", "properties": {"what": {"type": "string"}, "most": {"type": "integer"}}}
    types = types_of([{"type": "function", "function": {"name": "find", "parameters": schema}}])
    assert form("pairs").read(said, types) == hermes([ParsedCall("find", {"what": "2020", "most": 3})])
    for untold in ({}, {"find": {"what": True, "most": True}}):  # of a property nothing but that it may be there
        assert form("pairs").read(said, untold) == hermes([ParsedCall("find", {"what": 2020, "most": 3})])
    assert form("tags").read(form("tags").write([ParsedCall("find", {"on": "True"})]), {}) == hermes(
        [ParsedCall("find", {"on": True})]
    ), "as Python writes it"


@cases("style, text")
def test_a_call_that_is_not_well_formed_stays_text(style: str, text: str) -> None:
    assert form(style).read(text, {}) == text


def test_hermes_is_known_and_no_form_is_made_up() -> None:
    lines = _objects("", "", '<tool_call>\n{"name": "NAME", "arguments": ARGS}\n</tool_call>')
    found = form_of([lines])
    assert is_hermes(found)
    assert form_of([lambda _: None]) is None
    assert form_of([lambda calls: f"to={calls[0].tool}"]) is None, "a call without its arguments"
    upper = _keyed("<NAME>", "<KEY>VALUE</other>", "")
    assert form_of([lambda calls: str(upper(calls)).upper()]) is None, "a name that cannot be read back"
    python = _keyed("[NAME(", "KEY='VALUE', ", ")]")
    assert form_of([lambda calls: str(python(calls)).replace("\n", "\\n")]) is None, "text that cannot be read back"


@cases("action, arguments")
def test_calls_as_small_models_write_them_are_read(action: str, arguments: str) -> None:
    read = parse_action(leniently(action, {"look"}), 2)
    assert read.calls == tuple(ParsedCall("look", spelled) for spelled in json.loads(arguments))
    assert not parse_action(action, 2).calls


@cases("action")
def test_an_action_that_is_no_call_is_left_as_it_is(action: str) -> None:
    assert leniently(action, {"look"}) == action
