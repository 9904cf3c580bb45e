"""How often each tenant may ask. Pure: the time is an argument.

A bucket per tenant holds as many requests as may come in one second, and fills at that rate. A tenant that asks evenly
never notices it; one that does not is told when to come again, and the others are not touched.
"""

from __future__ import annotations

from typing import Final

TENANTS_MAX: Final = 10_000
"""Buckets that are kept. A full one is worth nothing, so the longest untouched go first."""


class Rates:
    """Requests per second of each tenant; 0 for no limit."""

    def __init__(self, per_s: int) -> None:
        self._per_s = per_s
        self._buckets: dict[str, tuple[float, float]] = {}

    def wait_s(self, tenant: str, now: float) -> float:
        """0 when the request may go on, else the time until it may."""
        if not self._per_s:
            return 0.0
        left, since = self._buckets.pop(tenant, (float(self._per_s), now))
        left = min(float(self._per_s), left + max(0.0, now - since) * self._per_s)
        is_allowed = left >= 1.0
        self._buckets[tenant] = (left - 1.0 if is_allowed else left, now)
        if len(self._buckets) > TENANTS_MAX:
            del self._buckets[next(iter(self._buckets))]
        return 0.0 if is_allowed else (1.0 - left) / self._per_s
