"""Every error of JetStream lands on the branch of our tree that says what the caller should do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from oncewire._ground import errors
from oncewire._ground.jetstream import codes

VECTORS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "vectors" / "jetstream_errors.json").read_text()
)


@pytest.mark.parametrize("known", VECTORS, ids=lambda known: str(known["err_code"]))
def test_each_error_of_the_server_has_its_branch(known: dict[str, Any]) -> None:
    """The vector lists all errors of the server with the class that was decided for each."""
    problem = {name: known[name] for name in ("code", "err_code", "description")}

    error = codes.from_api(problem, "STREAM.INFO.orders")

    assert known["class"] == type(error).__name__
    assert known["err_code"] == error.server_code
    assert error.message == f"STREAM.INFO.orders: {known['description']}"


def test_the_vector_lists_each_number_once_and_without_holes() -> None:
    numbers = [known["err_code"] for known in VECTORS]

    assert list(range(10002, 10227)) == numbers


def test_every_number_that_the_table_names_is_an_error_of_the_server() -> None:
    known = {one["err_code"] for one in VECTORS}

    assert set() == set(codes._BY_NUMBER) - known
    assert set() == set(codes._HINTS) - known
    assert set() == codes.RETRY_NUMBERS - known


def test_what_is_sent_again_by_itself_is_retryable() -> None:
    by_number = {one["err_code"]: getattr(errors, one["class"]) for one in VECTORS}

    assert all(by_number[number].is_retryable for number in codes.RETRY_NUMBERS)


def test_the_table_only_names_what_the_http_like_code_gets_wrong() -> None:
    """Dead entries would hide which decisions are ours; entries that agree with the code are allowed for hints only."""
    by_number = {one["err_code"]: one["code"] for one in VECTORS}
    same = [number for number, branch in codes._BY_NUMBER.items() if codes._BY_CODE.get(by_number[number]) is branch]

    assert not same


@pytest.mark.parametrize(
    ("code", "branch"),
    [
        (400, errors.Refused),
        (403, errors.PermissionDenied),
        (404, errors.NotFound),
        (408, errors.TimedOut),
        (409, errors.Conflict),
        (418, errors.Refused),
        (429, errors.Overloaded),
        (500, errors.Unavailable),
        (503, errors.Unavailable),
        (599, errors.Unavailable),
        (0, errors.Corrupt),
        (200, errors.Corrupt),
    ],
)
def test_a_number_of_a_newer_server_goes_by_its_http_like_code(code: int, branch: type[errors.OncewireError]) -> None:
    assert branch is type(codes.from_api({"code": code, "err_code": 19_999, "description": "new"}, "x"))


@pytest.mark.parametrize("problem", [{}, {"code": "400"}, {"code": None, "err_code": []}, {"description": 7}])
def test_an_error_that_is_itself_malformed_is_corrupt_and_not_a_crash(problem: dict[str, Any]) -> None:
    assert errors.Corrupt is type(codes.from_api(problem, "x"))


def test_a_delete_that_is_forbidden_differs_from_one_of_what_is_not_there() -> None:
    """The server has one number for both."""
    missing = codes.from_api({"code": 500, "err_code": 10057, "description": "no message found"}, "x")
    forbidden = codes.from_api({"code": 500, "err_code": 10057, "description": "message delete not permitted"}, "x")

    assert (errors.NotFound, errors.Refused) == (type(missing), type(forbidden))
