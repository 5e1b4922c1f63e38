"""Messages between ranks arrive as they were sent, bit for bit, and run nothing."""

import math
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from agent_r1.devices.sharing import _SENT, LedCall, opened, packed
from agent_r1.params import SHIPPED, load
from agent_r1.records import Call, CallStatus, Outcome, Source, StopReason
from agent_r1.tables import _table
from tests.learn.learning import make_credit
from tests.trajectories import from_parts


class Command:
    """An object that runs a command where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._mark),)


def sent(message: Any, *kinds: type) -> Any:
    return opened(packed(message), kinds)


def test_plain_values_arrive_with_every_digit() -> None:
    message = {"a": [1, 0.1 + 0.2, 1e-320, -0.0, math.inf, None, True, "\0é"], "": {}, "big": 2**70}
    assert sent(message) == message
    assert math.copysign(1, sent(-0.0)) == -1
    assert math.isnan(sent([math.nan])[0])
    assert sent((1, Path("a/b"))) == [1, Path("a/b")]
    number = sent(np.float32(0.1))
    assert (type(number), number) == (np.float32, np.float32(0.1))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.int64, np.uint8, np.bool_])
def test_arrays_arrive_bit_for_bit(dtype: Any) -> None:
    drawn = np.random.default_rng(0).integers(0, 2, (3, 4)).astype(dtype)
    for array in (drawn, drawn[:0], drawn[1], drawn.T):
        array.flags.writeable = False
        found = sent({"first": np.ones(5, dtype), "then": array})["then"]
        assert found.dtype == array.dtype
        assert found.shape == array.shape
        assert found.tobytes() == array.tobytes()


def test_tensors_arrive_bit_for_bit() -> None:
    whole = torch.randn(4, 6, requires_grad=True)
    for tensor in (whole, whole[:, 1], whole.to(torch.bfloat16), whole > 0):
        assert torch.equal(sent([tensor, tensor])[1], tensor)
        assert not sent(tensor).requires_grad


def test_a_call_of_the_leader_arrives_as_it_was_made() -> None:
    calls = [Call(tool="search", arguments='{"query": "é"}', status=CallStatus.FAILED, latency_s=0.1)]
    parts = [(Source.PROMPT, [1, 2]), (Source.ACTION, [3, 4]), (Source.OBSERVATION, [5]), (Source.ACTION, [6])]
    trajectory = from_parts(parts, [{"calls": calls, "rewards": {"em": 0.1}}], outcome=Outcome.ABORTED)
    credit = make_credit(trajectory)
    params = load(SHIPPED).train.update
    call = LedCall("update", ([trajectory], [credit], load(SHIPPED).env), {"rate": 0.1}, params, 7)
    found = sent(call, *_SENT)
    assert (found.verb, found.options, found.params, found.seed) == ("update", {"rate": 0.1}, params, 7)
    [[ours], [earned], env] = found.arguments
    assert env == load(SHIPPED).env
    for record, other in ((ours, trajectory), (earned, credit)):
        assert _table([record], type(other)).equals(_table([other], type(other)))
    assert ours.outcome is Outcome.ABORTED
    assert [step.stop_reason for step in ours.steps] == [StopReason.END] * 2
    assert ours.steps[0].calls == calls


def test_a_pickle_is_no_message_and_other_objects_are_not_sent(tmp_path: Path) -> None:
    mark = tmp_path / "unpickled"
    with pytest.raises(SafetensorError):
        opened(pickle.dumps([Command(mark)]), _SENT)
    assert not mark.exists()
    with pytest.raises(TypeError, match="a Command is no part of a message between ranks"):
        packed([Command(mark)])
    with pytest.raises(KeyError, match="UpdateParams"):
        opened(packed(LedCall("update", (), {}, load(SHIPPED).train.update, 7)), ())
