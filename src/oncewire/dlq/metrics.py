"""What the dead-letter service counts, and what its sweeps see."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oncewire._ground.metrics import Page

if TYPE_CHECKING:
    from oncewire.dlq.service import Service


def collect(page: Page, service: Service) -> None:
    page.put("oncewire_dlq_ready", 0 if service.problem else 1)
    page.put_all("oncewire_dlq_letters_total", service.written)
    page.put_all("oncewire_dlq_events_total", service.seen)
    page.put_all("oncewire_dlq_alerts_total", service.alerts.told)
    page.put("oncewire_dlq_alert_hook_failures_total", service.alerts.failures)
    swept = service.swept
    if swept is None:
        return
    page.put("oncewire_dlq_letters", swept.letters)
    page.put("oncewire_dlq_full_ratio", swept.full_ratio)
    for stand in swept.stands:
        labels = {"stream": stand.stream, "consumer": stand.consumer}
        page.put("oncewire_dlq_consumer_lag", stand.pending, **labels)
        page.put("oncewire_dlq_consumer_in_flight", stand.in_flight, **labels)
        page.put("oncewire_dlq_unattended", swept.unattended.get((stand.stream, stand.consumer), 0), **labels)
        page.put("oncewire_dlq_exhausted", swept.exhausted.get((stand.stream, stand.consumer), 0), **labels)
