"""`oncewire broker`, as processes of its own."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from oncewire._ground.errors import Overloaded, Unavailable
from oncewire.broker.client import SyncBrokerClient
from oncewire.cli.broker import broker
from tests.support.up import clean_environ

BROKER = [sys.executable, "-c", "from oncewire.cli.broker import broker; broker()"]


def run(*words: str) -> Result:
    """A command that ends by itself, in this process: starting Python costs more than what it does."""
    return CliRunner().invoke(broker, list(words))


class Running:
    """A broker that serves until the block ends."""

    def __init__(self, *words: str) -> None:
        command = [*BROKER, "run", "--listen", "127.0.0.1:0", "--json", *words]
        self.process = subprocess.Popen(command, env=clean_environ(), stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.serving: dict[str, Any] = json.loads(self.process.stdout.readline())

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.stdout is not None
        said = self.process.stdout.read()
        self.process.stdout.close()
        assert 0 == self.process.wait(30)
        assert "end" == json.loads(said.splitlines()[-1])["event"]


def test_a_log_without_a_name_is_not_taken_for_none() -> None:
    """`--wal "$DIR"` with a variable that is not set: what should be durable would be in memory."""
    refused = run("run", "--listen", "127.0.0.1:0", "--wal", "")
    assert 2 == refused.exit_code
    assert "--wal names no folder" in refused.output


def test_it_serves_stops_and_finds_everything_again(tmp_path: Path) -> None:
    wal = str(tmp_path / "wal")
    with Running("--wal", wal) as running:
        assert (wal, True) == (running.serving["wal"], running.serving["wal_enabled"])
        with SyncBrokerClient(running.serving["url"]) as client:
            client.create_topic("t", partitions=2)
            client.produce("t", "hello")
            refused = run("run", "--listen", "127.0.0.1:0", "--wal", wal)
            assert (2, True) == (refused.exit_code, "error:" in refused.output), "one process has a log"
    with Running("--wal", wal) as running, SyncBrokerClient(running.serving["url"]) as client:
        assert ["hello"] == [one.value for one in client.take("t", "g", wait_s=10)]
    shown = json.loads(run("wal", "inspect", wal, "--json").output)
    assert (True, "") == (shown["is_sealed"], shown["damage"])
    assert "closed cleanly" in run("wal", "inspect", wal).output
    assert 0 == run("wal", "verify", wal).exit_code
    segment = max(Path(wal).iterdir(), key=lambda path: path.stat().st_size)
    damaged = bytearray(segment.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    segment.write_bytes(damaged)
    assert 4 == run("wal", "verify", wal).exit_code


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of four megabytes."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this machine lets us mount nothing; the simulated disk stands for it")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(client: SyncBrokerClient) -> list[str]:
    """Produce until the disk is full; what was acknowledged."""
    kept: list[str] = []
    with contextlib.suppress(Unavailable):
        while len(kept) < 1_000:
            client.produce("t", f"{len(kept)} " + "x" * 20_000)
            kept.append(str(len(kept)))
    assert 0 < len(kept) < 1_000
    return kept


def test_a_full_disk_is_said_and_the_broker_goes_on_once_there_is_room(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(2 << 20))
    with Running("--wal", str(small_disk / "wal")) as running, SyncBrokerClient(running.serving["url"]) as client:
        client.create_topic("t")
        kept = fill(client)
        with pytest.raises(Unavailable, match="is full: nothing was written"):
            client.produce("t", "too much")
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(running.serving["url"] + "/v1/readyz")
        ballast.unlink()
        client.produce("t", "after")
        got: list[str] = []
        while got[-1:] != ["after"]:
            for delivery in client.take("t", "g", most=100, wait_s=10):
                got.append(delivery.value.split()[0])
                client.ack(client.lease("t", "g", delivery))
    assert [*kept, "after"] == got


def test_without_a_log_it_says_that_it_forgets() -> None:
    process = subprocess.Popen(
        [*BROKER, "run", "--listen", "127.0.0.1:0"], env=clean_environ(), stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert "in memory: a restart forgets everything" in process.stdout.readline()
    finally:
        process.terminate()
        process.communicate(timeout=30)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--listen", "0.0.0.0:0"], "without authentication"),
        (["--listen", "8080"], "must be host:port"),
        (["--engine", "magic"], "must be local"),
        (["--router", "brain"], "is not MODULE:CALLABLE"),
        (["--router", "no_such_brain:route"], "there is no module"),
        (["--router", "json:no_such"], "not a callable"),
        (["--broker-lease-ms", "0"], "must be from 1"),
    ],
)
def test_what_cannot_be_run_is_refused(words: list[str], told: str) -> None:
    done = run("run", *words)
    assert (2, True) == (done.exit_code, told in done.output), done.output


def test_a_listener_for_watchers_and_log_lines_for_machines(tmp_path: Path) -> None:
    """What a command shows is log lines; traces to a file end up there when it stops."""
    words = ("--metrics-listen", "127.0.0.1:0", "--log-format", "json", "--traces", f"file:{tmp_path / 'spans'}")
    with Running(*words) as running:
        assert ("info", "broker", "serving") == tuple(running.serving[key] for key in ("level", "part", "event"))
        with SyncBrokerClient(running.serving["url"]) as client:
            client.create_topic("t")
        trace = {"traceparent": f"00-{'1' * 32}-{'2' * 16}-01"}
        asked = urllib.request.Request(running.serving["url"] + "/v1/produce?topic=t&value=x", b"", trace)
        with urllib.request.urlopen(asked) as answer:
            assert 200 == answer.status
        with urllib.request.urlopen(running.serving["metrics_url"] + "/readyz") as answer:
            assert "ready" == json.load(answer)["status"]
        with urllib.request.urlopen(running.serving["metrics_url"] + "/metrics") as answer:
            assert "\noncewire_broker_produced_total 1\n" in answer.read().decode()
    (span,) = [json.loads(line) for line in (tmp_path / "spans").read_text().splitlines()]
    assert ("send t", f"0x{'2' * 16}") == (span["name"], span["parent_id"])


def test_metrics_have_the_names_that_dashboards_know() -> None:
    with Running("--broker-partition-messages-max", "1") as running, SyncBrokerClient(running.serving["url"]) as client:
        client.create_topic("t")
        client.produce("t", "x")
        client.take("t", "g", wait_s=10, lease_ms=60_000)
        with pytest.raises(Overloaded):
            client.produce("t", "y")
        with urllib.request.urlopen(running.serving["url"] + "/metrics") as answer:
            shown = answer.read().decode()
    assert 'consumer_lag{group="g",partition="0",topic="t"} 1\n' in shown
    assert 'inflight_messages{group="g",partition="0",topic="t"} 1\n' in shown
    assert 'produce_rejected_total{reason="partition_buffer_full"} 1\n' in shown
    assert "\ndlq_messages_total 0\n" in shown
    assert "\noncewire_broker_produced_total 1\n" in shown
    assert 'oncewire_http_responses_total{server="broker",status="200"}' in shown
