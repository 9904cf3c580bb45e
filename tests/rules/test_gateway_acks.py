"""Which of two acknowledgements counts, and whose it is."""

from __future__ import annotations

import pytest

from oncewire._ground.http import Principal
from oncewire.gateway.acks import Acked, key_of, later_of


@pytest.mark.parametrize(
    ("known", "sent", "expected"),
    [
        (None, None, None),
        (None, Acked(3, "e1"), Acked(3, "e1")),
        (Acked(3, "e1"), None, Acked(3, "e1")),
        (Acked(3, "e1"), Acked(5, "e1"), Acked(5, "e1")),
        (Acked(5, "e1"), Acked(3, "e1"), Acked(5, "e1")),
        (Acked(5, "e1"), Acked(3, "e2"), Acked(3, "e2")),
        (Acked(5), Acked(3, "e1"), Acked(5, "e1")),
        (Acked(5, "e1"), Acked(7), Acked(7, "e1")),
    ],
)
def test_an_ack_never_moves_back_within_an_epoch(known: Acked | None, sent: Acked | None, expected: Acked) -> None:
    assert expected == later_of(known, sent)


def test_an_ack_belongs_to_a_tenant_a_principal_a_client_and_a_conversation() -> None:
    alice, elsewhere = Principal("acme", frozenset(), "alice"), Principal("globex", frozenset(), "alice")
    bob, nobody = Principal("acme", frozenset(), "bob"), Principal("", frozenset())
    people = [alice, elsewhere, bob, nobody]
    keys = [key_of(one, client, room) for one in people for client in ("", "phone", "alice") for room in ("a", "b")]
    assert len([key for key in keys if key]) == len({key for key in keys if key})
    assert ["", ""] == [key for key in keys if not key], "without principal and clientId no ack is kept"
