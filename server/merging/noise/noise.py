"""What is known of the noise in one adapter: a description alone, which methods read; `shares.py` finds it out."""

import math
from dataclasses import dataclass
from typing import Literal

MODEL_ERROR = 0.01  # what replaying the optimizer on pure noise may be off by, relative to the noise's energy


@dataclass(frozen=True)
class Noise:
    """The noise in one adapter.

    Attributes:
        share: Share of ‖τ_t‖² that is noise, in [0, 1].
        num_coordinates: How many independent values it was drawn in.
        origin: "stated" in the adapter's statement, or "estimated" from its spectrum.
    """

    share: float
    num_coordinates: int
    origin: Literal["stated", "estimated"]

    @property
    def relative_error(self) -> float:
        """Relative standard deviation of the noise's energy: that of its draw, and of the replay that predicts it."""
        return math.sqrt(2 / max(1, self.num_coordinates) + MODEL_ERROR**2)
