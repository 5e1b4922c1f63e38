from pathlib import Path

import pytest
import torch
from torch import Tensor

from agent_r1.learn.model import Critic, load_policy
from tests.learn.learning import CPU

IDS = torch.tensor([[30, 31, 32, 33], [40, 41, 42, 43]])


def values(critic: Critic, ids: Tensor = IDS) -> Tensor:
    everywhere = torch.ones_like(ids, dtype=torch.bool)
    return critic(ids, everywhere).reshape(ids.shape)  # type: ignore[no-any-return]


def with_head(critic: Critic) -> Critic:
    torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(0))
    return critic


def test_a_new_critic_values_everything_at_zero(tiny_model: Path) -> None:
    assert torch.equal(values(Critic(tiny_model, torch.float32, CPU)), torch.zeros(2, 4))


def test_the_backbone_starts_as_the_policys_with_weights_of_its_own(tiny_model: Path) -> None:
    critic, policy = Critic(tiny_model, torch.float32, CPU), load_policy(tiny_model, device=CPU)
    for ours, theirs in zip(critic.backbone.parameters(), policy.base_model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert ours is not theirs


def test_the_value_at_a_token_is_that_of_the_state_before_it(tiny_model: Path) -> None:
    # Changing token 2 may change the values from token 3 on, never those at tokens 0 to 2.
    critic = with_head(Critic(tiny_model, torch.float32, CPU))
    changed = IDS.clone()
    changed[:, 2] = 99
    before, after = values(critic), values(critic, changed)
    assert before[:, :3].flatten().tolist() == pytest.approx(after[:, :3].flatten().tolist(), abs=1e-6)
    assert (before[:, 3] - after[:, 3]).abs().min() > 1e-3
    assert before[:, 0].tolist() == [0.0, 0.0]


def test_values_come_from_the_hidden_state_one_earlier(tiny_model: Path) -> None:
    critic = with_head(Critic(tiny_model, torch.float32, CPU))
    hidden = critic.backbone(input_ids=IDS).last_hidden_state
    assert torch.allclose(values(critic)[:, 2], hidden[:, 1] @ critic.head.weight[0], atol=1e-6)
