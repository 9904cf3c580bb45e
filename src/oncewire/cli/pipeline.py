"""`oncewire pipeline`: the lake. Streams become tables, and their state can be seen."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from oncewire._ground import topology
from oncewire._ground.contracts.catalog import Family
from oncewire._ground.contracts.topics import SNAPSHOTS
from oncewire._ground.errors import OncewireError, Refused
from oncewire._ground.settings import Settings, mask_url
from oncewire.cli import audits, face, observe
from oncewire.cli.board import Board, board_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from oncewire.pipeline.families import Families
    from oncewire.pipeline.lake.log import Lake
    from oncewire.pipeline.lake.place import Place
    from oncewire.pipeline.run import Pipeline, Told

SETTINGS = ("data", "lake", "checkpoints", "nats_url", "topology_files")
INTERVALS = ("pipeline_trigger_ms", "pipeline_gold_every_s", "pipeline_keep_every_s", "pipeline_retention_hours")
RUN_SETTINGS = (*SETTINGS, "master", *INTERVALS)


@click.group()
def pipeline() -> None:
    """Tables of everything that flowed through: bronze raw, silver read by contract, each once.

    \b
    Examples:
      oncewire pipeline run --once
      oncewire pipeline status
      oncewire pipeline audit
      oncewire pipeline report --out report.html
    """


pipeline.add_command(audits.audit)
pipeline.add_command(audits.report)


@pipeline.command()
@click.option("--once", "is_once", is_flag=True, help="Read what is there now, then end.")
@click.option("--stream", "chosen", multiple=True, metavar="STREAM", help="Only this one; may be given several times.")
@click.option("--accept-loss", "accepted", multiple=True, metavar="STREAM", help="Go on behind what this one lost.")
@click.option("--partition-by", type=click.Choice(["date"]), help="Partition the tables of a lake that is made now.")
@face.setting_options(*RUN_SETTINGS, *observe.OPTIONS)
@face.command
def run(
    *,
    is_once: bool,
    chosen: tuple[str, ...],
    accepted: tuple[str, ...],
    partition_by: str | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Read all declared streams into the lake until Ctrl-C or SIGTERM, which let the batch at hand end.

    \b
    Examples:
      oncewire pipeline run
      oncewire pipeline run --once --lake /srv/lake --partition-by date
      oncewire pipeline run --lake s3://bucket/lake
      oncewire pipeline run --master spark://head:7077 --json
    \b
    A stream that lost messages stops alone, and is named: look, then go on with --accept-loss.
    Exit code of --once: 4 when a stream stopped so.
    """
    settings = face.load_service(flags)
    require_spark()
    lake, board = lake_of(settings, partition_by or ""), board_of(settings, as_json, "pipeline")
    _run(settings, lake, board, is_once=is_once, chosen=chosen, accepted=accepted, as_json=as_json)


@pipeline.command()
@click.argument("streams", nargs=-1)
@face.setting_options(*RUN_SETTINGS)
@face.command
def backfill(*, streams: tuple[str, ...], as_json: bool, **flags: Any) -> None:
    """Go on from what the lake has, for streams whose checkpoint is lost; all that the lake has by default.

    \b
    Examples:
      oncewire pipeline backfill BILLING
      oncewire pipeline backfill
    \b
    The lake's tables know how far each stream was read. A new checkpoint begins right behind that,
    and one pass is made: afterwards the tables hold what they would hold had nothing been lost.
    """
    from oncewire.pipeline import standing
    from oncewire.pipeline.lake import hold
    from oncewire.pipeline.reading import Streams

    settings = face.load_here(flags).settings
    require_spark()
    board, lake = Board(as_json), lake_of(settings)
    read, _ = declared(settings)
    _check_declared(streams, read)
    server = Streams(access_of(settings))
    names = list(streams or (name for name in standing.reached(lake) if name in read))
    with hold.held(lake.beside, what="oncewire pipeline backfill", since=_now(), name=lake.place):
        for name in names:
            first = standing.begin_again(lake, name, server)
            board.line(f"{name}: goes on at sequence {first}")
            board.event("backfill", stream=name, first=first)
    server.close()
    _run(settings, lake, board, is_once=True, chosen=tuple(names), accepted=(), as_json=as_json)


@pipeline.command()
@face.setting_options(*SETTINGS)
@face.command
def status(*, as_json: bool, **flags: Any) -> None:
    """How far each stream is in the lake, what the tables hold, who works on it.

    \b
    Examples:
      oncewire pipeline status
      oncewire pipeline status --lake /srv/lake --json
    \b
    Exit code 1 when a stream has stopped and somebody must look.
    """
    settings = face.load_here(flags).settings
    require_lake()
    told = standing_of(settings, lake_of(settings))
    if as_json:
        face.print_json(told)
    else:
        _print(told)
    if any(one["state"] == "stopped" for one in told["streams"]) or told["topics"]["stopped"]:
        raise SystemExit(face.EXIT_NOT_WELL)


def standing_of(settings: Settings, lake: Lake) -> dict[str, Any]:
    """What `status` says, for machines."""
    from oncewire.pipeline import standing
    from oncewire.pipeline.lake import hold
    from oncewire.pipeline.reading import Streams
    from oncewire.pipeline.tables import BRONZE

    read, left_out = declared(settings)
    server = Streams(access_of(settings))
    try:
        streams, topics = standing.streams(lake, read, server), standing.topics(lake, server)
    finally:
        server.close()
    return {
        "lake": str(lake.place),
        "held_by": hold.holder(lake.beside),
        "streams": [asdict(one) for one in streams],
        "topics": asdict(topics),
        "left_out": left_out,
        "bronze_version": lake.open(BRONZE).version() if lake.exists(BRONZE) else -1,
        "silver_has": standing.silver_has(lake),
        "audit": audits.last(lake.place),
        "tables": [asdict(one) for one in standing.tables(lake)],
    }


def _print(told: dict[str, Any]) -> None:
    from oncewire.pipeline.lake import hold

    face.say(f"lake {told['lake']}, held by {hold.shown(told['held_by'])}")
    for one in told["streams"]:
        if not one["reached"] and not one["last"] and not one["error"]:
            continue
        last = "?" if one["last"] is None else f"{one['last']:,}"
        face.say(f"  {one['name']:<20} {one['reached']:>14,} of {last:>14}  {one['state']}")
        if one["error"]:
            face.say(f"{one['error']}", sign=_MARK)
            face.say(f"      {one['hint']}")
    _print_topics(told["topics"])
    for name in told["left_out"]:
        face.say(f"  {name:<20} left out: {_LEFT_OUT.get(name, _QUEUE)}")
    face.say(f"  silver has version {told['silver_has']} of bronze's {told['bronze_version']}")
    if told["audit"]:
        face.say(f"  audited {told['audit']['at']}: {audits.word(told['audit'])}")
    for one in told["tables"]:
        size = one["size_bytes"] / (1 << 20)
        face.say(f"  {one['name']:<20} {one['rows']:>14,} rows  {one['files']:>6,} files  {size:>10,.1f} MiB")


_MARK = f"    {click.style('!', fg='yellow', bold=True)} "
_QUEUE = "a work queue, whose inputs come with the ledger's blocks"
_LEFT_OUT = {SNAPSHOTS: "what the broker's records amount to, which are read"}


def _print_topics(told: dict[str, Any]) -> None:
    listed = "?" if told["listed"] is None else f"{told['listed']:,}"
    if told["read"] or told["listed"]:
        behind = f", {told['behind']:,} behind" if told["behind"] else ""
        face.say(f"  {'topics':<20} {told['messages']:>14,} messages of {told['read']:,} topics, {listed} now{behind}")
    for name, why in told["stopped"].items():
        face.say(f"{name}: {why}", sign=_MARK)
    if told["error"]:
        face.say(f"{told['error']} {told['hint']}", sign=_MARK)


# ---- what is run, on what


def require_lake() -> None:
    if importlib.util.find_spec("deltalake") is None or importlib.util.find_spec("pyarrow") is None:
        raise Refused("the lake's packages are not installed", hint="Install them: pip install 'oncewire[spark]'.")


def require_spark() -> None:
    """Whether this machine can run the pipeline, in one sentence if not."""
    require_lake()
    if importlib.util.find_spec("pyspark") is None:
        raise Refused("Spark is not installed", hint="Install it: pip install 'oncewire[local-spark]'.")
    from oncewire.pipeline import java

    java.home()


def lake_of(settings: Settings, partition_by: str = "") -> Lake:
    """The lake, which is there or can be made."""
    from oncewire.pipeline.lake.log import Lake

    checkpoints = Path(settings.checkpoints or settings.data / "lakes")
    lake = Lake(place_for(settings), partition_by=partition_by, checkpoints=checkpoints)
    lake.place.check()
    return lake


def place_for(settings: Settings) -> Place:
    from oncewire.pipeline.lake.place import place_of

    return place_of(settings.lake or settings.data / "lake")


def session(settings: Settings) -> SparkSession:
    """Spark for a command. On one machine a shuffle has a few parts per core: Spark's own 200 are for a cluster."""
    from oncewire.pipeline.session import spark_session

    for name in set(os.environ) - set(face.without_secrets(os.environ)):
        del os.environ[name]  # they are read by now, and Java would hand them to each of its workers
    if "@" in os.environ.get("NATS_URL", ""):
        del os.environ["NATS_URL"]
    conf: dict[str, Any] = {f"spark.executorEnv.{name}": value for name, value in place_for(settings).environ.items()}
    if settings.master.startswith("local"):
        conf["spark.sql.shuffle.partitions"] = 2 * (os.cpu_count() or 1)
    return spark_session(settings.master, spark_ui_enabled=False, spark_log_level="ERROR", **conf)


def declared(settings: Settings) -> tuple[list[str], list[str]]:
    """The streams to read, and those that are left out: work queues, which nobody else can read, and what the broker
    derives from its own records."""
    streams = [one for one in topology.load(settings=settings).streams if not one.is_bucket]
    left_out = [one.name for one in streams if one.retention == "workqueue" or one.name == SNAPSHOTS]
    return [one.name for one in streams if one.name not in left_out], left_out


def families_of(settings: Settings) -> Families:
    """Chat subjects, which the settings may have renamed."""
    prefixes = (settings.chat_events_prefix, settings.chat_tokens_prefix)
    return tuple((f"{prefix}.*", Family.REALTIME) for prefix in prefixes)


def access_of(settings: Settings) -> dict[str, str]:
    """The source's options for the servers that the settings name."""
    options = {
        "url": settings.nats_url,
        "user": settings.nats_user,
        "password": settings.nats_password,
        "token": settings.nats_token,
        "credentialsFile": settings.nats_creds,
        "nkeyFile": settings.nats_nkey,
        "tlsCa": settings.nats_ca,
        "tlsCert": settings.nats_cert,
        "tlsKey": settings.nats_key,
        "inboxPrefix": settings.nats_inbox_prefix,
    }
    return {name: value for name, value in options.items() if value}


def _run(
    settings: Settings,
    lake: Lake,
    board: Board,
    *,
    is_once: bool,
    chosen: Sequence[str],
    accepted: Sequence[str],
    as_json: bool,
) -> None:
    from oncewire.pipeline.gold.refresh import Gold
    from oncewire.pipeline.lake import hold
    from oncewire.pipeline.lake.keep import Keeping
    from oncewire.pipeline.reading import Reads
    from oncewire.pipeline.run import Pipeline

    names, queues = declared(settings)
    _check_declared((*chosen, *accepted), names)
    if is_once:
        _check_answers(settings, names[0])
    what = "oncewire pipeline run"
    with hold.held(lake.beside, what=what, since=_now(), name=lake.place), stopping() as stop:
        board.line(f"lake {lake.place}, from {mask_url(settings.nats_url)}; left out: {', '.join(queues) or 'none'}")
        board.event("starting", lake=str(lake.place), streams=names, left_out=queues)
        spark = session(settings)
        stop.listen()  # Spark has set handlers of its own
        try:
            pipeline = Pipeline(
                spark,
                lake,
                chosen or names,
                Reads(access_of(settings), settings.pipeline_trigger_ms / 1000, accepted=frozenset(accepted)),
                has_topics=not chosen,
                families=families_of(settings),
                gold=Gold(spark, lake, settings.pipeline_gold_every_s),
                keeping=Keeping(settings.pipeline_keep_every_s, settings.pipeline_retention_hours),
                tell=lambda told: _tell(board, as_json, told),
            )
            with observe.serving_beside(_observer(settings, lake, pipeline, chosen or names)):
                board.event("running")
                (pipeline.once if is_once else pipeline.run)(stop.asked)
        finally:
            spark.stop()
        board.event("end")
        if is_once and (wrong := pipeline.stopped()):
            raise _worst(wrong)


def _check_declared(given: Sequence[str], names: Sequence[str]) -> None:
    """Before a name becomes a folder of the lake."""
    unknown = [repr(name) for name in given if name not in names]
    if unknown:
        raise Refused(
            f"no declared stream that can be read is named {', '.join(unknown)}", hint="See `pipeline status`."
        )


def _check_answers(settings: Settings, stream: str) -> None:
    """One pass gives up each stream in its turn: with no server at all that takes minutes, and Java for nothing."""
    from oncewire.pipeline.reading import Streams

    server = Streams(access_of(settings))
    try:
        server.facts(stream)
    finally:
        server.close()


def _observer(settings: Settings, lake: Lake, pipeline: Pipeline, names: Sequence[str]) -> observe.Observer:
    """Its readings say whether NATS answers them; it confirms nothing to anybody."""
    from oncewire.pipeline import metrics
    from oncewire.pipeline.reading import Streams

    watch = metrics.Watch(lake, names, lambda: Streams(access_of(settings)))
    found = observe.Observer(settings)
    found.watch(observe.Watched("pipeline", watch.collect, pipeline.trouble, lambda: asyncio.to_thread(watch.look)))
    return found


def _worst(errors: Sequence[OncewireError]) -> OncewireError:
    return max(errors, key=face.exit_code)


def _tell(board: Board, as_json: bool, told: Told) -> None:
    from oncewire.pipeline.deriving import Batch
    from oncewire.pipeline.landing import Landed
    from oncewire.pipeline.topics import Round

    match told:
        case Landed(span=span, rows=rows):
            name = span.lifetime[0]
            facts = {"stream": name, "first": span.first, "last": span.last, "rows": rows, "step": told.step.value}
            _show(board, as_json, "landed", facts, name, f"read up to {span.last:,} ({rows:,} rows)")
        case Round(topics=topics, rows=rows):
            text = f"{rows:,} rows of {topics:,} topics"
            _show(board, as_json, "topics", {"topics": topics, "rows": rows}, "topics", text)
        case Batch():
            names = ("rows_in", "rows_out", "duplicates", "quarantined")
            counts = {name: told.total(name) for name in names}
            text = f"{counts['rows_in']:,} rows in, {counts['rows_out']:,} out, {counts['duplicates']:,} duplicates, "
            text += f"{counts['quarantined']:,} to quarantine"
            _show(board, as_json, "silver", {"version": told.last_version, **counts}, "silver", text)
        case _:
            shown = told.shown()
            if not as_json and "error" not in shown:
                return  # what is read is told by its batches
            text = f"{shown['state']}: {shown['error']} {shown['hint']}" if "error" in shown else shown["state"]
            is_bad = {"warning": shown["state"]} if shown["state"] in ("stopped", "retrying") else {}
            _show(board, as_json, "stream", {"stream": told.stream, **shown}, told.stream, text, **is_bad)


def _show(board: Board, as_json: bool, event: str, facts: dict[str, Any], part: str, text: str, **more: str) -> None:
    if as_json:
        board.event(event, **facts)
    else:
        board.part(part, event, text=text, **more)


class Stop:
    """Ctrl-C and SIGTERM let the batch at hand end; a second one does not wait."""

    def __init__(self) -> None:
        self.asked = threading.Event()

    def listen(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._ask)

    def _ask(self, *_: object) -> None:
        if self.asked.is_set():
            raise KeyboardInterrupt
        self.asked.set()


@contextmanager
def stopping() -> Iterator[Stop]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield Stop()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _now() -> str:
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
