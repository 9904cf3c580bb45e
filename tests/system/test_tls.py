"""TLS on the connections that we make to NATS: the monitoring port, and a certificate that is renewed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from oncewire._ground import monitor, topology
from oncewire._ground.errors import InvalidSetting, NotConnected
from oncewire._ground.jetstream import Client, options_from
from oncewire._ground.settings import Settings
from oncewire.cli import dlq as cli_dlq
from oncewire.cli import main, observe
from oncewire.dlq import serving as serving_dlq
from tests.support.console import served
from tests.support.nats import NatsServer, nats_server
from tests.support.tls import Authority
from tests.support.wait import until


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


def tls_of(authority: Authority, more: str = "") -> str:
    cert, key = authority.issue("server")
    return f'tls {{ cert_file: "{cert}", key_file: "{key}", ca_file: "{authority.path}", {more} }}'


@pytest.fixture(scope="module")
def secure(authority: Authority) -> Iterator[NatsServer]:
    """Clients and monitoring speak TLS alone, by the same certificate, of an authority of its own."""
    with nats_server(tls_of(authority), sync_always=True, is_monitor_tls=True) as running:
        yield running


# ---- the monitoring port


def examined(folder: Path, **environ: str) -> dict[str, dict[str, str]]:
    given = {"NATS_URL": "", "ONCEWIRE_POSTGRES_URL": "", "ONCEWIRE_DATA": str(folder), **environ}
    done = CliRunner().invoke(main, ["doctor", "--json"], env=given)
    return {one["name"]: one for one in json.loads(done.stdout)["checks"]}


def test_the_doctor_asks_the_monitoring_port_as_it_trusts_the_server(
    secure: NatsServer, authority: Authority, tmp_path: Path
) -> None:
    given = {"NATS_URL": secure.url, "NATS_CA": str(authority.path)}
    assert "ok" == examined(tmp_path, **given, NATS_MONITOR_URL=secure.monitor_url)["durability"]["verdict"]
    plain = examined(tmp_path, **given, NATS_MONITOR_URL=secure.monitor_url.replace("https", "http"))["durability"]
    assert "warning" == plain["verdict"], "it answers to nobody in the clear"
    with nats_server(tls_of(Authority(tmp_path, "stranger")), sync_always=True, is_monitor_tls=True) as other:
        told = examined(tmp_path, **given, NATS_MONITOR_URL=other.monitor_url)["durability"]
    assert ("warning", True) == (told["verdict"], "cannot be trusted" in told["text"])


async def test_readiness_metrics_and_the_console_know_the_promise_over_tls(
    secure: NatsServer, authority: Authority, tmp_path: Path
) -> None:
    named = {"nats_url": secure.url, "nats_monitor_url": secure.monitor_url, "nats_ca": str(authority.path)}
    settings = Settings(data=tmp_path, metrics_listen="127.0.0.1:0", **named)
    async with Client(options_from(settings, name="dlq")) as client:
        await topology.ensure(client, topology=topology.load(settings=settings))
        async with serving_dlq(client) as service, observe.serving(cli_dlq.observer(settings, client, service)) as url:
            checks = {one["name"]: one for one in json.loads((await monitor.ask(url, "/readyz"))[1])["checks"]}
            assert "ok" == checks["durability"]["verdict"], checks
            assert "oncewire_readiness_durability 2\n" in (await monitor.ask(url, "/metrics"))[1].decode()
    async with served(secure, tmp_path, nats_ca=str(authority.path)) as console:
        assert monitor.Promise.POWER is (await console.watch.surveyor.durability()).promise


async def test_a_monitoring_port_that_cannot_be_trusted_is_said_with_what_to_do(secure: NatsServer) -> None:
    with pytest.raises(NotConnected, match="cannot be trusted") as caught:
        await monitor.ask_json(secure.monitor_url, "/jsz")
    assert "nats.ca" in caught.value.hint


# ---- a certificate of our own


async def test_a_renewed_client_certificate_is_shown_at_the_next_connection(
    authority: Authority, tmp_path: Path
) -> None:
    """Without a restart; while somebody writes it, the connection waits."""
    cert, key = (shutil.copy(one, tmp_path) for one in authority.issue("first"))
    mine = {"nats_cert": str(cert), "nats_key": str(key), "nats_ca": str(authority.path)}
    with nats_server(tls_of(authority, "verify: true"), is_monitor_tls=True) as server:
        async with Client(options_from(Settings(nats_url=server.url, **mine), name="renewed")) as client:

            async def shown() -> str:
                return json.dumps(await monitor.ask_json(server.monitor_url, "/connz?auth=1", client_trust))

            client_trust = client.connection.options.trust  # monitoring asks for no certificate of the client
            assert "CN=first" in await shown()
            Path(cert).write_text("half of it")
            server.kill()
            server.start()
            await until(lambda: not client.connection.is_ready)
            with pytest.raises(InvalidSetting):
                options_from(Settings(nats_url=server.url, **mine), name="another")
            for one, into in zip(authority.issue("second"), (cert, key), strict=True):
                shutil.copy(one, into)
            await until(lambda: client.connection.is_ready, "a new connection")
            assert "CN=second" in await shown()
