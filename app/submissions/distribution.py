"""How several devices share the work of a job."""

from collections.abc import Sequence
from dataclasses import dataclass

from app.contract.reports import MAX_REPLICAS
from app.contract.spec import GradientCompression, Strategy, ZeroStage
from app.errors import Unprocessable


@dataclass(frozen=True)
class Distribution:
    """How the requested devices share the work."""

    devices: int
    steps_by_device: Sequence[int] | None = None
    """The accumulation steps of each device, if they are given so."""
    strategy: Strategy | None = None
    """None: as the plan decides."""
    zero_stage: ZeroStage | None = None
    average: bool = False
    gradient_compression: GradientCompression | None = None

    @property
    def independent(self) -> bool:
        """Whether each device trains a model of its own."""
        return self.strategy == "independent"

    def check(self, samples: int) -> None:
        """Checks the number of independent replicas.

        Args:
            samples: those to train on, of all replicas together.

        Raises:
            Unprocessable: there are too many.
        """
        field = "parallel_independent"
        if self.independent and self.devices > MAX_REPLICAS:
            raise Unprocessable(f"{field}: at most {MAX_REPLICAS} replicas are possible.", field=field)
        if self.independent and samples < self.devices:
            raise Unprocessable(
                f"{field} on {self.devices} devices needs at least {self.devices} samples to train on.",
                field=field,
            )
