"""Answer comparison against values computed by hand from the official HotpotQA evaluation script."""

from fractions import Fraction
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r1.answers import contains, exact_match, f1, normalize

PAIRS = yaml.safe_load(Path(__file__).with_name("answers.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("answer", "golds", "em", "overlap", "inside"), PAIRS)
def test_worked_examples(answer: str, golds: list[str], em: int, overlap: int | str, inside: int) -> None:
    assert exact_match(answer, golds) == em
    assert f1(answer, golds) == pytest.approx(float(Fraction(overlap)))
    assert contains(answer, golds) == inside


@settings(deadline=None)
@given(st.text())
def test_normalised_text_is_single_spaced_and_equal_to_itself(text: str) -> None:
    once = normalize(text)
    assert once == " ".join(once.split())
    assert exact_match(text, [text]) == float(bool(text.strip()))
