"""What the demo answers: it says what happens to the words while they travel."""

from __future__ import annotations

import re

QUOTE_CHARS_MAX = 120
_PIECE = re.compile(r"\S+\s*")


def answer_to(question: str, sequence: int) -> list[str]:
    """The answer, in the pieces in which a model would make it."""
    quoted = " ".join(question.split())
    if len(quoted) > QUOTE_CHARS_MAX:
        quoted = quoted[: QUOTE_CHARS_MAX - 1] + "…"
    text = (
        f"You wrote: “{quoted}”\n\nI am not a model, only a few lines of Python that show how an answer travels.\n\n"
        "Your message was committed to PostgreSQL together with its row in the outbox. A relay published it to "
        f"JetStream as number {sequence} of this room, and the gateway wrote it to every tab that is here.\n\n"
        "These words take another way: each piece is a token that comes to you over SSE while I am still writing. When "
        "I am done, the whole answer goes through the outbox too, and becomes a message with a number of its own.\n\n"
        "Stop the gateway in the middle of a sentence and start it again: the page goes on where it broke. Nothing is "
        "missing, and nothing is there twice."
    )
    return _PIECE.findall(text)
