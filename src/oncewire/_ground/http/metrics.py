"""What a front counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oncewire._ground.metrics import Page

if TYPE_CHECKING:
    from oncewire._ground.http.server import Server


def collect(page: Page, server: Server, name: str) -> None:
    """`name` says which listener of the process it is."""
    page.put("oncewire_http_connections", len(server.connections), server=name)
    page.put("oncewire_http_accepted_total", server.accepted, server=name)
    for status, count in server.answers.items():
        page.put("oncewire_http_responses_total", count, server=name, status=str(status))
    if server.certificate is not None:
        ends_at = server.certificate.ends_at()
        if ends_at is not None:
            page.put("oncewire_http_certificate_expiry_timestamp_seconds", ends_at, server=name)
