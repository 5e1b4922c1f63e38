"""The seed of every random draw."""

from __future__ import annotations

import hashlib


def derive(*parts: int | str) -> int:
    """A 63-bit seed from the parts that identify a draw, such as (seed, iteration, question, sample, step).

    Equal parts give the same seed in every process; different parts give unrelated ones.
    """
    key = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest()) >> 1
