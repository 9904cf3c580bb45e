"""Who may do what on NATS: one user per declared service, as nats-server configuration. Pure.

A service may publish to its subjects, use its consumers, read its streams, use its buckets, and subscribe to its own
inbox. Requests to JetStream are subjects too (`$JS.API.…`, `$JS.ACK.…`): a service's table says what it needs, this
module which subjects that takes. The server does not check the reply subject of a request, so a user can still write
anywhere through JetStream's answers: these permissions catch mistakes, they do not stop an attacker.

NATS has no wildcard for a part of a token: `ow-reader-…` cannot be written as a permission. Who may make readers on a
stream is allowed consumers of any name there, and denied every durable that is known: those of the catalogs and of
declared agents. The old forms that name a consumer only in the body are never allowed: with them an "ephemeral" of a
durable's name changes that durable.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator

from msgspec import Struct

from oncewire._ground.contracts import subjects
from oncewire._ground.settings import Settings
from oncewire._ground.topology import names
from oncewire._ground.topology.lint import DLQ
from oncewire._ground.topology.model import BUCKET_PREFIX, EVERY, Service, Stream, Topology
from oncewire._ground.users import DEVELOPER, MONITOR, OPERATOR, inbox_prefix

API = "$JS.API."
ACK = "$JS.ACK."
OWNERS, LOSSES, INCARNATIONS, LEDGER = "OW_LEDGERS", "OW_LOSSES", "OW_INCARNATIONS", "LEDGER"


class Rights(Struct, frozen=True):
    """Subjects; what is denied is denied whatever is allowed."""

    allow: tuple[str, ...]
    deny: tuple[str, ...] = ()


class User(Struct, frozen=True, kw_only=True):
    name: str
    description: str
    publish: Rights
    subscribe: Rights
    may_answer: bool = False
    """May publish to the inbox of a request that it got, once."""


def users(topology: Topology, settings: Settings) -> list[User]:
    """The operator and one user per service."""
    durables = list(_durables(topology, settings))
    return [
        _wide(topology, OPERATOR, "Applies the topology, and does what people decide"),
        *(_Needs(topology, service, durables).user() for service in topology.services),
    ]


def developer(topology: Topology) -> User:
    """For the embedded server: what a newcomer needs no permission for. Streams are made by the operator: one that
    republishes, or that stores an inbox, would write dead letters and hear answers to others."""
    streams = tuple(f"{API}STREAM.{verb}.>" for verb in ("CREATE", "UPDATE", "RESTORE"))
    return _wide(topology, DEVELOPER, "Programs on this machine that bring no key", (DLQ, *streams))


def monitor() -> User:
    """For the system account of the embedded server: what its parts ask the server about itself, and nothing else."""
    asks = tuple(f"$SYS.REQ.SERVER.PING.{what}" for what in ("HEALTHZ", "JSZ"))
    hears = Rights((f"{inbox_prefix(MONITOR)}.>",))
    return User(name=MONITOR, description="Asks the server about itself", publish=Rights(asks), subscribe=hears)


def _wide(topology: Topology, name: str, description: str, deny: tuple[str, ...] = ()) -> User:
    others = [one.name for one in topology.services] + [one for one in (OPERATOR, DEVELOPER) if one != name]
    hears = Rights((">",), tuple(f"{inbox_prefix(one)}.>" for one in others))
    return User(name=name, description=description, publish=Rights((">",), deny), subscribe=hears)


class _Durable(Struct, frozen=True):
    """A durable that is known, with the services that use it. An agent makes its own, the operator all others."""

    stream: Stream
    name: str
    services: tuple[str, ...]
    is_own: bool = False


def _durables(topology: Topology, settings: Settings) -> Iterator[_Durable]:
    for consumer in topology.consumers:
        stream = topology.stream(consumer.stream)
        if stream is not None:
            yield _Durable(stream, consumer.name, consumer.services)
    for service in topology.services:
        if not service.agent:
            continue
        tenant, workspace, agent = service.agent.split("/")
        for stream in _capturing(topology, service.handles):
            is_message = stream.follows == "message-settings"
            owner = (agent, tenant, workspace)
            own = names.sr_durable_name(settings.consumer_prefix, *owner) if is_message else names.durable_name(*owner)
            yield _Durable(stream, own, (service.name,), True)


def _capturing(topology: Topology, patterns: Iterable[str]) -> list[Stream]:
    wanted = list(patterns)
    return [one for one in topology.streams if any(subjects.overlaps(a, b) for a in one.subjects for b in wanted)]


class _Needs:
    """From the words of one service to its subjects."""

    def __init__(self, topology: Topology, service: Service, durables: list[_Durable]) -> None:
        self._topology = topology
        self._service = service
        self._durables = durables
        self._own = [one for one in durables if service.name in one.services]
        self._allow: dict[str, None] = {}
        self._deny: dict[str, None] = {}

    def user(self) -> User:
        service = self._service
        self._publishes(service.publishes)
        self._allows(*service.asks)
        self._api("INFO", "STREAM.NAMES")
        if service.forwards:
            self._forwards()
        for durable in self._own:
            self._uses(durable)
        for name in service.reads:
            self._reads(name)
        if service.lists:
            self._api("STREAM.LIST")
        for bucket in service.buckets:
            self._allows(f"$KV.{bucket}.>")
            self._reads(BUCKET_PREFIX + bucket)
        for name in service.durables:
            self._makes_durables(name)
        if service.agent:
            self._runs_an_agent(service.agent)
        self._removes(service)
        if service.makes_streams:
            self._makes_streams()
        inbox = f"{inbox_prefix(service.name)}.>"
        among_themselves = {*service.answers} & {*service.asks}
        if among_themselves:  # in several messages to a request: the server takes one answer from those it lets answer
            self._allows(inbox)
        return User(
            name=service.name,
            description=service.description,
            publish=Rights(tuple(self._allow), tuple(self._deny)),
            subscribe=Rights((inbox, *service.answers)),
            may_answer=bool({*service.answers} - among_themselves),
        )

    def _allows(self, *allowed: str) -> None:
        self._allow.update(dict.fromkeys(allowed))

    def _denies(self, *denied: str) -> None:
        self._deny.update(dict.fromkeys(denied))

    def _api(self, *endpoints: str) -> None:
        self._allows(*(API + one for one in endpoints))

    def _deny_api(self, *endpoints: str) -> None:
        self._denies(*(API + one for one in endpoints))

    # ---- what each word takes

    def _publishes(self, patterns: Iterable[str]) -> None:
        self._allows(*patterns)
        for stream in _capturing(self._topology, patterns):
            self._looks_at(stream.name)

    def _looks_at(self, stream: str) -> None:
        """That it is there as declared, and how far it is."""
        self._api(f"STREAM.INFO.{stream}", f"CONSUMER.LIST.{stream}")

    def _uses(self, durable: _Durable) -> None:
        stream, name = durable.stream.name, durable.name
        self._looks_at(stream)
        self._api(f"CONSUMER.MSG.NEXT.{stream}.{name}", f"CONSUMER.INFO.{stream}.{name}")
        self._allows(f"{ACK}{stream}.{name}.>")
        if durable.is_own:
            self._api(f"CONSUMER.CREATE.{stream}.{name}")

    def _gets(self, stream: str) -> None:
        self._api(f"DIRECT.GET.{stream}", f"DIRECT.GET.{stream}.>", f"STREAM.MSG.GET.{stream}")

    def _reads(self, stream: str) -> None:
        """By single messages and by readers of its own."""
        self._looks_at(stream)
        self._gets(stream)
        self._api(f"CONSUMER.CREATE.{stream}.>", f"CONSUMER.MSG.NEXT.{stream}.*")
        self._api(f"CONSUMER.INFO.{stream}.*", f"CONSUMER.DELETE.{stream}.*")
        for durable in self._known_on(stream):
            place = f"{durable.stream.name}.{durable.name}"
            self._keep_off(durable)
            self._deny_api(f"CONSUMER.DELETE.{place}")

    def _reads_log(self, stream: Stream) -> None:
        """A work queue has no readers."""
        if stream.retention != "workqueue":
            self._reads(stream.name)

    def _forwards(self) -> None:
        """Others' messages, to wherever those may go; read again for what the duplicate window has forgotten."""
        for stream in self._topology.streams:
            if not (stream.internal or stream.is_bucket or stream.no_ack):
                self._publishes(stream.subjects)
                self._reads_log(stream)

    def _makes_durables(self, stream: str) -> None:
        """Under names that nobody has declared."""
        self._looks_at(stream)
        self._gets(stream)
        self._api(f"CONSUMER.CREATE.{stream}.*", f"CONSUMER.MSG.NEXT.{stream}.*", f"CONSUMER.INFO.{stream}.*")
        self._allows(f"{ACK}{stream}.>")
        for durable in self._known_on(stream):
            self._keep_off(durable)
            if durable not in self._own:
                self._denies(f"{ACK}{durable.stream.name}.{durable.name}.>")

    def _known_on(self, stream: str) -> list[_Durable]:
        return [one for one in self._durables if stream in (EVERY, one.stream.name)]

    def _keep_off(self, durable: _Durable) -> None:
        """A durable that is known is changed by nobody but the operator, and pulled from by its services alone."""
        place = f"{durable.stream.name}.{durable.name}"
        if durable not in self._own:
            self._deny_api(f"CONSUMER.MSG.NEXT.{place}")
        if durable not in self._own or not durable.is_own:
            self._deny_api(f"CONSUMER.CREATE.{place}")
        self._deny_api(f"CONSUMER.CREATE.{place}.>")

    def _runs_an_agent(self, full_name: str) -> None:
        """Its ledger's blocks, its requests to the dead-letter service, its ticks; proof that it owns its durables; and
        a look at what it has published, for what the duplicate window has forgotten."""
        tenant, workspace, agent = full_name.split("/")
        self._publishes((f"ledger.{agent}.*", f"dlq_requests.{agent}", f"cmd.{tenant}.{workspace}.{agent}.tick.*"))
        for durable in self._own:
            stream, name = durable.stream.name, durable.name
            self._gets(stream)
            self._allows(f"$KV.{OWNERS}.{stream}.*.{name}", f"$KV.{LOSSES}.{stream}.{name}.*")
            if durable.stream.retention == "workqueue":
                self._api(f"STREAM.MSG.DELETE.{stream}")
        published = (*self._service.publishes, f"ledger.{agent}.*", f"dlq_requests.{agent}")
        for target in _capturing(self._topology, published):
            self._reads_log(target)
        for bucket in (OWNERS, LOSSES, INCARNATIONS):
            self._reads(BUCKET_PREFIX + bucket)

    def _removes(self, service: Service) -> None:
        self._allows(*(f"{ACK}>" if one == EVERY else f"{ACK}{one}.>" for one in service.settles))
        self._api(*(f"STREAM.MSG.DELETE.{one}" for one in service.deletes))
        self._api(*(f"STREAM.PURGE.{one}" for one in service.purges))

    def _makes_streams(self) -> None:
        """Streams of its own, under any name that nobody has declared, and all that is done with them."""
        service = self._service
        self._allows(*service.makes_streams)
        self._reads(EVERY)
        self._api(*(f"STREAM.{verb}.*" for verb in ("CREATE", "UPDATE", "DELETE", "PURGE")))
        readable = {*service.reads, *(BUCKET_PREFIX + one for one in service.buckets)}
        for stream in self._topology.streams:
            name = stream.name
            self._deny_api(*(f"STREAM.{verb}.{name}" for verb in ("CREATE", "UPDATE", "DELETE")))
            if name not in service.purges:
                self._deny_api(f"STREAM.PURGE.{name}")
            if name not in readable:
                self._deny_api(f"DIRECT.GET.{name}", f"DIRECT.GET.{name}.>", f"STREAM.MSG.GET.{name}")
                self._deny_api(f"CONSUMER.CREATE.{name}.>", f"CONSUMER.MSG.NEXT.{name}.*", f"CONSUMER.DELETE.{name}.*")


# ---- as nats-server's configuration

HEAD = """\
# NATS users of services, by `oncewire topology export --nats-permissions`. This file holds no secret: an nkey is the
# public half of a key. Include this file where users belong:
#
#   authorization { include "oncewire-users.conf" }                               all in one account
#   accounts { SHOP { jetstream: enabled, include "oncewire-users.conf" } }       an account of its own
#
# Each user hears answers below an inbox prefix of its own: NATS_INBOX_PREFIX=_INBOX_<user>.
"""


def variable(user: str) -> str:
    """Stands for a key that nats-server finds in its environment."""
    return f"$OW_NKEY_{user.upper().replace('-', '_')}"


def document(given: Iterable[User], nkey: Callable[[str], str] = variable) -> str:
    """A `users` block; `nkey` gives each user's public key."""
    blocks = "".join(_block(one, nkey(one.name)) for one in given)
    return f"{HEAD}\nusers: [\n{blocks}]\n"


def _block(user: User, nkey: str) -> str:
    answers = "      allow_responses: true\n" if user.may_answer else ""
    return f"""\
  # {user.name}: {user.description or "a service"}
  {{
    nkey: {nkey}
    permissions: {{
      publish: {_rights(user.publish)}
      subscribe: {_rights(user.subscribe)}
{answers}    }}
  }}
"""


def _rights(rights: Rights) -> str:
    told = [f"allow: {_list(rights.allow)}"] + [f"deny: {_list(rights.deny)}"] * bool(rights.deny)
    return "{\n        " + "\n        ".join(told) + "\n      }"


def _list(patterns: tuple[str, ...]) -> str:
    return "[\n" + "".join(f"          {json.dumps(one)}\n" for one in patterns) + "        ]"
