"""Spark looks into every module whose name begins with `pyspark_` for a data source: here it finds "jetstream"."""

from oncewire.pipeline.source import JetStreamSource as DefaultSource

__all__ = ["DefaultSource"]
