"""What vLLM's workers say that they compute with, while faults are planted in transfers to real engines."""

import pytest

from benchmarks.transfers import OF_ADAPTERS, OF_ALL, measure

TIMES = 3


@pytest.mark.slow  # an engine for each
@pytest.mark.parametrize("adapters", [False, True])
def test_every_fault_of_a_transfer_is_noticed_and_no_sound_one_is(adapters: bool) -> None:
    """Most of these are beyond the canary in bfloat16."""
    verdicts = dict(measure("bfloat16", TIMES, adapters=adapters))
    *faults, sound = [(name, each.by_sums) for name, each in verdicts.items()]
    assert faults == [(name, TIMES) for name in (OF_ADAPTERS if adapters else OF_ALL)]
    assert sound[1] == 0
