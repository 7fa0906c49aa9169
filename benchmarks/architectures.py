"""Tiny random models of many architectures: is the split the whole, are gradients and releases right, who is refused?

    python benchmarks/architectures.py [--format json]

Every model has four layers of width 32, random weights, and a tokenizer of bytes; nothing is fetched. Windows are of
four tokens, so that layers of a mixed attention differ on short texts. For each architecture:

* `split`: the largest relative error of the last hidden states, over every place to split, against the model's own
  forward on padded texts;
* `gradients`: the largest relative error of a record's gradient in a batch, through the split, against plain autograd
  on that record alone through the whole model, in float64 where the model can;
* `release`: the largest relative error of class scores of an adapter, on all layers and on all but the first, written
  as a release and opened by PEFT on a fresh model, against those that training sees.
"""

import argparse
import json
import platform
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import transformers as hf
from peft import PeftModel, get_peft_model_state_dict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor, nn
from torch.nn import functional as F

from dpmerge.client.gradients.per_example import PerExampleGradients
from dpmerge.client.party.model import PartyModel, party_model
from dpmerge.common.config.federation import parse_federation, party_plan
from dpmerge.common.encoder.base_model import Base, adapter_config, load_base
from dpmerge.common.encoder.heads import logits
from dpmerge.common.encoder.split_check import Tokens, public_batches, split_error
from dpmerge.common.encoder.split_encoder import SplitEncoder, pad, padded_length, pool, tokenize
from dpmerge.common.errors import DpmergeError
from dpmerge.common.release.format import Release, to_files, write_files

NUM_LAYERS, MAX_LENGTH, VOCABULARY = 4, 32, 260
ERROR_LIMIT = 1e-5
TEXTS = ("fine", "a dull film", "it wears well and is kept", "one of the longest sequels")

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": NUM_LAYERS, "num_attention_heads": 4}
TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
BERT = SIZES | TOKENS | {"max_position_embeddings": 66}
LLAMA = BERT | {"num_key_value_heads": 2}
HEADS = LLAMA | {"head_dim": 8}
WINDOW = {"sliding_window": 4}
MIXED = WINDOW | {"layer_types": ["sliding_attention", "full_attention"] * 2}
DEBERTA = BERT | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}

CONFIGS: dict[str, Callable[[], hf.PreTrainedConfig]] = {
    "BERT": lambda: hf.BertConfig(**BERT),
    "RoBERTa": lambda: hf.RobertaConfig(**BERT),
    "DistilBERT": lambda: hf.DistilBertConfig(dim=32, hidden_dim=48, n_layers=NUM_LAYERS, n_heads=4, **TOKENS),
    "MPNet": lambda: hf.MPNetConfig(**BERT),
    "DeBERTa v2": lambda: hf.DebertaV2Config(**DEBERTA, conv_kernel_size=3, conv_act="gelu"),
    "DeBERTa v3": lambda: hf.DebertaV2Config(
        **DEBERTA, position_buckets=8, share_att_key=True, norm_rel_ebd="layer_norm", position_biased_input=False
    ),
    "ModernBERT": lambda: hf.ModernBertConfig(**BERT, local_attention=4, global_attn_every_n_layers=2),
    "ELECTRA": lambda: hf.ElectraConfig(**BERT, embedding_size=16),
    "ALBERT": lambda: hf.AlbertConfig(**BERT, embedding_size=16),
    "ALBERT, two groups": lambda: hf.AlbertConfig(**BERT, embedding_size=16, num_hidden_groups=2),
    "GPT-2": lambda: hf.GPT2Config(n_embd=32, n_layer=NUM_LAYERS, n_head=4, n_positions=64, **TOKENS),
    "GPT-NeoX": lambda: hf.GPTNeoXConfig(**BERT),
    "GPT-Neo": lambda: hf.GPTNeoConfig(
        hidden_size=32,
        num_layers=NUM_LAYERS,
        num_heads=4,
        attention_types=[[["global", "local"], 2]],
        window_size=4,
        **TOKENS,
    ),
    "BLOOM": lambda: hf.BloomConfig(hidden_size=32, n_layer=NUM_LAYERS, n_head=4, **TOKENS),
    "Falcon": lambda: hf.FalconConfig(**SIZES, **TOKENS),
    "Falcon, ALiBi": lambda: hf.FalconConfig(**SIZES, **TOKENS, alibi=True),
    "Llama": lambda: hf.LlamaConfig(**LLAMA),
    "Qwen 2": lambda: hf.Qwen2Config(**LLAMA, **WINDOW, use_sliding_window=True, max_window_layers=2),
    "Qwen 3": lambda: hf.Qwen3Config(**HEADS),
    "Mistral": lambda: hf.MistralConfig(**HEADS, **WINDOW),
    "Mixtral": lambda: hf.MixtralConfig(**HEADS, num_local_experts=4),
    "Gemma 2": lambda: hf.Gemma2Config(**HEADS, **WINDOW),
    "Gemma 3": lambda: hf.Gemma3TextConfig(**HEADS, **MIXED),
    "Phi-3": lambda: hf.Phi3Config(**LLAMA, **WINDOW),
    "SmolLM 3": lambda: hf.SmolLM3Config(**LLAMA, no_rope_layer_interval=2),
    "Granite": lambda: hf.GraniteConfig(**LLAMA),
    "OLMo": lambda: hf.OlmoConfig(**LLAMA),
    "OLMo 3": lambda: hf.Olmo3Config(**LLAMA, **MIXED),
    "Cohere 2": lambda: hf.Cohere2Config(**HEADS, **MIXED),
    "gpt-oss": lambda: hf.GptOssConfig(**HEADS, **MIXED, num_local_experts=4, num_experts_per_tok=2),
    "LFM 2": lambda: hf.Lfm2Config(**LLAMA, layer_types=["conv", "full_attention"] * 2),
}
"""Family → configuration of a tiny model, made when asked for: some families warn of themselves."""

REFUSED: dict[str, Callable[[], hf.PreTrainedConfig]] = {
    "T5": lambda: hf.T5Config(
        d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=1, **TOKENS
    ),
    "BART": lambda: hf.BartConfig(
        d_model=32, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=48, decoder_ffn_dim=48, **TOKENS
    ),
    "CLIP": lambda: hf.CLIPConfig(
        text_config=BERT, vision_config=SIZES | {"image_size": 8, "patch_size": 4}, projection_dim=16
    ),
    "ViT": lambda: hf.ViTConfig(**SIZES, image_size=8, patch_size=4),
    "XLM": lambda: hf.XLMConfig(emb_dim=32, n_layers=2, n_heads=4, n_words=VOCABULARY, pad_index=1, bos_index=0),
}
"""Encoders with decoders, models that see, and layers kept in several lists."""

FLOAT32_ONLY = {"Mixtral", "gpt-oss", "Gemma 2"}
"""Experts are multiplied in float32 at most; Gemma 2 masks padding by a number that float64 does not absorb."""

FEDERATION = """
[base]
model = {model}
max_length = {max_length}
[lora]
rank = 2
layers = "{layers}"
[training]
expected_batch_size = 8
[[party]]
name = "shop"
task = "product"
epsilon = 1.0
"""


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Largest relative errors of one architecture."""

    split: float
    release: float
    gradients: float

    @property
    def right(self) -> bool:
        """Whether all three are what rounding leaves."""
        return max(self.split, self.release, self.gradients) <= ERROR_LIMIT


def write_model(config: hf.PreTrainedConfig, folder: Path) -> None:
    """Write a random model and a tokenizer whose tokens are bytes."""
    torch.manual_seed(0)
    model = hf.AutoModel.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:  # large enough that every layer and position counts
            nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    words = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    rules = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    rules.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rules.decoder = decoders.ByteLevel()
    rules.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)])
    names = dict(zip(("bos_token", "pad_token", "eos_token", "unk_token"), special, strict=True))
    hf.PreTrainedTokenizerFast(tokenizer_object=rules, **names).save_pretrained(folder)


def tiny_base(name: str, folder: Path) -> Base:
    """Write the tiny model of a family and open it as any base is opened."""
    write_model((CONFIGS | REFUSED)[name](), folder)
    return load_base(str(folder))


def trained(folder: Path, layers: str) -> PartyModel:
    """Return a party's model as it could be after training: LoRA on some layers, no B zero."""
    toml = FEDERATION.format(model=json.dumps(str(folder)), max_length=MAX_LENGTH, layers=layers)
    model = party_model(load_base(str(folder)), party_plan(parse_federation(toml, "architectures.py"), "shop"))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.encoder.named_parameters():
        if ".lora_B." in name:
            nn.init.normal_(parameter, std=0.2, generator=generator)
    return model


def batch_of(base: Base) -> Tokens:
    """Return the texts as one padded batch."""
    rows = tokenize(base, TEXTS, MAX_LENGTH)
    return Tokens(*pad(rows, int(base.tokenizer.pad_token_id), padded_length(max(map(len, rows)), MAX_LENGTH)))


def worst_split(base: Base) -> float:
    """Return the largest error over every place to split."""
    batches = [*public_batches(base, MAX_LENGTH), batch_of(base)]
    return max(split_error(SplitEncoder(base.encoder, base.layers, i), batches) for i in range(base.num_layers))


def worst_gradient(model: PartyModel, dtype: torch.dtype) -> float:
    """Return the largest error of a record's gradient against plain autograd on it alone; the model becomes `dtype`."""
    (ids, mask), classifier = batch_of(model.base), model.classifier.to(dtype)
    head = replace(model.head, weight=model.head.weight.to(dtype))
    labels = torch.arange(len(ids)) % 2
    parameters = [p for p in classifier.parameters() if p.requires_grad]
    oracle = []
    for one in range(len(ids)):
        length = int(mask[one].sum())
        alone = ids[one : one + 1, :length], mask[one : one + 1, :length]
        scores = logits(pool(model.split.whole(*alone), alone[1]), head)
        gradients = torch.autograd.grad(F.cross_entropy(scores, labels[one : one + 1]), parameters)
        oracle.append(torch.cat([g.flatten() for g in gradients]))
    with PerExampleGradients(classifier, max_examples=model.max_examples) as gradients:
        rows = []
        for some in torch.arange(len(ids)).split(min(gradients.capacity, len(ids))):
            hidden = model.split.trunk(ids[some], mask[some])

            def losses(hidden: Tensor = hidden, some: Tensor = some) -> Tensor:
                return F.cross_entropy(classifier(hidden, mask[some]), labels[some], reduction="none")

            rows.append(gradients.compute(losses))
    return float(((torch.cat(rows) - torch.stack(oracle)).norm(dim=1) / torch.stack(oracle).norm(dim=1)).max())


@torch.no_grad()
def release_error(model: PartyModel, folder: Path, layers: str) -> float:
    """Return the largest error of class scores as PEFT gives them from a written release on a fresh model."""
    toml = FEDERATION.format(model=json.dumps(str(folder)), max_length=MAX_LENGTH, layers=layers)
    plan = party_plan(parse_federation(toml, "architectures.py"), "shop")
    fresh = load_base(str(folder))
    adapter = {key: value.clone() for key, value in get_peft_model_state_dict(model.encoder).items()}
    config = adapter_config(fresh, plan.lora)
    release = Release(
        party="shop", adapter=adapter, adapter_config=config, heads={"shop": model.head}, statement={"party": "shop"}
    )
    written = folder / f"release-{layers.replace(':', '-')}"
    write_files(written, to_files(release))
    opened = PeftModel.from_pretrained(fresh.encoder, str(written)).eval()
    ids, mask = batch_of(fresh)
    by_peft = logits(pool(opened(input_ids=ids, attention_mask=mask).last_hidden_state, mask), model.head)
    trained_scores = model.classifier(model.split.trunk(ids, mask), mask)
    return float((by_peft - trained_scores).norm() / by_peft.norm())


def measure(name: str, folder: Path) -> Errors:
    """Measure one architecture."""
    base = tiny_base(name, folder)
    some = f"last:{base.num_layers - 1}" if base.num_layers > 1 else "all"
    models = {layers: trained(folder, layers) for layers in {"all", some}}
    return Errors(
        split=worst_split(base),
        release=max(release_error(model, folder, layers) for layers, model in models.items()),
        gradients=worst_gradient(models[some], torch.float32 if name in FLOAT32_ONLY else torch.float64),
    )


def is_refused(name: str, folder: Path) -> bool:
    """Tell whether the architecture is refused by name when it is opened."""
    try:
        tiny_base(name, folder)
    except DpmergeError as error:
        return error.code == "DPM-204"
    return False


def architectures() -> tuple[dict[str, float], dict[str, Errors]]:
    """Return the benchmark's figures, and every architecture's errors."""
    table = {}
    with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for index, name in enumerate(CONFIGS):
            table[name] = measure(name, Path(scratch) / str(index))
        refused = sum(is_refused(name, Path(scratch) / name) for name in REFUSED)
    figures = {
        "architectures_tried": len(CONFIGS) + len(REFUSED),
        "architectures_right": sum(errors.right for errors in table.values()),
        "architectures_refused": refused,
        "split_error_max": max(errors.split for errors in table.values()),
        "gradient_error_max": max(errors.gradients for errors in table.values()),
        "release_error_max": max(errors.release for errors in table.values()),
    }
    return figures, table


def main() -> None:
    """Print the table, or the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the same: it takes seconds")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures, table = architectures()
    lines = [f"{name:20} {e.split:9.1e} {e.release:9.1e} {e.gradients:9.1e}" for name, e in table.items()]
    print("\n".join(lines), file=sys.stderr)
    if arguments.format == "json":
        environment = {"python": platform.python_version(), "torch": torch.__version__, "transformers": hf.__version__}
        print(json.dumps({"benchmark": "architectures", "figures": figures, "environment": environment}))
    else:
        print("\n".join(f"{key} = {value:.3g}" for key, value in figures.items()))


if __name__ == "__main__":
    main()
