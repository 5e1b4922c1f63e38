"""MLflow's model registry: a registered model per scale, one version for every policy that a training finished with.

A version holds no weights but a `Descriptor`, in a folder among the artifacts of the training's MLflow run that MLflow
loads and serves, and which is the version's source. Its tags `run`, `score` and `interval` are for people, and nothing
reads them. Versions of earlier revisions of the project have the descriptor alone as their source, which MLflow does
not load. Others may write there, and fields become paths: a version with a descriptor that no training writes is left
out, with a warning.

One alias, `champion`, points at one version or at none. `promote` moves it only from the version that the caller saw.
Registering and promoting hold a lock of this clone, so that one of two promotions is refused. Clones that share a
server need a common lock around it, as `flows.operation.promote` takes one: MLflow has no compare-and-set.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, TypeAdapter, ValidationError

from agent_r1.params.places import MODEL, SCHEME, SWEEP, Folder, RunId, policy_in, registered_policy
from agent_r1.params.sections import Natural
from agent_r1.tracking.runs import VERSION_TAG
from agent_r1.tracking.store import FINAL, INTERVAL, NOTE, SCORE, locked, open_store, warn_once

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

CHAMPION = "champion"
THE_CHAMPION = f"{SCHEME}{MODEL}@{CHAMPION}"
REFERENCE = re.compile(rf"{SCHEME}(?P<model>{MODEL}(-[\w.-]{{1,64}})?)(@(?P<alias>[\w-]+)|/(?P<number>\d+))", re.ASCII)
DESCRIPTOR = "descriptor.json"
SOURCE = re.compile(rf"\S*/([0-9a-f]{{32}})/artifacts/(policies/[0-9a-f]{{8}})(/{DESCRIPTOR})?", re.ASCII)
LARGEST = 20_000  # bytes of a descriptor
ABOUT = "A version is the policy that a training finished with. Its score is the success on the test questions."

_LOCK = "registry.lock"
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Commit = Annotated[str, Field(pattern=r"^[0-9a-f]*(\+changes)?$")]
DvcFolder = Annotated[str, Field(pattern=r"^([0-9a-f]{32}\.dir)?$")]  # DVC's md5 of a folder, "" for none
DvcHashes = Annotated[str, Field(pattern=r"^([0-9a-f]{32}(\.dir)?(\+|$))*$")]  # several, joined
Choice = Callable[["ModelVersion", Sequence[str]], bool]  # chooses a version by its entry in MLflow and its aliases


@dataclass(frozen=True, kw_only=True, slots=True)
class Descriptor:
    """A policy, its origin and its whereabouts."""

    label: str  # of the training: `ppo`, `ppo-seed3`
    run: Annotated[str, Field(pattern="^[A-Za-z0-9_]+$")]  # a name under runs:
    seed: Natural
    sweep: Annotated[str, Field(pattern=f"^({SWEEP})?$")]  # of which the training is a member, "" of none
    mlflow_run_id: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]  # of the latest training that gave the policy
    policy: Annotated[Folder, Field(pattern=f"/{policy_in(Path())}$")]  # as the training wrote it, in the project
    policy_hash: Sha256  # sha256 of that folder
    policy_version: Natural  # updates since the warm start
    dvc_file: str  # DVC's file of the copy that outlives the folder, "" outside a DVC project
    dvc_hash: DvcFolder  # DVC's md5 of that copy, "" outside a DVC project
    git_commit: Commit  # of the code, with `+changes` if files differed from it
    data_hash: DvcHashes  # DVC's md5 of the prepared data, "" if it was unknown
    questions: Sha256  # sha256 of the prepared questions
    passages: Sha256  # sha256 of the passages
    index: str  # hash of the index over them, which may be the word of a search server
    prompt: Sha256  # hash of system message, tools and chat template
    config: Annotated[str, Field(pattern="^[0-9a-f]{16}$")]  # fingerprint of the run's configuration and its inputs
    code: str = ""  # which code trained which iterations, by short hashes; "" if it was not noted
    dvc_training_hash: DvcFolder = ""  # DVC's md5 of the training's folder as it ended, "" if DVC does not keep it

    def __post_init__(self) -> None:
        RunId.parse(self.label)
        is_kept = self.dvc_hash or self.dvc_training_hash
        expected = registered_policy(self.label, self.policy_hash).as_posix() if is_kept else ""
        if self.dvc_file != expected:
            raise ValueError(f"dvc_file is {self.dvc_file!r}, and of this policy {expected!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Version:
    """A registered policy."""

    number: int
    descriptor: Descriptor
    aliases: tuple[str, ...] = ()
    model: str = MODEL
    score: str = field(default="", compare=False)  # as its tag has it, such as 0.892; "" before its evaluation

    @property
    def reference(self) -> str:
        """The reference that names it for good: `models:/agent_r1/3`."""
        return f"{SCHEME}{self.model}/{self.number}"

    @property
    def name(self) -> str:
        """The name of its evaluations: `agent_r1-v3`."""
        return f"{self.model}-v{self.number}"

    @property
    def tag(self) -> str:
        """The tag of its training's run: `3`, and `agent_r1-sokoban/3` at a scale."""
        return str(self.number) if self.model == MODEL else f"{self.model}/{self.number}"

    @property
    def is_champion(self) -> bool:
        return CHAMPION in self.aliases


class Outpaced(ValueError):
    """The champion is no longer the one that was compared with."""


def register(descriptor: Descriptor, model: str = MODEL, files: Sequence[Path] = ()) -> Version:
    """The version of the descriptor's policy: a new one, or the one that has the same policy hash.

    MLflow can load it with `files` beside its descriptor.

    An earlier version keeps its origin and learns its whereabouts: the MLflow run, the folder and DVC's copy. To repeat
    it changes nothing, after a kill at any point too. The run that the version comes from gets the artifacts, and the
    training's latest run the tag `model_version`.
    """
    client, _ = open_store()
    with locked(_LOCK):
        registered = of_policy(descriptor.policy_hash, model)
        if registered is None:
            number = _create(client, descriptor, model, files)
            version = Version(number=number, descriptor=descriptor, model=model)
        else:
            version = dataclasses.replace(registered, descriptor=_moved(registered.descriptor, descriptor))
            if version != registered:
                source = client.get_model_version(model, str(registered.number)).source or ""
                _describe(client, SOURCE.sub(r"\1", source), version.descriptor, files)
        client.set_tag(version.descriptor.mlflow_run_id, VERSION_TAG, version.tag)
        return version


def versions(model: str = MODEL, is_wanted: Choice = lambda *_: True) -> list[Version]:
    """The versions that are wanted, by number; one with a bad descriptor is left out, with a warning."""
    client, experiment = open_store()
    aliases_of = defaultdict[int, list[str]](list)  # a version's number -> its aliases
    for entry in client.search_registered_models(f"name = '{model}'"):  # one, or none yet
        for alias, number in sorted(entry.aliases.items()):
            aliases_of[int(number)].append(alias)
    result = list[Version]()
    for row in sorted(client.search_model_versions(f"name = '{model}'"), key=lambda row: int(row.version)):
        aliases = tuple(aliases_of[int(row.version)])
        descriptor = _read(client, experiment, row) if is_wanted(row, aliases) else None
        if descriptor:
            score = row.tags.get(SCORE, "")
            number = int(row.version)
            result.append(Version(number=number, descriptor=descriptor, aliases=aliases, model=model, score=score))
    return result


def of_policy(policy_hash: str, model: str = MODEL) -> Version | None:
    """The version with this policy, whose source is named after it."""
    folder = f"/policies/{policy_hash[:8]}"
    matches = versions(model, lambda row, _: folder in (row.source or ""))
    return next((version for version in matches if version.descriptor.policy_hash == policy_hash), None)


def champion(model: str = MODEL) -> Version | None:
    """The version that the alias `champion` points at."""
    return next(iter(versions(model, lambda _, aliases: CHAMPION in aliases)), None)


def find(reference: str) -> Version:
    """The version of `models:/agent_r1@champion` or `models:/agent_r1/3`; ValueError if there is no such one."""
    parts = REFERENCE.fullmatch(reference)
    if parts is None:
        references = f"{THE_CHAMPION} and {SCHEME}{MODEL}/NUMBER, at a scale {MODEL}-SCALE"
        raise ValueError(f"{reference!r} is no reference to a model of this project; they are {references}")
    model = parts["model"]
    alias = parts["alias"]
    number = parts["number"]
    if matches := versions(model, lambda entry, aliases: alias in aliases or number == str(entry.version)):
        return matches[0]
    if registered := versions(model):
        raise ValueError(f"{reference}: {_missing(alias, registered)}")
    raise ValueError(f"{reference}: the registry is empty; a training that finishes registers its policy")


def promote(version: Version, *, expected: Version | None) -> Version:
    """Makes a version the champion in place of the expected one, None for the first, and returns it.

    Raises Outpaced if the champion is another one by now.
    """
    client, _ = open_store()
    with locked(_LOCK):
        current = _in_words(champion(version.model))
        if current != _in_words(expected):
            intent = f"version {version.number} was to take the place of {_in_words(expected)}"
            remedy = "promote it again, against that one"
            raise Outpaced(f"{intent}, and the champion is {current} by now; {remedy}")
        client.set_registered_model_alias(version.model, CHAMPION, str(version.number))
        return find(version.reference)


def _in_words(version: Version | None) -> str:
    return f"version {version.number}" if version else "no version"


def no_champion(versions: Sequence[Version]) -> str:
    """How the best of some versions becomes the first champion."""
    best = max(versions, key=lambda version: version.score)
    command = f"`agent-r1 promote {best.reference} --first`, the best so far"
    return f"the registry has no champion; the first becomes one only by {command}"


def _read(client: MlflowClient, experiment: str, version: ModelVersion) -> Descriptor | None:
    """The descriptor of a version; None if no training registered it, and with a warning if it is wrong or gone."""
    source = version.source or ""
    try:
        if SOURCE.fullmatch(source):
            return TypeAdapter(Descriptor).validate_json(_stored(client, experiment, source))
        return None
    except ValidationError as error:
        problem = error.errors()[0]
        wrong = problem["msg"].removeprefix("Value error, ")
        if problem["loc"]:
            got = "" if problem["type"] == "missing" else f"; got {problem['input']!r:.200}"
            wrong = f"{problem['loc'][0]}: {wrong}{got}"
    except ValueError as error:
        wrong = str(error)
    name = f"{SCHEME}{version.name}/{version.version}"
    warn_once(f"{name} is skipped: {wrong}; correct its {DESCRIPTOR}, or delete the version")
    return None


def _stored(client: MlflowClient, experiment: str, source: str) -> bytes:
    """The descriptor that is a version's source. Raises ValueError if it is no artifact of a run of this project."""
    from mlflow.entities import ViewType

    run_id, folder = SOURCE.sub(r"\1 \2", source).split(" ")
    file = source if source.endswith(DESCRIPTOR) else f"{source}/{DESCRIPTOR}"
    runs = client.search_runs([experiment], f"attributes.run_id = '{run_id}'", ViewType.ALL)
    artifacts = client.list_artifacts(run_id, folder) if runs else []
    sizes = [
        artifact.file_size or 0 for artifact in artifacts if f"{runs[0].info.artifact_uri}/{artifact.path}" == file
    ]
    if not sizes or sizes[0] > LARGEST:
        raise ValueError(f"source: no run of this project has {source!r}, or it is larger than {LARGEST} bytes")
    with TemporaryDirectory() as scratch:
        return Path(client.download_artifacts(run_id, f"{folder}/{DESCRIPTOR}", scratch)).read_bytes()


def _missing(alias: str | None, versions: list[Version]) -> str:
    if alias is None:
        return f"there is no such version; the latest is {versions[-1].number}"
    if alias == CHAMPION:
        return no_champion(versions)
    aliases = sorted({alias for version in versions for alias in version.aliases})
    return f"there is no alias {alias!r}; aliases: {', '.join(aliases) or 'none'}"


def _moved(old: Descriptor, new: Descriptor) -> Descriptor:
    """A known policy with its present whereabouts; an older copy of DVC's stays if there is no newer one."""
    copies = ("dvc_file", "dvc_hash", "dvc_training_hash") if new.dvc_hash else ()
    present = dataclasses.asdict(new)
    return dataclasses.replace(old, **{name: present[name] for name in ("mlflow_run_id", "policy", *copies)})


def _create(client: MlflowClient, descriptor: Descriptor, model: str, files: Sequence[Path]) -> int:
    """A new version with its tags, in one transaction, after the artifacts that are its source."""
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(model, description=ABOUT)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    run = client.get_run(descriptor.mlflow_run_id)
    folder = _describe(client, run.info.run_id, descriptor, files)
    about = run.data.tags.get(NOTE)
    tags = {"run": descriptor.label}
    if INTERVAL in run.data.tags:
        tags |= {SCORE: f"{run.data.metrics[FINAL]:.3f}", INTERVAL: run.data.tags[INTERVAL]}
    source = f"{run.info.artifact_uri}/{folder}"
    return int(client.create_model_version(model, source, run.info.run_id, tags=tags, description=about).version)


def _describe(client: MlflowClient, run_id: str, descriptor: Descriptor, files: Sequence[Path]) -> str:
    """Writes a version's folder among the artifacts of a run, which may have several policies; returns its path."""
    folder = f"policies/{descriptor.policy_hash[:8]}"
    for file in files:
        client.log_artifact(run_id, str(file), folder)
    client.log_text(run_id, json.dumps(dataclasses.asdict(descriptor), indent=2) + "\n", f"{folder}/{DESCRIPTOR}")
    return folder
