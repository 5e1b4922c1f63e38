"""MLflow's model registry: a registered model per scale, one version for every policy that a training finished with.

A version holds no weights, only the fields of `Descriptor`: as the artifact `descriptor.json` of the training's MLflow
run, which is the version's source, and as the version's tags, which are read back. Others may write tags, and tags
become paths: a version with one that no training writes is left out, with a warning.

One alias, `champion`, points at one version or at none. `promote` moves it only from the version that the caller saw.
Registering and promoting hold a lock of this clone, so that one of two promotions is refused. Clones that share a
server need a common lock around it, as `flows.operation.promote` takes one: MLflow has no compare-and-set.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, TypeAdapter, ValidationError

from agent_r1.params.places import MODEL, SWEEP, Folder, RunId, policy_in, registered_policy
from agent_r1.params.sections import Natural
from agent_r1.tracking.runs import VERSION_TAG
from agent_r1.tracking.store import NOTE, locked, open_store, warn_once

if TYPE_CHECKING:
    from mlflow import MlflowClient

CHAMPION = "champion"
SCHEME = "models:/"  # of a reference, in MLflow's own syntax
THE_CHAMPION = f"{SCHEME}{MODEL}@{CHAMPION}"
REFERENCE = re.compile(rf"{SCHEME}(?P<model>{MODEL}(-[\w.-]{{1,64}})?)(@(?P<alias>[\w-]+)|/(?P<number>\d+))", re.ASCII)
DESCRIPTOR = "descriptor.json"
ABOUT = "The policies of finished trainings, a version each. A version has no weights but says where they are."

_LOCK = "registry.lock"
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Commit = Annotated[str, Field(pattern=r"^[0-9a-f]*(\+changes)?$")]
DvcFolder = Annotated[str, Field(pattern=r"^([0-9a-f]{32}\.dir)?$")]  # DVC's md5 of a folder, "" for none
DvcHashes = Annotated[str, Field(pattern=r"^([0-9a-f]{32}(\.dir)?(\+|$))*$")]  # several, joined


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


def register(descriptor: Descriptor, model: str = MODEL) -> Version:
    """The version of the descriptor's policy: a new one, or the one that has the same policy hash.

    An earlier version keeps its origin and learns its whereabouts: the MLflow run, the folder and DVC's copy. To repeat
    it changes nothing, after a kill at any point too. The training's MLflow run gets the artifact `descriptor.json` and
    the tag `model_version`.
    """
    client, _ = open_store()
    with locked(_LOCK):
        found = of_policy(descriptor.policy_hash, model)
        merged = _moved(found.descriptor, descriptor) if found else descriptor
        run_id = merged.mlflow_run_id
        client.log_text(run_id, json.dumps(dataclasses.asdict(merged), indent=2) + "\n", DESCRIPTOR)
        if found is None:
            version = Version(number=_create(client, merged, model), descriptor=merged, model=model)
        else:
            version = dataclasses.replace(found, descriptor=merged)
            for name, value in sorted(_tags(merged).items() - _tags(found.descriptor).items()):
                client.set_model_version_tag(model, str(found.number), name, value)
        client.set_tag(run_id, VERSION_TAG, version.tag)
        return version


def versions(model: str = MODEL) -> list[Version]:
    """All versions that trainings registered, in the order of their numbers; one with bad tags is warned of."""
    client, _ = open_store()
    models = client.search_registered_models(f"name = '{model}'")  # one, or none yet
    aliases = [(alias, int(number)) for found in models for alias, number in sorted(found.aliases.items())]
    registered = client.search_model_versions(f"name = '{model}'")
    described = {int(each.version): each.tags for each in registered if "policy_hash" in each.tags}
    return [
        Version(number=each, descriptor=made, aliases=tuple(alias for alias, of in aliases if of == each), model=model)
        for each in sorted(described)
        if (made := _read(each, described[each], model))
    ]


def of_policy(policy_hash: str, model: str = MODEL) -> Version | None:
    """The version with this policy."""
    return next((version for version in versions(model) if version.descriptor.policy_hash == policy_hash), None)


def champion(model: str = MODEL) -> Version | None:
    """The version that the alias `champion` points at."""
    return next((version for version in versions(model) if version.is_champion), None)


def find(reference: str) -> Version:
    """The version that a reference means: `models:/agent_r1@champion` or `models:/agent_r1/3`.

    Raises ValueError if it is no reference, nothing is registered yet, or there is no such alias or version.
    """
    parts = REFERENCE.fullmatch(reference)
    if parts is None:
        known = f"{THE_CHAMPION} and {SCHEME}{MODEL}/NUMBER, at a scale {MODEL}-SCALE"
        raise ValueError(f"{reference!r} is no reference to a model of this project; they are {known}")
    registered = versions(parts["model"])
    if not registered:
        raise ValueError(f"{reference}: the registry is empty; a training that finishes registers its policy")
    for version in registered:
        if parts["alias"] in version.aliases or parts["number"] == str(version.number):
            return version
    raise ValueError(f"{reference}: {_missing(parts['alias'], registered)}")


def promote(version: Version, *, expected: Version | None) -> Version:
    """Makes a version the champion in place of the expected one, None for the first, and returns it.

    Raises Outpaced if the champion is another one by now.
    """
    client, _ = open_store()
    with locked(_LOCK):
        now = champion(version.model)
        seen, current = (f"version {each.number}" if each else "no version" for each in (expected, now))
        if current != seen:
            raise Outpaced(
                f"version {version.number} was to take the place of {seen}, and the champion is {current} by now; "
                "promote it again, against that one"
            )
        client.set_registered_model_alias(version.model, CHAMPION, str(version.number))
        return find(version.reference)


def _read(number: int, tags: dict[str, str], model: str = MODEL) -> Descriptor | None:
    """The descriptor of a version; None, and a warning, if its tags are wrong. Other tags do not matter."""
    try:
        return TypeAdapter(Descriptor).validate_python(tags)
    except ValidationError as error:
        problem = error.errors()[0]
        wrong = problem["msg"].removeprefix("Value error, ")
        if problem["loc"]:
            got = "" if problem["type"] == "missing" else f"; got {problem['input']!r}"
            wrong = f"{problem['loc'][0]}: {wrong}{got}"
        warn_once(f"{SCHEME}{model}/{number} is skipped: {wrong}; correct its tags in MLflow, or delete the version")
        return None


def _missing(alias: str | None, known: list[Version]) -> str:
    if alias is None:
        return f"there is no such version; the latest is {known[-1].number}"
    if alias == CHAMPION:
        command = f"`agent-r1 promote {known[-1].reference} --first`"
        return f"the registry has no champion; the first becomes one only by {command}"
    aliases = sorted({alias for version in known for alias in version.aliases})
    return f"there is no alias {alias!r}; aliases: {', '.join(aliases) or 'none'}"


def _moved(known: Descriptor, given: Descriptor) -> Descriptor:
    """A known policy with its present whereabouts; an older copy of DVC's stays if there is no newer one."""
    copies = ("dvc_file", "dvc_hash", "dvc_training_hash") if given.dvc_hash else ()
    present = dataclasses.asdict(given)
    return dataclasses.replace(known, **{name: present[name] for name in ("mlflow_run_id", "policy", *copies)})


def _create(client: MlflowClient, descriptor: Descriptor, model: str) -> int:
    """A new version with its tags, in one transaction."""
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(model, description=ABOUT)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    run = client.get_run(descriptor.mlflow_run_id)
    source, about = f"{run.info.artifact_uri}/{DESCRIPTOR}", run.data.tags.get(NOTE)
    created = client.create_model_version(model, source, run.info.run_id, tags=_tags(descriptor), description=about)
    return int(created.version)


def _tags(descriptor: Descriptor) -> dict[str, str]:
    return {name: str(value) for name, value in dataclasses.asdict(descriptor).items()}
