"""`oncewire pipeline audit` and `report`: what the lake proves, and how it looks."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from oncewire._ground.errors import NotFound
from oncewire.cli import face

if TYPE_CHECKING:
    from oncewire.pipeline.lake.place import Place

SETTINGS = ("data", "lake", "checkpoints", "topology_files")


@click.command()
@click.option(
    "--findings", "findings_max", type=click.IntRange(1, 10_000), default=200, show_default=True,
    help="Maximum number of findings to list.",
)  # fmt: skip
@click.option("--deep", "is_deep", is_flag=True, help="Read every message with the audit's own reader too; slow.")
@click.option(
    "--accept", "accepted", multiple=True, metavar="TABLE@VERSION",
    help="Accept a version that is not the pipeline's: you have looked at it. May be given several times.",
)  # fmt: skip
@click.option("--seed", type=click.IntRange(0), help="Repeat the sample of an earlier audit.")
@face.setting_options(*SETTINGS, "master", "pipeline_audit_record")
@face.command
def audit(
    *, findings_max: int, is_deep: bool, accepted: tuple[str, ...], seed: int | None, as_json: bool, **flags: Any
) -> None:
    """Prove from the lake that nothing was lost, doubled or changed. The verdict is kept in gold/audits.

    \b
    Examples:
      oncewire pipeline audit
      oncewire pipeline audit --lake /srv/lake --json
      oncewire pipeline audit --deep --pipeline-audit-record /backup/lake-audits.json
    \b
    It looks at what bronze and silver have taken in and prints that cut; what lies above is pending.
    What it saw is also kept outside the lake, in pipeline.audit_record, and the next audit must find it.
    Exit code 1 when something is wrong, with the positions and ids; 4 when files of the lake are missing or
    damaged, so that the rest alone was audited. The verdict is kept in every case.
    """
    from oncewire.cli.pipeline import families_of, lake_of, require_spark, session

    settings = face.load_here(flags).settings
    require_spark()
    from oncewire.pipeline.auditing import run, verdict
    from oncewire.pipeline.auditing.record import Record, default_record
    from oncewire.pipeline.tables import open_table

    lake = lake_of(settings)
    open_table(lake.place, "bronze")  # before Java starts
    record = Record(settings.pipeline_audit_record or default_record(settings.data, lake.place), lake.place)
    known = record.read()
    spark = session(settings)
    try:
        found = run.audit(
            spark,
            lake.place,
            families=families_of(settings),
            group_idle_ms=settings.broker_group_idle_ms,
            findings_max=findings_max,
            is_deep=is_deep,
            seed=seed,
            earlier=[known] if known is not None else [],
            accepted=accepted,
        )
    finally:
        spark.stop()
    seen = run.keep_verdict(lake.place, found)
    if as_json:
        face.print_json(msgspec.to_builtins(found))
    else:
        for line in verdict.lines(found):
            face.say(line)
    record.write(seen)
    if not found.is_good:
        raise SystemExit(face.EXIT_CORRUPT if found.unread else face.EXIT_NOT_WELL)


def last(lake: Place) -> dict[str, Any] | None:
    """The newest verdict, in short."""
    from oncewire.pipeline.auditing.run import last_verdicts

    for one in last_verdicts(lake):
        at = f"{datetime.fromtimestamp(one.at_ms / 1000, UTC):%Y-%m-%dT%H:%M:%SZ}"
        return {"at": at, "is_good": one.is_good, "errors": one.errors, "pending": one.pending}
    return None


def word(told: dict[str, Any]) -> str:
    return "good" if told["is_good"] else f"{told['errors']:,} findings: see `oncewire pipeline audit`"


@click.command()
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), default=Path("report.html"), show_default=True)
@click.option("--run", "run_id", default="", metavar="ID", help="The run to show; else the one with most steps.")
@click.option("--days", type=click.IntRange(1, 366), default=7, show_default=True, help="So many, up to the newest.")
@face.setting_options(*SETTINGS)
@face.command
def report(*, out: Path, run_id: str, days: int, as_json: bool, **flags: Any) -> None:
    """One HTML page about the lake: throughput, latency, dead letters, a run, audits. It loads nothing from elsewhere.

    \b
    Examples:
      oncewire pipeline report --out report.html
      oncewire pipeline report --run 01JCORDER --days 1
    """
    from oncewire.cli.pipeline import lake_of, require_lake

    settings = face.load_here(flags).settings
    require_lake()
    from oncewire.pipeline.report.page import page
    from oncewire.pipeline.report.read import content

    lake = lake_of(settings)
    if not lake.place.is_there:
        raise NotFound(f"there is no lake {lake.place}", hint="`oncewire pipeline run --once` makes one.")
    text = page(content(lake.place, datetime.now(UTC), run=run_id, days=days))
    out.write_text(text, "utf-8")
    if as_json:
        face.print_json({"out": str(out), "bytes": len(text.encode())})
    else:
        face.say(f"written: {out}")
