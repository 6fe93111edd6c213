from dataclasses import replace

import pytest
from fastapi.testclient import TestClient

from app.contract.accumulation import MAX_ACCUMULATION_STEPS
from app.contract.objective import ObjectiveSpec
from app.contract.reports import NoiseScale
from app.contract.spec import OptimizerName
from app.planning.architectures import named
from app.planning.recommendations import (
    MeasuredNoise,
    MeasuredRate,
    ModelKind,
    Situation,
    recommend,
    recommended_batch,
)
from app.settings import Settings
from app.storage.database import Database
from app.storage.tables import Job
from tests.harness.specs import make_spec
from tests.harness.submissions import succeeded


@pytest.mark.parametrize(
    ("samples", "batch"), [(None, 32), (1, 1), (20, 20), (1000, 32), (10_000, 100), (10**7, 512)]
)
def test_the_recommended_batch_follows_the_data(samples: int | None, batch: int) -> None:
    assert recommended_batch(samples) == batch


def test_every_recommendation_names_its_evidence() -> None:
    gpt2 = named("gpt2")
    assert gpt2 is not None
    situation = Situation(gpt2, target=64, micro_batch=16, devices=2, device_kind="cuda")
    recommended = recommend(situation)
    assert recommended["micro_batch_size"].value * recommended["accumulation_steps"].value * 2 >= 64
    assert recommended["accumulation_steps"].value == 2
    assert all(item.why for item in recommended.values())
    by_formula = {name for name, item in recommended.items() if item.evidence == "formula"}
    assert by_formula == {"micro_batch_size", "accumulation_steps", "gradient_checkpointing"}
    assert recommended["learning_rate"].evidence == "literature"
    assert recommended["gradient_checkpointing"].value is False


NOISE = MeasuredNoise("ftjob-1", NoiseScale(value=61.2, low=48.0, high=80.0, measurements=20), samples=10_000)


def test_a_measured_noise_scale_is_recommended_with_its_confidence_interval() -> None:
    gpt2 = named("gpt2")
    assert gpt2 is not None
    situation = Situation(gpt2, None, micro_batch=16, devices=1, device_kind="cuda", noise=NOISE)
    batch = recommend(situation)["effective_batch_size"]
    assert (batch.value, batch.range, batch.evidence) == (61, [48.0, 80.0], "measured")
    assert "ftjob-1" in batch.why
    assert "McCandlish" in batch.why
    assert batch.confidence == "high"
    unbounded = NoiseScale(value=61.2, low=48.0, high=None, measurements=2)
    vague = recommend(replace(situation, noise=replace(NOISE, scale=unbounded)))["effective_batch_size"]
    assert vague.confidence == "low"
    assert vague.range == [48.0, 10_000.0]


def test_without_a_measurement_the_evidence_is_literature_but_a_requested_batch_wins() -> None:
    gpt2 = named("gpt2")
    assert gpt2 is not None
    situation = Situation(gpt2, None, micro_batch=16, devices=1, device_kind="cuda")
    assert recommend(situation)["effective_batch_size"].evidence == "literature"
    given = recommend(replace(situation, target=7, noise=NOISE))["effective_batch_size"]
    assert (given.value, given.evidence) == (7, "requested")


def test_a_sweep_caps_the_micro_batch_and_is_cited() -> None:
    gpt2 = named("gpt2")
    assert gpt2 is not None
    situation = Situation(
        gpt2, 256, micro_batch=64, devices=1, device_kind="cuda", useful=16, useful_is_measured=True
    )
    found = recommend(situation)
    assert (found["micro_batch_size"].value, found["micro_batch_size"].evidence) == (16, "measured")
    assert found["accumulation_steps"].value == 16
    assert found["warmup_steps"].value > 100
    assert recommend(replace(situation, steps_total=60))["warmup_steps"].value == 6
    small = recommend(replace(situation, micro_batch=8))["micro_batch_size"]
    assert (small.value, small.evidence) == (8, "formula")
    unmeasured = recommend(replace(situation, device_kind="cpu", useful_is_measured=False))[
        "micro_batch_size"
    ]
    assert (unmeasured.value, unmeasured.evidence) == (16, "literature")


@pytest.mark.parametrize(
    ("kind", "batch", "limit"),
    [("transformer", 64, 1.0), ("vision", 64, 5.0), ("recurrent", 64, 0.5), ("vision", 16_384, 0.25)],
)
def test_clipping_goes_by_the_kind_of_model_and_the_batch(kind: ModelKind, batch: int, limit: float) -> None:
    gpt2 = named("gpt2")
    assert gpt2 is not None
    situation = Situation(gpt2, batch, micro_batch=8, devices=1, device_kind="cuda", kind=kind)
    assert recommend(situation)["gradient_clipping"].value == limit


@pytest.mark.parametrize("batch", [1, 7, 64, 8192, 500_000, 1_000_000])
@pytest.mark.parametrize("micro_batch", [0, 1, 3, 5000])
@pytest.mark.parametrize("useful", [None, 1, 2])
def test_recommended_values_are_consistent_and_feasible(
    batch: int, micro_batch: int, useful: int | None
) -> None:
    gpt2 = named("gpt2")
    assert gpt2 is not None
    situation = Situation(gpt2, batch, micro_batch, devices=2, device_kind="cuda", useful=useful)
    found = {name: own.value for name, own in recommend(situation).items()}
    made = found["micro_batch_size"] * found["accumulation_steps"] * 2
    assert found["accumulation_steps"] <= MAX_ACCUMULATION_STEPS
    assert made - 2 * found["micro_batch_size"] < found["effective_batch_size"] <= made
    if found["effective_batch_size"] < batch:
        assert found["accumulation_steps"] == MAX_ACCUMULATION_STEPS


def test_the_recommended_learning_rate_matches_the_recommended_optimizer() -> None:
    gpt2 = named("gpt2")
    assert gpt2 is not None
    large = Situation(gpt2, 16_384, micro_batch=64, devices=1, device_kind="cuda")
    assert recommend(large)["optimizer"].value == "lamb"
    assert "with lamb" in recommend(large)["learning_rate"].why
    assert recommend(replace(large, kind="vision"))["optimizer"].value == "lars"
    given: dict[OptimizerName, float] = {
        name: recommend(replace(large, target=32, optimizer=name))["learning_rate"].value
        for name in ("adamw", "adamw_8bit", "lion", "lamb", "lars", "sgd", "adafactor")
    }
    assert given["adamw"] == given["adamw_8bit"] == 5e-5
    assert given["lion"] < given["adamw"] < given["lamb"] < given["sgd"]
    assert recommend(replace(large, target=32, adapters=True))["learning_rate"].value == 2e-4


def test_a_successful_learning_rate_is_preferred_to_the_literature() -> None:
    gpt2 = named("gpt2")
    assert gpt2 is not None
    learned = MeasuredRate("ftjob-1", 3e-3, 16, "adamw", adapters=False, first_loss=5.0, final_loss=2.5)
    situation = Situation(gpt2, 16, micro_batch=16, devices=1, device_kind="cpu", measured_rate=learned)
    rate = recommend(situation)["learning_rate"]
    assert (rate.value, rate.evidence) == (3e-3, "measured")
    assert "ftjob-1" in rate.why
    assert recommend(replace(situation, target=64))["learning_rate"].value == 6e-3
    assert recommend(replace(situation, optimizer="lion"))["learning_rate"].evidence == "literature"
    assert recommend(replace(situation, adapters=True))["learning_rate"].evidence == "literature"


def test_dataset_size_limits_the_batch_and_per_micro_batch_clipping_lowers_the_limit() -> None:
    gpt2 = named("gpt2")
    assert gpt2 is not None
    situation = Situation(gpt2, None, micro_batch=16, devices=1, device_kind="cuda", samples=20_000)
    batch = recommend(situation)["effective_batch_size"]
    assert (batch.value, batch.range) == (200, [20.0, 200.0])
    clipped = replace(situation, target=64, clip_mode="each_micro_batch")
    assert recommend(clipped)["gradient_clipping"].value == 0.5  # four steps


def test_the_range_contains_the_recommended_batch_for_any_size_of_data() -> None:
    gpt2 = named("gpt2")
    assert gpt2 is not None
    for samples in (1, 30, 1_000, 50_000, 1_000_000, 10**8):
        asked = Situation(gpt2, None, micro_batch=16, devices=1, device_kind="cuda", samples=samples)
        batch = recommend(asked)["effective_batch_size"]
        assert batch.range is not None
        assert batch.range[0] <= batch.value <= batch.range[1], samples


def test_the_rate_of_another_objective_is_its_own() -> None:
    gpt2 = named("gpt2")
    assert gpt2 is not None
    situation = Situation(gpt2, 16, micro_batch=16, devices=1, device_kind="cpu", objective="dpo")
    rates = [recommend(replace(situation, adapters=adapters))["learning_rate"] for adapters in (False, True)]
    assert [each.value for each in rates] == [1e-6, 1e-5]
    assert rates[0].evidence == "literature"


@pytest.mark.parametrize(
    ("objective", "last", "counts"),
    [
        pytest.param(None, 1.0, True, id="the loss fell"),
        pytest.param(None, 1.999, False, id="it fell by less than a percent"),
        pytest.param(ObjectiveSpec(name="dpo", beta=0.1), 1.0, False, id="another objective"),
    ],
)
def test_only_jobs_whose_loss_fell_are_evidence_for_a_learning_rate(
    client: TestClient,
    database: Database,
    settings: Settings,
    objective: ObjectiveSpec | None,
    last: float,
    counts: bool,
) -> None:
    job_id, _ = succeeded(database, settings)
    spec = make_spec(objective=objective)
    with database.writing() as session:
        job = session.get_one(Job, job_id)
        job.spec = spec.model_dump(mode="json")
        job.result = {"files": ["config.json"], "first_loss": 2.0, "final_loss": last}
    path = "/gradient-accumulation/performance/recommendations"
    found = client.get(
        path, params={"model_name": "accrue/tiny-gpt2", "optimizer": spec.optimizer.name}
    ).json()
    assert (found["learning_rate"]["evidence"] == "measured") == counts


def test_a_micro_batch_of_pairs_has_half_as_many_of_them(
    client: TestClient, database: Database, settings: Settings
) -> None:
    found = {}
    for objective, form in ((None, "text"), (ObjectiveSpec(name="dpo", beta=0.1), "preference")):
        job_id, _ = succeeded(database, settings)
        spec = make_spec(objective=objective, effective_batch_size=64)
        spec = spec.model_copy(update={"data": spec.data.model_copy(update={"format": form})})
        with database.writing() as session:
            session.get_one(Job, job_id).spec = spec.model_dump(mode="json")
        path = "/gradient-accumulation/performance/recommendations"
        params = {"training_id": job_id, "gpus": "0.92GB"}
        found[form] = client.get(path, params=params).json()["micro_batch_size"]["value"]
    assert 1 < found["text"] < 64, "the GPU's memory is to decide"
    assert abs(found["text"] - 2 * found["preference"]) <= 1


@pytest.mark.parametrize(
    ("query", "micro_batch", "checkpointing", "advice"),
    [
        ("model_name=meta-llama/Llama-3.1-8B&gpus=24GB", 1, True, "set method: lora"),
        ("model_name=meta-llama/Llama-3.1-70B&gpus=4GB", 1, True, "use a device with more memory"),
        ("model_name=Qwen/Qwen3-4B&gpus=16GB&method=lora", None, True, None),
        ("model_name=gpt2&gpus=24GB", None, False, None),
    ],
)
def test_recommended_values_fit_or_say_that_they_do_not(
    client: TestClient, query: str, micro_batch: int | None, checkpointing: bool, advice: str | None
) -> None:
    root = "/gradient-accumulation"
    found = client.get(f"{root}/performance/recommendations?{query}").json()
    assert found["gradient_checkpointing"]["value"] == checkpointing
    values = dict(pair.split("=") for pair in query.split("&"))
    body = {
        "model_name": values["model_name"], "gpus": [values["gpus"]], "wait_seconds": 0,
        "method": found["submission"]["training_config"]["method"],
        "gradient_checkpointing": checkpointing,
        "target_batch_size": found["submission"]["target_effective_batch_size"],
        "micro_batch_size": found["micro_batch_size"]["value"],
    }  # fmt: skip
    assert client.post(f"{root}/calculate-batch-size", json=body).json()["fits"] == (advice is None)
    if advice is None:
        assert found["advice"] == []
        assert micro_batch is None
        assert found["micro_batch_size"]["value"] > 1
    else:
        assert found["micro_batch_size"]["value"] == micro_batch
        assert "not even this one fits" in found["micro_batch_size"]["why"]
        assert advice in found["advice"][0]


@pytest.mark.parametrize("clip_mode", ["after_accumulation", "each_micro_batch"])
def test_recommendations_shard_only_what_a_job_may_shard(client: TestClient, clip_mode: str) -> None:
    query = f"model_name=meta-llama/Llama-3.1-8B&clip_mode={clip_mode}" + "&gpus=80GB" * 4
    found = client.get(f"/gradient-accumulation/performance/recommendations?{query}").json()
    assert bool(found["advice"]) == (clip_mode == "each_micro_batch")


def test_a_job_s_micro_batch_is_for_its_own_samples_and_left_to_the_plan(
    client: TestClient, database: Database, settings: Settings
) -> None:
    job_id, _ = succeeded(database, settings)
    path, found = "/gradient-accumulation/performance/recommendations", {}
    for length in (None, 64):
        with database.writing() as session:
            job = session.get_one(Job, job_id)
            job.plan = {**job.plan, "sample_length": length}
            job.spec = {**job.spec, "data": {**job.spec["data"], "max_length": 1024}}
        params = {"training_id": job_id, "target_batch_size": "4096", "gpus": "0.92GB"}
        found[length] = client.get(path, params=params).json()
        assert not {"micro_batch_size", "accumulation_steps"} & found[length]["submission"].keys()
        micro_batch, steps = found[length]["micro_batch_size"], found[length]["accumulation_steps"]
        assert (steps["evidence"], steps["confidence"]) == (
            micro_batch["evidence"],
            micro_batch["confidence"],
        )
    assert "64 tokens" in found[64]["micro_batch_size"]["why"]
    assert found[64]["micro_batch_size"]["value"] > found[None]["micro_batch_size"]["value"]
    params = {"training_id": job_id, "clip_mode": "each_micro_batch"}
    assert "accumulation_steps" in client.get(path, params=params).json()["submission"]
