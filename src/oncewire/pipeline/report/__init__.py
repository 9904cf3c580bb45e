"""The report: one HTML page about the lake that needs nothing beside itself."""
