"""A token stream read by the client: the same events wherever the bytes are cut, every chunk once."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from oncewire._ground.contracts.realtime import VERSION, DeliveryContract, RealtimeEnvelope, StreamLifecycle, TokenChunk
from oncewire.gateway.client.sse import Answers, EventParser, Lifecycle, SseEvent, Token

BYTES = b': hi\r\nid: 1-1\nevent: token\ndata: {"a":\ndata: 1}\n\nid: 1-2\rdata:x\r\rdata\n\n: only a comment\n\n'
EVENTS = [SseEvent("1-1", "token", '{"a":\n1}'), SseEvent("1-2", "message", "x"), SseEvent("1-2", "message", "")]


def envelope(event: Any) -> RealtimeEnvelope:
    return RealtimeEnvelope(
        version=VERSION,
        conversation_id="c",
        sequence=0,
        issued_at=datetime(2025, 1, 1, tzinfo=UTC),
        contract=DeliveryContract("at-least-once", "k"),
        event=event,
    )


def chunk(chunk_id: str, token: str, *, is_final: bool = False, **metadata: Any) -> RealtimeEnvelope:
    return envelope(
        TokenChunk(message_id="m", chunk_id=chunk_id, token=token, is_final=is_final, metadata=metadata or None)
    )


def lifecycle(status: Any) -> RealtimeEnvelope:
    return envelope(StreamLifecycle(message_id="m", status=status))


def test_events_are_the_same_wherever_the_bytes_are_cut() -> None:
    for cut in range(len(BYTES) + 1):
        parser = EventParser()
        assert EVENTS == parser.feed(BYTES[:cut]) + parser.feed(BYTES[cut:]), cut
    parser = EventParser()
    assert EVENTS == [event for at in range(len(BYTES)) for event in parser.feed(BYTES[at : at + 1])]


def test_the_last_id_is_that_of_the_last_whole_event() -> None:
    """Half an event is asked for again."""
    parser = EventParser()
    parser.feed(b"id: 1-1\ndata: a\n\nid: 1-2\ndata: b\n")
    assert "1-1" == parser.last_event_id


def test_chunks_are_put_together_once_each_until_the_final_one() -> None:
    answers = Answers()
    assert Lifecycle("m", "started", "") == answers.take(lifecycle("started"))
    assert Token("m", "Hello", "Hello", False) == answers.take(chunk("1", "Hello"))
    assert answers.take(chunk("1", "Hello")) is None
    assert Token("m", "!", "Hello!", True) == answers.take(chunk("2", "!", is_final=True))
    assert answers.take(chunk("3", "late")) is None
    assert Lifecycle("m", "completed", "Hello!") == answers.take(lifecycle("completed"))


def test_an_answer_that_is_begun_anew_forgets_what_there_was() -> None:
    answers = Answers()
    answers.take(chunk("1", "Hel"))
    assert Lifecycle("m", "errored", "Hel") == answers.take(lifecycle("errored"))
    answers.take(lifecycle("started"))
    assert Token("m", "Hallo", "Hallo", False) == answers.take(chunk("2", "Hallo"))


def test_metadata_of_a_chunk_reaches_the_application() -> None:
    answers = Answers()
    assert Token("m", "", "", False, {"reasoning": "hm"}) == answers.take(chunk("1", "", reasoning="hm"))
    assert Token("m", "So", "So", False) == answers.take(chunk("2", "So"))


def test_an_answer_of_which_a_chunk_is_missing_says_so() -> None:
    """Its beginning, which the stream no longer keeps, or one in between; another attempt begins anew."""
    answers = Answers()
    answers.take(lifecycle("started"))
    taken = [answers.take(chunk(id_, "x")) for id_ in ("0123abcd-1", "0123abcd-2", "0123abcd-2", "0123abcd-4")]
    assert [True, True, None, False] == [one and one.is_whole for one in taken]
    assert Lifecycle("m", "completed", "xxx", None, False) == answers.take(lifecycle("completed"))
    answers.take(lifecycle("started"))
    taken = [answers.take(chunk(id_, "x")) for id_ in ("aaaaaaaa-1", "bbbbbbbb-1", "nobody's", "cccccccc-2")]
    assert [True, True, True, False] == [one and one.is_whole for one in taken]
