"""The state of a run besides its tensors: what a checkpoint keeps, grouped by what it belongs to.

`from_json` still reads the earlier versions: version 1 (of early development versions) had all of it in
one flat list of names; version 2 had the budget of one rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from workers.training.exceptions import CannotTrain
from workers.training.micro_batches.batches import Cursor, after

VERSION = 3


@dataclass
class Progress:
    """What has been done."""

    step: int = 0
    """Optimizer steps made."""
    micro_step: int = 0
    """Micro-batches that were processed."""
    skipped: int = 0
    """Windows that made no step."""
    skipped_in_a_row: int = 0
    trained_tokens: int = 0
    """Target tokens of the steps made."""
    stopped_early: bool = False
    stop_requested: bool = False
    """Whether it was stopped early because a user requested the model as it is."""


@dataclass
class Position:
    """Where the next window begins in the data."""

    epoch: int = 0
    consumed: int = 0
    """Samples of this epoch that earlier windows took."""
    windows_in_epoch: int = 0

    @property
    def cursor(self) -> Cursor:
        return Cursor(self.epoch, self.consumed)

    def advance(self, window: int, samples: int) -> None:
        """Moves on to the next window.

        Args:
            window: the number of samples in the current window.
            samples: the number of samples in the data.
        """
        following = after(self.cursor, window, samples)
        self.windows_in_epoch = self.windows_in_epoch + 1 if following.epoch == self.epoch else 0
        self.epoch, self.consumed = following.epoch, following.consumed


@dataclass
class Losses:
    """The training loss, window by window."""

    first: float | None = None
    last: float | None = None
    average: float | None = None
    """Exponential moving average."""
    recent: list[float] = field(default_factory=list)


@dataclass
class LearnedBudget:
    """What the run has learned about the token budget, by running out of memory or by measuring
    (budget.py)."""

    tokens: int | None = None
    """The current token budget, or None for the planned one."""
    failed_tokens: int | None = None
    """The smallest micro-batch that did not fit, in tokens."""
    largest_done: int = 0
    """The largest micro-batch that did fit since, in tokens."""
    windows_since_failure: int = 0
    measured: bool = False
    """Whether a tuning run has chosen the token budget."""
    fixed: float | None = None
    """The measured fixed cost of a micro-batch, in tokens; None for the assumed one."""


@dataclass(frozen=True)
class TriedSize:
    """What the windows that were cut by one token budget measured, added up."""

    token_budget: int
    samples: int = 0
    tokens: int = 0
    seconds: float = 0.0
    micro_batches: int = 0
    """Of the window that had the most."""
    largest_tokens: int = 0


@dataclass
class LearnedTuning:
    """What trying other sizes of micro-batch has found so far (trial_policy.py)."""

    tokens: int | None = None
    """The fastest token budget found; None for the planned one."""
    trial: int | None = None
    """The budget that is being compared with it."""
    speeds: list[float] = field(default_factory=list)
    """Tokens per second of the trial's windows: at `tokens` and at `trial`, in turns."""
    tried: list[TriedSize] = field(default_factory=list)
    windows: int = 0
    """Windows since the start, or since the last trials ended."""
    period: int = 0
    """The number of windows after which sizes are tried again; 0 before the first trials."""
    before: int | None = None
    """The budget at the beginning of the last trials."""
    planned: int | None = None
    """The plan's budget; what was learned for another plan is of no use."""
    fixed: float | None = None
    """The measured fixed cost of a micro-batch, in tokens; None: not measured (fixed_cost.py)."""
    fixed_rounds: int = 0
    """Rounds of measuring it; `ROUNDS` once no more are needed."""
    ended: bool = False
    """Whether nothing is tried any more, since a size ran out of memory, or the process was killed in it."""

    def __post_init__(self) -> None:
        own = {each.name for each in fields(TriedSize)}
        self.tried = [
            each
            if isinstance(each, TriedSize)
            else TriedSize(**{name: each[name] for name in own & each.keys()})
            for each in self.tried
        ]

    def use(self, recorded: Mapping[str, Any]) -> None:
        """Replaces the state by a recorded one, of which another version may have other fields."""
        own = {each.name for each in fields(self)}
        vars(self).update(vars(LearnedTuning(**{name: recorded[name] for name in own & recorded.keys()})))

    def end(self) -> None:
        """Ends the trials for good."""
        self.trial, self.speeds, self.ended = None, [], True


FIRST_SHARES_PERIOD = 4
"""Windows that are measured before the ranks' shares are changed for the first time."""


@dataclass
class LearnedShares:
    """What the run has learned about the speeds of its ranks (distributed/shares.py)."""

    shares: list[float] = field(default_factory=list)
    """Each rank's share of a window's cost; empty: the plan's."""
    period: int = FIRST_SHARES_PERIOD
    """The number of windows after which shares are calculated again."""
    windows: int = 0
    """Windows measured since."""
    tokens: list[float] = field(default_factory=list)
    """What each rank processed in them, by its cost in tokens (`Budget.cost`)."""
    seconds: list[float] = field(default_factory=list)
    """Seconds that it took for them."""

    def use(self, shares: Sequence[float]) -> None:
        """Replaces the shares, and begins to measure anew."""
        self.shares = list(shares)
        self.start_period(FIRST_SHARES_PERIOD)

    def start_period(self, windows: int) -> None:
        self.period, self.windows, self.tokens, self.seconds = windows, 0, [], []

    def add(self, tokens: Sequence[float], seconds: Sequence[float]) -> None:
        """Adds a window's measurement by rank."""
        self.windows += 1
        self.tokens = _added(self.tokens, tokens)
        self.seconds = _added(self.seconds, seconds)


def _added(sums: Sequence[float], more: Sequence[float]) -> list[float]:
    return [one + other for one, other in zip(sums or [0.0] * len(more), more, strict=True)]


@dataclass
class RankTotals:
    """What a rank has done over the whole job, in windows that made a step."""

    micro_batches: int = 0
    tokens: int = 0
    """Tokens of its samples, without padding."""
    seconds: float = 0.0
    """Seconds in which its device worked on them."""
    idle_seconds: float = 0.0
    """Seconds in which it waited for slower ranks."""


@dataclass
class Ramp:
    """How far the effective batch has grown (ramp.py)."""

    batch: int | None = None
    """The effective batch in samples, or None for that of the spec."""
    windows_since_growth: int = 0


@dataclass
class SavedLossScale:
    """The fp16 loss scale at the time of the checkpoint."""

    value: float | None = None
    good_windows: int = 0


@dataclass
class Fallbacks:
    """The fallbacks that this model needs to be trained correctly, or to fit into memory."""

    checkpointing: bool = False
    """Whether gradient checkpointing was switched on because a micro-batch that may not become
    smaller did not fit without it."""
    own_logits: bool | None = None
    """Whether the model's own logits are used, because its head alone gives others; None if not checked
    yet."""
    padded: bool | None = None
    """Whether packing was replaced by padding; None if not checked yet."""
    packed_tokens: int = 0
    """Tokens of the longest packed row for which it was checked."""
    unpadded: bool | None = None
    """Whether samples are laid out without padding although that was not requested; None if not decided."""
    has_lean_layers: bool = False
    """Whether norms and rotary embeddings have backward passes of their own (lean_layers.py); decided before
    the first step."""
    onednn_shapes: list[list[int]] = field(default_factory=list)
    """The shapes of weights with which oneDNN computes the forward pass (cpu_products.py); decided before the
    first step."""
    equivalence_error: float | None = None
    """The gradient error of the equivalence certificate, or None if it was not measured yet."""


@dataclass
class Evaluations:
    """The validation loss."""

    loss: float | None = None
    at_step: int = -1
    """The step of the last evaluation."""
    best_loss: float | None = None
    best_step: int | None = None
    gained_loss: float | None = None
    """The loss that last reset early stopping's patience."""
    without_gain: int = 0
    token_accuracy: float | None = None
    """The share of target tokens that the model predicts; None with a preference objective or reward."""
    best_token_accuracy: float | None = None
    """That of the step with the lowest loss."""
    exact_match: float | None = None
    """The share of samples of which the model predicts every target; None with a preference objective or
    reward."""
    best_exact_match: float | None = None
    """That of the step with the lowest loss."""
    rewards: dict[str, float | None] | None = None
    """What a preference objective, or reward, measured (app/contract/reports.py: Rewards)."""
    best_rewards: dict[str, float | None] | None = None
    """Those of the step with the lowest loss."""


@dataclass
class RunState:
    """Everything that a checkpoint keeps besides weights and optimizer state."""

    progress: Progress = field(default_factory=Progress)
    position: Position = field(default_factory=Position)
    losses: Losses = field(default_factory=Losses)
    budgets: list[LearnedBudget] = field(default_factory=lambda: [LearnedBudget()])
    """One for each rank."""
    ramp: Ramp = field(default_factory=Ramp)
    loss_scale: SavedLossScale = field(default_factory=SavedLossScale)
    fallbacks: Fallbacks = field(default_factory=Fallbacks)
    evaluations: Evaluations = field(default_factory=Evaluations)
    noise: list[list[float]] = field(default_factory=list)
    """The measurements of the noise scale (noise_scale.Measurement)."""
    ranks: list[RankTotals] = field(default_factory=list)
    """What each rank has done; empty until the job trains on several ranks."""
    shares: LearnedShares = field(default_factory=LearnedShares)
    tuning: LearnedTuning = field(default_factory=LearnedTuning)

    @property
    def step(self) -> int:
        """Optimizer steps made."""
        return self.progress.step

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


_GROUPS: dict[str, Any] = {
    each.name: each.default_factory
    for each in fields(RunState)
    if each.name not in ("budgets", "ranks", "noise")
}


def from_json(content: Mapping[str, Any], version: int) -> RunState:
    """The state that a checkpoint of that version holds.

    Raises:
        CannotTrain: a newer version of this program wrote it.
    """
    if version > VERSION:
        message = (
            f"the checkpoint has version {version}, but this trainer reads only up to {VERSION}: "
            "update Accrue"
        )
        raise CannotTrain("checkpoint_too_new", message)
    grouped = _grouped(content) if version == 1 else content
    made = {name: make(**grouped.get(name, {})) for name, make in _GROUPS.items()}
    budgets = [LearnedBudget(**own) for own in grouped.get("budgets", [grouped.get("budget", {})])]
    ranks = [RankTotals(**own) for own in grouped.get("ranks", [])]
    return RunState(**made, budgets=budgets, ranks=ranks, noise=list(grouped.get("noise", [])))


_SINCE_VERSION_1 = {
    "first_loss": "losses.first", "loss": "losses.last", "loss_ema": "losses.average",
    "recent_losses": "losses.recent",
    "loss_scale": "loss_scale.value", "loss_scale_good_windows": "loss_scale.good_windows",
    "token_budget": "budget.tokens", "tuned": "budget.measured",
    "eval_loss": "evaluations.loss", "evaluated_at": "evaluations.at_step",
    "evaluations_without_gain": "evaluations.without_gain",
}  # fmt: skip
"""Fields of version 1 that have another name now; all others kept theirs and were only put into a group."""


def _grouped(flat: Mapping[str, Any]) -> dict[str, Any]:
    """A state of version 1, by group."""
    own_group = {
        inner.name: f"{group}.{inner.name}"
        for group, made in {**_GROUPS, "budget": LearnedBudget}.items()
        for inner in fields(made)
    }
    found: dict[str, Any] = {"noise": flat.get("noise", [])}
    for name, value in flat.items():
        if name == "noise":
            continue
        group, inner = _SINCE_VERSION_1.get(name, own_group.get(name, "")).split(".")
        found.setdefault(group, {})[inner] = value
    return found
