"""Every stage on a model of `model.path`, as at full scale: adapters and gradient checkpointing."""

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from agent_r1.files import model_hash, sha256
from agent_r1.learn import checkpoint
from agent_r1.params.places import RunId, policy_in
from agent_r1.records import Prediction, Proof, Trajectory
from agent_r1.tables import read_rows
from agent_r1.training.loop import Training
from agent_r1.training.watch import Verdict
from flows.commands.execute import index, prepare
from flows.evaluate import EvaluationRequest, evaluate
from flows.train import train
from flows.warm_start import warm_start
from tests.cases import laid
from tests.fixtures import PLACES, Inside, WriteParams
from tests.reading import metrics

TEMPLATES = Path(__file__).parents[1] / "rollout/templates"
CHANGES = laid("foreign")
WITHOUT_BITSANDBYTES = pytest.mark.skipif(not find_spec("bitsandbytes"), reason="the extra four_bit is not installed")
TOLERANCE = 0.1  # nats by which sampler and learner may differ in bfloat16


EXAMPLE = [{"role": "user", "content": "Where is Tesk?"}, {"role": "assistant", "content": "<answer>Veld</answer>"}]
SHIPPED = {
    "evaluate": CHANGES["evaluate"] | {"examples": "examples.jsonl"},
    "repro_baselines": ["base_tool_call", "as_shipped", "with_examples"],
}


def foreign_model(tokenizer: PreTrainedTokenizerFast, folder: Path) -> Path:
    """A folder as the hub has it: weights in bfloat16, and more rows of embeddings than the tokenizer has tokens."""
    shape = laid("foreign_shape") | {"vocab_size": len(tokenizer) + 28, "eos_token_id": tokenizer.eos_token_id}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(Qwen2Config(**shape, tie_word_embeddings=True))
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    loaded = AutoTokenizer.from_pretrained(folder)
    loaded.chat_template = (TEMPLATES / "qwen2_5.jinja").read_text()
    loaded.save_pretrained(folder)
    return folder


def assert_shipped(model: str) -> None:
    """Two baselines are the model itself, one of them with another prompt; base_tool_call is the warm start."""
    hashes = {
        name: json.loads((PLACES.evaluation(name) / "hashes.json").read_text())
        for name in ("base_tool_call", "as_shipped", "with_examples")
    }
    assert hashes["as_shipped"]["policy"] == hashes["with_examples"]["policy"] == model_hash(model)
    assert hashes["base_tool_call"]["policy"] == model_hash(str(PLACES.warm_start))
    assert hashes["as_shipped"]["prompt"] == hashes["base_tool_call"]["prompt"] != hashes["with_examples"]["prompt"]


def logprobs(folder: Path, trajectory: Trajectory) -> np.ndarray:
    """[L] what plain transformers thinks of every token, 0 at a context's first."""
    model, loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(loaded.values()), loaded
    result = np.zeros(len(trajectory.token_ids), np.float32)
    for span in trajectory.contexts:
        ids = torch.from_numpy(trajectory.token_ids[span].astype(np.int64))
        with torch.no_grad():
            logits = model(ids[None]).logits[0, :-1].log_softmax(-1)
        result[span.start + 1 : span.stop] = logits.gather(1, ids[1:, None])[:, 0].numpy()
    return result


@pytest.mark.parametrize("base", ["full", pytest.param("four_bit", marks=WITHOUT_BITSANDBYTES)])
def test_foreign_model_is_trained_with_adapters(
    base: str,
    tmp_path: Path,
    tiny_tokenizer: PreTrainedTokenizerFast,
    inside: Inside,
    write_params: WriteParams,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sampler and learner agree after every transfer, and plain transformers about the policy that is left.

    Only at the end are merged weights written, also by a process that finds nothing else left to do.
    """
    seen: list[list[str]] = []
    conclude = Training.conclude

    def look(training: Training, iteration: int, verdict: Verdict) -> dict[str, float]:
        concluded = conclude(training, iteration, verdict)
        weights = (training.folder.checkpoint / "policy").rglob("*.safetensors")
        seen.append([path.relative_to(training.folder.checkpoint).as_posix() for path in weights])
        return concluded

    monkeypatch.setattr(Training, "conclude", look)
    path = foreign_model(tiny_tokenizer, tmp_path / "foreign")
    lora = {"rank": 4, "alpha": 8}
    model = {"path": str(path), "dtype": "bfloat16", "gradient_checkpointing": True, "lora": lora, "base": base}
    started = CHANGES["warm_start"] | {"fine_tune": True}
    update = CHANGES["train"]["update"] | {"canary_tolerance": {"float32": 1e-4, "bfloat16": TOLERANCE}}
    changes = {"warm_start": started, "train": CHANGES["train"] | {"update": update}}
    write_params(tmp_path, CHANGES | changes | {"model": model} | SHIPPED)
    (tmp_path / "examples.jsonl").write_text(json.dumps({"messages": EXAMPLE}))
    with inside(tmp_path):
        prepare()
        index()
        warm_start()
        train(RunId("ppo"))
        policy = policy_in(PLACES.training(RunId("ppo")))
        merged = sha256(policy)
        finished = checkpoint.progress(policy.parent)
        for name in ("policy/model.safetensors", "SHA256SUMS"):
            (policy.parent / name).unlink()
        checkpoint.seal(policy.parent, finished)
        train(RunId("ppo"))
        assert sha256(policy) == merged
        evaluate(EvaluationRequest(RunId("ppo")))
        for baseline in ("base_tool_call", "as_shipped", "with_examples"):
            evaluate(EvaluationRequest(baseline))
        assert_shipped(str(path))
    given, taken = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
        for folder in (path, tmp_path / PLACES.warm_start)
    )
    assert not all(torch.equal(weight, taken[name]) for name, weight in given.items())

    run = tmp_path / PLACES.training(RunId("ppo"))
    gaps = [max(row["rollout/canary_gap"], row["policy/mismatch_max"]) for row in metrics(run)]
    assert [gap <= TOLERANCE for gap in gaps] == [True, True]
    rows = read_rows(run / "trajectories/001.parquet", Trajectory)
    assert {row.policy_version for row in rows} == {1}
    proofs = {proof.trajectory_id: proof.learner_logprobs for proof in read_rows(run / "proof/001.parquet", Proof)}
    before = logprobs(tmp_path / PLACES.warm_start, rows[0])
    assert np.abs(proofs[rows[0].trajectory_id] - before).max() > 0.3, "adapters that change nothing prove nothing"

    policy = tmp_path / policy_in(PLACES.training(RunId("ppo")))
    assert seen == [["policy/adapter/adapter_model.safetensors"]] * 2
    assert (policy / "model.safetensors").exists()
    assert not (policy / "adapter_config.json").exists()
    episodes = read_rows(tmp_path / PLACES.evaluation("ppo") / "trajectories.parquet", Trajectory)
    for episode in episodes:
        said = logprobs(policy, episode)[episode.action_mask]
        np.testing.assert_allclose(said, episode.logprobs[episode.action_mask], atol=TOLERANCE)
    predictions = read_rows(tmp_path / PLACES.evaluation("ppo") / "predictions.parquet", Prediction)
    assert [row.policy_version for row in predictions] == [2] * 6

    with inside(tmp_path):
        PLACES.warm_start.rename("gone")
        evaluate(EvaluationRequest(str(policy), as_label="alone"))
    limits = [
        json.loads((tmp_path / PLACES.evaluation(label) / "hashes.json").read_text())["limits"]
        for label in ("ppo", "alone")
    ]
    assert limits[1] == f"{limits[0]}, adapters merged and rounded", "an evaluation says what it could not run"
