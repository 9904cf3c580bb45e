"""What a node knows of a stream's end says whether others wrote there."""

from __future__ import annotations

from oncewire.broker.jetstream.sending import PAUSE_MAX, Tail


def test_as_many_sequences_as_messages_are_theirs() -> None:
    tail = Tail()
    tail.reach(10)
    assert tail.take(5, 15)
    assert tail.take(1, 16)


def test_more_sequences_than_messages_are_not() -> None:
    tail = Tail()
    tail.reach(10)
    assert not tail.take(5, 16)
    assert tail.take(5, 21)


def test_an_older_sequence_takes_nothing_back() -> None:
    tail = Tail()
    tail.reach(10)
    tail.reach(3)
    assert tail.take(2, 12)


def test_behind_a_server_that_was_away_nothing_is_believed() -> None:
    tail = Tail()
    tail.reach(10)
    tail.forget()
    assert not tail.take(5, 15)


def test_one_foreign_message_costs_no_pause() -> None:
    tail = Tail()
    tail.take(5, 6)
    assert tail.choose_ingest()


def test_the_pause_grows_with_what_others_write_and_has_an_end() -> None:
    tail, pauses = Tail(), []
    for turn in range(1, 16):
        tail.take(1, turn * 10)
        pauses.append(0)
        while not tail.choose_ingest():
            pauses[-1] += 1
    assert pauses == sorted(pauses)
    assert 0 == pauses[0]
    assert PAUSE_MAX - 1 == pauses[-1]
