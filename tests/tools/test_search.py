import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from agent_r1.records import CallStatus, Passage
from agent_r1.search.base import Search
from agent_r1.tools.base import ToolResult
from agent_r1.tools.search import read_tool, search_tool
from tests.cases import cases


class Recorded(Search):
    def __init__(self) -> None:
        self.asked: list[tuple[list[str], int]] = []
        self.threads: set[str] = set()

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        self.asked.append((list(queries), k))
        self.threads.add(threading.current_thread().name)
        return [[Passage(passage_id=str(i), title=f"T{i}", text=f"a\nb {i}") for i in range(k)]]

    def read(self, title: str) -> list[Passage]:
        [found] = self.search([title], 8)
        return [each for each in found if each.title == title]


class Elsewhere(Recorded):
    """Answers once so many queries have come, by however many to a request."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.complete = threading.Condition()

    @property
    def waits(self) -> bool:
        return True

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        with self.complete:
            results = [super(Elsewhere, self).search([query], k)[0] for query in queries]
            self.complete.notify_all()
            assert self.complete.wait_for(lambda: len(self.asked) == self.count, timeout=60)
        return results


def test_search_shows_passages_and_keeps_their_titles() -> None:
    index = Recorded()
    tool = search_tool(index, top_k=2)
    assert tool.schema["function"]["parameters"]["properties"] == {"query": {"type": "string"}}
    assert not tool.waits
    found = asyncio.run(tool.call({"query": "x y"}))
    assert found == ToolResult(text="T0: a b 0\nT1: a b 1", titles=("T0", "T1"))
    assert index.asked == [(["x y"], 2)]
    assert threading.current_thread().name not in index.threads, "the loop goes on meanwhile"
    empty = asyncio.run(tool.call({"query": " \n"}))
    assert empty == ToolResult(text="the query is empty", call_status=CallStatus.FAILED)


def test_a_search_that_waits_holds_nobody_up() -> None:
    index = Elsewhere(count=64)

    async def ask_all(tool_threads: ThreadPoolExecutor) -> list[ToolResult]:
        tool = search_tool(index, top_k=1, threads=tool_threads)
        assert tool.schema == search_tool(Recorded(), top_k=1).schema
        reading = read_tool(index, part_characters=9)
        assert (tool.waits, reading.waits, reading.schema["function"]["name"]) == (True, True, "read")
        return await asyncio.gather(*(tool.call({"query": str(i)}) for i in range(64)))

    with ThreadPoolExecutor(64) as threads:
        found = asyncio.run(ask_all(threads))
    assert found == [ToolResult(text="T0: a b 0", titles=("T0",))] * 64
    assert sorted(query for [query], _ in index.asked) == sorted(map(str, range(64)))
    assert threading.current_thread().name not in index.threads
    assert asyncio.run(read_tool(Elsewhere(1), part_characters=9).call({"title": "T7"})).text == "T7: a b 7"


PASSAGES = [
    Passage(passage_id="0", title="Tide", text="A word."),
    Passage(passage_id="1", title="Low  Tide", text="abcde fghij\nklmno pqrst"),
    Passage(passage_id="2", title="Empty", text=" "),
    *(Passage(passage_id=f"c{i}", title="The", text=f"the tide {i} ") for i in range(30)),  # chunks of a common word
    Passage(passage_id="3", title="Low Tide", text="uvw"),
]
Read = Callable[..., ToolResult]


@pytest.fixture
def read(bm25_index: Callable[..., Search]) -> Read:
    tool = read_tool(bm25_index(PASSAGES), part_characters=10)
    return lambda **arguments: asyncio.run(tool.call(arguments))


def test_parts_of_a_passage_by_its_title(read: Read) -> None:
    """All passages of a title, in their order, also where a search would find others first."""
    assert read(title="Tide").text == "Tide: A word."
    first = read(title=" Low Tide")
    assert first == ToolResult(text="Low Tide (part 1 of 3): abcde fghi", titles=("Low  Tide",))
    assert read(title="Low Tide", part=2).text == "Low Tide (part 2 of 3): j klmno pq"
    assert read(title="Low Tide", part=3).text == "Low Tide (part 3 of 3): rst uvw"
    assert read(title="Empty").text == "Empty: "
    text = " ".join(f"the tide {i}" for i in range(30))
    parts = [read(title="The", part=part + 1).text.partition(": ")[2] for part in range(-(-len(text) // 10))]
    assert "".join(parts) == text


@cases("arguments, said")
def test_what_cannot_be_read(read: Read, arguments: dict[str, Any], said: str) -> None:
    result = read(**arguments)
    assert result.call_status is CallStatus.FAILED
    assert said in result.text
