"""The profile of a world before training: its floor, its ceiling, and how much a group of samples can teach."""

from __future__ import annotations

import time
from collections import defaultdict
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
from agent_r1.records import Metrics, Question, Trajectory, words_of
from agent_r1.rollout.chat import Chat

ROUNDING = 1e-9  # of returns
USE = ("calls", "ok_share", "latency_p50_s", "latency_p95_s")  # of a tool
Playing = Callable[[Exam], list[Trajectory]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Player:
    """The episodes of one agent."""

    name: str
    trajectories: list[Trajectory]
    answered: list[AnsweredQuestion]
    tools: Metrics  # their use and latencies
    seconds: float


def players_of(settings: Params, questions: Sequence[Question], chat: Chat, by_policy: Playing) -> list[Player]:
    """The policy, chance and a solver, `evaluate.samples` times at each question; the last two where scripts play."""

    def player(name: str, protocol: Protocol, play: Playing) -> Player:
        fitting = questions_under(protocol, questions)
        with open_exam(protocol, fitting, chat, settings) as exam:
            start = time.monotonic()
            rows = play(exam)
            tools = exam.shared.use_of_tools(rows) | exam.shared.latencies(rows)
        answered = by_question(predict(rows, fitting, name, settings.evaluate.seed))
        return Player(name=name, trajectories=rows, answered=answered, tools=tools, seconds=time.monotonic() - start)

    scripts: list[Protocol] = [
        script for script in SCRIPTED if any(script in scripts_of(question.env) for question in questions)
    ]
    by_script = [player(name, name, lambda exam: exam.by_script(lambda: None)) for name in scripts]
    return [player("the policy", "tool_call", by_policy), *by_script]


def profile_tables(
    agents: Sequence[Player], questions: Sequence[Question], train: TrainParams, settings: Params
) -> Iterator[Table | str]:
    """Success in all and by stratum, how groups of samples differ, the tokens of an iteration, and the tools."""
    policy = agents[0]
    word = words_of(questions).right
    yield _agents(agents, word, settings.evaluate)
    yield from _strata(agents, questions, word, settings.evaluate)
    yield from _groups(policy, differing_share(policy, train.credit, settings.env.max_tokens), train)
    yield from _tools(policy.tools)


def _agents(agents: Sequence[Player], word: str, draws: EvaluateParams) -> Table:
    table = Table(title=f"Training questions, {word} with 95 % intervals over questions", title_justify="left")
    for heading in ("agent", word, "steps", "tokens sampled", "tokens read", "seconds, with the start"):
        table.add_column(heading, justify="left" if heading == "agent" else "right")
    for agent in agents:
        steps = fmean(len(row.steps) for row in agent.trajectories)
        numbers = (steps, _mean("tokens_sampled", agent), _mean("tokens_read", agent), agent.seconds)
        table.add_row(agent.name, _success(agent.answered, draws), *(f"{number:.1f}" for number in numbers))
    return table


def _mean(measure: str, agent: Player) -> float:
    return fmean(measured(measure, agent.answered))


def _strata(
    agents: Sequence[Player], questions: Sequence[Question], word: str, draws: EvaluateParams
) -> Iterator[Table]:
    """A table for each stratum with several values."""
    for name in strata_of(questions):
        values = {row.question_id: f"{name}_{row.strata[name]}" for row in questions if name in row.strata}
        if len({*values.values()}) < 2:
            continue
        table = Table("questions", title=f"{word} by {STRATA.get(name, name)}", title_justify="left")
        for agent in agents:
            table.add_column(agent.name, justify="right")
        for value in sorted({*values.values()}, key=in_order):
            columns = [[row for row in agent.answered if values.get(row.question_id) == value] for agent in agents]
            cells = [_success(rows, draws) if rows else "" for rows in columns]
            table.add_row(f"{stratum_title(value)} ({len(columns[0])})", *cells)
        yield table


def differing_share(agent: Player, credit: CreditParams, max_tokens: int) -> float:
    """The share of questions whose samples have returns that differ; an aborted episode has none."""
    returns = defaultdict[str, list[float]](list)
    for row in agent.trajectories:
        if not row.aborted:
            returns[row.question_id].append(float(step_rewards(row, credit, max_tokens)[0].sum()))
    return fmean(max(group) - min(group) > ROUNDING for group in returns.values())


def _groups(policy: Player, share: float, train: TrainParams) -> Iterator[str]:
    """Sentences on how often the samples of a question differ, `share` of them in their returns."""
    size = max(len(question.answers) for question in policy.answered)
    yield (
        f"Of {len(policy.answered)} groups of {size} samples {share:.0%} have returns that differ; an estimator that "
        "compares the samples of a group learns from these alone."
    )
    sizes = [int(name.removeprefix("pass_at_")) for name in measures(policy.answered) if name.startswith("pass_at_")]
    shares = {count: _mean(f"pass_at_{count}", policy) - _mean(f"pass_hat_{count}", policy) for count in sizes}
    yield "Success differs in " + ", ".join(f"{of_size:.0%} of groups of {k}" for k, of_size in shares.items()) + "."
    questions = train.rollout.questions
    samples = train.rollout.samples
    yield (
        f"An iteration of the run, {questions} questions and {samples} samples of each, samples "
        f"{questions * samples * _mean('tokens_sampled', policy):,.0f} tokens and reads "
        f"{questions * samples * _mean('tokens_read', policy):,.0f}."
    )
    if samples > 1:
        nearest = min(shares, key=lambda count: abs(count - samples))
        yield f"In about {shares[nearest] * questions:.0f} of its {questions} groups success differs."


def _tools(usage: Mapping[str, float]) -> Iterator[str]:
    """A line on the use of each tool."""
    for name in (key.split("/")[1] for key in usage if key.endswith("/calls")):
        calls, ok_share, median, most = (usage.get(f"tool/{name}/{number}", 0.0) for number in USE)
        count = f"{name}: {calls:.2f} calls an episode"
        latencies = f"half of them within {1000 * median:.3g} ms, 95 % within {1000 * most:.3g} ms"
        yield f"{count}, {ok_share:.0%} of them well, {latencies}" if calls else count


def _success(answered: Sequence[AnsweredQuestion], draws: EvaluateParams) -> str:
    return mean_cell(interval([question.success for question in answered], draws.bootstrap_samples, draws.seed))
