"""`model`, `warm_start` and `env`: the agent before any reinforcement, and the world it acts in."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from agent_r1.params.sections import Count, Natural, Positive, Section, Share, Weight


class LoraParams(Section):
    """Adapters of policy and critic; see `agent_r1.policy.adapter`."""

    rank: Natural
    alpha: Count
    targets: Annotated[list[str], Field(min_length=1)]


class ModelParams(Section):
    path: str
    dtype: Literal["auto", "float32", "bfloat16"]
    gradient_checkpointing: bool
    lora: LoraParams

    @property
    def adapter(self) -> LoraParams | None:
        """The adapters that train instead of the weights; None where the weights themselves do."""
        return self.lora if self.lora.rank else None


class WarmStartParams(Section):
    seed: Natural
    fine_tune: bool
    vocab_size: Annotated[int, Field(ge=384)]
    hidden_size: Count
    layers: Annotated[int, Field(ge=2)]
    heads: Count
    demonstrations: Count
    naive_rag_demonstrations: Natural
    stop_early: Share
    wrong_relation: Share
    batch_size: Count
    steps: Count
    learning_rate: Positive
    observation_weight: Weight


class EnvParams(Section):
    instructions: str
    top_k: Count
    max_steps: Count
    max_tokens: Count
    max_action_tokens: Count

    @model_validator(mode="after")
    def _room_for_an_action(self) -> Self:
        if self.max_action_tokens >= self.max_tokens:
            raise ValueError(
                f"max_action_tokens {self.max_action_tokens} leaves no room for a prompt in "
                f"max_tokens {self.max_tokens}; raise max_tokens"
            )
        return self
