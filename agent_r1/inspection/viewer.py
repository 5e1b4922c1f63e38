"""One HTML file that shows trajectories and needs nothing else: no network, no server, no other file."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import logging
from collections.abc import Mapping, Sequence
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any

from agent_r1 import tracking
from agent_r1.evaluation.comparison import latest_folder
from agent_r1.evaluation.scores import BASE_TOOL_CALL
from agent_r1.files import sha256, write_text
from agent_r1.inspection.payload import Payload
from agent_r1.inspection.stored import Selection, Shown, StoredRun, When
from agent_r1.learn.model import load_tokenizer
from agent_r1.params import Params
from agent_r1.params.places import RunId
from agent_r1.records import Question
from agent_r1.tables import read_rows
from agent_r1.tracking import registry
from agent_r1.tracking.traces import Decode

LARGEST_PAGE = 5_000_000  # bytes
SCRIPTS = ("model.js", "tokens.js", "reading.js", "app.js")
ARTIFACT = "viewer.html"
NOTES = [
    "Test questions, answered greedily before and after training, are chosen so that every kind of change is there: "
    "their shares are not those of the whole test.",
    "Trajectories of training are drawn evenly over the iterations; first come questions that the first and the last "
    "iteration share, then those whose log-probabilities the learner has confirmed.",
    "The gap is the sampler's log-probability less the learner's right after the weights were handed over, known for "
    "the trajectories that prove the transfer.",
]

logger = logging.getLogger(__name__)


def show(settings: Params, run: RunId, file: Path | None, *, trajectories: int, traces: int) -> None:
    """Writes the page of a training's trajectories, and adds it and traces of some of them to its run in MLflow.

    There the page is an artifact, in place of an earlier one, and a trace is added of each trajectory that has none,
    but not of those before training. The page is a `file` in place of outputs/view/LABEL.html.
    """
    settings = settings.of(run)
    config, places = settings.run(run), settings.places
    stored = StoredRun(run.run, places.training(run), places.warm_start)
    tokenizer = load_tokenizer(stored.policy_folder)

    def decode(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False))

    questions = {row.question_id: row for row in read_rows(places.questions, Question)}
    selection = Selection(stored, questions, config.credit, settings.env.max_tokens, config.seed)
    version = registry.of_policy(sha256(stored.policy_folder))
    after = (latest_folder(version, places) if version else None) or places.evaluation(run.label, run.sweep)
    groups = selection.groups(trajectories, places.evaluation(BASE_TOOL_CALL), after)
    weights = config.credit.rewards.weights
    about = {
        "facts": [
            ["run", stored.run],
            ["seed", str(config.seed)],
            ["estimator", config.credit.estimator],
            ["iterations", str(stored.progress.iterations)],
            ["policy updates", str(stored.progress.policy_version)],
        ],
        "weights": {name: weight for name, weight in weights.items() if weight},
        "notes": NOTES,
    }
    text, path = page(run.label, about, groups, decode), file or places.page(run)
    write_text(path, text)
    logger.info("%s: %.1f MB", path, len(text) / 1e6)
    later = [each for each in chain.from_iterable(groups) if each.when is not When.BEFORE]
    _track(stored, text, later[:traces], decode)


def _track(stored: StoredRun, text: str, traced: Sequence[Shown], decode: Decode) -> None:
    run = tracking.run_of(stored.folder)
    if run is None:
        logger.warning("MLflow does not have the run of %s: the page is only on disk", stored.folder)
        return
    run.text(text, ARTIFACT)
    added = tracking.log_traces(run.run_id, traced, decode)
    logger.info("MLflow run %s: %s and %d new traces", run.run_id, ARTIFACT, added)


def page(title: str, about: Mapping[str, Any], groups: Sequence[Sequence[Shown]], decode: Decode) -> str:
    """The page of trajectories, those that belong together in a group, the most important groups first.

    The last groups are left out where it would be larger than LARGEST_PAGE bytes, and a note says so. `about` is told
    to the script: `facts`, pairs of a label and a text; `weights`, name -> weight of the reward's parts; `notes`.
    """
    text = _page(title, about, groups, decode)
    count = len(groups)
    while (size := len(text.encode())) > LARGEST_PAGE and count > 1:
        count = max(1, int(0.95 * count * LARGEST_PAGE / size))
        shown, there_are = (sum(map(len, each)) for each in (groups[:count], groups))
        cut = (
            f"{shown} of {there_are} trajectories are shown; the rest would make the page larger than "
            f"{LARGEST_PAGE / 1e6:.0f} MB."
        )
        text = _page(title, {**about, "notes": [*about["notes"], cut]}, groups[:count], decode)
    if count < len(groups):
        logger.warning("%s", cut)
    return text


def _page(title: str, about: Mapping[str, Any], groups: Sequence[Sequence[Shown]], decode: Decode) -> str:
    payload = Payload(decode)
    for shown in chain.from_iterable(groups):
        payload.add(shown)
    script, style = "\n".join(map(_file, SCRIPTS)), _file("viewer.css")
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
    """JSON, compressed, in letters, digits and +/=, none of which can end the block that they stand in."""
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _file(name: str) -> str:
    return files("agent_r1.inspection").joinpath(name).read_text(encoding="utf-8")


def _csp_hash(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
