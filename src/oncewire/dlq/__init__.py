"""Dead letters: what cannot be processed is kept, explained, and can be brought back.

rules      pure: what an event leads to, what a letter is          service    the loop: from events to letters
events     requests, advisories and given-up sequences, as read    sweep      what nobody reported
letters    reading `dlq.>` for people: filters and groups          alerts     log line, metric, hook
replay     from letters back to their streams                      republish  under one id, recorded first
"""

from typing import TYPE_CHECKING

from oncewire._ground.lazy import exports

if TYPE_CHECKING:
    from oncewire.dlq.service import DlqOptions, Service, options_of, serving

__all__ = ["DlqOptions", "Service", "options_of", "serving"]

__getattr__ = exports(
    __name__,
    {
        "DlqOptions": "oncewire.dlq.service",
        "Service": "oncewire.dlq.service",
        "options_of": "oncewire.dlq.service",
        "serving": "oncewire.dlq.service",
    },
)
