"""The profile of a world before training: its floor, its ceiling, and how much a group of samples can teach."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from rich.table import Table

from agent_r1.credit.rewards import step_rewards
from agent_r1.envs.kinds import scripts_of
from agent_r1.evaluation.comparison import mean_cell
from agent_r1.evaluation.protocols import SCRIPTED, Exam, open_exam, questions_under
from agent_r1.evaluation.runs_report import STRATA, in_order, strata_of, stratum_title
from agent_r1.evaluation.scores import AnsweredQuestion, by_question, measured, measures, predict
from agent_r1.evaluation.statistics import interval
from agent_r1.params import Params
from agent_r1.params.credit import CreditParams
from agent_r1.params.stages import EvaluateParams, Protocol
from agent_r1.params.train import TrainParams
from agent_r1.records import Question, Trajectory, words_of
from agent_r1.rollout.chat import Chat

ROUNDING = 1e-9  # of returns
USE = ("calls", "ok_share", "latency_p50_s", "latency_p95_s")  # of a tool
Played = Callable[[Exam], list[Trajectory]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Player:
    """The episodes of one agent."""

    name: str
    trajectories: list[Trajectory]
    answered: list[AnsweredQuestion]
    tools: dict[str, float]  # their use and latencies
    seconds: float


def players_of(settings: Params, questions: Sequence[Question], chat: Chat, by_policy: Played) -> list[Player]:
    """The policy, chance and a solver, `evaluate.samples` times at each question; the last two where scripts play."""

    def played(name: str, protocol: Protocol, play: Played) -> Player:
        fitting = questions_under(protocol, questions)
        with open_exam(protocol, fitting, chat, settings) as exam:
            began = time.monotonic()
            made = play(exam)
            tools = exam.shared.use_of_tools(made) | exam.shared.latencies(made)
        answered = by_question(predict(made, fitting, name, settings.evaluate.seed))
        return Player(name=name, trajectories=made, answered=answered, tools=tools, seconds=time.monotonic() - began)

    scripts: list[Protocol] = [
        each for each in SCRIPTED if any(each in scripts_of(question.env) for question in questions)
    ]
    by_script = [played(name, name, lambda exam: exam.by_script(lambda: None)) for name in scripts]
    return [played("the policy", "tool_call", by_policy), *by_script]


def training_questions(questions: Sequence[Question], count: int, seed: int) -> list[Question]:
    """At most `count` training questions, drawn by the seed."""
    train = [question for question in questions if question.split == "train"]
    return random.Random(seed).sample(train, min(count, len(train)))


def profile_tables(
    agents: Sequence[Player], questions: Sequence[Question], train: TrainParams, settings: Params
) -> Iterator[Table | str]:
    """Success in all and by stratum, how groups of samples differ, the tokens of an iteration, and the tools."""
    policy, word = agents[0], words_of(questions).right
    yield _agents(agents, word, settings.evaluate)
    yield from _strata(agents, questions, word, settings.evaluate)
    share = differing(policy, train.credit, settings.env.max_tokens)
    yield from _groups(policy, share, train)
    yield from _tools(policy.tools)


def _agents(agents: Sequence[Player], word: str, draws: EvaluateParams) -> Table:
    table = Table(title=f"Training questions, {word} with 95 % intervals over questions", title_justify="left")
    for heading in ("agent", word, "steps", "tokens sampled", "tokens read", "seconds, with the start"):
        table.add_column(heading, justify="left" if heading == "agent" else "right")
    for agent in agents:
        counts = [fmean(len(each.steps) for each in agent.trajectories)]
        counts += [fmean(measured(name, agent.answered)) for name in ("tokens_sampled", "tokens_read")]
        table.add_row(
            agent.name, _success(agent.answered, draws), *(f"{count:.1f}" for count in counts), f"{agent.seconds:.1f}"
        )
    return table


def _strata(
    agents: Sequence[Player], questions: Sequence[Question], word: str, draws: EvaluateParams
) -> Iterator[Table]:
    """A table for each stratum with several values."""
    for name in strata_of(questions):
        values = {each.question_id: f"{name}_{each.strata[name]}" for each in questions if name in each.strata}
        found = sorted({*values.values()}, key=in_order)
        if len(found) > 1:
            table = Table("questions", title=f"{word} by {STRATA.get(name, name)}", title_justify="left")
            for agent in agents:
                table.add_column(agent.name, justify="right")
            for value in found:
                of = [[each for each in agent.answered if values.get(each.question_id) == value] for agent in agents]
                table.add_row(
                    f"{stratum_title(value)} ({len(of[0])})", *(_success(each, draws) if each else "" for each in of)
                )
            yield table


def differing(agent: Player, credit: CreditParams, max_tokens: int) -> float:
    """The share of questions whose samples have returns that differ; an aborted episode has none."""
    returns: dict[str, list[float]] = {}
    for each in agent.trajectories:
        if not each.aborted:
            total = float(step_rewards(each, credit, max_tokens)[0].sum())
            returns.setdefault(each.question_id, []).append(total)
    return fmean(max(of) - min(of) > ROUNDING for of in returns.values())


def _groups(policy: Player, differ: float, train: TrainParams) -> Iterator[str]:
    """Sentences on how often the samples of a question differ."""
    size = max(len(each.answers) for each in policy.answered)
    sizes = [int(name.removeprefix("pass_at_")) for name in measures(policy.answered) if name.startswith("pass_at_")]
    at, all_ = ([fmean(measured(f"{name}_{k}", policy.answered)) for k in sizes] for name in ("pass_at", "pass_hat"))
    smaller = {k: one - every for k, one, every in zip(sizes, at, all_, strict=True)}
    yield (
        f"Of {len(policy.answered)} groups of {size} samples {differ:.0%} have returns that differ; an estimator that "
        "compares the samples of a group learns from these alone."
    )
    yield "Success differs in " + ", ".join(f"{share:.0%} of groups of {k}" for k, share in smaller.items()) + "."
    questions, samples = train.rollout.questions, train.rollout.samples
    sampled, read = (fmean(measured(name, policy.answered)) for name in ("tokens_sampled", "tokens_read"))
    yield (
        f"An iteration of the run, {questions} questions and {samples} samples of each, samples "
        f"{questions * samples * sampled:,.0f} tokens and reads {questions * samples * read:,.0f}."
    )
    if samples > 1:
        nearest = min(smaller, key=lambda k: abs(k - samples))
        yield f"In about {smaller[nearest] * questions:.0f} of its {questions} groups success differs."


def _tools(found: Mapping[str, float]) -> Iterator[str]:
    """A line on the use of each tool."""
    for name in (key.split("/")[1] for key in found if key.endswith("/calls")):
        calls, well, half, most = (found.get(f"tool/{name}/{each}", 0.0) for each in USE)
        used = f"{name}: {calls:.2f} calls an episode"
        took = f"half of them within {1000 * half:.3g} ms, 95 % within {1000 * most:.3g} ms"
        yield f"{used}, {well:.0%} of them well, {took}" if calls else used


def _success(answered: Sequence[AnsweredQuestion], draws: EvaluateParams) -> str:
    return mean_cell(interval([each.success for each in answered], draws.bootstrap_samples, draws.seed))
