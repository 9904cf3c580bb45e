"""The three ways to bring the code to a cluster with spark-submit, as docs/spark.md tells them: an environment that all
nodes share, a zip, a packed environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pyspark
import pytest

from oncewire.pipeline.session import prepare
from tests.spark.cluster import Cluster, cluster
from tests.spark.kills import assert_each_once
from tests.spark.support import fill, make_stream
from tests.support.nats import NatsServer, nats_server

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
JOB = ROOT / "tests" / "spark" / "submit_job.py"
PARTS = ("oncewire", "pyspark_oncewire")
COUNT = 2_000


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("cluster")) as found:
        yield found


@pytest.fixture(scope="module")
def nats() -> Iterator[NatsServer]:
    with nats_server() as server:
        yield server


def bare_python(folder: Path) -> Path:
    """An environment with everything but this project: a path file does not bring the path files of that path."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    site = next(folder.glob("lib/python3*/site-packages"))
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    python = folder / "bin" / "python"
    has_it = subprocess.run([python, "-c", "import oncewire"], capture_output=True, check=False, cwd=folder)
    assert has_it.returncode, "the environment must not have the project"
    return python


def submit(running: Cluster, nats: NatsServer, cwd: Path, environ: dict[str, str], *arguments: str) -> None:
    source, sink = make_stream(nats), make_stream(nats)
    fill(nats, source, COUNT)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYSPARK_", "PYTHONPATH"))}
    everything: dict[str, str] = {**inherited, **environ}
    prepare(everything, is_local=True)
    home = Path(pyspark.__file__).parent
    settings = ("spark.ui.enabled=false", "spark.driver.host=127.0.0.1", "spark.sql.shuffle.partitions=2")
    command = [str(home / "bin" / "spark-submit"), "--master", running.master]
    command += [part for setting in settings for part in ("--conf", setting)]
    command += [*arguments, str(JOB), nats.url, source, sink, str(cwd / "checkpoint")]
    done = subprocess.run(command, cwd=cwd, env=everything, capture_output=True, text=True, timeout=400, check=False)
    assert f"rows {COUNT}" in done.stdout, done.stderr[-4_000:]
    assert 0 == done.returncode, done.stderr[-4_000:]
    assert_each_once(nats, sink, COUNT)


def test_an_environment_that_all_nodes_share(running: Cluster, nats: NatsServer, tmp_path: Path) -> None:
    submit(running, nats, tmp_path, {}, "--conf", f"spark.pyspark.python={sys.executable}")


def test_a_zip_for_the_executors_and_on_the_drivers_path(running: Cluster, nats: NatsServer, tmp_path: Path) -> None:
    python = str(bare_python(tmp_path / "bare"))
    packed = tmp_path / "oncewire.zip"
    with zipfile.ZipFile(packed, "w") as archive:
        for part in PARTS:
            for path in sorted((ROOT / "src" / part).rglob("*")):
                if path.is_file() and "__pycache__" not in path.parts:
                    archive.write(path, path.relative_to(ROOT / "src"))
    environ = {"PYSPARK_PYTHON": python, "PYSPARK_DRIVER_PYTHON": python, "PYTHONPATH": str(packed)}
    submit(running, nats, tmp_path, environ, "--py-files", str(packed))


def test_an_environment_that_is_packed_and_unpacked_on_each_executor(
    running: Cluster, nats: NatsServer, tmp_path: Path
) -> None:
    bare_python(tmp_path / "env")
    site = next((tmp_path / "env").glob("lib/python3*/site-packages"))
    for part in PARTS:
        shutil.copytree(ROOT / "src" / part, site / part, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["tar", "-czf", tmp_path / "env.tar.gz", "-C", tmp_path / "env", "."], check=True)
    environ = {"PYSPARK_PYTHON": "./env/bin/python", "PYSPARK_DRIVER_PYTHON": "./env/bin/python"}
    submit(running, nats, tmp_path, environ, "--archives", f"{tmp_path / 'env.tar.gz'}#env")
