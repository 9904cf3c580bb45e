"""The command line: `oncewire NOUN VERB`. One module per noun; the only place that wires parts together.

A noun's module is imported when its command runs, so that `oncewire --help` does not pay for Spark or PostgreSQL.

Exit codes, the same for every command:
    0  done, or all is well
    1  the command worked, and what it looked at is not well (a broken check, drift, a failed audit)
    2  refused: bad arguments, settings or input; the same call fails again
    3  unavailable: a server or a resource is not there now; try again
    4  corrupt: data or a peer broke its rules; a person must look
    5  failed: a part of the service ended although nobody asked it to; the log says why, start it again
  130  stopped by Ctrl-C
"""

from __future__ import annotations

import importlib
from pathlib import Path

import click

import oncewire

NOUNS = {
    "agent": ("oncewire.cli.agent:agent", "Run agents, see how they stand, prove what they did."),
    "broker": ("oncewire.cli.broker:broker", "Queues over HTTP: run the broker, look into its log."),
    "config": ("oncewire.cli.config:config", "Print each setting, its value and where the value came from."),
    "console": ("oncewire.cli.console:console", "A page that shows what the parts do, live."),
    "contracts": ("oncewire.cli.contracts:contracts", "The types of the messages: export their schemas, check one."),
    "demo": ("oncewire.cli.demo:demo", "A tour through every part, with a verdict at its end."),
    "dlq": ("oncewire.cli.dlq:dlq", "Dead letters: keep what failed, look at it, bring it back."),
    "doctor": ("oncewire.cli.doctor:doctor", "Look at servers, disk and machine: what holds, what to do."),
    "gateway": ("oncewire.cli.gateway:gateway", "Rooms over WebSocket and tokens over SSE, for browsers."),
    "keys": ("oncewire.cli.keys:keys", "API keys: make one, list them, revoke one."),
    "migrate": ("oncewire.cli.migrate:migrate", "Make the tables in PostgreSQL, or print their SQL."),
    "outbox": ("oncewire.cli.outbox:outbox", "What waits to be published: status, retry, void, purge."),
    "pipeline": ("oncewire.cli.pipeline:pipeline", "Tables of all that flowed: run, see how they stand."),
    "publish": ("oncewire.cli.publish:publish", "Publish one message to a stream, confirmed."),
    "relay": ("oncewire.cli.relay:relay", "Publish what PostgreSQL committed, in order."),
    "topology": ("oncewire.cli.topology:topology", "Streams and consumers as declared: lint, plan, apply, check."),
    "up": ("oncewire.cli.up:up", "Start a NATS JetStream and a PostgreSQL here, and serve."),
}
"""Each noun: where its command is, and the line that the list shows for it without importing that."""

EXIT_CODES = "\b\n" + __doc__.partition("every command:\n")[2]


class Nouns(click.Group):
    """Finds a command by its name in NOUNS and imports only that."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return sorted(NOUNS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:  # noqa: ARG002
        if name not in NOUNS:
            return None
        module, _, attribute = NOUNS[name][0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, NOUNS[name][1]) for name in self.list_commands(ctx)])


@click.command(cls=Nouns, epilog=f"Exit codes:\n\n{EXIT_CODES}", context_settings={"max_content_width": 100})
@click.option("--config", "config_file", type=click.Path(path_type=Path), help="Settings file (else oncewire.toml).")
@click.version_option(oncewire.__version__, message="oncewire %(version)s")
@click.pass_context
def main(ctx: click.Context, config_file: Path | None) -> None:
    """Durable messaging on NATS JetStream: every effect happens once.

    \b
    Start here:
      oncewire demo        a tour through every part, in a minute or two
      oncewire up          a NATS JetStream and a PostgreSQL on this machine
      oncewire doctor      what is there, what it promises, what is missing
    """
    ctx.obj = config_file
