"""A Spark session that works at once, in scripts and notebooks: Java found, the workers' Python set."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from oncewire._ground.files import owner_only
from oncewire.pipeline import java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DEFAULTS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.ui.showConsoleProgress": "false",
    "spark.hadoop.fs.permissions.umask-mode": "077",
}

LOCAL = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.python.daemon.module": "oncewire.pipeline.daemon",
}


def spark_session(master: str = "local[*]", **conf: object) -> SparkSession:
    """The session of this process. Settings are Spark's own names, with dots (`**{"spark.ui.enabled": False}`) or
    with underscores in their place (`spark_ui_enabled=False`).

    A local master also gets its address set to loopback: nothing listens outside, and no name need be resolved. Where
    Spark can (4.1), Java and the Python workers of one machine talk through Unix sockets, which cost less.
    """
    settings = {**DEFAULTS, **spelled(conf)}
    is_local = master.startswith("local")
    if is_local:
        settings = {**LOCAL, **settings}
    prepare(os.environ, is_local=is_local)
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(master).appName(str(settings.pop("spark.app.name", "oncewire")))
    for name, value in settings.items():
        builder = builder.config(name, value)
    with owner_only():  # Java and its workers keep that; Hadoop has a umask of its own, for checkpoints and tables
        return builder.getOrCreate()


def spelled(conf: dict[str, Any]) -> dict[str, str]:
    """Spark's spelling of names and values."""
    return {
        name if "." in name else name.replace("_", "."): str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in conf.items()
    }


def prepare(environ: MutableMapping[str, str], *, is_local: bool) -> None:
    """What must stand in the environment before Java starts. What the user has set stays."""
    home = java.home()
    if home:
        environ["JAVA_HOME"] = str(home)
    if is_local:
        environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    environ.setdefault("PYSPARK_PYTHON", sys.executable)
    environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
