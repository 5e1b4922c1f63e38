"""A run with a checkpoint every so many iterations that is killed between two: it costs updates, and no bit."""

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from agent_r1.files import sha256
from agent_r1.learn import checkpoint
from agent_r1.learn.memory import REMEDIES
from agent_r1.records import Metrics, Outcome, Trajectory
from agent_r1.rollout.sampling import EngineError
from agent_r1.tables import read_rows, write_rows
from agent_r1.teaching.demonstrator import Demonstrator
from agent_r1.training import collection, loop
from agent_r1.training.folder import RunFolder
from agent_r1.training.loop import Training, iterate
from agent_r1.training.watch import RunDecision, StaleWeightsError, Unrecorded, Verdict

ITERATIONS = 7  # two of the critic alone, and five of the policy
RUN = {
    "iterations": ITERATIONS - 2,
    "rollout": {"questions": 3, "samples": 4, "demonstrate": 0.5},
    "credit": {"filter": {"kind": "top_p", "share": 0.9, "refill": 1}},
    "update": {
        "learning_rate": 1e-3,
        "learning_rate_decay": "linear",
        "critic": {"minibatches": 4, "warmup": {"iterations": 1, "explained_variance": 0.1, "limit": 2}},
        "proved_trajectories": 4,
    },
    "validation": {"every": 2, "questions": 0, "keep_best": True},
    "keep": {"learner": False},
}
SPARSE = {**RUN, "checkpoint": {"every": 3}}
AHEAD = {**RUN, "rollout": {**RUN["rollout"], "ahead": 1}, "credit": {"filter": {"kind": "top_p", "share": 0.9}}}
SPARSE_AHEAD = {**AHEAD, "checkpoint": {"every": 3}}
EARLY = {"validation": {"every": 2, "questions": 0, "keep_best": True, "patience": 1}}
CUT_SHORT = "Is it true of B?"  # the question of whose episodes the world cuts one short, wherever it is asked


class Killed(BaseException):
    """What a process that is killed does not live to see."""


@dataclass
class Process(Unrecorded):
    """What a process does, in order; it is killed before the event of that name or number."""

    killed_at: int | str = -1
    events: list[str] = field(default_factory=list)
    requests: Counter[str] = field(default_factory=Counter)  # asked of the engine, by verb and iteration
    verb: str = ""

    def begin(self, event: str) -> None:
        if self.killed_at in (event, len(self.events)):
            raise Killed(event)
        self.events.append(event)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.begin(f"log {step}")

    def watch(self, owner: Any, name: str) -> Callable[..., Any]:
        """The function of that name, whose calls are events."""
        original = getattr(owner, name)

        def call(*given: Any, **named: Any) -> Any:
            event = " ".join([name, *(str(each) for each in given if isinstance(each, int))])
            self.begin(event)
            self.verb = event if owner.__class__ is Training else self.verb
            return original(*given, **named)

        call.__name__ = name
        return call

    def count(self, sample: Callable[..., Any]) -> Callable[..., Any]:
        def counted(requests: Sequence[Any]) -> Any:
            self.requests[self.verb] += len(requests)
            return sample(requests)

        return counted


VERBS = ("rollout", "credit", "update", "conclude", "validate")
WRITES = ("record", "save", "finish", "forget", "set_best_aside", "stop", "policy")


@contextmanager
def watched(training: Training, process: Process) -> Iterator[None]:
    """Makes events of all that a training does and writes, and has the world cut episodes short."""
    sampler = training.collector.sampler
    answer, sample = sampler.answer, sampler.engine.sample

    def cut(*given: Any, **named: Any) -> list[Trajectory]:
        return [
            replace(each, outcome=Outcome.ABORTED) if (each.question_id, each.sample) == (CUT_SHORT, 0) else each
            for each in answer(*given, **named)
        ]

    with pytest.MonkeyPatch.context() as patch:
        for owner, names in (
            (training, VERBS),
            (training.folder, WRITES),
            (loop, ("write_rows",)),
            (collection, ("write_rows",)),
        ):
            for name in names:
                patch.setattr(owner, name, process.watch(owner, name))
        patch.setattr(sampler.engine, "sample", process.count(sample))
        patch.setattr(sampler, "answer", cut)
        patch.setattr(loop, "validation_scores", score)
        patch.setattr(Demonstrator, "script", lambda *_: ["<answer> yes </answer>"])
        yield


def score(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Any number in [0, 1) that other weights change: a later policy is better or not, as it comes."""
    return {"validation/success": float(abs(sum(each.logprobs.sum() for each in trajectories))) * 1e4 % 1}


@pytest.fixture(scope="module")
def task(one_action_task: Callable[..., Any]) -> Any:
    """Questions whose answer is yes, and a model that says yes, no and other things."""
    rng = random.Random(0)
    answers = {f"Is it true of {name}?": "yes" for name in "ABCDEF"}
    made = one_action_task(answers, lambda _: f"<answer> {rng.choice(['yes', 'no'])} </answer>", steps=80)
    dev = [replace(each, split="dev", question_id=f"dev {each.question_id}") for each in made.questions[:4]]
    return replace(made, questions=[*made.questions, *dev])


@pytest.fixture
def go(task: Any, open_training: Callable[..., Any]) -> Callable[..., tuple[RunFolder, Process]]:
    """One process of a run: its folder, and what it did."""

    def start(changes: Mapping[str, Any], killed_at: int | str = -1) -> tuple[RunFolder, Process]:
        process = Process(killed_at)
        with open_training(task, dict(changes)) as training, watched(training, process):
            try:
                iterate(training, process)
            except Killed:
                assert killed_at != -1
        return training.folder, process

    return start


def rows_of(folder: Path) -> list[str]:
    """The rows of the files of a folder, but for seconds."""
    files = sorted(folder.glob("*.parquet"))
    return [re.sub(r"latency_s=[^,)]+", "", repr(row)) for file in files for row in read_rows(file, Trajectory)]


def bits(folder: RunFolder, policies: Sequence[str] = ("checkpoint/policy", "best/policy")) -> dict[str, Any]:
    """All that a run leaves, but for seconds, and for what the search cache of its processes had."""
    timed = ("time/", "cost/", "ahead/waited", "rollout/search_cache", "tool/waiting", "tool/search/latency")
    state = load_file(folder.checkpoint / "learner/shard-00001-model-00001-of-00001.safetensors")
    parts = (*policies, "proof", "credit")
    return {
        **{name: rows_of(folder.path / name) for name in ("trajectories", "demonstrations")},
        **{part: sha256(folder.path / part) for part in parts if (folder.path / part).exists()},
        "progress": (folder.checkpoint / "progress.json").read_text(),
        "learner": {name: value.numpy().tobytes() for name, value in state.items() if not name.startswith("random")},
        "metrics": [{name: line[name] for name in line if not name.startswith(timed)} for line in folder.history()],
        "files": sorted(path.name for path in folder.path.iterdir()),
    }


def aside(folder: RunFolder) -> None:
    folder.path.rename(folder.path.with_name(f"run {len(list(folder.path.parent.iterdir()))}"))


def left_to_ask(folder: RunFolder, whole: Process) -> Counter[str]:
    """The requests of a whole run without those of the iterations that the folder has collected or validated."""
    known = {f"rollout {each}" for each in range(ITERATIONS) if folder.trajectories(each).exists()}
    lines = enumerate(folder.metrics.read_text().splitlines() if folder.metrics.exists() else [])
    known |= {f"validate {each}" for each, line in lines if "validation/success" in line}
    return Counter({verb: count for verb, count in whole.requests.items() if verb not in known})


Go = Callable[..., tuple[RunFolder, Process]]
Alone = tuple[dict[str, Any], Process]


@pytest.fixture(scope="module")
def made() -> dict[str, Alone]:
    return {}


@pytest.fixture
def left_alone(go: Go, made: dict[str, Alone]) -> Callable[[dict[str, Any]], Alone]:
    """The bits and the process of a run with a checkpoint after every iteration that nobody kills."""

    def find(changes: dict[str, Any]) -> Alone:
        if repr(changes) not in made:
            folder, process = go(changes)
            made[repr(changes)] = bits(folder), process
            aside(folder)
        return made[repr(changes)]

    return find


@pytest.fixture
def alone(left_alone: Callable[[dict[str, Any]], Alone]) -> Alone:
    return left_alone(RUN)


def test_the_run_has_what_could_go_wrong(alone: Alone) -> None:
    history = alone[0]["metrics"]
    assert len({line["outcome/aborted"] for line in history}) > 1
    assert len({line["demonstrations/joined"] for line in history}) > 1
    assert {line["filter/refilled_groups"] for line in history} == {0, 1}
    assert len({line["filter/kept_share"] for line in history}) > 1
    assert alone[1].events.count("set_best_aside") > 1
    assert next("policy_version=1" in row for row in alone[0]["trajectories"] if "iteration=3" in row)


@pytest.mark.parametrize(("changes", "kills"), [(RUN, 1), (SPARSE, 2)])
def test_run_killed_at_any_write_has_the_same_bits(go: Go, alone: Alone, changes: dict[str, Any], kills: int) -> None:
    """Killed twice; what was collected or validated is not asked of the engine again."""
    expected, whole = alone
    folder, process = go(changes)
    assert (bits(folder), process.requests) == (expected, whole.requests)
    for killed_at in random.Random(3).sample(range(len(process.events)), kills):
        aside(folder)
        folder, killed = go(changes, killed_at)
        folder, again = go(changes, killed_at // 3)
        left = left_to_ask(folder, whole)
        folder, resumed = go(changes)
        assert bits(folder) == expected, (killed_at, killed.events[-1])
        assert resumed.requests == left
        assert (killed.requests + again.requests + resumed.requests).keys() == whole.requests.keys()


def collected(folder: RunFolder) -> list[int]:
    return [int(path.stem) for path in sorted((folder.path / "trajectories").iterdir())]


def test_run_ahead_samples_by_the_policy_before(left_alone: Callable[[dict[str, Any]], Alone]) -> None:
    """But for the first, which none was before. The critic learns alone in the first two, which the policy outlasts."""
    found, _ = left_alone(AHEAD)
    versions = [int(version) for row in found["trajectories"] for version in re.findall(r"policy_version=(\d+)", row)]
    assert versions == [version for version in (0, 0, 0, 0, 1, 2, 3) for _ in range(12)]
    assert [line["ahead/lag"] for line in found["metrics"]] == [0, 0, 0, 1, 1, 1, 1]
    assert all(line["rollout/canary_gap"] < 1e-4 for line in found["metrics"])


@pytest.mark.parametrize("changes", [AHEAD, SPARSE_AHEAD])
def test_kill_ahead_is_harmless(go: Go, left_alone: Callable[[dict[str, Any]], Alone], changes: dict[str, Any]) -> None:
    expected, _ = left_alone(AHEAD)
    folder, process = go(changes)
    assert (bits(folder), collected(folder)) == (expected, [*range(ITERATIONS)])
    killed_at = random.Random(4).randrange(len(process.events))
    aside(folder)
    folder, killed = go(changes, killed_at)
    go(changes, killed_at // 3)
    folder, _ = go(changes)
    assert bits(folder) == expected, (killed_at, killed.events[-1])


def test_how_often_may_change_while_a_run_is_trained(go: Go, alone: Alone) -> None:
    folder, _ = go(SPARSE, "conclude 4")
    assert (folder.saved and folder.saved.iterations, folder.finished) == (3, 4)
    folder, resumed = go({**RUN, "checkpoint": {"every": 2}})
    assert {**bits(folder), "progress": ""} == {**alone[0], "progress": ""}
    assert checkpoint.progress(folder.checkpoint).changes == ["from iteration 3 on train.checkpoint.every 3 -> 2"]
    assert [each for each in resumed.events if each in ("save", "finish")] == ["save", "finish", "save", "save"]


REST = {  # three further iterations train the critic alone
    "iterations": 7,
    "rollout": {"questions": 3, "samples": 4},
    "update": {
        "learning_rate": 7e-3,
        "learning_rate_decay": "linear",
        "critic": {"learning_rate": 1e-2, "warmup": {"iterations": 3, "explained_variance": 0, "limit": 0}},
    },
}


def rates(folder: RunFolder, model: str) -> list[float]:
    return [line[f"{model}/learning_rate"] for line in folder.history()]


def test_the_policys_schedule_begins_where_the_critics_warm_up_ends_also_after_a_kill(go: Go) -> None:
    """Both take sevenths of their rates from the fourth iteration on; before, the critic takes all of its rate."""
    folder, _ = go(REST)
    assert rates(folder, "policy") == pytest.approx([0, 0, 0, 7e-3, 6e-3, 5e-3, 4e-3, 3e-3, 2e-3, 1e-3])
    assert rates(folder, "critic") == pytest.approx([1e-2] * 3 + [sevenths / 7 * 1e-2 for sevenths in range(7, 0, -1)])
    learned = [line["update/episodes"] for line in folder.history()]
    assert (learned[:3], {*learned[3:]}) == ([0, 0, 0], {11, 12}), "the world may cut one of twelve short"
    assert folder.progress.policy_from == 3
    expected = bits(folder, ["checkpoint/policy"])
    for killed_at in ("conclude 3", "update 6"):
        aside(folder)
        go(REST, killed_at)
        folder, _ = go(REST)
        assert bits(folder, ["checkpoint/policy"]) == expected, killed_at


def torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def by_other_weights(path: Path) -> None:
    rows = read_rows(path, Trajectory)
    moved = rows[0].logprobs - np.float32(0.01) * rows[0].action_mask
    write_rows(path, [replace(rows[0], logprobs=moved), *rows[1:]], Trajectory)


def of_another_seed(path: Path) -> None:
    rows = read_rows(path, Trajectory)
    write_rows(path, [*rows[:-1], replace(rows[-1], seed=rows[-1].seed + 1)], Trajectory)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (torn, "is damaged"),
        (by_other_weights, "are off by 0.01"),
        (of_another_seed, "or of another seed"),
        (Path.unlink, ""),
    ],
)
def test_what_is_not_as_it_was_collected_is_collected_again_with_all_that_came_after(
    go: Go, alone: Alone, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None], reason: str
) -> None:
    expected, whole = alone
    folder, _ = go(SPARSE, "conclude 5")
    damage(folder.trajectories(4))
    folder, resumed = go(SPARSE)
    assert reason in caplog.text
    assert ("iteration 4 and those after it are collected again" in caplog.text) == bool(reason)
    assert bits(folder) == expected
    assert {verb for verb in resumed.requests if verb.startswith("rollout")} == {"rollout 4", "rollout 5", "rollout 6"}
    assert resumed.requests.items() <= whole.requests.items()


@pytest.mark.parametrize("damage", [by_other_weights, Path.unlink])
def test_what_was_collected_ahead_is_proved_before_its_weights_are_gone(
    go: Go, left_alone: Callable[[dict[str, Any]], Alone], damage: Callable[[Path], None]
) -> None:
    folder, _ = go(SPARSE_AHEAD, "conclude 5")
    damage(folder.trajectories(4))
    folder, _ = go(SPARSE_AHEAD)
    assert bits(folder) == left_alone(AHEAD)[0]


def test_of_a_run_that_ends_nothing_is_left_that_was_collected_ahead(go: Go, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "score", lambda _: {"validation/success": 0.5})
    go(AHEAD | EARLY, "conclude 3")
    folder, _ = go(AHEAD | EARLY)
    assert (collected(folder), len(folder.metrics.read_text().splitlines())) == ([0, 1, 2, 3], 4)


def test_run_that_goes_back_collects_again_what_was_ahead(go: Go, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first iteration after the good checkpoint is sampled by its policy: what came ahead was of another seed."""
    monitor = {"on_collapse": "rollback", "max_rollbacks": 1}
    changes = AHEAD | {"validation": {"every": 0, "keep_best": False}, "monitor": monitor}
    plain = loop.judge

    def judge(history: Sequence[Any], config: Any, rollbacks: int) -> Verdict:
        back = len(history) == 5 and not rollbacks
        verdict = plain(history, config, rollbacks)
        return replace(verdict, clean=len(history) < 5, decision=RunDecision.ROLL_BACK if back else RunDecision.GO_ON)

    monkeypatch.setattr(loop, "judge", judge)
    folder, process = go(changes)
    assert (folder.rollbacks, collected(folder)) == (1, [*range(ITERATIONS)])
    assert [line["ahead/lag"] for line in folder.history()] == [0, 0, 0, 0, 1, 1, 1]
    expected = bits(folder, ["checkpoint/policy"])
    aside(folder)
    go(changes, process.events.index("conclude 4") + 3)
    folder, _ = go(changes)
    assert bits(folder, ["checkpoint/policy"]) == expected


def test_fault_ahead_is_raised(task: Any, open_training: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with open_training(task, dict(AHEAD)) as training:
        answer = training.collector.sampler.answer

        def fail(questions: Any, batch: collection.QuestionBatch) -> list[Trajectory]:
            if batch.iteration == 2:
                raise EngineError("the engine is gone")
            return answer(questions, batch)

        monkeypatch.setattr(training.collector.sampler, "answer", fail)
        with pytest.raises(EngineError, match="the engine is gone"):
            iterate(training)
    assert (training.folder.finished, collected(training.folder)) == (1, [0, 1])


def test_second_fault_is_final(task: Any, open_training: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    faults = iter([EngineError("it is gone"), torch.OutOfMemoryError("it is full")])

    def update(training: Training, iteration: int) -> Metrics:
        raise next(faults)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "update", update)
        for kind, message in (
            (OSError, "iteration 0 failed: it is gone"),
            (ValueError, f"iteration 0 failed again: it is full; {REMEDIES}"),
        ):
            with pytest.raises(kind) as ended, open_training(task, dict(RUN)) as training:
                iterate(training)
            assert str(ended.value) == message
    with open_training(task, dict(RUN)) as training:
        iterate(training)
    training.folder.tidy()
    assert (training.folder.finished, (training.folder.path / "fault").exists()) == (ITERATIONS, False)


def test_stale_weights_noticed(task: Any, open_training: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with open_training(task, dict(AHEAD)) as training:
        monkeypatch.setattr(training.collector.sampler.engine, "load_weights", lambda *_: None)
        with pytest.raises(StaleWeightsError, match="the sums of"):
            iterate(training)
    assert collected(training.folder) == [0, 1, 2, 3]


@pytest.mark.parametrize("killed_at", [-1, "stop"])
def test_a_run_that_ends_between_two_checkpoints_has_one_of_its_end(
    go: Go, left_alone: Callable[[dict[str, Any]], Alone], monkeypatch: pytest.MonkeyPatch, killed_at: int | str
) -> None:
    """The validation after the fourth iteration is no better than that after the second."""
    monkeypatch.setitem(globals(), "score", lambda _: {"validation/success": 0.5})
    expected, _ = left_alone(RUN | EARLY)
    folder, process = go(SPARSE | EARLY, killed_at)
    if killed_at != -1:
        folder, process = go(SPARSE | EARLY)
    assert bits(folder) == expected
    assert (folder.finished, folder.progress.stopped, "save" in process.events) == (4, True, True)
