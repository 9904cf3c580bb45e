"""NATS subjects: their grammar, how filters match, and the builders of every subject that Oncewire publishes to.

A subject is tokens joined by dots. In a filter `*` stands for exactly one token and a last `>` for one or more. Values
from outside (tenants, agents, conversation ids) become single tokens through `token`, which refuses everything that
could make one value look like two tokens, a wildcard or another line of the protocol: no value can leave its place.

Tokens that we build are printable ASCII without `. * > / \\`. The server would take any UTF-8, but two spellings of
one letter are two subjects, and these values also become consumer names, which the server keeps as folder names.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from oncewire._ground.errors import ContractViolation

TOKEN_BYTES_MAX = 128
SUBJECT_BYTES_MAX = 1024
"""Far below the server's control line (4,096 bytes), which must also hold a reply subject."""

TOKENS_MAX = 32
READER_PREFIX = "ow-reader-"
"""Consumers of readers that keep their own position are named so: they are nobody's durables."""
INCARNATIONS_BUCKET = "OW_INCARNATIONS"
"""By stream: how often a person has accepted that it went back. Part of every position from then on."""
DEFAULT_TENANT = "default"
DEFAULT_WORKSPACE = "default"
CHAT_EVENTS_PREFIX = "chat.events"
CHAT_TOKENS_PREFIX = "chat.tokens"
CHAT_PRESENCE_PREFIX = "chat.presence"
CHAT_STOP_PREFIX = "chat.stop"
IS_ALIVE = b"alive"
"""The body of a request for a stop that only asks whether somebody is writing."""
DLQ_PREFIX = "dlq"
_UNPREFIXED_IN_DLQ = ("platform.", "gpuaas.")

_TOKEN = re.compile(rf"[!-)+-\-0-=?-\[\]-~]{{1,{TOKEN_BYTES_MAX}}}")
_FOREIGN_TOKEN = re.compile(r"[^\s.\x00-\x1f\x7f]+")


class Address(NamedTuple):
    """Where a runtime subject leads: `evt.{tenant}.{workspace}.…` or `cmd.{tenant}.{workspace}.{agent}.…`."""

    kind: str
    tenant: str
    workspace: str
    rest: tuple[str, ...]


def token(value: str, field: str = "token") -> str:
    """The value itself when it can stand as one token of a subject, else ContractViolation naming `field`."""
    if _TOKEN.fullmatch(value):
        return value
    raise ContractViolation(
        f"{field} {_wrong_token(value)}: {value[:TOKEN_BYTES_MAX]!r}",
        field=field,
        hint=f"Use 1 to {TOKEN_BYTES_MAX} letters, digits, '-', '_' or ':'.",
    )


def _wrong_token(value: str) -> str:
    if not value:
        return "is empty"
    if len(value) > TOKEN_BYTES_MAX:
        return f"is longer than {TOKEN_BYTES_MAX} bytes"
    for kind, wrong in (
        (r"[.]", "has a dot, which would make it two tokens"),
        (r"[*>]", "has a wildcard"),
        (r"[\s\x00-\x1f\x7f]", "has a space or a control character"),
        (r"[/\\]", "has a slash, which a consumer name cannot have"),
    ):
        if re.search(kind, value):
            return wrong
    return "has a character that is not ASCII"


def _join(*tokens: tuple[str, str]) -> str:
    subject = ".".join(token(value, field) for field, value in tokens)
    return check_subject(subject)


def check_subject(subject: str, field: str = "subject") -> str:
    """A subject as a publisher may name it: no wildcard, no empty token. Foreign subjects may hold any UTF-8."""
    tokens = check_filter(subject, field).split(".")
    if "*" in tokens or ">" in tokens:
        raise ContractViolation(f"{field} has a wildcard: {subject!r}", field=field)
    return subject


def check_filter(pattern: str, field: str = "subject") -> str:
    """A subject that may hold wildcards, as consumers and streams name it."""
    tokens = pattern.split(".")
    if len(pattern.encode(errors="replace")) > SUBJECT_BYTES_MAX or len(tokens) > TOKENS_MAX:
        raise ContractViolation(
            f"{field} is longer than {SUBJECT_BYTES_MAX} bytes or {TOKENS_MAX} tokens: {pattern[:80]!r}…", field=field
        )
    if not all(_FOREIGN_TOKEN.fullmatch(one) for one in tokens):
        raise ContractViolation(f"{field} has an empty token, a space or a control character: {pattern!r}", field=field)
    if ">" in tokens[:-1]:
        raise ContractViolation(f"{field} has '>' before its end: {pattern!r}", field=field)
    if not pattern.isascii() and any("\ud800" <= character <= "\udfff" for character in pattern):
        raise ContractViolation(f"{field} is not valid UTF-8: {pattern!r}", field=field)
    return pattern


def matches(subject: str, pattern: str) -> bool:
    """Whether a message on `subject` passes the filter `pattern`."""
    return subject == pattern or covers(pattern, subject)


def covers(outer: str, inner: str) -> bool:
    """Whether every subject that passes the filter `inner` also passes the filter `outer`."""
    wide, narrow = outer.split("."), inner.split(".")
    for at, want in enumerate(wide):
        if want == ">":
            return len(narrow) > at
        if at == len(narrow) or narrow[at] == ">":
            return False
        if want not in ("*", narrow[at]):
            return False
    return len(wide) == len(narrow)


def overlaps(a: str, b: str) -> bool:
    """Whether some subject passes both filters."""
    left, right = a.split("."), b.split(".")
    for one, other in zip(left, right, strict=False):
        if ">" in (one, other):
            return True
        if one != other and "*" not in (one, other):
            return False
    return len(left) == len(right)


def evt(tenant: str, workspace: str, *name: str) -> str:
    """`evt.{tenant}.{workspace}.{name…}`, with at least one token of name."""
    return _join(("kind", "evt"), ("tenant", tenant), ("workspace", workspace), *_named(name))


def cmd(tenant: str, workspace: str, agent: str, *name: str) -> str:
    """`cmd.{tenant}.{workspace}.{agent}.{name…}`, with at least one token of name."""
    return _join(("kind", "cmd"), ("tenant", tenant), ("workspace", workspace), ("agent", agent), *_named(name))


def _named(name: tuple[str, ...]) -> list[tuple[str, str]]:
    return [("name", one) for one in name or ("",)]


@lru_cache(maxsize=4096)
def parse(subject: str) -> Address:
    """Tenant and workspace of an `evt.` or `cmd.` subject. Shorter ones have no owner and are refused."""
    kind, *tokens = subject.split(".")
    if kind not in ("evt", "cmd") or len(tokens) < 3 or not all(tokens):
        raise ContractViolation(
            f"subject names no tenant and workspace: {subject!r}",
            field="subject",
            hint="Publish to evt.{tenant}.{workspace}.{name} or cmd.{tenant}.{workspace}.{agent}.{name}.",
        )
    tenant, workspace, *rest = tokens
    return Address(kind, tenant, workspace, tuple(rest))


def sr_command(*name: str) -> str:
    """`sr.commands.{name…}`, such as `sr.commands.iteration.start`."""
    return _join(("family", "sr"), ("kind", "commands"), *_named(name))


def sr_query(*name: str) -> str:
    return _join(("family", "sr"), ("kind", "queries"), *_named(name))


def chat_events(conversation_id: str, *, prefix: str = CHAT_EVENTS_PREFIX) -> str:
    return f"{prefix}.{token(conversation_id, 'conversationId')}"


def chat_tokens(conversation_id: str, *, prefix: str = CHAT_TOKENS_PREFIX) -> str:
    return f"{prefix}.{token(conversation_id, 'conversationId')}"


def chat_presence(conversation_id: str) -> str:
    return f"{CHAT_PRESENCE_PREFIX}.{token(conversation_id, 'conversationId')}"


def chat_stop(conversation_id: str) -> str:
    """Where the producer of a running answer is asked to stop: a request, which no stream holds."""
    return f"{CHAT_STOP_PREFIX}.{token(conversation_id, 'conversationId')}"


def ledger(agent: str, ledger_id: str) -> str:
    """Where an agent's ledger publishes its blocks."""
    return _join(("kind", "ledger"), ("agent", agent), ("ledger_id", ledger_id))


def dlq_request(agent: str) -> str:
    """Where an agent hands a message to the dead-letter service. Outside `dlq.>`, which only the service writes."""
    return _join(("kind", "dlq_requests"), ("agent", agent))


def dlq_replay(letter: str) -> str:
    """Where it stands what became of a letter, which is named by its own id."""
    return _join(("kind", "dlq_replays"), ("letter", letter.rpartition(".")[2]))


def dlq_subject(subject: str) -> str:
    """Where a dead letter of a message on `subject` goes. Two subjects may share one; the headers tell them apart."""
    check_subject(subject)
    if subject.split(".")[0] == DLQ_PREFIX:
        raise ContractViolation(f"a dead letter is never dead-lettered again: {subject!r}", field="subject")
    for prefix in _UNPREFIXED_IN_DLQ:
        if subject.startswith(prefix):
            return f"{DLQ_PREFIX}.{subject.removeprefix(prefix)}"
    return f"{DLQ_PREFIX}.{subject}"
