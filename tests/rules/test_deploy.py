"""Alerts and the dashboard ask for metrics that exist, by labels that they have; each alert says what to do."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from oncewire._ground.metrics.table import TABLE, Kind

ROOT = Path(__file__).parents[2]
ADDED = {"instance", "job", "le"}
"""Labels that Prometheus adds, and the bound of a histogram."""


def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def queries() -> list[tuple[str, str]]:
    """Of the dashboard, by panel."""
    board = json.loads((ROOT / "deploy/grafana/oncewire.json").read_text())
    return [(panel["title"], target["expr"]) for panel in board["panels"] for target in panel["targets"]]


def inner(node: Any) -> Iterator[Any]:
    """The node and everything below it."""
    yield node
    for name in ("expr", "lhs", "rhs", "param", "args", "vs", "vector_selector"):
        below = getattr(node, name, None)
        for one in below if isinstance(below, list) else [below]:
            if one is not None and type(one).__module__ == type(node).__module__:
                yield from inner(one)


def family(name: str) -> str:
    """The declared name behind a series of a histogram."""
    bare = re.sub("_(bucket|sum|count)$", "", name)
    return bare if TABLE.get(bare) and TABLE[bare].kind is Kind.HISTOGRAM else name


def wrong(expr: str) -> list[str]:
    """What a query asks for and no service shows."""
    found: list[str] = []
    labels: set[str] = set(ADDED)
    nodes = list(inner(promql_parser.parse(expr)))
    for node in nodes:
        if isinstance(node, promql_parser.VectorSelector):
            metric = TABLE.get(family(node.name or ""))
            if metric is None:
                found.append(f"metric {node.name}")
                continue
            labels |= set(metric.labels)
            named = {one.name for one in node.matchers.matchers}
            found += [f"label {one} of {node.name}" for one in named - set(metric.labels) - ADDED]
    for node in nodes:
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            found += [f"label {one}" for one in set(node.modifier.labels) - labels]
    assert any(isinstance(node, promql_parser.VectorSelector) for node in nodes), "a query that asks for nothing"
    return found


@pytest.mark.parametrize(("title", "expr"), queries())
def test_each_panel_asks_for_what_there_is(title: str, expr: str) -> None:
    assert [] == wrong(expr), title


@pytest.mark.parametrize("alert", alerts(), ids=lambda one: one["alert"])
def test_each_alert_asks_for_what_there_is_and_has_its_runbook(alert: dict[str, Any]) -> None:
    assert [] == wrong(alert["expr"])
    assert alert["labels"]["severity"] in ("warning", "critical")
    assert alert["annotations"]["summary"]
    runbook = (ROOT / "docs/observability.md").read_text()
    page, _, anchor = alert["annotations"]["runbook_url"].partition("#")
    assert ("docs/observability.md", alert["alert"].lower()) == (page, anchor)
    assert f'| <a id="{anchor}"></a>{alert["alert"]} |' in runbook
    named = set(re.findall(r"\$labels\.(\w+)", json.dumps(alert["annotations"])))
    known = {
        label for name in re.findall(r"[a-z_]{4,}", alert["expr"]) if name in TABLE for label in TABLE[name].labels
    }
    assert named <= known | ADDED


def test_every_panel_has_a_place_of_its_own() -> None:
    panels = json.loads((ROOT / "deploy/grafana/oncewire.json").read_text())["panels"]
    taken = {(x, y) for one in panels for x, y in cells(one["gridPos"])}
    assert len(taken) == sum(one["gridPos"]["w"] * one["gridPos"]["h"] for one in panels)
    assert len({one["id"] for one in panels}) == len({one["title"] for one in panels}) == len(panels)


def cells(place: dict[str, int]) -> Iterator[tuple[int, int]]:
    return ((place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"]))


@pytest.mark.parametrize(
    "expr", ["oncewire_no_such_metric > 0", 'oncewire_agent_lag{topic="x"} > 0', "sum by (topic) (oncewire_agent_lag)"]
)
def test_the_check_sees_what_is_not_there(expr: str) -> None:
    assert [] != wrong(expr)
