"""One HTTP/1.1 front for every part that speaks HTTP: limits, deadlines, order, and a Principal for every handler."""

from oncewire.http.limits import Limits, limits_of
from oncewire.http.pages import Pages
from oncewire.http.principal import ANYONE, EVERY_TENANT, KNOWN, NOBODY, Principal
from oncewire.http.request import JSON, NDJSON, Request, Stream
from oncewire.http.routes import OPEN, Handler, Routes
from oncewire.http.server import Server
from oncewire.http.takeover import Heir
from oncewire.http.tls import Certificate, certificate_of, trusting

__all__ = [
    "ANYONE",
    "EVERY_TENANT",
    "JSON",
    "KNOWN",
    "NDJSON",
    "NOBODY",
    "OPEN",
    "Certificate",
    "Handler",
    "Heir",
    "Limits",
    "Pages",
    "Principal",
    "Request",
    "Routes",
    "Server",
    "Stream",
    "certificate_of",
    "limits_of",
    "trusting",
]
