"""Every subject that the contracts name, with the envelope that its messages carry.

Topology lint proves from CATALOG that each pattern is captured by exactly one stream; identity and the agent ask
`family` which envelope to expect. Event types map to `sr.events.*` by their leading word: `LoopCreated` is a Loop,
`Loopback` is not.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from oncewire._ground.contracts import subjects


class Family(StrEnum):
    """What the body of a message is."""

    RUNTIME = "runtime"
    MESSAGE = "message"
    REALTIME = "realtime"
    LETTER = "letter"
    """The original's bytes, whatever they are: a dead letter or a request for one."""
    REPLAY = "replay"
    """What became of a letter."""
    BLOCK = "block"
    ADVISORY = "advisory"
    """Written by the server itself."""


class Entry(NamedTuple):
    pattern: str
    family: Family
    meaning: str


SR_EVENT_WORDS = {
    "Loop": "loop",
    "Iteration": "iteration",
    "Candidate": "candidate",
    "Run": "run",
    "Oracle": "oracle",
    "Governance": "governance",
    "Freeze": "freeze",
    "Staleness": "staleness",
    "Approval": "approval",
    "Exception": "exception",
    "Decision": "decision",
    "WorkSurface": "worksurface",
}
"""Leading word of an event type → last token of its subject. Everything else is `other`."""

SR_COMMANDS = (
    ("sr.commands.iteration.start", "Request iteration start"),
    ("sr.commands.iteration.complete", "Request iteration completion"),
    ("sr.commands.candidate.register", "Request candidate registration"),
    ("sr.commands.oracle.run", "Request oracle execution"),
)

PLATFORM_SUBJECTS = (
    "platform.billing.low_balance_warning",
    "platform.billing.auto_release_pending",
    "platform.billing.balance_depleted",
    "platform.billing.usage.metered",
    "platform.payments.balance_credited",
    "platform.payments.reconcile_failed",
    "gpuaas.provisioning.requested",
    "gpuaas.provisioning.active",
    "gpuaas.provisioning.failed",
    "gpuaas.provisioning.force_release_requested",
    "gpuaas.provisioning.releasing.requested",
    "gpuaas.provisioning.releasing.completed",
    "gpuaas.provisioning.release_failed",
    "appplatform.runtime.instance.requested",
    "appplatform.runtime.instance.upgrade_requested",
    "appplatform.runtime.instance.rollback_requested",
    "appplatform.runtime.instance.decommission_requested",
    "storage.attachment.requested",
    "storage.attachment.detach_requested",
)
"""What the platform's durable consumers filter on; those of DLQ read `dlq.>`."""

PLATFORM_PATTERNS = (
    "platform.billing.>",
    "platform.payments.>",
    "platform.artifact.>",
    "gpuaas.provisioning.>",
    "appplatform.>",
    "storage.>",
)
ADVISORY_PATTERNS = (
    "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.>",
    "$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED.>",
)


def sr_event(message_type: str) -> str:
    """The subject of a domain event: by its leading word, the longest that fits; `sr.events.other` if none does."""
    for word in _WORDS_LONGEST_FIRST:
        after = message_type[len(word) : len(word) + 1]
        if message_type.startswith(word) and not after.islower():
            return f"sr.events.{SR_EVENT_WORDS[word]}"
    return "sr.events.other"


_WORDS_LONGEST_FIRST = sorted(SR_EVENT_WORDS, key=len, reverse=True)

CATALOG: tuple[Entry, ...] = (
    Entry("evt.>", Family.RUNTIME, "events of agents and services"),
    Entry("cmd.>", Family.RUNTIME, "commands to agents"),
    *(Entry(f"sr.events.{name}", Family.MESSAGE, f"{word}… events") for word, name in SR_EVENT_WORDS.items()),
    Entry("sr.events.other", Family.MESSAGE, "events of any other type"),
    Entry("sr.events.>", Family.MESSAGE, "domain events"),
    *(Entry(subject, Family.MESSAGE, meaning) for subject, meaning in SR_COMMANDS),
    Entry("sr.commands.>", Family.MESSAGE, "orchestration commands"),
    Entry("sr.queries.>", Family.MESSAGE, "requests that wait for a reply"),
    *(Entry(subject, Family.MESSAGE, "platform event") for subject in PLATFORM_SUBJECTS),
    *(Entry(pattern, Family.MESSAGE, "platform events") for pattern in PLATFORM_PATTERNS),
    Entry(f"{subjects.CHAT_EVENTS_PREFIX}.*", Family.REALTIME, "messages and lifecycle of a conversation"),
    Entry(f"{subjects.CHAT_TOKENS_PREFIX}.*", Family.REALTIME, "token chunks of a conversation"),
    Entry(f"{subjects.CHAT_PRESENCE_PREFIX}.*", Family.REALTIME, "presence in a conversation"),
    Entry("ledger.*.*", Family.BLOCK, "blocks of an agent's ledger"),
    Entry("dlq_requests.*", Family.LETTER, "messages that agents hand to the dead-letter service"),
    Entry("dlq.>", Family.LETTER, "dead letters"),
    Entry("dlq_replays.*", Family.REPLAY, "what became of each letter"),
    *(Entry(pattern, Family.ADVISORY, "deliveries that the server gave up") for pattern in ADVISORY_PATTERNS),
)


_BY_FIRST_TOKEN: dict[str, list[Entry]] = {}
for _entry in CATALOG:
    _BY_FIRST_TOKEN.setdefault(_entry.pattern.partition(".")[0], []).append(_entry)


def family(subject: str) -> Family | None:
    """Which envelope a message on `subject` carries, None for a subject that no contract names."""
    for entry in _BY_FIRST_TOKEN.get(subject.partition(".")[0], ()):
        if subjects.matches(subject, entry.pattern):
            return entry.family
    return None
