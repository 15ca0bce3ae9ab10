"""Base of methods that read the scores of a model's heads from a file."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated

from msgspec import Meta

from kv_evict.heads_file import HeadScores, load
from kv_policy import Selecting


@dataclass(frozen=True)
class ByHeadScores(Selecting):
    """Base of methods that read a file of `kv-serve calibrate heads`."""

    file: Annotated[str, Meta(min_length=1, description="output of kv-serve calibrate heads")] = (
        field(kw_only=True)
    )

    def __post_init__(self) -> None:
        """Check the parameters and load the scores.

        Raises:
            NotCalibratedError: the file does not exist.
            ValueError: a parameter is refused, or the file is damaged or holds no head scores.
        """
        super().__post_init__()
        _ = self.heads  # a file that cannot be read is refused at construction

    @cached_property
    def heads(self) -> HeadScores:
        """The scores of all heads of the calibrated model."""
        return load(self.name, self.file)

    @property
    def fitted_to(self) -> str:
        """Fingerprint of the calibrated model."""
        return self.heads.facts.fingerprint
