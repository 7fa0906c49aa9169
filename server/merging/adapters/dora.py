"""DoRA's weight changes, made from the base model's weights each time they are looked at.

DoRA trains a length m per row beside LoRA: W' = m (W + s B A) / ‖W + s B A‖, row by row. The change W' - W is of full
rank and can be told exactly, but only with W at hand. It is computed in float64 and rounded once.

References: arXiv 2402.09353, equation 5. Deviations: none.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dpmerge.common.errors import DpmergeError
from dpmerge.server.merging.adapters.lazy_tensors import StoredTensor, frobenius

Plain = Tensor | StoredTensor


@dataclass(frozen=True)
class BaseWeights:
    """Where the weights of a base model lie.

    Attributes:
        files: Tensor's key → file.
    """

    files: Mapping[str, Path]

    def read(self, name: str, party: str) -> Tensor:
        """Return the weight of a module, float64, as it is stored.

        Args:
            name: The module, named as in the model or in the body inside a model with a head, either way round.
            party: Named in a refusal.

        Raises:
            DpmergeError: DPM-402 if no weight has this name, or several.
        """
        key = f"{name}.weight"
        found = [key] if key in self.files else [other for other in self.files if other.endswith(f".{key}")]
        found = found or [other for other in (key.partition(".")[2],) if other in self.files]
        if len(found) != 1:
            problem = f"{party}: the base model's files have {len(found)} weights of {name}, which DoRA needs"
            raise DpmergeError("DPM-402", problem, "give --base the folder of the base model in safetensors")
        with safe_open(self.files[found[0]], "pt") as tensors:
            weight: Tensor = tensors.get_tensor(found[0])
        return weight.double()


@dataclass(frozen=True)
class DoraChange:
    """One module's change W' - W, [out, in], without its numbers.

    Attributes:
        weights: Of the base model.
        name: The module.
        party: Whose change.
        factors: A, B and m.
        scaling: Of B A.
        transposed: Whether the base model stores W as [in, out].
        shape: (out, in).
        norm: Of the change.
        sha256: Of its numbers.
        device: Where it is read to.
    """

    weights: BaseWeights
    name: str
    party: str
    factors: tuple[Plain, Plain, Plain]
    scaling: float
    transposed: bool
    shape: tuple[int, int]
    norm: float = 0.0
    sha256: bytes = b""
    device: torch.device = torch.device("cpu")  # noqa: RUF009 -- immutable
    dtype: torch.dtype = torch.float32

    def read(self) -> Tensor:
        """Compute it, as fp32.

        Raises:
            DpmergeError: DPM-402 for shapes that do not fit the base model's weight.
        """
        a, b, m = (item.double() if isinstance(item, Tensor) else item.read().double() for item in self.factors)
        stored = self.weights.read(self.name, self.party)
        weight = stored.T if self.transposed else stored
        if tuple(weight.shape) != self.shape or m.numel() != self.shape[0]:
            problem = f"{self.party}: {self.name} is {self.shape} with {m.numel()} lengths but {tuple(weight.shape)}"
            fix = "give --base the model that the adapter was trained on"
            raise DpmergeError("DPM-402", f"{problem} in the base model", fix)
        turned = weight + self.scaling * (b.to(weight) @ a.to(weight))
        lengths = torch.linalg.vector_norm(turned, dim=1, keepdim=True)
        change: Tensor = (m.reshape(-1, 1) / lengths) * turned - weight
        return change.to(self.device, torch.float32)


def base_weights(folder: Path) -> BaseWeights:
    """Return where each tensor of a model's folder lies; reads headers only."""
    files: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt") as tensors:
                files |= dict.fromkeys(tensors.keys(), file)
        except SafetensorError as error:
            fix = "give --base a model in safetensors"
            raise DpmergeError("DPM-402", f"{file} cannot be read: {error}", fix) from error
    return BaseWeights(files)


def known(change: DoraChange) -> DoraChange:
    """Return a change with its norm and hash, which takes computing it once."""
    numbers = change.read()
    return replace(change, norm=frobenius(numbers), sha256=hashlib.sha256(numbers.contiguous().numpy().data).digest())
