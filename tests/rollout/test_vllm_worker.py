"""What vLLM's workers say that they compute with, while faults are planted in transfers to real engines."""

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from agent_r1.training.watch import StaleWeightsError, prove_held
from benchmarks import families
from benchmarks.transfers import OF_ADAPTERS, OF_ALL, measure

TIMES = 3


@pytest.mark.slow  # an engine for each
@pytest.mark.parametrize("adapters", [False, True])
def test_every_fault_of_a_transfer_is_noticed_and_no_sound_one_is(adapters: bool) -> None:
    """Most of these are beyond the canary in 16 bits."""
    verdicts = dict(measure("bfloat16", TIMES, adapters=adapters))
    *faults, sound = [(name, each.by_sums) for name, each in verdicts.items()]
    assert faults == [(name, TIMES) for name in (OF_ADAPTERS if adapters else OF_ALL)]
    assert sound[1] == 0


@pytest.mark.slow
def test_stacked_experts_are_sampled_with_as_they_are_learned_and_a_stale_one_is_noticed(tmp_path: Path) -> None:
    """A reload leaves a CPU's kernel experts in another order, which no sum of vLLM's shows."""
    family = families.Family("Qwen3-MoE", tmp_path / "model", tmp_path)
    families.make_model(family.name, family.model)
    with family.engine("float32") as engine:
        learner = family.learner("float32")
        proved, gap = families.transfer(engine, learner, tmp_path / "updated")
        assert proved == "25/25"
        assert float(gap.split("/")[1]) < 1e-4
        weights = tmp_path / "updated" / "model.safetensors"
        tensors = load_file(weights)
        *_, name = sorted(name for name in tensors if "experts" in name and "down_proj" in name)
        tensors[name].flatten()[-1] += 1e-3
        save_file(tensors, weights, metadata={"format": "pt"})
        engine.load_weights(tmp_path / "updated", 2)
        with pytest.raises(StaleWeightsError, match=r"1 of 25 tensors differ, .*experts\.down_proj for one"):
            prove_held(engine.held()[0], learner.weight_sums("float32"))
