"""Sums of weights, however they are cut."""

import pytest
import torch

from agent_r1.weight_sums import differing, joined, sums_of, tensor_sum, wrapped

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def matrix(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn((300, 250), generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sum_of_a_whole_is_that_of_its_slices_at_their_places(dtype: torch.dtype) -> None:
    whole = matrix(dtype)
    rows = tensor_sum(whole[:70]) + tensor_sum(whole[70:], row=70)
    columns = tensor_sum(whole[:, :9]) + tensor_sum(whole[:, 9:], column=9)
    assert wrapped(rows) == wrapped(columns) == tensor_sum(whole)
    vector = whole[0]
    assert wrapped(tensor_sum(vector[:9]) + tensor_sum(vector[9:], row=9)) == tensor_sum(vector)
    assert tensor_sum(torch.cat([whole, torch.zeros(20, 250, dtype=dtype)])) == tensor_sum(whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_last_bit_of_any_element_changes_the_sum_and_the_sign_of_zero_does_not(dtype: torch.dtype) -> None:
    whole = matrix(dtype)
    before = tensor_sum(whole)
    bits = whole.view(torch.int32 if dtype is torch.float32 else torch.int16)
    for place in [(0, 0), (299, 249), (123, 45)]:
        bits[place] ^= 1
        assert tensor_sum(whole) != before
        bits[place] ^= 1
    whole[5, 5] = 0.0
    before = tensor_sum(whole)
    whole[5, 5] = -0.0
    assert tensor_sum(whole) == before


def test_equal_elements_in_another_order_have_another_sum() -> None:
    whole = matrix(torch.float32)
    assert len({tensor_sum(each) for each in (whole, whole.flip(0), whole.flip(1), whole.T.contiguous())}) == 4


def test_a_slice_that_ranks_share_counts_once_and_only_if_they_agree() -> None:
    ranks = [[("head", 0, 0, 2**63 - 1), ("norm", 0, 0, 5)], [("head", 8, 0, 1), ("norm", 0, 0, 5)]]
    assert joined(ranks) == {"head": -(2**63), "norm": 5}
    ranks[1][1] = ("norm", 0, 0, 6)
    assert differing(joined(ranks), {"head": -(2**63), "norm": 5, "unknown": 1}) == ["norm"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_model_is_summed_as_a_sampler_rounds_it(dtype: torch.dtype) -> None:
    whole = matrix(torch.float32)
    state = {"weight": whole, "steps": torch.tensor(3)}
    assert sums_of(state.items(), dtype) == {"weight": tensor_sum(whole.to(dtype))}
