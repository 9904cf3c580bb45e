"""Starts and stops a real nats-server and a real PostgreSQL on this machine, from wheels, and finds Java.

`stack.Stack` is what `oncewire up` runs; `folder.DataFolder` is where it keeps everything. Nothing here knows what is
sent through the servers. A program of yours finds the PostgreSQL of a running `up` with `postgres_url()`.
"""

from oncewire.embedded.here import postgres_url

__all__ = ["postgres_url"]
