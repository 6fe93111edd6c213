"""The token budget: planned, learned by running out of memory, found by a tuning run."""

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from app.contract.plan import FixedCount, FixedSize, MicroBatchRule, TokenBudget
from tests.harness.specs import cpu_plan, make_spec
from workers.training.checkpoints.state import LearnedBudget
from workers.training.micro_batches.batches import BudgetCosts, cut_window, fixed_cost, tokens_of
from workers.training.micro_batches.budget import WINDOWS_BEFORE_GROWTH, Budget


def budget(rule: MicroBatchRule, longest_row: int | None = None) -> Budget:
    spec, learned = make_spec(), LearnedBudget()
    rank = cpu_plan(spec, rule=rule).ranks[0]
    is_packed = longest_row is not None
    return Budget(rank, learned, spec.effective_batch_size, packed=is_packed, longest_row=longest_row)


def test_without_padding_the_plan_may_allow_more_tokens() -> None:
    rule = TokenBudget(tokens=512, unpadded_tokens=768)
    assert budget(rule).rule() == TokenBudget(tokens=512)
    assert budget(rule, longest_row=600).rule() == TokenBudget(tokens=600)
    own = budget(rule, longest_row=2048)
    assert own.rule() == TokenBudget(tokens=768)
    own.lower_after_failure(768)
    for _ in range(10 * WINDOWS_BEFORE_GROWTH):
        own.record_fit(own.tokens(0))
    assert 512 < own.tokens(0) < 768
    own.use_tuned(768)
    assert own.learned.tokens is None


@given(limit=st.integers(1, 4000))
def test_a_learned_budget_converges_just_below_the_limit(limit: int) -> None:
    """A device that fits micro-batches of up to `limit` tokens, and a window that fills every budget."""
    own = budget(FixedSize(samples=8))
    own.lower_after_failure(8000)
    failures = 0
    for _ in range(40 * WINDOWS_BEFORE_GROWTH):
        tokens = own.tokens(0)
        if tokens > limit:
            own.lower_after_failure(tokens)
            failures += 1
        else:
            own.record_fit(tokens)
    assert limit / 1.2 - 1 <= own.tokens(0) <= limit  # growing by less than a tenth is not tried
    assert failures <= 16


@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=40),
    limit=st.integers(1, 2000),
    by_length=st.booleans(),
    rule=st.one_of(
        st.builds(FixedCount, micro_batches=st.integers(1, 12)),
        st.builds(FixedSize, samples=st.integers(1, 12)),
        st.builds(TokenBudget, tokens=st.integers(300, 4000)),
    ),
    measured=st.booleans(),
)
@example(
    lengths=[100, 100, 1, 1, 1, 1, 1, 1],
    limit=150,
    by_length=False,
    rule=FixedCount(micro_batches=6),
    measured=False,
)
@example(
    lengths=[100] * 3 + [1] * 21, limit=150, by_length=True, rule=FixedCount(micro_batches=5), measured=True
)
def test_a_window_that_does_not_fit_is_replayed_only_a_few_times(
    lengths: list[int], limit: int, by_length: bool, rule: MicroBatchRule, measured: bool
) -> None:
    """Micro-batches of several samples end up within any limit; those of one sample cannot be smaller."""
    own, window = budget(rule), np.array(lengths)
    own.by_length = by_length
    for _ in range(20):
        first = np.random.Generator(np.random.PCG64(1)) if measured else None
        groups = own.cut(window, own.rule(), first=first)
        assert sorted(place for group in groups for place in group) == list(range(len(lengths)))
        largest = max((len(g) * int(window[g].max()) for g in groups if len(g) > 1), default=0)
        if largest <= limit:
            return
        own.lower_after_failure(largest)
    raise AssertionError("the window would be replayed again and again")


def test_a_budget_never_grows_beyond_the_plan() -> None:
    own = budget(TokenBudget(tokens=600))
    own.lower_after_failure(1000)
    for _ in range(10 * WINDOWS_BEFORE_GROWTH):
        own.record_fit(100)
    assert own.rule() == TokenBudget(tokens=600)


def test_without_a_failure_nothing_is_learned() -> None:
    own = budget(FixedSize(samples=8))
    assert own.record_fit(100) is None
    assert own.rule() == FixedSize(samples=8)


def test_a_fixed_number_of_micro_batches_grows_with_the_batch_and_a_learned_budget_replaces_it() -> None:
    own = budget(FixedCount(micro_batches=4))
    usual = make_spec().effective_batch_size
    assert own.rule(usual) == own.rule() == FixedCount(micro_batches=4)
    assert own.rule(3 * usual) == FixedCount(micro_batches=12)
    own.lower_after_failure(400)
    assert own.rule(3 * usual) == TokenBudget(tokens=200)


def test_a_learned_budget_keeps_the_requested_number_of_micro_batches() -> None:
    own = budget(FixedCount(micro_batches=4))
    own.lower_after_failure(10_000)
    lengths = np.full(8, 10)
    assert len(own.cut(lengths, TokenBudget(tokens=5000))) == 4


def test_a_measured_budget_stays_below_what_failed() -> None:
    own = budget(TokenBudget(tokens=512))
    own.lower_after_failure(512)
    assert own.most_worth_measuring < 512
    own.set_measured(128)
    assert own.learned == LearnedBudget(tokens=128, failed_tokens=512, measured=True)


def test_a_larger_budget_that_is_tried_does_not_make_micro_batches_more_expensive() -> None:
    """Otherwise, the size on trial would be measured with more padding than it needs."""
    own = budget(TokenBudget(tokens=512))
    lengths = np.random.default_rng(0).lognormal(4.3, 0.6, 64).astype(np.int64).clip(8, 511)
    costs = own.cost_model(lengths, own.rule())
    own.use_tuned(4096)
    larger = own.cost_model(lengths, own.rule())
    assert costs == BudgetCosts(512, 128.0)
    assert larger == BudgetCosts(4096, 128.0)
    groups = own.cut(lengths, own.rule())
    as_planned = cut_window(lengths, TokenBudget(tokens=4096))  # planned at this size
    padded = [sum(tokens_of(lengths[group]) for group in each) for each in (groups, as_planned)]
    assert padded[0] < 0.95 * padded[1]


def test_the_fixed_cost_of_a_micro_batch_has_a_maximum() -> None:
    assert [fixed_cost(tokens) for tokens in (512, 2048, 65_536)] == [128.0, 512.0, 1024.0]
