"""The gate around constructed evaluations: what it reads, decides, logs and moves."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlflow.artifacts
import pytest
from mlflow import MlflowClient
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.events.filters import EventFilter
from prefect.runtime import flow_run
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

from agent_r1.evaluation.comparison import latest_folder
from agent_r1.files import write_text
from agent_r1.params import load
from agent_r1.tracking import registry
from agent_r1.tracking.registry import Outpaced, Version
from flows.operation.promote import PROMOTION, await_heartbeat, crown, gate, measure, promote_here
from flows.policies import policy_of, version_of
from tests.cases import cases
from tests.fixtures import Inside, WriteParams
from tests.flows.operation.evaluations import ASKED, write_evaluation

Register = Callable[[str], Version]
EQUAL, BETTER = 60, 75  # questions that are answered right


@pytest.fixture(autouse=True)
def project(tmp_path: Path, write_params: WriteParams, inside: Inside) -> Iterator[Path]:
    write_params(tmp_path, {})
    with inside(tmp_path):
        yield tmp_path


@pytest.fixture
def register(register_descriptor: Callable[..., Version]) -> Register:
    policy = "outputs/gone/checkpoint/policy"
    return lambda letter: register_descriptor(letter * 64, f"run_{letter}", policy=policy)


class Evaluations:
    """Stands where `agent-r1 evaluate` does: writes what an agent that answers so many right would."""

    def __init__(self, right: dict[int, int]) -> None:
        self.right, self.asked = right, list[list[str]]()

    def __call__(self, arguments: Sequence[str]) -> None:
        reference, *options = arguments
        options_given = dict(zip(options[::2], options[1::2], strict=True))
        version = registry.find(reference)
        self.asked.append([version.reference, *(options_given[key] for key in options_given if key == "--dataset")])
        write_evaluation(Path(options_given["--into"]), version, self.right[version.number])


@pytest.fixture
def champion(register: Register) -> Version:
    return registry.promote(register("a"), expected=None)


@pytest.fixture
def challenger(champion: Version, register: Register) -> Version:
    return register("b")


def current() -> int:
    champion = registry.champion()
    return champion.number


def test_better_challenger_becomes_champion_with_reasons(champion: Version, challenger: Version, project: Path) -> None:
    decision = gate(challenger.reference, Evaluations({1: EQUAL, 2: BETTER}))
    assert (decision.promoted, decision.questions, current()) == (True, ASKED, 2)
    client = MlflowClient(f"sqlite:///{project}/.tracking/mlflow.db")
    run = client.get_run(challenger.descriptor.mlflow_run_id)
    assert run.data.tags["promotion"] == "promoted"
    folder = f"{run.info.artifact_uri}/promotion/agent_r1-v2_against_agent_r1-v1"
    stored = json.loads(mlflow.artifacts.load_text(f"{folder}/decision.json"))
    assert (stored["promoted"], stored["challenger_success"], stored["champion_success"]) == (True, 0.75, 0.6)
    assert stored["difference"]["mean"] == pytest.approx(0.15)
    assert "| right in agent_r1-v2 alone | 15 |" in mlflow.artifacts.load_text(f"{folder}/decision.md")


def test_gate_takes_versions_of_its_scale(challenger: Version, project: Path, write_params: WriteParams) -> None:
    write_params(project, {"places": {"scale": "lake"}})
    own = [registry.register(replace(challenger.descriptor, policy_hash=each * 64), "agent_r1-lake") for each in "cd"]
    crown(own[0].reference)
    for better in (own[1], challenger):
        decision = gate(better.reference, Evaluations({1: EQUAL, 2: BETTER}))
        assert decision.promoted
        found = registry.champion(better.model)
        assert found.reference == better.reference
    write_params(project, {})
    for asks in (version_of, lambda reference, settings: policy_of(settings, reference)):
        with pytest.raises(ValueError, match=r"agent_r1-lake/2 is of another scale .*; ask in its folder"):
            asks(own[1].reference, load())


def test_equal_challenger_is_refused_with_numbers_and_without_error(
    champion: Version,
    challenger: Version,
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("flows.operation.promote._run_evaluate", Evaluations({1: EQUAL, 2: EQUAL}))
    promote_here(challenger.reference)
    output = " ".join(capsys.readouterr().out.split())
    assert "agent_r1-v2 is refused against agent_r1-v1: the lower bound -0.036 of the difference is not above" in output
    assert "success of agent_r1-v1" in output
    assert current() == 1
    client = MlflowClient(f"sqlite:///{project}/.tracking/mlflow.db")
    assert client.get_run(challenger.descriptor.mlflow_run_id).data.tags["promotion"] == "refused"


@cases("stored, right, asked")
def test_stored_evaluation_serves_if_it_was_measured_alike(
    champion: Version, challenger: Version, stored: dict[str, list[Any]], right: int, asked: list[int]
) -> None:
    for folder, (number, found, hashes) in stored.items():
        version = champion if number == 1 else challenger
        write_evaluation(Path("outputs") / folder, version, found, **hashes)
    evaluations = Evaluations({1: EQUAL, 2: right})
    decision = gate(challenger.reference, evaluations)
    assert decision.promoted == (asked != [2])
    gate(challenger.reference, evaluations)
    assert evaluations.asked == [[f"models:/agent_r1/{number}"] for number in asked]


def test_stale_challenger_is_refused(champion: Version, challenger: Version, project: Path, register: Register) -> None:
    other = register("c")
    evaluations = Evaluations({1: EQUAL, 2: BETTER})

    def slow(arguments: Sequence[str]) -> None:
        evaluations(arguments)
        if current() == 1:
            registry.promote(other, expected=champion)

    with pytest.raises(Outpaced, match="version 2 was to take the place of version 1, and the champion is version 3"):
        gate(challenger.reference, slow)
    assert current() == 3
    client = MlflowClient(f"sqlite:///{project}/.tracking/mlflow.db")
    run_id = challenger.descriptor.mlflow_run_id
    assert "promotion" not in client.get_run(run_id).data.tags
    assert "promotion" not in [file.path for file in client.list_artifacts(run_id)]


def test_one_process_at_a_time_of_a_prefect_server_moves_the_champion(
    prefect_api: str, champion: Version, challenger: Version, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock of a clone does not reach the others, whose registry may be the same."""
    move, taken = registry.promote, list[int]()

    def observed(version: Version, *, expected: Version | None) -> Version:
        taken.append(client.read_global_concurrency_limit_by_name(PROMOTION).active_slots)
        return move(version, expected=expected)

    monkeypatch.setenv("PREFECT_API_URL", prefect_api)
    monkeypatch.setattr(registry, "promote", observed)
    with get_client(sync_client=True) as client:
        client.upsert_global_concurrency_limit_by_name(PROMOTION, 1)
        gate(challenger.reference, Evaluations({1: EQUAL, 2: BETTER}))
        assert client.read_global_concurrency_limit_by_name(PROMOTION).active_slots == 0
    assert (taken, current()) == ([1], 2)


def test_run_suspends_after_its_heartbeat_reached_the_server(prefect_api: str) -> None:
    """One that came after the suspension would be the first sign of a life that nothing follows."""

    @flow
    def heartbeats() -> list[str]:
        await_heartbeat()
        with get_client(sync_client=True) as client:
            own = EventFilter.model_validate({"resource": {"id": [f"prefect.flow-run.{flow_run.id}"]}})
            return [event.event for event in client.read_events(own, limit=10).events]

    with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: 30}):
        assert "prefect.flow-run.heartbeat" in heartbeats()


def test_first_champion_is_named_by_an_explicit_command_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], register: Register
) -> None:
    version = register("a")
    with pytest.raises(ValueError, match=r"no champion; .* only by `agent-r1 promote models:/agent_r1/1 --f"):
        gate(version.reference, Evaluations({}))
    promote_here(version.reference, first=True)
    assert capsys.readouterr().out == "models:/agent_r1/1 is the champion\n"
    register("b")
    with pytest.raises(ValueError, match="models:/agent_r1/1 is the champion; leave out --first"):
        crown("models:/agent_r1/2")
    assert current() == 1


def test_failed_evaluation_leaves_nothing_behind(champion: Version, project: Path, write_params: WriteParams) -> None:
    write_params(project, {"evaluate": {"history_kept": 3}})
    home = Path("outputs/history/agent_r1-v1-atlas")

    def fail(arguments: Sequence[str]) -> None:
        Evaluations({1: EQUAL})(arguments)
        raise ValueError("out of memory")

    with pytest.raises(ValueError, match="out of memory"):
        measure(champion, "atlas", load(), fail)
    assert list(home.iterdir()) == []
    evaluations = Evaluations({1: EQUAL})
    folders = [measure(champion, "atlas", load(), evaluations) for _ in range(5)]
    assert sorted(home.iterdir()) == folders[-3:] == sorted(folders)[-3:]
    assert evaluations.asked[0] == ["models:/agent_r1/1", "atlas"]
    assert latest_folder(champion, load().places) is None  # of all data sets there is none


def test_rest_of_killed_evaluation_is_removed(champion: Version) -> None:
    folders: list[Path] = []

    def killed(arguments: Sequence[str]) -> None:
        folders.append(Path(arguments[-1]))

    with pytest.raises(FileNotFoundError):  # it wrote nothing
        measure(champion, None, load(), killed)
    write_text(folders[0] / "scores.json", "{}")
    finished = measure(champion, None, load(), Evaluations({1: EQUAL}))
    assert list(finished.parent.iterdir()) == [finished]
    assert not (finished / "scores.json").exists()
