"""`oncewire topology` as a person and as a script meet it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nats
import pytest
from click.testing import CliRunner, Result

from oncewire.cli.topology import topology
from tests.support.nats import NatsServer

VECTORS = Path(__file__).parents[1] / "vectors" / "topology"
Run = Callable[..., Result]

ORDERS = """
[streams.ORDERS]
subjects = ["orders.>"]
max_age = "1d"

[consumers.ORDERS.biller]
filters = ["orders.placed"]
services = ["shop"]
dlq_subject = "dlq.orders.placed"

[services.shop]
publishes = ["orders.>"]
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)

    def invoke(*arguments: str, code: int = 0, **options: Any) -> Result:
        result = CliRunner().invoke(topology, [*arguments], **options)
        assert result.exit_code == code, result.output
        return result

    return invoke


@pytest.fixture
def live(run: Run, server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("NATS_URL", server.url)
    return run


@pytest.fixture
def orders(tmp_path: Path) -> str:
    path = tmp_path / "orders.toml"
    path.write_text(ORDERS)
    return str(path)


def request(server: NatsServer, endpoint: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    async def ask() -> dict[str, Any]:
        connection = await nats.connect(server.url)
        reply = await connection.request(f"$JS.API.{endpoint}", json.dumps(body).encode() if body else b"", timeout=5)
        await connection.close()
        answer: dict[str, Any] = json.loads(reply.data)
        assert "error" not in answer, answer
        return answer

    return asyncio.run(ask())


def test_plan_is_empty_after_apply(live: Run) -> None:
    assert "51 to create; 0 as declared" in live("plan").output
    assert "51 created; 51 as declared" in live("apply").output
    assert live("plan").output == "nothing to do: 51 as declared\n"
    assert live("apply").output == "nothing to do; 51 as declared\n"


def test_check_tells_by_its_exit_code(live: Run) -> None:
    live("check", code=1)
    live("apply")
    live("check")


def test_plans_are_machine_readable(live: Run) -> None:
    shown = json.loads(live("plan", "--json").stdout)
    assert len(shown["steps"]) == 51
    assert shown["steps"][0] == {
        "item": "stream:MESHFORGE_EVENTS",
        "act": "create",
        "changes": [],
        "needs": "",
        "cost": "",
    }
    done = json.loads(live("apply", "--json").stdout)
    assert (len(done["done"]), done["steps"], len(done["same"])) == (51, [], 51)


def test_a_users_file_adds_to_the_catalogs(live: Run, orders: str) -> None:
    assert "53 created" in live("apply", "--file", orders).output
    undeclared = live("check").output
    assert "?  stream    ORDERS  not declared, left alone" in undeclared


def test_a_service_gets_its_part(live: Run, orders: str) -> None:
    assert "2 created; 2 as declared" in live("apply", "--file", orders, "--service", "shop").output
    live("check", "--file", orders, "--service", "shop")


def test_a_stream_is_recreated_only_when_named_and_confirmed(live: Run, server: NatsServer, orders: str) -> None:
    live("apply", "--file", orders, "--service", "shop")
    config = request(server, "STREAM.INFO.ORDERS")["config"]
    request(server, "STREAM.UPDATE.ORDERS", {**config, "deny_purge": True})
    mine = ("--file", orders, "--service", "shop")
    refused = live("apply", *mine, code=1).output
    assert "only with --recreate stream:ORDERS" in refused
    assert "deletes 0 messages" in refused
    assert "1 left as they are" in refused
    unasked = live("apply", *mine, "--recreate", "stream:ORDERS", code=2)
    assert "Add --yes if that is what you want." in unasked.output
    assert request(server, "STREAM.INFO.ORDERS")["config"]["deny_purge"]
    assert "1 made anew, 1 created" in live("apply", *mine, "--recreate", "stream:ORDERS", "--yes").output


def test_a_flag_for_something_undeclared_is_a_typo(live: Run) -> None:
    for flag in ("--recreate", "--accept"):
        assert "nothing that is called 'stream:BILING'" in live("apply", flag, "stream:BILING", code=2).output


def test_lint_needs_no_server_and_warnings_are_no_failure(run: Run) -> None:
    shown = run("lint").output
    assert shown.endswith("24 streams, 27 consumers: 7 warnings\n")
    assert "platform.toml:8 streams.BILLING.max_bytes: beyond 64 MiB" in shown


def test_lint_fails_on_errors_and_shows_each_with_its_remedy(run: Run) -> None:
    mistakes = str(VECTORS / "twenty-mistakes.toml")
    shown = run("lint", "--file", mistakes, code=1).output
    assert "23 errors, 7 warnings" in shown
    assert "twenty-mistakes.toml:9 streams.ORDERS.max_mgs: is no key of a stream\n         → Did you mean" in shown
    listed = json.loads(run("lint", "--file", mistakes, "--json", code=1).stdout)
    assert {"severity", "code", "place", "message", "remedy"} == set(listed[0])


@pytest.mark.parametrize("verb", ["plan", "check", "apply", "export"])
def test_nothing_is_done_with_a_declaration_that_has_errors(run: Run, verb: str) -> None:
    """Refused before any server is asked: none runs here."""
    assert "23 errors" in run(verb, "--file", str(VECTORS / "twenty-mistakes.toml"), code=2).output


def test_without_a_server_it_is_unavailable(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NATS_URL", "nats://127.0.0.1:1")
    assert "no NATS server can be reached" in run("plan", code=3).output


def test_three_copies_need_a_cluster(live: Run) -> None:
    shown = live("apply", "--env", "prod", code=2).output
    assert "replicas > 1 not supported" in shown
    assert "--env dev" in shown


@pytest.mark.parametrize("form", ["asyncapi", "json", "toml"])
def test_export_writes_to_stdout_or_a_file(run: Run, tmp_path: Path, form: str) -> None:
    shown = run("export", "--format", form).stdout
    run("export", "--format", form, "--out", str(tmp_path / "out"))
    assert (tmp_path / "out").read_text() == shown
    assert "cannot be written" in run("export", "--out", str(tmp_path / "no" / "where"), code=2).output


def test_an_exported_toml_file_can_be_given_back(run: Run, tmp_path: Path) -> None:
    run("export", "--format", "toml", "--out", str(tmp_path / "all.toml"))
    assert "24 streams, 27 consumers: 7 warnings" in run("lint", "--file", str(tmp_path / "all.toml")).output


def test_settings_move_the_sr_streams(live: Run, server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NATS_STREAM_PREFIX", "acme")
    monkeypatch.setenv("NATS_MESSAGE_TTL_SECS", "3600")
    monkeypatch.setenv("NATS_TOKENS_PREFIX", "talk.tokens")
    live("apply")
    config = request(server, "STREAM.INFO.acme-events")["config"]
    assert (config["subjects"], config["max_age"]) == (["sr.events.>"], 3_600 * 10**9)
    assert "talk.tokens.*" in request(server, "STREAM.INFO.CHAT_EVENTS")["config"]["subjects"]
    assert request(server, "CONSUMER.INFO.CHAT_EVENTS.SSE_TOKEN_FANOUT")["config"]["filter_subject"] == "talk.tokens.*"
