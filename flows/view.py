"""What an agent did, as a page and as traces: `python -m flows view --run NAME`."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from agent_r1.project import QUESTIONS, evaluate_dir, label, train_dir, view_file
from transformers import PreTrainedTokenizerFast

from agent_r1 import params, tracking
from agent_r1.evaluation.predictions import BASE_TOOL_CALL
from agent_r1.files import sha256, write_text
from agent_r1.inspection.stored import Sources, StoredRun
from agent_r1.inspection.viewer import Decode, Shown, When, page
from agent_r1.params import TrainParams
from agent_r1.policy.model import load_tokenizer
from agent_r1.records import Question
from agent_r1.tables import read_rows
from agent_r1.tracking import registry
from flows.operation.history import latest_folder

ARTIFACT = "viewer.html"

logger = logging.getLogger(__name__)


def view(
    run: str,
    seed: int | None = None,
    sweep: str | None = None,
    out: str | None = None,
    trajectories: int = 200,
    traces: int = 20,
) -> None:
    """Makes a page of a run's trajectories, and MLflow traces of some of them.

    Both go to the run in MLflow: the page as the artifact `viewer.html`, in place of an earlier one, and a trace of
    each trajectory that has none there.

    Args:
        run: a run of params.yaml that was trained.
        seed: in place of the run's own.
        sweep: of which the run is a member.
        out: the page's file, in place of outputs/view/LABEL.html.
        trajectories: how many the page holds at most.
        traces: how many of them, without those before training, become traces.

    Raises:
        FileNotFoundError: the run was not trained.
        ValueError: there is no such run, or params.yaml or the prepared questions are no longer those of the run.
    """
    settings = params.load()
    config = settings.run(run, seed, sweep)
    stored = StoredRun(run, train_dir(run, seed, sweep))
    tokenizer = load_tokenizer(stored.policy_folder)
    questions = {row.question_id: row for row in read_rows(QUESTIONS, Question)}
    sources = Sources(stored, questions, config.credit.rewards, seed=config.seed)
    before, after = evaluate_dir(BASE_TOOL_CALL), _evaluated(stored) or evaluate_dir(run, seed, sweep)
    groups = sources.groups(trajectories, before, after)
    decode = _decoder(tokenizer)
    text = page(label(run, seed), _about(config, stored, groups), groups, decode)
    path = Path(out) if out else view_file(run, seed, sweep)
    write_text(path, text)
    logger.info("%s: %.1f MB", path, len(text) / 1e6)
    _track(
        stored, text, [each for each in chain.from_iterable(groups) if each.when is not When.BEFORE][:traces], decode
    )


def _evaluated(stored: StoredRun) -> Path | None:
    """The latest evaluation of its policy, where it is registered and was evaluated."""
    version = registry.of_policy(sha256(stored.policy_folder))
    return latest_folder(version) if version else None


def _decoder(tokenizer: PreTrainedTokenizerFast) -> Decode:
    def decode(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False))

    return decode


def _about(config: TrainParams, stored: StoredRun, groups: Sequence[Sequence[Shown]]) -> dict[str, Any]:
    """What the page says of the run and of the choice of its trajectories."""
    weights = config.credit.rewards.model_dump()
    return {
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


def _track(stored: StoredRun, text: str, traced: Sequence[Shown], decode: Decode) -> None:
    run_id = stored.folder / "mlflow_run_id"
    run = tracking.resume(run_id.read_text()) if run_id.exists() else None
    if run is None:
        logger.warning("MLflow does not have the run of %s: the page is only on disk", stored.folder)
        return
    run.text(text, ARTIFACT)
    added = tracking.log_traces(run.run_id, traced, decode)
    logger.info("MLflow run %s: %s and %d new traces", run.run_id, ARTIFACT, added)


NOTES = [
    "Test questions, answered greedily before and after training, are chosen so that every kind of change is there: "
    "their shares are not those of the whole test.",
    "Trajectories of training are drawn evenly over the iterations; first come questions that the first and the last "
    "iteration share, then those whose log-probabilities the learner has confirmed.",
    "The gap is the sampler's log-probability less the learner's right after the weights were handed over, known for "
    "the trajectories that prove the transfer.",
]

if __name__ == "__main__":
    from flows.stage import add_member_arguments, run_stage

    parser = argparse.ArgumentParser(description="Makes a page of a run's trajectories, and traces in MLflow.")
    parser.add_argument("--run", required=True, help="a run of params.yaml that was trained")
    add_member_arguments(parser)
    parser.add_argument("--out", metavar="FILE", help="the page, in place of outputs/view/LABEL.html")
    parser.add_argument("--trajectories", type=int, default=200, help="on the page, at most (default: 200)")
    parser.add_argument("--traces", type=int, default=20, help="of them in MLflow, at most; 0 for none (default: 20)")
    run_stage(view, **vars(parser.parse_args()))
