"""How much of the truth about stored steps estimators and the critic know: `python -m benchmarks.truth RUN`.

Holds every estimator that a run's trajectories allow, and its critic, against continuations of the stored steps.
The value of a step is the mean return to go of N continuations from before it, by the same weights. The true advantage
of an action is its reward plus the value after it less the value before: chance included, in a world that has it.
Both are undiscounted. No estimator sees a continuation.

Legend for shapes: S = steps of the chosen trajectories, one after the other, N = continuations of each step.
"""

from __future__ import annotations

import argparse
import logging
import math
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from rich import box
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.nn.functional import pad

from agent_r1 import params
from agent_r1.credit import own as own_rewards
from agent_r1.credit.batch import groups_of, token_steps
from agent_r1.credit.estimators import ESTIMATORS
from agent_r1.credit.rewards import step_rewards
from agent_r1.envs.base import Prefix
from agent_r1.envs.kinds import KINDS, agent_of, attempts_at
from agent_r1.envs.shared import Shared
from agent_r1.evaluation.statistics import Interval
from agent_r1.inspection.replay import Configuration, Replayer, configurations
from agent_r1.inspection.stored import PolicyOnDisk, StoredRun, stored_run
from agent_r1.learn.gradients import join_credit, policy_pass
from agent_r1.learn.learner import Learner
from agent_r1.learn.model import load_tokenizer
from agent_r1.params import Params
from agent_r1.params.env import EnvParams
from agent_r1.params.places import RunId, adapter_in
from agent_r1.params.sections import override, validated
from agent_r1.params.train import TrainParams
from agent_r1.pretrained import end_tokens
from agent_r1.records import QA, Credit, Floats, Question, Trajectory, questions_by_id
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.engines import open_engine
from agent_r1.rollout.episode import Play
from agent_r1.rollout.episodes import collect
from agent_r1.rollout.sampling import Actor, Beneath, Engine
from agent_r1.search.index import open_index
from agent_r1.seeds import derive
from agent_r1.tables import read_rows
from agent_r1.training.watch import prove_sampled, reseeded
from benchmarks.agreement import Moments, agreements, jackknife, knowledge
from flows.policies import teacher_of
from flows.stage import accelerator
from flows.terminal import show

SKETCHED = 1 << 16  # numbers that a gradient is projected to; a cosine is off by about 1 / sqrt of it, .004
PROVED = 16  # continuations whose tokens prove the weights
TRUTH = ("correlation", "cosine of gradients", "ahead of the first line")
ABOUT_TRUTH = (
    "Advantages at action tokens, and their policy gradients, against the true ones, with 95 % intervals over "
    "questions. The noise of the continuations is taken out; no estimator has seen them. Too few: without one of the "
    "questions the number does not exist."
)
KNOWN = ("the state tells", "the critic tells", "critic's correlation with the truth")
ABOUT_KNOWN = "The parts between and within questions add up. A critic that tells less than 0 is worse than a constant."
SCOPES = ("all steps", "between questions", "within questions")

Triple = tuple[Interval, Interval, Interval]
Credited = list[tuple[Trajectory, Credit]]  # with the run's own credit, group by group


class Truth(NamedTuple):
    """The truth about some stored steps of an iteration; intervals are over questions."""

    iteration: int
    policy: PolicyOnDisk  # that continued them
    counts: tuple[int, int, int]  # questions, steps, continuations of each
    # Each configuration, the run's own first, then continuations as an estimator: the correlation of its advantages
    # with the true ones at action tokens, the cosine of its policy gradient with theirs, and that less the first one's.
    agreements: dict[str, Triple]
    halves: Triple  # the two halves of the truth so compared
    # For each of SCOPES the state's and the critic's share of the variance of the observed return to go, and the
    # correlation of the critic's value with the true value; NaN without a critic.
    knowledge: dict[str, Triple]


def estimators(own: Configuration) -> list[Configuration]:
    """The run's own configuration, and the same with each other estimator that its stored trajectories allow.

    A critic's estimators need its stored values, those of groups several samples, maxrl rewards that are never below 0.
    All masks are on, and there is no KL.
    """
    found, credit = [own], own.train.credit
    masks = {"loss_mask": True, "advantage_mask": {"recursion": True, "whitening": True, "critic": True}}
    for name in ESTIMATORS:
        other = credit.model_copy(update={"estimator": name})
        lacks = (other.needs_critic and not credit.needs_critic) or (other.in_groups and own.train.rollout.samples == 1)
        if name != credit.estimator and not lacks:
            changes = {"credit": masks | {"estimator": name, "kl_reward": 0.0}, "update": {"ratio": "token"}}
            with suppress(ValueError):  # of rewards that the estimator does not take
                train = validated(TrainParams, override(own.train.model_dump(), changes), f"{own.name} as {name}")
                found.append(Configuration(name, train))
    return found


def measure(
    stored: StoredRun, settings: Params, compared: list[Configuration], *, iterations: list[str], times: int, steps: int
) -> list[Truth]:
    """Measures about `steps` stored steps of each iteration of a run, by `times` continuations of each step.

    The settings and the first of `compared` are the run's own; for `iterations` see `StoredRun.choose`. Raises
    ValueError for an environment that restores no stored step, for an iteration whose policy is not on disk, and for
    steps whose context is another one now.
    """
    own = compared[0].train
    replayer = Replayer(stored, compared, settings, with_gradient=True)
    index = open_index(settings.search, settings.places.passages, settings.places.index)
    found: dict[int, tuple[Credited, Floats, list[Trajectory]]] = {}
    with Shared(settings.env, index) as shared:
        continuing = Continuing(stored, own, settings, shared)
        for number in stored.choose(iterations):
            seed = derive(own.seed, number, "truth")
            chosen = choose(stored.trajectories(number), stored.credits(number), steps, seed)
            found[number] = chosen, *continuing.returns(chosen, times)
    return [against_truth(replayer, *each) for each in found.values()]  # the engines have left the device by now


def choose(trajectories: Sequence[Trajectory], credits_: Sequence[Credit], steps: int, seed: int) -> Credited:
    """The kept trajectories of groups that are drawn by the seed until they have so many steps."""
    groups: dict[int, Credited] = {}
    for trajectory, credit in zip(trajectories, credits_, strict=True):
        if credit.kept and trajectory.steps:
            groups.setdefault(trajectory.group, []).append((trajectory, credit))
    found = Credited()
    for group in random.Random(seed).sample(list(groups.values()), len(groups)):
        if sum(len(trajectory.steps) for trajectory, _ in found) < steps:
            found += group
    return found


def require_restored(questions: Sequence[Question], limits: EnvParams) -> None:
    """Raises ValueError, which names the environment, if no stored prefix of the questions' episodes can go on."""
    for env in dict.fromkeys(question.env for question in questions):
        if agent := agent_of(env, limits):
            raise ValueError(f"env {env!r} is played by the agent outside {agent!r}, whose steps cannot be restored")
        if not KINDS[env].restored(limits):
            able = ", ".join(name for name, kind in KINDS.items() if kind.restored(limits))
            why = "with env.tools.python or env.tools.mcp " if env == QA else ""
            raise ValueError(
                f"env {env!r} {why}does not restore an episode from question, seed and actions; {able} do, and {QA!r} "
                "without those two tools"
            )


class Continuing:
    """Continues stored steps with the weights that sampled them, or the next ones on disk."""

    def __init__(self, stored: StoredRun, own: TrainParams, settings: Params, shared: Shared) -> None:
        self.stored, self.own, self.settings, self.shared = stored, own, settings, shared
        self.questions = questions_by_id(read_rows(settings.places.questions, Question))

    def returns(self, chosen: Credited, times: int) -> tuple[Floats, list[Trajectory]]:
        """[S, N] the returns to go of the continuations, and some of those that have no prefix."""
        first, env = chosen[0][0], self.settings.env
        require_restored([self.questions[each.question_id] for each, _ in chosen], env)
        starts = [step for trajectory, _ in chosen for step in range(len(trajectory.steps))]
        credit, to_go, fresh = self.own.credit, list[list[float]](), list[Trajectory]()
        with self._engine(first) as (engine, chat):
            for draw in track(range(times), f"iteration {first.iteration}", disable=not sys.stderr.isatty()):
                pairs = [*zip(self._played(engine, chat, chosen, draw), starts, strict=True)]
                to_go.append([step_rewards(each, credit, env.max_tokens)[0][start:].sum() for each, start in pairs])
                fresh = fresh or [each for each, start in pairs if not start][:PROVED]
        return np.array(to_go).T, fresh

    @contextmanager
    def _engine(self, first: Trajectory) -> Iterator[tuple[Engine, Chat]]:
        policy, settings = self.stored.policy(first.policy_version).path, self.settings
        if policy is None:
            lacking = f"the weights that sampled iteration {first.iteration} of {self.stored.run} are no longer on disk"
            raise ValueError(f"{lacking}; take another --iteration, such as the last")
        chat, limit = Chat(load_tokenizer(policy), end_tokens(policy)), settings.env.max_tokens
        actor = Actor(
            model=str(policy), end_ids=chat.end_ids, max_tokens=limit, temperature=1.0, dtype=settings.model.dtype
        )
        adapted = adapter_in(policy).is_dir() and settings.engine.kind != "server"
        beneath = Beneath(str(self.stored.warm_start), settings.model.lora.rank) if adapted else None
        with open_engine(settings.engine, actor.beside(beneath)) as engine:
            yield engine, chat

    def _played(self, engine: Engine, chat: Chat, chosen: Credited, draw: int) -> list[Trajectory]:
        """[S] the draw's continuation of each step."""
        attempts, first = [], chosen[0][0]
        for stored, _ in chosen:
            [attempt] = attempts_at([self.questions[stored.question_id]], self.shared)
            attempt = replace(attempt, group=stored.group, sample=stored.sample)
            prefixes = [Prefix(trajectory=stored, step=step, draw=draw) for step in range(len(stored.steps))]
            attempts += [replace(attempt, prefix=prefix) for prefix in prefixes]
        play, seed, share = Play(iteration=first.iteration), seed_of(first, self.own), self.settings.env.aborted_share
        played = collect(engine, chat, attempts, self.shared, seed=seed, play=play)
        rewards = own_rewards.functions(self.own.credit.rewards)
        played = own_rewards.state(rewards, played, self.questions, chat.decode, aborted_share=share)
        if cut := sum(each.aborted for each in played):
            raise ValueError(f"the world cut {cut} of {len(played)} continuations short; measure when it answers again")
        return played


def seed_of(trajectory: Trajectory, own: TrainParams) -> int:
    """The seed of the draws of a trajectory; a ValueError refuses one of another run."""
    for seed in (reseeded(own.seed, rollbacks) for rollbacks in range(own.monitor.max_rollbacks + 1)):
        if derive(seed, trajectory.iteration, trajectory.question_id, trajectory.sample) == trajectory.seed:
            return seed
    raise ValueError(f"trajectory {trajectory.trajectory_id!r} was not sampled by train.seed {own.seed}; set it back")


def against_truth(replayer: Replayer, chosen: Credited, returns: Floats, fresh: list[Trajectory]) -> Truth:
    """Holds credits and critic of an iteration against the returns to go [S, N] of its steps' continuations."""
    rows, own = [each for each, _ in chosen], replayer.compared[0].train
    policy = replayer.stored.policy(rows[0].policy_version)
    learner = replayer.learner_at(policy)
    proof = [*fresh, *(rows[:PROVED] if policy.sampled_it else [])]
    prove_sampled(proof, learner.logprobs(proof), learner.compute.dtype, own.update.canary_tolerance)
    rewards = [step_rewards(each, own.credit, replayer.max_tokens)[0] for each in rows]
    ends = np.cumsum([len(each) for each in rewards])[:-1]
    halves = [np.split(half.mean(1), ends) for half in (returns[:, ::2], returns[:, 1::2])]
    credited = [{row.trajectory_id: row.advantages for row in each} for each in replayer.credited(rows[0].iteration)]
    series = [[each[row.trajectory_id] for row in rows] for each in credited]
    series += [list(map(true_advantages, rows, rewards, half)) for half in halves]
    groups = [[i for i, row in enumerate(rows) if row.group == group] for group in dict.fromkeys(groups_of(rows))]

    def moments(points: Iterable[Sequence[NDArray[Any]]]) -> Moments:
        stacked = [np.stack(each, 1, dtype=np.float64) for each in points]
        return Moments.of([np.concatenate([stacked[i] for i in group]) for group in groups])

    tokens = moments([one[i][row.action_mask] for one in series] for i, row in enumerate(rows))
    values = moments(map(known_before_steps, chosen, rewards, *halves))
    gradients = gradient_products(learner, chosen, series, groups)

    def statistics(weights: Floats) -> Floats:
        cosines = agreements(np.einsum("q,qarb,r->ab", weights, gradients, weights))
        agreeing = np.stack([agreements(tokens.covariances(weights)[0]), cosines, cosines - cosines[0]], 1)
        return np.array([*agreeing, *knowledge(values.covariances(weights))]).ravel()

    found = iter(jackknife(statistics, len(groups)))
    *agreeing, halved, every, between, within = zip(found, found, found, strict=True)
    names = [*(each.name for each in replayer.compared), f"{returns.shape[1] // 2} continuations"]
    return Truth(
        iteration=rows[0].iteration,
        policy=policy,
        counts=(len(groups), *returns.shape),
        agreements=dict(zip(names, agreeing, strict=True)),
        halves=halved,
        knowledge=dict(zip(SCOPES, (every, between, within), strict=True)),
    )


def true_advantages(trajectory: Trajectory, rewards: Floats, values: Floats) -> NDArray[Any]:
    """[L] a step's reward plus the value after it, 0 at the end, less the value before, from [K]; 0 at no action."""
    steps = token_steps(trajectory)
    return np.where(steps >= 0, (rewards + np.append(values[1:], 0.0) - values)[steps], 0.0)


def known_before_steps(pair: tuple[Trajectory, Credit], rewards: Floats, *halves: Floats) -> list[NDArray[Any]]:
    """The series of `knowledge` [K]; without a critic its values are NaN."""
    values = pair[1].values[[step.action_start for step in pair[0].steps]]
    critic = values if pair[1].critic_mask.any() else np.full_like(values, np.nan)
    return [rewards[::-1].cumsum()[::-1], critic, *halves]


def gradient_products(
    learner: Learner, chosen: Credited, series: Sequence[Sequence[NDArray[Any]]], groups: Sequence[Sequence[int]]
) -> Floats:
    """[Q, D, Q, D] products of the policy gradients of each question under each series of advantages, as `sketch`."""
    found = []
    for group in track(groups, "gradients", disable=not sys.stderr.isatty()):
        pairs = [chosen[i] for i in group]
        found += [sketch(learner, pairs, [one[i] for i in group]) for one in series]
    flat, shape = torch.stack(found), (len(groups), len(series))
    products: Floats = (flat @ flat.T).reshape(shape * 2).numpy()
    return products


def sketch(learner: Learner, pairs: Credited, advantages: Sequence[NDArray[Any]]) -> Tensor:
    """[SKETCHED] float64, the gradient of the sum of the tokens' losses without KL and entropy, projected.

    The projection adds up weights with random signs, which keeps products on average: Charikar et al. 2002.
    """
    params = learner.params.model_copy(update={"kl_loss": 0.0, "entropy_bonus": 0.0})
    total = torch.zeros(SKETCHED, dtype=torch.float64)
    weights = [parameter for parameter in learner.policy.parameters() if parameter.requires_grad]
    credits_ = [
        replace(credit, advantages=each.astype(np.float32), loss_mask=trajectory.action_mask)
        for (trajectory, credit), each in zip(pairs, advantages, strict=True)
    ]
    rows = join_credit(learner.policy, [trajectory for trajectory, _ in pairs], credits_, params, learner.compute)
    for tokens, terms in policy_pass(learner.policy, rows, params, learner.compute, learn=True, whole=True):
        gradients = torch.autograd.grad((terms * tokens.weights).sum(), weights, materialize_grads=True)
        for number, each in enumerate(gradients):
            signs = torch.randint(2, each.shape, generator=torch.Generator().manual_seed(number)) * 2 - 1
            signed = (each.cpu() * signs).flatten().double()
            total += pad(signed, (0, -len(signed) % SKETCHED)).view(-1, SKETCHED).sum(0)
    return total


def truth_tables(measured: Sequence[Truth]) -> Iterator[Table | str]:
    """For each iteration a table of estimators and one of the critic, with notes."""
    for one in measured:
        questions, steps, times = one.counts
        title = f"Iteration {one.iteration}: {steps} steps of {questions} questions, {times} continuations of each"
        yield _intervals(title, TRUTH, one.agreements, ABOUT_TRUTH)
        correlation, cosine, _ = map(_known, one.halves)
        yield f"The halves of the truth: correlation {correlation}, cosine {cosine}."
        yield _intervals("Of the variance of the return to go before a step", KNOWN, one.knowledge, ABOUT_KNOWN)
        yield f"Policy of the continuations: {one.policy.note}."


def _intervals(title: str, columns: Sequence[str], rows: Mapping[str, Sequence[Interval]], about: str) -> Table:
    table = Table("", title=title, title_justify="left", caption=about, caption_justify="left", box=box.SIMPLE)
    for heading in columns:
        table.add_column(heading, justify="right")
    for name, cells in rows.items():
        table.add_row(name, *map(_known, cells))
    return table


def _known(value: Interval) -> str:
    if math.isfinite(value.high - value.low):
        return f"{value.mean:.2f} [{value.low:.2f}, {value.high:.2f}]"
    return f"{value.mean:.2f} (too few)" if math.isfinite(value.mean) else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description="Holds estimators and critic against continuations of stored steps.")
    parser.add_argument("run", help="a name under runs: in params.yaml")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--sweep", default="", choices=["", "ablations"])
    parser.add_argument("--continuations", type=int, default=16, help="of each step, 2 or more")
    parser.add_argument("--steps", type=int, default=300, help="of an iteration, about so many")
    parser.add_argument("--iteration", action="append", default=[], help="a number, or all; may be given again")
    chosen = parser.parse_args()
    if min(chosen.continuations, chosen.steps) < 2:
        parser.error("--continuations and --steps are 2 or more")
    logging.getLogger("agent_r1.credit").setLevel(logging.WARNING)  # it has a line per iteration and configuration
    settings = params.load()
    run = RunId(chosen.run, chosen.seed, chosen.sweep)
    [own] = configurations(settings, run, [], [], teacher_of(settings, run))
    stored = stored_run(settings, run)
    limits = {"iterations": chosen.iteration, "times": chosen.continuations, "steps": chosen.steps}
    with accelerator(settings.operate.side_by_side, settings.engine.gpus):
        measured = measure(stored, settings.of(run), estimators(own), **limits)
    show(*truth_tables(measured))


if __name__ == "__main__":
    main()
