"""A calculator: exact arithmetic on fractions, read sign by sign. No part of an expression is ever run as code."""

from __future__ import annotations

import operator
import re
from collections import deque
from collections.abc import Callable
from decimal import Context
from fractions import Fraction

from agent_r1.tools.base import ToolError

MAX_CHARACTERS = 256  # of an expression
MAX_BITS = 1024  # of a number above or below a fraction's line: 308 digits
MAX_DEPTH = 32  # brackets and signs inside of each other
_MAX_PLACES = 20  # of a decimal fraction; a longer one is shown as a fraction
_ABOUT = Context(prec=10)
_TOKEN = re.compile(r"[0-9]+(?:\.[0-9]+)?|\.[0-9]+|\*\*|//|[<>=!]=|[-+*/%^()<>=]")
_SPELLINGS = str.maketrans({"\N{MULTIPLICATION SIGN}": "*", "\N{DIVISION SIGN}": "/", "\N{MINUS SIGN}": "-"})

Tokens = deque[str]


def calculator(expression: str) -> str:
    """Works out a sum such as (1990 - 1958) * 2 exactly, or whether one such as 3 < 4 is true."""
    tokens = _read(expression)
    try:
        value = _value(tokens)
        if tokens and tokens[0] in _COMPARE:
            compare = _COMPARE[tokens.popleft()]
            answer = str(compare(value, _value(tokens))).lower()
        else:
            answer = _shown(value)
    except ZeroDivisionError:
        raise ToolError("nothing can be divided by zero") from None
    if tokens:
        raise ToolError(f"{tokens[0]!r} does not belong there")
    return answer


def _read(expression: str) -> Tokens:
    if len(expression) > MAX_CHARACTERS:
        raise ToolError(f"the expression is longer than {MAX_CHARACTERS} characters")
    text = expression.translate(_SPELLINGS)
    if rest := _TOKEN.sub(" ", text).split():
        raise ToolError(f"{rest[0][:20]!r} is no number, + - * / // % ** < > = or bracket")
    return deque(_TOKEN.findall(text))


def _value(tokens: Tokens, least: int = 0, depth: int = 0) -> Fraction:
    """Takes a value from the tokens, with every operation that binds at least so strongly."""
    if depth > MAX_DEPTH:
        raise ToolError("the brackets and signs are nested too deeply")
    value = _operand(tokens, depth)
    while tokens and tokens[0] in _BINARY and _BINARY[tokens[0]][0] >= least:
        strength, combine = _BINARY[tokens.popleft()]
        from_the_right = combine is _power  # 2 ** 3 ** 2 is 2 ** 9
        value = _limited(combine(value, _value(tokens, strength + (not from_the_right), depth + 1)))
    return value


def _operand(tokens: Tokens, depth: int) -> Fraction:
    token = tokens.popleft() if tokens else "the end"
    if token in ("+", "-"):
        value = _value(tokens, _SIGN, depth + 1)
        return -value if token == "-" else value
    if token == "(":
        value = _value(tokens, 0, depth + 1)
        if not tokens or tokens.popleft() != ")":
            raise ToolError("a bracket is not closed")
        return value
    if not token[-1].isdigit():
        raise ToolError(f"a number is missing before {token}")
    return _limited(Fraction(token))


def _limited(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ToolError("the number has too many digits")
    return value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ToolError("the exponent is no whole number")
    bits = max(base.numerator.bit_length(), base.denominator.bit_length()) - 1
    if bits * abs(exponent) > MAX_BITS:
        raise ToolError("the number has too many digits")
    return Fraction(base**exponent.numerator)


def _shown(value: Fraction) -> str:
    """A whole number or a short decimal fraction as such, else a fraction and its rounded value."""
    if value.denominator == 1:
        return str(value.numerator)
    scaled = value * 10**_MAX_PLACES
    if scaled.denominator == 1:
        digits = f"{abs(scaled.numerator):0{_MAX_PLACES + 1}}"
        integer = digits[:-_MAX_PLACES]
        places = digits[-_MAX_PLACES:].rstrip("0")
        return f"{'-' if value < 0 else ''}{integer}.{places}"
    about = _ABOUT.divide(_ABOUT.create_decimal(value.numerator), _ABOUT.create_decimal(value.denominator))
    return f"{value}, about {about}"


_SIGN = 3  # how strongly a sign before a value binds: -2 ** 2 is -4
_BINARY: dict[str, tuple[int, Callable[[Fraction, Fraction], Fraction]]] = {
    "+": (1, operator.add),
    "-": (1, operator.sub),
    "*": (2, operator.mul),
    "/": (2, operator.truediv),
    "//": (2, lambda left, right: Fraction(left // right)),
    "%": (2, operator.mod),
    "**": (4, _power),
    "^": (4, _power),
}
_COMPARE: dict[str, Callable[[Fraction, Fraction], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
}
