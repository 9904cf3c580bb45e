"""One HTTP/1.1 front for every part that speaks HTTP: limits, deadlines, order, and a Principal for every handler."""

from oncewire._ground.http.limits import Limits, limits_of
from oncewire._ground.http.pages import Pages
from oncewire._ground.http.principal import ANYONE, EVERY_TENANT, KNOWN, NOBODY, Principal
from oncewire._ground.http.request import JSON, NDJSON, Request, Stream
from oncewire._ground.http.routes import OPEN, Handler, Routes
from oncewire._ground.http.rules import Headers
from oncewire._ground.http.server import Server
from oncewire._ground.http.takeover import Heir
from oncewire._ground.http.tls import Certificate, certificate_of, trusting

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
    "Headers",
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
