"""What several rooms' tests share: a small tokenizer, small models, a task of one action, an engine without vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from agent_r1.envs.tool_env import ToolEnv
from agent_r1.params import load
from agent_r1.policy.builtin import new_model, train_tokenizer
from agent_r1.policy.warm_start import fit
from agent_r1.records import Passage, Question, StopReason
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.episodes import Attempt, collect
from agent_r1.rollout.sampling import Action, Request
from agent_r1.rollout.scripted import ScriptedSampler
from agent_r1.search.base import Search
from agent_r1.search.index import build, open_index
from agent_r1.tables import write_rows

PARAMS = Path(__file__).parents[1] / "params.yaml"
TEXTS = [
    'You answer questions. Tools: search(query)\n{"name": "search", "arguments": {"query": "capital of Veld"}}',
    "The director of the film is Mara Quill. Mara Quill was born in Tesk in 1950. Tesk is a city in Veld.",
    "Search for facts, then answer. yes no <|im_end|> </tool_response>",
] * 20


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(TEXTS, vocab_size=512)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerFast) -> Path:
    """A Hugging Face folder: 2 layers, hidden 64, tied embeddings, random weights of seed 0."""
    folder = tmp_path_factory.mktemp("tiny_model")
    new_model(tiny_tokenizer, hidden_size=64, layers=2, heads=2, max_tokens=512, seed=0).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def bm25_index(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Sequence[Passage]], Search]:
    """An index of some passages, as the index stage builds it by default."""

    def index(passages: Sequence[Passage]) -> Search:
        folder = tmp_path_factory.mktemp("bm25_index")
        write_rows(folder / "passages.parquet", passages, Passage)
        params = load(PARAMS).search
        build(params, folder / "passages.parquet", folder / "index")
        return open_index(params, folder / "passages.parquet", folder / "index")

    return index


class TorchEngine:
    """Samples as `agent_r1.rollout.engine.Engine` does, with plain transformers in this process.

    For tests in which the sampler is not what is tested: it starts at once.
    """

    def __init__(
        self,
        model: Path,
        *,
        end_id: int,
        max_tokens: int,
        temperature: float = 1.0,
        dtype: str = "auto",
        version: int = 0,
    ) -> None:
        assert temperature == 1
        self._end_id = end_id
        self.load_weights(model, version)

    def load_weights(self, folder: Path, version: int) -> None:
        self.version = version
        self._model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def sample(self, requests: Sequence[Request]) -> list[Action]:
        return [self._act(request) for request in requests]

    def close(self) -> None:
        pass

    @torch.no_grad()
    def _act(self, request: Request) -> Action:
        generator = torch.Generator().manual_seed(request.seed)
        ids, logprobs, past = [], [], None
        unread = torch.tensor([request.context])
        while len(ids) < request.max_tokens and self._end_id not in ids:
            out = self._model(unread, past_key_values=past, use_cache=True)
            chances = out.logits[0, -1].log_softmax(-1)
            unread, past = torch.multinomial(chances.exp(), 1, generator=generator)[None], out.past_key_values
            ids.append(int(unread))
            logprobs.append(float(chances[ids[-1]]))
        stop_reason = StopReason.END if ids[-1] == self._end_id else StopReason.LENGTH
        return Action(token_ids=ids, logprobs=np.array(logprobs, np.float32), stop_reason=stop_reason)


@pytest.fixture(scope="session")
def torch_engine() -> type[TorchEngine]:
    return TorchEngine


@pytest.fixture(scope="session")
def one_action_attempts() -> Callable[..., list[Attempt]]:
    """Groups of attempts at questions that one action answers: a group for each text and its answer."""

    def build(answers: Mapping[str, str], iteration: int, samples: int) -> list[Attempt]:
        questions = [
            Question(
                question_id=f"{iteration}-{group}",
                dataset="test",
                split="train",
                text=text,
                answers=[answer],
                gold_titles=[],
                hops=1,
                kind="lookup",
            )
            for group, (text, answer) in enumerate(answers.items())
        ]
        return [
            Attempt(
                question_id=question.question_id, group=group, sample=sample, env=ToolEnv(question, [], max_steps=1)
            )
            for group, question in enumerate(questions)
            for sample in range(samples)
        ]

    return build


@pytest.fixture(scope="session")
def warm_started(
    tiny_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """A model from plain random weights that was shown one action for each of some attempts."""

    def build(shown: Sequence[Attempt], actions: Sequence[str], max_tokens: int, max_action_tokens: int) -> Path:
        chat = Chat(tiny_tokenizer)
        sampler = ScriptedSampler([[action] for action in actions], chat)
        demonstrations = collect(
            sampler, chat, shown, max_tokens=max_tokens, max_action_tokens=max_action_tokens, seed=0
        )
        shape = new_model(tiny_tokenizer, hidden_size=64, layers=2, heads=2, max_tokens=max_tokens, seed=0).config
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = Qwen2ForCausalLM(shape)
        changes = {"batch_size": 32, "steps": 200, "learning_rate": 2e-3, "observation_weight": 0.0}
        fit(model, demonstrations, load(PARAMS).warm_start.model_copy(update=changes))
        folder = tmp_path_factory.mktemp("warm_started")
        model.save_pretrained(folder)
        tiny_tokenizer.save_pretrained(folder)
        return folder

    return build


@pytest.fixture
def one_thread() -> Iterator[None]:
    """More make so small a model slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
