"""Lineage of one run: depths, waits, the critical path, and circles that somebody claims."""

from __future__ import annotations

from oncewire.pipeline.gold import rules
from oncewire.pipeline.gold.rules import Message


def message(step: str, parent: str | None, at_ms: int, run: str = "r") -> Message:
    return Message("t", run, step, parent, "T", "s", "S", at_ms, at_ms * 1000, 0)


def test_a_message_alone_is_a_run_of_one_step() -> None:
    [(run, steps)] = rules.runs([message("a", None, 5)])
    assert (1, 0.0, 0, ["a"]) == (run.steps, run.duration_ms, run.depth, run.critical_path)
    assert [True] == [one.is_critical for one in steps]


def test_a_parent_that_is_not_in_the_lake_makes_a_root() -> None:
    [(run, steps)] = rules.runs([message("b", "gone", 5), message("c", "b", 9)])
    assert (["b", "c"], 4.0) == (run.critical_path, run.critical_ms)
    assert [0.0, 4.0] == [one.wait_ms for one in steps]


def test_who_is_caused_by_himself_or_in_a_circle_ends_somewhere() -> None:
    [(alone, _)] = rules.runs([message("a", "a", 1)])
    [(circle, _)] = rules.runs([message("a", "b", 1), message("b", "a", 2)])
    assert (["a"], ["a", "b"]) == (alone.critical_path, circle.critical_path)


def test_runs_are_told_apart_and_a_long_one_is_cut() -> None:
    many = [message(f"m{at}", None, at, "long") for at in range(rules.STEPS_MAX + 1)]
    found = list(rules.runs([message("x", None, 0, "a"), *many]))
    assert [("a", 1, False), ("long", rules.STEPS_MAX, True)] == [(run.run, run.steps, run.is_cut) for run, _ in found]


def test_a_deep_chain_needs_no_deep_stack() -> None:
    chain = [message(f"m{at}", f"m{at - 1}" if at else None, at) for at in range(5_000)]
    [(run, _)] = rules.runs(chain[::-1])
    assert (4_999, 5_000) == (run.depth, len(run.critical_path))
