"""The first words on a socket: INFO, TLS when either side wants it, CONNECT with credentials, the subscription for
answers, and the PONG that means yes to both. Bounded in time; a handshake that fails leaves no socket behind.
"""

from __future__ import annotations

import asyncio
import ssl
from urllib.parse import urlsplit

from oncewire._ground.errors import AuthenticationFailed, NotConnected, OncewireError, PermissionDenied, Unavailable
from oncewire._ground.jetstream import protocol
from oncewire._ground.jetstream.auth import credentials
from oncewire._ground.jetstream.options import Options, host_and_port
from oncewire._ground.jetstream.wire import ServerInfo, Wire
from oncewire._ground.version import VERSION


async def greet(wire: Wire, server: str, options: Options, subscription: bytes) -> None:
    """Connect the wire to a server that takes us and lets us hear its answers, or raise why it did not come to that."""
    try:
        async with asyncio.timeout(options.connect_timeout_s):
            await _greet(wire, server, options, subscription)
    except TimeoutError:
        wire.abort()
        raise Unavailable(f"no answer within {options.connect_timeout_s} s") from None
    except ssl.SSLError as error:
        wire.abort()
        raise Unavailable(f"TLS failed: {error.reason or error}", hint="Check nats.ca and the address.") from None
    except OSError as error:
        wire.abort()
        raise Unavailable(error.strerror or str(error)) from None
    except BaseException:
        wire.abort()
        raise


async def _greet(wire: Wire, server: str, options: Options, subscription: bytes) -> None:
    loop = wire.owner.loop
    host, port = host_and_port(server)
    if options.tls_first:
        await loop.create_connection(lambda: wire, host, port, ssl=options.trust(), server_hostname=host)
    else:
        await loop.create_connection(lambda: wire, host, port)
    info = await wire.info
    wants_tls = urlsplit(server).scheme == "tls" or options.tls is not None
    if (wants_tls or info.tls_required) and not options.tls_first:
        await _secure(wire, host, info, options)
    assert wire.transport is not None
    wire.transport.write(_hello(server, info, options) + subscription + protocol.PING)
    await wire.greeted


async def _secure(wire: Wire, host: str, info: ServerInfo, options: Options) -> None:
    if not (info.tls_required or info.tls_available):
        raise Unavailable("the server offers no TLS", hint="Use nats:// or switch TLS on at the server.")
    assert wire.transport is not None
    wire.transport = await wire.owner.loop.start_tls(wire.transport, wire, options.trust(), server_hostname=host)


def _hello(server: str, info: ServerInfo, options: Options) -> bytes:
    body: dict[str, object] = {
        "verbose": False,
        "pedantic": False,
        "name": options.name,
        "lang": "python-oncewire",
        "version": VERSION,
        "protocol": 1,
        "headers": True,
        "no_responders": True,
        "tls_required": bool(options.tls or info.tls_required),
    }
    return protocol.encode_connect(body | credentials(options, server, info.nonce))


def worst(problems: list[tuple[str, OncewireError]]) -> OncewireError:
    """What to tell of a connect that failed everywhere: refused credentials say more than a refused socket."""
    for address, error in problems:
        if isinstance(error, AuthenticationFailed | PermissionDenied):
            return type(error)(f"{address}: {error.message}", hint=error.hint)
    told = "; ".join(f"{address}: {error.message}" for address, error in problems)
    hint = next((error.hint for _, error in problems if error.hint), "")
    return NotConnected(
        f"no NATS server can be reached ({told})", hint=hint or "Start one with `oncewire up`, or check nats.url."
    )
