"""The identity of a training: the facts that tell it from others, and whether its folder can be gone on from."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from agent_r1 import facts
from agent_r1.facts import differences, differing, some
from agent_r1.files import move_aside
from agent_r1.params import Params, fingerprint
from agent_r1.params.places import is_copy
from agent_r1.params.sections import flatten, of_today
from agent_r1.params.train import TrainParams

START = "start.json"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """The facts that tell a run from others, and the code that trains it."""

    parameters: dict[str, Any]  # dotted name -> value
    inputs: dict[str, str] = field(default_factory=dict)  # input -> hash
    code: dict[str, str] = field(default_factory=dict)  # file -> hash; other code is no other run

    @classmethod
    def of(
        cls,
        settings: Params,
        config: TrainParams,
        inputs: Mapping[str, str] | None = None,
        code: Mapping[str, str] | None = None,
    ) -> Self:
        """The identity of a run.

        It leaves out `train.checkpoint`, `train.keep`, the share of aborted episodes that ends an iteration, and the
        number of processes that share the learner: their weights differ by rounding alone.
        """
        sections = {
            "train": config.model_dump(mode="json", exclude={"checkpoint", "keep"}),
            "env": settings.env.model_dump(mode="json", exclude={"aborted_share"}),
            "model": settings.model.model_dump(mode="json"),
            "engine": settings.engine.identity,
        }
        return cls(parameters=flatten(sections), inputs=dict(inputs or {}), code=dict(code or {}))

    @property
    def fingerprint(self) -> str:
        """A short hash of parameters and inputs."""
        return fingerprint(self.parameters, self.inputs)

    @property
    def code_digest(self) -> str:
        """A short hash of the code."""
        return fingerprint(self.code)

    def differences_from(self, earlier: Identity) -> list[str]:
        """The differences in words, such as `train.credit.lam 0.99 -> 0.95`; [] for the same run."""
        parameters = of_today(earlier.parameters, self.parameters)
        return differences(parameters, self.parameters) + differences(earlier.inputs, self.inputs)

    def take_up(
        self, folder: Path, aside: Path, *, fresh: bool = False, replace: bool = False, complete: bool = False
    ) -> bool:
        """Whether a folder can be gone on from as it is; if not, it was moved `aside`.

        It is moved if it is to start `fresh`, if it is another training's and `replace` allows that, or if it is
        `complete` and other code trained it. An incomplete one goes on under changed code, with a warning. A ValueError
        refuses another training's folder, with the differences in words.
        """
        reason, changed = self._compare(folder)
        if reason and not (fresh or replace):
            anew = "start over with --fresh (in Python fresh=True)"
            remedy = f"go back to that, or {anew}, which moves the folder to {aside}"
            raise ValueError(f"{reason}; {remedy}")
        if changed and complete:
            reason = f"{folder} was trained by other code: {some(changed)}"
        if fresh or reason:
            target = move_aside(folder, aside)
            if is_copy():  # the project keeps its own
                logger.info("%s; this experiment trains it anew", reason)
            else:
                logger.warning("%s; it was moved to %s", reason or f"{folder} is started over", target)
            return False
        if changed:
            logger.warning("%s: going on, though the code has changed: %s", folder, some(changed))
        return True

    def _compare(self, folder: Path) -> tuple[str, list[str]]:
        """Why a folder cannot be gone on from, "" if it can; and the code files that changed since."""
        try:
            started = read_start(folder)
        except ValueError as fault:
            return str(fault), []
        if started is None:
            return f"{folder} is of an older version of the project, which did not write down what it trained", []
        if found := self.differences_from(started):
            return f"{folder} is another run's: {some(found)}", []
        return "", sorted(differing(started.code, self.code))


def write_start(folder: Path, identity: Identity) -> None:
    """Writes the identity of a run into its folder, and makes the folder if there is none."""
    facts.write(folder / START, asdict(identity))


def read_start(folder: Path) -> Identity | None:
    """The identity of the run of a folder; None if it does not say. A ValueError refuses a damaged or unknown file."""
    file = folder / START
    return Identity(**facts.read(file, [each.name for each in fields(Identity)])) if file.exists() else None
