"""What transformers' masks know of packed rows while the trainer's forward pass runs."""

from typing import Any

import pytest
import torch
from torch import fx
from transformers import AutoModelForCausalLM, LlamaConfig, masking_utils

from app.contract.spec import MethodSpec, RunPrecision
from app.planning.devices import GIB, Device
from app.planning.recipes import make_recipe
from workers.training.kernels.attention import repeats_heads, rows_known
from workers.training.losses.loss import TokenLoss
from workers.training.micro_batches.batches import BatchLayout, collate

LLAMA = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip


def batch_of(lengths: list[int], *, packed: bool) -> Any:
    rows = [(torch.arange(n).int().numpy() + 1, torch.ones(n).bool().numpy()) for n in lengths]
    return collate(rows, BatchLayout(pad_id=0, packed=packed))


def masks_of_attention(graph: fx.GraphModule) -> list[Any]:
    return [
        node.kwargs.get("attn_mask")
        for node in graph.graph.nodes
        if "scaled_dot_product_attention" in str(node.target)
    ]


@pytest.mark.parametrize("known", [False, True])
def test_a_compiled_model_attends_without_a_mask(known: bool) -> None:
    """With one, flash attention could not run. Without the trainer's knowledge, transformers passes one."""
    torch._dynamo.reset()
    masks: list[Any] = []

    def watched(graph: fx.GraphModule, inputs: Any) -> Any:
        masks.extend(masks_of_attention(graph))
        return graph.forward

    model = AutoModelForCausalLM.from_config(LLAMA)
    model.model.compile(dynamic=False, backend=watched)
    batch = batch_of([12, 9], packed=False)
    if known:
        TokenLoss(model)(batch)
    else:
        model(input_ids=batch.input_ids, use_cache=False)
    assert [mask is None for mask in masks] == [known]


@pytest.mark.parametrize("offset", [0, 2])
def test_the_samples_of_a_packed_row_are_told_apart_as_transformers_does(offset: int) -> None:
    positions = batch_of([5, 1, 7], packed=True).position_ids + offset
    searched = masking_utils.find_packed_sequence_indices(positions)
    assert searched is not None
    with rows_known(packed=True):
        known = masking_utils.find_packed_sequence_indices(positions)
    assert known is not None
    assert torch.equal(known[:, :, None] == known[:, None], searched[:, :, None] == searched[:, None])
    with rows_known(packed=False):
        assert masking_utils.find_packed_sequence_indices(positions) is None


def test_without_the_trainer_transformers_searches_itself() -> None:
    packed, alone = batch_of([3, 4], packed=True).position_ids, torch.arange(7).unsqueeze(0)
    with rows_known(packed=True), pytest.raises(RuntimeError, match="of the model"), rows_known(packed=False):
        raise RuntimeError("of the model")
    assert masking_utils.find_packed_sequence_indices(packed) is not None
    assert masking_utils.find_packed_sequence_indices(alone) is None


def test_a_packed_row_of_one_sample_needs_no_mask() -> None:
    found: list[Any] = []
    model = AutoModelForCausalLM.from_config(LLAMA)
    model.model.layers[0].register_forward_pre_hook(
        lambda layer, given, named: found.append(named["attention_mask"]), with_kwargs=True
    )
    for lengths in ([9], [4, 5]):
        TokenLoss(model)(batch_of(lengths, packed=True))
    alone, together = found
    assert alone is None
    assert together is not None


@pytest.mark.parametrize("flash", [True, False])
def test_heads_are_repeated_where_there_is_no_flash_kernel(flash: bool) -> None:
    """GPUs without bf16 train in fp16, and have no flash attention."""
    precisions: tuple[RunPrecision, ...] = ("fp32", "tf32", "fp16", "bf16")
    repeated = {each for each in precisions if repeats_heads("cuda", each, flash=flash)}
    assert repeated == ({"fp32", "tf32"} if flash else set(precisions))
    assert not repeats_heads("cpu", "fp16", flash=flash)


@pytest.mark.parametrize(
    ("device", "flash"),
    [
        (Device(0, "Tesla T4", 16 * GIB, "cuda", compute_capability=7.5), False),
        (Device(0, "T4", 16 * GIB, "cuda"), False),
        (Device(0, "A100-80GB", 80 * GIB, "cuda"), True),
        (Device("cpu", "CPU", 16 * GIB, "cpu"), True),
    ],
)
def test_a_plan_knows_whether_a_gpu_has_flash_attention(device: Device, flash: bool) -> None:
    assert make_recipe(device, "fp16", "adamw", MethodSpec(name="full", lora=None)).flash_attention == flash
