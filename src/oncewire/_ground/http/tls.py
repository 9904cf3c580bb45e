"""The certificate of a listener, taken anew from its files when they change: nobody restarts a server to renew one.

A new pair is tried by itself first. One that does not fit together is said in the log, and the old one goes on.
"""

from __future__ import annotations

import logging
import ssl
from contextlib import suppress
from pathlib import Path
from typing import Final

from cryptography import x509

from oncewire._ground.errors import InvalidSetting

LOOK_S: Final = 1.0

_log = logging.getLogger("oncewire.http")


class Certificate:
    """A certificate with its chain, and its key. `context` is for the listener; `refresh` is called now and then."""

    def __init__(self, cert: str, key: str) -> None:
        self._files = (Path(cert), Path(key or cert))
        self._seen = self._marks()
        self._look_at = 0.0
        try:
            self.context = self._loaded()
        except (OSError, ssl.SSLError) as error:
            raise InvalidSetting(
                f"the certificate of the listener cannot be used: {error}",
                hint="http.tls_cert is a PEM file with the chain, http.tls_key its key, not encrypted.",
            ) from None

    def refresh(self, now: float) -> None:
        """For connections from now on. What is open keeps what it has."""
        if now < self._look_at:
            return
        self._look_at = now + LOOK_S
        marks = self._marks()
        if marks == self._seen:
            return
        self._seen = marks
        try:
            self._loaded()
            self.context.load_cert_chain(*self._files, password=_no_password)
        except (OSError, ssl.SSLError) as error:
            _log.error("the new certificate cannot be used, the old one stays: %s", error)
        else:
            _log.info("the certificate was renewed")

    def ends_at(self) -> float | None:
        """Unix time; None when the file cannot be read just now."""
        with suppress(OSError, ValueError):
            return x509.load_pem_x509_certificate(self._files[0].read_bytes()).not_valid_after_utc.timestamp()
        return None

    def _loaded(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.set_alpn_protocols(["http/1.1"])
        context.load_cert_chain(*self._files, password=_no_password)
        return context

    def _marks(self) -> list[tuple[int, int, int]]:
        try:
            found = [file.stat() for file in self._files]
        except OSError:
            return []
        return [(one.st_ino, one.st_mtime_ns, one.st_size) for one in found]


def _no_password() -> bytes:
    """Else OpenSSL would ask whoever sits at the terminal, and a service would wait there for ever."""
    return b""


def trusting(ca: str, *, is_exact: bool = False) -> ssl.SSLContext:
    """For a client that trusts who is named in a PEM file, or whom the system trusts without one. `is_exact`: the file
    holds the server's own certificate, and whoever shows it may be reached under any name."""
    try:
        context = ssl.create_default_context(cafile=ca or None)
    except (OSError, ssl.SSLError) as error:
        raise InvalidSetting(f"{ca} cannot be used: {error}", hint="It must be a PEM file of certificates.") from None
    if is_exact:
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def certificate_of(cert: str, key: str) -> Certificate | None:
    """The listener's certificate; None when it speaks plain HTTP."""
    if key and not cert:
        raise InvalidSetting("http.tls_key is set and http.tls_cert is not", hint="Set both, or neither.")
    return Certificate(cert, key) if cert else None
