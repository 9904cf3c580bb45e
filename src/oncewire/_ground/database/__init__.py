"""PostgreSQL: connections, translated errors, named queries, migrations. SQL itself lives in the parts that own it."""
