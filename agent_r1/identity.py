"""The identity of a training: the facts that tell it from others, and whether its folder can be gone on from."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from agent_r1 import facts
from agent_r1.facts import differences, differing, some
from agent_r1.files import write_json
from agent_r1.params import Params, fingerprint
from agent_r1.params.same_run import NOT_ONE_RUN, defines
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
        """The identity of a run, whose parameters are of the three kinds of `agent_r1.params.same_run`."""
        sections = {
            "train": config.model_dump(mode="json"),
            "env": settings.env.model_dump(mode="json"),
            "model": settings.model.model_dump(mode="json"),
            "learner": settings.learner.model_dump(mode="json"),
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

    def differences_from(self, start: Identity) -> list[str]:
        """The differences in words that make another run, such as `train.credit.lam 0.99 -> 0.95`; [] for the same."""
        return self._differences(start, defining=True) + differences(start.inputs, self.inputs)

    def changes_since(self, start: Identity) -> list[str]:
        """The differences in words that leave the run the same, of settings that both have."""
        return self._differences(start, defining=False)

    def refusal(self, folder: Path, *, complete: bool, accepted: str = "") -> str:
        """The reason why a folder cannot be gone on from; "" if it can.

        It is another run's, or it is `complete` and other code than the `accepted` trained it, by the code's digest.
        """
        try:
            start = read_start(folder)
        except ValueError as fault:
            return str(fault)
        if start is None:
            return f"{folder} is of an older version of the project, which did not write down what it trained"
        if reasons := self.differences_from(start):
            return f"{folder} is another run's: {some(reasons)}"
        code = self._changed_code(start)
        if code and complete and self.code_digest != accepted:
            return f"{folder} was trained by other code: {some(code)}"
        return ""

    def go_on(self, folder: Path, progress: str, *, complete: bool) -> None:
        """Says how far a folder is that is gone on from, and which settings and code have changed since."""
        logger.info("%s: going on after %s", folder, progress)
        start = read_start(folder) or self
        changes = self.changes_since(start)
        if changes and complete:
            logger.info("%s is complete, and stays as it is under other settings: %s", folder, some(changes))
        elif changes:
            logger.warning("%s: settings change after %s: %s; %s", folder, progress, ", ".join(changes), NOT_ONE_RUN)
        code = self._changed_code(start)
        if code and not complete:
            logger.warning("%s: going on, though the code has changed: %s", folder, some(code))

    def _changed_code(self, start: Identity) -> list[str]:
        return sorted(differing(start.code, self.code))

    def _differences(self, start: Identity, *, defining: bool) -> list[str]:
        stored = of_today(start.parameters, self.parameters)
        parameters = self.parameters
        lines = zip(differing(stored, parameters), differences(stored, parameters), strict=True)
        names = stored.keys() | parameters if defining else stored.keys() & parameters
        return [line for name, line in lines if name in names and defines(name, stored, parameters) == defining]


def write_start(folder: Path, identity: Identity) -> None:
    """Writes the identity of a run into its folder, and makes the folder if there is none."""
    write_json(folder / START, asdict(identity))


def read_start(folder: Path) -> Identity | None:
    """The identity of the run of a folder; None if it does not say. A ValueError refuses a damaged or unknown file."""
    file = folder / START
    return Identity(**facts.read(file, [field.name for field in fields(Identity)])) if file.exists() else None
