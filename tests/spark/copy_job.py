"""A driver to be killed: copies one stream into another until it has seen `last`. Started as a process by the tests.

    copy_job.py <master> <url> <source> <sink> <checkpoint> <last>

It prints one line of JSON per finished batch, so that the killer knows when something is going on.
"""

from __future__ import annotations

import json
import re
import sys

from oncewire.pipeline import spark_session
from oncewire.pipeline.source import HAS_ADMISSION

RECORDS = 20_000
"""So many that publishing a batch takes long enough to be struck."""


def main(master: str, url: str, source: str, sink: str, checkpoint: str, last: str) -> None:
    spark = spark_session(
        master, spark_ui_enabled=False, spark_log_level="ERROR", spark_sql_shuffle_partitions=2, spark_app_name="copy"
    )
    options = {"url": url, "stream": source, "startingOffsets": "earliest", "minPartitions": "2"}
    if HAS_ADMISSION:
        options["maxRecordsPerTrigger"] = str(RECORDS)
    frame = spark.readStream.format("jetstream").options(**options).load()
    writer = frame.selectExpr(f"'{sink}.x' as subject", "payload").writeStream.format("jetstream")
    query = writer.options(url=url, checkpointLocation=checkpoint).start()
    print(json.dumps({"started": True}), flush=True)
    shown = -1
    while not query.awaitTermination(1):
        progress = query.lastProgress
        if progress and progress["batchId"] != shown and progress["sources"][0]["endOffset"]:
            shown = progress["batchId"]
            end = _sequence(progress["sources"][0]["endOffset"])
            print(json.dumps({"batch": shown, "end": end}), flush=True)
            if end > int(last):
                query.stop()
                spark.stop()
                print(json.dumps({"done": True}), flush=True)
                return


def _sequence(offset: str) -> int:
    """Of an offset as the progress shows it: JSON, or in Spark 4.0 what Java prints of a map."""
    found = re.search(r"sequence\W+(\d+)", offset)
    assert found, offset
    return int(found[1])


if __name__ == "__main__":
    main(*sys.argv[1:])
