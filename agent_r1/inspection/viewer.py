"""The viewer's page: one HTML file of trajectories that needs no network, server or other file."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import logging
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from itertools import accumulate, chain, groupby, islice
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from agent_r1 import tracking
from agent_r1.envs.base import split_action
from agent_r1.evaluation.comparison import latest_folder
from agent_r1.evaluation.scores import BASE_TOOL_CALL
from agent_r1.files import sha256, write_text
from agent_r1.inspection.health import FailureKind, audit
from agent_r1.inspection.stored import ImportedRun, PageTrajectory, Selection, StoredRun, When, open_run
from agent_r1.params import Params, load
from agent_r1.params.places import RunId
from agent_r1.params.train import TrainParams
from agent_r1.records import QA, Decode, Floats, Floats32, Json, Mask, Question, StopReason, questions_by_id, words_of
from agent_r1.tables import read_rows
from agent_r1.tracking import registry

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # the text of bytes that are no whole character
LONGEST = 8  # tokens of one character at most
DIGITS = 3
FIRST_LETTER = ord("]")  # JSON escapes neither this letter nor any after it
SURROGATES = range(0xD800, 0xE000)  # are no letters

T = TypeVar("T", bound=Hashable)
Number = float | int | None
Numbers = NDArray[np.floating[Any]]


class Alphabet(dict[T, int], Generic[T]):
    """Numbers values in the order of their first use. A letter stands for each number."""

    def spell(self, values: Iterable[T]) -> str:
        """Spells values with a letter each. A new value is added."""
        codes = [FIRST_LETTER + self.setdefault(value, len(self)) for value in values]
        return "".join(chr(code if code < SURROGATES.start else code + len(SURROGATES)) for code in codes)


class Payload:
    """Collects the trajectories of a page."""

    def __init__(self, decode: Decode) -> None:
        self._pieces = Pieces(decode)
        self._tokens: Alphabet[tuple[int, str]] = Alphabet()  # id and text
        self._numbers: Alphabet[Number] = Alphabet()
        self._questions: dict[str, Json] = {}  # by id
        self._episodes: list[Json] = []

    def add(self, entry: PageTrajectory) -> None:
        """Adds a trajectory, and its question if it is new."""
        question = entry.question
        self._questions[question.question_id] = {
            "id": question.question_id,
            "dataset": question.dataset,
            "text": question.text,
            "answers": question.answers,
            "strata": question.strata,
            "drawn": question.env != QA,  # a world may draw its state with characters, one below the other
            "words": words_of([question]),
        }
        self._episodes.append(self._episode(entry))

    def content(self, about: Mapping[str, Any]) -> Json:
        """The page's data: `about`, and all that was added."""
        return {
            **about,
            "tokens": list(self._tokens),
            "numbers": list(self._numbers),
            "questions": list(self._questions.values()),
            "episodes": self._episodes,
        }

    def _episode(self, entry: PageTrajectory) -> Json:
        trajectory = entry.trajectory
        ids = trajectory.token_ids.tolist()
        pieces = [text for context in trajectory.contexts for text in self._pieces.of(ids[context])]
        sampled = trajectory.action_mask
        credit = entry.credit
        choices = {"kept": credit.kept, "loss": run_lengths(credit.loss_mask.astype(int).tolist())} if credit else {}
        return {
            "id": trajectory.trajectory_id,
            "question": list(self._questions).index(entry.question.question_id),
            "when": entry.when,
            "iteration": trajectory.iteration,
            "version": trajectory.policy_version,
            "outcome": trajectory.outcome,
            "answer": trajectory.answer,
            "right": None if trajectory.aborted else bool(trajectory.success),
            "return": None if trajectory.aborted else _number(float(entry.totals.sum())),
            "contexts": trajectory.context_starts,
            "tokens": self._tokens.spell(zip(ids, pieces, strict=True)),
            "source": run_lengths(trajectory.source.tolist()),
            "steps": _steps(entry, pieces),
            **choices,
            **{name: self._spelled(numbers, sampled) for name, numbers in _numbers(entry).items()},
        }

    def _spelled(self, numbers: Numbers, sampled: Mask) -> str:
        """Spells the numbers [L] of the sampled tokens; of all tokens if another one has a number too."""
        chosen_numbers = numbers if numbers[~sampled].any() else numbers[sampled]
        return self._numbers.spell(map(_number, chosen_numbers.tolist()))


def _steps(entry: PageTrajectory, pieces: Sequence[str]) -> list[Json]:
    trajectory = entry.trajectory
    return [
        {
            "start": step.action_start,
            "action_stop": step.action_stop,
            "stop": reply.stop,
            "parts": action_parts(
                pieces[step.action_start : step.action_stop], ended=step.stop_reason is StopReason.END
            ),
            "stopped": step.stop_reason,
            "calls": [
                {"tool": call.tool, "status": call.status, "latency_ms": _number(1e3 * call.latency_s)}
                for call in step.calls
            ],
            "rewards": {name: _number(part[place]) for name, part in entry.parts.items() if part[place]},
            "reward": _number(entry.totals[place]),
        }
        for place, (step, reply) in enumerate(zip(trajectory.steps, trajectory.replies, strict=True))
    ]


def _numbers(entry: PageTrajectory) -> dict[str, Numbers]:
    """The known numbers [L] of the tokens. Gap and drift are the sampler's logprobs minus another model's."""
    numbers: dict[str, Numbers] = {"logprobs": entry.trajectory.logprobs}
    if entry.learner_logprobs is not None:
        numbers["gap"] = _distance(entry, entry.learner_logprobs)
    credit = entry.credit
    if credit is not None:
        numbers["advantages"] = credit.advantages
        if credit.values.any():
            numbers |= {"values": credit.values, "targets": credit.value_targets}
        if credit.reference_logprobs.any():
            numbers["drift"] = _distance(entry, credit.reference_logprobs)
    return numbers


def _distance(entry: PageTrajectory, logprobs: Floats32) -> Floats:
    """The sampler's logprobs minus others, at the sampled tokens; 0 elsewhere."""
    trajectory = entry.trajectory
    return np.where(trajectory.action_mask, np.subtract(trajectory.logprobs, logprobs, dtype=np.float64), 0.0)


def run_lengths(values: Sequence[int]) -> list[int]:
    """Encodes runs as value and length: [1, 1, 0] is [1, 2, 0, 1]."""
    return [number for value, run in groupby(values) for number in (value, len(list(run)))]


def _number(value: float) -> Number:
    """Rounds a number for JSON; None if it is not finite."""
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{DIGITS}g}")
    return int(short) if short.is_integer() else short


class Pieces:
    """Splits a decoded text into the pieces of its tokens. Joined, they are the text."""

    def __init__(self, decode: Decode) -> None:
        self._text = cache(lambda token_ids: decode(token_ids) if token_ids else "")

    def of(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token, [L]. A character of several tokens belongs to the last of them."""
        texts: list[str] = []
        before: tuple[int, ...] = ()  # a whole token: some tokenizers drop the space of a text's first one
        group: tuple[int, ...] = ()
        for place, token in enumerate(token_ids, start=1):
            group += (token,)
            text = self._text(before + group)[len(self._text(before)) :]
            if text.endswith(UNFINISHED) and len(group) < LONGEST and place < len(token_ids):
                texts.append("")
                continue
            texts.append(text)
            before = () if UNFINISHED in self._text((token,)) else (token,)
            group = ()
        return texts


def action_parts(pieces: Sequence[str], *, ended: bool) -> list[tuple[str, int]]:
    """An action's thoughts, calls, answers and other texts in order, each with its number of tokens.

    A token belongs to the part of its first letter; white space, and an end token, belong to the part before them.
    """
    kinds = [kind for kind, text in split_action("".join(pieces)) for _ in text]  # of every character
    of_tokens: list[str | None] = []  # None: as the one before
    offset = 0
    for piece in pieces:
        of_tokens.append(kinds[offset + len(piece) - len(piece.lstrip())] if piece.strip() else None)
        offset += len(piece)
    if ended and of_tokens:
        of_tokens[-1] = None
    first = next(filter(None, of_tokens), "text")
    filled = accumulate(of_tokens, lambda previous, kind: kind or previous, initial=first)
    return [(str(kind), len(list(tokens))) for kind, tokens in groupby(islice(filled, 1, None))]


LARGEST_PAGE = 5_000_000  # bytes
SCRIPTS = ("model.js", "tokens.js", "reading.js", "app.js")
ARTIFACT = "viewer.html"
NOTES = [
    "Test questions, answered greedily before and after training, are chosen so that every kind of change is there: "
    "their shares are not those of the whole test.",
    "Trajectories of training are drawn evenly over the iterations, besides the latest of each kind of failure; first "
    "come questions that the first and the last share, then those whose log-probabilities the learner has confirmed.",
    "The gap is the sampler's log-probability less the learner's right after the weights were handed over, known for "
    "the trajectories that prove the transfer.",
]

logger = logging.getLogger(__name__)


def view(run: RunId, out: Path | None = None, trajectories: int = 200, traces: int = 20) -> None:
    """Writes a training's page to outputs/view/LABEL.html or `out`; MLflow gets it too, and traces that it lacks."""
    settings = load().of(run)
    stored, config = open_run(settings, run)
    kinds = audit(stored, config.credit, settings.env.max_tokens)
    groups = _groups(settings, run, stored, config, trajectories, kinds)
    text = page(run.label, _about(stored, config, kinds), groups, stored.decode)
    path = out or settings.places.page(run)
    write_text(path, text)
    logger.info("%s: %.1f MB", path, len(text) / 1e6)
    recent = [entry for entry in chain.from_iterable(groups) if entry.when is not When.BEFORE]
    _track(stored, text, recent[:traces])


def _groups(
    settings: Params, run: RunId, stored: StoredRun, config: TrainParams, count: int, kinds: Sequence[FailureKind]
) -> list[list[PageTrajectory]]:
    """At most `count` trajectories, with the latest of each kind of failure."""
    places = settings.places
    imported = isinstance(stored, ImportedRun)
    file = stored.folder / places.questions.name if imported else places.questions
    questions = questions_by_id(read_rows(file, Question))
    selection = Selection(stored, questions, config.credit, settings.env.max_tokens, config.seed)
    examples = {kind.episodes[-1] for kind in kinds[: count // 8]}
    if imported:
        return selection.trained(count, examples)
    version = registry.of_policy(sha256(stored.policy_folder), places.model)
    after = (latest_folder(version, places) if version else None) or places.evaluation(run.label, run.sweep)
    return selection.groups(count, places.evaluation(BASE_TOOL_CALL), after, examples)


def _track(stored: StoredRun, text: str, traced: Sequence[PageTrajectory]) -> None:
    """Has MLflow keep a page, and traces that it lacks."""
    tracked = tracking.run_of(stored.folder)
    if tracked is None:
        logger.warning("MLflow does not have the run of %s: the page is only on disk", stored.folder)
        return
    tracked.text(text, ARTIFACT)
    added = tracking.log_traces(tracked.run_id, traced, stored.decode)
    logger.info("MLflow run %s: %s and %d new traces", tracked.run_id, ARTIFACT, added)


def _about(stored: StoredRun, config: TrainParams, kinds: Sequence[FailureKind]) -> Json:
    """What a page says of its run; see `page`."""
    own = [
        ["seed", str(config.seed)],
        ["estimator", config.credit.estimator],
        ["iterations", str(stored.progress.iterations)],
        ["policy updates", str(stored.progress.policy_version)],
    ]
    return {
        "facts": [["run", stored.run], *([["holds", str(stored.about)]] if isinstance(stored, ImportedRun) else own)],
        "weights": {name: weight for name, weight in config.credit.rewards.weights.items() if weight},
        "failures": {kind.kind: kind.episodes for kind in kinds},
        "notes": NOTES * (not isinstance(stored, ImportedRun)),
    }


def page(title: str, about: Mapping[str, Any], groups: Sequence[Sequence[PageTrajectory]], decode: Decode) -> str:
    """The page of groups of trajectories; beyond LARGEST_PAGE bytes the last are left out, and a note says so.

    The script reads `about`: `facts` (label, text), `weights` by a reward's part, ids by kind of `failures`, `notes`.
    """
    text = _page(title, about, groups, decode)
    size = len(text.encode())
    count = len(groups)
    while size > LARGEST_PAGE and count > 1:
        count = max(1, int(0.95 * count * LARGEST_PAGE / size))
        cut = (
            f"{sum(map(len, groups[:count]))} of {sum(map(len, groups))} trajectories are shown; the rest would make "
            f"the page larger than {LARGEST_PAGE / 1e6:.0f} MB."
        )
        text = _page(title, {**about, "notes": [*about["notes"], cut]}, groups[:count], decode)
        size = len(text.encode())
    if count < len(groups):
        logger.warning("%s", cut)
    return text


def _page(title: str, about: Mapping[str, Any], groups: Sequence[Sequence[PageTrajectory]], decode: Decode) -> str:
    payload = Payload(decode)
    for entry in chain.from_iterable(groups):
        payload.add(entry)
    script = "\n".join(map(_file, SCRIPTS))
    style = _file("viewer.css")
    filled = {
        "TITLE": html.escape(title),
        "SCRIPT_HASH": _csp_hash(script),
        "STYLE_HASH": _csp_hash(style),
        "STYLE": style,
        "DATA": packed(payload.content({"title": title, **about})),
        "SCRIPT": script,
    }
    parts = _file("viewer.html").split("@@")  # text, name, text, name, ..., text
    return "".join(filled[part] if place % 2 else part for place, part in enumerate(parts))


def packed(content: Mapping[str, Any]) -> str:
    """Compressed JSON in base64, which cannot end the block of HTML around it."""
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _file(name: str) -> str:
    return files("agent_r1.inspection").joinpath(name).read_text(encoding="utf-8")


def _csp_hash(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
