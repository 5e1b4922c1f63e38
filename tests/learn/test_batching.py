import dataclasses
from collections.abc import Callable

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.learn.scoring import Compute, micro_batches, minibatches, pack_by_length
from agent_r1.params.train import UpdateParams
from agent_r1.records import Trajectory
from tests.learn.learning import CPU

COMPUTE = Compute(device=CPU, dtype=torch.float32, max_tokens=100)


def test_micro_batches_by_hand() -> None:
    # Sorted: 9 | 5 4 | 4 2 1 with a budget of 12: 9 alone, 2 rows of 5 are 10 (3 would be 15), 3 rows of 4 are 12.
    assert pack_by_length([[4], [9], [1], [5], [4], [2]], max_tokens=12) == [[1], [3, 0], [4, 5, 2]]


def test_the_contexts_of_a_trajectory_stay_together() -> None:
    # Three rows of 4 are 12, and with a fourth 16; a trajectory of four rows of 4 is beyond the budget and alone.
    assert pack_by_length([[2, 3], [4], [3]], max_tokens=12) == [[1, 0], [2]]
    assert pack_by_length([[4], [4, 1, 1, 1], [2]], max_tokens=12) == [[0], [1], [2]]


@given(st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=3), max_size=40), st.integers(1, 200))
def test_micro_batches_take_everything_once_within_the_budget(lengths: list[list[int]], max_tokens: int) -> None:
    groups = pack_by_length(lengths, max_tokens)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    for group in groups:
        contexts = [length for row in group for length in lengths[row]]
        assert len(group) == 1 or len(contexts) * max(contexts) <= max_tokens


def test_minibatches_split_all_rows_by_iteration_and_epoch(make_update: Callable[..., UpdateParams]) -> None:
    def split(iteration: int) -> list[list[list[int]]]:
        found = list(minibatches(range(10), make_update(minibatches=3, epochs=2), seed=1, iteration=iteration))
        return [found[:3], found[3:]]

    for epoch in split(0):
        assert [len(part) for part in epoch] == [4, 3, 3]
        assert sorted(row for part in epoch for row in part) == list(range(10))
    assert split(0) == split(0)
    assert len({str(epoch) for iteration in range(2) for epoch in split(iteration)}) == 4


def test_each_row_is_a_minibatch_where_there_are_fewer(make_update: Callable[..., UpdateParams]) -> None:
    """A filter keeps a group of 4, and the world cut one of its episodes short."""
    params = make_update(minibatches=4, epochs=2)
    found = list(minibatches(range(3), params, seed=0, iteration=0))
    assert sorted(found[:3]) == sorted(found[3:]) == [[0], [1], [2]]
    assert not list(minibatches([], params, seed=0, iteration=0))


def test_a_micro_batch_takes_entries_in_the_order_of_its_mask(make_trajectory: Callable[..., Trajectory]) -> None:
    lengths, starts = [2, 6, 1], [[0], [0, 4], [0]]
    rows = [make_trajectory(i, [0] * length, None, starts[i]) for i, length in enumerate(lengths)]
    sequences = [np.arange(10 * i, 10 * i + length, dtype=np.int32) for i, length in enumerate(lengths, start=1)]
    rows = [dataclasses.replace(row, token_ids=ids) for row, ids in zip(rows, sequences, strict=True)]
    masks = [np.isin(ids, [11, 21, 23, 25]) for ids in sequences]
    (batch,) = micro_batches(rows, masks, COMPUTE)
    assert batch.rows == [1, 0]  # the longest first; the one without a selected token is left out
    assert batch.ids.tolist() == [[20, 21, 22, 23], [24, 25, 0, 0], [10, 11, 0, 0]]  # a context is a row
    assert batch.take(sequences).tolist() == batch.ids[batch.mask].tolist() == [21, 23, 25, 11]
    assert [piece.tolist() for piece in batch.split(batch.take(sequences))] == [[21, 23, 25], [11]]
