"""The registry in a real MLflow store: versions, references, the alias, and two promotions at the same time."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow.artifacts
import pytest
from mlflow import MlflowClient

from agent_r1 import tracking
from agent_r1.params.places import registered_policy
from agent_r1.tracking import registry
from agent_r1.tracking.registry import Descriptor, Outpaced, Version
from tests import descriptors
from tests.cases import tables

ROOT = Path(__file__).parents[2]
A, B, C = (letter * 64 for letter in "abc")
COPY = f"{'1' * 32}.dir"
Describe = Callable[..., Descriptor]


@pytest.fixture
def client(tmp_path: Path, lay_store: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch) -> MlflowClient:
    (tmp_path / "params.yaml").write_text("{}")
    lay_store(tmp_path)
    monkeypatch.chdir(tmp_path)
    return MlflowClient(f"sqlite:///{tmp_path}/.tracking/mlflow.db")


@pytest.fixture
def describe(client: MlflowClient) -> Describe:
    def make(policy_hash: str, label: str = "ppo-seed3", **changes: str) -> Descriptor:
        copy = {"dvc_file": registered_policy(label, policy_hash).as_posix(), "dvc_hash": COPY}
        return descriptors.describe(policy_hash, label, **copy | changes)

    return make


def test_version_is_its_descriptor(client: MlflowClient, describe: Describe) -> None:
    """A registration that was killed before its last line, which tags the run, is completed by the next."""
    descriptor = describe(A)
    version = registry.register(descriptor)
    assert version == Version(number=1, descriptor=descriptor)
    assert registry.versions() == [version] == [registry.find("models:/agent_r1/1")]
    stored = client.get_model_version("agent_r1", "1")
    assert stored.run_id == descriptor.mlflow_run_id
    assert Descriptor(**json.loads(mlflow.artifacts.load_text(f"{stored.source}/descriptor.json"))) == descriptor
    assert client.get_run(descriptor.mlflow_run_id).data.tags["model_version"] == "1"
    client.delete_tag(descriptor.mlflow_run_id, "model_version")
    assert registry.register(descriptor).number == 1
    assert client.get_run(descriptor.mlflow_run_id).data.tags["model_version"] == "1"


def test_versions_page_shows_run_score_and_interval(client: MlflowClient, describe: Describe) -> None:
    """Whether the policy is evaluated before or after it is registered, and when it is scored again."""
    descriptor = describe(A)
    run = tracking.resume(descriptor.mlflow_run_id)
    run.tag("kind", "training")
    for success in (0.8, 0.892):
        run.final({"success": success, "success/low": 0.863, "success/high": 0.922})
        registry.register(descriptor)
        entry = client.get_model_version("agent_r1", "1")
        assert entry.tags == {"run": "ppo-seed3", "score": f"{success:.3f}", "interval": "[0.86, 0.92]"}
        assert entry.description.startswith(f"Success {success:.3f} [0.86, 0.92] on the test questions.")


def test_version_whose_source_is_its_descriptor_goes_on(client: MlflowClient, describe: Describe) -> None:
    """As they were before MLflow could load versions."""
    descriptor = describe(A)
    registry.register(describe(B))
    client.log_text(
        descriptor.mlflow_run_id, json.dumps(dataclasses.asdict(descriptor)), f"policies/{A[:8]}/descriptor.json"
    )
    source = f"{client.get_run(descriptor.mlflow_run_id).info.artifact_uri}/policies/{A[:8]}/descriptor.json"
    client.create_model_version("agent_r1", source, descriptor.mlflow_run_id)
    version = registry.of_policy(A)
    assert version == Version(number=2, descriptor=descriptor) == registry.find("models:/agent_r1/2")
    assert registry.promote(version, expected=None).is_champion
    moved = registry.register(dataclasses.replace(descriptor, policy="outputs/train/ppo/checkpoint/policy"))
    assert (moved.number, moved.descriptor.policy) == (2, "outputs/train/ppo/checkpoint/policy")
    assert registry.champion() == moved


def test_best_version_is_offered_as_the_first_champion(client: MlflowClient, describe: Describe) -> None:
    scored = [(A, "0.250"), (B, "0.892"), (C, "0.100")]
    for number, (policy_hash, score) in enumerate(scored, 1):
        registry.register(describe(policy_hash))
        client.set_model_version_tag("agent_r1", str(number), "score", score)
    refused("models:/agent_r1@champion", "`agent-r1 promote models:/agent_r1/2 --first`, the best so far")


def test_same_policy_is_registered_once_and_learns_where_it_is(client: MlflowClient, describe: Describe) -> None:
    first = registry.register(describe(A))
    registry.promote(first, expected=None)
    assert registry.register(describe(B)).number == 2
    again = describe(A, label="ppo", policy="outputs/train/ppo/checkpoint/policy", dvc_file="", dvc_hash="")
    moved = registry.register(again)
    assert (moved.number, moved.is_champion, len(registry.versions())) == (1, True, 2)
    assert moved == registry.find("models:/agent_r1@champion")
    descriptor = moved.descriptor
    assert (descriptor.label, descriptor.policy) == ("ppo-seed3", "outputs/train/ppo/checkpoint/policy")
    assert descriptor.mlflow_run_id == again.mlflow_run_id != first.descriptor.mlflow_run_id
    assert (descriptor.dvc_file, descriptor.dvc_hash) == ("models/ppo-seed3-aaaaaaaa.dvc", COPY)  # no newer copy
    assert client.get_run(again.mlflow_run_id).data.tags["model_version"] == "1"


def test_versions_and_tags_made_by_hand_are_left_alone(client: MlflowClient, describe: Describe) -> None:
    registry.register(describe(A))
    client.set_model_version_tag("agent_r1", "1", "mood", "good")
    client.create_model_version("agent_r1", "/somewhere/else")
    assert [version.number for version in registry.versions()] == [1]
    assert registry.register(describe(B)).number == 3


def test_foreign_descriptor_is_skipped(describe: Describe, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    good, other = registry.register(describe(A)), registry.register(describe(B))
    [file] = tmp_path.glob(f".tracking/artifacts/{other.descriptor.mlflow_run_id}/artifacts/policies/*/descriptor.json")
    honest = json.loads(file.read_text())
    hostile = tables(Path(__file__).parent)["hostile_descriptors"]
    texts = [(field, json.dumps(honest | {field: value})) for field, value in hostile]
    for said, text in [*texts, ("Invalid JSON", '{"label": '), ("source", " " * 20_001), ("policy", "{}")]:
        caplog.clear()
        file.write_text(text)
        assert registry.versions() == [good], text
        [message] = caplog.messages
        assert message.startswith("models:/agent_r1/2 is skipped: "), message
        assert message.endswith("; correct its descriptor.json, or delete the version"), message
        assert said in message or said == "policy"
        assert message.isprintable()
        assert len(message) < 500
    assert registry.versions() == [good]
    assert caplog.messages == [message], "named once"
    file.write_text(json.dumps(honest))
    assert registry.versions() == [good, other]


def test_source_that_is_no_artifact_of_the_projects_runs_is_not_read(
    client: MlflowClient, describe: Describe, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Neither a folder of somebody else's, nor one that an experiment of theirs names."""
    honest = registry.register(describe(A)).descriptor
    file = next(tmp_path.glob("**/descriptor.json"))
    foreign = client.create_run(client.create_experiment("theirs", (tmp_path / "foreign").as_uri())).info
    client.log_text(foreign.run_id, file.read_text(), f"policies/{A[:8]}/descriptor.json")
    inside = client.get_run(honest.mlflow_run_id).info.artifact_uri
    for source in (
        f"{foreign.artifact_uri}/policies/{A[:8]}/descriptor.json",
        f"{foreign.artifact_uri}/policies/{A[:8]}",
        f"http://127.0.0.1:9/{honest.mlflow_run_id}/artifacts/policies/{A[:8]}/descriptor.json",
        f"{inside}/../artifacts/policies/{A[:8]}/descriptor.json".replace("/artifacts/../", "/../"),
        f"{inside}/policies/{'0' * 8}/descriptor.json",
        f"{inside}/policies/{'0' * 8}",
    ):
        caplog.clear()
        number = client.create_model_version("agent_r1", source, honest.mlflow_run_id).version
        assert [version.descriptor for version in registry.versions()] == [honest], source
        assert f"models:/agent_r1/{number} is skipped: source: no run of this" in caplog.text or ".." in source
        client.delete_model_version("agent_r1", number)


def test_skipped_policy_registers_again(describe: Describe, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    registry.promote(registry.register(describe(A)), expected=None)
    next(tmp_path.glob("**/descriptor.json")).unlink()
    assert registry.champion() is None
    assert "models:/agent_r1/1 is skipped: source: no run of this project has" in caplog.text
    assert registry.register(describe(A)).number == 2


def test_champion_takes_the_place_of_the_one_it_was_compared_with(describe: Describe) -> None:
    a, b, c = (registry.register(describe(policy)) for policy in (A, B, C))
    assert registry.champion() is None
    assert registry.promote(a, expected=None).aliases == ("champion",)
    assert registry.promote(b, expected=a).number == 2
    assert [version.is_champion for version in registry.versions()] == [False, True, False]
    with pytest.raises(Outpaced, match="version 3 was to take the place of version 1, and the champion is version 2"):
        registry.promote(c, expected=a)
    with pytest.raises(Outpaced, match="take the place of no version, and the champion is version 2 by now; promote"):
        registry.promote(c, expected=None)
    champion = registry.champion()
    assert champion.number == 2


@pytest.mark.slow  # two processes, each of which imports MLflow
def test_of_two_promotions_at_the_same_time_one_wins(describe: Describe, tmp_path: Path) -> None:
    for policy in (A, B, C):
        registry.register(describe(policy))
    registry.promote(registry.find("models:/agent_r1/1"), expected=None)
    code = """
import sys
from agent_r1.tracking import registry
version, champion = registry.find(sys.argv[1]), registry.champion()
print("ready", flush=True)
sys.stdin.readline()
registry.promote(version, expected=champion)
"""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    environment: dict[str, Any] = {"env": {"PYTHONPATH": str(ROOT)}, "cwd": tmp_path, "text": True, **pipes}
    commands = [[sys.executable, "-c", code, f"models:/agent_r1/{number}"] for number in (2, 3)]
    processes = [subprocess.Popen(command, **environment) for command in commands]
    for process in processes:  # all have seen version 1 as the champion
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    errors = {number: process.communicate()[1] for number, process in enumerate(processes, start=2)}
    winners = [number for number, error in errors.items() if not error]
    champion = registry.champion()
    assert winners == [champion.number]
    assert all("Outpaced: " in error for number, error in errors.items() if number not in winners)


def test_scale_has_versions_and_a_champion_of_its_own(describe: Describe, client: MlflowClient) -> None:
    plain = registry.register(describe(A))
    first, second = (registry.register(describe(policy), "agent_r1-qwen2.5") for policy in (A, B))
    assert (first.number, second.reference, second.name) == (1, "models:/agent_r1-qwen2.5/2", "agent_r1-qwen2.5-v2")
    assert registry.versions() == [plain]
    assert registry.versions("agent_r1-qwen2.5") == [first, second]
    registry.promote(second, expected=None)
    assert registry.champion() is None
    assert registry.find("models:/agent_r1-qwen2.5@champion").number == 2
    run = tracking.resume(second.descriptor.mlflow_run_id)
    run.tag("kind", "training")
    run.final({"success": 0.5, "success/low": 0.4, "success/high": 0.6})
    descriptions = [
        client.get_model_version(version.model, str(version.number)).description for version in (plain, first, second)
    ]
    assert [text or "" for text in descriptions] == ["", "", "Success 0.500 [0.40, 0.60] on the test questions. "]


def refused(reference: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        registry.find(reference)


def test_empty_registry_and_unknown_versions_are_explained(describe: Describe) -> None:
    names = ("other@champion", "agent_r1", "agent_r1/x", "agent_r1/1/")
    for stray in ("champion", *(f"models:/{name}" for name in names)):
        refused(stray, "is no reference to a model of this project; they are models:/agent_r1@c")
    refused("models:/agent_r1@champion", "@champion: the registry is empty; a training that finishes")
    version = registry.register(describe(A))
    first = "no champion; the first becomes one only by `agent-r1 promote models:/agent_r1/1 --first`"
    refused("models:/agent_r1@champion", first)
    refused("models:/agent_r1/4", "models:/agent_r1/4: there is no such version; the latest is 1")
    registry.promote(version, expected=None)
    refused("models:/agent_r1@challenger", "there is no alias 'challenger'; aliases: champion")
