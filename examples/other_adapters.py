"""Layer norms, IA³ and a prefix trained privately: the general path, for adapters that are not LoRA.

    python examples/other_adapters.py

Four parts do it. `calibrate` finds the least noise for a budget, `PoissonSampler` draws each step's records,
`PerExampleGradients` makes one gradient per record of whatever is trainable, and `Privatiser` clips, sums and adds the
noise. What `finish` returns is private already, so any torch optimizer may follow.
"""

import warnings

import torch
from peft import IA3Config, PrefixTuningConfig, get_peft_model
from torch import Tensor, nn

from dpmerge.client.gradients.per_example import PerExampleGradients
from dpmerge.client.privacy.noise import SecureNoise
from dpmerge.client.privacy.privatiser import Privatiser
from dpmerge.client.privacy.sampling import PoissonSampler
from dpmerge.common.data.records import Records
from dpmerge.common.data.tasks import TASKS, load_task
from dpmerge.common.encoder.base_model import Base, load_base
from dpmerge.common.encoder.heads import label_text_head, logits
from dpmerge.common.encoder.split_encoder import pad, pool, tokenize
from dpmerge.common.privacy.accounting import epsilon_pld
from dpmerge.common.privacy.calibration import calibrate

TASK, MODEL, NUM_TOKENS = "product", "minilm-l3", 16


def layer_norms(encoder: nn.Module) -> nn.Module:
    """Train the encoder's own layer norms."""
    for name, parameter in encoder.named_parameters():
        parameter.requires_grad_("LayerNorm" in name)
    return encoder


def ia3(encoder: nn.Module) -> nn.Module:
    """Train one factor for each key, value and feed-forward channel."""
    targets = ["key", "value", "intermediate.dense"]
    return get_peft_model(encoder, IA3Config(target_modules=targets, feedforward_modules=targets[2:]))


def prefix(encoder: nn.Module) -> nn.Module:
    """Train two keys and values before every text in each layer, from zero."""
    model = get_peft_model(encoder, PrefixTuningConfig(task_type="FEATURE_EXTRACTION", num_virtual_tokens=2))
    for parameter in model.prompt_encoder.parameters():
        nn.init.zeros_(parameter)
    return model


# Learning rate and clip norm are public constants; for data that is private, choose them on data that is not.
ADAPTERS = {"layer norms": (layer_norms, 4e-3, 1.0), "IA³": (ia3, 3e-2, 1.0), "prefix": (prefix, 0.2, 0.1)}


def encode(base: Base, records: Records) -> tuple[Tensor, Tensor, Tensor]:
    """Return token ids, mask (both [N, NUM_TOKENS]) and labels [N]; all texts are padded alike."""
    ids, mask = pad(tokenize(base, records.texts, NUM_TOKENS), base.tokenizer.pad_token_id, NUM_TOKENS)
    return ids, mask, torch.tensor(records.labels)


def run(adapter: str, *, epsilon: float = 3.0, num_steps: int = 30) -> tuple[float, float, float]:
    """Train one kind of adapter; return ε as accounted, and the accuracy on public test records before and after."""
    attach, learning_rate, l2_clip_norm = ADAPTERS[adapter]
    base, data = load_base(MODEL), load_task(TASK)
    ids, mask, labels = encode(base, data.train)
    test_ids, test_mask, test_labels = encode(base, data.test)
    head = label_text_head(base, TASKS[TASK].labels)  # frozen, from public descriptions: costs no privacy
    model = attach(base.encoder).eval()

    def scores(ids: Tensor, mask: Tensor) -> Tensor:
        return logits(pool(model(input_ids=ids, attention_mask=mask).last_hidden_state, mask), head)

    @torch.no_grad()
    def accuracy() -> float:
        return (scores(test_ids, test_mask).argmax(1) == test_labels).float().mean().item()

    before = accuracy()
    with PerExampleGradients(model, max_examples=64) as gradients:
        mechanism = calibrate(
            target_epsilon=epsilon,
            target_delta=1e-5,
            population=TASKS[TASK].population,  # declared and public, never counted
            expected_batch_size=96,
            num_steps=num_steps,
            l2_clip_norm=l2_clip_norm,
            noise="secure",
            num_coordinates=gradients.theta.numel(),
        )
        sampler = PoissonSampler(mechanism.sampling_prob, len(labels))
        privatiser = Privatiser(mechanism, gradients.theta.numel(), SecureNoise())
        optimizer = torch.optim.Adam([gradients.theta], lr=learning_rate)
        for _ in range(mechanism.num_steps):
            sample = sampler.sample()
            for part in sample.split(gradients.capacity) if len(sample) else ():  # an empty sample still gets its noise
                rows = gradients.compute(
                    lambda part=part: nn.functional.cross_entropy(
                        scores(ids[part], mask[part]), labels[part], reduction="none"
                    )
                )
                privatiser.accumulate(rows)
            gradients.theta.grad = privatiser.finish()
            optimizer.step()
    return epsilon_pld(mechanism), before, accuracy()


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of transformers and PEFT, about their own deprecated names
    for name in ADAPTERS:
        print("{}: ε = {:.3f}, accuracy {:.3f}, then {:.3f}".format(name, *run(name)), flush=True)
