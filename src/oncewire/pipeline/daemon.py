"""Spark's Python daemon, quiet when Java lets a worker go. Java closes workers that had nothing to do for a minute;
through a Unix socket a worker sees that as a broken pipe, and PySpark's own daemon prints a traceback for each."""

from __future__ import annotations

import socket

from pyspark import daemon

_work = daemon.worker


def worker(sock: socket.socket, authenticated: bool) -> int:
    """One round of a worker; any code but 0 ends it."""
    try:
        return _work(sock, authenticated)
    except BrokenPipeError:
        return 1


if __name__ == "__main__":
    daemon.worker = worker
    daemon.manager()
