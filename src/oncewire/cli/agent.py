"""`oncewire agent`: run agents, see how they stand, prove what they did."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click
import msgspec

from oncewire._ground import topology
from oncewire._ground.errors import InvalidSetting, Refused
from oncewire._ground.jetstream import Client, options_from
from oncewire._ground.jetstream.losses import Loss, acknowledge
from oncewire._ground.ledger.stores import open_store
from oncewire._ground.settings import Settings, mask_url
from oncewire._ground.tracing import Tracer
from oncewire.agent import Agent, Runner, metrics
from oncewire.agent import sources as durables
from oncewire.agent import status as looking
from oncewire.agent.outflow import LEDGER_STREAM
from oncewire.agent.replay import Difference, Report, recompute_hash
from oncewire.agent.replay import replay as run_again
from oncewire.agent.run import PartEnded, own_the_process
from oncewire.agent.status import Status
from oncewire.cli import face, observe
from oncewire.cli.board import Board, board_of

if TYPE_CHECKING:
    from oncewire._ground.ledger.store import Store

SHOW_S = 5.0
START_S = 1.0
STORE_HELP = "The ledger: sqlite:///file.db or postgresql://user@host/database [ONCEWIRE_STORE]."


@click.group()
def agent() -> None:
    """Run agents, see how they stand, prove what they did.

    \b
    Examples:
      oncewire agent run biller:agent --store sqlite:///biller.db
      oncewire agent status biller:agent --store sqlite:///biller.db
    """


def _with_agent(run: face.Run) -> face.Run:
    """A command on an agent and the server."""
    run = face.setting_options("data", "nats_url")(face.command(run))
    return click.argument("target", metavar="MODULE:AGENT")(run)


def _with_ledger(run: face.Run) -> face.Run:
    """A command that needs the agent's ledger too."""
    run = click.option("--schema", default="", help="Schema of the ledger's tables (PostgreSQL).")(_with_agent(run))
    return click.option("--store", "store_url", default="", help=STORE_HELP)(run)


def load_agent(target: str) -> Agent:
    """The agent behind `module:name`, looked for in the current folder first."""
    found = face.load_named(target, "AGENT", hint="For `agent = Agent(…)` in biller.py: biller:agent.")
    if not isinstance(found, Agent):
        raise Refused(f"{target} is {'not there' if found is None else type(found).__name__}, not an Agent")
    return found


def _opened(target: str, store_url: str, schema: str, settings: Settings) -> tuple[Agent, Store]:
    url = store_url or settings.agent_store
    if not url:
        raise InvalidSetting("no ledger is named", hint="Pass --store, or set ONCEWIRE_STORE (agent.store).")
    found = load_agent(target)
    return found, open_store(url, schema=schema, handler_timeout_s=found.handler_timeout_s)


# ---- run


@agent.command()
@face.setting_options("ledger_keep_s", "nats_system_key", "nats_monitor_url", *observe.OPTIONS)
@_with_ledger
def run(*, target: str, store_url: str, schema: str, as_json: bool, **flags: Any) -> None:
    """Handle messages until Ctrl-C or SIGTERM, then finish what is in hand.

    \b
    Examples:
      oncewire agent run biller:agent --store sqlite:///biller.db
      oncewire agent run biller:agent --store postgresql://app@db/app --json
    \b
    Start it as often as you like: on one machine with the same SQLite file, on several with
    PostgreSQL. The streams must be there: `oncewire topology apply`.
    """
    settings = face.load_service(flags)
    found, store = _opened(target, store_url, schema, settings)
    own_the_process()
    try:
        face.run_through(_run(found, store, settings, as_json))
    except PartEnded as error:
        facts = {"code": "part_ended", "message": str(error), "retryable": True}
        face.show_error(str(error), "The log has the traceback. Start the agent again.", facts, as_json)
        sys.exit(face.EXIT_FAILED)


async def _run(found: Agent, store: Store, settings: Settings, as_json: bool) -> None:
    board = board_of(settings, as_json, "agent")
    with observe.tracers(settings) as tracer:
        await _run_traced(found, store, settings, board, tracer("agent"), is_live=as_json or sys.stdout.isatty())


async def _run_traced(
    found: Agent, store: Store, settings: Settings, board: Board, tracer: Tracer | None, *, is_live: bool
) -> None:
    async with Client(options_from(settings, name=f"oncewire-agent-{found.name}")) as client:
        runner = Runner(found, client, store, settings, tracer=tracer)
        async with observe.serving(observer(settings, runner)) as watched_at:
            with _signals(runner) as asked:
                showing = asyncio.ensure_future(_show(board, runner, is_live=is_live))
                try:
                    await _serve(board, found, runner, settings, watched_at)
                except asyncio.CancelledError:
                    if not asked:
                        raise
                    board.line("stopped before it had started")
                finally:
                    showing.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await showing
    board.event("end", counts=runner.counts if runner.is_started else {})


async def _serve(board: Board, found: Agent, runner: Runner, settings: Settings, watched_at: str) -> None:
    async with found.lifespan(found), runner:
        _show_start(board, runner, settings, watched_at)
        await runner.wait()
        board.line("draining")
        board.event("draining", in_flight=runner.in_flight)
    board.line(f"stopped: {_counts(runner)}")


def observer(settings: Settings, runner: Runner) -> observe.Observer:
    """Of what is declared, it looks at the streams of its inputs and at the ledger's."""

    def part(whole: topology.Topology) -> topology.Topology:
        names = {LEDGER_STREAM, *(stream for stream, _ in runner.opened)}
        return msgspec.structs.replace(
            whole, streams=tuple(one for one in whole.streams if one.name in names), consumers=()
        )

    url = runner.store.url if runner.store.url.startswith("postgres") else ""
    found = observe.Observer(settings, runner.client, part=part, postgres_url=url, sees_losses=True)
    found.watch(watched(runner), runner.client)
    return found


def watched(runner: Runner) -> observe.Watched:
    return observe.Watched(
        "agent", lambda page: metrics.collect(page, runner), lambda: runner.trouble, lambda: metrics.look(runner)
    )


@contextlib.contextmanager
def _signals(runner: Runner) -> Iterator[list[int]]:
    """SIGINT and SIGTERM drain the agent, or end its start, which may be waiting for the ledger. Those that came."""
    loop, starting = asyncio.get_running_loop(), asyncio.current_task()
    assert starting is not None
    asked: list[int] = []

    def stop(number: int) -> None:
        asked.append(number)
        if runner.is_started:
            runner.ask_to_stop()
        else:
            starting.cancel()

    with contextlib.suppress(ValueError):  # outside the main thread there are no signals: whoever started it ends it
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)
    yield asked
    if asked:
        starting.uncancel()


def _show_start(board: Board, runner: Runner, settings: Settings, watched_at: str) -> None:
    names = [f"{one.source.stream}/{one.source.consumer}" for one in runner.opened.values()]
    where, ledger = mask_url(settings.nats_url), mask_url(runner.store.url)
    handlers = len(runner.agent.handlers)
    board.line(f"agent {runner.agent.full_name}: {handlers} handlers on {', '.join(names)}")
    board.line(f"  {where}, ledger {ledger} ({runner.ledger.id}); Ctrl-C drains it")
    if runner.is_unclean:
        board.line("  the last run did not stop cleanly: one message at a time until its messages are settled")
    facts = {"agent": runner.agent.full_name, "consumers": names, "is_unclean": runner.is_unclean}
    board.event("serving", nats_url=where, store=ledger, ledger=runner.ledger.id, metrics_url=watched_at, **facts)


async def _show(board: Board, runner: Runner, *, is_live: bool) -> None:
    """Every few seconds what was done, where somebody looks; what is wrong, always."""
    shown, trouble = "", ""
    while True:
        await asyncio.sleep(SHOW_S if runner.is_started else START_S)
        now = runner.trouble if runner.is_started else runner.waits_for
        if now != trouble:
            trouble = now
            board.line(f"  waiting: {trouble}" if trouble else "  going on")
            board.event("trouble" if trouble else "recovered", text=trouble)
        text = _counts(runner) if runner.is_started else ""
        if is_live and text != shown:
            shown = text
            board.line(f"  {text}, {runner.in_flight} in hand")
            board.event("counts", counts=runner.counts, in_flight=runner.in_flight)


def _counts(runner: Runner) -> str:
    return ", ".join(f"{count} {name}" for name, count in runner.counts.items()) or "nothing yet"


# ---- status, hash, replay, apply


@agent.command()
@_with_ledger
def status(*, target: str, store_url: str, schema: str, as_json: bool, **flags: Any) -> None:
    """How far behind it is, what is in flight or incomplete, and the last error.

    \b
    Example:
      oncewire agent status biller:agent --store sqlite:///biller.db --json
    \b
    Exit code 1 when messages wait and nobody pulls, or a loss is not acknowledged.
    """
    settings = face.load_here(flags).settings
    found, store = _opened(target, store_url, schema, settings)
    answers: list[Status] = []

    async def ask() -> None:
        async with Client(options_from(settings, name="oncewire-agent-status")) as client:
            answers.append(await looking.status(client, store, found, settings))

    try:
        face.run(ask())
    finally:
        store.close()
    if as_json:
        face.print_json(msgspec.to_builtins(answers[0]) | {"is_well": answers[0].is_well})
    else:
        _print_status(answers[0])
    sys.exit(0 if answers[0].is_well else face.EXIT_NOT_WELL)


def _print_status(found: Status) -> None:
    ledger = found.ledger
    face.say(f"agent {found.agent}, ledger {ledger.id}, block {ledger.block} (confirmed up to {ledger.confirmed})")
    remembers = f"{found.keep_s / 86_400:.1f} days" if found.keep_s else "for ever"
    forgotten = f"; blocks up to {ledger.base} are forgotten" if ledger.base else ""
    face.say(f"  {'remembers':<20} {remembers}{forgotten}")
    for one in found.sources:
        face.say(f"  {one.stream:<20} lag {one.lag}, in flight {one.in_flight}, redelivered {one.redelivered}")
    face.say(f"  {'incomplete':<20} {ledger.incomplete} inputs, {ledger.unpublished} effects unconfirmed")
    face.say(f"  {'last error':<20} {ledger.last_error or 'none'}")
    for problem in found.problems:
        face.say(problem, sign=click.style("! ", fg="yellow", bold=True))


@agent.command("hash")
@_with_ledger
def hash_(*, target: str, store_url: str, schema: str, as_json: bool, **flags: Any) -> None:
    """The state hash, stored and added up anew from every entry of the ledger.

    It is the same for any order of arrival, redelivery and number of processes.

    \b
    Example:
      oncewire agent hash biller:agent --store sqlite:///biller.db
    \b
    Exit code 1 when the ledger does not add up.
    """
    report = recompute_hash(*_opened(target, store_url, schema, face.load(flags).settings))
    if as_json:
        face.print_json(msgspec.to_builtins(report) | {"is_equal": report.is_equal})
    else:
        face.say(report.recomputed)
        face.say(f"  {report.agent}, ledger {report.ledger}, blocks {report.first} to {report.last}")
        _print_difference(report.difference)
        if not report.is_equal and report.difference is None:
            face.say(f"the ledger says {report.stored}", sign=_sign(is_well=False))
    sys.exit(0 if report.is_equal else face.EXIT_NOT_WELL)


@agent.command()
@_with_ledger
def replay(*, target: str, store_url: str, schema: str, as_json: bool, **flags: Any) -> None:
    """Run everything again that is done, and compare: effects, rows, state, hash. Changes and publishes nothing.

    \b
    Example:
      oncewire agent replay biller:agent --store sqlite:///biller.db
    \b
    Exit code 1 when something differs; the first input at which it does is named.
    """
    report = run_again(*_opened(target, store_url, schema, face.load(flags).settings))
    if as_json:
        face.print_json(msgspec.to_builtins(report) | {"is_equal": report.is_equal})
    else:
        _print_replay(report)
    sys.exit(0 if report.is_equal else face.EXIT_NOT_WELL)


def _print_replay(report: Report) -> None:
    face.say(f"state hash {report.hash.recomputed}", sign=_sign(is_well=report.hash.is_equal))
    compared = f"{report.inputs} inputs run again, {report.effects} effects compared"
    face.say(f"{compared}", sign=_sign(is_well=report.difference is None))
    face.say(f"tables: {', '.join(report.tables) or 'none written'}", sign=_sign(is_well=not report.rows))
    _print_difference(report.hash.difference or report.difference)
    for table in report.rows:
        face.say(f"  {table}")
    if report.state is not None:
        face.say(f"  state {report.state}")


def _print_difference(found: Difference | None) -> None:
    if found is not None:
        where = f"{found.subject} at {found.stream} {found.sequence} ({found.identity})" if found.subject else "ledger"
        face.say(f"block {found.block}, {where}: {found.what}", sign=_sign(is_well=False))


def _sign(*, is_well: bool) -> str:
    return click.style("✓ ", fg="green", bold=True) if is_well else click.style("✗ ", fg="red", bold=True)


@agent.command()
@click.option("--accept-loss", default="", metavar="STREAM", help="Go on with a stream that lost something.")
@_with_agent
def apply(*, target: str, accept_loss: str, as_json: bool, **flags: Any) -> None:
    """Bring the agent's own durables to its handlers and limits: filters, ack_wait, max_deliver.

    \b
    Examples:
      oncewire agent apply biller:agent
      oncewire agent apply biller:agent --accept-loss MESHFORGE_EVENTS
    \b
    Consumers that the catalog declares are left alone: those are `oncewire topology apply`.
    """
    settings = face.load_here(flags).settings
    found = load_agent(target)
    changed: dict[str, list[str]] = {}
    accepted: list[Loss] = []

    async def work() -> None:
        async with Client(options_from(settings, name="oncewire-agent-apply")) as client:
            changed.update(await durables.apply(client, found, settings))
            if accept_loss:
                accepted.extend(await acknowledge(client, accept_loss, time.time_ns() // 1_000_000))

    face.run(work())
    if as_json:
        face.print_json({"consumers": changed, "accepted": msgspec.to_builtins(accepted)})
        return
    for name, what in changed.items():
        face.say(f"{name}: {', '.join(what) or 'as it should be'}")
    for loss in accepted:
        face.say(f"accepted: {loss.sentence}")


@agent.command()
@_with_ledger
def adopt(*, target: str, store_url: str, schema: str, as_json: bool, **flags: Any) -> None:
    """Go on with a ledger that was moved, restored or given another machine.

    A ledger works at one place: a copy is refused, since the other one may run. By this you say that it never will
    again, and the agent's durables belong to the ledger where it is now.

    \b
    Example:
      oncewire agent adopt biller:agent --store sqlite:///biller.db
    \b
    Refused while somebody pulls from a durable, for another ledger, and for an old copy: one that has announced more
    than it holds.
    """
    settings = face.load_here(flags).settings
    found, store = _opened(target, store_url, schema, settings)
    adopted: list[str] = []

    async def work() -> None:
        async with Client(options_from(settings, name="oncewire-agent-adopt")) as client:
            adopted.extend(await durables.adopt(client, found, settings, store))

    with contextlib.closing(store):
        face.run(work())
    if as_json:
        face.print_json({"adopted": adopted})
        return
    for name in adopted:
        face.say(f"{name} belongs to this ledger at this place now")
    if not adopted:
        face.say("every durable is this ledger's already, or nobody's")
