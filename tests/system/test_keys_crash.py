"""`oncewire keys` killed at every step of its write: no key is lost, none half made, and the next one works."""

from __future__ import annotations

import json
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from oncewire._ground.trust.keys import KeyFile
from tests.support.up import clean_environ, oncewire

KILLED = """
import os, pathlib, signal, sys

calls = {"fsync": os.fsync, "replace": pathlib.Path.replace}
seen = []

def dying(name, at):
    def call(*given):
        seen.append(name)
        if (name, seen.count(name)) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return calls[name](*given)
    return call

name, count = sys.argv.pop(1).split(":")
for one in calls:
    setattr(os if one == "fsync" else pathlib.Path, one, dying(one, (name, int(count))))
from oncewire.cli import main
main(prog_name="oncewire")
"""
STEPS = {
    "before the new file is on the disk": ("fsync:1", False),
    "between its write and its rename": ("replace:1", False),
    "before the rename is on the disk": ("fsync:2", True),
}
"""Where it dies, and whether the change counts then."""
NOW = 1_800_000_000


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("verb", ["create", "revoke"])
def test_keys_killed_in_its_write_lose_nothing(tmp_path: Path, verb: str, step: str) -> None:
    keys = KeyFile(tmp_path / "keys.json")
    first, text = keys.create("first", "acme", ("read",), NOW)
    before = keys.path.read_bytes()
    where, is_done = STEPS[step]
    change = (
        ["create", "--tenant", "acme", "--name", "second", "--allow", "read"]
        if verb == "create"
        else ["revoke", first.id]
    )
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, where, "keys", *change, "--auth-keys", str(keys.path)],
        env=clean_environ(),
        cwd=tmp_path,
        capture_output=True,
        timeout=60,
    )
    assert -signal.SIGKILL == killed.returncode, killed.stderr
    assert b"ow_" not in killed.stdout, "no key is shown that might not be kept"
    assert is_done is (before != keys.path.read_bytes())
    for path in tmp_path.iterdir():
        assert 0o600 == stat.S_IMODE(path.stat().st_mode), path
    if not (is_done and verb == "revoke"):
        assert "acme" == KeyFile(keys.path).principal(text, NOW).tenant
    again = oncewire("keys", *change, "--auth-keys", str(keys.path), "--json", cwd=tmp_path)
    assert 0 == again.returncode, again.stderr
    names = sorted(key.name for key in KeyFile(keys.path).keys())  # noqa: SIM118
    expected = ["first", "second", "second"] if is_done else ["first", "second"]
    assert (expected if verb == "create" else ["first"]) == names
    assert json.loads(again.stdout)["state"] == ("works" if verb == "create" else "revoked")
    assert not list(tmp_path.glob("*.part"))
