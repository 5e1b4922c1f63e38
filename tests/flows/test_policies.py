"""What a policy's adapters run beside, and when its merged weights will do."""

import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agent_r1.learn import adapter
from agent_r1.learn.learner import Learner, Options
from agent_r1.learn.model import load_policy
from agent_r1.params import Params, load
from agent_r1.params.places import adapter_in
from agent_r1.rollout.engines import open_engine
from agent_r1.rollout.sampling import Action, Actor, Beneath, Request
from flows.policies import Policy

CPU = torch.device("cpu")
START, FOLDER = Path("outputs/warm_start"), Path("outputs/train/ppo/checkpoint/policy")
RANK = 4
ASKED = [Request(episode=i, step=0, context=[*range(i, i + 20)], seed=i, max_tokens=8) for i in range(6)]
LORA = {"rank": RANK, "alpha": RANK, "targets": ["down_proj"]}
Settings = Callable[..., Params]


@pytest.fixture
def settings(tmp_path: Path, tiny_model: Path, write_params: Any, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Parameters of a project whose trainings start from a tiny model; the adapted layers' weights are all 1 or -1."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_model, START)
    model = load_policy(START, device=CPU)
    for name, weight in model.named_parameters():
        weight.data = weight.data.sign() if "down_proj" in name else weight.data
    model.save_pretrained(START)

    def make(dtype: str = "bfloat16", kind: str = "transformers") -> Params:
        engine = {"kind": kind, "server": {"urls": ["http://127.0.0.1:9"] if kind == "server" else []}}
        write_params(tmp_path, {"model": {"dtype": dtype, "lora": LORA}, "engine": engine})
        return load()

    return make


@pytest.fixture
def learner(settings: Settings) -> Learner:
    """Its adapters add .0015 to each weight: less than half a unit in bfloat16's last place, on either side of 1."""
    loaded = settings()
    options = Options(device=CPU, merges=False)
    learner = Learner(START, loaded.train.update, loaded.model, with_critic=False, seed=0, options=options)
    for name, weight in adapter.trained_state(learner.policy).items():
        weight.fill_(0.1 if "lora_A" in name else 0.0015 / 0.1 / RANK)
    return learner


@pytest.fixture
def policy(learner: Learner) -> Policy:
    learner.save_policy(FOLDER)
    adapter.merge(FOLDER, START, torch.bfloat16)
    return Policy(name="ppo", title="ppo", path=str(FOLDER))


def first(settings: Params, policy: Policy, base: Beneath | None) -> list[Action]:
    actor = Actor(model=policy.path, end_ids=[0], max_tokens=64, temperature=0.0, dtype=settings.model.dtype)
    with open_engine(settings.engine, actor.beside(base)) as engine:
        return engine.sample([replace(request, max_tokens=1) for request in ASKED])


def test_adapters_act_in_bfloat16_where_merging_loses_them(settings: Settings, policy: Policy) -> None:
    """Merged they are rounded away: what acts then is the model that the training started from, to the last bit."""
    loaded = settings()
    merged, start = (load_policy(path, torch.bfloat16, CPU).state_dict() for path in (FOLDER, START))
    assert all(torch.equal(weight, merged[name]) for name, weight in start.items())
    base = policy.weights(loaded).beneath
    assert base == Beneath(str(START), RANK)
    with_adapters, rounded = (first(loaded, policy, model) for model in (base, None))
    untrained = first(loaded, Policy(name="", title="", path=str(START)), None)
    logprobs = [[action.logprobs.item() for action in actions] for actions in (with_adapters, rounded, untrained)]
    assert logprobs[0] != logprobs[1] == logprobs[2]


@pytest.mark.parametrize(("dtype", "kind"), [("float32", "transformers"), ("bfloat16", "server")])
def test_merged_weights_act_in_float32_and_servers(settings: Settings, policy: Policy, dtype: str, kind: str) -> None:
    """The one computes the same, to rounding; the others run nothing else. Neither needs the model beneath."""
    shutil.rmtree(START)
    loaded = settings(dtype, kind)
    assert (policy.would_round(loaded), policy.weights(loaded).beneath) == (False, None)


def test_in_float32_merged_weights_say_what_the_adapters_do(settings: Settings, policy: Policy) -> None:
    loaded = settings("float32")
    adapter.merge(FOLDER, START, torch.float32)
    merged, apart = (first(loaded, policy, base) for base in (None, Beneath(str(START), RANK)))
    for one, other in zip(merged, apart, strict=True):
        assert one.token_ids == other.token_ids
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


@pytest.mark.parametrize("change", [shutil.rmtree, lambda start: (start / "config.json").write_text("{}")])
def test_without_the_model_beneath_merged_weights_act_and_it_is_told(
    settings: Settings, policy: Policy, caplog: pytest.LogCaptureFixture, change: Callable[[Path], object]
) -> None:
    change(START)
    with caplog.at_level(logging.WARNING):
        assert policy.weights(settings()).beneath is None
    assert policy.would_round(settings())
    assert f"{START} is not the model that the adapters in {FOLDER} were trained beside; they are merged" in caplog.text


def test_adapters_alone_act_in_an_unfinished_run(settings: Settings, learner: Learner) -> None:
    """In float32 too, because there is nothing else; where they cannot, it is said what can."""
    learner.save_policy(FOLDER)
    alone = Policy(name="ppo", title="ppo", path=str(FOLDER))
    assert alone.weights(settings("float32")).beneath == Beneath(str(START), RANK)
    with pytest.raises(ValueError, match="holds adapters alone, and servers need weights; train the run to its end"):
        alone.weights(settings("float32", "server"))
    shutil.rmtree(START)
    with pytest.raises(ValueError, match=f"{START} is not the model .*; bring it back .*, or train the run to its end"):
        alone.weights(settings("float32"))


def test_adapters_that_no_training_wrote_do_not_act(settings: Settings, policy: Policy) -> None:
    file = adapter_in(FOLDER) / "adapter_config.json"
    file.write_text(file.read_text().replace(f'"r": {RANK}', '"r": 2'))
    with pytest.raises(ValueError, match=r"do not fit: .*lora_A\.weight' is \('F32', \[4, .*, not \('F32', \[2, "):
        policy.weights(settings())
    file.write_text("{}")
    with pytest.raises(ValueError, match="holds no adapters that were written here"):
        policy.weights(settings())
