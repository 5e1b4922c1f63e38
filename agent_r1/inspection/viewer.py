"""One HTML file that shows trajectories and needs nothing else: no network, no server, no other file."""

from __future__ import annotations

import base64
import enum
import gzip
import hashlib
import html
import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from agent_r1.answers import exact_match
from agent_r1.inspection.payload import Payload
from agent_r1.records import Credit, Question, Trajectory
from agent_r1.seeds import derive

Decode = Callable[[Sequence[int]], str]  # token ids -> text, special tokens included, nothing cleaned up


class When(enum.StrEnum):
    """When in the life of a policy it acted."""

    BEFORE = "before"  # the untrained policy, on a test question
    TRAINING = "training"
    AFTER = "after"  # the trained policy, on a test question


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """One trajectory of the page."""

    when: When
    question: Question
    trajectory: Trajectory
    totals: NDArray[np.float64]  # [K] the step's reward, weighted
    parts: Mapping[str, NDArray[np.float64]]  # name -> [K], unweighted
    credit: Credit | None = None  # None outside of training
    learner_logprobs: NDArray[np.float32] | None = None  # [L] nats; None where the learner was not asked

    @property
    def right(self) -> bool:
        """Whether the answer is an exact match."""
        return bool(exact_match(self.trajectory.answer, self.question.answers))


T = TypeVar("T")

PER_ITERATION = 5


def spread(count: int, at_most: int) -> list[int]:
    """At most so many of `range(count)`, the first and the last among them, evenly apart."""
    if count <= at_most:
        return list(range(count))
    if at_most < 2:
        return [count - 1][:at_most]
    return [round(place * (count - 1) / (at_most - 1)) for place in range(at_most)]


def quotas(iterations: int, count: int, recurring: int) -> list[int]:
    """How many trajectories each of the iterations gives to a page of `count`.

    The first and the last give up to a quarter each for questions that occur in both; the rest is shared evenly.
    """
    if not iterations:
        return []
    extra = min(recurring, count // 4) if iterations > 1 else 0
    share, left = divmod(count - 2 * extra, iterations)
    even = [share + (place < left) for place in range(iterations)]
    return [each + extra * (place in (0, iterations - 1)) for place, each in enumerate(even)]


def from_iteration(
    trajectories: Sequence[Trajectory], count: int, *, recurring: Collection[str], proved: Collection[str], seed: int
) -> list[Trajectory]:
    """The trajectories of one iteration that a page shows.

    First those of questions that recur in another iteration, each question once before any twice and in an order that
    is the same in both; then those whose logprobs the learner has confirmed; otherwise in a random order.

    Args:
        trajectories: of the iteration.
        count: how many at most.
        recurring: ids of the questions that recur.
        proved: ids of the trajectories that the learner was asked about.
        seed: of the order.
    """

    def rank(trajectory: Trajectory) -> tuple[int, int, int]:
        if trajectory.question_id in recurring:
            return 0, trajectory.sample, derive(seed, trajectory.question_id)
        return 1, trajectory.trajectory_id not in proved, derive(seed, trajectory.trajectory_id)

    return sorted(trajectories, key=rank)[:count]


def pairs(before: Sequence[Shown], after: Sequence[Shown], count: int, *, seed: int) -> list[list[Shown]]:
    """Answers of two policies to the same question: as many of every kind of change as there are, in turns.

    The kinds are wrong then right, right then wrong, wrong twice, right twice; within a kind the order is random.
    """
    earlier = {shown.question.question_id: shown for shown in before}
    both = [[earlier[later.question.question_id], later] for later in after if later.question.question_id in earlier]
    both.sort(key=lambda pair: derive(seed, pair[1].question.question_id))
    kinds = [[False, True], [True, False], [False, False], [True, True]]
    return interleaved([[pair for pair in both if [shown.right for shown in pair] == kind] for kind in kinds])[:count]


def interleaved(rows: Sequence[Sequence[T]]) -> list[T]:
    """The first of every row, then the second of every row, and so on."""
    longest = max(map(len, rows), default=0)
    return [row[place] for place in range(longest) for row in rows if place < len(row)]


LARGEST_PAGE = 5_000_000  # bytes
SCRIPTS = ("model.js", "tokens.js", "reading.js", "app.js")

logger = logging.getLogger(__name__)


def page(title: str, about: Mapping[str, Any], groups: Sequence[Sequence[Shown]], decode: Decode) -> str:
    """The page of some trajectories.

    Args:
        title: of the page.
        about: what its script is told besides: `facts`, pairs of a label and a text; `weights`, name -> weight of the
            reward's parts; `notes`, sentences about what is shown.
        groups: trajectories that belong together, the most important groups first. The last ones are left out where the
            page would be larger than LARGEST_PAGE bytes, and a note says how many trajectories are there.
        decode: gives the text of token ids.
    """
    payload = Payload(decode)
    for group in groups:
        payload.add(group)
    text = _page(title, payload.content({"title": title, **about}, len(groups)))
    count = len(groups)
    while (size := len(text.encode())) > LARGEST_PAGE and count > 1:
        count = max(1, int(0.95 * count * LARGEST_PAGE / size))
        cut = _left_out(payload.episodes(count), payload.episodes(len(groups)))
        text = _page(title, payload.content({"title": title, **about, "notes": [*about["notes"], cut]}, count))
    if count < len(groups):
        logger.warning("%s", cut)
    return text


def _left_out(shown: int, wanted: int) -> str:
    return (
        f"{shown} of {wanted} trajectories are shown; the rest would make the page larger than "
        f"{LARGEST_PAGE / 1e6:.0f} MB."
    )


def _page(title: str, content: Mapping[str, Any]) -> str:
    script, style = "\n".join(map(_file, SCRIPTS)), _file("viewer.css")
    filled = {
        "TITLE": html.escape(title),
        "SCRIPT_HASH": _csp_hash(script),
        "STYLE_HASH": _csp_hash(style),
        "STYLE": style,
        "DATA": packed(content),
        "SCRIPT": script,
    }
    parts = _file("viewer.html").split("@@")  # text, name, text, name, ..., text
    return "".join(filled[part] if place % 2 else part for place, part in enumerate(parts))


def packed(content: Mapping[str, Any]) -> str:
    """JSON, compressed, in letters, digits and +/=, none of which can end the block that they stand in."""
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _file(name: str) -> str:
    return files("agent_r1.inspection").joinpath(name).read_text(encoding="utf-8")


def _csp_hash(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
