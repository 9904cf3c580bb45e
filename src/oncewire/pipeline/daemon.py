"""Spark's Python daemon, with two things mended.

Java closes workers that had nothing to do for a minute; through a Unix socket a worker sees that as a broken pipe, and
PySpark's own daemon prints a traceback for each.

PySpark collects garbage after each task, over everything that the worker has ever imported: some 17 ms for which the
next task waits. What is there once a task has brought new modules is left out of that from then on.
"""

from __future__ import annotations

import gc
import socket
import sys

from pyspark import daemon

_work = daemon.worker
_modules = 0


def worker(sock: socket.socket, authenticated: bool) -> int:
    """One round of a worker; any code but 0 ends it."""
    global _modules
    try:
        code: int = _work(sock, authenticated)
    except BrokenPipeError:
        return 1
    if len(sys.modules) > _modules:
        gc.collect()  # or what is garbage now would stay for good
        gc.freeze()
        _modules = len(sys.modules)
    return code


if __name__ == "__main__":
    daemon.worker = worker
    daemon.manager()
