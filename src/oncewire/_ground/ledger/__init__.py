"""What an agent has done, durably: inbox, outcomes, effects, state hash. SQLite and PostgreSQL behind one protocol."""
