"""The example of an agent's own tests, run as it stands."""

from __future__ import annotations

from examples.test_biller import *  # noqa: F403 - its tests and its fixture
