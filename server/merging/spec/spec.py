"""One merge as it is asked for: method, parameters, wrappers, and what makes it the same again.

>>> spec_of("ties", density=0.3, core=True).parameters
{'density': 0.3}
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from torch import Tensor

from dpmerge.common.config.sections import Robust
from dpmerge.server.merging.methods.parameter import COEFFICIENT, Value

Device = Literal["cpu", "cuda", "auto"]


@dataclass(frozen=True, kw_only=True)
class Wrappers:
    """What is put around a method; see `wrappers.py`.

    Attributes:
        core: Apply the method to coordinates in the adapters' shared bases.
        robust: Bound one party's influence: "clip" shortens every whole change to the median length, "median" replaces
            the weights of a weighted sum by the geometric median's, which needs three parties to resist one.
        denoise: Give the method, in place of every party's change, the best linear prediction of its signal from all
            parties' changes.
        layer_scales: Pattern of module names, as in PEFT's `rank_pattern` → factor on the merged change there.
        party_layer_scales: Party → pattern of module names → factor on that party's change there, before the method.
            The first pattern that matches holds. Weights stay as they are: a mean divides by their sum.
    """

    core: bool = False
    robust: Robust | None = None
    denoise: bool = False
    layer_scales: Mapping[str, float] = field(default_factory=dict)
    party_layer_scales: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, eq=False)
class MergeSpec:
    """One merge, as asked for; `merge` checks it.

    Attributes:
        method: A name of `METHODS`.
        parameters: Parameter's name → value; what is left out, or None, is the method's default.
        wrappers: What is put around the method.
        weights: Party → finite weight; all 1 if None.
        statistics: What `regmean` and `fisher` need; see `public_statistics`.
        seed: Of random masks.
        strict: Refuse modules that only some parties adapt; otherwise the others have delta 0 there.
        device: Where to compute; "auto" is CUDA where there is one. The result comes back to the processor. Its last
            bits are the device's, so the one that was used is recorded, and the processor is the default.
    """

    method: str
    parameters: Mapping[str, Value | None] = field(default_factory=dict)
    wrappers: Wrappers = field(default_factory=Wrappers)
    weights: Mapping[str, float] | None = None
    statistics: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    seed: int = 0
    strict: bool = True
    device: Device = "cpu"

    def with_coefficient(self, coefficient: float) -> "MergeSpec":
        """Return the same spec with a coefficient."""
        return replace(self, parameters={**self.parameters, COEFFICIENT.name: coefficient})


_AROUND = frozenset(key.name for key in fields(Wrappers))
_OWN = frozenset(key.name for key in fields(MergeSpec)) - {"method", "parameters", "wrappers"}


def spec_of(method: str, **given: Any) -> MergeSpec:
    """Return a spec from plain keywords: fields of `MergeSpec` and `Wrappers`, and any parameter of the method.

    Args:
        method: A name of `METHODS`.
        given: Whatever was said; None says nothing.
    """
    stated = {key: value for key, value in given.items() if value is not None}
    own = {key: stated.pop(key) for key in _OWN & stated.keys()}
    around = {key: stated.pop(key) for key in _AROUND & stated.keys()}
    return MergeSpec(method=method, parameters=stated, wrappers=Wrappers(**around), **own)
