"""What PostgreSQL committed reaches JetStream, in order and once."""
