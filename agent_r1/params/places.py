"""Places of the project: its root, the names of trainings, and the folders of artifacts."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, Field

from agent_r1.params.sections import Section

PARAMS = "params.yaml"  # marks the project's root
MODEL = "agent_r1"  # the registered model of a project without a scale
SCHEME = "models:/"  # of a registered version's reference, in MLflow's own syntax
MODELS = Path("models")  # DVC's files of registered policies
NAMED_BY_DVC = "DVC_EXP_NAME"  # `dvc exp run --name NAME` says it to its stages
RAW = Path("data/raw")  # the files of real data sets
UNREAD = "data/raw/README.md"  # one of them that no stage reads
SWEEP = "ablations"  # the section that lists runs and seeds, and the name of its outputs
IMPORTED = "imported"  # runs of other trainers: their graph in words, and the folder of outputs
REPRO = "repro"  # the main graph, in words of the command line
_LABEL = re.compile(r"(?P<run>\w{1,200})(-(?P<variant>[0-9a-f]{8}))?(-seed(?P<seed>\d{1,19}))?", re.ASCII)


def project_root() -> Path:
    """The nearest folder from the current one upwards that holds params.yaml; a ValueError says that there is none."""
    current = Path.cwd()
    for folder in (current, *current.parents):
        if (folder / PARAMS).exists():
            return folder
    raise ValueError(f"no {PARAMS} in {current} or above it; run from inside the project")


def tracking_folder() -> Path:
    """Where MLflow, Prefect and the locks of this project's clone keep their files.

    An experiment that DVC runs in a copy of the project keeps them with the project itself, and so does an overlay that
    has a folder of its own, by a link.
    """
    return (Path(os.environ.get("DVC_ROOT") or project_root()) / ".tracking").resolve()


def is_copy() -> bool:
    """Whether this is the copy of the project in which DVC runs an experiment, and which goes when that ends."""
    return "DVC_ROOT" in os.environ and not project_root().samefile(os.environ["DVC_ROOT"])


@dataclass(frozen=True, slots=True)
class RunId:
    """The name of a training: a run of params.yaml, and its differences from the run as it stands there."""

    run: str  # a name under `runs:`
    seed: int | None = None  # in place of the run's own
    sweep: str = ""  # the sweep that it is a member of
    variant: str = ""  # eight hex digits that stand for further overrides

    @property
    def name(self) -> str:
        """The name of the run in commands and in MLflow, whatever its seed: `ppo` or `ppo-0a1b2c3d`."""
        return f"{self.run}-{self.variant}" if self.variant else self.run

    @property
    def label(self) -> str:
        """The name of its folder, such as `ppo`, `ppo-seed3` or `ppo-0a1b2c3d-seed3`."""
        return self.name + ("" if self.seed is None else f"-seed{self.seed}")

    @property
    def word(self) -> str:
        """How a command line names it: `ppo-seed3`, of a sweep `ablations/ppo-seed3`."""
        return f"{self.sweep}/{self.label}" if self.sweep else self.label

    @property
    def lock(self) -> Path:
        """DVC's record of the graph that trains it."""
        return Path(self.sweep) / "dvc.lock"

    def stage(self, name: str) -> str:
        """The address of a stage of that graph."""
        return f"{self.sweep}/dvc.yaml:{name}" if self.sweep else name

    @classmethod
    def meant(cls, word: str) -> Self:
        """The training that a word of a command line means; `repro/ppo-seed3` is that of the main graph, too."""
        graph, _, label = word.rpartition("/")
        return cls.parse(label if graph in (REPRO, SWEEP, IMPORTED) else word, graph * (graph in (SWEEP, IMPORTED)))

    @classmethod
    def exact(cls, word: str) -> Self | str:
        """The training that a word names by its graph, `repro/ppo` or `ablations/ppo-seed3`; else the word."""
        return cls.meant(word) if word.startswith((f"{REPRO}/", f"{SWEEP}/", f"{IMPORTED}/")) else word

    @classmethod
    def parse(cls, label: str, sweep: str = "") -> Self:
        """Reads a label back; a ValueError says that it is none."""
        match = _LABEL.fullmatch(label)
        if not match:
            raise ValueError(f"{label!r} is no label of a training; labels look like ppo or ppo-seed3")
        seed = match["seed"]
        return cls(match["run"], None if seed is None else int(seed), sweep, match["variant"] or "")


def _relative(folder: str) -> str:
    if not re.fullmatch(r"[\w.-]{1,200}(/[\w.-]{1,200}){,9}", folder, re.ASCII) or ".." in folder.split("/"):
        raise ValueError("name a folder inside the project, of some letters, digits, _, - and ., without ..")
    return folder


Folder = Annotated[str, AfterValidator(_relative)]


class Places(Section):
    """`places`: the two folders that hold all artifacts, and the path of each, relative to the project's root."""

    data: Folder
    outputs: Folder
    raw: Annotated[str, Field(min_length=1)] = UNREAD  # a dependency: DVC's graphs take no list
    scale: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{0,64}$")] = ""  # of names in MLflow

    def named(self, name: str) -> str:
        """A name as MLflow has it, in which other scales have the same one: `ppo-sokoban`."""
        return f"{name}-{self.scale}" if self.scale and f"-{self.scale}" not in name else name

    @property
    def model(self) -> str:
        """The registered model whose versions are this project's policies."""
        return self.named(MODEL)

    @property
    def prepared(self) -> Path:
        return Path(self.data) / "prepared"

    @property
    def questions(self) -> Path:
        return self.prepared / "questions.parquet"

    @property
    def passages(self) -> Path:
        return self.prepared / "passages.parquet"

    @property
    def index(self) -> Path:
        return Path(self.data) / "index"

    @property
    def warm_start(self) -> Path:
        return Path(self.outputs) / "warm_start"

    @property
    def unfinished_warm_start(self) -> Path:
        """The progress of a warm start that is not finished; no other stage reads it."""
        return Path(self.outputs) / "warm_start.unfinished"

    @property
    def aside(self) -> Path:
        """Trainings that made room for others; no stage reads them."""
        return Path(self.outputs) / "aside"

    @property
    def history(self) -> Path:
        """The repeated evaluations of registered versions."""
        return Path(self.outputs) / "history"

    @property
    def imported(self) -> Path:
        """The runs of other trainers."""
        return Path(self.outputs) / IMPORTED

    def training(self, run: RunId) -> Path:
        """The folder of a run's iterations, checkpoint and metrics."""
        return self.imported / run.label if run.sweep == IMPORTED else self._of(run.sweep) / "train" / run.label

    def variant(self, run: RunId) -> Path:
        """The file of the further overrides that a variant stands for."""
        return Path(self.outputs) / "variants" / f"{run.name}.json"

    def version(self, run: RunId) -> Path:
        """The file that names the registered version of a training."""
        return self._of(run.sweep) / "register" / f"{run.label}.json"

    def evaluation(self, label: str, sweep: str = "") -> Path:
        """The folder of an evaluation, by the label of a training, a baseline or any other policy."""
        return self._of(sweep) / "evaluate" / label

    def report(self, sweep: str = "") -> Path:
        """The folder of a report: of the main graph's runs, or of a sweep's."""
        return self._of(sweep) / "report"

    def scores(self, sweep: str = "") -> Path:
        """The folder with the final score of every agent in the report."""
        return self._of(sweep) / "scores"

    def curves(self, sweep: str = "") -> Path:
        """The folder with the learning curves of the runs in the report."""
        return self._of(sweep) / "curves"

    def page(self, run: RunId) -> Path:
        """The page on which a run's trajectories are looked at."""
        return (
            self.training(run) / "view.html"
            if run.sweep == IMPORTED
            else self._of(run.sweep) / "view" / f"{run.label}.html"
        )

    def _of(self, sweep: str) -> Path:
        return Path(self.outputs) / sweep


def policy_in(training: Path) -> Path:
    """The latest policy in the folder of a training, a Hugging Face folder."""
    return training / "checkpoint" / "policy"


def adapter_in(policy: Path) -> Path:
    """The adapters in the folder of a policy, where adapters train."""
    return policy / "adapter"


def registered_policy(label: str, policy_hash: str) -> Path:
    """DVC's file of a registered policy's copy; the copy lies beside it, without the suffix."""
    return MODELS / f"{label}-{policy_hash[:8]}.dvc"


def registered_training(policy: Path) -> Path:
    """DVC's file of the folder of the training that made a registered policy, beside the policy's own."""
    return policy.with_name(f"{policy.stem}-training.dvc")
