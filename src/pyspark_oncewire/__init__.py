"""pyspark."""
