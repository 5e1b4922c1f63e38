"""The project's side of the race: its own loop, which waits for its turn before every iteration."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from agent_r1.envs.shared import Shared
from agent_r1.identity import Identity
from agent_r1.params import RunId
from agent_r1.records import Question, Trajectory
from agent_r1.search.index import open_index
from agent_r1.tables import read_rows
from agent_r1.training.folder import RunFolder
from agent_r1.training.loop import Training, iterate
from benchmarks.peers.course import RUN, await_turn, settings_of, tell_lap

Verb = Callable[..., Any]


def in_turns(run: RunFolder) -> Callable[[Verb], Verb]:
    """Has the first verb of an iteration wait for its turn, and the last one say what was done."""

    def as_task(verb: Verb) -> Verb:
        def call(iteration: int, *others: object) -> Any:
            if verb.__name__ == "rollout":
                await_turn()
            made = verb(iteration, *others)
            if verb.__name__ == "conclude":
                rows, metrics = read_rows(run.trajectories(iteration), Trajectory), run.history()[-1]
                tell_lap(
                    trajectories=len(rows),
                    tokens=sum(len(each.token_ids) for each in rows),
                    trained_tokens=int(metrics["update/tokens"]),
                    success=metrics["rollout/success"],
                )
            return made

        return call

    return as_task


def main() -> None:
    settings = settings_of(sys.argv[1])
    torch.set_num_threads(settings.model.threads)
    config, places = settings.run(RunId(RUN)), settings.places
    index = open_index(settings.search, places.passages, places.index)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        new = RunFolder(path / "run", Identity.of(settings, config), config)
        with (
            new.opened(path / "aside") as run,
            Shared(settings.env, index) as shared,
            Training(
                settings,
                questions=read_rows(places.questions, Question),
                shared=shared,
                model=places.warm_start,
                folder=run,
            ) as training,
        ):
            iterate(training, as_task=in_turns(run))


if __name__ == "__main__":
    main()
