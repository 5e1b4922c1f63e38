"""Passages in files, settings of every kind of search, and an encoder small enough for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from agent_r1.params import DenseParams, HybridParams, SearchParams, load
from agent_r1.records import Passage
from agent_r1.tables import write_rows

TEXTS = [
    ("Tesk", "Tesk is a city in Veld."),
    ("Mara Quill", "Mara Quill was born in Tesk."),
    ("Veld", "Veld is a country."),
    ("Norn", "Twin."),
    ("Norn", "Twin."),
]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
WORDS = "query passage : . a born city country in is mara norn quill tesk twin veld was where"


@pytest.fixture(scope="session")
def passages() -> list[Passage]:
    return [Passage(passage_id=str(i), title=title, text=text) for i, (title, text) in enumerate(TEXTS)]


@pytest.fixture
def stored(tmp_path: Path, passages: list[Passage]) -> Path:
    """A Parquet file of the passages."""
    write_rows(tmp_path / "passages.parquet", passages, Passage)
    return tmp_path / "passages.parquet"


@pytest.fixture(scope="session")
def write_passages() -> Callable[[Path, Sequence[str]], Path]:
    """A Parquet file of untitled passages with some texts."""

    def write(path: Path, texts: Sequence[str]) -> Path:
        rows = [Passage(passage_id=str(i), title="", text=text) for i, text in enumerate(texts)]
        write_rows(path, rows, Passage)
        return path

    return write


@pytest.fixture(scope="session")
def tiny_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of one layer with random weights, and a tokenizer that knows the words of the passages."""
    folder = tmp_path_factory.mktemp("tiny_encoder")
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


@pytest.fixture
def dense_params(tiny_encoder: Path) -> DenseParams:
    return DenseParams(
        encoder=str(tiny_encoder),
        query_prefix="query: ",
        passage_prefix="passage: ",
        pooling="mean",
        max_tokens=32,
        batch_size=2,
        faiss="flat",
        nlist=0,
        nprobe=0,
    )


@pytest.fixture
def search_params(dense_params: DenseParams) -> SearchParams:
    """Those of params.yaml, with the small encoder."""
    own = load(Path(__file__).parents[2] / "params.yaml").search
    fused = HybridParams(rrf_constant=60, candidates=3)
    return own.model_copy(update={"dense": dense_params, "hybrid": fused})
