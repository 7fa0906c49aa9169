"""Mistakes that published and home-made DP code has made, planted into the loop's own source.

Each replaces one fragment of one module. The fragment must be there exactly once: code that moves makes the
planting fail, and never leaves a defect unplanted. The spoilt module is executed, and whatever imported a function or
class of the sound one has the spoilt one meanwhile.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from unittest import mock

from .observe import everywhere

_DESCENT = 'Privatiser(mechanism, num_coordinates, noise, query="descent")'
_ASCENT = 'Privatiser(mechanism, num_coordinates, noise, query="ascent")'
_SAMPLER = "PoissonSampler(mechanism.sampling_prob, num_units, seed)"


@dataclass(frozen=True)
class Defect:
    """One mistake.

    Attributes:
        name: What it is called.
        module: In which module of `dpmerge.client` it is made, with its room: "training.train".
        fragment: Source that is there exactly once.
        replacement: What takes its place.
        appended: Code at the end of the module.
    """

    name: str
    module: str
    fragment: str
    replacement: str
    appended: str = ""


def _noisier(factor: float) -> str:
    other = f"replace(mechanism, noise_multiplier=mechanism.noise_multiplier * {factor}),"
    return _DESCENT.replace("mechanism,", other)


def _noisier_ascent(factor: float) -> str:
    other = f"replace(mechanism, ascent_noise_multiplier=mechanism.ascent_noise_multiplier * {factor}),"
    return _ASCENT.replace("mechanism,", other)


_ECHO = """
class _Echo:
    def __init__(self, noise):
        self.mode, self.steps_per_sigma = noise.mode, noise.steps_per_sigma
        self.state, self.erase = noise.state, noise.erase
        self._noise, self._kept = noise, None

    def sample(self, num_values):
        drawn = self._noise.sample(num_values) if self._kept is None else self._kept
        self._kept = drawn if self._kept is None else None
        return drawn
"""

_TAUGHT = """
def _taught(data):
    means = 0
    for batch in data.activations.batches(torch.arange(len(data.labels)), 64):
        is_class = nn.functional.one_hot(data.labels[batch.records], 2).float()
        means = means + is_class.T @ pool(batch.hidden, batch.mask)[: len(is_class)]
    targets = torch.empty(len(data.labels), 2)
    for batch in data.activations.batches(torch.arange(len(data.labels)), 64):
        targets[batch.records] = (pool(batch.hidden, batch.mask)[: len(batch.records)] @ means.T).softmax(1)
    return targets
"""

_TURN = """
def _turn(space, rows):
    from dpmerge.client.subspace.basis import StreamingSvd

    svd = StreamingSvd(space.basis.rows.shape[1], len(space.vector))
    for some in rows:
        svd.add(some)
    space._take(svd.finish(), space.scales)
"""

_SHUFFLED = """
def _shuffled(sampler, word):
    size = max(1, round(sampler._threshold / 2**64 * sampler._num_units))
    order = sampler.__dict__.setdefault("_order", [])
    if len(order) < size:
        order[:] = np.random.default_rng(int(word)).permutation(sampler._num_units).tolist()
    return torch.tensor(sorted(order.pop() for _ in range(size)))
"""

KNOWN = (
    Defect("noise x0.5", "training.train", _DESCENT, _noisier(0.5)),
    Defect("clipping off", "privacy.privatiser", "torch.minimum(", "(lambda scales, _bound: scales)("),
    Defect(
        "noise per physical batch",
        "training.train",
        "privatiser.accumulate(rows)",
        "privatiser.accumulate(rows); privatiser._total += privatiser._noise.sample(len(privatiser._total))",
    ),
    Defect(
        "empty batch not noised",
        "training.train",
        "privatiser.finish()",
        "(privatiser.finish() if len(sample) else torch.zeros(len(privatiser._total)))",
    ),
    Defect(
        "realised-batch normaliser",
        "training.train",
        "privatiser.finish()",
        "privatiser.finish() * (privatiser._batch_size / max(1, len(sample)))",
    ),
    Defect(
        "shuffled batches",
        "privacy.sampling",
        "torch.from_numpy(chosen)",
        "_shuffled(self, words[0])",
        appended=_SHUFFLED,
    ),
    Defect("reused seed", "party.party", "SecureNoise() if", "SecureNoise.from_state(bytes(range(32))) if"),
    Defect(
        "ascent from the raw gradient",
        "training.train",
        "_private_gradient(ascent, sample, model, data, space)",
        "sum((rows.sum(0) for rows in _private_rows(sample, model, data, space)), torch.zeros(num_coordinates))",
    ),
    Defect(
        "non-private teacher",
        "training.train",
        "data.labels[batch.",
        "_taught(data)[batch.",
        appended=_TAUGHT,
    ),
    Defect(
        "norm over some layers only",
        "privacy.privatiser",
        "self._scales(grads)",
        "self._scales(grads[:, : grads.shape[1] // 2])",
    ),
)
"""The ten of PRIVACY.md."""

OF_THE_LOOP = (
    Defect(
        "ascent's noise again for the descent",
        "training.train",
        "num_coordinates = space.vector.numel()",
        "num_coordinates, noise = space.vector.numel(), _Echo(noise)",
        appended=_ECHO,
    ),
    Defect(
        "one key for sampler and noise",
        "party.party",
        _SAMPLER,
        "PoissonSampler.from_state(mechanism.sampling_prob, num_units, noise.state())",
    ),
    Defect(
        "empty samples skipped",
        "training.train",
        "        direction = memory.direction\n",
        "        if not len(sample):\n            continue\n        direction = memory.direction\n",
    ),
    Defect("sampler at 2q", "party.party", _SAMPLER, _SAMPLER.replace("mechanism.", "2 * mechanism.")),
    Defect(
        "no noise at all",
        "training.train",
        f"descent = {_DESCENT}\n",
        f"descent = {_DESCENT}\n    descent._noise = None\n",
    ),
)
"""Five that are mistakes of the loop's wiring."""

FURTHER = (
    Defect(
        "reused seed, every step",
        "training.train",
        "return privatiser.finish()",
        "source = privatiser._noise\n    source._keystream = type(source._keystream)(bytes(range(32)))\n"
        "    return privatiser.finish()",
    ),
    Defect("noise x0.98", "training.train", _DESCENT, _noisier(0.98)),
    Defect("noise x1.02", "training.train", _DESCENT, _noisier(1.02)),
    Defect("ascent's noise x0.98", "training.train", _ASCENT, _noisier_ascent(0.98)),
    Defect("half the ascent's noise", "training.train", _ASCENT, _noisier_ascent(0.5)),
    Defect(
        "clipped as a physical batch",
        "training.train",
        "privatiser.accumulate(rows)",
        "privatiser.accumulate(rows.sum(0, keepdim=True))",
    ),
    Defect(
        "one step more than charged",
        "training.train",
        "range(first_step, mechanism.num_steps)",
        "range(first_step, mechanism.num_steps + 1)",
    ),
    Defect(
        "two samples charged as one",
        "training.train",
        'if mechanism.ascent_sampling == "separate":',
        "if True:",
    ),
    Defect(
        "a sample for several steps",
        "training.train",
        "        direction = memory.direction\n",
        "        last = sample = sample if step % 2 == 0 else last\n        direction = memory.direction\n",
    ),
    Defect(
        "raw gradient in the step",
        "training.train",
        "space.vector.grad = gradient",
        "raw = _private_rows(sample, model, data, space)\n"
        "        raw_gradient = sum((rows.mean(0) for rows in raw), torch.zeros(num_coordinates))\n"
        "        space.vector.grad = 0.1 * raw_gradient + gradient",
    ),
    Defect("weights that drift", "training.sharpness", "theta.copy_(saved)", "theta.sub_(ascent)"),
    Defect(
        "noise before the charge",
        "party.party",
        "    checkpoint = folder / CHECKPOINT\n    reservation =",
        "    SecureNoise().sample(4)\n    checkpoint = folder / CHECKPOINT\n    reservation =",
    ),
)
"""Others that came to mind."""

OF_SUBSPACES = (
    Defect(
        "basis from private gradients",
        "training.train",
        "space = FullSpace(gradients) if coordinates is None else coordinates\n",
        "space = FullSpace(gradients) if coordinates is None else coordinates\n"
        "    _turn(space, _private_rows(torch.arange(data.num_units), model, data, FullSpace(gradients)))\n",
        appended=_TURN,
    ),
    Defect(
        "clip norm from raw norms",
        "training.train",
        "mechanism = with_private_clip_norm(mechanism, noise, rows)",
        "rows = list(rows)\n        with_private_clip_norm(mechanism, noise, rows)\n"
        "        mechanism = replace(mechanism, l2_clip_norm=float(torch.cat(rows).norm(dim=1).mean()))",
    ),
)
"""What a subspace adds; they show in a transcript, or in a training with a clip query."""

PLANTED = {defect.name: defect for defect in (*KNOWN, *OF_THE_LOOP)}
ALL = PLANTED | {defect.name: defect for defect in (*FURTHER, *OF_SUBSPACES)}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Spoil the loop by one defect inside the block.

    Raises:
        ValueError: If a fragment is not in its module exactly once: the code has moved, and the defect must follow.
    """
    defect = ALL[name]
    full_name = f"dpmerge.client.{defect.module}"
    sound = importlib.import_module(full_name)
    source = Path(str(sound.__file__)).read_text(encoding="utf-8")
    if (found := source.count(defect.fragment)) != 1:
        place = f"client/{defect.module.replace('.', '/')}.py, where {name!r} is planted"
        raise ValueError(f"Expected {defect.fragment!r} once in {place}, not {found} times.")
    spoilt = _executed(full_name, source.replace(defect.fragment, defect.replacement) + defect.appended)
    with ExitStack() as stack:
        # where later replacements, of what the spoilt module imports, find it too
        stack.enter_context(mock.patch.dict(sys.modules, {f"{full_name}.spoilt": spoilt}))
        for key, original in list(vars(sound).items()):
            if getattr(original, "__module__", None) == full_name and hasattr(spoilt, key):
                stack.enter_context(everywhere(original, getattr(spoilt, key)))
        yield


def _executed(name: str, source: str) -> ModuleType:
    """Return a module made of `source` in place of the sound one's."""
    spoilt = ModuleType(name)
    with mock.patch.dict(sys.modules, {name: spoilt}):  # where dataclasses look their annotations up
        exec(compile(source, f"{name} (spoilt)", "exec"), vars(spoilt))
    return spoilt
