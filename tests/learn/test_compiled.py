"""Compiled layers: what they learn is what plain ones learn, and where they cannot be compiled the plain ones do."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import cpp_builder
from transformers import AttentionInterface

from agent_r1.learn import compiled
from agent_r1.learn.gradients import add_policy_gradient, join_credit
from agent_r1.learn.learner import Learner
from agent_r1.learn.model import PACKED, SHARED, attend
from tests.learn.learning import Samples, gradients

MakeLearner = Callable[..., Learner]
WITH_COMPILER = pytest.mark.skipif(not shutil.which("g++"), reason="there is no C++ compiler")


@pytest.fixture(autouse=True)
def nothing_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty folder of compiled code, and the compiler's settings as they were."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torchinductor"))
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=False):
        yield
    torch._functorch.config.force_non_lazy_backward_lowering = False
    for name in (PACKED, SHARED):
        AttentionInterface.register(name, attend)
    compiled._say.cache_clear()
    torch._dynamo.reset()
    counters.clear()


def learned(learner: Learner, samples: Samples) -> dict[str, Tensor]:
    """The gradients of a policy."""
    rows = join_credit(learner.policy, *samples, learner.params, learner.compute)
    add_policy_gradient(learner.policy, rows, 10, learner.params, learner.compute, learn=True)
    return gradients(learner.policy)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What this project says; of a limit torch logs a line too."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("agent_r1")]


def assert_alike(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    """Gradients differ by rounding at most."""
    largest = max(float(gradient.abs().max()) for gradient in right.values())
    assert left.keys() == right.keys()
    assert all(torch.allclose(left[name], right[name], atol=4e-6 * largest) for name in right)


@WITH_COMPILER
@pytest.mark.slow  # a C++ compiler reads torch's headers several times
def test_compiled_layers_learn_what_plain_ones_learn(
    make_learner: MakeLearner, samples: Samples, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"with_critic": False, "gradient_checkpointing": True}
    plain = learned(make_learner(**options), samples)
    assert not counters["frames"]
    ours = learned(make_learner(**options, compile=True), samples)
    assert_alike(ours, plain)
    assert said(caplog) == []
    assert counters["inductor"]["fxgraph_cache_miss"] > 0 == counters["inductor"]["fxgraph_cache_hit"]
    counters.clear()
    torch._dynamo.reset()  # as a later process begins
    again = learned(make_learner(**options, compile=True), samples)
    assert all(torch.equal(again[name], ours[name]) for name in ours)
    assert counters["inductor"]["fxgraph_cache_hit"] > 0 == counters["inductor"]["fxgraph_cache_miss"]


@pytest.mark.slow  # all is made ready for a compiler, of policy and critic
def test_no_compiler_is_said_once_and_layers_stay_plain(
    make_learner: MakeLearner,
    samples: Samples,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    plain = make_learner()
    ours = make_learner(compile=True)
    monkeypatch.setenv("PATH", str(tmp_path))
    cpp_builder.cpp_compiler_search.cache_clear()
    values = [np.concatenate(learner.values(samples.trajectories)) for learner in (ours, plain)]  # of the critic
    assert np.array_equal(*values)
    gradient = learned(plain, samples)
    assert all(torch.equal(tensor, gradient[name]) for name, tensor in learned(ours, samples).items())
    cpp_builder.cpp_compiler_search.cache_clear()
    [message] = said(caplog)
    assert message.startswith("layers are computed uncompiled from here on: ")
    assert "No working C++ compiler found" in message
    assert message.endswith("; set model.compile: false, or install a C++ compiler (g++) if there is none")


@pytest.mark.usefixtures("only_traced")
def test_packed_contexts_of_all_lengths_are_compiled_once(make_learner: MakeLearner, samples: Samples) -> None:
    learner = make_learner(with_critic=False, packing=True, compile=True)
    learned(learner, samples)
    frames = counters["frames"]["total"]
    for count in (3, 2):
        learned(learner, Samples(samples.trajectories[:count], samples.credits[:count]))
    assert counters["frames"]["total"] == frames > 0


@pytest.mark.usefixtures("only_traced")
def test_endless_compiling_is_said_once_and_ends(
    make_learner: MakeLearner, samples: Samples, caplog: pytest.LogCaptureFixture
) -> None:
    """Layers are compiled for scores, and not again for a gradient."""
    plain, ours = make_learner(with_critic=False), make_learner(with_critic=False, compile=True)
    ours.logprobs(samples.trajectories)
    with torch._dynamo.config.patch(recompile_limit=1):
        assert_alike(learned(ours, samples), learned(plain, samples))
    [message] = said(caplog)
    assert message.startswith("layers are computed uncompiled from here on: Dynamo recompile limit exceeded; set")
    assert not any("forward" in vars(layer) for layer in ours.policy.model.layers)


def test_compiled_code_lies_where_others_cannot_look(
    make_learner: MakeLearner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setattr(compiled, "home", lambda: tmp_path)
    make_learner(with_critic=False, compile=True)
    folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert folder == tmp_path / ".cache/agent_r1/torchinductor"
    assert folder.stat().st_mode & 0o777 == 0o700
