"""What PostgreSQL committed reaches JetStream, in order and once: enqueue in your own transaction, a relay publishes."""
