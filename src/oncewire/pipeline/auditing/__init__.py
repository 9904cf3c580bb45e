"""Audits: Spark proves from the lake alone that nothing was lost, doubled or changed."""
