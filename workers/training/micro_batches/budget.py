"""The token budget: how large a micro-batch may be, by the plan and by what the run has learned since.

Everything that determines it is here: the plan's rule, decreases after running out of memory, increases
after many windows that fitted, and the fastest size that a tuning run or the tuner found.
"""

import numpy as np

from app.contract.plan import FixedCount, FixedSize, MicroBatchRule, RankPlan, TokenBudget
from workers.training.checkpoints.state import LearnedBudget
from workers.training.micro_batches.batches import (
    BudgetCosts,
    Groups,
    Lengths,
    cut_window,
    draw_first,
    fixed_cost,
    needs_parting,
    tokens_of,
)

WINDOWS_BEFORE_GROWTH = 50
"""The number of windows without running out of memory before a larger micro-batch is tried again."""

_MIN_GROWTH = 1.1


class Budget:
    """How windows are divided into micro-batches: by the plan, and by what the run has learned since.

    Args:
        rank: the plan for this device.
        learned: the learned part, which checkpoints keep; changed in place.
        effective_batch_size: samples of a window, before any ramp.
        most_tokens: tokens of the largest micro-batch that the plan expects to fit; None for the plan's
        budget.
        by_length: whether windows are cut by length, so that there is little padding.
        packed: a micro-batch's tokens are the sum of its lengths, instead of rows × longest.
        separate_above: see `BatchLayout.separate_above`.
        longest_row: tokens of the longest packed row for which the model was checked, which limits token
            budgets; None for no limit.
    """

    def __init__(
        self,
        rank: RankPlan,
        learned: LearnedBudget,
        effective_batch_size: int,
        *,
        most_tokens: int | None = None,
        by_length: bool = True,
        packed: bool = False,
        separate_above: int | None = None,
        longest_row: int | None = None,
    ) -> None:
        self._rank, self._most = rank, most_tokens
        self.by_length = by_length
        self._samples = effective_batch_size
        self.learned = learned
        self.packed = packed
        self._isolate_above = separate_above
        self._longest_row = longest_row

    def rule(self, batch: int | None = None) -> MicroBatchRule:
        """The rule by which windows are cut now.

        Args:
            batch: samples of the window, or None for the spec's effective batch. A fixed number of
                micro-batches grows in proportion.
        """
        if self.learned.tokens is not None:
            return TokenBudget(tokens=self._within_row(self.learned.tokens))
        planned = self._rank.micro_batch_rule
        if isinstance(planned, TokenBudget):
            return TokenBudget(tokens=self.planned_tokens)
        if isinstance(planned, FixedCount) and batch is not None and batch > self._samples:
            return FixedCount(micro_batches=round(planned.micro_batches * (batch / self._samples)))
        return planned

    def _within_row(self, tokens: int) -> int:
        return tokens if self._longest_row is None else min(tokens, self._longest_row)

    def cut(
        self,
        lengths: Lengths,
        rule: MicroBatchRule,
        *,
        first: np.random.Generator | None = None,
        taken: int = 0,
    ) -> Groups:
        """A window's micro-batches, as groups of positions in it.

        Args:
            lengths: tokens of the window's samples.
            rule: usually `rule()`.
            first: draws the first micro-batch at random; None draws nothing.
            taken: micro-batches of other samples that the device has already.
        """
        planned = self._rank.micro_batch_rule

        def by(rule: MicroBatchRule) -> Groups:
            return cut_window(
                lengths,
                rule,
                by_length=self.by_length,
                packed=self.packed,
                rows=self._rows,
                separate_above=self._isolate_above,
                first=first,
                fixed=self._fixed_cost(rule.tokens) if isinstance(rule, TokenBudget) else None,
            )

        groups = by(rule)
        if not isinstance(planned, FixedCount) or self.learned.tokens is None:
            return groups
        count = planned.micro_batches - taken
        while len(groups) < min(count, len(lengths)):  # the learned budget gives fewer than requested
            fixed = by(FixedCount(micro_batches=count))
            if self._largest_of_several(fixed, lengths) <= self.learned.tokens:
                return fixed
            count = min(2 * count, len(lengths))
        return groups

    def cost_model(self, lengths: Lengths, rule: MicroBatchRule) -> BudgetCosts | None:
        """What micro-batches cost, if `cut` divides samples in descending length at the lowest cost within a
        token budget; None if it divides them in another way."""
        if not isinstance(rule, TokenBudget) or not self.by_length or self.packed or self._rows:
            return None
        is_cut_apart = self._isolate_above is not None and needs_parting(lengths, self._isolate_above)
        return None if is_cut_apart else BudgetCosts(rule.tokens, self._fixed_cost(rule.tokens))

    def cost(self, lengths: Lengths, rule: MicroBatchRule, groups: Groups) -> float:
        """What micro-batches cost, in tokens, when samples are divided among ranks. With a token budget,
        padding and a fixed cost of each micro-batch count; otherwise, only the samples' tokens."""
        if (costs := self.cost_model(lengths, rule)) is None:
            return float(sum(lengths[group].sum() for group in groups))
        return costs.of(lengths, groups)

    @property
    def fixed_cost(self) -> float:
        """A micro-batch's fixed cost, in tokens, by which windows are cut under the plan's token budget."""
        return self._fixed_cost(self.planned_tokens)

    def _fixed_cost(self, tokens: int) -> float:
        """A micro-batch's fixed cost under a token budget: as measured, or that of the planned budget, also
        while larger or smaller budgets are tried, since it does not depend on them."""
        if self.learned.fixed is not None:
            return self.learned.fixed
        planned = self._rank.micro_batch_rule
        return fixed_cost(planned.tokens if isinstance(planned, TokenBudget) else tokens)

    def _largest_of_several(self, groups: Groups, lengths: Lengths) -> int:
        """Tokens of the largest micro-batch that has several samples, and so could be smaller."""
        several = [tokens_of(lengths[group], self.packed) for group in groups if len(group) > 1]
        return max(several, default=0)

    def draw_first(self, lengths: Lengths, rule: MicroBatchRule, random: np.random.Generator) -> list[int]:
        """A first micro-batch drawn at random from a window: positions in it."""
        return draw_first(lengths, rule, self.packed, self._rows, random)

    @property
    def fixes_count(self) -> bool:
        """Whether the plan fixes the number of micro-batches, whose size then depends on the share."""
        return isinstance(self._rank.micro_batch_rule, FixedCount)

    @property
    def _rows(self) -> int | None:
        planned = self._rank.micro_batch_rule
        return planned.samples if isinstance(planned, FixedSize) else None

    def tokens(self, longest: int) -> int:
        """The current budget of a micro-batch, in tokens.

        Args:
            longest: tokens of the longest sample.
        """
        rule = self.rule()
        return rule.tokens if isinstance(rule, TokenBudget) else self._rank.micro_batch_size * longest

    def lower_after_failure(self, tokens: int) -> int:
        """Lowers the budget after `tokens` did not fit: to the largest size that did, or to half. Returns
        it."""
        learned = self.learned
        learned.failed_tokens = min(tokens, learned.failed_tokens or tokens)
        known = learned.largest_done
        lower = known if tokens // 2 < known < tokens else tokens // 2
        learned.tokens = lower if learned.tokens is None else min(lower, learned.tokens)
        learned.largest_done = learned.windows_since_failure = 0
        return learned.tokens

    def record_fit(self, largest: int) -> int | None:
        """Records that a window fitted. After enough of them, raises the budget halfway to the size that
        failed, but never beyond the plan's budget.

        Args:
            largest: tokens of the window's largest micro-batch.

        Returns:
            The new budget, or None if it stays the same.
        """
        learned, planned = self.learned, self._rank.micro_batch_rule
        if learned.tokens is None or learned.failed_tokens is None:
            return None
        learned.largest_done = max(learned.largest_done, largest)
        learned.windows_since_failure += 1
        middle = (learned.tokens + learned.failed_tokens) // 2
        larger = min(middle, self.planned_tokens) if isinstance(planned, TokenBudget) else middle
        larger = self._within_row(larger)
        if learned.windows_since_failure < WINDOWS_BEFORE_GROWTH or larger < _MIN_GROWTH * learned.tokens:
            return None
        learned.tokens, learned.windows_since_failure = larger, 0
        return larger

    @property
    def most_worth_measuring(self) -> int:
        """The largest micro-batch, in tokens, that the plan expects to fit and that has not failed."""
        rule = self.rule()
        assert isinstance(rule, TokenBudget), "a split that was requested is not tuned"
        most = self._within_row(self._most or rule.tokens)
        failed = self.learned.failed_tokens
        return most if failed is None else min(most, failed - 1)

    @property
    def planned_tokens(self) -> int:
        """The plan's token budget for how samples are laid out, limited to the longest row.

        Raises:
            AssertionError: the plan gives none, but a number or a size of micro-batches.
        """
        rule = self._rank.micro_batch_rule
        assert isinstance(rule, TokenBudget), "a split that was requested is not tuned"
        is_unpadded = self._longest_row is not None
        return self._within_row((rule.unpadded_tokens if is_unpadded else None) or rule.tokens)

    def use_tuned(self, tokens: int) -> None:
        """Sets the budget that the tuner has chosen for the next window."""
        self.learned.tokens = None if tokens == self.planned_tokens else tokens

    def set_measured(self, tokens: int) -> None:
        """Sets the budget to the size that a tuning run found to be the fastest."""
        if self.rule() != TokenBudget(tokens=tokens):
            self.learned.tokens = tokens
        self.learned.measured = True
