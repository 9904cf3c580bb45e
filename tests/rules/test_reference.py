"""docs/reference and the SQL file of the outbox say what the code says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "reference.py"
spec = importlib.util.spec_from_file_location("reference", SCRIPT)
assert spec is not None
assert spec.loader is not None
reference = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reference)


@pytest.mark.parametrize(("name", "text"), reference.pages().items(), ids=list(reference.pages()))
def test_a_page_is_as_the_code_would_write_it(name: str, text: str) -> None:
    assert text == (reference.ROOT / name).read_text("utf-8"), "run `make reference`"
