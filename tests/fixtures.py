"""What several rooms' tests share: a small tokenizer, small models, a task of one action, vLLM servers."""

import contextlib
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from mlflow import MlflowClient
from playwright.sync_api import Browser, sync_playwright
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast, Qwen2ForCausalLM

from agent_r1.envs.kinds import attempts_at
from agent_r1.envs.shared import Shared
from agent_r1.identity import Identity
from agent_r1.learn.builtin import new_model, train_tokenizer
from agent_r1.params import load
from agent_r1.params.env import EnvParams
from agent_r1.params.sections import override, validated
from agent_r1.params.stages import EngineParams
from agent_r1.params.train import TrainParams
from agent_r1.records import Passage, Question
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.engine_wire import EXTENSION
from agent_r1.rollout.episodes import ScriptedSampler, collect
from agent_r1.search.index import Cached, build, open_index
from agent_r1.tables import write_rows
from agent_r1.teaching.supervised import Lessons, fit
from agent_r1.training.folder import RunFolder
from agent_r1.training.loop import Training
from tests.answering import process_of
from tests.trajectories import question_fields

ROOT = Path(__file__).parents[1]
PARAMS = ROOT / "params.yaml"
TEXTS = [
    'You answer questions. Tools: search(query)\n{"name": "search", "arguments": {"query": "capital of Veld"}}',
    "The director of the film is Mara Quill. Mara Quill was born in Tesk in 1950. Tesk is a city in Veld.",
    "Search for facts, then answer. yes no <|im_end|> </tool_response>",
] * 20
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
WORDS = "query passage : . a born city country in is mara norn quill tesk twin veld was where"

# A stock server of vLLM on a CPU, as docs/data_and_models.md has it.
STOCK = (
    "--tokens-only --generation-config vllm --no-enable-chunked-prefill --kv-cache-memory-bytes 536870912 "
    f"--max-model-len 1024 --worker-extension-cls {EXTENSION}"
).split()
PLACES = load(PARAMS).places
TRANSFORMERS = {"kind": "transformers"}

MakeIndex = Callable[[Sequence[Passage]], Cached]
Inside = Callable[[Path], AbstractContextManager[None]]
WriteParams = Callable[[Path, dict[str, Any]], None]
FreePort = Callable[[], int]

# What a task of one action allows.
ONE_ACTION = load(PARAMS).env.model_copy(update={"max_steps": 1, "max_tokens": 128, "max_action_tokens": 16})


@dataclass(frozen=True)
class Task:
    questions: list[Question]
    index: Cached
    model: Path


@pytest.fixture(scope="session")
def lay_store(build_once: Callable[[str, Callable[[Path], None]], Path]) -> Callable[[Path], None]:
    """Gives a project without a store a copy of an empty one; to make one takes MLflow seconds."""
    made = build_once("store", lambda folder: MlflowClient(f"sqlite:///{folder}/mlflow.db").search_experiments())

    def lay(project: Path) -> None:
        if not (project / ".tracking").exists():
            shutil.copytree(made, project / ".tracking")

    return lay


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
def chat(tiny_tokenizer: PreTrainedTokenizerFast) -> Chat:
    return Chat(tiny_tokenizer)


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


@pytest.fixture(scope="session")
def free_port() -> Callable[[], int]:
    return _free_port


@pytest.fixture(scope="session")
def bm25_index(tmp_path_factory: pytest.TempPathFactory) -> MakeIndex:
    """An index of some passages, as the index stage builds it by default."""

    def index(passages: Sequence[Passage]) -> Cached:
        folder = tmp_path_factory.mktemp("bm25_index")
        write_rows(folder / "passages.parquet", passages, Passage)
        params = load(PARAMS).search
        build(params, folder / "passages.parquet", folder / "index")
        return open_index(params, folder / "passages.parquet", folder / "index")

    return index


@pytest.fixture(scope="session")
def tiny_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("tiny_encoder"))


def make_encoder(folder: Path) -> Path:
    """A BERT of one layer with random weights, and a tokenizer that knows a few words."""
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *WORDS.split()])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", model_max_length=32
    ).save_pretrained(folder)
    shape = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        BertModel(shape).save_pretrained(folder)
    return folder


def vllm_server(folder: Path, *options: str, **environment: str) -> AbstractContextManager[str]:
    """The URL of vLLM's own server of the model in a folder."""
    port = str(_free_port())
    options = ("--model", ".", "--host", "127.0.0.1", "--port", port, "--dtype", "float32", "--enforce-eager", *options)
    command = ["-m", "vllm.entrypoints.openai.api_server", *options]
    return process_of(command, f"http://127.0.0.1:{port}", folder, **environment)


@pytest.fixture(scope="module")
def engine_server(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerFast) -> Iterator[str]:
    """The URL of a real vLLM server with a model of the tiny model's shape, which reads 1,024 tokens.

    It takes half a minute to start: one file alone has tests of it.
    """
    folder = tmp_path_factory.mktemp("engine_server")
    new_model(tiny_tokenizer, hidden_size=64, layers=2, heads=2, max_tokens=1024, seed=1).save_pretrained(folder)
    with vllm_server(folder, *STOCK, VLLM_SERVER_DEV_MODE="1") as url:
        yield url


@pytest.fixture(scope="session")
def one_action_task(
    tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerFast, bm25_index: MakeIndex
) -> Callable[..., Task]:
    """Questions that one action answers, and a model from plain random weights that was shown actions for each."""
    index = bm25_index([Passage(passage_id="p", title="Veld", text="Tesk is a city.")])

    def build(
        answers: Mapping[str, str], action: Callable[[str], str], *, steps: int = 200, env: EnvParams = ONE_ACTION
    ) -> Task:
        of_test = {"dataset": "test", "split": "train", "gold_titles": []}
        pairs = answers.items()
        questions = [Question(**question_fields(text, text=text, answers=[gold], **of_test)) for text, gold in pairs]
        chat = Chat(tiny_tokenizer)
        with Shared(env, index) as shared:
            shown = attempts_at(questions, shared, samples=64)
            sampler = ScriptedSampler([[action(answers[each.question_id])] for each in shown], chat)
            demonstrations = collect(sampler, chat, shown, shared, seed=0)
        shape = new_model(tiny_tokenizer, hidden_size=64, layers=2, heads=2, max_tokens=env.max_tokens, seed=0).config
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = Qwen2ForCausalLM(shape)
        changes = {"batch_size": 32, "steps": steps, "learning_rate": 2e-3}
        fit(model, Lessons.of(demonstrations, [], 0.0), load(PARAMS).warm_start.model_copy(update=changes))
        folder = tmp_path_factory.mktemp("one_action")
        model.save_pretrained(folder)
        tiny_tokenizer.save_pretrained(folder)
        return Task(questions=questions, index=index, model=folder)

    return build


@pytest.fixture
def open_training(tmp_path: Path) -> Callable[..., AbstractContextManager[Training]]:
    """A training of a task of one action, or of another world, with changes of `train`."""

    @contextlib.contextmanager
    def open_(
        task: Task, changes: dict[str, Any], env: EnvParams = ONE_ACTION, engine: dict[str, Any] = TRANSFORMERS
    ) -> Iterator[Training]:
        plain = load(PARAMS)
        sampler = validated(EngineParams, override(plain.engine.model_dump(), engine), "engine")
        settings = plain.model_copy(update={"env": env, "engine": sampler})
        rollout = {"questions": sum(each.split == "train" for each in task.questions), "samples": 8}
        small = {"rollout": rollout, "update": {"learning_rate_decay": "none", "minibatches": 4}}
        config = validated(TrainParams, override(override(plain.train.model_dump(), small), changes), "train")
        new = RunFolder(tmp_path / "run", Identity.of(settings, config), config)
        with (
            new.opened(tmp_path / "aside") as folder,
            Shared(settings.env, task.index) as shared,
            Training(settings, questions=task.questions, shared=shared, model=task.model, folder=folder) as training,
        ):
            yield training

    return open_


@pytest.fixture
def only_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be compiled is traced, and then computed as it is."""
    compile_ = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda plain, dynamic, options: compile_(plain, dynamic=dynamic, backend="eager")
    )


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """The machine's browser, with a new profile."""
    path = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(CHROMIUM)} is on the PATH (apt-get install chromium)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Its driver's event loop runs as long, and no other file's test may be inside of one."""
    with chromium() as browser:
        yield browser
