"""Public gradients: what fills a batch's shape is none of them."""

from dpmerge.client.gradients.public import public_gradients
from dpmerge.common.encoder.activations import Activations
from dpmerge.common.encoder.base_model import load_base
from dpmerge.common.encoder.split_encoder import SplitEncoder, pool


def test_public_gradients_are_one_for_each_text():
    base = load_base("minilm-l3")
    texts = ["a fine film", "who wrote it ?", "dull"]
    split = SplitEncoder(base.encoder, base.layers, 1)
    data = Activations(base, split, texts, max_length=32)

    class Gradients:
        capacity = 64

        def compute(self, losses):
            return losses()[:, None]

    rows = public_gradients(lambda hidden, mask: pool(split.top(hidden, mask), mask)[:, :3], Gradients(), data, seed=1)
    assert sum(map(len, rows)) == len(texts)
