"""What users hand over as arguments: refused where it is handed over, with the argument and its value. Pure."""

from __future__ import annotations

from typing import Final

from oncewire._ground.errors import ContractViolation

SHOWN_CHARS: Final = 80


def wrong(call: str, name: str, value: object, what: str, hint: str = "") -> ContractViolation:
    """`Agent: batch 1.5 is not …`: the call, the argument, its value, and what is wrong with it."""
    return ContractViolation(f"{call}: {name} {shown(value)} {what}", field=name.partition("[")[0], hint=hint)


def shown(value: object) -> str:
    """The value in a sentence: short, in one line, whatever its `repr` does."""
    try:
        text = ascii(value)
    except Exception:
        text = f"({type(value).__name__})"
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}…"


def check_number(call: str, name: str, value: object, low: float, high: float, unit: str = "") -> float:
    """A number that is one: neither NaN nor infinite, and no text, bool or timedelta."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:  # NaN neither
        raise wrong(call, name, value, f"is not a number{unit and ' of ' + unit} from {low:,} to {high:,}")
    return value


def check_count(call: str, name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise wrong(call, name, value, f"is not a whole number from {low:,} to {high:,}")
    return value


def check_text(call: str, name: str, value: object) -> str:
    """Text that UTF-8 can write; of a subclass the text itself."""
    if not isinstance(value, str):
        raise wrong(call, name, value, f"is not text but {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise wrong(call, name, value, "has a lone surrogate, which is not a character") from None
    return str.__str__(value)


def check_secret(call: str, name: str, value: object) -> str:
    """Text that no error may show."""
    try:
        return check_text(call, name, value)
    except ContractViolation:
        raise ContractViolation(f"{call}: {name} is not text that can be sent", field=name) from None
