"""An agent's handlers: which subject they are for, what payload type they ask for. No I/O.

A payload is decoded by the hint of the handler's second parameter: dataclass, msgspec Struct, pydantic model, TypedDict
or dict. A payload that does not fit is a contract violation: the input is terminated, since it will never fit.
"""

from __future__ import annotations

import functools
import inspect
import time
import typing
from collections.abc import Callable
from typing import Any, Final

import msgspec

from oncewire._ground.arguments import check_number, check_text, wrong
from oncewire._ground.contracts import subjects
from oncewire._ground.errors import ContractViolation, Refused, TimedOut

TICK = "tick"
TIMEOUT_S_MAX: Final = 7 * 24 * 3600
RATE_PER_S_MIN: Final = 1 / 3600
RATE_PER_S_MAX: Final = 1_000_000
UNREAD: Final = object()
"""In place of a payload that was not decoded with the others."""


class Handler(msgspec.Struct, frozen=True):
    """A registered handler. `run` takes the context and the payload, whatever the function takes."""

    name: str
    pattern: str
    run: Callable[..., Any]
    is_async: bool
    decode: Callable[[dict[str, Any]], Any]
    decode_all: Callable[[list[dict[str, Any]]], list[Any]]
    rate_per_s: float = 0.0
    timeout_s: float = 0.0
    every_s: float = 0.0


def make_handler(
    run: Callable[..., Any], pattern: str, *, rate_per_s: float = 0.0, timeout_s: float = 0.0, every_s: float = 0.0
) -> Handler:
    """Look at the function once; refuse at once what could never work."""
    name = getattr(run, "__qualname__", repr(run))
    parameters = list(inspect.signature(run).parameters.values())
    wanted = 1 if every_s else 2
    if len(parameters) < wanted:
        form = "handler(ctx)" if every_s else "handler(ctx, payload)"
        raise Refused(f"handler {name} takes {len(parameters)} parameters", hint=f"Write it as {form}.")
    check_number(f"handler {name}", "timeout_s", timeout_s, 0, TIMEOUT_S_MAX, "seconds")
    check_number(f"handler {name}", "rate_per_s", rate_per_s, 0, RATE_PER_S_MAX)
    if 0 < rate_per_s < RATE_PER_S_MIN:
        raise wrong(f"handler {name}", "rate_per_s", rate_per_s, f"is less than {RATE_PER_S_MIN}", "0 is no limit.")
    hint = dict if every_s else _hint(run, parameters[1].name)
    is_async = inspect.iscoroutinefunction(run)
    if every_s:
        run = _without_payload(run)
    if timeout_s and not is_async:
        run = _timed(run, name, timeout_s)
    return Handler(name, pattern, run, is_async, *decoders_of(hint), rate_per_s, timeout_s, every_s)


def _without_payload(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def ticked(context: Any, _: object) -> Any:
        return run(context)

    return ticked


def _timed(run: Callable[..., Any], name: str, timeout_s: float) -> Callable[..., Any]:
    """A `def` handler holds the transaction and cannot be interrupted: one that took too long is undone afterwards."""

    @functools.wraps(run)
    def timed(*args: Any) -> Any:
        began = time.monotonic()
        returned = run(*args)
        if time.monotonic() - began > timeout_s:
            raise TimedOut(f"handler {name} took longer than {timeout_s:g} s")
        return returned

    return timed


def _hint(run: Callable[..., Any], parameter: str) -> Any:
    try:
        return typing.get_type_hints(run).get(parameter, dict)
    except NameError as error:
        raise Refused(
            f"the hints of {getattr(run, '__qualname__', run)} cannot be read: {error}",
            hint="Define the payload type in the module, before the handler.",
        ) from None


def decoders_of(hint: Any) -> tuple[Callable[[dict[str, Any]], Any], Callable[[list[dict[str, Any]]], list[Any]]]:
    """From a JSON object to the type of the hint, or ContractViolation naming the field; and the same for many at once,
    UNREAD for all of them where it must be tried with each."""
    if hint in (dict, Any) or typing.get_origin(hint) is dict:
        return (lambda payload: payload), (lambda payloads: payloads)
    if hasattr(hint, "model_validate"):
        return (lambda payload: _pydantic(hint, payload)), _each_by_itself
    # What a type runs by itself may take long, and not all that was asked for may come to its turn.
    return _converter(hint), _each_by_itself if hasattr(hint, "__post_init__") else _converter_of_all(hint)


def _each_by_itself(payloads: list[dict[str, Any]]) -> list[Any]:
    return [UNREAD] * len(payloads)


def _converter_of_all(hint: Any) -> Callable[[list[dict[str, Any]]], list[Any]]:
    convert, many = msgspec.convert, list[hint]

    def converted(payloads: list[dict[str, Any]]) -> list[Any]:
        try:
            return convert(payloads, many)
        except Exception:  # whose fault it is shows when each is tried
            return _each_by_itself(payloads)

    return converted


def _converter(hint: Any) -> Callable[[dict[str, Any]], Any]:
    convert = msgspec.convert

    def converted(payload: dict[str, Any]) -> Any:
        try:
            return convert(payload, hint)
        except msgspec.ValidationError as error:
            text, _, path = str(error).partition(" - at `$")
            field = path.rstrip("`").lstrip(".")
            raise ContractViolation(f"payload{'.' + field if field else ''}: {text}", field=field) from None

    return converted


def _pydantic(hint: Any, payload: dict[str, Any]) -> Any:
    try:
        return hint.model_validate(payload)
    except ValueError as error:  # pydantic's ValidationError is one
        first = error.errors()[0] if hasattr(error, "errors") else {"loc": (), "msg": str(error)}
        field = ".".join(map(str, first["loc"]))
        raise ContractViolation(f"payload.{field}: {first['msg']}", field=field) from None


def full_subject(name: str, tenant: str, workspace: str, agent: str) -> str:
    """`charge` is the agent's own command; anything with a dot is a full subject or pattern."""
    check_text("on", "subject", name)
    if "." in name:
        return subjects.check_filter(name)
    return subjects.cmd(tenant, workspace, agent, name)


def find_handler(handlers: list[Handler], subject: str) -> Handler | None:
    """The handler with the most particular pattern that matches."""
    matching = [one for one in handlers if subjects.matches(subject, one.pattern)]
    return max(matching, key=lambda one: _weight(one.pattern), default=None)


def _weight(pattern: str) -> tuple[int, int]:
    tokens = pattern.split(".")
    return sum(token not in ("*", ">") for token in tokens), len(tokens)
