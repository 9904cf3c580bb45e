"""Log lines: one per record, whatever stands in it; no secrets; both forms."""

from __future__ import annotations

import io
import json
import logging
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncewire._ground import logs
from oncewire._ground.masking import MASK, mask_text
from oncewire.cli.board import Board

HOSTILE = [
    'room\n{"level": "error", "event": "forged"}',
    "\r\x1b[2K\x1b[1Aforged",
    "a\x9b31mred\x85next",
    "one\u2028two\u2029three",
    "\u202egnp.exe",
    "nul\x00 and \x7f",
    "\ud800 lone",
]
SECRETS = [
    ("nats://app:hunter2@h:4222,nats://b:swordfish@h2", ("hunter2", "swordfish")),
    ("postgresql://app:pa,ss@db/app?password=qwerty", ("pa,ss", "qwerty")),
    ("Authorization: Bearer abcdefghijklmnop", ("abcdefghijklmnop",)),
    ('{"password": "letmein", "x": 1}', ("letmein",)),
    ("NATS_TOKEN=s3cr3t went wrong", ("s3cr3t",)),
    ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl", ("eyJzdWIiOiIxIn0",)),
    ("ow_0123456789ab_" + "A" * 43, ("A" * 43,)),
    ("SUAIBDPBAUTWCWBKIO6XHQNINK5FWJW4OHLXC3HQ2KFE4PEJUA44CNHTC4", ("SUAIBDPBAUTW",)),
]


def record(message: str, *args: object, name: str = "oncewire.gateway.node", **more: object) -> logging.LogRecord:
    made = logging.LogRecord(name, logging.WARNING, "x.py", 1, message, args, None)
    made.__dict__.update(more)
    return made


def both(one: logging.LogRecord) -> tuple[str, str]:
    return logs.JsonLines().format(one), logs.TextLines().format(one)


def is_harmless(line: str) -> bool:
    """Nothing in it breaks a line, steers a terminal or turns the direction of writing."""
    return line.isprintable() and len(line.splitlines()) == 1


@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_hostile_name_stays_in_its_line(hostile: str) -> None:
    for line in both(record("room %s cannot be read", hostile)):
        assert is_harmless(line), line
    told = json.loads(both(record("room %s cannot be read", hostile))[0])
    assert ("warning", "gateway") == (told["level"], told["part"])
    assert told["event"].startswith("room ")


@given(st.text())
def test_no_text_can_break_out_of_a_line(text: str) -> None:
    as_json, as_text = both(record("%s", text, name=f"oncewire.{text}"))
    assert len(as_json.splitlines()) == len(as_text.splitlines()) == 1
    assert not any(char < " " or "\x7f" <= char <= "\x9f" for char in as_json + as_text)
    assert {"time", "level", "part", "event"} <= json.loads(as_json).keys()


@pytest.mark.parametrize(("text", "hidden"), SECRETS)
def test_what_looks_like_a_secret_is_hidden(text: str, hidden: tuple[str, ...]) -> None:
    for line in (*both(record("it failed: %s", text)), mask_text(text)):
        assert MASK in line
        assert not [secret for secret in hidden if secret in line], line


def test_what_is_no_secret_stays() -> None:
    plain = "room 17 of http://localhost:3005/stream/17 cannot be read: 3 tokens, key k1"
    assert plain == logs.said(plain)


def test_an_exception_is_part_of_its_line() -> None:
    try:
        raise ValueError("nats://u:hunter2@h\nsecond line")
    except ValueError:
        one = record("a handler failed")
        one.exc_info = sys.exc_info()
    for line in both(one):
        assert is_harmless(line)
        assert "ValueError" in line
        assert "hunter2" not in line


def test_a_line_names_the_trace_that_it_belongs_to() -> None:
    token = logs.trace_id.set("0af7651916cd43dd8448eb211c80319c")
    try:
        as_json, as_text = both(record("it failed"))
    finally:
        logs.trace_id.reset(token)
    assert "0af7651916cd43dd8448eb211c80319c" == json.loads(as_json)["trace_id"]
    assert as_text.endswith("trace_id=0af7651916cd43dd8448eb211c80319c")
    assert "trace_id" not in json.loads(both(record("it failed"))[0])


def test_a_long_text_is_cut_and_a_wrong_format_is_told() -> None:
    line = json.loads(both(record("x" * 100_000))[0])["event"]
    assert (logs.LINE_CHARS_MAX + 1, "…") == (len(line), line[-1])
    assert "%d (TypeError in its arguments)" == json.loads(both(record("%d", "seven"))[0])["event"]


def test_a_set_up_process_writes_one_line_per_record() -> None:
    out, root, ours = io.StringIO(), logging.getLogger(), logging.getLogger("oncewire")
    before = root.handlers[:], root.level, ours.level
    try:
        logs.set_up("json", "info", out)
        logging.getLogger("oncewire.relay").info("a\nb")
        logging.getLogger("library").info("not told")
        logging.getLogger("library").warning("told")
    finally:
        root.handlers[:], root.level = before[0], before[1]
        ours.setLevel(before[2])
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [("relay", "a\\nb"), ("library", "told")] == [(one["part"], one["event"]) for one in lines]


@pytest.mark.parametrize("hostile", HOSTILE)
def test_the_board_lets_no_name_out_of_its_line(hostile: str) -> None:
    for as_json in (True, False):
        out = io.StringIO()
        board = Board(as_json, out)
        board.part("broker", "ready", text=hostile)
        board.event("trouble", text=hostile)
        lines = out.getvalue().split("\n")[:-1]
        assert all(is_harmless(line.encode("utf-8", "replace").decode()) for line in lines), lines
    assert 1 == len(lines)


def test_with_json_logs_what_a_command_shows_is_log_lines_too() -> None:
    out = io.StringIO()
    board = Board(False, out, log_part="relay")
    board.line("relaying")
    board.event("serving", nats_url="nats://h")
    (line,) = [json.loads(one) for one in out.getvalue().splitlines()]
    assert ("info", "relay", "serving", "nats://h") == tuple(
        line[key] for key in ("level", "part", "event", "nats_url")
    )
    assert line["time"].endswith("Z")
