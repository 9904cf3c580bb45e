"""Rules of the house that a machine can check: purity, sizes, public names, import directions."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import oncewire
from oncewire import pipeline

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "oncewire"
FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70

PURE = ["**/rules.py", "_ground/contracts/**/*.py", "_ground/jetstream/protocol.py", "_ground/doctor.py"]
PURE += ["_ground/ledger/keys.py", "gateway/rooms.py"]
PURE += [f"pipeline/auditing/{name}.py" for name in ("chains", "excuses", "known", "partitions", "plain", "rowhash")]
PURE += ["pipeline/auditing/sums.py"]
PURE += [f"broker/{name}.py" for name in ("metrics", "openapi", "wire")]
PURE += [f"_ground/http/{name}.py" for name in ("origins", "rates", "shares")]
PURE += [f"gateway/{name}.py" for name in ("channels", "frames", "metrics", "slabs")]
PURE += [f"_ground/topology/{name}.py" for name in ("asyncapi", "files", "lint", "model", "names", "permissions")]
PURE += [f"_ground/topology/{name}.py" for name in ("text", "units", "values")]
PURE += [f"broker/{name}.py" for name in ("credit", "desk", "dispatch", "idempotency", "image", "messages", "placing")]
PURE += [f"broker/{name}.py" for name in ("progress", "state", "upkeep", "view", "log/format")]
PURE += [f"broker/jetstream/{name}.py" for name in ("loans", "names", "ops", "packed")]
PURE += [f"gateway/client/{name}.py" for name in ("actions", "followed", "sse")]
IMPURE = {"asyncio", "io", "os", "pathlib", "random", "secrets", "socket", "subprocess", "threading", "time", "uuid"}
CLOCK = {"now", "utcnow", "today"}

PUBLIC = [
    "Agent", "BrokerClient", "Client", "connect", "Context", "Effect", "ensure_consumers", "errors", "GatewayClient",
    "init_streams", "MessageEnvelope", "new_message", "RealtimeEnvelope", "Retry", "RuntimeEnvelope",
    "SyncBrokerClient", "Terminate", "tokens", "topology",
]  # fmt: skip
PIPELINE = [
    "audit", "audit_chains", "audit_effects", "audit_letters", "audit_positions", "audit_quarantine",
    "audit_settlements", "audit_silver", "audit_sums", "backlog", "blocks", "bronze", "consumers", "dead_letters",
    "health", "JetStreamSource", "lineage", "outcomes", "read_table", "silver", "spark_session", "throughput", "usage",
]  # fmt: skip


def sources() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def pure_files() -> list[Path]:
    return sorted({path for pattern in PURE for path in SOURCE.glob(pattern)})


def impurities(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] in IMPURE)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in IMPURE:
            yield f"from {node.module}"
        elif isinstance(node, ast.AsyncFunctionDef | ast.Await):
            yield "async"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("open", "print"):
            yield f"{node.func.id}()"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CLOCK:
            yield f".{node.func.attr}()"


@pytest.mark.parametrize("path", pure_files(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_pure_files_hold_no_clock_io_chance_or_async(path: Path) -> None:
    """Time and entropy are arguments there, so that the rules can be replayed and cut after every step."""
    assert [] == list(impurities(ast.parse(path.read_text())))


def test_the_purity_check_sees_what_it_forbids() -> None:
    """A check that cannot fail is worth nothing."""
    guilty = "import time\nfrom os import path\nasync def f(): await g()\nopen('x')\ndatetime.now()\n"
    assert {"time", "from os", "async", "open()", ".now()"} <= set(impurities(ast.parse(guilty)))


def test_no_file_holds_more_than_one_idea() -> None:
    long = {
        str(path.relative_to(ROOT)): size
        for path in sources()
        if (size := path.read_text().count("\n")) > FILE_LINES_MAX
    }
    assert {} == long


def test_functions_fit_on_a_screen() -> None:
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or node.lineno) - node.lineno > FUNCTION_LINES_MAX
    ]
    assert [] == long


def test_every_module_says_what_it_is_for() -> None:
    silent = [str(path.relative_to(ROOT)) for path in sources() if not ast.get_docstring(ast.parse(path.read_text()))]
    assert [] == silent


def test_the_public_names_are_these() -> None:
    """A name that is added or taken away is a decision, not an accident."""
    assert PUBLIC == sorted(oncewire.__all__, key=str.lower)
    assert all(getattr(oncewire, name) is not None for name in oncewire.__all__)


def test_the_public_names_of_the_pipeline_are_these() -> None:
    """For a job of your own: the source, the steps of the lake, the tables of gold, the audits."""
    assert PIPELINE == sorted(pipeline.__all__, key=str.lower)
    assert all(callable(getattr(pipeline, name)) for name in pipeline.__all__)


def test_tables_are_read_by_arrow_alone() -> None:
    """`tables.dataset` says why: Delta's own reader can abort a process that ends."""
    readers = {str(path.relative_to(SOURCE)) for path in sources() if ".to_pyarrow_" in path.read_text()}
    assert {"pipeline/tables.py"} == readers


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing_here"):
        _ = oncewire.nothing_here


def test_imports_go_downwards() -> None:
    """The same check as `make check` runs, so that it cannot be forgotten."""
    tool = Path(sys.executable).parent / "lint-imports"
    command = [str(tool), "--config", str(ROOT / ".importlinter"), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stdout


def test_the_long_forms_can_be_loaded() -> None:
    """`make test` does not run them: what they take from the package must not vanish unseen."""
    names = [path.stem for path in sorted((ROOT / "tests" / "faults").glob("*.py"))]
    assert "broker_mutations" in names
    for name in names:
        importlib.import_module(f"tests.faults.{name}")


def test_importing_the_package_loads_neither_client_nor_spark() -> None:
    """A command line that only prints help, and a Spark worker, pay for nothing that they do not use."""
    loaded = "[m for m in ('ssl', 'asyncio', 'pyspark') if m in sys.modules]"
    code = f"import sys, oncewire, oncewire._ground.jetstream.protocol; print({loaded})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "[]" == done.stdout.strip()
