"""What earlier audits have seen of a lake, and what of it a lake no longer has. Pure.

A lake only grows: a stream is read further, a chain gets more blocks, a table more versions. So whatever an audit has
seen must be there at the next one, and what is not there stays known, as far as it once was: a verdict that names a
loss must not make the next one forget it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from oncewire.pipeline.auditing.rules import Lifetime
from oncewire.pipeline.auditing.verdict import Finding, Head, Known, Log, Outside, Stop, shown


def remembered(earlier: Sequence[Known], now: Known, broken: Collection[str]) -> Known:
    """What the audit after this one must find: what is here now, and what should be. Of a chain or a table that is
    `broken` the end that it had stays, however long it grows behind that."""
    streams = {lifetime_of(stop): stop for stop in now.streams}
    chains = {head.chain: head for head in now.chains}
    logs = {log.table: log for log in now.logs}
    for known in earlier:
        for stop in known.streams:
            now_at = streams.get(lifetime_of(stop))
            if now_at is None or now_at.sequence < stop.sequence:
                streams[lifetime_of(stop)] = stop
        chains |= {head.chain: head for head in known.chains if head.chain in broken}
        logs |= {log.table: log for log in known.logs if log.table in broken}
    return Known(
        now.at_ms,
        [streams[key] for key in sorted(streams)],
        [chains[key] for key in sorted(chains)],
        [logs[key] for key in sorted(logs)],
        now.outside,
    )


def carried(earlier: Sequence[Known]) -> list[Outside]:
    """Changes by others that earlier audits have found. One is accepted when every record of it says so."""
    found: dict[tuple[str, int, int], Outside] = {}
    for change in (change for known in earlier for change in known.outside):
        key = change.table, change.version, change.at_ms
        if key not in found or not change.is_accepted:
            found[key] = change
    return [found[key] for key in sorted(found)]


def lifetime_of(stop: Stop) -> Lifetime:
    return stop.stream, stop.created_ns, stop.incarnation


def behind(known: Known, cut: Mapping[Lifetime, int]) -> Iterable[Finding]:
    """Streams that the lake once had further than now."""
    for stop in known.streams:
        last = cut.get(lifetime_of(stop))
        if last is not None and last >= stop.sequence:
            continue
        told = f"it was read up to {stop.sequence} at the audit of {shown(known.at_ms)}, and now "
        if last is not None:
            yield Finding("known", "shorter", stop.stream, last + 1, stop.sequence, detail=f"{told}up to {last}")
            continue
        others = [at[1:] for at in cut if at[0] == stop.stream]
        problem = "older" if others and max(others) < (stop.created_ns, stop.incarnation) else "missing"
        detail = f"{told}bronze knows it only as it was before it was recreated" if problem == "older" else (
            f"{told}bronze says nothing of it"
        )  # fmt: skip
        yield Finding("known", problem, stop.stream, 1, stop.sequence, detail=detail)


def broken_off(known: Known, ends: Mapping[str, int], hashes: Mapping[tuple[str, int], str]) -> Iterable[Finding]:
    """Chains that no longer hold the block that was their last one. `hashes` are those of the blocks that are known,
    by chain and number."""
    for head in known.chains:
        told = f"block {head.number} was its last one at the audit of {shown(known.at_ms)}, and now "
        end = ends.get(head.chain)
        there = hashes.get((head.chain, head.number))
        if end is None:
            yield _chain(head, "missing", f"{told}the lake has no block of it")
        elif there is None:
            yield _chain(head, "shorter", f"{told}it ends at block {end}")
        elif there != head.hash:
            detail = f"{told}that block has the hash {there[:16]}…, where it had {head.hash[:16]}…"
            yield _chain(head, "another", detail)


def _chain(head: Head, problem: str, detail: str) -> Finding:
    return Finding("known", problem, chain=head.chain, block=head.number, detail=detail)


ORIGINAL: Final = frozenset({"bronze", "gold/audits"})
"""Tables that cannot be made anew from others, as silver and gold can."""


def rolled_back(known: Known, logs: Mapping[str, Log], entries: Mapping[tuple[str, int], str]) -> Iterable[Finding]:
    """Tables that are gone, or whose log is not the one that was seen. `entries` are hashes of log entries, by table
    and version, where the logs still have them."""
    for log in known.logs:
        told = f"it had version {log.version} at the audit of {shown(known.at_ms)}, and now "
        here = logs.get(log.table)
        entry = entries.get((log.table, log.version), "")
        if here is None:
            yield Finding("tables", "missing", table=log.table, detail=f"{told}there is no such table")
        elif here.id != log.id:
            if log.table in ORIGINAL:
                yield Finding("tables", "replaced", table=log.table, detail=f"{told}another table is in its place")
        elif here.version < log.version:
            yield Finding("tables", "older", table=log.table, detail=f"{told}its log ends at version {here.version}")
        elif log.entry and entry and entry != log.entry:
            yield Finding("tables", "rewritten", table=log.table, detail=f"{told}that version is another one")


def changed_outside(changes: Iterable[Outside]) -> Iterable[Finding]:
    for change in changes:
        removed = "an unknown number of" if change.rows_removed is None else f"{change.rows_removed:,}"
        detail = f"version {change.version} of {shown(change.at_ms)} is not the pipeline's: {change.operation} removed "
        detail += f"files of {removed} rows and added files of {change.rows_added:,}"
        count = max(change.rows_removed or 0, change.rows_added)
        yield Finding("tables", "changed_outside", table=change.table, detail=detail, count=count)
