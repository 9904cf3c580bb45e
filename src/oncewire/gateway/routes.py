"""The gateway's endpoints: the WebSocket upgrade on any path, SSE, history, stop, health and metrics."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Final

import msgspec

from oncewire._ground.contracts.codec import ENCODE
from oncewire._ground.contracts.subjects import token
from oncewire._ground.errors import (
    AuthenticationFailed,
    ContractViolation,
    NoResponders,
    OncewireError,
    PermissionDenied,
)
from oncewire._ground.http import OPEN, Handler, Pages, Request, Routes
from oncewire._ground.metrics import CONTENT_TYPE, Page
from oncewire.gateway import metrics, sse, websocket
from oncewire.gateway.service import Gateway, heard_by

LIMIT: Final = 100
LIMIT_MAX: Final = 1_000
STOP_S_MAX: Final = 2.0


class GatewayRoutes:
    """The handlers of one gateway."""

    def __init__(self, gateway: Gateway, *, pages: Pages | None = None) -> None:
        self.gateway = gateway
        self.pages = pages

    def routes(self) -> Routes:
        table = Routes(self._upgradable(self.page))
        for method, path, action, handler in self._table():
            either = self._upgradable(handler) if method == "GET" else handler
            table.add(method, path, either, action=action, has_head=path != "/stream/{id}")
        table.tells_pages = True
        return table

    def _table(self) -> list[tuple[str, str, str, Handler]]:
        return [
            ("GET", "/health", OPEN, self.health),
            ("GET", "/metrics", "metrics", self.metrics),
            ("GET", "/conversations/{id}/messages", "join", self.messages),
            ("GET", "/stream/{id}", "join", self.stream),
            ("POST", "/stream/{id}/stop", "speak", self.stop),
        ]

    # ---- who may ask

    def _upgradable(self, handler: Handler) -> Handler:
        """A WebSocket may begin on any path."""

        def either(request: Request) -> None:
            if websocket.is_offered(request):
                self._accept(request)
            elif request.refused is not None:
                raise request.refused
            else:
                handler(request)

        return either

    def _accept(self, request: Request) -> None:
        """A page that may not join gets a WebSocket that only says why."""
        try:
            if request.refused is not None:
                raise request.refused
            request.principal.require("join")
        except (AuthenticationFailed, PermissionDenied) as refused:
            if not request.is_offer_of_a_page:
                raise
            websocket.accept(self.gateway, request, refused)
        else:
            websocket.accept(self.gateway, request)

    def _conversation(self, request: Request, action: str) -> str:
        conversation_id = token(request.params["id"], "conversationId")
        request.principal.require(action, conversation_id)
        return conversation_id

    # ---- endpoints

    def health(self, request: Request) -> None:
        problem = self.gateway.node.problem
        shown = {"status": "not ready", "problems": [problem]} if problem else {"status": "ok"}
        request.respond(503 if problem else 200, ENCODE(shown))

    def metrics(self, request: Request) -> None:
        page = Page()
        metrics.collect(page, self.gateway)
        request.respond(200, page.text().encode(), CONTENT_TYPE)

    def page(self, request: Request) -> None:
        if self.pages is None or not self.pages.serve(request):
            request.refuse(404, "NOT_FOUND", "not found")

    def stream(self, request: Request) -> None:
        conversation = heard_by(request.principal, self._conversation(request, "join"))
        sse.begin(self.gateway, request, conversation)

    def messages(self, request: Request) -> None:
        conversation_id = self._conversation(request, "join")
        after = _number(request, "after", 0, 2**53)
        limit = _number(request, "limit", LIMIT, LIMIT_MAX)
        self._later(request, self._messages(request, conversation_id, after, max(1, limit)))

    async def _messages(self, request: Request, conversation_id: str, after: int, limit: int) -> None:
        conversation = heard_by(request.principal, conversation_id)
        bodies, is_complete = await self.gateway.node.history.messages(conversation, after, limit + 1)
        shown = bodies[:limit]
        last = msgspec.json.decode(shown[-1])["sequence"] if len(bodies) > limit else None
        answer = {
            "messages": [msgspec.Raw(body) for body in shown],
            "next": last,
            "complete": is_complete,
        }
        request.respond(200, ENCODE(answer))

    def stop(self, request: Request) -> None:
        self._later(request, self._stop(request, self._conversation(request, "speak")))

    async def _stop(self, request: Request, conversation_id: str) -> None:
        """Ask whoever writes the answer to end it; disconnecting stops nothing."""
        tokens, conversation = self.gateway.node.tokens, heard_by(request.principal, conversation_id)
        try:
            if conversation.tenant is not None and not await tokens.is_written(conversation):
                raise NoResponders("nobody writes there")
            stopped = await tokens.stop(conversation, request.body, STOP_S_MAX)
        except NoResponders:
            request.refuse(404, "NOT_FOUND", "no answer is being written")
            return
        request.respond(202, ENCODE({"stopped": stopped}))

    def _later(self, request: Request, work: Coroutine[Any, Any, None]) -> None:
        async def answered() -> None:
            try:
                await work
            except OncewireError as error:
                request.fail(error)

        self.gateway.node.spawn(answered())


def _number(request: Request, name: str, default: int, most: int) -> int:
    sent = request.query.get(name, "")
    if not sent:
        return default
    if not (sent.isascii() and sent.isdigit()) or len(sent) > 16 or int(sent) > most:
        raise ContractViolation(f"{name} must be a number up to {most}", field=name)
    return int(sent)
