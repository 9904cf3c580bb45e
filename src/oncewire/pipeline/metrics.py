"""How far the lake is, for whoever watches the pipeline. Reads tables and asks the server; needs no Spark."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from oncewire._ground.metrics import Page
from oncewire.pipeline import standing
from oncewire.pipeline.auditing.run import last_verdicts
from oncewire.pipeline.lake.log import Lake
from oncewire.pipeline.reading import Streams
from oncewire.pipeline.standing import StreamStands, TableStands, TopicsStand
from oncewire.pipeline.tables import BRONZE


class Watch:
    """`look` in a thread, then `collect`. It asks the server over a connection of its own."""

    def __init__(self, lake: Lake, names: Sequence[str], connect: Callable[[], Streams]) -> None:
        self._lake = lake
        self._names = list(names)
        self._connect = connect
        self._streams: list[StreamStands] = []
        self._tables: list[TableStands] = []
        self._topics: TopicsStand | None = None
        self._silver_behind = 0
        self._audit: tuple[bool, float] | None = None

    def look(self) -> None:
        server = self._connect()
        try:
            self._streams = standing.streams(self._lake, self._names, server)
            self._topics = standing.topics(self._lake, server)
        finally:
            server.close()
        self._tables = standing.tables(self._lake)
        bronze = self._lake.open(BRONZE).version() if self._lake.exists(BRONZE) else -1
        self._silver_behind = max(0, bronze - standing.silver_has(self._lake))
        verdict = next(iter(last_verdicts(self._lake.place)), None)
        self._audit = (verdict.is_good, verdict.at_ms / 1000) if verdict else None

    def collect(self, page: Page) -> None:
        stopped = [one for one in self._streams if one.state == "stopped"]
        topics_stopped = len(self._topics.stopped) if self._topics else 0
        page.put("oncewire_pipeline_ready", 0 if stopped or topics_stopped else 1)
        page.put("oncewire_pipeline_topics_stopped", topics_stopped)
        if self._topics is not None and self._topics.behind is not None:
            page.put("oncewire_pipeline_topics_behind", self._topics.behind)
        for one in self._streams:
            page.put("oncewire_pipeline_stream_sequence", one.reached, stream=one.name)
            page.put("oncewire_pipeline_stopped", one in stopped, stream=one.name)
            if one.last is not None:
                page.put("oncewire_pipeline_lag", max(0, one.last - one.reached), stream=one.name)
        for table in self._tables:
            page.put("oncewire_pipeline_rows", table.rows, table=table.name)
            page.put("oncewire_pipeline_bytes", table.size_bytes, table=table.name)
        page.put("oncewire_pipeline_silver_behind", self._silver_behind)
        if self._audit is not None:
            is_good, at_s = self._audit
            page.put("oncewire_pipeline_audit_good", is_good)
            page.put("oncewire_pipeline_audit_timestamp_seconds", at_s)
