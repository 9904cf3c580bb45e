"""What becomes of an effect that nobody has confirmed, by the stream that it goes to."""

from __future__ import annotations

from typing import Any

import pytest

from oncewire.agent.outflow import is_doubtful, target_of

LOG: dict[str, Any] = {"retention": "limits", "duplicate_window": 120_000_000_000, "max_msgs_per_subject": -1}


@pytest.mark.parametrize(
    ("config", "is_log"),
    [
        ({}, True),
        ({"max_age": 3_600_000_000_000}, True),
        ({"retention": "workqueue"}, False),
        ({"retention": "interest"}, False),
        ({"max_msgs_per_subject": 1}, False),
        ({"allow_msg_ttl": True}, False),
    ],
)
def test_only_where_nothing_leaves_early_does_reading_prove_that_an_effect_is_missing(
    config: dict[str, Any], is_log: bool
) -> None:
    target = target_of(LOG | config, None)

    assert is_log == target.is_log == is_doubtful(target, 61.0)


@pytest.mark.parametrize(("age_s", "expected"), [(59.0, False), (61.0, True), (float("inf"), True)])
def test_an_effect_is_doubtful_unless_this_process_sent_it_within_half_a_window(age_s: float, expected: bool) -> None:
    assert expected == is_doubtful(target_of(LOG, None), age_s)


def test_a_stream_without_a_window_remembers_nothing() -> None:
    assert is_doubtful(target_of(LOG | {"duplicate_window": 0}, None), 0.001)


def test_a_stream_that_answers_no_publish_is_known() -> None:
    assert (False, True) == tuple(target_of(LOG | more, None).is_confirming for more in ({"no_ack": True}, {}))
