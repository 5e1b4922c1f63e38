"""What went wrong in a training: counts by hand, the planted hacks of the rewards, and trends."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent_r1.credit.assign import assign
from agent_r1.inspection.health import audit, failures, gamed_rewards
from agent_r1.inspection.stored import StoredRun
from agent_r1.learn.checkpoint import Progress, seal
from agent_r1.params.credit import CreditParams, RewardWeights
from agent_r1.records import Call, CallStatus, Credit, Outcome, Source, Trajectory
from agent_r1.tables import write_rows
from tests.cases import cases, tables
from tests.credit.test_reward_hacks import CREDIT, HONEST, LIMITS, MAX_STEPS, Play, play  # noqa: F401
from tests.trajectories import from_parts

OK = CallStatus.OK
ITERATIONS = 8
EPISODES = 7


def episode(*statuses: CallStatus, error: str = "", arguments: str = "", **fields: Any) -> Trajectory:
    """Calls of the tool `look`, each in a step of its own with a reply `error`, then an answer."""
    calls = [
        [Call(tool="" if status is CallStatus.MALFORMED else "look", arguments=arguments, status=status)]
        for status in statuses
    ]
    reply = [ord(letter) for letter in error]
    parts = [
        part for _ in calls for part in ((Source.ACTION, [1]), (Source.TEMPLATE, [2]), (Source.OBSERVATION, reply))
    ]
    steps = [*({"calls": made} for made in calls), {"rewards": {"em": 1.0, "grounded": 1.0}}]
    return from_parts([(Source.PROMPT, [0]), *parts, (Source.ACTION, [3])], steps, **fields)


def decode(token_ids: Sequence[int]) -> str:
    return "".join(map(chr, token_ids))


@cases("statuses, fields, kinds")
def test_failures_of_an_episode(statuses: list[str], fields: dict[str, Any], kinds: list[str]) -> None:
    ending = {"outcome": Outcome(fields.get("outcome", "answered"))}
    assert sorted({*failures(episode(*map(CallStatus, statuses), **fields | ending), decode)}) == kinds


def test_answer_in_no_observation_is_unsupported() -> None:
    trajectory = from_parts([(Source.ACTION, [1])], [{"rewards": {"em": 1.0, "grounded": 0.0}}])
    assert [*failures(trajectory, decode)] == ["unsupported answer"]
    world = from_parts([(Source.ACTION, [1])], [{"rewards": {"env": 1.0, "success": 1.0}}], outcome=Outcome.ENDED)
    assert [*failures(world, decode)] == [], "a world that asks for no answer"


class Rows(StoredRun):
    """A run of rows in memory, with files for what is read by name."""

    def __init__(self, folder: Path, iterations: Sequence[Sequence[Trajectory]], params: CreditParams) -> None:
        self.run = "made"
        self.folder = folder
        self.kept = list(range(len(iterations)))
        self.progress = Progress(iterations=len(iterations), policy_version=0)
        self._trajectories = iterations
        self._credits = list[list[Credit]]()
        lines = []
        for rows in iterations:
            credits_, metrics = assign(rows, None, params, max_tokens=LIMITS.max_tokens)
            self._credits.append(credits_)
            lines.append(json.dumps(metrics))
        (folder / "metrics.jsonl").write_text("\n".join(lines))
        self.decode = decode

    def trajectories(self, iteration: int) -> list[Trajectory]:
        return list(self._trajectories[iteration])

    def credits(self, iteration: int) -> list[Credit]:
        return self._credits[iteration]

    def validated(self, scores: Mapping[int, float]) -> None:
        """Adds the success on dev questions after some iterations."""
        lines = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        for iteration, score in scores.items():
            lines[iteration]["validation/success"] = score
        (self.folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))


def paid(**weights: float) -> CreditParams:
    rewards = RewardWeights.model_validate({**dict.fromkeys(RewardWeights.model_fields, 0.0), **weights})
    return CREDIT.model_copy(update={"rewards": rewards, "estimator": "reinforce_pp"})


def numbered(iterations: Sequence[Sequence[Trajectory]]) -> list[list[Trajectory]]:
    return [
        [replace(row, trajectory_id=f"{i}/q{n}/0", iteration=i, group=n) for n, row in enumerate(rows)]
        for i, rows in enumerate(iterations)
    ]


def test_an_audit_by_hand(tmp_path: Path) -> None:
    """Of eight episodes one is aborted. Three of the seven are malformed, one of them in the last iteration.

    These earn 0, 0 and 1, the four others 1, 1, 1 and 0: 3/4 less 1/3 is 5/12, in 3/8 of the episodes.
    """
    wrong = {"em": 0.0, "grounded": 1.0}

    def made(*statuses: CallStatus, right: bool) -> Trajectory:
        row = episode(*statuses)
        return row if right else replace(row, steps=[*row.steps[:-1], replace(row.steps[-1], rewards=wrong)])

    bad = CallStatus.MALFORMED
    first = [made(bad, right=False), made(bad, right=False), made(OK, right=True), episode(outcome=Outcome.ABORTED)]
    last = [made(bad, right=True), made(OK, right=True), made(OK, right=True), made(OK, right=False)]
    stored = Rows(tmp_path, numbered([first, last]), paid(em=2.0))
    malformed, aborted = audit(stored, paid(em=2.0), LIMITS.max_tokens)
    assert (malformed.kind, malformed.episodes) == ("malformed action", ["0/q0/0", "0/q1/0", "1/q0/0"])
    assert (malformed.share, malformed.at_end) == (3 / 8, 1 / 4)
    assert malformed.success_lost == pytest.approx(3 / 8 * 5 / 12)
    assert malformed.reward_lost == pytest.approx(2 * 3 / 8 * 5 / 12)
    assert malformed.named, "it is in more than a fifth"
    assert (aborted.kind, aborted.share, aborted.named) == ("aborted", 1 / 8, False)
    assert math.isnan(aborted.reward_lost)


@pytest.mark.parametrize(("count", "named"), [(19, False), (20, True)])
def test_audit_names_kind_from_a_fifth_of_episodes_on(count: int, named: bool, tmp_path: Path) -> None:
    rows = [episode(*([CallStatus.MALFORMED] if place < count else [])) for place in range(100)]
    [kind] = audit(Rows(tmp_path, numbered([rows]), paid(em=1.0)), paid(em=1.0), LIMITS.max_tokens)
    assert (kind.share, kind.named) == (count / 100, named)


HACKS = tables(Path(__file__).parent)["hacks"]


def drifting(play: Play, before: Sequence[Sequence[str]], after: Sequence[str]) -> list[list[Trajectory]]:  # noqa: F811
    """A run whose policy drifts from one way of playing to another, by one episode in an iteration."""
    old = [play(*script) for script in before]
    new = play(*after)
    return numbered([[new if n < i else old[n % len(old)] for n in range(EPISODES)] for i in range(ITERATIONS)])


@pytest.mark.parametrize("part", HACKS)
def test_audit_names_planted_hack_first(part: str, play: Play, tmp_path: Path) -> None:  # noqa: F811
    params = paid(**{part: 1.0})
    kinds = audit(Rows(tmp_path, drifting(play, *HACKS[part]), params), params, LIMITS.max_tokens)
    assert kinds[0].kind == f"gamed reward: {part}"
    assert "success on training questions" in kinds[0].gamed
    late = [f"{ITERATIONS - 1}/q{n}/0" for n in range(EPISODES)]
    assert {*late} <= {*kinds[0].episodes}, "the episodes of the hack are pointed at"
    assert kinds[0].reward_lost < 0, "they earn more"


def test_audit_names_reward_of_guesses_that_dev_questions_do_not_pay(play: Play, tmp_path: Path) -> None:  # noqa: F811
    """`em` is blind to how an answer was found. Without dev questions the guesses are named, not the reward."""
    params = paid(em=1.0)
    stored = Rows(tmp_path, drifting(play, [("? Low Tide", "= Veld")], ("= Tesk",)), params)
    assert [kind.kind for kind in audit(stored, params, LIMITS.max_tokens) if kind.named] == ["unsupported answer"]
    stored.validated({1: 0.3, 4: 0.3, 7: 0.2})
    first = audit(stored, params, LIMITS.max_tokens)[0]
    assert first.kind == "gamed reward: em"
    assert first.gamed.endswith("success on dev questions from 0.300 to 0.200")


def test_audit_names_nothing_in_run_that_learns(play: Play, tmp_path: Path) -> None:  # noqa: F811
    """Its one repetition is counted."""
    params = paid(agent_r1=1.0, grounded=0.2)
    iterations = drifting(play, [("? Low Tide", "= film")], HONEST)
    iterations[-1][0] = replace(play("? Low Tide", *HONEST), trajectory_id="7/q0/0", iteration=7)
    kinds = audit(Rows(tmp_path, iterations, params), params, LIMITS.max_tokens)
    assert [(kind.kind, len(kind.episodes), kind.named) for kind in kinds] == [("repeated call", 1, False)]


def lines(success: Sequence[float], **parts: Sequence[float]) -> list[dict[str, float]]:
    """The metrics of iterations whose returns have a std of 0.5."""
    return [
        {"rollout/success": right, "reward/std": 0.5, **{f"reward/{name}": part[place] for name, part in parts.items()}}
        for place, right in enumerate(success)
    ]


RISE = np.linspace(0.2, 0.8, 12).tolist()
FLAT = [0.5] * 12


def test_reward_that_rises_alone_is_gamed() -> None:
    weights = {"think": 0.5, "em": 1.0, "f1": 0.0}
    assert gamed_rewards(lines(FLAT, think=RISE, em=FLAT, f1=RISE), weights) == {
        "think": "think goes from 0.100 to 0.400 in 12 iterations, success on training questions from 0.500 to 0.500"
    }
    assert gamed_rewards(lines(RISE, think=RISE, em=RISE), weights) == {}


@cases("reward")
def test_reward_that_hardly_rises_or_falls_is_not_gamed(reward: list[float]) -> None:
    assert gamed_rewards(lines(FLAT, think=reward), {"think": 1.0}) == {}


def test_trend_of_success_takes_three_validations() -> None:
    metrics = lines(RISE, em=RISE)
    metrics[0]["validation/success"] = metrics[11]["validation/success"] = 0.4
    assert gamed_rewards(metrics, {"em": 1.0}) == {}
    metrics[5]["validation/success"] = 0.4
    assert [*gamed_rewards(metrics, {"em": 1.0})] == ["em"]


def test_stored_run_without_trajectories_is_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    with pytest.raises(FileNotFoundError, match="holds no finished iteration of ppo"):
        StoredRun("ppo", tmp_path, tmp_path)
    seal(tmp_path / "checkpoint", Progress(iterations=1, policy_version=1))
    with pytest.raises(FileNotFoundError, match=f"has no trajectories of ppo; `dvc checkout {tmp_path}` brings them"):
        StoredRun("ppo", tmp_path, tmp_path)
    write_rows(tmp_path / "trajectories/000.parquet", [episode()], Trajectory)
    assert StoredRun("ppo", tmp_path, tmp_path).kept == [0]
