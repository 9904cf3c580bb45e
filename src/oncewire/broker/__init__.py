"""The `/v1` broker: topics, partitions, groups, leases, retries and idempotency, over HTTP."""
