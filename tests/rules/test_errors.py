"""The tree of errors: drawn as it is, with codes that machines can trust."""

from __future__ import annotations

import re

import pytest

from oncewire._ground import errors
from oncewire._ground.errors import OncewireError
from oncewire.cli import face


def tree(cls: type[OncewireError]) -> list[type[OncewireError]]:
    return [cls, *(below for child in cls.__subclasses__() for below in tree(child))]


OURS = [cls for cls in tree(OncewireError) if cls.__module__ == errors.__name__]


def drawn() -> list[tuple[str, int]]:
    """Each name in the module's picture with its depth."""
    rows = re.findall(r"^    ([│├└─ ]*)([A-Z][A-Za-z]+)\b", errors.__doc__ or "", re.MULTILINE)
    return [(name, len(branch) // 4) for branch, name in rows]


def test_the_tree_in_the_docstring_is_the_real_one() -> None:
    def walk(cls: type[OncewireError], depth: int) -> list[tuple[str, int]]:
        below = [child for child in cls.__subclasses__() if child in OURS]
        return [(cls.__name__, depth), *(row for child in below for row in walk(child, depth + 1))]

    assert sorted(drawn()) == sorted(walk(OncewireError, 0))


def test_each_error_of_the_module_is_in_the_tree() -> None:
    defined = {value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)}
    assert defined == set(OURS)


def test_codes_are_unique_and_speak_like_their_class() -> None:
    codes = {cls.code: cls.__name__ for cls in OURS}
    assert len(codes) == len(OURS)
    spelled = {cls.__name__: re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower() for cls in OURS[1:]}
    assert {cls.__name__: cls.code for cls in OURS[1:]} == spelled


def test_only_what_is_unavailable_may_be_tried_again() -> None:
    assert {cls for cls in OURS if cls.is_retryable} == set(tree(errors.Unavailable)) & set(OURS)


def test_each_error_explains_itself() -> None:
    assert all(cls.__doc__ for cls in OURS)


def test_an_error_is_shown_with_code_message_hint_and_whether_to_retry() -> None:
    shown = errors.TimedOut("no answer from h", hint="Is it up?").to_dict()
    assert shown == {"code": "timed_out", "message": "no answer from h", "retryable": True, "hint": "Is it up?"}
    assert "hint" not in errors.Refused("no").to_dict()


def test_a_contract_violation_names_its_field() -> None:
    assert errors.ContractViolation("bad", field="payload.x").to_dict()["field"] == "payload.x"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.Conflict("x"), 2),
        (errors.InvalidSetting("x"), 2),
        (errors.NotConnected("x"), 3),
        (errors.ProtocolViolation("x"), 4),
    ],
)
def test_the_branch_decides_the_exit_code(error: OncewireError, code: int) -> None:
    assert face.exit_code(error) == code
