"""An imported run on disk: its trajectories by step, messages, curve, and the predictions of its last step.

A run is written row by row into a folder that takes its place when it is whole.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

import numpy as np
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict, ValidationError

from agent_r1.data.sources import Row, progress, read
from agent_r1.evaluation.comparison import LIMITS, POLICY, Evaluation
from agent_r1.evaluation.scores import COLUMN, RETURN
from agent_r1.files import EVALUATION_HASHES, METRICS, sha256, write_json, write_text
from agent_r1.imported.episodes import Episode, column_of, text_of
from agent_r1.imported.formats import episodes_of
from agent_r1.imported.tokens import Characters, Tokens, require_own_ids, spans_of, steps_of
from agent_r1.params import fingerprint
from agent_r1.params.credit import RewardWeights
from agent_r1.params.places import IMPORTED, RunId
from agent_r1.params.sections import nearest
from agent_r1.records import Metrics, Outcome, Prediction, Question, Trajectory
from agent_r1.tables import read_rows, row_writer, write_rows

TEXT = "imported text, not token-exact"
ABOUT = "about.json"
TOKENIZER = "tokenizer"
REWARD = "reward"  # the name of the whole one
AT_ONCE = 256  # trajectories in memory
READ = 100  # rows whose ids are read as text
LONGEST = 1000  # characters of a question and of an answer; the messages have all
SHOWN = 20  # trajectories of the last step that are kept at hand


class About(BaseModel):
    """What was imported."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: str
    files: dict[str, str]  # path -> sha256
    rows: int  # episodes
    exact: int  # of them with the sampler's ids and logprobs
    ungraded: int  # of them without a reward, or cut short: in no score
    columns: list[str]  # further numbers
    success: str  # what says that an answer is right
    steps: list[int]

    @property
    def level(self) -> str:
        """Whether what was imported is token-exact, in words."""
        return f"{self.format}: {'token-exact, imported' if self.exact == self.rows else TEXT}"

    @property
    def rewards(self) -> RewardWeights:
        """The reward as the world's own; other columns weigh nothing."""
        return RewardWeights.model_validate({"env": 1.0, **{name: {"weight": 0.0} for name in self.columns}})

    def __str__(self) -> str:
        ungraded = f", {self.ungraded} without a reward" * bool(self.ungraded)
        return f"{self.rows} episodes{ungraded}, {len(self.steps)} steps, {self.level}"


class Verdict(NamedTuple):
    """What a graded episode earned."""

    reward: float
    success: float  # 1.0 or 0.0


@dataclass(frozen=True, slots=True)
class Choices:
    """What whoever imports says of the files."""

    format: str
    success: str = REWARD  # the number that says whether an answer is right, 0 or 1; or `NAME>=LEAST`
    rewards: Sequence[str] = ()  # columns whose sum is the reward, in place of the format's own

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[^<>=]+(>=-?\d+(\.\d+)?)?", self.success):
            raise ValueError(f"--success {self.success!r} is no field; write FIELD, or FIELD>=0.5")

    def require(self, columns: Iterable[str]) -> None:
        """Raises ValueError if they name a column that no row has."""
        names = {*self.rewards, self.success.partition(">=")[0]} - {REWARD}
        unknown = sorted(name for name in names if column_of(name) not in columns)
        if unknown:
            raise ValueError(f"no row has a number {unknown[0]!r}{nearest(unknown[0], list(columns))}")

    def graded(self, row: Row, episode: Episode) -> Verdict | None:
        """Reward and success of an episode; None where its source does not say both, or it was cut short."""
        names = [column_of(name) for name in self.rewards]
        parts = [episode.columns.get(name) for name in names] if names else [episode.score]
        paid = [part for part in parts if part is not None]
        name, _, least = self.success.partition(">=")
        score = sum(paid) if len(paid) == len(parts) else None
        value = score if name == REWARD else episode.columns.get(column_of(name))
        if score is None or value is None or episode.fault:
            return None
        if not least and value not in (0, 1):
            problem = f"field {name!r} is {value:g}, which is neither 1 for right nor 0"
            raise ValueError(f"{row}: {problem}; say what is right, such as --success '{name}>=0.5', or another field")
        return Verdict(score, float(value >= float(least)) if least else value)


def read_about(folder: Path) -> About:
    """What was imported into a folder. Raises FileNotFoundError if nothing was."""
    file = folder / ABOUT
    if not file.exists():
        raise FileNotFoundError(f"{folder} holds no imported run; `agent-r1 import PATH --as {folder.name}` makes it")
    try:
        return About.model_validate_json(file.read_bytes())
    except ValidationError as fault:
        raise ValueError(f"{file} is damaged ({fault.errors()[0]['msg']}); remove {folder} and import again") from None


def read_imported(name: str, folder: Path) -> Evaluation:
    """The last step of an imported run as an evaluation, of whose trajectories it has the ungraded alone."""
    about = read_about(folder)
    ungraded = pc.field("outcome") == Outcome.ABORTED.value
    return Evaluation(
        name=name if about.exact == about.rows else f"{name} (not token-exact)",
        predictions=read_rows(folder / "predictions.parquet", Prediction),
        trajectories=read_rows(rows_of(folder, about.steps[-1]), Trajectory, ungraded),
        hashes=json.loads((folder / EVALUATION_HASHES).read_text()),
    )


def rows_of(folder: Path, step: int) -> Path:
    """The trajectories of a step."""
    return folder / "trajectories" / f"{step:03d}.parquet"


def messages_file(folder: Path, step: int) -> Path:
    """The messages of a step's trajectories, in their order, with what else the source says."""
    return folder / "messages" / f"{step:03d}.jsonl"


@dataclass(slots=True)
class StepTally:
    """A step while it is written."""

    number: int
    groups: dict[str, int] = field(default_factory=dict)  # question -> its index
    samples: Counter[str] = field(default_factory=Counter)  # of each question
    numbers: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    predictions: list[Prediction] = field(default_factory=list)  # of graded episodes
    first: list[Trajectory] = field(default_factory=list)

    @property
    def metrics(self) -> Metrics:
        """The means of the graded episodes, as a line of the run's curve."""
        totals = self.numbers["reward/total"]
        spread = {"reward/max": max(totals), "reward/std": stdev(totals) if len(totals) > 1 else 0.0}
        return {"iteration": self.number, **{name: fmean(of) for name, of in self.numbers.items()}, **spread}


class Importing:
    """An import while it is written into a folder."""

    def __init__(self, run: RunId, choices: Choices, tokens: Tokens | Characters, folder: Path) -> None:
        self.run = run
        self.folder = folder
        self.questions = dict[str, Question]()
        self.step = StepTally(-1)  # the last one
        self.curve = list[Metrics]()
        self._choices = choices
        self._tokens = tokens
        self._origins = dict[int, Path]()  # of steps
        self._columns = dict[str, None]()
        self._counts = Counter[str]()
        self._writers = ExitStack()

    def take(self, files: Sequence[Path]) -> About:
        """Writes the rows of all files. A ValueError names file, row and field of one that cannot be taken."""
        with self._writers:
            for path in files:
                for row in progress(read(path), path.name):
                    for episode in episodes_of(row, self._choices.format):
                        self._open(row, episode)
                        self._add(row, episode)
        self._end_step()
        if not self._counts["rows"]:
            raise ValueError(f"{files[0]}: holds no rows; name the file that the trainer wrote them to")
        self._choices.require(self._columns)
        about = About(
            format=self._choices.format,
            files={str(path): sha256(path) for path in files},
            columns=[*self._columns],
            success=self._choices.success,
            steps=[*self._origins],
            **{name: self._counts[name] for name in ("rows", "exact", "ungraded")},
        )
        self._finish(about)
        return about

    def _open(self, row: Row, episode: Episode) -> None:
        """Begins the step of an episode, if it is another than the one before."""
        number = episode.step or 0
        origin = self._origins.setdefault(number, row.path)
        if number == self.step.number and (episode.step is None or origin == row.path):
            return
        if number <= self.step.number:
            where = f"{number} comes after {self.step.number} of {self._origins[self.step.number]}"
            raise ValueError(f"{row}: field 'step': {where}; leave one file out, or sort the rows by step")
        self._writers.close()
        self._end_step()
        self.step = StepTally(number)
        file = messages_file(self.folder, number)
        file.parent.mkdir(parents=True, exist_ok=True)
        self._messages = self._writers.enter_context(file.open("w"))
        self._write = self._writers.enter_context(row_writer(rows_of(self.folder, number), Trajectory, AT_ONCE))

    def _end_step(self) -> None:
        if self.step.predictions:
            self.curve.append(self.step.metrics)

    def _add(self, row: Row, episode: Episode) -> None:
        graded = self._choices.graded(row, episode)
        self._counts.update(rows=1, exact=bool(episode.sampled), ungraded=graded is None)
        self._columns |= dict.fromkeys(episode.columns)
        trajectory = self._trajectory(row, episode, graded)
        self._write(trajectory)
        names = ("messages", "score", "step", "columns", "extra")
        line = {name: getattr(episode, name) for name in names}
        self._messages.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")
        if len(self.step.first) < SHOWN:
            self.step.first.append(trajectory)
        if graded:
            self._tally(trajectory, graded, episode.columns)

    def _trajectory(self, row: Row, episode: Episode, graded: Verdict | None) -> Trajectory:
        if episode.sampled:
            require_own_ids(row, episode, self._tokens, read=self._counts["exact"] <= READ)
        spans = [*spans_of(episode, self._tokens)]
        lengths = [len(span.ids) for span in spans]
        starts = np.cumsum([0, *lengths]).tolist()
        question = self._question(episode)
        step = self.step
        step.samples[question] += 1
        sample = step.samples[question] - 1
        rewards = {"env": graded.reward, "success": graded.success, **episode.columns} if graded else {}
        return Trajectory(
            trajectory_id=f"{step.number}/{question}/{sample}",
            question_id=question,
            group=step.groups.setdefault(question, len(step.groups)),
            sample=sample,
            seed=self.run.seed or 0,
            policy_version=0,
            iteration=step.number,
            token_ids=np.concatenate([span.ids for span in spans]),
            source=np.repeat(np.array([span.source for span in spans], np.uint8), lengths),
            logprobs=np.concatenate([span.logprobs for span in spans]),
            context_starts=[start for span, start in zip(spans, starts, strict=False) if span.begins],
            steps=steps_of(episode.messages, spans, rewards),
            outcome=Outcome.ENDED if graded else Outcome.ABORTED,
            answer=text_of(episode.actions[-1].get("content"))[:LONGEST],
        )

    def _question(self, episode: Episode) -> str:
        """The id of an episode's question: what is asked, with its right answers, whatever run it is of."""
        first = next(place for place, message in enumerate(episode.messages) if message["role"] == "assistant")
        texts = [text_of(message.get("content")) for message in episode.messages[:first]]
        name = fingerprint(texts, episode.answers)
        text = next((text for text in reversed(texts) if text.strip()), "(no prompt)")
        answers = [answer[:LONGEST] for answer in episode.answers]
        new = Question(
            question_id=name,
            dataset=IMPORTED,
            split="test",
            text=text[:LONGEST],
            env=IMPORTED,
            strata={},
            answers=answers,
        )
        self.questions.setdefault(name, new)
        return name

    def _tally(self, trajectory: Trajectory, graded: Verdict, columns: dict[str, float]) -> None:
        calls = sum(len(step.calls) for step in trajectory.steps)
        sampled = int(trajectory.action_mask.sum())
        logged = {COLUMN + name: value for name, value in columns.items()}
        means = {"rollout/success": graded.success, "reward/total": graded.reward, "rollout/tool_calls": calls}
        for name, value in (means | logged | {"rollout/steps": len(trajectory.steps)}).items():
            self.step.numbers[name].append(value)
        prediction = Prediction(
            run=self.run.name,
            seed=trajectory.seed,
            policy_version=0,
            question_id=trajectory.question_id,
            sample=trajectory.sample,
            answer=trajectory.answer,
            success=graded.success,
            facts={RETURN: graded.reward} | logged,
            steps=len(trajectory.steps),
            tool_calls=calls,
            tokens_read=(len(trajectory.token_ids) - sampled) * bool(sampled),
            tokens_sampled=sampled,
        )
        self.step.predictions.append(prediction)

    def _finish(self, about: About) -> None:
        """Writes what is of all rows. A column that some answer lacks is no measure, because means would mislead."""
        folder = self.folder
        predictions = self.step.predictions
        shared = set.intersection(*({*row.facts} for row in predictions)) if predictions else set()
        rows = [
            replace(row, facts={name: row.facts[name] for name in row.facts if name in shared}) for row in predictions
        ]
        hashes = {
            POLICY: fingerprint(self.run.label, about.files),
            LIMITS: about.level,
            "success": about.success,
            "samples": str(max(self.step.samples.values())),
            "temperature": "not known",
        }
        write_rows(folder / "predictions.parquet", rows, Prediction)
        write_rows(folder / "questions.parquet", [*self.questions.values()], Question)
        write_json(folder / EVALUATION_HASHES, hashes)
        write_text(folder / METRICS, "".join(json.dumps(line) + "\n" for line in self.curve))
        write_text(folder / ABOUT, about.model_dump_json(indent=2) + "\n")
        if isinstance(self._tokens, Tokens):
            self._tokens.tokenizer.save_pretrained(folder / TOKENIZER)


def tokens_in(folder: Path) -> Tokens | Characters:
    """The tokens of an imported run."""
    tokenizer = folder / TOKENIZER
    return Tokens(tokenizer) if tokenizer.exists() else Characters()
