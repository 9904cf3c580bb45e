"""The table of metrics as a page of the documentation: `python -m oncewire.metrics.reference` prints it."""

from __future__ import annotations

import sys

from oncewire.metrics.table import PARTS

HEAD = """\
# Metrics

Written by `make contracts` from `src/oncewire/metrics/table.py`; a test compares both, and a running system with both.
How to scrape them, and what to do about them: [observability](../observability.md).

Times are seconds, sizes bytes. A histogram has `_bucket`, `_sum` and `_count`. A label that others choose (`topic`,
`group`, `cause`) has at most 1,000 values per metric; what comes after is added up under `other`.
"""


def text() -> str:
    found = [HEAD]
    for part, metrics in PARTS.items():
        found.append(f"\n## {part}\n\n| name | kind | labels | meaning |\n|---|---|---|---|\n")
        found += [
            f"| `{one.name}` | {one.kind} | {', '.join(f'`{label}`' for label in one.labels)} | {one.about} |\n"
            for one in metrics
        ]
    return "".join(found)


if __name__ == "__main__":
    sys.stdout.write(text())
