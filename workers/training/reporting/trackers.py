"""Writes the run's figures to TensorBoard, Weights & Biases and MLflow, if requested.

Each writes below the run directory and needs no network; `wandb sync` or an MLflow server take it from there.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from app.contract.assignment import Assignment
from app.contract.reports import LogLine, Rewards
from app.contract.spec import Tracker
from workers.training.exceptions import CannotTrain

FIGURES = (
    "loss", "loss_ema", "aux_loss", "learning_rate", "grad_norm", "effective_batch_size",
    "gradient_accumulation_steps", "tokens_per_second", "memory_gb", "peak_gb", "noise_scale", "skipped",
)  # fmt: skip


class Writer(Protocol):
    def write(self, step: int, figures: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class Trackers:
    """All requested writers as one.

    Raises:
        CannotTrain: a package is not installed.
    """

    def __init__(self, names: Sequence[Tracker], assignment: Assignment, folder: Path) -> None:
        make: dict[Tracker, Callable[[Assignment, Path], Writer]] = {
            "tensorboard": TensorBoard,
            "wandb": WandB,
            "mlflow": MLflow,
        }
        self._writers: list[Writer] = [make[name](assignment, folder) for name in names]

    def step(self, line: LogLine) -> None:
        figures = {name: float(value) for name in FIGURES if (value := getattr(line, name)) is not None}
        self.write(
            line.step,
            {f"train/{name}": value for name, value in figures.items()}
            | named_by_trl(line.rewards, "train/"),
        )

    def write(self, step: int, figures: dict[str, float]) -> None:
        for writer in self._writers:
            writer.write(step, figures)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for writer in self._writers:
            writer.close()


def check_installed(names: Sequence[Tracker]) -> None:
    """Checks that the packages of trackers are installed, without loading them.

    Raises:
        CannotTrain: one is not.
    """
    for name in names:
        if find_spec(name) is None:
            raise _not_installed(name)


def named_by_trl(rewards: Rewards | None, prefix: str) -> dict[str, float]:
    """Rewards by the names that TRL gives them, for experiment trackers."""
    if rewards is None:
        return {}
    named = {
        "rewards/chosen": rewards.chosen,
        "rewards/rejected": rewards.rejected,
        "rewards/margins": rewards.margin,
        "rewards/accuracies": rewards.accuracy,
        "logps/chosen": rewards.chosen_log_prob,
        "logps/rejected": rewards.rejected_log_prob,
        "kl": rewards.divergence,
    }
    return {f"{prefix}{name}": value for name, value in named.items() if value is not None}


class TensorBoard:
    def __init__(self, assignment: Assignment, folder: Path) -> None:
        _needed("tensorboard")
        self._writer = import_module("torch.utils.tensorboard").SummaryWriter(str(folder / "tensorboard"))

    def write(self, step: int, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    def __init__(self, assignment: Assignment, folder: Path) -> None:
        self._run: Any = _needed("wandb").init(
            project="accrue", id=assignment.job_id, resume="allow", mode="offline", dir=str(folder),
            config=assignment.spec.model_dump(mode="json"),
        )  # fmt: skip

    def write(self, step: int, figures: dict[str, float]) -> None:
        self._run.log(figures, step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    def __init__(self, assignment: Assignment, folder: Path) -> None:
        self._mlflow = _needed("mlflow")
        self._mlflow.set_tracking_uri(f"sqlite:///{folder / 'mlflow.db'}")
        self._mlflow.set_experiment("accrue")
        known = folder / "mlflow.run"  # a resumed job goes on with its run
        run = self._mlflow.start_run(
            run_id=known.read_text() if known.exists() else None, run_name=assignment.job_id
        )
        known.write_text(run.info.run_id)
        self._mlflow.log_params({"model": assignment.spec.model.name, "seed": assignment.spec.seed})

    def write(self, step: int, figures: dict[str, float]) -> None:
        self._mlflow.log_metrics(figures, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


def _needed(package: str) -> Any:
    try:
        return import_module(package)
    except ImportError as error:
        raise _not_installed(package) from error


def _not_installed(package: str) -> CannotTrain:
    return CannotTrain(
        "not_installed", f"report_to {package} needs the package {package}: pip install {package}"
    )
