"""Twelve defects that published and home-made DP code has had, planted into the real parts.

Each is the smallest change that makes the mistake. Those of the parts are `Parts`; those of the training loop are
contexts in which it is broken.
"""

from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import torch
from torch.nn.functional import cross_entropy

from dpmerge.client import party, train
from dpmerge.client.gradients import PerExampleGradients
from dpmerge.client.keystream import Keystream
from dpmerge.client.noise import SecureNoise
from dpmerge.client.privatiser import Privatiser
from dpmerge.client.sampling import PoissonSampler
from dpmerge.common.public_corpus import PublicCorpus
from dpmerge.common.split_encoder import pool

from .checks import seeded

KEY = bytes(range(32))


class HalfNoise(Privatiser):
    """A factor lost between σ and σ·C."""

    def __init__(self, mechanism, *args, **options):
        super().__init__(replace(mechanism, noise_multiplier=mechanism.noise_multiplier / 2), *args, **options)


class ClippingOff(Privatiser):
    def _scales(self, grads):
        return torch.full((len(grads),), 1 / self._step)


class NoisePerPhysicalBatch(Privatiser):
    """Adds noise to each physical batch: private, but not the mechanism that is claimed."""

    def accumulate(self, grads):
        if self._total.any():
            self._total += self._noise.sample(len(self._total))
        super().accumulate(grads)


class EmptyBatchSkipped(Privatiser):
    _has_records = False

    def accumulate(self, grads):
        self._has_records = True
        super().accumulate(grads)

    def finish(self):
        has_records, self._has_records = self._has_records, False
        return super().finish() if has_records else torch.zeros(len(self._total))


class RealisedBatch(Privatiser):
    """Divides by the number of records sampled, which is private, in place of B."""

    _num_records = 0

    def accumulate(self, grads):
        self._num_records += len(grads)
        super().accumulate(grads)

    def finish(self):
        num_records, self._num_records = max(1, self._num_records), 0
        return super().finish() * (self._batch_size / num_records)


class NormOverSomeLayers(Privatiser):
    """Clips by the norm of the first half of the coordinates, say because a module was wrapped later."""

    def _scales(self, grads):
        return super()._scales(grads[:, : grads.shape[1] // 2])


class ShuffledBatches(PoissonSampler):
    """Goes through a shuffled data set in batches of a fixed size."""

    def __init__(self, sampling_prob, num_units):
        super().__init__(sampling_prob, num_units)
        self._size = max(1, round(sampling_prob * num_units))
        self._generator = torch.Generator().manual_seed(1)
        self._order = torch.empty(0, dtype=torch.int64)

    def sample(self):
        if len(self._order) < self._size:
            self._order = torch.randperm(self._num_units, generator=self._generator)
        batch, self._order = self._order[: self._size], self._order[self._size :]
        return batch.sort().values


class StuckNoise(SecureNoise):
    """Seeds every step alike."""

    def sample(self, num_values):
        self._keystream = Keystream(KEY)
        return super().sample(num_values)


def same_seed_every_run(_mode):
    return SecureNoise.from_state(KEY)


def one_seed_for_noise_and_sampling(q, num_units):
    return PoissonSampler.from_state(q, num_units, KEY)


@contextmanager
def ascent_from_the_raw_gradient():
    """Climbs along the records' own gradients, as sharpness-aware minimisation does without privacy."""
    compute, perturbation, raw = PerExampleGradients.compute, train.perturbation, []

    def remember(gradients, losses):
        rows = compute(gradients, losses)
        raw.append(rows.sum(0))
        return rows

    def climb(_direction, radius):
        direction = sum(raw) if raw else None
        raw.clear()
        return perturbation(direction, radius)

    with mock.patch.object(PerExampleGradients, "compute", remember), mock.patch.object(train, "perturbation", climb):
        yield


@contextmanager
def non_private_teacher():
    """Distils from a classifier that was fitted to the same records: the mean features of each class."""

    def fitted(data):
        means = 0
        for batch in data.activations.batches(torch.arange(len(data.labels)), 64):
            is_class = torch.nn.functional.one_hot(data.labels[batch.records], 2).float()
            means = means + is_class.T @ pool(batch.hidden, batch.mask)[: len(batch.records)]
        return means

    def distilled(privatiser, sample, model, data, gradients):
        teacher = fitted(data)
        for batch in data.activations.batches(sample, gradients.capacity):
            targets = (pool(batch.hidden, batch.mask) @ teacher.T).softmax(1)
            privatiser.accumulate(
                gradients.compute(
                    lambda batch=batch, targets=targets: cross_entropy(
                        model(batch.hidden, batch.mask), targets, reduction="none"
                    )
                )[: len(batch.records)]
            )
        return privatiser.finish()

    with mock.patch.object(train, "_private_gradient", distilled):
        yield


@contextmanager
def basis_from_private_gradients():
    """Takes the directions from the party's own records, which know best where they lie."""

    def own(_plan, records, _folder):
        return PublicCorpus(records.texts)

    with mock.patch.object(party, "_public_corpus", own):
        yield


@contextmanager
def clip_norm_from_raw_norms():
    """Asks for the clip norm, and then takes the mean length of the gradients that were sampled."""
    asked = train.with_private_clip_norm

    def raw(mechanism, noise, rows):
        seen = list(rows)
        asked(mechanism, noise, seen)
        return replace(mechanism, l2_clip_norm=float(torch.cat(seen).norm(dim=1).mean()))

    with mock.patch.object(train, "with_private_clip_norm", raw):
        yield


PART_MUTANTS = {
    "noise x0.5": lambda: seeded(privatiser=HalfNoise),
    "clipping off": lambda: seeded(privatiser=ClippingOff),
    "noise per physical batch": lambda: seeded(privatiser=NoisePerPhysicalBatch),
    "empty batch skipped": lambda: seeded(privatiser=EmptyBatchSkipped),
    "realised-batch normaliser": lambda: seeded(privatiser=RealisedBatch),
    "shuffled batches": lambda: seeded(sampler=ShuffledBatches),
    "reused seed": lambda: seeded(noise=same_seed_every_run),
    "reused seed, every step": lambda: seeded(noise=lambda _mode: StuckNoise()),
    "reused seed, noise and sampling": lambda: seeded(
        noise=same_seed_every_run, sampler=one_seed_for_noise_and_sampling
    ),
    "norm over some layers only": lambda: seeded(privatiser=NormOverSomeLayers),
}
TRAINING_MUTANTS = {
    "ascent from the raw gradient": ascent_from_the_raw_gradient,
    "non-private teacher": non_private_teacher,
    "basis from private gradients": basis_from_private_gradients,
    "clip norm from raw norms": clip_norm_from_raw_norms,
}
