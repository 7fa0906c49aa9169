"""Read a BERT encoder out of an ONNX file into a folder that `AutoModel.from_pretrained` opens.

torch's exporter keeps the names of biases, norms and embeddings, but folds each linear weight, transposed, into an
anonymous constant `onnx::MatMul_*`. The bias gives it away: the `Add` that consumes `x.bias` also consumes the product,
so the weight of `x` is the second input of that `MatMul`. Nothing is executed or unpickled: ONNX is protobuf.
"""

import json
import shutil
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

TOKENIZER_FILES = ("special_tokens_map.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt")


def named_weights(source: Path) -> dict[str, NDArray[np.float32]]:
    """Collect an ONNX graph's parameters under the names they had in torch.

    Args:
        source: An `.onnx` file written by `torch.onnx.export`.

    Returns:
        Parameter name → array; linear weights are `[out_features, in_features]`, as torch holds them.
    """
    import onnx  # a second of start-up that only a first fetch should pay
    from onnx import numpy_helper

    graph = onnx.load(str(source)).graph
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].HasField("t"):
            constants.setdefault(node.output[0], numpy_helper.to_array(node.attribute[0].t))
    weights = {name: value for name, value in constants.items() if not name.startswith("onnx::")}
    products = {node.output[0]: node for node in graph.node if node.op_type == "MatMul"}
    for node in graph.node:
        if node.op_type != "Add":
            continue
        for bias, product in (node.input, node.input[::-1]):
            if bias.endswith(".bias") and bias in constants and product in products:
                weight = constants[products[product].input[1]]
                weights[bias.removesuffix("bias") + "weight"] = np.ascontiguousarray(weight.T)
    return weights


def bert_from_onnx(source: Path, donor: Path, destination: Path, *, prefix: str, num_layers: int) -> None:
    """Write `config.json`, `model.safetensors` and tokenizer files for the BERT encoder inside `source`.

    The pooler is written as zeros: sentence encoders pool by the mean and were exported without it, and a missing one
    would be filled with random numbers at every load.

    Args:
        source: The ONNX file.
        donor: Folder of a BERT of the same width and vocabulary; its tokenizer files and configuration are copied.
        destination: An existing folder.
        prefix: What stands before `embeddings.` and `encoder.` in the ONNX names.
        num_layers: Number of transformer layers in `source`.
    """
    from safetensors.numpy import save_file

    config = json.loads((donor / "config.json").read_text(encoding="utf-8"))
    config["num_hidden_layers"] = num_layers
    width = config["hidden_size"]
    state = {
        name.removeprefix(prefix): np.asarray(value, dtype=np.float32)
        for name, value in named_weights(source).items()
        if name.startswith((prefix + "embeddings.", prefix + "encoder.")) and not name.endswith("position_ids")
    }
    state["pooler.dense.weight"] = np.zeros((width, width), dtype=np.float32)
    state["pooler.dense.bias"] = np.zeros(width, dtype=np.float32)
    save_file(state, destination / "model.safetensors", metadata={"format": "pt"})
    (destination / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for name in TOKENIZER_FILES:
        shutil.copyfile(donor / name, destination / name)


def convert_minilm_l3(unpacked: Path, donor: Path, destination: Path) -> None:
    """Write paraphrase-MiniLM-L3-v2 with the tokenizer of minilm-l6: both use the vocabulary of bert-base-uncased.

    Args:
        unpacked: Folder with the ONNX file.
        donor: Folder with configuration and tokenizer of minilm-l6.
        destination: Folder that receives the model.
    """
    source = unpacked / "paraphrase-MiniLM-L3-v2.onnx"
    bert_from_onnx(source, donor, destination, prefix="model.0.auto_model.", num_layers=3)
