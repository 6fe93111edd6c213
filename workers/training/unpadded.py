"""Lays samples out without padding, where that costs nothing.

Micro-batches need no padding if all of their samples are in one row, and attention is computed sample by
sample. A kernel for that makes packed rows as cheap as their tokens, whatever their lengths. So a job that
did not ask for packing gets it too, if there is such a kernel, if the model keeps samples apart
(packing_check.py), and if the kernel leaves the gradient as it is (kernels.py). As any cut into
micro-batches, this does not change the training.
"""

from dataclasses import replace

from app.contract.assignment import Assignment
from app.contract.plan import TokenBudget
from workers.reporter import Reporter
from workers.run_directory import RunDirectory
from workers.training.batch_loader import Loader
from workers.training.distributed.group import Group
from workers.training.kernels import FlashAttention, can_use_kernels, flash_attention, use_those_that_agree
from workers.training.packing_check import Layouts, why_not_packed
from workers.training.replica import Replica
from workers.training.state import Fallbacks

LONGEST_ROW = 2**14
"""Tokens of the longest row, for which the model is checked. More would make no GPU faster."""


def choose_layout(
    run: RunDirectory,
    replica: Replica,
    loader: Loader,
    assignment: Assignment,
    fallbacks: Fallbacks,
    reporter: Reporter,
    group: Group,
) -> int | None:
    """Changes the loader's layout to packed rows if they are as cheap as their tokens. Returns the tokens of
    the longest row then, else None.

    Raises:
        RuntimeError: the device failed.
    """
    padded, kernels = loader.layout, replica.kernels
    if fallbacks.padded or not _may_be_packed(replica, loader, assignment, group):
        return None
    spec, longest = assignment.spec, loader.longest
    own = [each for each in kernels if isinstance(each, FlashAttention)]
    candidate = None if own else flash_attention(replica, spec, packed=True, longest=longest)
    if not own and candidate is None:
        return None
    loader.layout = replace(padded, packed=True)
    layouts, most_tokens = Layouts(loader.layout, padded), max(LONGEST_ROW, longest)
    reason = why_not_packed(replica, loader, layouts, most_tokens, spec.effective_batch_size, group)
    if reason is None and candidate is not None:
        use_those_that_agree([candidate], run, replica, loader, reporter, group.rank)
    if reason is not None or (candidate is not None and candidate not in replica.kernels):
        loader.layout, fallbacks.padded = padded, fallbacks.padded or reason is not None
        if reason is not None:
            reporter.event("unpadded", f"Samples are padded. {reason}", used=False)
        return None
    why = "Samples are not padded: attention is computed for each sample on its own."
    reporter.event("unpadded", why, used=True)
    return most_tokens


def _may_be_packed(replica: Replica, loader: Loader, assignment: Assignment, group: Group) -> bool:
    """Whether packed rows could be used without changing the training or the plan."""
    spec, layout = assignment.spec, loader.layout
    rules = [rank.micro_batch_rule for rank in assignment.plan.ranks]
    return (
        can_use_kernels(replica, spec)
        and group.size == 1
        and replica.balance is None
        and not (layout.packed or layout.buckets)
        and spec.clip_mode != "each_micro_batch"  # where the cut determines the training
        and all(isinstance(rule, TokenBudget) for rule in rules)
    )
