"""Honest values and bytes, made hostile: each by its place in the structure, with random numbers that are given."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

PASSWORD = "s3cret-of-hostile"
MARKS = (
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "[INST]", "[/INST]", "<|eot_id|>", "<|start_header_id|>", "</s>",
)  # fmt: skip
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<answer>", "</answer>", "<tool_response>")
PATHS = ("../x", "/etc/passwd", "a/../../x", "a//x", ".", "..", "~/x", "a\\..\\x", "C:\\x", "a/./x", "x\0", "x/", "./x")
TEXTS = (
    "", " ", "\0", "\x1b]52;c;aGk=\x07", "\x1b[2J", "\u202egnp", "\u2066x", "\ufeff", "\ud800", "\udfff\ud800",
    "\U0010ff00x",
    "$(touch hacked)", "; touch hacked", "`x`", "${item}", "{{ 7*7 }}", "{% x %}", "<script>", "|", "a\nb", "a\r\nb",
    "\u2028",
    "1e999", "NaN", "-0", "0x10", "1_000", "true", "null", "~", "\u0661\u0662", "e\u0301", "ppo-seed" + "9" * 5000,
    f"http://user:{PASSWORD}@host/x", f"https://{PASSWORD}@host", f"http://u:{PASSWORD}@a@host:80/?q",
    *PATHS, *MARKS, *TAGS,
)  # fmt: skip
NUMBERS = (0, -1, 1, 2**31, 2**63, 2**64, -(2**63), 10**400, 0.5, -0.0, 1e308, 5e-324, float("nan"), float("inf"))
DEEP = "@deep@"  # in a text of JSON: becomes brackets
LONG = 100_000


def odd_text(rng: Random) -> str:
    """A text that somebody may have made."""
    match rng.randrange(8):
        case 0:
            return "".join(rng.choice(TEXTS) for _ in range(rng.randrange(2, 6)))
        case 1:
            return rng.choice(("a", "<", "\u00e9", "[", "\n", "../", " x")) * rng.choice((300, 5000, LONG // 4))
        case 2:
            return "".join(chr(rng.choice((rng.randrange(32), rng.randrange(128, 0x3000)))) for _ in range(9))
    return rng.choice(TEXTS)


def odd_value(rng: Random, depth: int = 0) -> Any:
    """A value of JSON, mostly of another type or size than any that is expected."""
    match rng.randrange(8 if depth < 3 else 4):
        case 0 | 1:
            return odd_text(rng)
        case 2:
            return rng.choice(NUMBERS)
        case 3:
            return rng.choice((None, True, False, [], {}, DEEP))
        case 4:
            return [odd_value(rng, depth + 1) for _ in range(rng.randrange(4))]
        case 5:
            return {odd_text(rng)[:500]: odd_value(rng, depth + 1) for _ in range(rng.randrange(3))}
        case 6:
            return [odd_value(rng, 3)] * 2 if rng.random() < 0.5 else [rng.choice(NUMBERS)] * 1000
    return nested(odd_value(rng, 3), rng.choice((2, 20, 80)))


def nested(value: Any, depth: int) -> Any:
    """A value within so many lists."""
    for _ in range(depth):
        value = [value]
    return value


def mutated(honest: Any, rng: Random, times: int = 1) -> Any:
    """A copy of a value of JSON with that many changes, each at a random place of it."""
    made = copy.deepcopy(honest)
    for _ in range(times):
        place, key = rng.choice(_places(made) or [([made], 0)])
        _change(place, key, rng)
    return made


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every container in a value, with every key or index in it."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    own = [(value, key) for key in keys]
    return own + [place for _, key in own for place in _places(value[key])]


def _change(place: Any, key: Any, rng: Random) -> None:
    match rng.randrange(10):
        case 0:
            del place[key]
        case 1 if isinstance(place, dict):
            place[odd_text(rng)[:500]] = place.pop(key)
        case 2 if isinstance(place, dict):
            place[odd_text(rng)[:500]] = place[key]
        case 3:
            place[key] = [place[key]] * rng.choice((1, 2, 1000 if len(str(place[key])) < 1000 else 3))
        case 4 if isinstance(place[key], str):
            at = rng.randrange(len(place[key]) + 1)
            place[key] = place[key][:at] + odd_text(rng) + place[key][at:]
        case 5 if isinstance(place[key], int | float):
            place[key] = rng.choice(NUMBERS)
        case _:
            place[key] = odd_value(rng)


def as_json(value: Any, rng: Random) -> str:
    """A value as JSON, or as something near it: deep, cut off, with keys twice, numbers that are none, halves."""
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5)
    text = text.replace(json.dumps(DEEP), "[" * rng.choice((50, 1000, LONG)))
    match rng.randrange(12):
        case 0:
            return text[: rng.randrange(len(text) + 1)]
        case 1:
            return text.replace(":", rng.choice((': 1e999, "x":', ': NaN, "x":', ': "\\ud800", "x":')), 1)
        case 2 if text.startswith("{"):
            return text[:-1] + "," + text[1:]  # every key twice
        case 3:
            return text.replace("1", "9" * 5000, 1)
        case 4:
            return text + rng.choice(("]", "}", "x", "\0", " {}", "\n[]"))
        case 5:
            at = rng.randrange(len(text) + 1)
            return text[:at] + rng.choice(('"', "\\", "{", "]", ",", ":", "\0", "\\u00")) + text[at:]
    return text


def as_bytes(text: str, rng: Random) -> bytes:
    """A text in UTF-8, or now and then in another encoding, or with a byte that is none."""
    if rng.random() < 0.9:
        return text.encode(errors="surrogatepass")
    if rng.random() < 0.5:
        return text.encode(rng.choice(("utf-16", "utf-8-sig", "utf-32", "latin-1")), errors="replace")
    return damaged(text.encode(errors="surrogatepass"), rng)


def flipped(content: bytes, rng: Random, bits: int = 1) -> bytes:
    """The bytes with so many bits flipped, each another one."""
    made = bytearray(content)
    for at in rng.sample(range(8 * len(made)), min(bits, 8 * len(made))):
        made[at // 8] ^= 1 << at % 8
    return bytes(made)


def damaged(content: bytes, rng: Random) -> bytes:
    """The bytes with bits flipped, cut, repeated, overwritten or added: always others."""
    at, size = rng.randrange(len(content) + 1), rng.randrange(1, 64)
    match rng.randrange(12):
        case 0:
            return content[:at] if at < len(content) else content + b"\0"
        case 1 if at < len(content):
            return content[:at] + content[at + size :]
        case 2:
            return content + rng.randbytes(size)
        case 3:
            return content[:at] + rng.randbytes(size) + content[at:]
    return flipped(content, rng, rng.choice((1, 1, 1, 2, 8))) or b"\0"
