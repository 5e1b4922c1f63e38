"""The register stage: `agent-r1 register RUN`. A training's policy becomes a version of the registry.

A repeated training overwrites its folder, and a training outside of `dvc repro` is in no dvc.lock. So DVC's cache gets
every registered policy, as models/LABEL-HASH.dvc, and the folder of its training, as models/LABEL-HASH-training.dvc.
Git can keep these files, and `dvc push` and `dvc pull` work with them.

The content stays beside the files, or DVC would call it deleted. It takes no room: it is linked to DVC's cache, which
nobody may write into. It stays until somebody removes it, because another process may read it.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

from agent_r1 import params, tracking
from agent_r1.files import remove_folder, sha256, write_json
from agent_r1.identity import Identity, read_start
from agent_r1.learn import checkpoint
from agent_r1.params.places import PARAMS, RunId, policy_in, registered_policy, registered_training
from agent_r1.tracking import registry
from agent_r1.tracking.runs import CODE_TAG
from flows.dvc_files import is_linked, link, link_to_cache, recorded_md5, run_dvc

LOADED = Path(__file__).with_name("version")  # by which MLflow loads a version
ORIGIN = ("git_commit", "data_hash", CODE_TAG)  # of a descriptor: tags of the training's MLflow run

logger = logging.getLogger(__name__)


def register(run: RunId) -> None:
    """Registers the final policy of a training, and has DVC keep it and the training's folder.

    A repetition changes nothing. Writes one small file with the version, and with facts that only the training's MLflow
    run has, so that another store can be given the same version.
    """
    settings = params.load()
    files = [Path(PARAMS), *(file for file in LOADED.iterdir() if file.is_file())]
    version = registry.register(_describe(settings, run), settings.places.model, files)
    descriptor = version.descriptor
    logger.info("%s is %s", descriptor.policy, version.reference)
    facts = {"version": version.reference, "policy": descriptor.policy_hash} | {
        name: getattr(descriptor, name) for name in ORIGIN
    }
    write_json(settings.places.version(run), facts)
    _push(descriptor)


def _describe(settings: params.Params, run: RunId) -> registry.Descriptor:
    training = settings.places.training(run)
    policy = policy_in(training)
    start, progress = _complete(training, settings, run)
    policy_hash = sha256(policy)
    registered = registry.of_policy(policy_hash, settings.places.model)
    tracked, origin = _tracked(settings, run, policy_hash, registered)
    dvc_file = registered_policy(registered.descriptor.label if registered else run.label, policy_hash)
    dvc_hash = keep(policy, dvc_file)
    return registry.Descriptor(
        label=run.label,
        run=run.run,
        seed=settings.run(run).seed,
        sweep=run.sweep,
        mlflow_run_id=tracked.run_id,
        policy=policy.as_posix(),
        policy_hash=policy_hash,
        policy_version=progress.policy_version,
        dvc_file=dvc_file.as_posix() if dvc_hash else "",
        dvc_hash=dvc_hash,
        config=start.fingerprint,
        dvc_training_hash=keep(training, registered_training(dvc_file)),
        **{name: start.inputs[name] for name in ("questions", "passages", "index", "prompt")},
        **origin,
    )


def _complete(training: Path, settings: params.Params, run: RunId) -> tuple[Identity, checkpoint.Progress]:
    """The records of a training at its end. Raises FileNotFoundError and ValueError if it is not there yet."""
    policy = policy_in(training)
    start = read_start(training)
    progress = checkpoint.peek(policy.parent)
    if progress is None or start is None:
        missing = f"{training} holds no training of this version of the project"
        raise FileNotFoundError(f"{missing}; train it first (`agent-r1 train {run.word}`)")
    planned = progress.planned(settings.run(run))
    if not progress.stopped and progress.iterations < planned:
        raise ValueError(f"{training} is at iteration {progress.iterations} of {planned}; train it to its end")
    if checkpoint.is_adapters_alone(policy):
        raise ValueError(f"the adapters in {policy} are not merged yet; start the training again, which does it")
    checkpoint.require_whole(policy.parent, checkpoint.POLICY)
    return start, progress


def _tracked(
    settings: params.Params, run: RunId, policy_hash: str, registered: registry.Version | None
) -> tuple[tracking.Run, dict[str, str]]:
    """The training's MLflow run, and its origin; in a store without that run a new one stands for it."""
    training = settings.places.training(run)
    run_id = (training / "mlflow_run_id").read_text()
    tracked = tracking.resume(run_id)
    if tracked:
        tags = tracked.tags()
        return tracked, {name: tags.get(name, "") for name in ORIGIN}
    file = settings.places.version(run)
    stored = json.loads(file.read_text()) if file.exists() else {}
    if stored.get("policy") != policy_hash:
        raise ValueError(f"MLflow's store has no run {run_id} of {training}; start the training again, which logs it")
    origin = {name: stored[name] for name in ORIGIN}
    tracked = tracking.resume(registered.descriptor.mlflow_run_id) if registered else None
    if tracked:
        return tracked, origin
    with tracking.start_training(settings.of(run), run, origin) as stand_in:
        return stand_in, origin


def keep(folder: Path, dvc_file: Path) -> str:
    """Puts a folder into DVC's cache, and returns DVC's hash; "" if the project is no DVC repository."""
    if not Path(".dvc").is_dir():
        return ""
    content = dvc_file.with_suffix("")
    if is_linked(dvc_file) and sha256(content) == sha256(folder):
        return recorded_md5(dvc_file)
    remove_folder(content)
    try:
        shutil.copytree(folder, content, copy_function=link)
        failed = run_dvc("add", str(content))
    finally:
        remove_folder(content)
    if failed:
        raise OSError(f"DVC could not keep {folder} ({failed}); mend that and register again")
    link_to_cache(dvc_file)
    return recorded_md5(dvc_file)


def _push(model: registry.Descriptor) -> None:
    """Copies DVC's files of a model to the default remote, if there is one; warns if that fails."""
    if not model.dvc_file or run_dvc("remote", "default"):
        return
    training = [str(registered_training(Path(model.dvc_file)))] if model.dvc_training_hash else []
    if failed := run_dvc("push", model.dvc_file, *training):
        lacking = f"other clones cannot have it yet, DVC could not push it ({failed})"
        remedy = f"mend that and run `dvc push {' '.join([model.dvc_file, *training])}`"
        logger.warning("%s is registered, but %s; %s", model.label, lacking, remedy)
