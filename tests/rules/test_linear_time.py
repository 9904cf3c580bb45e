"""Twice the text is at most twice the work, whatever the text: bodies, masking, files, and each regular expression."""

from __future__ import annotations

import ast
import importlib
import json
import re
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import pytest

import oncewire
from oncewire._ground.contracts import codec, ids, runtime
from oncewire._ground.contracts.broker import decode_produce
from oncewire._ground.errors import ContractViolation
from oncewire._ground.masking import mask_text
from oncewire._ground.settings import Settings
from oncewire._ground.topology.files import KEY_PARTS_MAX, Source, declare
from tests.support.regexes import Counting, alphabet, beginnings

SOURCE = Path(oncewire.__file__).parent

HOW: dict[str, str] = {
    "agent.effects._HEADER_NAME": "fullmatch",
    "contracts.codec._LONE_SURROGATE": "finditer",
    "contracts.codec._MEMBER": "fullmatch",
    "contracts.letters._CAUSE": "match",
    "contracts.letters._NAME": "fullmatch",
    "contracts.subjects._FOREIGN_TOKEN": "fullmatch",
    "contracts.subjects._TOKEN": "fullmatch",
    "contracts.trace._STATE_MEMBER": "fullmatch",
    "contracts.trace._TRACEPARENT": "fullmatch",
    "contracts.trace._TRACE_ID": "fullmatch",
    "demo.answers._PIECE": "finditer",
    "gateway.client.sse._CHUNK_ID": "fullmatch",
    "gateway.client.sse._LINE_END": "finditer",
    "gateway.node.EVENT_ID": "fullmatch",
    "gateway.tokens._CHUNK_ID": "fullmatch",
    "gateway.tokens._LINE_END": "finditer",
    "http.rules._ABSOLUTE": "match",
    "http.rules._HOST": "fullmatch",
    "http.rules._LOOPBACK": "fullmatch",
    "http.rules._REQUEST_ID": "fullmatch",
    "jetstream.client._NAME": "fullmatch",
    "jetstream.keyvalue._KEY": "fullmatch",
    "jetstream.options._ADDRESS": "fullmatch",
    "jetstream.protocol._HEADER_NAME": "fullmatch",
    "jetstream.protocol._HEADER_VALUE_BAD": "finditer",
    "jetstream.protocol._SUBJECT_BAD": "finditer",
    "ledger.postgres_tx._FIRST_WORDS": "match",
    "ledger.postgres_tx._SESSION_LOCK": "finditer",
    "logs._CONTROL": "finditer",
    "masking._BEARER": "finditer",
    "masking._IN_QUERY": "finditer",
    "masking._JWT": "finditer",
    "masking._NAMED": "finditer",
    "masking._NEXT_ADDRESS": "finditer",
    "masking._SHAPES": "finditer",
    "masking._URL": "finditer",
    "metrics.page._LABEL": "finditer",
    "metrics.page._LINE": "fullmatch",
    "pipeline.auditing.intact._NAMED": "finditer",
    "pipeline.frames._DELIVERY": "match",
    "pipeline.frames._TAIL": "finditer",
    "pipeline.lake.bucket._BUCKET": "fullmatch",
    "pipeline.lake.bucket._CODE": "finditer",
    "pipeline.lake.bucket._KEY": "fullmatch",
    "pipeline.lake.history._CHECKPOINT": "fullmatch",
    "pipeline.lake.history._ENTRY": "fullmatch",
    "pipeline.options._INBOX_PREFIX": "fullmatch",
    "pipeline.options._STREAM_NAME": "fullmatch",
    "pipeline.options._WRITE_ID": "fullmatch",
    "pipeline.reading._OURS": "finditer",
    "topology.files._BARE": "fullmatch",
    "topology.files._QUOTED": "finditer",
    "topology.lint.NAME": "fullmatch",
    "topology.units._DURATION": "fullmatch",
    "topology.units._SIZE": "fullmatch",
    "trust.keys.TENANT": "fullmatch",
    "trust.keys._KEY": "fullmatch",
}
"""How each is used; `finditer` stands for search, sub, split and findall."""

OWN = {"database.postgres._QUERY", "jetstream.nkeys._BLOCK", "pipeline.options._SECRET_BLOCK"}
"""They read our own SQL, and the key file of the process's owner."""


def patterns() -> dict[str, re.Pattern[Any]]:
    """Every compiled expression of the package by its name."""
    found: dict[str, re.Pattern[Any]] = {}
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        if "re.compile(" not in text:
            continue
        module = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        for node in ast.parse(text).body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if isinstance(node, ast.Assign | ast.AnnAssign) and "re.compile(" in ast.unparse(node):
                for target in targets:
                    assert isinstance(target, ast.Name)
                    named = f"{module.removeprefix('_ground.')}.{target.id}"
                    found[named] = getattr(importlib.import_module(f"oncewire.{module}"), target.id)
    return found


PATTERNS = patterns()


def test_every_regular_expression_is_known_here() -> None:
    """A new one says how it is used, and then its work is counted."""
    assert set(PATTERNS) == {*HOW, *OWN}


@pytest.mark.parametrize("name", HOW)
def test_twice_the_text_is_at_most_twice_the_work_of_an_expression(name: str) -> None:
    """Pumps of one and two characters, behind everything that leads into the expression. At the end is a character
    that most do not know, so that they have to go back."""
    pattern = PATTERNS[name]
    counting = Counting(pattern)
    signs, starts = alphabet(pattern), beginnings(pattern)
    few_signs = sorted(signs, key=str.isalnum)[:SIGNS_MAX]
    texts = {(start, pump) for start in starts for pump in (*few_signs, start[-1:], start) if pump}
    texts |= {("", sign) for sign in signs}
    texts |= {("", start + sign) for start in ("", *few_signs, *starts) for sign in few_signs}
    worst: tuple[float, str] = (0.0, "")
    for start, pump in sorted(texts):
        count = CHARS // len(pump) + 1
        few, many = (_work(counting, pattern, start + pump * (count * times) + "\x01", name) for times in (1, 2))
        worst = max(worst, (many / few, f"{start!r} + {pump!r} * n"))
    assert worst[0] <= 2.5, worst


SIGNS_MAX = 12
CHARS = 64
"""At first, and then twice. The square would be about four times the work; what is linear has a constant besides."""


def _work(counting: Counting, pattern: re.Pattern[Any], text: str, name: str) -> int:
    return counting.work(text.encode() if isinstance(pattern.pattern, bytes) else text, HOW[name])


def test_the_counter_sees_what_is_not_linear() -> None:
    """A check that cannot fail is worth nothing: these are what masking searched for before."""
    named = re.compile(r"(?i)\b([a-z0-9_.-]*(?:password|token))=")
    assert Counting(named).work("a." * 200, "finditer") > 3.5 * Counting(named).work("a." * 100, "finditer")
    comments = re.compile(r"(?:\s|/\*.*?\*/)*end", re.DOTALL)
    assert Counting(comments).work("/**/" * 12, "match") > 100 * Counting(comments).work("/**/" * 4, "match")


@pytest.mark.parametrize("name", HOW)
def test_the_counter_finds_what_the_expression_finds(name: str) -> None:
    """On the shortest text that matches, and on its beginnings."""
    pattern, counting = PATTERNS[name], Counting(PATTERNS[name])
    for text in beginnings(pattern):
        sent: Any = text.encode() if isinstance(pattern.pattern, bytes) else text
        counting._text = sent if isinstance(sent, bytes) else [ord(sign) for sign in sent]
        found = pattern.match(sent)
        assert (found.end() if found else None) == next(counting._all(counting._tree, 0, 0), None), (name, text)


# ---- bodies


class Counted(str):
    """A name that counts how often it is compared or hashed."""

    __slots__ = ()
    looks = 0

    def __eq__(self, other: object) -> bool:
        Counted.looks += 1
        return str.__eq__(self, other)

    def __hash__(self) -> int:
        Counted.looks += 1
        return str.__hash__(self)


def looks(count: int) -> int:
    Counted.looks = 0
    names = [Counted(f"name-{n}") for n in range(count)]
    assert "name-1" == codec.first_repeat([*names, Counted("name-1")])
    return Counted.looks


def test_a_repeated_name_is_found_with_one_look_at_each() -> None:
    assert looks(2_000) <= 2 * looks(1_000)


def cpu_s(work: Callable[[], object]) -> float:
    """The least of a few: others use the machine too."""
    spent = []
    for _ in range(4):
        began = time.process_time()
        work()
        spent.append(time.process_time() - began)
    return min(spent)


def refused(read: Callable[[bytes], object], body: bytes) -> Callable[[], object]:
    def attempt() -> None:
        with pytest.raises(ContractViolation):
            read(body)

    return attempt


def members(count: int, member: Callable[[int], str]) -> bytes:
    return ("{" + ",".join(member(n) for n in range(count)) + "}").encode()


def payload_with_a_repeat(count: int) -> bytes:
    inside = members(count, lambda n: f'"name-{n % (count - 1)}":{n}')
    return b'{"type":"a","payload":' + inside + b"}"


HOSTILE: dict[str, tuple[Callable[[bytes], object], Callable[[int], bytes]]] = {
    "one name again and again": (
        decode_produce,
        lambda n: members(n, lambda _: '"topic":"orders"'),
    ),
    "a repeat behind many names": (runtime.check_runtime, payload_with_a_repeat),
    "a repeat in each of many objects": (
        runtime.check_runtime,
        lambda n: b'{"type":"a","payload":{"l":[' + b",".join([b'{"a":1,"a":1}'] * n) + b"]}}",
    ),
    "a field whose name looks like a path": (
        decode_produce,
        lambda n: json.dumps({" - at `$." * n + "\n": 1}).encode(),
    ),
    "a value that should be another": (
        decode_produce,
        lambda n: json.dumps({"topic": "t", "value": [" - at `$." * n + "\n"]}).encode(),
    ),
    "a half surrogate behind many that are whole": (
        decode_produce,
        lambda n: b'{"topic":"' + b"\\ud83d\\ude00" * n + b'\\ud83d"}',
    ),
    "brackets": (decode_produce, lambda n: b'{"x":' + b"[" * n + b"]" * n + b"}"),
    "closed brackets": (runtime.check_runtime, lambda n: b'{"type":"a","payload":[' + b"[]," * n + b"[]]}"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_twice_the_body_takes_twice_the_time_at_most(name: str) -> None:
    """The inner loops are C's, where nothing counts but the clock of the processor. The square would be four times."""
    read, body = HOSTILE[name]
    size = 4_000
    while cpu_s(refused(read, body(size))) < 0.01 and len(body(2 * size)) < codec.BODY_BYTES_MAX // 16:
        size *= 2
    once, twice = (cpu_s(refused(read, body(size * times))) for times in (1, 2))
    assert twice < 3.2 * once + 0.01, (size, once, twice)


def test_the_members_of_an_object_are_bounded() -> None:
    """Different or the same, in the envelope or deep inside; as many as may be are read."""
    for body in (
        members(codec.MEMBERS_MAX + 1, lambda n: f'"n{n}":1'),
        members(codec.MEMBERS_MAX + 1, lambda _: '"type":1'),
    ):
        for sent in (body, b'{"type":"a","payload":' + body + b"}", b'{"type":"a","payload":{"x":[[' + body + b"]]}}"):
            with pytest.raises(ContractViolation, match=f"{codec.MEMBERS_MAX + 1} members, more than"):
                runtime.check_runtime(sent)
    most = members(codec.MEMBERS_MAX, lambda n: f'"n{n}":1')
    assert codec.MEMBERS_MAX == len(runtime.check_runtime(b'{"type":"a","payload":' + most + b"}")[1])
    many = b"[" + b",".join([b'{"at":"12:00:00","n":1}'] * codec.MEMBERS_MAX) + b"]"
    assert runtime.check_runtime(b'{"type":"a","payload":{"x":' + many + b"}}")


def test_what_would_be_refused_by_readers_is_not_written() -> None:
    subject, origin = "evt.default.w.a", ids.Origin("S", 1, 2, 3)
    whole = runtime.decode_runtime(b'{"type":"a","payload":{}}', subject=subject, origin=origin, carried={})
    crowd = {f"n{n}": 1 for n in range(codec.MEMBERS_MAX + 1)}
    with pytest.raises(ContractViolation, match="members"):
        runtime.encode_runtime(msgspec.structs.replace(whole, payload=crowd))


@pytest.mark.parametrize("count", [1, 3])
def test_a_crowded_body_is_not_read_by_the_quick_way_either(count: int) -> None:
    """Alone and among others: it is left to the closer look, which refuses it."""
    crowd = members(codec.MEMBERS_MAX + 1, lambda n: f'"n{n}":1')
    decoder = msgspec.json.Decoder(dict[str, Any])
    bodies = [crowd, *[b'{"a":1}'] * (count - 1)]
    expected = [None, *[{"a": 1}] * (count - 1)]
    assert expected == codec.read_all(decoder, bodies)
    assert expected == codec.read_lines(decoder, b"\n".join(bodies) + b"\n")


# ---- lines and files


@pytest.mark.parametrize("pump", ["a.", "x", "-eyJaaaaa", ".aaaaa", "token ", "a://,", "bearer ", "-eyJa"])
def test_masking_a_line_takes_linear_time(pump: str) -> None:
    """With the whole chain of expressions, on texts as long as any line and far longer."""
    once, twice = (cpu_s(partial(mask_text, pump * (times * 100_000 // len(pump)))) for times in (1, 2))
    assert twice < 3.2 * once + 0.01


def lines_run(text: str) -> int:
    """Lines of Python that reading a topology file takes."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        declare((), (Source("own.toml", text),), Settings())
    finally:
        sys.settrace(None)
    return count


TABLES: dict[str, Callable[[int], str]] = {
    "keys of as many parts as may be": lambda n: "".join(
        f"{'.'.join([f'a{at}'] * KEY_PARTS_MAX)} = 1\n" for at in range(n)
    ),
    "tables of as many parts": lambda n: "".join(f"[{'.'.join([f'a{at}'] * KEY_PARTS_MAX)}]\n" for at in range(n)),
    "a key of too many parts": lambda n: f"{'.'.join(['a'] * 200 * n)} = 1\n",
    "a table of too many parts": lambda n: f"[{'.'.join(['a'] * 200 * n)}]\n",
    "an inline table of too many parts": lambda n: f"x = {{ {'.'.join(['a'] * 200 * n)} = 1 }}\n",
    "tables beside each other": lambda n: "".join(f"[streams.s{at}]\nsubjects = ['a.b.c']\n" for at in range(n)),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_topology_file_is_read_in_linear_work(name: str) -> None:
    once, twice = (lines_run(TABLES[name](times * 40)) for times in (1, 2))
    assert twice <= 2.05 * once


def test_a_key_of_too_many_parts_is_refused_with_its_line() -> None:
    for line in (f"{'.'.join(['a'] * 70)} = 1", f"[{'.'.join(['a'] * 70)}]", f"x = {{{'.'.join(['a'] * 70)} = 1}}"):
        (finding,) = declare((), (Source("own.toml", f"# fine\n{line}\n"),), Settings()).findings
        assert ("too-many", "own.toml:2") == (finding.code, finding.place)
    dots = '"' + "." * 500 + '"'
    for fine in (f"# {'.' * 500}", f"[streams.s]\ndescription = {dots}\nsubjects = ['a']"):
        assert "too-many" not in {one.code for one in declare((), (Source("own.toml", fine),), Settings()).findings}
