"""How much work a regular expression takes: a backtracking matcher that counts what it looks at.

Python's own matcher tells nobody. This one follows the same parse tree in the same order, so what is linear here is
linear there, up to a constant. It knows what our expressions use, and no more.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from re import _constants as c  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

LONG = 1 << 30
STEPS_MAX = 1_000_000


class Counting:
    """One expression. `steps` grows with each look at a character or a place."""

    def __init__(self, pattern: re.Pattern[Any]) -> None:
        self._tree = parser.parse(pattern.pattern, pattern.flags)
        self._ignores_case = bool(pattern.flags & re.IGNORECASE)
        self._dot_is_all = bool(pattern.flags & re.DOTALL)
        self._is_multiline = bool(pattern.flags & re.MULTILINE)
        self._text: Sequence[int] = ()
        self._known: dict[tuple[Any, int], dict[int, bool]] = {}
        self.steps = 0

    def work(self, text: str | bytes, mode: str) -> int:
        """Steps for `match`, `fullmatch`, or everything that `finditer`, `sub`, `split` find."""
        self._text = text if isinstance(text, bytes) else [ord(sign) for sign in text]
        self.steps, at, length = 0, 0, len(self._text)
        if mode != "finditer":
            for end in self._all(self._tree, 0, at):
                if mode == "match" or end == length:
                    break
            return self.steps
        while at <= length:
            end = next(self._all(self._tree, 0, at), -1)
            at = max(end, at + 1)
        return self.steps

    def _all(self, nodes: Any, number: int, at: int) -> Iterator[int]:
        """Where the nodes from `number` on can end, in the order in which they are tried."""
        if number == len(nodes):
            yield at
            return
        for end in self._one(*nodes[number], at):
            yield from self._all(nodes, number + 1, end)

    def _one(self, op: Any, argument: Any, at: int) -> Iterator[int]:
        self.steps += 1
        assert self.steps < STEPS_MAX, "this does not end"
        if op in (c.LITERAL, c.NOT_LITERAL, c.ANY, c.IN):
            if self._is_one(op, argument, at):
                yield at + 1
        elif op is c.SUBPATTERN:
            yield from self._all(argument[-1], 0, at)
        elif op is c.ATOMIC_GROUP:
            yield from itertools.islice(self._all(argument, 0, at), 1)
        elif op is c.BRANCH:
            for branch in argument[1]:
                yield from self._all(branch, 0, at)
        elif op in (c.MAX_REPEAT, c.MIN_REPEAT, c.POSSESSIVE_REPEAT):
            yield from self._repeat(op, *argument, at)
        elif op in (c.ASSERT, c.ASSERT_NOT):
            if self._holds(*argument, at) == (op is c.ASSERT):
                yield at
        elif op is c.AT:
            if self._is_place(argument, at):
                yield at
        else:
            raise AssertionError(f"not known here: {op}")

    def _repeat(self, op: Any, least: int, most: Any, body: Any, at: int) -> Iterator[int]:
        most = LONG if most is c.MAXREPEAT else int(most)
        if len(body) == 1 and body[0][0] in (c.LITERAL, c.NOT_LITERAL, c.ANY, c.IN):
            yield from self._repeat_one(op, least, most, body[0], at)
        elif op is c.POSSESSIVE_REPEAT:
            yield from itertools.islice(self._repeat(c.MAX_REPEAT, least, most, body, at), 1)
        elif op is c.MAX_REPEAT:
            if most:
                for end in self._all(body, 0, at):
                    if end > at:
                        yield from self._repeat(op, max(0, least - 1), most - 1, body, end)
            if not least:
                yield at
        else:
            if not least:
                yield at
            if most:
                for end in self._all(body, 0, at):
                    if end > at:
                        yield from self._repeat(op, max(0, least - 1), most - 1, body, end)

    def _repeat_one(self, op: Any, least: int, most: int, one: Any, at: int) -> Iterator[int]:
        if op is c.MIN_REPEAT:
            count = 0
            while count <= most:
                if count >= least:
                    yield at + count
                self.steps += 1
                if not self._is_one(*one, at + count):
                    return
                count += 1
            return
        count = 0
        while count < most and self._is_one(*one, at + count):
            self.steps += 1
            count += 1
        last = count if op is c.POSSESSIVE_REPEAT else least
        for kept in range(count, last - 1, -1):
            self.steps += 1
            yield at + kept

    def _is_one(self, op: Any, argument: Any, at: int) -> bool:
        if at >= len(self._text):
            return False
        known = self._known.setdefault((op, id(argument)), {})
        sign = self._text[at]
        if sign not in known:
            known[sign] = self._matches(op, argument, sign)
        return known[sign]

    def _matches(self, op: Any, argument: Any, sign: int) -> bool:
        signs = {sign}
        if self._ignores_case:
            signs |= {ord(other) for other in (chr(sign).lower(), chr(sign).upper()) if len(other) == 1}
        if op is c.ANY:
            return self._dot_is_all or sign != 10
        if op is c.LITERAL:
            return argument in signs
        if op is c.NOT_LITERAL:
            return argument not in signs
        is_negated = argument[0][0] is c.NEGATE
        return any(_is_in(kind, value, one) for kind, value in argument for one in signs) != is_negated

    def _holds(self, direction: int, body: Any, at: int) -> bool:
        start = at if direction > 0 else at - body.getwidth()[0]
        return start >= 0 and next(self._all(body, 0, start), None) is not None

    def _is_place(self, place: Any, at: int) -> bool:
        length = len(self._text)
        if place in (c.AT_BOUNDARY, c.AT_NON_BOUNDARY):
            is_boundary = self._is_word(at - 1) != self._is_word(at)
            return is_boundary == (place is c.AT_BOUNDARY)
        if place in (c.AT_BEGINNING, c.AT_BEGINNING_STRING):
            return at == 0 or (self._is_multiline and place is c.AT_BEGINNING and self._text[at - 1] == 10)
        if place is c.AT_END_STRING:
            return at == length
        return at == length or (self._text[at] == 10 and (self._is_multiline or at == length - 1))

    def _is_word(self, at: int) -> bool:
        return 0 <= at < len(self._text) and _is_word(self._text[at])


def _is_in(kind: Any, value: Any, sign: int) -> bool:
    if kind is c.LITERAL:
        return bool(value == sign)
    if kind is c.RANGE:
        return bool(value[0] <= sign <= value[1])
    if kind is c.CATEGORY:
        return bool(_CATEGORIES[value](sign))
    return False


def _is_word(sign: int) -> bool:
    return chr(sign).isalnum() or sign == ord("_")


_CATEGORIES = {
    c.CATEGORY_DIGIT: lambda sign: chr(sign).isdigit(),
    c.CATEGORY_NOT_DIGIT: lambda sign: not chr(sign).isdigit(),
    c.CATEGORY_SPACE: lambda sign: chr(sign).isspace(),
    c.CATEGORY_NOT_SPACE: lambda sign: not chr(sign).isspace(),
    c.CATEGORY_WORD: _is_word,
    c.CATEGORY_NOT_WORD: lambda sign: not _is_word(sign),
}


def alphabet(pattern: re.Pattern[Any]) -> list[str]:
    """A character of each kind that the expression tells apart, and one that it does not know."""
    signs: dict[int, None] = {}

    def look(node: Any) -> None:
        if isinstance(node, tuple) and len(node) == 2 and node[0] in (c.LITERAL, c.NOT_LITERAL):
            signs.setdefault(node[1])
        elif isinstance(node, tuple) and len(node) == 2 and node[0] is c.RANGE:
            signs.setdefault(node[1][0])
        elif isinstance(node, tuple) and len(node) == 2 and node[0] is c.CATEGORY:
            signs.setdefault({c.CATEGORY_SPACE: 32, c.CATEGORY_DIGIT: 49}.get(node[1], 97))
        elif isinstance(node, (tuple, list, parser.SubPattern)):
            for one in node:
                look(one)

    look(parser.parse(pattern.pattern, pattern.flags))
    return [chr(sign) for sign in [*signs, 0x7E] if 0 < sign < 128]


def beginnings(pattern: re.Pattern[Any]) -> list[str]:
    """What a text can begin with so that each part of the expression is reached: the shortest match, cut anywhere."""
    texts = [""]

    def shortest(nodes: Any) -> str:
        return "".join(one(*node) for node in nodes)

    def one(op: Any, argument: Any) -> str:
        if op is c.LITERAL:
            return chr(argument)
        if op in (c.NOT_LITERAL, c.ANY):
            return "~"
        if op is c.IN:
            return _a_sign_of(argument)
        if op is c.SUBPATTERN:
            return shortest(argument[-1])
        if op is c.ATOMIC_GROUP:
            return shortest(argument)
        if op is c.BRANCH:
            return shortest(argument[1][0])
        if op in (c.MAX_REPEAT, c.MIN_REPEAT, c.POSSESSIVE_REPEAT):
            return shortest(argument[2]) * max(1, int(argument[0]))
        return ""

    def cut(nodes: Any, before: str) -> None:
        for node in nodes:
            if node[0] is c.BRANCH:
                for branch in node[1][1]:
                    cut(branch, before)
            elif node[0] is c.SUBPATTERN:
                cut(node[1][-1], before)
            elif node[0] is c.ATOMIC_GROUP:
                cut(node[1], before)
            elif node[0] in (c.MAX_REPEAT, c.MIN_REPEAT, c.POSSESSIVE_REPEAT):
                cut(node[1][2], before)
            before += one(*node)
            texts.append(before)

    cut(parser.parse(pattern.pattern, pattern.flags), "")
    return list(dict.fromkeys(texts))


def _a_sign_of(members: Any) -> str:
    sign = next(sign for sign in (*range(97, 123), *range(48, 58), *range(1, 127)) if _takes(members, sign))
    return chr(sign)


def _takes(members: Any, sign: int) -> bool:
    return any(_is_in(kind, value, sign) for kind, value in members) != (members[0][0] is c.NEGATE)
