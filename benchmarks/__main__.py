"""`make bench`, or `python -m benchmarks codec client` for some of them."""

from __future__ import annotations

import importlib
import sys

BENCHMARKS = {
    "codec": "envelopes beside pydantic",
    "client": "the NATS client beside nats-py",
    "agent": "an agent beside a plain loop, the protocol on nats-py, and FastStream",
    "agent_stages": "where an agent's time goes, stage by stage",
    "traces": "what traces cost an agent",
    "dlq": "dead letters and their replay beside nats-py, one at a time",
    "relay": "the outbox and its relay",
    "engine": "the broker's engine, without HTTP",
    "http": "the HTTP front beside uvicorn",
    "broker": "the broker: produce, cycles, batches",
    "gateway": "rooms beside the broadcast of websockets, tokens beside uvicorn",
    "broker_jetstream": "the broker over JetStream beside its own log: nodes, takeover, topics",
    "spark": "the Spark source and sink beside nats-py",
    "pipeline": "the lake's tables beside the bare source and a plain Structured Streaming job",
    "audit": "an audit of a whole lake",
}


def main() -> None:
    names = sys.argv[1:] or list(BENCHMARKS)
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        sys.exit(f"there is no benchmark {unknown[0]!r}; there are: {', '.join(BENCHMARKS)}")
    for name in names:
        print(f"\n=== {name}: {BENCHMARKS[name]}\n", flush=True)
        importlib.import_module(f"benchmarks.{name}").main()


main()
