"""Which training a folder is of: what makes a run this one and no other, and the code that trains it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from agent_r1.files import write_text
from agent_r1.params import Params, fingerprint
from agent_r1.params.sections import constants, differences, flatten
from agent_r1.params.train import TrainParams

START = "start.json"
NAMED = 5  # of what differs, in a message


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """What makes a run this one and no other, and the code that trains it."""

    parameters: dict[str, Any]  # dotted name -> value
    inputs: dict[str, str] = field(default_factory=dict)  # what it is trained on -> hash
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

        What it writes how often and keeps (`train.checkpoint`, `train.keep`) is no part of it, nor is what it takes to
        give an iteration up, nor how many processes share the learner, whose weights differ by rounding alone.
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
        """In words, such as `train.credit.lam 0.99 -> 0.95`; empty where the run is the same."""
        kept = constants(Params)  # keys of earlier versions
        parameters = {name: value for name, value in earlier.parameters.items() if (name, value) not in kept.items()}
        return differences(parameters, self.parameters) + differences(earlier.inputs, self.inputs)

    def compare(self, folder: Path) -> tuple[str, list[str]]:
        """Why the run cannot go on from what is in a folder, "" where it can; and the code files that changed since."""
        try:
            started = read_start(folder)
        except ValueError as fault:
            return str(fault), []
        if started is None:
            return f"{folder} is of an older version of the project, which did not write down what it trained", []
        if differing := self.differences_from(started):
            return f"{folder} is another run's: {some(differing)}", []
        return "", self.changed_code(started)

    def changed_code(self, earlier: Identity) -> list[str]:
        """The files that are not as they were."""
        return sorted(name for name in earlier.code.keys() | self.code if earlier.code.get(name) != self.code.get(name))


def write_start(folder: Path, identity: Identity) -> None:
    """Writes down what is started in a folder, which it makes where there is none."""
    write_text(folder / START, json.dumps(asdict(identity), indent=2) + "\n")


def read_start(folder: Path) -> Identity | None:
    """How the run in a folder was last started; None where the folder does not say.

    Raises ValueError if what it says is not what this version of the project writes.
    """
    file = folder / START
    if not file.exists():
        return None
    try:
        return Identity(**{name: dict(entries) for name, entries in json.loads(file.read_text()).items()})
    except (ValueError, TypeError, AttributeError) as fault:
        raise ValueError(f"{file} is damaged, or of another version of the project: {fault}") from fault


def some(names: list[str]) -> str:
    """The first few of what differs, and how many more there are."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
