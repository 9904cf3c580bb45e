"""The long form of tests/system/test_secrets.py: with the lake, Java and its workers, and a server with a password."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.nats import NatsServer
from tests.support.planted import Planted, command_and_environ, files_below, processes_of, quoted
from tests.support.up import ONCEWIRE, clean_environ, oncewire, until
from tests.system.test_secrets import Run, drive, look_on

pytestmark = pytest.mark.faults

EVENT_LOG = """
spark.eventLog.enabled true
spark.eventLog.dir file://{folder}
spark.eventLog.rolling.enabled false
spark.eventLog.compress false
"""
LAKE_S = 240.0


@pytest.fixture
def events(tmp_path: Path) -> Iterator[Path]:
    """Where Spark writes everything that its UI would show."""
    folder, conf = tmp_path / "events", tmp_path / "conf"
    for one in (folder, conf):
        one.mkdir()
    (conf / "spark-defaults.conf").write_text(EVENT_LOG.format(folder=folder))
    return folder


def test_a_whole_run_with_the_lake_says_no_secret(
    tmp_path: Path, events: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path / "conf"))
    run = Run(tmp_path, "--pipeline")
    with run.up:
        drive(run)
        look_on(run)
        lake = run.up.folder.path / "lake"
        until(lambda: any(lake.glob("silver*/**/*.parquet")), "a table of silver", deadline_s=LAKE_S)
        assert any(b"java" in command_and_environ(pid)[0] for pid in processes_of(run.up.process.pid))
        assert [] == run.leaks_of_processes()
        run.command("pipeline", "status")
        assert 0 == run.up.stop()
    audited = subprocess.run(
        [*ONCEWIRE, "pipeline", "audit", "--data", str(run.up.folder.path)],
        cwd=tmp_path,
        env=clean_environ(),
        capture_output=True,
        timeout=LAKE_S,
    )
    run.said.append(("pipeline audit", audited.stdout + audited.stderr))
    run.said += [(path.name, path.read_bytes()) for path in files_below(events)]
    run.said.append(("what up says", json.dumps(run.up.events)))
    assert len(run.said) > 20
    assert not (found := run.leaks()), "\n".join(found)
    assert [] == run.leaks_of_files()


def test_a_pipeline_with_a_password_keeps_it_to_itself(
    tmp_path: Path, events: Path, request: pytest.FixtureRequest
) -> None:
    """In no plan, no log of events, no checkpoint, no table, and with no process that needs none."""
    planted = Planted()
    password = planted.make("a password")
    server = NatsServer(tmp_path / "nats", f"authorization {{ user: me, password: {json.dumps(password)} }}")
    address = f"nats://me:{quoted(password)}@127.0.0.1:{server.port}"
    data = tmp_path / "data"
    try:
        server.start()
        assert 0 == oncewire("topology", "apply", "--yes", cwd=tmp_path, NATS_URL=address).returncode
        event = '{"type": "OrderPlaced", "payload": {"order": 1}}'
        assert 0 == oncewire("publish", "evt.default.demo.a", event, cwd=tmp_path, NATS_URL=address).returncode
        environ = clean_environ(NATS_URL=address, SPARK_CONF_DIR=str(tmp_path / "conf"))
        command = [*ONCEWIRE, "pipeline", "run", "--once", "--json", "--data", str(data)]
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        request.addfinalizer(process.kill)  # Java ends with it
        seen: dict[int, tuple[bytes, bytes]] = {}

        def is_done() -> bool:
            seen.update({pid: command_and_environ(pid) for pid in processes_of(process.pid)})
            return process.poll() is not None or any(b"oncewire.pipeline.daemon" in told[0] for told in seen.values())

        until(is_done, "a worker of Spark", deadline_s=LAKE_S)
        said = "".join(process.communicate(timeout=LAKE_S))
        assert 0 == process.returncode, said
        assert any(b"oncewire.pipeline.daemon" in told[0] for told in seen.values()), "no worker was seen"
    finally:
        server.stop()
    for pid, (line, given) in seen.items():
        assert [] == planted.found_in(line), line
        assert pid == process.pid or [] == planted.found_in(given), line
    assert [] == planted.found_in(said)
    logged = files_below(events)
    assert any(b"SparkListenerSQLExecutionStart" in path.read_bytes() for path in logged)
    assert [] == [path for path in (*logged, *files_below(data)) if planted.found_in(path.read_bytes())]
    refused = oncewire(
        "pipeline",
        "run",
        "--once",
        "--data",
        str(tmp_path / "other"),
        cwd=tmp_path,
        NATS_URL=f"nats://me:{quoted(password)}x@127.0.0.1:1",
    )
    assert 0 != refused.returncode
    assert [] == planted.found_in(refused.stdout + refused.stderr)
