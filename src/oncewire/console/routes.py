"""The console's endpoints: the page at the path of every view, data below /api, and the acts, each with its right."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Annotated, Any, Final

import msgspec

from oncewire._ground.errors import ContractViolation, NotFound, OncewireError, Overloaded, Refused
from oncewire._ground.http import JSON, OPEN, Handler, Pages, Request, Routes
from oncewire._ground.jetstream import Client
from oncewire._ground.version import VERSION
from oncewire.console import runs
from oncewire.console.letters import Wanted
from oncewire.console.sessions import Sessions
from oncewire.console.watch import Watch, Watcher
from oncewire.dlq.letters import Filter

PAGE: Final = ("oncewire.console", "page")
VIEWS: Final = (b"streams", b"topics", b"letters", b"runs", b"pipeline")
LIMIT: Final = 50
_COMMON: Final = (
    b"X-Content-Type-Options: nosniff\r\nReferrer-Policy: no-referrer\r\nX-Frame-Options: DENY\r\n"
    b"Cross-Origin-Resource-Policy: same-origin\r\nCross-Origin-Opener-Policy: same-origin\r\n"
)
SECURITY: Final = (
    b"Content-Security-Policy: default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    b"connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
    b"require-trusted-types-for 'script'; trusted-types 'none'\r\n"
    b"Permissions-Policy: camera=(), geolocation=(), microphone=()\r\nCache-Control: no-cache\r\n" + _COMMON
)
_DATA: Final = b"Cache-Control: no-store\r\n" + _COMMON
_REPORT: Final = (
    b"Content-Security-Policy: default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
    b"frame-ancestors 'none'; sandbox\r\n" + _DATA
)
"""The report is one document with its style in it, and no script."""
_SSE: Final = b"X-Accel-Buffering: no\r\n" + _DATA

_encode = msgspec.json.Encoder().encode
_wanted = msgspec.json.Decoder(Wanted)


class _Login(msgspec.Struct, forbid_unknown_fields=True):
    key: str


class _Seen(msgspec.Struct, forbid_unknown_fields=True):
    """Losses of a stream that somebody has looked at, the newest of them found then."""

    stream: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    until_ms: int


_seen = msgspec.json.Decoder(_Seen)


class ConsoleRoutes:
    """The handlers of one console. Without sessions it knows no users: then it listens on this machine only."""

    def __init__(self, client: Client, watch: Watch, sessions: Sessions | None) -> None:
        self._client = client
        self._watch = watch
        self._sessions = sessions
        self._pages = Pages(PAGE, security=SECURITY)
        self._tasks: set[asyncio.Task[None]] = set()

    def routes(self) -> Routes:
        table = Routes(self.page)
        for method, path, action, handler in self._table():
            guarded = handler if method == "GET" else _takes_json(handler)
            table.add(method, path, guarded, action=action, has_head=path != "/api/live")
        return table

    def _table(self) -> list[tuple[str, str, str, Handler]]:
        return [
            ("GET", "/api/health", OPEN, self.health),
            ("GET", "/api/session", OPEN, self.session),
            ("POST", "/api/login", OPEN, self.login),
            ("POST", "/api/logout", OPEN, self.logout),
            ("GET", "/api/live", "read", self.live),
            ("GET", "/api/streams/{name}", "read", self.stream),
            ("GET", "/api/topics/{name}", "read", self.topic),
            ("GET", "/api/letters", "read", self.letters),
            ("GET", "/api/letters/{id}", "read", self.letter),
            ("POST", "/api/letters/replay", "replay", self.replay),
            ("POST", "/api/letters/drop", "replay", self.drop),
            ("POST", "/api/losses/acknowledge", "replay", self.acknowledge),
            ("GET", "/api/runs", "read", self.runs),
            ("GET", "/api/runs/{id}", "read", self.run),
            ("GET", "/report", "read", self.report),
        ]

    # ---- the page

    def page(self, request: Request) -> None:
        if self._pages.serve(request):
            return
        _, first, *rest = request.path.split(b"/")
        if request.method not in (b"GET", b"HEAD") or first in (b"api", b"assets"):
            request.refuse(404, "NOT_FOUND", "not found", _DATA)
        else:
            is_view = first in VIEWS and len(rest) < 2
            self._pages.serve(request, b"/index.html", 200 if is_view else 404)

    # ---- who is there

    def health(self, request: Request) -> None:
        request.respond(200, b'{"status":"ok"}', extra=_DATA)

    def session(self, request: Request) -> None:
        principal = request.principal
        _answer(
            request,
            {
                "version": VERSION,
                "name": principal.name,
                "needs_login": not principal.may("read"),
                "has_login": self._sessions is not None,
                "may_replay": principal.may("replay"),
            },
        )

    def login(self, request: Request) -> None:
        if self._sessions is None:
            raise Refused("nobody has to log in here")
        _, line = self._sessions.login(_read(request, msgspec.json.Decoder(_Login)).key.strip())
        request.respond(200, b'{"status":"ok"}', extra=line + _DATA)

    def logout(self, request: Request) -> None:
        line = self._sessions.logout(request) if self._sessions else b""
        request.respond(200, b'{"status":"ok"}', extra=line + _DATA)

    # ---- looking

    def live(self, request: Request) -> None:
        stream = request.stream("text/event-stream; charset=utf-8", _SSE)
        if stream is None:
            return
        if not self._watch.add(Watcher(stream)):
            stream.write(b'event: farewell\ndata: {"text":"too many pages are open"}\n\n')
            stream.end()

    def stream(self, request: Request) -> None:
        self._later(request, self._watch.surveyor.detail(request.params["name"]))

    def topic(self, request: Request) -> None:
        if self._watch.topics is None:
            raise NotFound("no broker is known to the console")
        self._later(request, self._watch.topics.detail(request.params["name"]))

    def letters(self, request: Request) -> None:
        asked = {name: request.query.get(name, "") for name in ("cause", "consumer", "subject", "stream")}
        chosen = Filter(
            cause=asked["cause"], consumer=asked["consumer"], subject=asked["subject"], stream=asked["stream"]
        )
        before, limit = _number(request, "before", 0), _number(request, "limit", LIMIT)

        async def page() -> dict[str, Any]:
            await self._watch.letters.catch_up()
            return self._watch.letters.page(chosen, before, limit)

        self._later(request, page())

    def letter(self, request: Request) -> None:
        self._later(request, self._watch.letters.detail(request.params["id"]))

    def runs(self, request: Request) -> None:
        self._later(request, self._runs(request.query.get("source", "")))

    async def _runs(self, wanted: str) -> dict[str, Any]:
        lake = self._watch.lake
        has_runs = await lake.has_runs()
        source = wanted or ("lake" if has_runs else "live")
        if source == "lake":
            found = await lake.runs() if has_runs else []
        else:
            found = [runs.run_row(run) for run, _ in await self._live_runs()]
        return {"source": source, "has_lake": has_runs, "runs": found}

    async def _live_runs(self) -> list[tuple[Any, list[Any]]]:
        await self._watch.surveyor.be_fresh()
        return await runs.live_runs(self._client, self._watch.surveyor.rows)

    def run(self, request: Request) -> None:
        query = request.query
        self._later(request, self._run(request.params["id"], query.get("tenant", ""), query.get("source", "")))

    async def _run(self, name: str, tenant: str, source: str) -> dict[str, Any]:
        lake = self._watch.lake
        if source == "lake" or (not source and await lake.has_runs()):
            try:
                return {"source": "lake"} | await lake.run(tenant, name)
            except NotFound:
                if source:
                    raise  # else it may be newer than the lake
        return {"source": "live"} | runs.find_run(await self._live_runs(), tenant, name)

    def report(self, request: Request) -> None:
        async def page() -> None:
            text = await self._watch.lake.report()
            request.respond(200, text.encode("utf-8", "replace"), "text/html; charset=utf-8", _REPORT)

        self._later(request, page())

    # ---- acting

    def replay(self, request: Request) -> None:
        wanted = _letters_meant(request)
        if wanted.is_dry_run:
            self._later(request, self._watch.jobs.try_out(wanted))
        else:
            _answer(request, self._watch.jobs.replay(wanted, request.principal.name, _what(wanted)))

    def drop(self, request: Request) -> None:
        wanted = _letters_meant(request)
        _answer(request, self._watch.jobs.drop(wanted, request.principal.name, _what(wanted)))

    def acknowledge(self, request: Request) -> None:
        seen: _Seen = _read(request, _seen)
        self._later(request, self._watch.acknowledge(seen.stream, seen.until_ms))

    # ---- answers that take a while

    def _later(self, request: Request, work: Coroutine[Any, Any, Any]) -> None:
        async def answered() -> None:
            try:
                found = await work
            except OncewireError as error:
                request.fail(error)
            except TimeoutError:
                request.fail(Overloaded("no answer in time", retry_after_s=1.0))
            else:
                if request.is_open:
                    _answer(request, found)

        task = asyncio.get_running_loop().create_task(answered())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _answer(request: Request, value: Any) -> None:
    request.respond(200, _encode(value), JSON, _DATA)


def _takes_json(handler: Handler) -> Handler:
    """What changes something comes as JSON, which a page of another origin cannot send without asking first: that is a
    second lock behind the front's, which knows no other origin here."""

    def guarded(request: Request) -> None:
        if request.header(b"content-type").partition(";")[0].strip() != JSON:
            raise ContractViolation("send application/json", field="Content-Type")
        handler(request)

    return guarded


def _read(request: Request, decoder: Any) -> Any:
    try:
        return decoder.decode(request.body)
    except (msgspec.DecodeError, UnicodeDecodeError) as wrong:
        raise ContractViolation(str(wrong)) from None


def _letters_meant(request: Request) -> Wanted:
    wanted: Wanted = _read(request, _wanted)
    if wanted.filter.is_empty:
        raise Refused("which letters?", hint="Name some, or a cause.")
    return wanted


def _what(wanted: Wanted) -> str:
    if wanted.ids:
        return f"letter {wanted.ids[0]}" if len(wanted.ids) == 1 else f"{len(wanted.ids)} letters"
    return ", ".join(one for one in (wanted.cause, wanted.consumer, wanted.subject, wanted.stream) if one)


def _number(request: Request, name: str, default: int) -> int:
    sent = request.query.get(name, "")
    if not sent:
        return default
    if not (sent.isascii() and sent.isdigit()) or len(sent) > 18:
        raise ContractViolation(f"{name} must be a number", field=name)
    return int(sent)
