"""`oncewire dlq`: the dead-letter service, and the tools of those who look at letters in the morning."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from oncewire._ground import topology
from oncewire._ground.contracts import subjects
from oncewire._ground.errors import ContractViolation, Refused
from oncewire._ground.jetstream import Client, losses, options_from
from oncewire._ground.ledger.stores import open_store
from oncewire._ground.settings import Settings, mask_url
from oncewire._ground.topology.units import parse_duration_ns
from oncewire.cli import face, observe
from oncewire.cli.board import Board, board_of
from oncewire.dlq import metrics, options_of, replay, serving, standing
from oncewire.dlq.letters import Dead, Filter, Found, Group, find_letter, group, read_letters
from oncewire.dlq.replay import Replay, ReplayOptions, Report
from oncewire.dlq.republish import Republisher
from oncewire.dlq.service import DlqOptions, Service
from oncewire.dlq.standing import LedgerView

T = TypeVar("T")
SERVICE = "dlq"
BODY_SHOWN_CHARS = 2_000
LETTERS_SHOWN_MAX = 1_000


@click.group()
def dlq() -> None:
    """Dead letters: keep what failed, look at it, bring it back.

    \b
    Examples:
      oncewire dlq ls
      oncewire dlq show 17
      oncewire dlq replay --cause TimeoutError --since 2h --rate 100
    """


# ---- the service


@dlq.command()
@face.setting_options("data", "nats_url", "dlq_sweep_s", "dlq_stalled_s")
@face.setting_options("alert_command", "alert_url", "metrics_file", *observe.OPTIONS)
@face.command
def run(*, as_json: bool, **flags: Any) -> None:
    """Keep what is given up as dead letters, until Ctrl-C or SIGTERM. Run as many as you like.

    \b
    Examples:
      oncewire dlq run
      oncewire dlq run --alert-url https://example.org/hooks/oncewire --metrics-file /var/lib/node/oncewire.prom
    \b
    Requests of agents, the server's advisories and a sweep over all consumers lead to one letter
    per failure, on `dlq.` and the message's own subject.
    """
    settings = face.load_service(flags)
    face.run(_run(settings, as_json))


async def _run(settings: Settings, as_json: bool) -> None:
    stop, board = asyncio.Event(), board_of(settings, as_json, "dlq")
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    with observe.tracers(settings) as tracer:
        await _serve(settings, options_of(settings, tracer(SERVICE)), stop, board)


async def _serve(settings: Settings, options: DlqOptions, stop: asyncio.Event, board: Board) -> None:
    async with Client(options_from(settings, name="oncewire-dlq")) as client:
        declared = topology.load(settings=settings)
        await topology.init_streams(client, topology=declared)
        await topology.ensure_consumers(client, SERVICE, topology=declared)
        async with (
            serving(client, options) as service,
            observe.serving(observer(settings, client, service)) as watched_at,
        ):
            board.line(f"keeping dead letters of {mask_url(settings.nats_url)}")
            board.event("serving", nats_url=mask_url(settings.nats_url), metrics_url=watched_at)
            await stop.wait()
    board.line(f"wrote {service.letters} letters")
    board.event("end", letters=service.letters)


def observer(settings: Settings, client: Client, service: Service) -> observe.Observer:
    """It reads every stream, so it sees every loss."""
    found = observe.Observer(settings, client, part=lambda whole: whole.for_service(SERVICE), sees_losses=True)
    found.watch(watched(service), client)
    return found


def watched(service: Service) -> observe.Watched:
    return observe.Watched(SERVICE, lambda page: metrics.collect(page, service), lambda: service.problem)


# ---- what all tools share


def _ask(flags: dict[str, Any], work: Callable[[Client], Awaitable[T]]) -> T:
    settings = face.load_here(flags).settings
    answers: list[T] = []

    async def ask() -> None:
        async with Client(options_from(settings, name="oncewire-dlq-tool")) as client:
            answers.append(await work(client))

    face.run(ask())
    return answers[0]


_FILTERS = (
    click.option("--since", default=None, metavar="TIME", help="Dead-lettered since: 2h, 7d, or 2026-11-15T08:00Z."),
    click.option("--until", default=None, metavar="TIME", help="Dead-lettered before."),
    click.option("--cause", default=None, help="As `dlq ls` shows it."),
    click.option("--tenant", default=None, help="Whose messages."),
    click.option("--consumer", default=None, help="For which consumer they failed."),
    click.option("--stream", default=None, help="From which stream they are."),
    click.option("--subject", default=None, help="On which subject they were; * and > match."),
)
_FILTER_NAMES = ("since", "until", "cause", "tenant", "consumer", "stream", "subject")


def _with_filters(run: face.Run) -> face.Run:
    run = face.setting_options("data", "nats_url")(face.command(run))
    for option in reversed(_FILTERS):
        run = option(run)
    return run


def _filter(flags: dict[str, Any], letters: tuple[str, ...] = ()) -> Filter:
    """The filter that the options ask for; they are taken out of `flags`."""
    given = {name: flags.pop(name) for name in _FILTER_NAMES}
    empty = [f"--{name}" for name, value in given.items() if value == ""] + ["a LETTER" for one in letters if not one]
    if empty:  # a variable of a script that nobody has set: it must not mean every letter
        raise Refused(f"{empty[0]} is empty", hint="Leave it out, or say what it should be.")
    given = {name: value or "" for name, value in given.items()}
    try:
        subjects.check_filter(given["subject"] or ">", "--subject")
    except ContractViolation as wrong:
        raise Refused(wrong.message, hint="For example evt.default.demo.> or cmd.*.") from None
    since, until = (_time_ms(given.pop(name), f"--{name}") for name in ("since", "until"))
    return Filter(since_ms=since, until_ms=until, ids=frozenset(letters), **given)


def _time_ms(text: str, flag: str) -> int:
    """A time ago (`2h`) or a time (ISO 8601), in Unix milliseconds."""
    if not text:
        return 0
    with contextlib.suppress(ValueError):
        return (time.time_ns() - parse_duration_ns(text)) // 1_000_000
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise Refused(f"{flag} is not a time: {text[:40]!r}", hint="Write 2h, 7d, or 2026-11-15T08:00Z.") from None
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)


def _when(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")


@contextlib.contextmanager
def _bar(as_json: bool, label: str) -> Iterator[tuple[Callable[[int], None], Callable[[int], None]]]:
    """A progress bar on stderr where somebody looks: how many there are, how many more are done."""
    if as_json or not sys.stderr.isatty():
        yield (lambda _: None), (lambda _: None)
        return
    with click.progressbar(length=1, label=label, file=sys.stderr, show_pos=True) as bar:

        def begin(count: int) -> None:
            bar.length = max(1, count)

        yield begin, bar.update


# ---- looking


@dlq.command()
@click.option("--letters", "is_each", is_flag=True, help="Each letter instead of groups.")
@_with_filters
def ls(*, is_each: bool, as_json: bool, **flags: Any) -> None:
    """The letters, grouped by consumer, subject and cause.

    \b
    Examples:
      oncewire dlq ls
      oncewire dlq ls --letters --cause no_handler --since 1d
    \b
    A letter is withdrawn when its input was done after all. Exit code 1 when there are letters.
    """
    chosen = _filter(flags)

    async def work(client: Client) -> tuple[list[Dead], set[str]]:
        found = [one.letter async for one in read_letters(client, chosen)]
        return found, await standing.withdrawn(client, found)

    letters, withdrawn = _ask(flags, work)
    groups = group(letters, dict.fromkeys(withdrawn, True))
    if as_json and is_each:
        face.print_json([msgspec.to_builtins(one) | {"is_withdrawn": one.id in withdrawn} for one in letters])
    elif as_json:
        face.print_json({"letters": len(letters), "groups": msgspec.to_builtins(groups)})
    elif is_each:
        _print_letters(letters, withdrawn)
    else:
        _print_groups(groups)
    sys.exit(face.EXIT_NOT_WELL if letters else 0)


def _print_letters(letters: list[Dead], withdrawn: set[str]) -> None:
    for one in letters[:LETTERS_SHOWN_MAX]:
        sign = " withdrawn" if one.id in withdrawn else ""
        place = f"{one.stream} {one.of_sequence}"
        face.say(f"{one.sequence:>7}  {_when(one.at_ms)}  {one.cause}  {place}  {one.subject}  {one.consumer}{sign}")
    if len(letters) > LETTERS_SHOWN_MAX:
        face.say(f"and {len(letters) - LETTERS_SHOWN_MAX} more: filter, or use --json")
    face.say(f"{len(letters)} letters")


def _print_groups(groups: list[Group]) -> None:
    for one in groups:
        sign = f", {one.withdrawn} withdrawn" if one.withdrawn else ""
        face.say(f"{one.count:>7}  {one.cause}  {one.subject}  {one.consumer}{sign}")
        face.say(f"         {_when(one.first_ms)} to {_when(one.last_ms)}: {one.error}")
    face.say(f"{sum(one.count for one in groups)} letters")


@dlq.command()
@click.argument("letter")
@face.setting_options("data", "nats_url")
@face.command
def show(*, letter: str, as_json: bool, **flags: Any) -> None:
    """One letter: its story, its headers, its body. LETTER is its id, the begin of it, or its number in DLQ.

    \b
    Examples:
      oncewire dlq show 17
      oncewire dlq show dl.4eed2118 --json
    """

    async def work(client: Client) -> tuple[Found, bool, Any]:
        found = await find_letter(client, letter)
        records = await Republisher(client, lambda _: None).records([found.letter.id]) if found.letter.id else {}
        record = records.get(found.letter.id)
        is_withdrawn = found.letter.id in await standing.withdrawn(client, [found.letter])
        return found, is_withdrawn, record[0] if record else None

    found, is_withdrawn, record = _ask(flags, work)
    facts = msgspec.to_builtins(found.letter) | {"is_withdrawn": is_withdrawn, "headers": found.headers}
    facts |= {"replay": msgspec.to_builtins(record)} if record else {}
    body = found.stored.payload
    if as_json:
        face.print_json(facts | {"body": body.decode("utf-8", "backslashreplace")})
        return
    for name, value in facts.items():
        if value not in ("", {}, False):
            face.say(f"{name:<14} {value}")
    text = body.decode("utf-8", "backslashreplace")
    shown = text if len(text) <= BODY_SHOWN_CHARS else f"{text[:BODY_SHOWN_CHARS]}… ({len(body)} bytes)"
    for line in shown.split("\n"):
        face.say(line)


# ---- acting


@dlq.command("replay")
@click.argument("letters", nargs=-1)
@click.option("--all", "is_all", is_flag=True, help="Every letter; needed when nothing else is chosen.")
@click.option("--rate", type=click.FloatRange(min=0), default=0.0, help="Letters per second; 0 is as fast as it goes.")
@click.option("--dry-run", is_flag=True, help="Say what would be done.")
@click.option(
    "--body", type=click.Path(path_type=Path, dir_okay=False), help="File with an edited body for one letter."
)
@click.option("--store", "store_url", default="", help="The agent's ledger, to see what is done: sqlite:///file.db …")
@click.option("--agent", default="", metavar="TENANT/WORKSPACE/AGENT", help="Whose ledger --store is.")
@_with_filters
def replay_(
    *,
    letters: tuple[str, ...],
    is_all: bool,
    rate: float,
    dry_run: bool,
    body: Path | None,
    store_url: str,
    agent: str,
    as_json: bool,
    **flags: Any,
) -> None:
    """Publish letters again on their subjects, each once, and clear them. Killed half way, run it again.

    \b
    Examples:
      oncewire dlq replay 17
      oncewire dlq replay --cause TimeoutError --since 2h --rate 100
      oncewire dlq replay --all --dry-run
      oncewire dlq replay 17 --body fixed.json
    \b
    A copy is meant for the consumer that failed: other agents pass over it, foreign consumers see
    it again. What is done by now, or so old that its ledger may have forgotten it, is not replayed
    but named. With --body the letter stays beside the edited copy until it is dropped.
    Exit code 1 when some were not replayed.
    """
    chosen = _chosen(_filter(flags, letters), is_all)
    if bool(store_url) != bool(agent):
        raise Refused("--store and --agent belong together", hint="For example --agent default/demo/biller.")
    edited = _read_body(body)
    ledger = LedgerView(open_store(store_url), agent) if store_url else None
    with _bar(as_json, "replaying") as (begin, progress):
        options = ReplayOptions(rate, dry_run, edited, ledger, begin, progress)
        report = _ask(flags, lambda client: Replay(client, chosen, options).run())
    if as_json:
        face.print_json(msgspec.to_builtins(report))
    else:
        _print_report(report)
    sys.exit(face.EXIT_NOT_WELL if report.done + report.refused else 0)


def _chosen(chosen: Filter, is_all: bool) -> Filter:
    if chosen.is_empty and not is_all:
        raise Refused("which letters?", hint="Name some, give a filter, or --all.")
    return chosen


def _read_body(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise Refused(f"{path} cannot be read: {error.strerror}", hint="Check --body.") from None


def _print_report(report: Report) -> None:
    verb = "would be replayed" if report.is_dry_run else "replayed"
    face.say(f"{report.replayed} of {report.matched} letters {verb}")
    if report.already_out:
        face.say(f"{report.already_out} were published before and are cleared now")
    for problem in report.problems:
        face.say(f"  {problem.sequence}: {problem.reason}")
    hidden = report.done + report.refused - len(report.problems)
    if hidden > 0:
        face.say(f"  and {hidden} more")


@dlq.command("drop")
@click.argument("letters", nargs=-1)
@click.option("--all", "is_all", is_flag=True, help="Every letter; needed when nothing else is chosen.")
@click.option("--reason", required=True, help="Kept with the record of what became of the letter.")
@click.option("--yes", "is_sure", is_flag=True, help="Do not ask.")
@_with_filters
def drop_(*, letters: tuple[str, ...], is_all: bool, reason: str, is_sure: bool, as_json: bool, **flags: Any) -> None:
    """Delete letters for good.

    \b
    Examples:
      oncewire dlq drop 17 --reason "test data"
      oncewire dlq drop --cause identity_conflict --reason "sent twice by hand" --yes
    """
    chosen = _chosen(_filter(flags, letters), is_all)
    if not is_sure:
        if as_json or not sys.stdin.isatty():
            raise Refused("nobody is there to ask", hint="Give --yes to delete without asking.")
        click.confirm("Delete these letters for good?", abort=True)
    with _bar(as_json, "dropping") as (_, progress):
        dropped = _ask(flags, lambda client: replay.drop(client, chosen, reason, progress))
    face.print_json({"dropped": dropped}) if as_json else face.say(f"{dropped} letters dropped")


@dlq.command("inject")
@click.argument("subject")
@click.argument("body")
@click.option("--testing", "is_testing", is_flag=True, help="Needed: only the service writes letters.")
@click.option("--consumer", default="injected", show_default=True, help="For which consumer it failed.")
@click.option("--cause", default="injected: by hand", show_default=True, help="Why.")
@face.setting_options("data", "nats_url", "env")
@face.command
def inject_(
    *, subject: str, body: str, is_testing: bool, consumer: str, cause: str, as_json: bool, **flags: Any
) -> None:
    """Write a dead letter by hand, for tests of what comes after. Refused in prod.

    \b
    Example:
      oncewire dlq inject evt.default.demo.orders.placed '{"type": "OrderPlaced", "payload": {}}' --testing
    """
    settings = face.load_here(flags).settings
    if settings.env == "prod":
        raise Refused("letters are not written by hand in prod", hint="Only the dead-letter service writes dlq.>.")
    if not is_testing:
        raise Refused("only the dead-letter service writes dlq.>", hint="Give --testing if this is a test.")
    try:
        subjects.check_subject(subject)
        subjects.token(consumer, "--consumer")
    except ContractViolation as wrong:
        raise Refused(wrong.message, hint=wrong.hint) from None
    id_ = _ask(flags, lambda client: replay.inject(client, subject, body.encode(), consumer, cause))
    face.print_json({"letter": id_}) if as_json else face.say(id_)


# ---- losses


@dlq.command("losses")
@click.option("--acknowledge", default="", metavar="STREAM", help="You have looked at what this stream lost.")
@face.setting_options("data", "nats_url")
@face.command
def losses_(*, acknowledge: str, as_json: bool, **flags: Any) -> None:
    """Ranges that readers found missing from their streams: what no letter can tell of.

    \b
    Examples:
      oncewire dlq losses
      oncewire dlq losses --acknowledge MESHFORGE_EVENTS
    \b
    A reader with a loss is not ready until it is acknowledged. Exit code 1 when one is not.
    """

    async def work(client: Client) -> list[losses.Loss]:
        if acknowledge:
            await losses.acknowledge(client, acknowledge, time.time_ns() // 1_000_000)
        return await losses.losses(client)

    found = _ask(flags, work)
    if as_json:
        face.print_json(msgspec.to_builtins(found))
    else:
        for one in found:
            sign = f"acknowledged {_when(one.acknowledged_ms)}" if one.is_acknowledged else "open"
            face.say(f"{_when(one.found_ms)}  {one.sentence}: {sign}")
        face.say(f"{len(found)} losses")
    sys.exit(0 if all(one.is_acknowledged for one in found) else face.EXIT_NOT_WELL)
