"""The journal of an iteration: the world's answers, so that it is asked once, however often the iteration is begun.

Without it a run that is killed and started again would hear other answers and end with other bits, and the effects of a
call would happen twice. A fault that made an episode ABORTED is no answer: the call is made again.
"""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from agent_r1.records import Call, CallStatus
from agent_r1.tools.base import ToolResult

logger = logging.getLogger(__name__)


class CallPlace(NamedTuple):
    """Where in a training a call was made."""

    episode: int  # its seed, another one for every episode of a run
    step: int
    call: int  # index within the action


class JournalEntry(BaseModel):
    """A line of the journal."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    episode: int
    step: int
    call: int
    tool: str
    arguments: str
    status: CallStatus
    text: str
    titles: tuple[str, ...]
    latency_s: float

    @property
    def made(self) -> Call:
        return Call(tool=self.tool, arguments=self.arguments, status=self.status, latency_s=self.latency_s)

    @property
    def result(self) -> ToolResult:
        return ToolResult(text=self.text, titles=self.titles, call_status=self.status)


class Journal:
    """A file of JSON lines, a call each, with those of earlier processes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries = {CallPlace(entry.episode, entry.step, entry.call): entry for entry in self._read()}

    def beside(self, name: str) -> Path:
        """The file of another journal of this iteration."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        return self._path.with_suffix(f".{name}.jsonl")

    def find(self, place: CallPlace, tool: str, arguments: str) -> JournalEntry | None:
        """The entry of the same call at this place; None if it was not made, or another one."""
        entry = self._entries.get(place)
        if entry and (entry.tool, entry.arguments) != (tool, arguments):
            problem = f"holds the answer to {entry.tool}({entry.arguments}) where {tool}({arguments}) is called now"
            remedy = "which is made: the episode differs from the one before the restart"
            logger.warning("%s %s, %s", self._path, problem, remedy)
            return None
        return entry

    def add(self, place: CallPlace, call: Call, result: ToolResult) -> None:
        """Writes down the result of a call; it is in the file when this returns."""
        entry = JournalEntry(**place._asdict(), **asdict(call), text=result.text, titles=result.titles)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(entry.model_dump_json() + "\n")
        self._entries[place] = entry

    def _read(self) -> list[JournalEntry]:
        """The whole lines; one that a kill cut short is removed. Raises ValueError if another line is damaged."""
        if not self._path.exists():
            return []
        written = self._path.read_bytes()
        lines = written[: written.rfind(b"\n") + 1]
        if lines != written:
            logger.warning("%s: the last line was cut short, its call is made again", self._path)
            self._path.write_bytes(lines)
        try:
            return [JournalEntry.model_validate_json(line) for line in lines.splitlines()]
        except ValidationError as fault:
            raise ValueError(
                f"{self._path} is damaged; remove it, and the calls of its iteration are made again ({fault})"
            ) from fault
