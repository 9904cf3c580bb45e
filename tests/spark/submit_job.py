"""What spark-submit gets: copies a stream with the session that it is given. Imports nothing but pyspark.

submit_job.py <url> <source> <sink> <checkpoint>
"""

from __future__ import annotations

import sys

from pyspark.sql import SparkSession


def main(url: str, source: str, sink: str, checkpoint: str) -> None:
    spark = SparkSession.builder.getOrCreate()
    print("rows", spark.read.format("jetstream").options(url=url, stream=source, minPartitions="2").load().count())
    options = {"url": url, "stream": source, "startingOffsets": "earliest", "minPartitions": "2"}
    frame = spark.readStream.format("jetstream").options(**options).load()
    writer = frame.selectExpr(f"'{sink}.x' as subject", "payload").writeStream.format("jetstream")
    writer.options(url=url, checkpointLocation=checkpoint).trigger(availableNow=True).start().awaitTermination()
    spark.stop()


main(*sys.argv[1:])
