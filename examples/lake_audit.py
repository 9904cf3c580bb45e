"""Audit a lake and ask gold a question, in a job of your own: ONCEWIRE_LAKE names the lake's folder.

Beside `oncewire up`, in the same folder: `oncewire pipeline run --once`, then this.
"""

import os

from oncewire.pipeline import audit, health, read_table, spark_session

LAKE = os.environ.get("ONCEWIRE_LAKE", ".oncewire/lake")

spark = spark_session("local[*]", spark_ui_enabled=False)
verdict = audit(spark, LAKE)
print("good" if verdict.is_good else f"{verdict.errors} findings")
for finding in verdict.findings:
    print(finding.sentence)

silver = {name: read_table(spark, LAKE, f"silver/{name}") for name in ("runtime", "message", "realtime")}
busiest = health(silver).groupBy("stream").sum("messages").orderBy("sum(messages)", ascending=False)
for row in busiest.collect():
    print(f"{row['stream']}: {row['sum(messages)']} messages")
