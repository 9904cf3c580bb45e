"""What the parts of a process count, as Prometheus reads it (text format 0.0.4).

    table      every metric there is: name, kind, labels, what it means; docs/reference/metrics.md is made of it
    page       one scrape: whoever runs a part lets it write its figures there

A part counts in plain attributes of its own; adding up and naming happens when somebody asks.
"""

from oncewire._ground.metrics.histogram import Histogram
from oncewire._ground.metrics.page import CONTENT_TYPE, Page, Tally

__all__ = ["CONTENT_TYPE", "Histogram", "Page", "Tally"]
