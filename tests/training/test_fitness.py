"""A model's checks, as `agent-r1 doctor model PATH` shows them and as every start has them."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agent_r1.learn.model import load_tokenizer
from agent_r1.params import SHIPPED, Params, load
from agent_r1.training import fitness
from flows.operation.doctor import FAILED, OK, WARNING, Finding, finding_of
from tests.cases import cases


def settings_of(**model: Any) -> Params:
    settings = load(SHIPPED)
    changes = {"env": settings.env.model_copy(update={"max_tokens": 512})}
    return settings.model_copy(update=changes | {"model": settings.model.model_copy(update=model)})


def findings(path: Path, **model: Any) -> dict[str, Finding]:
    candidate = fitness.Candidate(str(path), settings_of(**model))
    return {check.__name__: finding_of(partial(check, candidate)) for check in fitness.CHECKS}


def edited(folder: Path, name: str = "config.json", **changes: Any) -> None:
    (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | changes))


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_model, tmp_path / "model")


def test_a_fit_model_has_a_row_for_each_fact(folder: Path) -> None:
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    marks = {str(token): index for index, token in load_tokenizer(folder).added_tokens_decoder.items()}
    edited(folder, "generation_config.json", eos_token_id=[marks["<|endoftext|>"], marks["<|im_end|>"]])
    rows = findings(folder)
    assert {found.status for found in rows.values()} == {OK}
    assert (
        rows["family"].message
        == "Qwen2.5, a vocabulary of 388 tokens, layers of full_attention, contexts can be packed"
    )
    assert rows["window"].message == "reads 512 tokens at once, env.max_tokens is 512"
    count, *stored, train, _ = rows["weights"].message.split()
    assert (count, " ".join(stored).replace("torch.", "")) == (train, "weights, stored in float32;")
    assert rows["attention"].message == "PyTorch's fused one"
    ends = [f"{mark} ({marks[mark]})" for mark in ("<|im_end|>", "<|endoftext|>")]  # the template's own first
    assert rows["tokens"].message == f"end tokens: {', '.join(ends)}"
    assert rows["template"].message == "calls in Hermes' form, system messages, tool messages"
    assert rows["licence"].message == "apache-2.0"
    fitness.require_fit(str(folder), settings_of())


@cases("changes, model, check, words")
def test_an_unfit_model_is_refused_by_doctor_and_start(
    folder: Path, changes: dict[str, Any], model: dict[str, Any], check: str, words: str
) -> None:
    edited(folder, **changes)
    found = findings(folder, **model)[check]
    assert found.status == FAILED
    assert words in f"{found.message} -> {found.remedy}"
    with pytest.raises(ValueError, match=found.message.split("(")[0]):
        fitness.require_fit(str(folder), settings_of(**model))


def test_what_costs_more_is_a_warning_and_starts(folder: Path, tmp_path: Path) -> None:
    edited(folder, attn_logit_softcapping=50.0)
    rows = findings(folder)
    assert (rows["attention"].status, rows["licence"].status) == (WARNING, WARNING)
    assert "soft caps of 50" in rows["attention"].message
    fitness.require_fit(str(folder), settings_of())
    with pytest.raises(ValueError, match=f"{tmp_path} holds no model .*; save one there or correct model.path"):
        fitness.Candidate(str(tmp_path), settings_of())


def test_four_bits_without_their_package_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitness, "find_spec", lambda name: None)
    found = findings(folder, base="four_bit")["weights"]
    assert found.status == FAILED
    assert found.message == "model.base: four_bit needs bitsandbytes"
    assert found.remedy == "`pip install bitsandbytes==0.50.2`, or set it to full"
