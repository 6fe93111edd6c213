"""Regression tests for the twenty-third attack."""

import json
from ipaddress import ip_address
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families as parse

from app.contract.model_reference import ModelLayer
from app.contract.plan import TokenBudget
from app.contract.preview import PreviewSpec
from app.contract.public_addresses import NotPublic, address_of_redirect, is_public
from app.contract.spec import Spec
from app.errors import Unprocessable
from app.jobs import parent_jobs, transitions
from app.settings import Settings
from app.storage.database import Database
from tests.harness.any_family import lay_any
from tests.harness.requests import PATH
from tests.harness.runs import small_data
from tests.harness.specs import make_spec
from tests.harness.submissions import started_from, succeeded
from tests.harness.training import events_of_kind, run_to_end
from workers.profiling import previews as profiler


@pytest.mark.parametrize("network", ["fd00::", "fe80::", "ff02::", "fec0::", "2001:db8::"])
def test_a_public_address_within_a_private_one_is_private(network: str) -> None:
    assert not is_public(ip_address(f"{network}5efe:808:808"))


@pytest.mark.parametrize("public", ["::ffff:8.8.8.8", "2002:808:808::1", "64:ff9b::808:808", "8.8.8.8"])
def test_public_addresses_of_other_forms_stay_public(public: str) -> None:
    assert is_public(ip_address(public))


@pytest.mark.parametrize("bypass", ["127.0.0.1/8", "127.0.0.1:80", "10.0.0.0/8", ""])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "169.254.169.254", "10.1.2.3"])
def test_a_proxy_does_not_lead_redirects_into_the_local_network(
    bypass: str, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", bypass)
    with pytest.raises(NotPublic):
        address_of_redirect("http", host, 80, from_scheme="http")


def test_a_proxy_resolves_what_this_machine_cannot_find(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "")
    assert address_of_redirect("https", "files.invalid", 443, from_scheme="https") is None


def test_a_local_model_without_a_folder_of_models_does_not_end_the_profiler(
    database: Database, settings: Settings
) -> None:
    spec = make_spec()
    model = spec.model.model_copy(update={"source": "local", "name": "mine/model"})
    order = PreviewSpec(model=model, data=spec.data, shown=1)
    found, error = profiler._make_in_child(order, settings.model_copy(update={"models_dir": None}))
    assert found is None
    assert error is not None
    assert "ACCRUE_MODELS_DIR" in error


def test_methods_that_a_path_does_not_take_add_no_metrics(client: TestClient) -> None:
    def counted() -> set[tuple[str, ...]]:
        families = parse(client.get("/metrics").text)
        return {
            tuple(sample.labels.values())
            for family in families
            for sample in family.samples
            if sample.name == "accrue_http_request_seconds_count"
        }

    counted()
    before = counted()
    for path in (PATH, f"{PATH}/ftjob-1", "/v1/files", "/healthz", "/v1/models"):
        for method in ("PROPFIND", "LOCK", "PATCH", "XYZ", "CONNECT"):
            client.request(method, path)
    found = counted() - before
    assert {route for _, route, _ in found} == {"none"}
    assert {method for method, _, _ in found} <= {"PATCH", "other"}


def test_a_dry_run_finds_that_a_lower_layer_was_deleted(database: Database, settings: Settings) -> None:
    source, _ = succeeded(database, settings)
    dependent = started_from(database, source)
    with database.reading() as session:
        spec = Spec.model_validate(transitions.get(session, dependent).spec)
    layer = ModelLayer(name="ft:lower", job_id="ftjob-gone", folder="model", lora=None, fingerprint="0" * 64)
    lower = spec.model.model_copy(update={"layers": (layer,)})
    with database.reading() as session:
        parent_jobs.check_available(session, spec)
        with pytest.raises(Unprocessable, match="needs the job ftjob-gone, which has been deleted"):
            parent_jobs.check_available(session, spec.model_copy(update={"model": lower}))


@pytest.mark.sqlite
def test_samples_are_padded_if_the_model_fails_on_rows_beyond_its_positions(tmp_path: Path) -> None:
    """GPT-Neo's mask has the size of its positions."""
    lines = [json.dumps({"text": "abcdefg hi" * (10 + number % 15)}) for number in range(24)]
    (tmp_path / "data.jsonl").write_text("".join(f"{line}\n" for line in lines))
    data = small_data(packing=True).model_copy(update={"max_length": 256, "examples": 24})
    spec = make_spec(data=data, max_steps=2, effective_batch_size=8)
    run = lay_any(tmp_path / "run", "gpt_neo", spec, rule=TokenBudget(tokens=1024))
    run_to_end(run)
    changed = [event["message"] for event in events_of_kind(run, "changed")]
    assert any("fails on such a row" in message for message in changed)
