"""The broker's endpoints: each turns a request into one call of the engine, and its answer into a response.

Nothing is decided here that two engines could decide differently. A handler hands the engine a callback and returns;
the answer is written when the engine says that the effect is durable.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from oncewire._ground.contracts.broker import Delivery, ProduceBody, encode_delivery
from oncewire._ground.contracts.codec import ENCODE
from oncewire._ground.errors import ContractViolation, NotFound, OncewireError, PermissionDenied
from oncewire._ground.http import ANYONE, EVERY_TENANT, NDJSON, OPEN, Handler, Request, Routes, Server
from oncewire._ground.metrics import CONTENT_TYPE, Histogram, Page
from oncewire._ground.tracing import Tracer
from oncewire._ground.version import VERSION
from oncewire.broker import metrics, openapi, traces, wire
from oncewire.broker.engine import Engine, IdempotencyStatus, Produced, Settle, Subscription, TopicCreated, TopicShown
from oncewire.broker.reader import StreamReader
from oncewire.broker.wire import Act, Sizes, Step

T = TypeVar("T")
_OK = b'{"status":"ok"}'


class BrokerRoutes:
    """The handlers of one engine."""

    def __init__(
        self, engine: Engine, sizes: Sizes | None = None, commit: str = "unknown", tracer: Tracer | None = None
    ) -> None:
        self.engine = engine
        self._tracer = tracer
        self.sizes = sizes or Sizes()
        self.commit = commit
        self.rejected: Counter[str] = Counter()
        """Produces that were refused for want of room, by reason."""
        self.produce_seconds = Histogram()
        self.server: Server | None = None
        """Whose figures /metrics shows besides; set by who starts it."""

    def routes(self) -> Routes:
        table = Routes(_unknown)
        for method, path, action, handler in self._table():
            # A consume changes who holds what: a HEAD that did that would be a trap.
            table.add(method, path, handler, action=action, has_head=path != "/v1/consume")
        return table

    def _table(self) -> list[tuple[str, str, str, Handler]]:
        return [
            ("GET", "/v1/healthz", OPEN, lambda request: request.respond(200, _OK)),
            ("GET", "/v1/readyz", OPEN, self.readyz),
            ("GET", "/v1/version", OPEN, self.version),
            ("GET", "/v1/openapi.json", OPEN, lambda request: request.respond(200, openapi.document())),
            ("GET", "/metrics", "metrics", self.metrics),
            ("GET", "/v1/topics", "read", self.list_topics),
            ("POST", "/v1/topics", "admin", self.create_topic),
            ("GET", "/v1/topics/{name}", "read", self.show_topic),
            ("DELETE", "/v1/topics/{name}", "admin", self.delete_topic),
            ("POST", "/v1/produce", "produce", self.produce),
            ("GET", "/v1/consume", "consume", self.consume),
            ("POST", "/v1/ack", "consume", partial(self.settle, act="ack")),
            ("POST", "/v1/nack", "consume", partial(self.settle, act="nack")),
            ("POST", "/v1/extend", "consume", partial(self.settle, act="extend")),
            ("POST", "/v1/idempotency/begin", "consume", partial(self.idempotency, act="begin")),
            ("POST", "/v1/idempotency/success", "consume", partial(self.idempotency, act="success")),
            ("POST", "/v1/idempotency/failure", "consume", partial(self.idempotency, act="failure")),
        ]

    # ---- the broker itself

    def readyz(self, request: Request) -> None:
        problems = self.engine.problems()
        if problems:
            request.respond(503, ENCODE({"status": "not ready", "problems": problems}))
        else:
            request.respond(200, _OK)

    def version(self, request: Request) -> None:
        shown = {"version": VERSION, "commit": self.commit, "wal_enabled": self.engine.is_durable}
        request.respond(200, ENCODE(shown))

    def metrics(self, request: Request) -> None:
        page, principal = Page(), request.principal
        sees_all = principal is ANYONE or principal.holds(EVERY_TENANT)
        metrics.collect(page, self, None if sees_all else principal.tenant)
        request.respond(200, page.text().encode(), CONTENT_TYPE)

    # ---- topics

    def list_topics(self, request: Request) -> None:
        def done(names: list[str] | OncewireError) -> None:
            _answer(request, names, lambda: request.respond(200, ENCODE({"topics": _readable(request, names)})))

        self.engine.list_topics(request.principal.tenant, done)

    def create_topic(self, request: Request) -> None:
        name, partitions = wire.read_topic(request, self.engine.limits.partitions_max)
        request.principal.require("admin", name)

        def done(topic: TopicCreated | OncewireError) -> None:
            if isinstance(topic, OncewireError):
                _fail(request, topic)
            else:
                shown = {"status": "created", "name": topic.name, "partitions": topic.partitions}
                request.respond(201, ENCODE(shown))

        self.engine.create_topic(request.principal.tenant, name, partitions, done)

    def show_topic(self, request: Request) -> None:
        def done(topic: TopicShown | OncewireError) -> None:
            _answer_at_path(request, topic, lambda: request.respond(200, ENCODE(topic)))

        name = wire.read_name(request.params["name"])
        request.principal.require("read", name)
        self.engine.show_topic(request.principal.tenant, name, done)

    def delete_topic(self, request: Request) -> None:
        def done(error: OncewireError | None) -> None:
            _answer_at_path(request, error, lambda: request.respond(204))

        name = wire.read_name(request.params["name"])
        request.principal.require("admin", name)
        self.engine.delete_topic(request.principal.tenant, name, done)

    # ---- messages

    def produce(self, request: Request) -> None:
        if wire.is_batch(request):
            self._produce_lines(request)
            return
        body = wire.read_produce(request, self.sizes)
        _check_produce(request, body)
        began = time.perf_counter()

        def done(produced: Produced | OncewireError) -> None:
            if isinstance(produced, OncewireError):
                self._count_refusal(_fail(request, produced))
            else:
                request.respond(200, wire.PRODUCED % ENCODE(produced.topic))
                self._told([(body, produced)], time.perf_counter() - began)

        self.engine.produce(request.principal.tenant, body, done)

    def _produce_lines(self, request: Request) -> None:
        if b"idempotency-key" in request.headers:
            raise ContractViolation("the header Idempotency-Key cannot stand for many messages")

        def read(line: bytes) -> ProduceBody:
            body = wire.with_trace(request, wire.read_produce_line(line, self.sizes))
            _check_produce(request, body)
            return body

        sent = wire.read_lines(request, self.sizes, read)

        def show(result: Produced | OncewireError) -> bytes:
            if isinstance(result, OncewireError):
                self._count_refusal(wire.failure_of(result)[1].reason)
            return wire.produced_line(result)

        good = [body for body in sent if isinstance(body, ProduceBody)]
        began = time.perf_counter()

        def done(results: Sequence[Produced | OncewireError] | OncewireError) -> None:
            _answer_lines(request, sent, show, results)
            if not isinstance(results, OncewireError):
                stored = [(body, one) for body, one in zip(good, results, strict=True) if isinstance(one, Produced)]
                self._told(stored, time.perf_counter() - began)

        if good:
            self.engine.produce_many(request.principal.tenant, good, done)
        else:
            done([])

    def _told(self, stored: Sequence[tuple[ProduceBody, Produced]], took_s: float) -> None:
        """These are durable, and their producer knows it."""
        self.produce_seconds.observe(took_s, len(stored))
        if self._tracer is not None:
            for body, produced in stored:
                traces.tell(self._tracer, body, produced, took_s)

    def _count_refusal(self, reason: str) -> None:
        if reason:
            self.rejected[reason] += 1

    def consume(self, request: Request) -> None:
        wanted, taking = wire.read_consume(request, self.engine.limits.lease_ms_max, self.sizes)
        _check_consume(request, wanted.topic, wanted.group)
        tenant = request.principal.tenant
        if taking is None:
            reader = StreamReader(request)
            self.engine.subscribe(tenant, wanted, reader, reader.begin)
            return

        def done(found: list[Delivery] | OncewireError) -> None:
            if isinstance(found, OncewireError):
                _fail(request, found)
            else:
                lines = b"".join(encode_delivery(delivery) + b"\n" for delivery in found)
                request.respond(200, lines, NDJSON)

        poll: Subscription = self.engine.take(tenant, wanted, taking.messages_max, taking.wait_ms, done)
        if request.is_open:
            request.on_close = poll.close

    def settle(self, request: Request, act: Act) -> None:
        if wire.is_batch(request):
            self._settle_lines(request, act)
            return
        settle = wire.read_settle(request, act, self.engine.limits.lease_ms_max)
        _check_consume(request, settle.topic, settle.group)

        def done(error: OncewireError | None) -> None:
            if error is None:
                request.respond(204)
            else:
                _fail(request, error)

        self.engine.settle(request.principal.tenant, settle, done)

    def _settle_lines(self, request: Request, act: Act) -> None:
        lease_ms_max = self.engine.limits.lease_ms_max

        def read(line: bytes) -> Settle:
            settle = wire.read_settle_line(line, act, lease_ms_max)
            _check_consume(request, settle.topic, settle.group)
            return settle

        sent = wire.read_lines(request, self.sizes, read)
        good = [settle for settle in sent if isinstance(settle, Settle)]
        done = partial(_answer_lines, request, sent, partial(wire.settled_line, act))
        if good:
            self.engine.settle_many(request.principal.tenant, good, done)
        else:
            done([])

    def idempotency(self, request: Request, act: Step) -> None:
        step = wire.read_idempotency(request, act)
        _check_consume(request, step.topic, step.group)
        _check_tenant(request, step.tenant_id)

        def done(status: IdempotencyStatus | OncewireError) -> None:
            _answer(request, status, lambda: request.respond(200, ENCODE(status)))

        self.engine.idempotency(request.principal.tenant, step, done)


def _unknown(request: Request) -> None:
    is_ours = request.path == b"/v1" or request.path.startswith(b"/v1/")
    request.refuse(404, "NOT_FOUND", "not found" if is_ours else "use /v1/* endpoints")


def _check_produce(request: Request, body: ProduceBody) -> None:
    """The topic that is asked for, and the one that the envelope sends it to instead."""
    envelope = body.envelope
    request.principal.require("produce", body.topic)
    if envelope is not None:
        if envelope.target_topic:
            request.principal.require("produce", envelope.target_topic)
        _check_tenant(request, envelope.tenant_id)


def _check_consume(request: Request, topic: str, group: str) -> None:
    request.principal.require("consume", topic)
    if request.principal.is_bound("group"):
        request.principal.require("group", group)


def _readable(request: Request, names: list[str] | OncewireError) -> list[str]:
    assert not isinstance(names, OncewireError)
    return [name for name in names if request.principal.may("read", name)]


def _check_tenant(request: Request, sent: str) -> None:
    """With authentication the tenant is the credential's; without, a body's tenant is carried as sent."""
    if request.principal is not ANYONE and sent not in ("", request.principal.tenant):
        raise PermissionDenied("tenant_id is not the tenant of the credential")


def _fail(request: Request, error: OncewireError) -> str:
    """Answer with an error of the engine; the reason when it was for want of room."""
    status, failure = wire.failure_of(error)
    extra = b""
    if status in (429, 503):
        extra = b"Retry-After: %d\r\n" % max(1, -(-failure.retry_after_ms // 1000))
    request.respond(status, ENCODE(failure), extra=extra)
    return failure.reason


def _answer(request: Request, result: object, respond: Callable[[], None]) -> None:
    if isinstance(result, OncewireError):
        _fail(request, result)
    else:
        respond()


def _answer_at_path(request: Request, result: object, respond: Callable[[], None]) -> None:
    """The path names a topic: one that is not there is an unknown path."""
    if isinstance(result, NotFound):
        request.refuse(404, "NOT_FOUND", result.message)
    else:
        _answer(request, result, respond)


def _answer_lines(
    request: Request,
    sent: Sequence[object],
    show: Callable[[T | OncewireError], bytes],
    results: Sequence[T | OncewireError] | OncewireError,
) -> None:
    """One line for each line: its own refusal, or what the engine made of it."""
    if isinstance(results, OncewireError):
        _fail(request, results)
        return
    coming = iter(results)
    lines = [show(line if isinstance(line, OncewireError) else next(coming)) for line in sent]
    request.respond(200, b"\n".join(lines) + b"\n", NDJSON)
