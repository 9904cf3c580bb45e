"""From what services declare to what they may do: the subjects of each word."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from oncewire._ground.settings import Settings
from oncewire._ground.topology import Stream, Topology
from oncewire._ground.topology.lint import lint
from oncewire._ground.topology.model import Consumer, Service, bucket
from oncewire._ground.topology.permissions import User, developer, document, users
from oncewire._ground.topology.values import agent as read_agent

ORDERS = Stream(key="ORDERS", name="ORDERS", subjects=("orders.>",))
QUEUE = Stream(key="QUEUE", name="QUEUE", subjects=("jobs.>",), retention="workqueue")
HIDDEN = Stream(key="HIDDEN", name="HIDDEN", subjects=("hidden.>",), internal=True)
PRICES = bucket("prices", "", 1, 0, -1, 1)
OWN_BUCKETS = tuple(bucket(name, "", 1, 0, -1, 1) for name in ("OW_LEDGERS", "OW_LOSSES", "OW_INCARNATIONS"))
WORKER = Consumer(stream_key="ORDERS", stream="ORDERS", name="worker", filters=("orders.a",), services=("worker",))
API = "$JS.API."


def topology(*services: Service) -> Topology:
    known = {one.name for one in services}
    more = () if "worker" in known else (Service(name="worker"),)
    streams = (ORDERS, QUEUE, HIDDEN, PRICES, *OWN_BUCKETS)
    return Topology(streams=streams, consumers=(WORKER,), services=(*services, *more), contracts=())


def user(*services: Service, settings: Settings | None = None) -> User:
    """The user of the first of these."""
    found = users(topology(*services), settings or Settings())
    return next(one for one in found if one.name == services[0].name)


def api(one: User) -> set[str]:
    return {subject.removeprefix(API) for subject in one.publish.allow if subject.startswith(API)}


def test_a_service_that_needs_nothing_may_only_look_around() -> None:
    one = user(Service(name="idle"))
    assert {"INFO", "STREAM.NAMES"} == api(one) == {subject.removeprefix(API) for subject in one.publish.allow}
    assert ("_INBOX_idle.>",) == one.subscribe.allow
    assert not one.may_answer


def test_a_consumer_is_pulled_from_and_settled_by_its_service_alone() -> None:
    one = user(Service(name="worker"))
    assert {"CONSUMER.MSG.NEXT.ORDERS.worker", "CONSUMER.INFO.ORDERS.worker"} <= api(one)
    assert "$JS.ACK.ORDERS.worker.>" in one.publish.allow
    assert not [subject for subject in api(one) if "CREATE" in subject or "DELETE" in subject]


def test_a_reader_is_kept_off_every_known_durable() -> None:
    biller = Service(name="biller", agent="default/default/biller", handles=("orders.b",))
    one = user(Service(name="reader", reads=("ORDERS",)), biller)
    assert {"CONSUMER.CREATE.ORDERS.>", "CONSUMER.MSG.NEXT.ORDERS.*", "DIRECT.GET.ORDERS"} <= api(one)
    for durable in ("worker", "biller_consumer"):
        for verb in ("CREATE", "MSG.NEXT", "DELETE"):
            assert f"{API}CONSUMER.{verb}.ORDERS.{durable}" in one.publish.deny
    assert f"{API}CONSUMER.CREATE.ORDERS" not in one.publish.allow


def test_a_bucket_is_read_and_written_and_a_read_bucket_only_read() -> None:
    assert "$KV.prices.>" in user(Service(name="a", buckets=("prices",))).publish.allow
    reader = user(Service(name="a", reads=("KV_prices",)))
    assert "DIRECT.GET.KV_prices" in api(reader)
    assert not [one for one in reader.publish.allow if one.startswith("$KV.")]


def test_an_agent_owns_its_durable_its_ledger_and_its_keys() -> None:
    told = Service(name="b", agent="acme/shop/biller", handles=("jobs.x",), publishes=("orders.billed",))
    one = user(told)
    durable = "acme_shop_biller_consumer"
    assert {f"CONSUMER.CREATE.QUEUE.{durable}", f"CONSUMER.MSG.NEXT.QUEUE.{durable}", "STREAM.MSG.DELETE.QUEUE"} <= api(
        one
    )
    assert {"ledger.biller.*", "dlq_requests.biller", "cmd.acme.shop.biller.tick.*"} <= set(one.publish.allow)
    keys = {f"$KV.OW_LEDGERS.QUEUE.*.{durable}", f"$KV.OW_LOSSES.QUEUE.{durable}.*"}
    assert keys == {subject for subject in one.publish.allow if subject.startswith("$KV.")}
    assert "CONSUMER.CREATE.ORDERS.>" in api(one)  # to look for what it has published
    assert "CONSUMER.CREATE.QUEUE.>" not in api(one)


def test_on_a_stream_of_the_message_contracts_the_durable_carries_tenant_and_workspace() -> None:
    told = Service(name="b", agent="acme/shop/biller", handles=("sr.events.loop",))
    stream = Stream(key="sr-events", name="sr-events", subjects=("sr.events.>",), follows="message-settings")
    known = Topology(streams=(stream, *OWN_BUCKETS), consumers=(), services=(told,), contracts=())
    (one,) = [user for user in users(known, Settings(consumer_prefix="p")) if user.name == "b"]
    assert "CONSUMER.CREATE.sr-events.p-acme-shop-biller" in api(one)


def test_agents_that_share_a_user_are_kept_off_declared_ones() -> None:
    biller = Service(name="biller", agent="default/default/biller", handles=("jobs.b",))
    one = user(Service(name="agent", durables=("QUEUE",)), biller)
    assert {"CONSUMER.CREATE.QUEUE.*", "CONSUMER.MSG.NEXT.QUEUE.*"} <= api(one)
    assert {f"{API}CONSUMER.MSG.NEXT.QUEUE.biller_consumer", "$JS.ACK.QUEUE.biller_consumer.>"} <= set(one.publish.deny)


def test_who_forwards_reaches_neither_buckets_nor_internal_streams() -> None:
    one = user(Service(name="relay", forwards=True))
    assert {"orders.>", "jobs.>"} <= set(one.publish.allow)
    assert not {"hidden.>", "$KV.prices.>"} & set(one.publish.allow)
    assert "CONSUMER.CREATE.QUEUE.>" not in api(one)


def test_who_makes_streams_is_kept_off_the_declared_ones() -> None:
    one = user(Service(name="broker", makes_streams=("owb.>",), buckets=("prices",)))
    assert "owb.>" in one.publish.allow
    for stream in ("ORDERS", "QUEUE", "KV_prices", "KV_OW_LEDGERS"):
        assert {f"{API}STREAM.{verb}.{stream}" for verb in ("CREATE", "UPDATE", "DELETE", "PURGE")} <= set(
            one.publish.deny
        )
    assert f"{API}DIRECT.GET.ORDERS" in one.publish.deny
    assert f"{API}DIRECT.GET.KV_prices" not in one.publish.deny


def test_who_answers_hears_questions_and_may_reply() -> None:
    one = user(Service(name="a", answers=("sr.queries.a",)))
    assert one.may_answer
    assert ("_INBOX_a.>", "sr.queries.a") == one.subscribe.allow
    assert "allow_responses: true" in document([one])


def test_wide_users_hear_no_answers_to_others_and_developers_write_no_letters() -> None:
    found = topology(Service(name="a"))
    operator = users(found, Settings())[0]
    assert "operator" == operator.name
    assert {"_INBOX_a.>", "_INBOX_worker.>", "_INBOX_developer.>"} == set(operator.subscribe.deny)
    assert "dlq.>" in developer(found).publish.deny
    assert {"$JS.API.STREAM.CREATE.>", "$JS.API.STREAM.UPDATE.>"} <= set(developer(found).publish.deny)


def test_prefixes_of_the_settings_act_on_names_and_durables(tmp_path: Path) -> None:
    from oncewire._ground import topology as declared

    file = tmp_path / "own.toml"
    file.write_text('[services.a]\nagent = "a"\nhandles = ["sr.events.loop"]\nreads = ["sr-commands"]\n')
    chosen = Settings(stream_prefix="xy", consumer_prefix="cc", chat_events_prefix="talk.events")
    found = {one.name: one for one in users(declared.load([file], chosen), chosen)}
    assert {"CONSUMER.MSG.NEXT.xy-events.cc-a", "DIRECT.GET.xy-commands"} <= api(found["a"])
    assert "talk.events.*" in found["relay"].publish.allow


def test_the_document_is_what_nats_server_reads() -> None:
    text = document(users(topology(Service(name="a-b", description='"quoted"', publishes=("orders.x",))), Settings()))
    assert "nkey: $OW_NKEY_A_B\n" in text
    assert '"orders.x"' in text
    assert text.count("{") == text.count("}")
    assert not re.findall(r"[^\x20-\x7e\n]", text)


@pytest.mark.parametrize(
    ("told", "code"),
    [
        (Service(name="a", reads=("NOWHERE",)), "unknown-stream"),
        (Service(name="a", buckets=("nowhere",)), "unknown-stream"),
        (Service(name="a", durables=("*",)), "unknown-stream"),
        (Service(name="a", deletes=("*",)), "unknown-stream"),
        (Service(name="operator"), "reserved-name"),
        (Service(name="developer"), "reserved-name"),
        (Service(name="a", handles=("orders.x",)), "no-agent"),
        (Service(name="a", agent="default/default/a", handles=("nowhere.x",)), "not-captured"),
    ],
)
def test_lint_finds_what_cannot_be(told: Service, code: str) -> None:
    found = topology(told)
    before = {one.code for one in lint(topology(Service(name="a")))}
    assert code in {one.code for one in lint(found)} - before


@pytest.mark.parametrize(
    "told", [Service(name="a", reads=("*",), settles=("*",)), Service(name="a", reads=("KV_prices",))]
)
def test_lint_takes_what_can_be(told: Service) -> None:
    assert [one.code for one in lint(topology(told))] == [one.code for one in lint(topology(Service(name="a")))]


@pytest.mark.parametrize(("given", "full"), [("a", "default/default/a"), ("acme/shop/a", "acme/shop/a")])
def test_an_agent_goes_by_its_name_or_its_full_name(given: str, full: str) -> None:
    assert full == read_agent(given)


@pytest.mark.parametrize("given", ["", "a/b", "a/b/c/d", "a b", "a.b", "a/*/c", 7])
def test_what_is_no_agent_is_refused(given: object) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_agent(given)
