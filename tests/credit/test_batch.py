"""Masks: the action mask is a fact of `source`; every switch chooses between it and all after the first prompt."""

from __future__ import annotations

import numpy as np

from agent_r1.credit.batch import action_tokens, after_prompt, select_tokens
from agent_r1.records import Source

# Prompt, prompt, role header, | action, action, observation, template, action, template. The bar ends the prompt.
SOURCE = np.array([0, 0, 3, 1, 1, 2, 3, 1, 3], dtype=np.uint8)
ACTIONS = [False, False, False, True, True, False, False, True, False]
AFTER_PROMPT = [False, False, False, True, True, True, True, True, True]


def test_action_tokens_are_those_the_policy_sampled() -> None:
    assert action_tokens(SOURCE).tolist() == ACTIONS


def test_after_prompt_starts_at_the_first_sampled_token() -> None:
    assert after_prompt(SOURCE).tolist() == AFTER_PROMPT


def test_after_prompt_is_empty_without_an_action() -> None:
    assert not after_prompt(np.array([0, 0, 3], dtype=np.uint8)).any()


def test_after_prompt_leaves_out_the_prompt_of_a_later_context() -> None:
    # Prompt, action, | the history again, the newest observation, template, action: only what is new counts.
    assert after_prompt(np.array([0, 1, 0, 0, 2, 3, 1], dtype=np.uint8)).tolist() == [
        *(False, True),
        *(False, False, True, True, True),
    ]


def test_a_switch_selects_actions_or_all_after_the_prompt() -> None:
    assert select_tokens(SOURCE, True).tolist() == ACTIONS
    assert select_tokens(SOURCE, False).tolist() == AFTER_PROMPT


def test_no_other_source_counts_as_action() -> None:
    every_source = np.array(list(Source), dtype=np.uint8)
    assert every_source[action_tokens(every_source)].tolist() == [Source.ACTION]
