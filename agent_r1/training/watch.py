"""The guards of a training: the proof that the sampler runs the learner's weights (law 6), and the collapse monitor."""

from __future__ import annotations

import enum
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from agent_r1.credit.collapse import Alarm, alarms, is_clean
from agent_r1.params.train import CanaryTolerance, TrainParams
from agent_r1.records import Floats32, Metrics, Source, Step, Trajectory
from agent_r1.rollout.sampling import Action, EngineError, HeldWeights
from agent_r1.seeds import derive
from agent_r1.weight_sums import differing

RECENT = 5  # iterations, which tell how long the next ones take

logger = logging.getLogger(__name__)


class StaleWeightsError(EngineError):
    """The sampler does not run the weights it was given."""


def prove_held(held: HeldWeights, sums: Mapping[str, int]) -> set[str]:
    """Compares the sums of a sampler's weights with those of the learner's, as it should hold them.

    Gives the names of tensors that one side alone knows, which are not proved. Raises StaleWeightsError where the sums
    of a tensor differ.
    """
    if wrong := differing(held.sums, sums):
        raise StaleWeightsError(
            f"after a weight transfer {held.sampler} holds other weights than the learner's: the sums of {len(wrong)} "
            f"of {len(sums)} tensors differ, {wrong[0]} for one; start again, which goes on from the checkpoint "
            "and loads them anew; if they differ then too, set another engine.kind; weights that are no numbers need "
            "a lower train.update.learning_rate"
        )
    return {name for name in held.sums.keys() ^ sums.keys() if held.sums.get(name) != 0}  # a layer without adapters


def accepted_gap(dtype: torch.dtype, tolerance: CanaryTolerance) -> tuple[str, float]:
    """The measure of the gap between two models' logprobs, `max` or `mean`, and the largest gap that passes [nats].

    In float32 it is the largest difference, and shows one update of the weights. In 16 bits it is the mean difference,
    and shows another model: the largest of many tokens is rounding alone (logits near 32 lie .125 apart).
    """
    return ("max", tolerance.float32) if dtype is torch.float32 else ("mean", tolerance.bfloat16)


def prove_sampled(
    trajectories: Sequence[Trajectory],
    learners: Sequence[Floats32],
    dtype: torch.dtype,
    tolerance: CanaryTolerance,
) -> float:
    """The gap in nats between the sampler's and the `learners` logprobs [L] at sampled tokens, as the dtype asks.

    Raises StaleWeightsError for a gap that is above the tolerance, or not a number.
    """
    pairs = [
        (trajectory, trajectory.action_mask, logprobs)
        for trajectory, logprobs in zip(trajectories, learners, strict=True)
    ]
    differences = np.concatenate(
        [np.abs(trajectory.logprobs[mask] - logprobs[mask]) for trajectory, mask, logprobs in pairs]
    )
    measure, allowed = accepted_gap(dtype, tolerance)
    gap = float(differences.max() if measure == "max" else differences.mean())  # NaN where one of them is
    if not gap <= allowed:
        how, name = ("", "float32") if measure == "max" else (" on average", "bfloat16")
        raise StaleWeightsError(
            f"after a weight transfer the sampler's logprobs are off by {gap:.2g} nats{how} "
            f"(train.update.canary_tolerance.{name} is {allowed:g}): it does not run the learner's weights; where vLLM "
            "samples on CUDA, first try VLLM_USE_V2_MODEL_RUNNER=0 in its environment"
        )
    return gap


def with_action(trajectory: Trajectory, action: Action) -> Trajectory:
    """The trajectory as it would be if the action had been its first, and its last."""
    start = trajectory.steps[0].action_start
    length = len(action.token_ids)
    step = Step(action_start=start, action_stop=start + length, stop_reason=action.stop_reason, calls=[], rewards={})
    return replace(
        trajectory,
        token_ids=np.concatenate([trajectory.token_ids[:start], np.array(action.token_ids, np.int32)]),
        source=np.concatenate([trajectory.source[:start], np.full(length, Source.ACTION, np.uint8)]),
        logprobs=np.concatenate([trajectory.logprobs[:start], action.logprobs]),
        context_starts=[0],
        steps=[step],
    )


def require_own(trajectories: Sequence[Trajectory], iteration: int, *, seed: int, policy_versions: range) -> None:
    """Raises ValueError for trajectories that were not sampled in that iteration, under that seed, by such weights."""
    for trajectory in trajectories:
        expected_seed = derive(seed, iteration, trajectory.question_id, trajectory.sample)
        if trajectory.seed != expected_seed or trajectory.policy_version not in policy_versions:
            versions = " or ".join(map(str, policy_versions))
            raise ValueError(
                f"trajectory {trajectory.trajectory_id!r} is of policy version {trajectory.policy_version}, not "
                f"{versions}, or of another seed or iteration"
            )


class Record(Protocol):
    """Where a training's numbers and alarms go besides its folder, such as a run of MLflow."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Adds the metrics of an iteration that it does not have yet."""

    def tag(self, name: str, value: str) -> None:
        """Sets a tag, in place of the value it had."""

    def rewind(self) -> None:
        """Lets every iteration be logged again: the run goes back to an earlier one."""


class Unrecorded:
    """A record that keeps nothing: the folder has it all."""

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...
    def tag(self, name: str, value: str) -> None: ...
    def rewind(self) -> None: ...


UNRECORDED = Unrecorded()


class RunDecision(enum.StrEnum):
    """How a run goes on after an iteration."""

    GO_ON = "went on"
    STOP = "stopped"
    ROLL_BACK = "rolled back"


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The monitor's judgement of one iteration."""

    alarms: list[Alarm]
    clean: bool  # no sign has even begun to show: the weights that the iteration began with are good
    decision: RunDecision
    rollbacks: int  # before this verdict
    begun: Sequence[Alarm] = ()  # signs that it shows, and not yet often enough in a row

    @property
    def metrics(self) -> Metrics:
        return {"monitor/alarms": len(self.alarms), "monitor/rollbacks": self.rollbacks}


def judge(history: Sequence[Mapping[str, float]], config: TrainParams, rollbacks: int) -> Verdict:
    """Judges a run by the metrics of its iterations so far.

    With `on_collapse: rollback` an alarm after the last of `max_rollbacks` rollbacks stops the run.
    """
    samples = config.rollout.samples
    monitor = config.monitor
    signs = alarms(history, monitor, samples=samples)
    lasting = {alarm.sign for alarm in signs}
    decision = RunDecision.GO_ON
    if signs and monitor.goes_back:
        decision = RunDecision.STOP if rollbacks >= monitor.max_rollbacks else RunDecision.ROLL_BACK
    elif signs and monitor.on_collapse == "stop":
        decision = RunDecision.STOP
    return Verdict(
        alarms=signs,
        clean=is_clean(history, monitor, samples=samples),
        decision=decision,
        rollbacks=rollbacks,
        begun=[alarm for alarm in alarms(history, monitor, samples=samples, streak=1) if alarm.sign not in lasting],
    )


def announce(verdict: Verdict, record: Record, iteration: int) -> None:
    """Names the signs in the log, and the alarms and the decision in the tags of the record too."""
    if verdict.begun:
        first_signs = "; ".join(map(str, verdict.begun))
        logger.info("iteration %d shows a first sign of collapse, an alarm if it lasts: %s", iteration, first_signs)
    if not verdict.alarms:
        return
    signs = "; ".join(map(str, verdict.alarms))
    logger.warning("iteration %d shows signs of collapse, the run %s: %s", iteration, verdict.decision, signs)
    record.tag("monitor/signs", ", ".join(alarm.sign for alarm in verdict.alarms))
    record.tag("monitor/last_alarm", f"iteration {iteration}, {verdict.decision}: {signs}")
    if verdict.decision is RunDecision.ROLL_BACK:
        record.tag("monitor/rollbacks", str(verdict.rollbacks + 1))
        record.rewind()


class Account:
    """Tells of every iteration: the worth of its rollouts, its time, and the time that is left.

    Iterations are taken to go on like the last `RECENT` of this process, by the clock, with all that lies between their
    verbs. Validations come on top, each as long as the last one, or before the first as long as a rollout.
    """

    def __init__(self, config: TrainParams, success: str, history: Sequence[Mapping[str, float]]) -> None:
        """`success` is the environment's word for it; `history` is that of earlier processes."""
        self._config = config
        self._success = success
        self._recent = deque[float](maxlen=RECENT)  # seconds
        self._until = time.perf_counter()
        self._validated = _validations(history)

    def line(self, history: Sequence[Mapping[str, float]], planned: int) -> str:
        """Tells of the last iteration of a history, which has just ended, in a run of `planned` ones."""
        now = time.perf_counter()
        validated = _validations(history)
        last = history[-1]
        self._recent.append(now - self._until - sum(validated[len(self._validated) :]))
        self._until = now
        self._validated = validated
        finished = len(history)
        period = self._config.validation.every
        remaining_s = (planned - finished) * sum(self._recent) / len(self._recent)
        if period:  # the policy of this iteration waits for its validation
            awaited = -(-planned // period) - (finished - 1) // period
            remaining_s += awaited * (validated[-1] if validated else last["time/rollout_s"])
        warms_up = not last["policy/learning_rate"]
        rest = f", about {duration(remaining_s)} left" if remaining_s else ""
        return (
            f"iteration {finished - 1}: {self._success} {last['rollout/success']:.3f}, "
            f"return {last['reward/total']:.3f}, rollout {duration(last['time/rollout_s'])}, "
            f"update {duration(last['time/update_s'])}; "
            f"{finished} of {'at most ' * warms_up}{planned} done{rest}"
        )


def _validations(history: Sequence[Mapping[str, float]]) -> list[float]:
    return [metrics["time/validate_s"] for metrics in history if "time/validate_s" in metrics]


def duration(seconds: float) -> str:
    """Two digits of seconds or of minutes, else hours: `1.2 s`, `95 min`, `31 h`."""
    size, unit = (1, "s") if seconds < 99.5 else (60, "min") if seconds < 99.5 * 60 else (3600, "h")
    return f"{seconds / size:.{int(seconds / size < 9.95)}f} {unit}"


def reseeded(seed: int, rollbacks: int) -> int:
    """The seed after so many rollbacks; with the old one a run would draw and sample the same again."""
    return derive(seed, "rollback", rollbacks) if rollbacks else seed
