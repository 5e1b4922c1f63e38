"""Flat MLflow runs: one per training, and one per evaluation of another policy."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import yaml

from agent_r1.harmless import harmless, without_password
from agent_r1.params import Params, fingerprint
from agent_r1.params.places import MODEL, NAMED_BY_DVC, RunId, project_root
from agent_r1.params.sections import flatten
from agent_r1.params.train import TrainParams
from agent_r1.tracking.store import INTERVAL, NOTE, SCORE, allowed, lay_view, open_store, tested, warn_once

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run as MlflowRun

IDENTITY_TAG = "identity"
KIND_TAG = "kind"  # training, baseline or evaluation
VERSION_TAG = "model_version"  # of a training's run: the version that it registered
EXPERIMENT_TAG = "dvc_experiment"
SCORED = re.compile("[Ss]uccess [^:]*? o[fn] the test questions[:.] ")  # begins a description, then and now
FIRST = ("success", "rollout/success", "reward/total", "success/low", "success/high")  # MLflow compares the first
SETTINGS_TAG = "changed_settings"  # the settings that changed within the run, with iterations
CODE_TAG = "code"  # which code trained which iterations: `0-11 3fa91c2b, 12-19 77b0e4aa`
REWOUND_TAG = "rewound_ms"  # when the run last went back to an earlier iteration, Unix time
RANKED = ("success", "success/low", "success/high", "em", "f1")  # of all test questions; of each data set every score
SHOWN = {"estimator", "loss_mask", "advantage_mask"}  # of `credit`, as columns of their own
PARAMS_PER_CALL = 100  # MLflow's limit

DIGEST = 8  # characters of a data set's hash
SOURCE_CHARACTERS = 500  # of a command


def provenance(dataset: str, sweep: str = "") -> dict[str, str]:
    """The tags dataset, git_commit, data_hash ("" if it is unknown), and sweep for a member of one.

    `+changes` follows the commit if tracked files differ from it, apart from the files that DVC writes.
    """
    commit = git("rev-parse", "HEAD")
    of_dvc = (":!*dvc.lock", ":!*.dvc", ":!outputs")
    if git("status", "--porcelain", "--untracked-files=no", "--", ".", *of_dvc):
        commit += "+changes"
    lock = project_root() / "dvc.lock"
    stages = yaml.load(lock.read_bytes(), yaml.CSafeLoader).get("stages", {}) if lock.exists() else {}
    prepared_md5 = "+".join(out["md5"] for out in stages.get("prepare", {}).get("outs", []))
    tags = {"dataset": dataset, "git_commit": commit, "data_hash": prepared_md5}
    return {**tags, "sweep": sweep} if sweep else tags


def git(*arguments: str) -> str:
    """The output of git in the project; "" without git, outside a repository, or if it refuses."""
    try:
        process = subprocess.run(["git", *arguments], cwd=project_root(), capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    if "safe.directory" in process.stderr:
        refusal = harmless(" ".join(process.stderr.split()))
        warn_once(f"runs here record no commit, since git refuses: {refusal}")
    return "" if process.returncode else process.stdout.strip()


def run_params(variant: str, params: Params, train: TrainParams) -> dict[str, Any]:
    """The parameters of a trained run: the columns to group by, then its whole configuration, flattened."""
    switches = train.credit.advantage_mask.model_dump()
    on = [name for name, value in switches.items() if value]
    columns: dict[str, Any] = {"seed": True, "checkpoint": True, "keep": True, "credit": SHOWN}
    return {
        "variant": params.places.named(variant),
        "algorithm": train.credit.estimator,
        "loss_mask": train.credit.loss_mask,
        "advantage_mask": "+".join(on) if 0 < len(on) < len(switches) else bool(on),
        "seed": train.seed,
        "engine": params.engine.kind,
        **({} if _reproducible(params) else {"reproducible": False}),
        **flatten(params.model_dump(mode="json", include={"model", "warm_start", "env"})),
        **flatten(train.model_dump(mode="json", exclude=columns)),
    }


def _reproducible(params: Params) -> bool:
    """Whether every agent outside that may play has tools that answer the same again."""
    worlds = {world.name for world in params.prepare.worlds.values() if world.env == "agent"}
    return all(agent.repeats for name, agent in params.env.agents.items() if name in {params.env.agent, *worlds})


def overrides(params: Params, run: RunId) -> str:
    """A sentence with the values that a run sets over `train` and `env` of params.yaml."""
    changes = (flatten(params.ablations.train) if run.sweep else {}) | flatten(params.runs[run.run] or {})
    but = ", ".join(f"{name} {value}" for name, value in changes.items())
    return f"Trained as params.yaml says{f', but with {but}' if but else ''}."


def untrained_params(variant: str, params: Params, model: str | None = None) -> dict[str, Any]:
    """The parameters of an agent that no run has trained: `run_params`' columns, without an algorithm and masks.

    The agent is the warm-started model, or `model`, a folder, hub id or reference; its seed is the evaluation's.
    """
    sections = params.model_dump(mode="json", include={"model", "warm_start", "env"})
    if model is not None:
        sections = {"model": {"path": model, "dtype": params.model.dtype}, "env": sections["env"]}
    columns = dict.fromkeys(("algorithm", "loss_mask", "advantage_mask"), "none")
    seed = params.warm_start.seed if model is None else params.evaluate.seed
    variant = params.places.named(variant)
    return {"variant": variant, **columns, "seed": seed, "engine": params.engine.kind, **flatten(sections)}


def prepared(params: Params, hashes: Mapping[str, str]) -> dict[str, tuple[Path, str]]:
    """The prepared questions and passages as data sets, each with its file and its hash."""
    files = {"questions": params.places.questions, "passages": params.places.passages}
    return {f"{params.prepare.dataset} {name}": (path, hashes[name]) for name, path in files.items()}


class Run:
    """A handle of one flat MLflow run; made by `start` and `resume`.

    As a context manager it marks the run as running inside and as finished, failed or killed after. Metrics and
    artifacts can be added outside too, to a run that has ended.
    """

    def __init__(self, client: MlflowClient, run_id: str, *, resumed: bool = False) -> None:
        self.run_id = run_id
        self._client = client
        # Metric -> the step below which it is not logged a second time; None is read from the store at the first use.
        self._steps_logged: dict[str, int] | None = None if resumed else {}

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Adds an iteration's metrics that the store lacks, to four significant digits; the run's folder has all."""
        if self._steps_logged is None:
            self._steps_logged = self._logged()
        logged = self._steps_logged
        new = {name: value for name, value in metrics.items() if step >= logged.get(name, 0)}
        if new:
            legible = {name: f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}" for name, value in new.items()}
            self._log({name: float(text) for name, text in legible.items()}, step)
            logged |= dict.fromkeys(new, step + 1)

    def rewind(self) -> None:
        """Lets iterations be logged again after the run went back; MLflow keeps both values, the later one last."""
        self.tag(REWOUND_TAG, str(_now_ms()))
        self._steps_logged = {}

    def tag(self, name: str, value: str) -> None:
        self._client.set_tag(self.run_id, name, value)

    def tags(self) -> dict[str, str]:
        """The run's tags, MLflow's own among them."""
        return dict(self._client.get_run(self.run_id).data.tags)

    def final(self, scores: Mapping[str, float], version: str = "") -> None:
        """Adds each score as `final/<name>`, without a step: the UI shows those as bars.

        The success begins the description of the run, and of the version with this tag, or of the one that the training
        registered. Both have it as tags too. The policy of a training or baseline is also one of MLflow's models, which
        has the scores by data set.
        """
        links = dict[str, dict[str, str]]()
        with allowed("the ranking of policies", self._client):
            links = self._links(scores)
        self._log({f"final/{name}": scores[name] for name in _in_order(scores)}, 0, links)
        if "success/low" not in scores:
            return
        tags = self.tags()
        score = f"{scores['success']:.3f}"
        bounds = f"[{scores['success/low']:.2f}, {scores['success/high']:.2f}]"  # narrow, for the table
        note = f"Success {score} {bounds} on the test questions. {SCORED.sub('', tags.get(NOTE, ''))}"
        self.tag(INTERVAL, bounds)
        self.tag(NOTE, note)
        if tags.get(KIND_TAG) == "training":
            version = tags.get(VERSION_TAG, "")
        if not version:
            return
        model, _, number = version.rpartition("/")
        with allowed("a version's score", self._client):
            self._client.update_model_version(model or MODEL, number, note)
            for name, value in ((SCORE, score), (INTERVAL, bounds)):
                self._client.set_model_version_tag(model or MODEL, number, name, value)

    def uses(self, files: Mapping[str, tuple[Path, str]], context: str) -> None:
        """Names the data sets that the run reads, each with its file and the sha256 of that."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        tags = [InputTag("mlflow.data.context", context)]
        datasets = [
            Dataset(name, digest[:DIGEST], "local", json.dumps({"uri": str(path)}))
            for name, (path, digest) in files.items()
        ]
        self._client.log_inputs(self.run_id, [DatasetInput(dataset, tags) for dataset in datasets])

    def artifact(self, path: Path, folder: str = "") -> None:
        """Copies a file into the run's artifacts, under `folder`."""
        self._client.log_artifact(self.run_id, str(path), folder or None)

    def report(self, folder: Path) -> None:
        """Copies the files of a report into the run's artifacts."""
        for path in sorted(folder.iterdir()):
            self.artifact(path, "report")

    def text(self, text: str, path: str) -> None:
        """Stores a text as the artifact `path`."""
        self._client.log_text(self.run_id, text, path)

    def __enter__(self) -> Self:
        self._client.update_run(self.run_id, status="RUNNING")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        failed = kind is not None and issubclass(kind, Exception)  # an interrupt and a termination are none
        self._client.set_terminated(self.run_id, "FAILED" if failed else "KILLED" if kind else "FINISHED")

    def _logged(self) -> dict[str, int]:
        """The step below which each metric of iterations is in the store, since the run last went back."""
        data = self._client.get_run(self.run_id).data
        rewound_ms = int(data.tags.get(REWOUND_TAG, 0))
        steps = dict[str, int]()
        for name in (name for name in data.metrics if not name.startswith("final/")):
            points = self._client.get_metric_history(self.run_id, name)
            steps[name] = max((point.step + 1 for point in points if point.timestamp > rewound_ms), default=0)
        return steps

    def _links(self, scores: Mapping[str, float]) -> dict[str, dict[str, str]]:
        """The model and the data set of each score by which MLflow ranks the policies of trainings and baselines."""
        run = self._client.get_run(self.run_id)
        datasets = tested(run)
        if not datasets or run.data.tags.get(KIND_TAG) not in ("training", "baseline"):
            return {}
        whole, digest = datasets[-1]
        models = _models_of(run) or [_new_model(self._client, run)]
        links = dict[str, dict[str, str]]()
        for name in scores:
            part = name.partition("/dataset_")[2]
            if part or name in RANKED:
                dataset = f"{part} questions" if part else whole
                links[f"final/{name}"] = {"model_id": models[0], "dataset_digest": digest, "dataset_name": dataset}
        return links

    def _log(self, metrics: Mapping[str, float], step: int, links: Mapping[str, dict[str, str]] | None = None) -> None:
        from mlflow.entities import Metric

        now_ms = _now_ms()
        links = links or {}
        entries = [Metric(name, metrics[name], now_ms, step, **links.get(name, {})) for name in _in_order(metrics)]
        self._client.log_batch(self.run_id, entries)


def start(
    name: str,
    params: Mapping[str, Any],
    tags: Mapping[str, str],
    *,
    about: str = "",
    recurring: bool = False,
    began_s: float | None = None,
) -> Run:
    """A new run in the experiment `agent_r1`, still to be entered; `about` is its description.

    Its source is the command that makes it. In an experiment of DVC's its name ends with the experiment's. A run that
    repeats an earlier one in name, params and tags takes its place: the earlier one goes to MLflow's trash. A recurring
    one neither takes a place nor loses its own. `began_s`: its start in Unix time, if not now.
    """
    client, experiment = open_store()
    lay_view(client, experiment)
    if dvc_experiment := os.environ.get(NAMED_BY_DVC):
        name = f"{name} ({dvc_experiment})"
        tags = {**tags, EXPERIMENT_TAG: dvc_experiment}
    if not recurring:
        identity = fingerprint(name, {key: str(value) for key, value in params.items()}, dict(tags))
        _remove(client, experiment, identity)
        tags = {**tags, IDENTITY_TAG: identity}
    since_ms = _now_ms() if began_s is None else round(began_s * 1000)
    shown = _columns(about, tags.get("git_commit", ""))
    run_id = client.create_run(experiment, since_ms, {**tags, **shown}, run_name=name).info.run_id
    _log_params(client, run_id, params)
    return Run(client, run_id)


def _columns(about: str, git_commit: str) -> dict[str, str]:
    """MLflow's own tags of a new run that have a value: the description, the command and the commit."""
    columns = {
        NOTE: about,
        "mlflow.source.name": without_password(" ".join(sys.argv))[:SOURCE_CHARACTERS],
        "mlflow.source.git.commit": git_commit.partition("+")[0],
        "mlflow.source.type": "LOCAL",
    }
    return {name: value for name, value in columns.items() if value}


def _log_params(client: MlflowClient, run_id: str, params: Mapping[str, Any]) -> None:
    from mlflow.entities import Param

    entries = [Param(key, str(value)) for key, value in params.items()]
    for first in range(0, len(entries), PARAMS_PER_CALL):
        client.log_batch(run_id, params=entries[first : first + PARAMS_PER_CALL])


def _remove(client: MlflowClient, experiment: str, identity: str) -> None:
    """Puts runs of an identity, with their models, into MLflow's trash."""
    for run in client.search_runs([experiment], f"tags.{IDENTITY_TAG} = '{identity}'"):
        for model in _models_of(client.get_run(run.info.run_id)):
            client.delete_logged_model(model)
        client.delete_run(run.info.run_id)


def start_training(params: Params, run: RunId, tags: Mapping[str, str]) -> Run:
    """A new run for a training, with its parameters, and with further tags."""
    config = params.run(run)
    label = replace(run, seed=config.seed).label
    tags = provenance(params.prepare.dataset, run.sweep) | {KIND_TAG: "training"} | dict(tags)
    return start(label, run_params(run.name, params, config), tags, about=overrides(params, run))


def resume(run_id: str) -> Run | None:
    """The run of that id, to go on with; None if the project's experiment has no such run, or has it in the trash.

    A run of another experiment is none: its artifacts may be written to any folder.
    """
    client, experiment = open_store()
    from mlflow.exceptions import MlflowException

    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None
    if run.info.lifecycle_stage != "active" or run.info.experiment_id != experiment:
        return None
    return Run(client, run_id, resumed=True)


def run_of(folder: Path) -> Run | None:
    """The run whose id a stage left in the file `mlflow_run_id` of its folder, if this store has it."""
    run_id = folder / "mlflow_run_id"
    return resume(run_id.read_text()) if run_id.exists() else None


def _models_of(run: MlflowRun) -> list[str]:
    return [output.model_id for output in run.outputs.model_outputs] if run.outputs else []


def _new_model(client: MlflowClient, run: MlflowRun) -> str:
    """The id of a new model of MLflow's that stands for the policy of a run; its weights stay where they are."""
    from mlflow.entities import LoggedModelOutput

    info = run.info
    name = re.sub("""[/:.%"']""", "-", info.run_name)  # MLflow refuses these in a model's name
    tags = {"mlflow.model.isExternal": "true"}
    names = sorted({"variant", "algorithm", "seed"} & run.data.params.keys())
    params = {name: run.data.params[name] for name in names}
    model = client.create_logged_model(info.experiment_id, name, info.run_id, tags, params, "agent").model_id
    client.finalize_logged_model(model, "READY")
    client.log_outputs(info.run_id, [LoggedModelOutput(model, 0)])
    return str(model)


def _in_order(metrics: Mapping[str, float]) -> list[str]:
    return sorted(metrics, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
