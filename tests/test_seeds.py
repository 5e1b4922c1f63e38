"""Seeds: the same parts give the same number for ever, different parts another."""

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from agent_r1.seeds import derive

parts = st.lists(st.one_of(st.integers(), st.text(alphabet="ab:1", max_size=3)), min_size=1, max_size=4)


def test_a_seed_does_not_depend_on_the_process() -> None:
    # 63 bits of the BLAKE2b digest of the parts with their types; the built-in hash() differs between processes.
    digest = hashlib.blake2b(b"int:0\x1fstr:atlas-12", digest_size=8).digest()
    assert derive(0, "atlas-12") == int.from_bytes(digest, "big") // 2


@given(parts, parts)
def test_other_parts_give_another_seed(left: list[int | str], right: list[int | str]) -> None:
    assert (derive(*left) == derive(*right)) == (left == right)
