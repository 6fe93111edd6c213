import re
from typing import Any

import pytest

from app.contract.plan import FixedCount, FixedSize, Plan, TokenBudget
from app.contract.spec import EarlyStopping, RequestedSplit, Spec, ValidationSpec, ZeroStage
from app.planning.devices import GIB, Device
from app.planning.plan import devices_worth_using, make_plan
from app.planning.planner import PlannerEvidence, by_formula
from app.planning.recipes import precision_for
from app.planning.throughput import Throughput
from tests.harness.specs import make_spec, plan_by_formula

CPU = Device("cpu", "CPU", 8 * GIB, "cpu")
A100 = Device(0, "NVIDIA A100", 40 * GIB, "cuda")
SMALL = Device(1, "small", GIB, "cuda")


def requested(steps: int | None, micro: int | None, devices: int = 1) -> RequestedSplit:
    return RequestedSplit(accumulation_steps=steps, micro_batch_size=micro, devices=devices)


def worth_using(spec: Spec, devices: list[Device], known: PlannerEvidence) -> int:
    return devices_worth_using(spec, devices, known, spec.data.max_length)


def test_a_target_alone_is_cut_by_a_token_budget() -> None:
    plan = plan_by_formula(make_spec(), [CPU], predicted=False, threads=2)
    assert plan.ranks[0].micro_batch_rule == TokenBudget(tokens=1024)  # the model has a width of 128
    assert plan.precision == "fp32"


def test_a_measured_budget_also_applies_to_longer_samples() -> None:
    spec, found = make_spec(), Throughput(((126, 900.0), (252, 1000.0), (510, 800.0)))
    spec = spec.model_copy(update={"data": spec.data.model_copy(update={"max_length": 1024})})
    known = PlannerEvidence(by_formula(spec.model.architecture).estimates, lambda recipe, length: found)
    plan = make_plan(spec, [CPU], known, predicted=False)
    assert plan.ranks[0].micro_batch_rule == TokenBudget(tokens=256)
    assert plan.actual_batch_size_per_gpu == 1


@pytest.mark.parametrize("device", [CPU, A100])
def test_options_unsupported_on_cpu_cause_a_warning(device: Device) -> None:
    spec = make_spec()
    spec = spec.model_copy(update={"optimizer": spec.optimizer.model_copy(update={"name": "adamw_8bit"})})
    warned = [
        each for each in plan_by_formula(spec, [device], predicted=True).warnings if "adamw_8bit" in each
    ]
    assert len(warned) == (device is CPU)


def test_requested_accumulation_steps_are_met_exactly_over_all_requested_devices() -> None:
    plan = plan_by_formula(
        make_spec(effective_batch_size=30, split=requested(4, None)), [CPU], predicted=False
    )
    assert plan.ranks[0].micro_batch_rule == FixedCount(micro_batches=4)
    assert (plan.micro_batches, plan.actual_batch_size_per_gpu) == (4, 8)
    two = plan_by_formula(
        make_spec(effective_batch_size=30, split=requested(4, None, 2)), [CPU], predicted=False
    )
    assert two.ranks[0].micro_batch_rule == FixedCount(micro_batches=8)


def test_a_given_micro_batch_is_an_upper_bound() -> None:
    plan = plan_by_formula(
        make_spec(effective_batch_size=30, split=requested(None, 8)), [A100], predicted=True
    )
    assert plan.ranks[0].micro_batch_rule == FixedSize(samples=8)
    assert plan.accumulation_steps == 4


def test_a_micro_batch_that_does_not_fit_is_made_smaller_and_the_batch_stays() -> None:
    spec = make_spec(effective_batch_size=20_000, split=requested(1, 20_000))
    plan = plan_by_formula(spec, [SMALL], predicted=True)
    rule = plan.ranks[0].micro_batch_rule
    assert isinstance(rule, FixedSize)
    assert rule.samples < 20_000
    assert plan.effective_batch_size == 20_000
    assert plan.devices[0].predicted_peak_bytes <= plan.devices[0].memory_limit_bytes
    assert any("not to fit" in warning for warning in plan.warnings)
    kept = plan_by_formula(spec.model_copy(update={"auto_adjust_batch_size": False}), [SMALL], predicted=True)
    assert kept.ranks[0].micro_batch_rule == FixedSize(samples=20_000)


def test_steps_count_the_partial_window_of_every_epoch() -> None:
    spec = make_spec(epochs=3, max_steps=None, effective_batch_size=64)
    assert plan_by_formula(spec, [CPU], predicted=True).steps_total == 6


def test_unequal_devices_share_the_batch() -> None:
    plan = plan_by_formula(make_spec(effective_batch_size=50), [A100, SMALL], predicted=True)
    assert [device.gpu_id for device in plan.devices] == [0, 1]
    assert plan.effective_batch_size == 50


@pytest.mark.parametrize(
    ("precision", "device", "expected"),
    [
        ("auto", CPU, "fp32"), ("auto", A100, "bf16"), ("no", A100, "fp32"), ("bf16", CPU, "bf16"),
        ("auto", Device(0, "Tesla V100-SXM2-16GB", 16 * GIB, "cuda"), "fp16"),
        ("auto", Device(0, "Tesla T4", 16 * GIB, "cuda"), "fp16"),
    ],
)  # fmt: skip
def test_precision_follows_the_device_unless_named(precision: str, device: Device, expected: str) -> None:
    assert precision_for(precision, device) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("NVIDIA RTX 2000 Ada Generation", "bf16"), ("NVIDIA GeForce RTX 2080 Ti", "fp16"),
        ("RTX2080TI", "fp16"), ("RTX2070SUPER-8GB", "fp16"), ("GTX1080Ti-11GB", "fp16"),
        ("TeslaV100", "fp16"), ("NVIDIAT4", "fp16"), ("QuadroRTX6000-24GB", "fp16"), ("T2000-4GB", "fp16"),
        ("MX450-2GB", "fp16"), ("Tesla V100S-PCIE-32GB", "fp16"), ("T550", "fp16"), ("RTX2080TI11GB", "fp16"),
        ("L40S", "bf16"), ("B200", "bf16"), ("RTX6000ADA", "bf16"),
        ("RTX3090", "bf16"), ("RTX4060TI", "bf16"), ("RTXA6000", "bf16"),
        ("Tesla P4", "fp16"), ("Tesla T4", "fp16"), ("Tesla V100-SXM2-16GB", "fp16"),
        ("Quadro RTX 6000", "fp16"), ("NVIDIA RTX 6000 Ada Generation", "bf16"), ("NVIDIA L4", "bf16"),
        ("NVIDIA RTX A6000", "bf16"), ("NVIDIA A100-SXM4-80GB", "bf16"), ("NVIDIA GeForce RTX 3090", "bf16"),
        ("NVIDIA GeForce GTX 1080", "fp16"), ("NVIDIA TITAN V", "fp16"), ("NVIDIA H100 PCIe", "bf16"),
        ("NVIDIA RTX 4000 SFF Ada Generation", "bf16"), ("Tesla P40", "fp16"), ("24GB", "bf16"),
        ("2080", "fp16"), ("1080 Ti", "fp16"), ("4090", "bf16"), ("GRID V100D-32Q", "fp16"),
        ("Tesla T4G", "fp16"), ("Quadro RTX A6000", "bf16"), ("1080GB", "bf16"),
    ],
)  # fmt: skip
def test_precision_by_a_gpu_s_generation(name: str, precision: str) -> None:
    assert precision_for("auto", Device(0, name, 16 * GIB, "cuda")) == precision


def test_the_reported_compute_capability_overrides_the_gpu_name() -> None:
    turing = Device(0, "NVIDIA A100 (not)", 16 * GIB, "cuda", compute_capability=7.5)
    assert precision_for("auto", turing) == "fp16"
    assert precision_for("auto", Device(0, "Tesla T4", GIB, "cuda", compute_capability=8.0)) == "bf16"


LARGE = make_spec(
    model=make_spec().model.model_copy(
        update={
            "architecture": make_spec().model.architecture.model_copy(
                update={"family": "llama", "layers": 32, "hidden_size": 2048, "parameters": 3 * 10**9,
                        "vocabulary": 32000, "intermediate_size": 8192}
            )
        }
    )
)  # fmt: skip


def gpus(count: int, gib: int = 24) -> list[Device]:
    return [Device(number, "NVIDIA A100", gib * GIB, "cuda") for number in range(count)]


def test_held_out_samples_are_not_counted_as_training_samples() -> None:
    spec = make_spec(effective_batch_size=64)
    held = ValidationSpec(file_id=None, sha256=None, format=None, share=0.1)
    data = spec.data.model_copy(update={"examples": 70, "validation": held})
    plan = plan_by_formula(spec.model_copy(update={"data": data}), gpus(1), predicted=True)
    assert any("only 63 samples to train on" in warning for warning in plan.warnings)


@pytest.mark.parametrize(
    ("schedule", "examples", "warning"),
    [
        (
            {"warmup_ratio": 0.1, "warmup_rounds_up": True},
            8,
            "the warmup (warmup_ratio 0.1) is not shorter than the run's only step",
        ),
        ({"warmup_ratio": 1.0}, 16, "the warmup (warmup_ratio 1) is not shorter than the 2 steps of the run"),
        ({"warmup_steps": 2}, 16, "the warmup (warmup_steps 2) is not shorter than the 2 steps of the run"),
        ({"warmup_ratio": 0.5}, 16, None),
        ({"warmup_ratio": 0.0}, 8, None),
    ],
)  # fmt: skip
def test_a_warmup_that_never_ends_causes_a_warning(
    schedule: dict[str, Any], examples: int, warning: str | None
) -> None:
    spec = make_spec(effective_batch_size=8, epochs=1, max_steps=None)
    changes = {
        "data": spec.data.model_copy(update={"examples": examples}),
        "schedule": spec.schedule.model_copy(update={"warmup_steps": None, **schedule}),
    }
    plan = plan_by_formula(spec.model_copy(update=changes), gpus(1), predicted=True)
    found = [each for each in plan.warnings if "warmup" in each]
    assert found == ([] if warning is None else [f"{warning}: the learning rate never reaches its peak"])


def test_early_stopping_without_any_evaluation_causes_a_warning() -> None:
    spec = make_spec(
        effective_batch_size=8,
        epochs=None,
        max_steps=4,
        early_stopping=EarlyStopping(patience=1, min_delta=0.0),
    )
    for every, warned in ((4, False), (5, True)):
        own = spec.model_copy(update={"eval_every": every})
        plan = plan_by_formula(own, gpus(1), predicted=True)
        assert any("early_stopping has no effect" in each for each in plan.warnings) == warned


def test_a_model_that_fits_no_device_is_divided_among_several() -> None:
    one = plan_by_formula(LARGE, gpus(1), predicted=True)
    assert one.strategy == "ddp"
    assert any("not even one sample" in warning for warning in one.warnings)
    four = plan_by_formula(LARGE, gpus(4), predicted=True)
    assert four.strategy == "fsdp"
    assert all(rank.predicted_peak_bytes <= rank.memory_limit_bytes for rank in four.ranks)
    assert any("sharded across 4 devices" in warning for warning in four.warnings)


def test_no_more_is_divided_than_it_takes_to_fit() -> None:
    """Each stage exchanges more than the one before."""
    sizes = range(4, 81, 2)
    plans = [plan_by_formula(LARGE, gpus(4, gib), predicted=True) for gib in sizes]
    chosen = [(plan.strategy, plan.zero_stage if plan.strategy == "fsdp" else 0) for plan in plans]
    fitting = [
        each
        for each, plan in zip(chosen, plans, strict=True)
        if plan.ranks[0].predicted_peak_bytes <= plan.ranks[0].memory_limit_bytes
    ]
    assert fitting == sorted(fitting, key=lambda each: -each[1])
    assert {stage for _, stage in fitting} == {0, 1, 2, 3}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_rank_of_a_divided_model_needs_less_the_more_ranks_there_are(stage: ZeroStage) -> None:
    spec = LARGE.model_copy(update={"strategy": "fsdp", "zero_stage": stage})
    peaks = [
        plan_by_formula(spec, gpus(count, 80), predicted=True).ranks[0].predicted_peak_bytes
        for count in (2, 4, 8)
    ]
    one = plan_by_formula(LARGE, gpus(2, 80), predicted=True).ranks[0].predicted_peak_bytes
    assert one > peaks[0] > peaks[1] > peaks[2]


def test_a_requested_strategy_is_kept() -> None:
    for strategy in ("ddp", "fsdp"):
        spec = make_spec(strategy=strategy)
        assert plan_by_formula(spec, gpus(2), predicted=True).strategy == strategy
        assert plan_by_formula(spec, gpus(1), predicted=True).strategy == "ddp", "there is nothing to divide"


def test_an_optimizer_that_needs_whole_parameters_is_not_divided() -> None:
    lamb = LARGE.model_copy(update={"optimizer": LARGE.optimizer.model_copy(update={"name": "lamb"})})
    assert plan_by_formula(lamb, gpus(4), predicted=True).strategy == "ddp"


def test_the_number_of_devices_is_what_fits_or_what_has_work() -> None:
    known = by_formula(LARGE.model.architecture)
    assert worth_using(LARGE, gpus(8), known) > 1
    small = make_spec(effective_batch_size=1)
    assert worth_using(small, gpus(8), by_formula(small.model.architecture)) == 1
    large_batch = make_spec(effective_batch_size=1_000_000)
    known = by_formula(large_batch.model.architecture)
    assert worth_using(large_batch, gpus(8), known) == 8
    assert worth_using(large_batch, [CPU] * 4, known) == 1


@pytest.mark.parametrize("freeze", [(), ("transformer.h.0.*",)])
def test_a_plan_by_formula_says_that_it_ignores_freeze(freeze: tuple[str, ...]) -> None:
    plan = plan_by_formula(make_spec(freeze=freeze), [A100], predicted=True)
    assert any("that freeze names" in warning for warning in plan.warnings) == bool(freeze)


def test_gpus_of_several_generations_compute_in_a_precision_that_all_have() -> None:
    volta = Device(1, "Tesla V100", 16 * GIB, "cuda")
    spec = make_spec(precision="auto")
    known = by_formula(spec.model.architecture)
    for devices, precision in (([A100], "bf16"), ([A100, volta], "fp16"), ([volta, A100], "fp16")):
        assert make_plan(spec, devices, known, predicted=True).precision == precision


def test_a_plan_that_does_not_fit_names_what_would() -> None:
    def planned(gigabytes: float, micro_batch: int | None) -> Plan:
        split = RequestedSplit(accumulation_steps=None, micro_batch_size=micro_batch, devices=1)
        spec = make_spec(effective_batch_size=64, auto_adjust_batch_size=False, split=split)
        spec = spec.model_copy(update={"data": spec.data.model_copy(update={"max_length": 1024})})
        device = Device(0, "NVIDIA A100", int(gigabytes * GIB), "cuda")
        return plan_by_formula(spec, [device], predicted=True)

    (warning,) = planned(1.1, 64).warnings
    assert warning.startswith("64 samples of 1024 tokens at a time do not fit on device 0, ")
    remedy = re.fullmatch(r".*: set micro_batch_size: (\d+)", warning)
    assert remedy is not None
    assert planned(1.1, int(remedy[1])).warnings == ()
    (warning,) = planned(0.8, None).warnings
    assert warning == (
        "not even one sample of 1024 tokens fits on device 0: use a device with more memory, or a smaller "
        "model"
    )
