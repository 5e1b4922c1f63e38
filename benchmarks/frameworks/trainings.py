"""Trainings of two iterations with agents of frameworks: `python -m benchmarks.frameworks.trainings ...`.

`--environments FOLDER` has the frameworks' environments, as `python -m benchmarks.frameworks` makes them; `--into
FOLDER` is the project of the trainings, where what is there is not made again.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import yaml

from agent_r1.files import read_metrics
from agent_r1.params.places import PARAMS, RunId
from agent_r1.records import Passage
from agent_r1.tables import read_rows
from benchmarks.curve import open_project, stage
from benchmarks.frameworks.__main__ import FRAMEWORKS, command
from benchmarks.reruns import copy_project
from benchmarks.stored import ROOT, Row, options, show

AGENTS = {  # by the function of `benchmarks.frameworks.trained`
    "typed": "of_pydantic_ai.py",
    "tool_calling": "of_smolagents.py",
    "react": "of_dspy.py",
    "responses": "of_openai.py",
    "messages": "of_anthropic.py",
}
ITERATIONS = 2
SHARES = ("aborted", "kept_share", "unmet_form", "faults_learned", "requests", "contexts")


def declare(path: Path, environments: Path) -> None:
    """Has a project's parameters name the agents, and a run of each, with room for their frameworks' prompts."""
    content = yaml.safe_load(path.read_text())
    content["env"] |= {"max_tokens": 8192, "max_action_tokens": 100, "max_steps": 6}
    content["env"]["agents"] = {
        agent: {
            "function": f"benchmarks.frameworks.trained:{agent}",
            "python": command(script, FRAMEWORKS[script], environments)[0],
            "timeout_s": 300,
            "environment": ["PATH", "HOME", "NO_PROXY"],
            "concurrency": 4,
        }
        for agent, script in AGENTS.items()
    }
    content["warm_start"]["steps"] = 250
    sizes = {"rollout": {"questions": 4, "samples": 4}, "update": {"max_tokens_per_microbatch": 8192}}
    run = content["runs"]["grpo"] | sizes | {"iterations": ITERATIONS}
    content["runs"] |= {agent: run | {"env": {"agent": agent, "order": "arrival"}} for agent in AGENTS}
    path.write_text(yaml.safe_dump(content, sort_keys=False))


def main() -> None:
    parser = options("Trains agents of frameworks.")
    parser.add_argument("--environments", type=Path, required=True, help="the folder of the frameworks' environments")
    parser.add_argument("--into", type=Path, required=True, help="the folder of the trainings")
    parser.add_argument("--only", nargs="+", default=[*AGENTS], choices=AGENTS)
    given = parser.parse_args()
    os.environ["NO_PROXY"] = "127.0.0.1"
    into = given.into.resolve()
    if not into.exists():
        copy_project(into)
        declare(into / PARAMS, given.environments.resolve())
    settings = open_project(into)
    passages = {passage.title: passage.text for passage in read_rows(settings.places.passages, Passage)}
    Path("passages.json").write_text(json.dumps(passages))
    rows = list[Row]()
    for agent in given.only:
        folder = settings.places.training(RunId(agent))
        if not folder.exists():
            stage("train", agent)
        history = read_metrics(folder)
        for iteration, metrics in enumerate(history):
            shares = {name: f"{metrics[f'agent/{name}']:.2f}" for name in SHARES if f"agent/{name}" in metrics}
            rows.append(
                {"agent": agent, "iteration": str(iteration)} | {name: shares.get(name, "n/a") for name in SHARES}
            )
    os.chdir(ROOT)
    show("framework_trainings", rows, store=given.store, keys=2)


if __name__ == "__main__":
    main()
