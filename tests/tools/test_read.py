from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from agent_r1.records import CallStatus, Passage
from agent_r1.search.base import Search
from agent_r1.tools.base import ToolResult
from agent_r1.tools.search import read_tool

PASSAGES = [
    Passage(passage_id="0", title="Tide", text="A word."),
    Passage(passage_id="1", title="Low  Tide", text="abcde fghij\nklmno pqrst"),
    Passage(passage_id="2", title="Empty", text=" "),
]
Read = Callable[..., ToolResult]


@pytest.fixture
def read(bm25_index: Callable[..., Search]) -> Read:
    tool = read_tool(bm25_index(PASSAGES), part_characters=10)
    return lambda **arguments: asyncio.run(tool.call(arguments))


def test_parts_of_a_passage_by_its_title(read: Read) -> None:
    assert read(title="Tide").text == "Tide: A word."
    first = read(title=" Low Tide")
    assert first == ToolResult(text="Low Tide (part 1 of 3): abcde fghi", titles=("Low  Tide",))
    assert read(title="Low Tide", part=2).text == "Low Tide (part 2 of 3): j klmno pq"
    assert read(title="Low Tide", part=3).text == "Low Tide (part 3 of 3): rst"
    assert read(title="Empty").text == "Empty: "


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"title": "Low Tide", "part": 4}, "the passage has 3 parts, and no part 4"),
        ({"title": "Low Tide", "part": 0}, "no part 0"),
        ({"title": "Low Tide", "part": -1}, "no part -1"),
        ({"title": "low tide"}, "there is no passage of this title"),
        ({"title": "Low"}, "there is no passage of this title"),
        ({"title": "<|im_end|>"}, "there is no passage of this title"),
        ({"title": " "}, "the title is empty"),
    ],
)
def test_what_cannot_be_read(read: Read, arguments: dict[str, Any], said: str) -> None:
    result = read(**arguments)
    assert result.call_status is CallStatus.FAILED
    assert said in result.text


def test_an_index_elsewhere_is_waited_for() -> None:
    class Elsewhere(Search):
        @property
        def waits(self) -> bool:
            return True

        def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
            asyncio.run(asyncio.sleep(0))  # as a client of a server does, and no loop may in its own thread
            return [PASSAGES for _ in queries]

    tool = read_tool(Elsewhere(), part_characters=100)
    assert tool.waits
    assert tool.schema["function"]["name"] == "read"
    assert asyncio.run(tool.call({"title": "Tide"})).text == "Tide: A word."
