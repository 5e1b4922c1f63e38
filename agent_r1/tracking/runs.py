"""Flat MLflow runs: one per training, and one per evaluation of what was not trained here."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import yaml

from agent_r1.params import Params, fingerprint, project_root
from agent_r1.params.sections import flatten
from agent_r1.params.train import TrainParams
from agent_r1.tracking.store import open_store

if TYPE_CHECKING:
    from mlflow import MlflowClient

IDENTITY_TAG = "identity"
CODE_TAG = "code"  # which code trained which iterations: `0-11 3fa91c2b, 12-19 77b0e4aa`
REWOUND_TAG = "rewound_ms"  # when the run last went back to an earlier iteration, Unix time
PARAMS_PER_CALL = 100  # MLflow's limit


def provenance(dataset: str, sweep: str = "") -> dict[str, str]:
    """The tags dataset, git_commit, data_hash ("" where it is not known), and sweep for a member of one.

    The commit is followed by `+changes` where tracked files differ from it, besides what DVC writes itself.
    """
    commit = git("rev-parse", "HEAD")
    if git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!*dvc.lock", ":!*.dvc"):
        commit += "+changes"
    found = {"dataset": dataset, "git_commit": commit, "data_hash": _data_hash(project_root() / "dvc.lock")}
    return {**found, "sweep": sweep} if sweep else found


def git(*arguments: str) -> str:
    """What git says in the project; "" without git, outside a repository, or where it refuses."""
    try:
        done = subprocess.run(["git", *arguments], cwd=project_root(), capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return "" if done.returncode else done.stdout.strip()


def _data_hash(lock: Path) -> str:
    """DVC's hash of the prepared data: the md5 of the stage `prepare`'s outputs, joined."""
    if not lock.exists():
        return ""
    stages = yaml.safe_load(lock.read_text()).get("stages", {})
    return "+".join(out["md5"] for out in stages.get("prepare", {}).get("outs", []))


def run_params(variant: str, params: Params, train: TrainParams) -> dict[str, Any]:
    """What MLflow shows of a trained run: the columns to group by, then its whole configuration, flattened."""
    switches = train.credit.advantage_mask.model_dump()
    on = [name for name, value in switches.items() if value]
    return {
        "variant": variant,
        "algorithm": train.credit.estimator,
        "loss_mask": train.credit.loss_mask,
        "advantage_mask": "+".join(on) if 0 < len(on) < len(switches) else bool(on),
        "seed": train.seed,
        "engine": params.engine.kind,
        **flatten(params.model_dump(mode="json", include={"model", "warm_start", "env"})),
        **flatten(train.model_dump(mode="json", exclude={"seed", "checkpoint", "keep"})),
    }


def untrained_params(variant: str, params: Params, model: str | None = None) -> dict[str, Any]:
    """What MLflow shows of an agent that no run has trained: the same columns, without an algorithm and masks.

    It is the warm-started model, or another one by its folder, hub id or reference, whose seed is the evaluation's.
    """
    shown = params.model_dump(mode="json", include={"model", "warm_start", "env"})
    if model is not None:
        shown = {"model": {"path": model, "dtype": params.model.dtype}, "env": shown["env"]}
    columns = dict.fromkeys(("algorithm", "loss_mask", "advantage_mask"), "none")
    seed = params.warm_start.seed if model is None else params.evaluate.seed
    return {"variant": variant, **columns, "seed": seed, "engine": params.engine.kind, **flatten(shown)}


class Run:
    """A handle of one flat MLflow run; made by `start` and `resume`.

    As a context manager it marks the run as running inside and as finished, failed or killed after. Metrics and
    artifacts can be added outside too, to a run that has ended. The tag `code` of a training's run says which code
    trained which iterations.
    """

    def __init__(self, client: MlflowClient, run_id: str, steps_logged: Mapping[str, int] | None = None) -> None:
        """`steps_logged`: of every metric in the store, the step below which none is logged a second time."""
        self.run_id = run_id
        self._client = client
        self._steps_logged = dict(steps_logged or {})

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Adds metrics of one iteration, named `part/what`; those that the store has of it are left as they are."""
        new = {name: value for name, value in metrics.items() if step >= self._steps_logged.get(name, 0)}
        if new:
            self._log(new, step)
            self._steps_logged |= dict.fromkeys(new, step + 1)

    def rewind(self) -> None:
        """Lets every iteration be logged again: the run goes back to an earlier one.

        MLflow forgets nothing. A repeated iteration has two values at its step, the later one last.
        """
        self.tag(REWOUND_TAG, str(_now_ms()))
        self._steps_logged.clear()

    def tag(self, name: str, value: str) -> None:
        """Sets a tag, in place of the value it had."""
        self._client.set_tag(self.run_id, name, value)

    def tags(self) -> dict[str, str]:
        """Its tags, MLflow's own among them."""
        return dict(self._client.get_run(self.run_id).data.tags)

    def final(self, scores: Mapping[str, float]) -> None:
        """Adds each score as `final/<name>`, without a step: the UI shows those as bars."""
        self._log({f"final/{name}": value for name, value in scores.items()}, step=0)

    def artifact(self, path: Path, folder: str = "") -> None:
        """Copies a file into the run's artifacts, under `folder`."""
        self._client.log_artifact(self.run_id, str(path), folder or None)

    def text(self, text: str, path: str) -> None:
        """Stores a text as the artifact `path`."""
        self._client.log_text(self.run_id, text, path)

    def __enter__(self) -> Self:
        self._client.update_run(self.run_id, status="RUNNING")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failed = kind is not None and issubclass(kind, Exception)  # an interrupt and a termination are none
        self._client.set_terminated(self.run_id, "FAILED" if failed else "KILLED" if kind else "FINISHED")

    def _log(self, metrics: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = _now_ms()
        self._client.log_batch(self.run_id, [Metric(name, value, now, step) for name, value in metrics.items()])


def start(name: str, params: Mapping[str, Any], tags: Mapping[str, str], *, recurring: bool = False) -> Run:
    """A new run in the experiment `agent_r1`, still to be entered.

    A run that repeats an earlier one in name, params and tags takes its place: the earlier one goes to MLflow's trash.
    A recurring one neither takes a place nor loses its own.
    """
    client, experiment = open_store()
    from mlflow.entities import Param

    if not recurring:
        identity = fingerprint(name, {key: str(value) for key, value in params.items()}, dict(tags))
        for earlier in client.search_runs([experiment], f"tags.{IDENTITY_TAG} = '{identity}'"):
            client.delete_run(earlier.info.run_id)
        tags = {**tags, IDENTITY_TAG: identity}
    created = client.create_run(experiment, tags=dict(tags), run_name=name)
    entries = [Param(key, str(value)) for key, value in params.items()]
    for first in range(0, len(entries), PARAMS_PER_CALL):
        client.log_batch(created.info.run_id, params=entries[first : first + PARAMS_PER_CALL])
    return Run(client, created.info.run_id)


def resume(run_id: str) -> Run | None:
    """The run of that id, to go on with; None where the project's experiment has no such run, or has it in the trash.

    Whoever made another experiment has said where what is logged to its runs is written.
    """
    client, experiment = open_store()
    from mlflow.exceptions import MlflowException

    try:
        found = client.get_run(run_id)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None
    if found.info.lifecycle_stage != "active" or found.info.experiment_id != experiment:
        return None
    rewound_ms, logged = int(found.data.tags.get(REWOUND_TAG, 0)), dict[str, int]()
    for name in (name for name in found.data.metrics if not name.startswith("final/")):
        points = client.get_metric_history(run_id, name)
        logged[name] = max((point.step + 1 for point in points if point.timestamp > rewound_ms), default=0)
    return Run(client, run_id, logged)


def run_of(folder: Path) -> Run | None:
    """The run whose id a stage left in the file `mlflow_run_id` of its folder, where this store has it."""
    run_id = folder / "mlflow_run_id"
    return resume(run_id.read_text()) if run_id.exists() else None


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
