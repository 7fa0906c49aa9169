"""What training in a subspace adds to a private step: both trainings take turns in one process."""

import time
from collections.abc import Mapping
from typing import Any

import torch
from trained_adapters import BASE, plan_of

from dpmerge.client.gradients.per_example import PerExampleGradients
from dpmerge.client.party.calibration import make_mechanism
from dpmerge.client.party.model import party_model
from dpmerge.client.party.party import lora_views
from dpmerge.client.party.trained_space import trained_space
from dpmerge.client.privacy.noise import FastNoise
from dpmerge.client.privacy.sampling import PoissonSampler
from dpmerge.client.training.train import PrivateData, train
from dpmerge.common.data.tasks import load_task
from dpmerge.common.encoder.activations import Activations
from dpmerge.common.encoder.base_model import load_base

TASK = "trec6"
NUM_RECORDS = 256  # of which an expected 128 are drawn per step, as many as in the demo
NUM_STEPS = 4


class TimedTraining:
    """The same few steps again and again, in given coordinates."""

    def __init__(self, training: Mapping[str, Any]) -> None:
        """Attach LoRA to a model of its own, and encode the records."""
        self._plan = plan_of(TASK, 8.0, 0, {**training, "num_steps": NUM_STEPS})
        base, records = load_base(BASE), load_task(TASK).train
        self._model = party_model(base, self._plan)
        data = Activations(base, self._model.split, records.texts[:NUM_RECORDS], max_length=self._plan.base.max_length)
        self._data = PrivateData(data, torch.tensor(records.labels[:NUM_RECORDS]))
        self._gradients = PerExampleGradients(
            self._model.classifier, max_examples=self._plan.training.expected_batch_size
        )
        space = trained_space(self._plan, self._model, self._gradients, None)
        self._space, self._start = space.coordinates, self._gradients.theta.clone()
        self._mechanism = make_mechanism(self._plan.privacy, self._plan.training, self._space.vector.numel())

    def seconds(self) -> float:
        """Return processor seconds of all steps but the first, which warms up."""
        times: list[float] = []

        def after_step(_step: int, _capture: object) -> None:
            times.append(time.process_time())

        self._space.vector.zero_()
        self._gradients.theta.copy_(self._start)
        q = self._plan.training.expected_batch_size / NUM_RECORDS
        train(
            self._model.classifier,
            self._data,
            self._gradients,
            lora_views(self._gradients, self._model.encoder),
            self._mechanism,
            self._plan.training,
            PoissonSampler(q, NUM_RECORDS, seed=0),
            FastNoise(0),
            coordinates=self._space,
            after_step=after_step,
        )
        return times[-1] - times[1]


def step_time_over_full(k: int, *, turns: int = 9) -> float:
    """Return the time of a step in k directions, random ones here, over one in all coordinates.

    Both draw the same records in every turn, and each counts with its fastest turn.
    """
    trainings = [TimedTraining({}), TimedTraining({"subspace": {"k": k, "public": "none"}})]
    fastest = [min(times) for times in zip(*[[one.seconds() for one in trainings] for _ in range(turns)], strict=True)]
    return fastest[1] / fastest[0]
