"""What Kubernetes gets, against its published schemas (`make test-tools`), and what is understood of it."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.errors import BadSetting
from app.planning.devices import Device
from app.settings import Settings
from workers.executors.kubernetes import KubernetesExecutor, _found
from workers.executors.protocol import Launch, LaunchStatus, Refused, Unreachable

LAUNCH = Launch("accrue-ftjob-0a1b-2.3", Path("/data/runs/ftjob-0a1b"), 2, 4, True, 45.0)


def executor(folder: Path, **changes: Any) -> KubernetesExecutor:
    names = {"kubernetes_image": "accrue/worker:1", "kubernetes_volume": "accrue-data"}
    settings = Settings(data_dir=folder, _env_file=None, **{**names, **changes})
    return KubernetesExecutor([Device("kubernetes:0", "A100", 2**36, "cuda")], settings)


def rendered(folder: Path, **changes: Any) -> Any:
    return yaml.safe_load(executor(folder, **changes).render(LAUNCH))


def test_a_job_has_one_pod_for_each_node(tmp_path: Path) -> None:
    job = rendered(tmp_path)
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (2, 2, "Indexed")
    (container,) = pod["containers"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 4}}
    assert container["command"][-2:] == ["/data/runs/ftjob-0a1b", "accrue-ftjob-0a1b-2.3"]
    assert container["volumeMounts"] == [{"name": "data", "mountPath": str(tmp_path)}]
    assert pod["terminationGracePeriodSeconds"] > LAUNCH.grace_seconds
    assert job["metadata"]["name"] == "accrue-ftjob-0a1b-2-3"


def test_kubernetes_knows_every_field_of_a_job(tmp_path: Path) -> None:
    schemas = pytest.importorskip("kubernetes_validate", reason="make test-tools")
    schemas.validate(rendered(tmp_path), schemas.latest_version(), strict=True)


def test_kubeflow_knows_every_field_of_a_train_job(tmp_path: Path) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="make test-tools")
    content = rendered(tmp_path, kubernetes_runtime="torch-distributed")
    assert json.loads(models.TrainerV1alpha1TrainJob.from_dict(content).to_json()) == content
    assert content["spec"]["trainer"]["numNodes"] == 2


@pytest.mark.parametrize("missing", ["kubernetes_image", "kubernetes_volume"])
def test_a_missing_setting_is_named(tmp_path: Path, missing: str) -> None:
    with pytest.raises(BadSetting, match=f"ACCRUE_{missing.upper()}"):
        executor(tmp_path, **{missing: ""})


CONDITION = {"status": "True"}


@pytest.mark.parametrize(
    ("status", "found"),
    [
        ({}, LaunchStatus("waiting", "its pods are not ready")),
        ({"active": 2, "ready": 0}, LaunchStatus("waiting", "its pods are not ready")),
        ({"active": 2, "ready": 2}, LaunchStatus("running")),
        ({"jobsStatus": [{"name": "node", "active": 2, "ready": 2}]}, LaunchStatus("running")),
        ({"conditions": [{"type": "Complete", **CONDITION}]}, LaunchStatus("ended", "Complete")),
        ({"conditions": [{"type": "Complete", "status": "False"}], "ready": 1}, LaunchStatus("running")),
        ({"conditions": [{"type": "Suspended", **CONDITION}]}, LaunchStatus("waiting", "suspended")),
        (
            {"conditions": [{"type": "Failed", "reason": "BackoffLimitExceeded", **CONDITION}]},
            LaunchStatus("ended", "BackoffLimitExceeded"),
        ),
        (
            {"conditions": [{"type": "Failed", "reason": "PodFailurePolicy", "message": "x", **CONDITION}]},
            LaunchStatus("ended", "x", was_evicted=True),
        ),
    ],
)
def test_a_status_is_understood(status: dict[str, Any], found: LaunchStatus) -> None:
    assert _found(status) == found


def kubectl(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Puts a program in the place of kubectl."""
    program = folder / "kubectl"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_kubectl_s_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = executor(tmp_path)
    kubectl(tmp_path, monkeypatch, 'echo \'{"items": [{"status": {"ready": 1}}]}\'')
    assert engine.poll(LAUNCH.handle) == LaunchStatus("running")
    kubectl(tmp_path, monkeypatch, "echo '{\"items\": []}'")
    assert engine.poll(LAUNCH.handle) == LaunchStatus("unknown")
    kubectl(tmp_path, monkeypatch, "echo 'Unable to connect to the server: dial tcp' >&2; exit 1")
    with pytest.raises(Unreachable, match="Unable to connect"):
        engine.submit(LAUNCH)
    kubectl(tmp_path, monkeypatch, "echo 'The Job \"a\" is invalid: spec.x' >&2; exit 1")
    with pytest.raises(Refused, match=r"spec\.x"):
        engine.submit(LAUNCH)
    kubectl(tmp_path, monkeypatch, "cat > $0.applied; echo created")
    engine.submit(LAUNCH)
    assert yaml.safe_load((tmp_path / "kubectl.applied").read_text())["kind"] == "Job"
