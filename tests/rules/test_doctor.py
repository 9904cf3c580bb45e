"""The doctor's judgement: what is ok, what is a warning, what is broken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from oncewire._ground import doctor
from oncewire._ground.doctor import GIB, MIB, Check, Facts, Folder, Nats, Postgres, Verdict, examine, worst


def jsz(server_id: str = "A", **config: Any) -> dict[str, Any]:
    """What nats-server 2.15.1 answers to /jsz, as far as it matters."""
    full = {"max_storage": 50 * GIB, "store_dir": "/data/nats/jetstream", "sync_interval": 120_000_000_000, **config}
    return {"server_id": server_id, "storage": 0, "config": full}


WELL = Facts(
    python="3.13.1",
    folder=Folder("/data", up_pid=7, free_bytes=100 * GIB, total_bytes=200 * GIB, start_bytes_min=256 * MIB),
    nats=Nats("nats://h:4222", version="2.15.1", server_id="A", max_payload=8 * MIB,
              jsz=[jsz(sync_always=True)]),
    postgres=Postgres("postgresql://h/x", version="18.4",
                      options={"fsync": "on", "full_page_writes": "on", "synchronous_commit": "on"}),
    java=(21, "PATH"),
    pyspark="4.3.0",
)  # fmt: skip


def check(name: str, facts: Facts) -> Check:
    (found,) = [one for one in examine(facts) if one.name == name]
    return found


def with_nats(**changes: Any) -> Facts:
    return replace(WELL, nats=replace(WELL.nats, **changes))


def with_folder(**changes: Any) -> Facts:
    return replace(WELL, folder=replace(WELL.folder, **changes))


def test_all_is_well() -> None:
    checks = examine(WELL)
    assert [one.verdict for one in checks] == [Verdict.OK] * len(checks)
    assert [one.remedy for one in checks] == [""] * len(checks)
    assert worst(checks) is Verdict.OK


def test_drift_is_a_warning_that_names_the_first_items() -> None:
    """A service starts on drift, degraded; a person must see it all the same."""
    streams = ["stream:A", "stream:B", "stream:C", "stream:D"]
    drifted = with_nats(topology={"drift": streams, "missing": ["consumer:A/x"]})
    found = check("topology", drifted)
    assert Verdict.WARNING is found.verdict
    assert "4 drift (stream:A, stream:B, stream:C, …), 1 missing (consumer:A/x)" == found.text


def test_what_is_not_ok_always_has_a_remedy() -> None:
    bad = Facts(
        "3.11.0", Folder("/d", problem="/d is not a folder", hint="Move it."), Nats("u", error="gone"), None, None, None
    )
    assert all(one.remedy for one in examine(bad) if one.verdict is not Verdict.OK)
    assert worst(examine(bad)) is Verdict.BROKEN


@pytest.mark.parametrize(
    ("version", "verdict"),
    [
        ("2.10.29", Verdict.WARNING),
        ("2.11.14", Verdict.WARNING),
        ("2.11.15", Verdict.OK),
        ("2.12.5", Verdict.WARNING),
        ("2.12.6", Verdict.OK),
        ("2.12.10", Verdict.OK),
        ("2.13.0", Verdict.OK),
        ("2.15.1-binary", Verdict.OK),
        ("3.0.0", Verdict.OK),
        ("1.4.1", Verdict.WARNING),
        ("dev", Verdict.WARNING),
    ],
)
def test_versions_with_known_holes_are_a_warning(version: str, verdict: Verdict) -> None:
    assert check("NATS", with_nats(version=version)).verdict is verdict


def test_durability_is_ok_only_when_the_server_says_that_it_syncs_always() -> None:
    assert check("durability", WELL).verdict is Verdict.OK
    assert check("durability", with_nats(jsz=[jsz()])).verdict is Verdict.WARNING
    assert "last 120 s" in check("durability", with_nats(jsz=[jsz()])).text


def test_unknown_durability_is_a_warning_never_ok() -> None:
    found = check("durability", with_nats(jsz=[], monitor_error="http://h:8222 cannot be reached"))
    assert found.verdict is Verdict.WARNING
    assert "cannot be reached" in found.text
    assert "NATS_MONITOR_URL" in found.remedy


def test_a_server_without_jetstream_is_broken() -> None:
    assert check("JetStream", with_nats(jetstream_error="the server runs without it")).verdict is Verdict.BROKEN


@pytest.mark.parametrize(
    ("size", "verdict"), [(1 << 10, Verdict.BROKEN), (MIB - 1, Verdict.WARNING), (MIB, Verdict.OK)]
)
def test_a_small_max_payload_is_named(size: int, verdict: Verdict) -> None:
    assert check("payload", with_nats(max_payload=size)).verdict is verdict


@pytest.mark.parametrize(
    ("used", "verdict"), [(0, Verdict.OK), (40 * GIB, Verdict.WARNING), (50 * GIB, Verdict.BROKEN)]
)
def test_storage_is_judged_by_its_limit(used: int, verdict: Verdict) -> None:
    answer = {**jsz(sync_always=True), "storage": used}
    assert check("storage", with_nats(jsz=[answer])).verdict is verdict


def test_a_storage_limit_above_the_room_on_our_own_disk_is_a_warning() -> None:
    facts = with_folder(free_bytes=30 * GIB)
    assert check("storage", facts).verdict is Verdict.WARNING
    elsewhere = replace(facts, nats=replace(facts.nats, jsz=[jsz(sync_always=True, store_dir="/other")]))
    assert check("storage", elsewhere).verdict is Verdict.OK


@pytest.mark.parametrize(
    ("free", "total", "verdict"),
    [
        (100 * MIB, 200 * GIB, Verdict.BROKEN),
        (2 * GIB, 200 * GIB, Verdict.WARNING),
        (900 * MIB, 2 * GIB, Verdict.WARNING),
        (20 * GIB, 200 * GIB, Verdict.OK),
    ],
)
def test_the_disk_is_judged_by_room_and_share(free: int, total: int, verdict: Verdict) -> None:
    assert check("disk", with_folder(free_bytes=free, total_bytes=total)).verdict is verdict


@pytest.mark.parametrize(
    ("option", "verdict"),
    [("fsync", Verdict.BROKEN), ("full_page_writes", Verdict.BROKEN), ("synchronous_commit", Verdict.WARNING)],
)
def test_postgres_must_really_sync(option: str, verdict: Verdict) -> None:
    assert WELL.postgres
    unsafe = replace(WELL.postgres, options={**WELL.postgres.options, option: "off"})
    found = check("commits", replace(WELL, postgres=unsafe))
    assert found.verdict is verdict
    assert option in found.text


def test_no_postgres_is_a_warning_and_one_that_is_gone_is_broken() -> None:
    assert check("PostgreSQL", replace(WELL, postgres=None)).verdict is Verdict.WARNING
    gone = Postgres("postgresql://h/x", error="cannot be used", hint="Start it.")
    assert check("PostgreSQL", replace(WELL, postgres=gone)).verdict is Verdict.BROKEN


@pytest.mark.parametrize("java", [None, (11, "PATH")])
def test_a_missing_or_old_java_is_only_a_warning(java: tuple[int, str] | None) -> None:
    assert check("Java", replace(WELL, java=java)).verdict is Verdict.WARNING
    assert check("pyspark", replace(WELL, pyspark=None)).verdict is Verdict.WARNING


@pytest.mark.parametrize(
    ("size", "shown"),
    [(0, "0 B"), (1023, "1023 B"), (8 * MIB, "8.0 MiB"), (76 * GIB, "76 GiB"), (1 << 60, "1048576 TiB")],
)
def test_sizes_are_shown_for_people(size: int, shown: str) -> None:
    assert doctor.human(size) == shown


# ---- readiness: the same judgement, and what is a service's own


def ready(facts: Facts = WELL, losses: list[str] | None = None, **parts: str) -> dict[str, Verdict]:
    checks = doctor.ready(facts.nats, facts.postgres, facts.folder, losses, parts)
    return {one.name: one.verdict for one in checks}


def test_a_service_is_ready_where_the_doctor_finds_nothing() -> None:
    assert {Verdict.OK} == set(ready(losses=[], relay="").values())


def test_a_missing_stream_is_broken_for_a_service_and_drift_is_not() -> None:
    """The doctor warns of both: nobody may be there yet who needs the stream."""
    missing = with_nats(topology={"missing": ["stream:A"]})
    assert (Verdict.BROKEN, Verdict.WARNING) == (ready(missing)["topology"], check("topology", missing).verdict)
    assert Verdict.WARNING is ready(with_nats(topology={"drift": ["stream:A"]}))["topology"]


def test_a_server_that_is_away_is_all_that_is_said_of_it() -> None:
    found = ready(with_nats(error="NATS is away"), relay="")
    assert (Verdict.BROKEN, {"NATS", "PostgreSQL", "commits", "relay"}) == (found["NATS"], found.keys())


def test_a_loss_degrades_until_somebody_has_looked() -> None:
    checks = doctor.ready(WELL.nats, None, WELL.folder, ["stream A went back: 3 messages, 1 to 3, for x"], {})
    (found,) = [one for one in checks if one.name == "losses"]
    assert (Verdict.WARNING, True, True) == (found.verdict, "stream A went back" in found.text, bool(found.remedy))
    assert ("losses" in ready(losses=[]), "losses" in ready()) == (True, False)


def test_a_part_that_cannot_work_is_broken_with_its_reason() -> None:
    (found,) = [one for one in doctor.own({"gateway": "has not begun to read"}) if one.name == "gateway"]
    assert (Verdict.BROKEN, "has not begun to read", True) == (found.verdict, found.text, bool(found.remedy))
