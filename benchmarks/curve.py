"""How soon a world is learned: `python -m benchmarks.curve [OVERLAY] --into FOLDER [--seeds 0 1 2] [--store]`.

Makes the folder a project under the overlay, or as shipped, and trains `grpo` there: runs that end after 48 and 192
episodes, of 4 questions and 4 samples of each, and whole ones; then `ppo`, and `grpo` paid for its format alone. All
are asked the dev questions, greedily and with 4 samples at temperature 1. What is there already is not made again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from agent_r1.evaluation.protocols import SCRIPTED, open_exam
from agent_r1.evaluation.scores import predict
from agent_r1.files import read_metrics, write_text
from agent_r1.learn import checkpoint
from agent_r1.learn.model import load_tokenizer
from agent_r1.params import Params, load
from agent_r1.params.places import PARAMS, RunId, policy_in
from agent_r1.params.stages import Protocol
from agent_r1.records import GREEDY, CallStatus, Outcome, Question, Trajectory, of_split
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.sampling import PolicyWeights
from agent_r1.tables import read_rows
from agent_r1.training.questions import VALIDATED
from benchmarks.stored import ROOT, Row, options, show
from flows.overlay import BASE
from flows.project import begin_project

SAMPLES = 4
SMALL = {"rollout": {"questions": 4, "samples": 4}}
FORMAT = {"credit": {"rewards": {"agent_r1": 0.0, "no_answer": 1.0, "failed_call": 1.0}}}
TRIALS: dict[str, tuple[str, dict[str, Any]]] = {  # name -> run of the overlay, and its overrides
    "48": ("grpo", SMALL | {"iterations": 3}),
    "192": ("grpo", SMALL | {"iterations": 12}),
    "grpo": ("grpo", {}),
    "ppo": ("ppo", {}),
    "grpo, format alone": ("grpo", FORMAT),
}
WHOLE = ("grpo", "ppo")
ILL_FORMED = {CallStatus.MALFORMED, CallStatus.UNKNOWN_TOOL, CallStatus.BAD_ARGUMENTS}


def variant(settings: Params, name: str, seed: int) -> RunId:
    """The training of a trial, which is asked the dev questions at half of its iterations and at the end."""
    run, further = TRIALS[name]
    iterations = further.get("iterations", settings.run(RunId(run)).iterations)
    validation = {"every": max(1, iterations // 2), "questions": 0, "samples": SAMPLES}
    overrides = differing(further | {"validation": validation}, settings.run(RunId(run)).model_dump())
    found = settings.varied(RunId(run), overrides)
    write_text(settings.places.variant(found), json.dumps(overrides))
    return RunId(found.run, seed, variant=found.variant)


def differing(changes: dict[str, Any], present: dict[str, Any]) -> dict[str, Any]:
    """The changes without those that change nothing."""
    parts = {name: differing(of, present[name]) if isinstance(of, dict) else of for name, of in changes.items()}
    return {name: of for name, of in parts.items() if of not in ({}, present[name])}


def stage(*words: str) -> None:
    """Runs a stage in the folder. Raises CalledProcessError if it fails."""
    subprocess.run([sys.executable, "-m", "flows", *words], check=True)


def well_formed(trajectories: Iterable[Trajectory]) -> float:
    """The share of actions that are a call or an answer as they have to be."""
    ill = [
        any(call.status in ILL_FORMED for call in step.calls)
        or (step is each.steps[-1] and each.outcome is Outcome.MALFORMED)
        for each in trajectories
        for step in each.steps
    ]
    return 1 - fmean(ill)


def asked(settings: Params, policy: Path, protocol: Protocol = "tool_call") -> dict[str, float]:
    """Success on the dev questions, in all, by stratum and greedily, and the share of well-formed sampled actions."""
    known = Path("asked") / f"{policy}-{protocol}.json".replace("/", "-")
    if not known.exists():
        evaluate = {"samples": SAMPLES, "temperature": 1.0}
        settings = settings.model_copy(update={"evaluate": settings.evaluate.model_copy(update=evaluate)})
        questions = of_split(read_rows(settings.places.questions, Question), "dev")
        with open_exam(protocol, questions, Chat(load_tokenizer(str(policy))), settings, greedily=True) as exam:
            by_script = protocol in SCRIPTED
            made = (
                exam.by_script(lambda: None) if by_script else exam.by_policy(PolicyWeights(str(policy)), lambda: None)
            )
        found: dict[str, list[float]] = {}
        strata = {row.question_id: row.strata for row in questions}
        for each in predict(made, questions, "", 0):
            of = strata[each.question_id]
            drawn = ("success", f"{of['kind']} of {of['hops']}")
            for name in drawn if each.sample != GREEDY else ("greedily",):
                found.setdefault(name, []).append(each.success)
        found["well formed"] = [well_formed(each for each in made if each.sample != GREEDY)]
        write_text(known, json.dumps({name: round(fmean(of), 4) for name, of in found.items()}, indent=1))
    content: dict[str, float] = json.loads(known.read_text())
    return content


def train_lacking(settings: Params, runs: Iterable[RunId]) -> None:
    """Trains what has not been trained to its end, two at a time."""
    lacking = [run for run in runs if not _ended(settings, run)]
    with ThreadPoolExecutor(settings.operate.side_by_side) as pool:
        list(pool.map(lambda run: stage("train", run.word), lacking))


def open_project(folder: Path) -> Params:
    """Enters a project, and makes what its trainings begin with where it is not there."""
    os.chdir(folder)
    settings = load(Path(PARAMS))
    made = {
        "prepare": settings.places.questions,
        "index": settings.places.index,
        "warm_start": settings.places.warm_start,
    }
    for name in [name for name, place in made.items() if not place.exists()]:
        stage(name)
    return settings


def _ended(settings: Params, run: RunId) -> bool:
    folder = settings.places.training(run)
    progress = checkpoint.progress(folder / "checkpoint")
    learned = progress is not None and progress.iterations == progress.planned(settings.run(run))
    return learned and VALIDATED in read_metrics(folder)[-1]  # the last policy is validated after its checkpoint


def sampled(folder: Path) -> list[tuple[int, float]]:
    """What each validation found, at half of the iterations and at the end, behind the episodes learned from."""
    rows = read_metrics(folder)
    learned = accumulate(int(each["update/episodes"]) for each in rows)
    return [(total, each[VALIDATED]) for total, each in zip(learned, rows, strict=True) if VALIDATED in each]


class Scale(NamedTuple):
    """The success of the warm start, and of the whole runs that are compared with it."""

    start: float
    end: float

    def share(self, values: Sequence[float]) -> str:
        """How much of the gain some runs have made, on average."""
        return f"{(fmean(values) - self.start) / (self.end - self.start):.0%}" if values else ""


def row(world: str, run: str, episodes: int, sampled: Sequence[float], greedy: Sequence[float] = ()) -> dict[str, str]:
    """What some runs reach, a value for each seed; the shares of the gain come later."""
    return {
        "world": world,
        "run": run,
        "episodes": str(episodes),
        "sampled": f"{fmean(sampled):.3f}",
        "by seed": ", ".join(f"{each:.3f}" for each in sampled),
        "of its gain": "",
        "greedy": f"{fmean(greedy):.3f}" if greedy else "",
        "greedy, by seed": ", ".join(f"{each:.3f}" for each in greedy),
        "of its greedy gain": "",
    }


def rows(world: str, settings: Params, trainings: dict[tuple[str, int], Path]) -> Iterator[Row]:
    """Floor, ceiling and warm start, then what each trial gains over that; a short run's gain is a part of `grpo`'s."""
    start = settings.places.warm_start
    for name in SCRIPTED:
        yield row(world, name, 0, [asked(settings, start, name)["success"]])
    first, likeliest = (asked(settings, start)[name] for name in ("success", "greedily"))
    yield row(world, "warm start", 0, [first], [likeliest])
    scales: dict[str, tuple[Scale, Scale]] = {}
    for name in sorted({trial for trial, _ in trainings}, key=[*WHOLE, *TRIALS].index):
        folders = [folder for (trial, _), folder in trainings.items() if trial == name]
        greedy = [asked(settings, policy_in(each))["greedily"] for each in folders]
        found = [sampled(each) for each in folders]
        halves, ends = ([each[place][1] for each in found] for place in (0, -1))
        episodes, all_episodes = (round(fmean(each[place][0] for each in found)) for place in (0, -1))
        scales[name] = Scale(first, fmean(ends)), Scale(likeliest, fmean(greedy))
        of_sampled, of_greedy = scales[name if name in WHOLE else "grpo"]
        if name in WHOLE:
            yield row(world, name, episodes, halves) | {"of its gain": of_sampled.share(halves)}
        end = row(world, "grpo" if name.isdecimal() else name, all_episodes, ends, greedy)
        yield end | {"of its gain": of_sampled.share(ends), "of its greedy gain": of_greedy.share(greedy)}


def main() -> None:
    parser = options("Trains in a world, and says after how many episodes it is learned.")
    parser.add_argument("overlay", nargs="?", default=BASE.stem, help="of a file in overlays/, without .yaml")
    parser.add_argument("--into", type=Path, required=True, help="the folder of the trainings")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--trials", nargs="+", default=list(TRIALS), choices=TRIALS)
    given = parser.parse_args()
    if not given.into.exists():
        begin_project(given.into, "" if given.overlay == BASE.stem else given.overlay)
    settings = open_project(given.into)
    trials = [name for name in TRIALS if name == "grpo" or name in given.trials]
    runs = {(name, seed): variant(settings, name, seed) for seed in given.seeds for name in trials}
    train_lacking(settings, runs.values())
    trainings = {key: settings.places.training(run) for key, run in runs.items()}
    world = "default" if given.overlay == BASE.stem else given.overlay
    found = list(rows(world, settings, trainings))
    os.chdir(ROOT)
    show("curve", found, store=given.store, keys=3)


if __name__ == "__main__":
    main()
