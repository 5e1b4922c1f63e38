"""Where every random draw gets its seed from."""

from __future__ import annotations

import hashlib


def derive(*parts: int | str) -> int:
    """A 63-bit seed from what identifies the draw, such as (seed, iteration, question, sample, step).

    The same parts give the same seed in every process; different parts give unrelated ones.
    """
    key = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest()) >> 1
