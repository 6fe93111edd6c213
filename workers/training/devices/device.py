"""The device that a rank trains on: which it is, and which kernels it uses."""

import os

import torch

from app.contract.plan import Plan, RankPlan
from workers.training.exceptions import CannotTrain
from workers.training.kernels import attention


def device_of(plan: Plan, rank: RankPlan, *, deterministic: bool = False) -> torch.device:
    """The device of a plan; on a GPU, the memory limit is enforced from here on.

    Args:
        deterministic: whether the GPU's kernels give the same bits each time.

    Raises:
        CannotTrain: this torch, or the driver, can use no GPU.
        RuntimeError: the GPU that was there is gone; its message is that of a lost device.
    """
    torch.set_float32_matmul_precision("high" if plan.precision == "tf32" else "highest")
    if plan.device == "cpu":
        if plan.threads:
            torch.set_num_threads(plan.threads)
        return torch.device("cpu")
    if deterministic:
        use_deterministic_kernels()
    check_cuda()
    # The launcher shows each rank only its own GPU; torchrun shows all of them.
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local if local < torch.cuda.device_count() else 0)
    torch.cuda.set_device(device)  # Triton starts kernels on the current device
    attention.choose_kernels(plan.precision, deterministic=deterministic)
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, rank.memory_limit_bytes / total), device)
    return device


def use_deterministic_kernels() -> None:
    """Makes every operation give the same bits for the same input, or raise an error that says that it
    cannot. Called before the first use of the GPU, since cuBLAS reads its setting then."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # one of the two values that PyTorch accepts for this
    os.environ["FLASH_ATTENTION_DETERMINISTIC"] = "1"  # flash-attn does not know PyTorch's setting
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False


def check_cuda() -> None:
    """Checks that this process can use a GPU.

    Raises:
        CannotTrain: this torch, or the driver, can use none.
        RuntimeError: the GPU that was there is gone; its message is that of a lost device.
    """
    if torch.cuda.is_available():
        return
    why = "it was built without CUDA"
    if torch.version.cuda is not None or torch.version.hip is not None:
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            why = str(error).strip().splitlines()[0]
        if "driver" not in why.lower():
            raise RuntimeError(f"device is lost: {why}")
    raise CannotTrain(
        "no_cuda",
        f"nvidia-smi shows a GPU, but this torch cannot use it ({why}): install a CUDA build of torch that "
        "the driver supports, or hide the GPU from the worker with CUDA_VISIBLE_DEVICES= to train on the CPU",
    )
