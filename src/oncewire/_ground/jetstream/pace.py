"""Which way is quicker for messages that wait together: each stored by itself, or all in one atomic batch. Pure.

By itself each costs the server a sync where it syncs always; a batch costs about two milliseconds whatever it holds.
Neither is known beforehand, and both take longer on a busy machine, so both are measured, each for sendings of about
one size: what sixteen took says little of sixty-four, since most of it may be the way there and back. The least of the
last few measurements counts: a sending may be slow by chance, because the machine stood still, but not quick.

A way that is not taken is tried again now and then: what is known of it fades. Soon where it used to be as quick as
thought and was left for a moment in which all stood still, seldom where it was tried again and was slow again.

Whose sendings are few and large may not want to learn by a thousand syncs. With `is_wary` the first measurement counts
by itself, and stands for larger sendings until there is one of their own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

EACH_US: Final = 150.0, 10.0
BATCH_US: Final = 2_000.0, 10.0
"""Of a sending and of each of its messages, until something is measured."""
LAST: Final = 3
"""So many measurements of a way count."""
FORGET: Final = 0.0005
"""So much at least fades with each choice, of what is known of the way that was not taken."""
FORGET_SOON: Final = 0.2
"""So much fades where the way was as quick as thought when it was last taken."""
NEAR: Final = 1.2
"""Up to so many times what was expected is as quick as thought."""
_SIZES: Final = 11


class Pace:
    """See the module's head."""

    def __init__(self, forget: float = FORGET, *, is_wary: bool = False) -> None:
        self._each, self._batches = _Way(*EACH_US, forget, is_wary), _Way(*BATCH_US, forget, is_wary)

    def learn(self, count: int, took_us: float, *, is_batch: bool) -> None:
        (self._batches if is_batch else self._each).learn(count, took_us)

    def choose_batch(self, count: int, rounds: Sequence[int] = ()) -> bool:
        """Decide for a sending, and forget a little of the way that it does not take. `rounds` are the sizes in which
        they would have to go by themselves, where some must wait for others."""
        is_batch = self.is_batch_quicker(count, rounds)
        if is_batch:
            for size in {one.bit_length(): one for one in rounds or (count,)}.values():
                self._each.forget(size)
        else:
            self._batches.forget(count)
        return is_batch

    def is_batch_quicker(self, count: int, rounds: Sequence[int] = (), *, handicap: float = 1.0) -> bool:
        """`handicap`: so many times what is measured the other way counts as."""
        each_us = sum([self._each.expected_us(one) for one in rounds]) if rounds else self._each.expected_us(count)
        return count > 1 and self._batches.expected_us(count) < handicap * each_us


class _Way:
    """How much longer than guessed sendings take, by the number of bits of their count."""

    def __init__(self, fixed_us: float, message_us: float, forget: float, is_wary: bool) -> None:
        self._fixed_us, self._message_us, self._forget = fixed_us, message_us, forget
        self._last: list[deque[float]] = [deque([] if is_wary else [1.0], maxlen=LAST) for _ in range(_SIZES)]
        self._factors = [1.0] * _SIZES
        self._fades = [forget] * _SIZES
        self._are_faded = [False] * _SIZES

    def expected_us(self, count: int) -> float:
        return self._factors[count.bit_length()] * self._guess_us(count)

    def learn(self, count: int, took_us: float) -> None:
        size, factor = count.bit_length(), took_us / self._guess_us(count)
        if factor <= NEAR * self._factors[size]:
            self._fades[size] = max(self._forget, FORGET_SOON)
        elif self._are_faded[size]:
            self._fades[size] = max(self._forget, self._fades[size] / 2)
        self._are_faded[size] = False
        self._last[size].append(factor)
        self._factors[size] = min(self._last[size])
        for larger in range(size + 1, _SIZES):
            if self._last[larger]:
                break
            self._factors[larger] = self._factors[size]

    def forget(self, count: int) -> None:
        size = count.bit_length()
        self._factors[size] *= 1.0 - self._fades[size]
        self._are_faded[size] = True

    def _guess_us(self, count: int) -> float:
        return self._fixed_us + count * self._message_us
