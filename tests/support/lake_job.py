"""A pipeline to be killed: reads streams, and the broker's topics, into a lake until bronze has `last` of each stream.
Started as a process by tests.

    lake_job.py <master> <url> <lake> <last> <stream> …

ONCEWIRE_CHECKPOINTS is the folder beside a lake in an object store.

Small batches and frequent housekeeping, so that there is always something to be struck. It prints a line of JSON for
what it has done.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from oncewire.pipeline import spark_session
from oncewire.pipeline.deriving import Batch
from oncewire.pipeline.lake import hold
from oncewire.pipeline.lake.keep import Keeping
from oncewire.pipeline.landing import Landed
from oncewire.pipeline.reading import Reads
from oncewire.pipeline.run import Pipeline
from oncewire.pipeline.topics import Round
from tests.support.lake_points import GATE, StoppingLake, put_seams

ROWS = 2_000
ROOT = Path(__file__).parents[2]


def main(master: str, url: str, lake: str, last: str, *streams: str) -> None:
    stop = threading.Event()
    reached = dict.fromkeys(streams, 0)

    def tell(told: Any) -> None:
        if isinstance(told, Landed):
            reached[told.span.lifetime[0]] = told.span.last
            print(json.dumps({"landed": told.span.last, "stream": told.span.lifetime[0]}), flush=True)
        elif isinstance(told, Batch):
            print(json.dumps({"silver": told.last_version, "rows": told.rows_in}), flush=True)
        elif isinstance(told, Round):
            print(json.dumps({"round": told.topics, "rows": told.rows}), flush=True)
        else:
            print(json.dumps({"state": told.stream, **told.shown()}), flush=True)
        if min(reached.values(), default=0) >= int(last):
            stop.set()

    put_seams()
    made = StoppingLake(lake, checkpoints=Path(os.environ.get("ONCEWIRE_CHECKPOINTS", "")))
    with hold.held(made.beside, what="a pipeline to be killed", since="now"):
        spark = spark_session(
            master,
            spark_ui_enabled=False,
            spark_log_level="ERROR",
            spark_sql_shuffle_partitions=2,
            spark_app_name="lake",
            **{"spark.executorEnv.PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", f"spark.executorEnv.{GATE}": made.beside},
        )
        reads = Reads({"url": url, "minPartitions": "2"}, trigger_s=0.2, rows_per_trigger=ROWS)
        pipeline = Pipeline(spark, made, streams, reads, keeping=Keeping(every_s=0.5), tell=tell)
        print(json.dumps({"started": True}), flush=True)
        pipeline.run(stop)
        assert not pipeline.stopped(), pipeline.stopped()
        pipeline.derive_all(threading.Event())
        spark.stop()
        print(json.dumps({"done": True}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
