"""Both ways of the loops that may be compiled: tests of what uses them run twice."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from oncewire._ground import native

LOOPS = ("deliveries", "gather", "messages", "replies", "envelopes", "frames", "is_plain")
LOOPS += ("columns", "blake2b_all", "blake2b_sum", "sha256_all", "caused")


@pytest.fixture(scope="module", params=["compiled", "plain"])
def loops(request: pytest.FixtureRequest) -> Iterator[str]:
    """`pytestmark = pytest.mark.usefixtures("loops")` in a module runs its tests with the loops in C and in Python."""
    if request.param == "compiled" and native.messages is None:
        pytest.skip("oncewire was built without its compiled loops")
    with pytest.MonkeyPatch.context() as patched:
        if request.param == "plain":
            for name in LOOPS:
                patched.setattr(native, name, None)
        yield request.param
