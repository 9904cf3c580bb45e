"""Read a stream with Spark, join it with a table, write the result back: each order is rated once.

Run it beside `oncewire up`, or with NATS_URL at a server that has the topology:  python examples/spark_enrich.py
Run it again whenever you like: an order that is stored already is not stored again (`once=True`), and the query goes on
where it stopped (its checkpoint). Only a run that was killed, and is repeated after the duplicate window, writes its
last batch again, under the same ids.
"""

import asyncio
import os
from pathlib import Path

from pyspark.sql.functions import col, concat, concat_ws, from_json, lit, struct, to_json

import oncewire
from oncewire.pipeline import spark_session

URL = os.environ.get("NATS_URL", "nats://localhost:4222")
STREAM = "MESHFORGE_EVENTS"
PLACED, RATED = "evt.default.demo.spark-enrich.placed", "evt.default.demo.spark-enrich.rated."
CHECKPOINT = Path(os.environ.get("ONCEWIRE_DATA", ".oncewire"), "spark-enrich").absolute()
EVENT = "payload struct<order: long, customer: long, cents: long>"


async def place_orders() -> None:
    async with oncewire.connect(URL) as client:
        for order in range(10):
            event = {"type": "OrderPlaced", "payload": {"order": order, "customer": order % 3, "cents": 100 * order}}
            await client.publish(PLACED, event, msg_id=f"spark-enrich-{order}", once=True)


def main() -> None:
    asyncio.run(place_orders())
    spark = spark_session("local[2]", spark_ui_enabled=False, spark_log_level="ERROR")
    customers = spark.createDataFrame([(0, "gold"), (1, "silver")], "customer long, tier string")
    orders = (
        spark.readStream.format("jetstream")
        .options(url=URL, stream=STREAM, subjects=PLACED, startingOffsets="earliest")
        .load()
    )
    placed = orders.select("stream", "sequence", from_json(col("payload").cast("string"), EVENT).alias("event"))
    enriched = placed.join(customers, placed.event.payload.customer == customers.customer)
    rated = enriched.select(
        concat(lit(RATED), col("tier")).alias("subject"),
        to_json(struct(lit("OrderRated").alias("type"), col("event.payload").alias("payload"))).alias("payload"),
        concat_ws(":", lit("rated"), "stream", "sequence").alias("msg_id"),
    )
    writer = rated.writeStream.format("jetstream").options(url=URL, checkpointLocation=str(CHECKPOINT))
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    print("read", sum(progress["numInputRows"] for progress in query.recentProgress), "orders; what was written:")
    written = spark.read.format("jetstream").options(url=URL, stream=STREAM, subjects=f"{RATED}*").load()
    written.selectExpr("sequence", "subject", "cast(payload as string)").show(50, False)


main()
