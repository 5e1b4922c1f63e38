"""Training from Python objects, in a notebook or a script, without stages."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
import torch

from agent_r1.data.prepare import prepare
from agent_r1.own_code import reference
from agent_r1.params import SHIPPED, Params, RunId, load
from agent_r1.params.places import policy_in
from agent_r1.params.sections import override, validated
from agent_r1.rollout.episode import StepView
from agent_r1.rollout.sampling import Beneath, PolicyWeights
from agent_r1.search.index import build
from agent_r1.serving.agent import Agent, open_agent
from agent_r1.surroundings import are_pinned, settle
from agent_r1.training.assembly import Assembly
from agent_r1.training.loop import iterate, leaves_work

LOGGER = logging.getLogger("agent_r1")  # of the whole library
Rows = pd.DataFrame | Sequence[Mapping[str, Any]]


@dataclass(kw_only=True, eq=False)
class Trainer:
    """Trains an agent and asks it, under params.yaml as it is shipped."""

    model: str  # that it starts from: a Hugging Face folder or hub id
    questions: Rows  # to train on: `question`, `answers`, and other columns of the format `generic`
    folder: str | Path  # of all results, where an interrupted training goes on
    tools: Sequence[Callable[..., Any]] = ()  # typed functions
    rewards: Sequence[Callable[..., Any]] = ()  # functions of an `agent_r1.credit.own.Episode`, of weight 1
    passages: Rows = ()  # to search: `title` and `text`; without any there is no search
    run: str = "grpo"  # under `runs:`
    changes: Mapping[str, Any] = field(default_factory=dict)  # sections of params.yaml; those of `train` are the run's

    def __post_init__(self) -> None:
        """Raises ValueError for a function without a name, a malformed row, and a refused parameter."""
        settle()
        self._folder = Path(self.folder).expanduser().absolute()
        model = Path(self.model).expanduser()
        self._model = str(model.absolute()) if model.is_dir() else self.model
        self._data = TemporaryDirectory(prefix="agent_r1-")  # removed with this object
        self._settings = self._configured(Path(self._data.name))
        places = self._settings.places
        prepare(self._settings.prepare, places.prepared, searched=len(self.passages) > 0)
        build(self._settings.search, places.passages, places.index)
        self._open = ExitStack()
        self._agent = list[Agent]()  # none yet, or one

    def train(self, *, fresh: bool = False) -> pd.DataFrame:
        """Trains up to the last iteration, or goes on, and returns the metrics, a row for each iteration.

        `fresh` starts over, and moves the folder into `aside` beside it. Raises ValueError for the folder of a training
        with other parameters, questions or functions.
        """
        with self._as_a_stage():
            self._open.close()
            self._agent.clear()
            assembly = Assembly(self._settings, RunId(self.run), self._model)
            aside = self._folder.with_name("aside")
            with assembly.prepared() as prepared, prepared.open(self._folder, aside, fresh=fresh) as folder:
                if leaves_work(folder):
                    with prepared.training(folder) as training:
                        iterate(training)
                prepared.finish(folder)
                return pd.DataFrame(folder.history())

    @property
    def policy(self) -> str:
        """The Hugging Face folder of the latest policy; before any training, the model that it starts from."""
        policy = policy_in(self._folder)
        return str(policy) if policy.is_dir() else self._model

    def ask(self, text: str) -> list[StepView]:
        """The steps in which the latest policy answers a question greedily; the last has its `answer`.

        Its engine stays open until the next training.
        """
        with self._as_a_stage():
            if not self._agent:
                lora = self._settings.model.adapter
                local = self._settings.engine.kind != "server"
                base = Beneath(self._model, lora.rank) if lora and local and self.policy != self._model else None
                opening = open_agent(self._settings, PolicyWeights(self.policy, beneath=base), temperature=0.0)
                self._agent.append(self._open.enter_context(opening))
            return list(self._agent[0].ask(text, seed=0))

    def _configured(self, data: Path) -> Params:
        """The parameters; questions and passages are written into the folder where they name them."""
        shipped = load(SHIPPED).of(RunId(self.run))
        changes = dict(self.changes)
        pd.DataFrame(self.questions).to_json(data / "questions.jsonl", orient="records", lines=True)
        pd.DataFrame(self.passages).to_json(data / "passages.jsonl", orient="records", lines=True)
        files = {"train": {"file": data / "questions.jsonl"}, "corpus": data / "passages.jsonl"}
        tools = {name: {"module": module} for module, name in map(reference, self.tools)}
        rewards = {name: {"function": f"{module}:{name}", "weight": 1} for module, name in map(reference, self.rewards)}
        parameters = {
            "prepare": {"datasets": ["own"], "files": {"own": {"format": "generic", **files}}},
            "model": {"path": self.model},
            "warm_start": {"demonstrations": 0},
            "env": {"tools": {"search": {} if len(self.passages) else None, "functions": tools}},
            "train": {"credit": {"rewards": rewards}},
            "runs": {self.run: override(shipped.runs[self.run] or {}, changes.pop("train", {}))},
        }
        content = override(override(shipped.model_dump(by_alias=True), parameters), changes)
        settings = validated(Params, content, "Trainer").of(RunId(self.run))
        config = settings.run(RunId(self.run))
        if config.reference_is_registered:
            raise ValueError(
                f"Trainer: train.reference {config.reference} is a registered version, which only a stage asks the "
                "registry for; give the folder of its policy"
            )
        if settings.model.portable and not are_pinned():
            raise ValueError(
                "Trainer: model.portable: true comes too late for this process, which has computed; set it to false, "
                "or train in a project"
            )
        return settings.model_copy(update={"places": settings.places.model_copy(update={"data": str(data)})})

    @contextmanager
    def _as_a_stage(self) -> Iterator[None]:
        """Gives torch `model.threads` threads, and hides the loop of a notebook, which waits for its cell anyway.

        What is logged is shown, unless the program has its own handlers.
        """
        threads = torch.get_num_threads()
        loop = asyncio._get_running_loop()
        lines = logging.StreamHandler()
        level = LOGGER.level
        if not LOGGER.hasHandlers():
            LOGGER.addHandler(lines)
            LOGGER.setLevel(logging.INFO)
        torch.set_num_threads(self._settings.model.threads)
        asyncio._set_running_loop(None)
        try:
            yield
        finally:
            LOGGER.removeHandler(lines)
            LOGGER.setLevel(level)
            asyncio._set_running_loop(loop)
            torch.set_num_threads(threads)
