"""Which model a job starts from: a base model, perhaps with what earlier jobs have trained on it."""

from typing import Annotated, Literal

from pydantic import AfterValidator, StringConstraints

from app.contract.architecture import MODEL_NAME, Architecture
from app.contract.base import Frozen

REWARD = "reward"
"""The name of a reward model's score."""


class LoraSpec(Frozen):
    """Low-rank adapters (Hu et al. 2021) through peft."""

    r: int
    alpha: int
    dropout: float
    target_modules: tuple[str, ...] | None
    """Suffixes of module names; None: the default (`workers.training.models.adapters.default_targets`)."""
    merge: bool
    """The model is saved with the adapters merged into it, instead of the adapters alone."""


class ModelLayer(Frozen):
    """Weights that an earlier job trained on a model: loaded after those of the model itself."""

    name: str
    """The model with this layer, as `ModelReference.name`."""
    job_id: str
    folder: str
    """Below the job's run directory: model, or checkpoints/step-…"""
    lora: LoraSpec | None
    """The adapters that the weights belong to; None: they replace weights of the model."""
    fingerprint: str
    """A digest of the folder's files at submission (`model_fingerprint.fingerprint_of_files`)."""


class ModelReference(Frozen):
    """A model to start from, and where its files are to be found."""

    name: str
    source: Literal["built_in", "local", "hub", "job"]
    architecture: Architecture
    fingerprint: str | None = None
    """A digest of the model's files at submission (`model_fingerprint.fingerprint_of_files`); None if it is
    built in or from the hub."""
    revision: str | None = None
    """Of a model of the hub: the commit at submission or, if that is unknown, the requested revision."""
    base: str | None = None
    """The name of the model below the layers; None: `name`."""
    job_id: str | None = None
    """If the source is a job: the job that trained the model below the layers (or the whole model, without
    layers)."""
    layers: tuple[ModelLayer, ...] = ()
    """What earlier jobs trained on it, in the order of loading."""
    scores: tuple[str, ...] = ()
    """The names of the scores that a classifier or reward model of an earlier job gives to a text; empty for
    a language model."""

    @property
    def base_name(self) -> str:
        """The name of the model below the layers."""
        return self.base or self.name

    def continued_adapters(self, *, adapters: bool) -> ModelLayer | None:
        """The adapters that a job goes on training; None if it trains new ones, or no adapters.

        Args:
            adapters: whether the job trains adapters.
        """
        last = self.layers[-1] if self.layers else None
        return last if adapters and last is not None and last.lora is not None else None

    def below_adapters(self) -> tuple[str, str | None]:
        """The name of the model that a job's adapters are added to, and its revision on the hub."""
        below = self.layers[:-1] if self.continued_adapters(adapters=True) else self.layers
        if below:
            return below[-1].name, None
        return self.base_name.partition("@")[0], self.revision


_TRAINED = r"ft:[A-Za-z0-9._/@-]+:accrue:[A-Za-z0-9_.-]*:[A-Za-z0-9]+"
_CHECKPOINT = r"(:ckpt-step-(0|[1-9][0-9]*))?"
_PLAIN = MODEL_NAME.pattern.removeprefix("^").removesuffix("$")

_REVISION = r"(@[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*)?"
"""Not a path: no part begins with a dot."""
_LONGEST = 200


def _check_length(name: str) -> str:
    if len(name) > _LONGEST and not name.startswith("ft:"):
        raise ValueError(f"has more than {_LONGEST} characters")
    return name


HUB_NAME = rf"^{_PLAIN}{_REVISION}$"
HubName = Annotated[str, StringConstraints(pattern=HUB_NAME, max_length=_LONGEST)]
"""A name or owner/name, perhaps with @revision."""


def split_revision(name: str) -> tuple[str, str | None]:
    """A name on the hub, and the revision after an @: a branch, a tag or a commit.

    >>> split_revision("owner/name@v1.0")
    ('owner/name', 'v1.0')
    """
    plain, _, revision = name.partition("@")
    return plain, revision or None


_FORM = rf"^({_PLAIN}{_REVISION}|({_TRAINED}|ftjob-[A-Za-z0-9]+){_CHECKPOINT})$"

StartingModel = Annotated[
    str, StringConstraints(pattern=_FORM, max_length=400), AfterValidator(_check_length)
]
"""A base model's name or owner/name, on the hub with @revision; a trained model's (`ft:…`), or the id of the
job that trained it; or one of a job's checkpoints (`…:ckpt-step-50`). Never a path."""
