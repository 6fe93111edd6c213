"""The Grafana dashboard in docker/monitoring asks for metrics and labels that /metrics has."""

import json
import re
from pathlib import Path
from typing import Any

import yaml
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families as parse

from app.devices import gpus
from app.devices.gpus import DetectedGpu
from app.planning.devices import GIB
from tests.harness.requests import JOB, PATH

DOCKER = Path(__file__).parents[2] / "docker"
DASHBOARD: dict[str, Any] = json.loads((DOCKER / "monitoring" / "dashboard.json").read_text())
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def names_in(text: str) -> dict[str, set[str]]:
    """The labels of each metric in an exposition."""
    found: dict[str, set[str]] = {}
    for family in parse(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
        if not family.samples:
            found[f"{family.name}_total" if family.type == "counter" else family.name] = set()
    return found


def test_every_panel_asks_for_what_there_is(client: TestClient, monkeypatch: Any) -> None:
    gpu = DetectedGpu(0, "GPU-1", "H100", 80 * GIB, GIB, load=0.5, temperature_celsius=40.0)
    monkeypatch.setattr(gpus, "detected", lambda: (gpu,))
    client.post(f"{PATH}/with-accumulation", json=JOB)
    there = names_in(client.get("/metrics").text)
    for panel in PANELS:
        for target in panel["targets"]:
            asked = re.findall(r"accrue_[a-z_]+", target["expr"])
            assert asked, panel["title"]
            assert set(asked) <= there.keys(), panel["title"]
            if any(there[name] for name in asked):
                known = set().union(*(there[name] for name in asked)) | {"instance", "le"}
                grouped = re.findall(r"by \(([^)]*)\)", target["expr"])
                labels = {label.strip() for each in grouped for label in each.split(",")}
                labels |= set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
                assert labels <= known, panel["title"]


def test_every_metric_has_a_panel(client: TestClient) -> None:
    asked = {
        name.removesuffix(kind)
        for panel in PANELS
        for target in panel["targets"]
        for name in re.findall(r"accrue_[a-z_]+", target["expr"])
        for kind in ("_total", "_bucket", "_count", "")
    }
    there = {family.name for family in parse(client.get("/metrics").text)}
    assert there - asked <= {"accrue_job_seconds"}  # what a dashboard of the moment does not need


def test_panels_do_not_overlap_and_use_the_data_source() -> None:
    [source] = yaml.safe_load((DOCKER / "monitoring" / "datasource.yaml").read_text())["datasources"]
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not taken & cells, panel["title"]
        taken |= cells
    assert all(panel["datasource"]["uid"] == source["uid"] for panel in PANELS)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_compose_mounts_files_that_exist() -> None:
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    mounted = [
        volume.split(":")[0]
        for name in ("prometheus", "grafana")
        for volume in services[name]["volumes"]
        if volume.startswith("./")
    ]
    assert len(mounted) == 4
    assert all((DOCKER / path).is_file() for path in mounted)
