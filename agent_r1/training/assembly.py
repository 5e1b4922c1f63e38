"""A training put together from its parts: checked before it starts, told from others by its inputs, and finished."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from transformers import AutoConfig

from agent_r1.credit import own as own_rewards
from agent_r1.devices.sharing import ALONE, Ranks
from agent_r1.envs.kinds import attempts_at, openings, require_playable, warn_of_alike
from agent_r1.envs.shared import Shared
from agent_r1.files import load_pretrained, model_hash, sha256
from agent_r1.identity import Identity
from agent_r1.learn import adapter, checkpoint, memory
from agent_r1.learn.model import load_tokenizer
from agent_r1.params import Params
from agent_r1.params.places import RunId
from agent_r1.params.train import TrainParams
from agent_r1.pretrained import compute_dtype, default_device
from agent_r1.records import Question, of_split
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.prompts import UNANSWERED, without_room
from agent_r1.search.index import open_index
from agent_r1.tables import read_rows
from agent_r1.training.fitness import require_fit
from agent_r1.training.folder import RunFolder
from agent_r1.training.loop import Training
from agent_r1.training.questions import draw_unseen, require_gold_titles


class Assembly:
    """The parts of a run that starts from a model, from the places of the run's settings."""

    def __init__(self, settings: Params, run: RunId, model: str | Path, teacher: str = "") -> None:
        """Raises as `require_playable`, and ValueError for missing own code or reward facts. Nothing is waited for.

        `teacher` is the folder of a `train.reference` that is a registered version.
        """
        self.settings = settings
        self.run = run
        self.model = model
        self.teacher = teacher
        self.config = settings.run(run)
        self._places = settings.places
        self._questions = read_rows(self._places.questions, Question)
        require_gold_titles(self._questions, self.config.credit)
        require_playable(self._questions, settings.env)
        own_rewards.functions(self.config.credit.rewards)

    @contextmanager
    def prepared(self, code: Mapping[str, str] = {}) -> Iterator[Prepared]:
        """The run with its tools and index open. Raises as `require_fit`, `memory.check` and `open_index`."""
        require_fit(self.model, self.settings)
        memory.check(load_pretrained(AutoConfig, self.model), self.settings, [self.run])
        adapter.warn_of_rounding(self.settings)
        index = open_index(self.settings.search, self._places.passages, self._places.index)
        with Shared(self.settings.env, index) as shared:
            warn_of_alike(self._questions, shared)
            yield Prepared(
                settings=self.settings,
                config=self.config.model_copy(update={"reference": self.teacher or self.config.reference}),
                model=self.model,
                questions=self._questions,
                chat=self._chat,
                shared=shared,
                identity=Identity.of(self.settings, self.config, self.inputs(shared), code),
            )

    def inputs(self, shared: Shared) -> dict[str, str]:
        """Hashes of all inputs of the run."""
        reference = self.teacher or self.config.reference
        environments = openings(attempts_at(self._questions, shared), self._questions, shared)
        return {
            "questions": sha256(self._places.questions),
            "passages": sha256(self._places.passages),
            "index": shared.index.index_hash,
            "warm_start": model_hash(str(self.model)),
            "prompt": self._chat.prompts_hash(environments),
            **({"reference": model_hash(reference)} if reference and not self.config.reference_at else {}),
            **own_rewards.sources(self.config.credit.rewards),
            **shared.sources(),
        }

    @cached_property
    def _chat(self) -> Chat:
        return Chat(load_tokenizer(self.model))


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A run whose parts are checked and hashed."""

    settings: Params
    config: TrainParams  # of the run, with the folder of its reference
    model: str | Path
    questions: Sequence[Question]
    chat: Chat
    shared: Shared
    identity: Identity

    @contextmanager
    def open(self, path: Path, aside: Path, *, fresh: bool = False) -> Iterator[RunFolder]:
        """Opens the run's folder. Raises as `without_room`, for a run that cannot start, and as `RunFolder.opened`."""
        folder = RunFolder(path, self.identity, self.config)
        if fresh or not folder.was_completed():
            _ = self.left_out  # before the folder is opened: a run that cannot start replaces nothing
        with folder.opened(aside, fresh=fresh):
            yield folder

    @cached_property
    def left_out(self) -> set[str]:
        """The training questions that leave no room for an answer."""
        if self.config.validation.every:
            validated = attempts_at(draw_unseen(self.questions, self.config), self.shared)
            without_room(validated, self.chat, self.shared, "dev questions", UNANSWERED)
        learned = attempts_at(of_split(self.questions, "train"), self.shared)
        return without_room(learned, self.chat, self.shared, "training questions")

    def training(self, folder: RunFolder, ranks: Ranks = ALONE) -> Training:
        """The verbs of the run's iterations, in its open folder; loads the model."""
        return Training(
            self.settings,
            questions=self.questions,
            shared=self.shared,
            model=self.model,
            folder=folder,
            left_out=self.left_out,
            ranks=ranks,
        )

    def finish(self, folder: RunFolder) -> None:
        """Leaves the folder of a complete run with its policy, adapters merged, and no file that nothing reads."""
        folder.tidy()
        dtype = compute_dtype(self.settings.model.dtype, default_device())
        checkpoint.complete(folder.checkpoint, lambda policy: adapter.merge(policy, self.model, dtype))
