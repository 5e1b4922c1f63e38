"""The profiles of worlds before training: `python -m benchmarks.profiles RUN FOLDER... [--store]`.

Each folder is a project of one world whose warm start is made, such as `dvc repro warm_start` leaves it after
`agent-r1 new project FOLDER --from frozen_lake`. As `agent-r1 profile`, with 50 training questions and eight samples
of each.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from agent_r1.evaluation.comparison import mean_cell
from agent_r1.evaluation.protocols import training_questions
from agent_r1.evaluation.scores import measured
from agent_r1.evaluation.statistics import interval
from agent_r1.inspection.profile import Player, differing_share, players_of
from agent_r1.learn.model import load_tokenizer
from agent_r1.params import load
from agent_r1.params.places import RunId
from agent_r1.rollout.chat import Chat
from benchmarks.stored import Row, show
from flows.policies import policy_of

QUESTIONS, SAMPLES = 50, 8


def profiled(run: RunId) -> Row:
    """The profile of the world in the current folder."""
    settings = load()
    train, settings = settings.run(run), settings.of(run)
    sampled = settings.evaluate.model_copy(update={"samples": SAMPLES, "temperature": 1.0})
    settings = settings.model_copy(update={"evaluate": sampled})
    asked = training_questions(settings, QUESTIONS)
    policy = policy_of(settings, "")
    chat = Chat(load_tokenizer(policy.path, reads=settings.env.max_tokens))
    weights = policy.weights(settings)
    agents = {
        each.name: each
        for each in players_of(settings, asked, chat, lambda exam: exam.by_policy(weights, lambda: None))
    }
    first = agents["the policy"]

    def score(name: str) -> str:
        if name not in agents:
            return ""
        return mean_cell(interval(measured("success", agents[name].answered), sampled.bootstrap_samples, sampled.seed))

    return {
        "world": asked[0].dataset,
        "chance": score("random"),
        "first policy, avg@8": score("the policy"),
        "solver": score("oracle"),
        "groups whose returns differ": f"{differing_share(first, train.credit, settings.env.max_tokens):.0%}",
        "steps": _mean(first, "steps"),
        "tokens sampled": _mean(first, "tokens_sampled"),
        "seconds": f"{first.seconds:.0f}",
    }


def _mean(player: Player, name: str) -> str:
    if name == "steps":
        return f"{sum(len(each.steps) for each in player.trajectories) / len(player.trajectories):.1f}"
    values = measured(name, player.answered)
    return f"{sum(values) / len(values):.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Profiles worlds before training.")
    parser.add_argument("run", type=RunId.parse, help="such as grpo")
    parser.add_argument("folders", type=Path, nargs="+", help="projects of one world each, with a warm start")
    parser.add_argument("--store", action="store_true", help="in docs/measured")
    given, rows = parser.parse_args(), []
    for folder in [each.resolve() for each in given.folders]:
        os.chdir(folder)
        rows.append(profiled(given.run))
    show("profiles", rows, store=given.store)


if __name__ == "__main__":
    main()
