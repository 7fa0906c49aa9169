"""The release format: same release, same bytes; PEFT opens it; nothing malformed gets through."""

import json
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save
from transformers import BertConfig, BertModel

from dpmerge.common.errors import CODES, DpmergeError
from dpmerge.common.release import format as module
from dpmerge.common.release.format import (
    ADAPTER,
    CONFIG,
    HEAD,
    MERGE,
    MERGED,
    README,
    SIGNATURE,
    STATEMENT,
    Head,
    Release,
    read_release,
    release_files,
    release_from_files,
    release_hash,
    to_files,
    write_files,
    write_release,
)
from dpmerge.common.untrusted.parsing import MAX_HEADER_BYTES, MAX_JSON_BYTES, ReleaseRefused, parse_json, parse_tensors

# peft 0.21 asks transformers 5 for an attribute by its old name
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

Files = dict[str, bytes]


def bert() -> BertModel:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, use_cache=False
    )
    return BertModel(config, add_pooling_layer=False).eval()


@pytest.fixture(scope="module")
def trained() -> PeftModel:
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=["query", "value"], rank_pattern={"1.attention.self.value": 2}
    )
    model = get_peft_model(bert(), config).eval()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(generator=generator)
    return model


@pytest.fixture
def release(trained: PeftModel) -> Release:
    config = trained.peft_config["default"].to_dict() | {"base_model_name_or_path": "minilm-l6", "inference_mode": True}
    head = Head("linear", ("bad", "good"), torch.randn(2, 16), torch.zeros(2), 8.0)
    return Release(
        "shop", get_peft_model_state_dict(trained), config, {"shop": head}, {"party": "shop", "epsilon": 1.5}
    )


def test_peft_opens_the_folder_with_equal_outputs(tmp_path: Path, trained: PeftModel, release: Release) -> None:
    write_release(tmp_path / "shop", release)
    loaded = PeftModel.from_pretrained(bert(), tmp_path / "shop").eval()
    tokens = torch.arange(20).reshape(2, 10)
    expected = trained(tokens).last_hidden_state
    assert torch.equal(loaded(tokens).last_hidden_state, expected)
    assert not torch.equal(bert()(tokens).last_hidden_state, expected)


def test_round_trip_keeps_everything(tmp_path: Path, release: Release) -> None:
    write_release(tmp_path / "deep" / "shop", release)
    back = read_release(tmp_path / "deep" / "shop")
    assert (back.party, back.statement, back.merge) == (release.party, release.statement, None)
    assert back.adapter_config["target_modules"] == ["query", "value"]
    assert back.adapter.keys() == release.adapter.keys()
    assert all(torch.equal(back.adapter[key], release.adapter[key]) for key in back.adapter)
    head, expected = back.heads["shop"], release.heads["shop"]
    assert (head.kind, head.labels, head.feature_scale) == (expected.kind, expected.labels, expected.feature_scale)
    assert torch.equal(head.weight, expected.weight)
    assert head.bias is not None
    assert expected.bias is not None
    assert torch.equal(head.bias, expected.bias)
    assert to_files(back) == release_files(tmp_path / "deep" / "shop")


def test_equal_releases_give_equal_bytes_whatever_the_order(release: Release) -> None:
    config = dict(reversed(release.adapter_config.items()))
    config["target_modules"] = frozenset(["value", "query"])
    # views of one flat vector, as in training
    flat = torch.cat([tensor.flatten() for tensor in release.adapter.values()])
    pieces = flat.split([tensor.numel() for tensor in release.adapter.values()])
    views = {key: piece.view_as(release.adapter[key]) for key, piece in zip(release.adapter, pieces, strict=True)}
    again = Release("shop", dict(reversed(views.items())), config, release.heads, release.statement)
    assert to_files(again) == to_files(release)


def test_hash_covers_every_file_but_card_and_signature(release: Release) -> None:
    files = to_files(release)
    name = release_hash(files)
    assert release_hash(files | {README: b"a", SIGNATURE: b"{}"}) == name
    for file in files:
        assert release_hash(files | {file: files[file] + b" "}) != name


def test_merged_model_has_a_record_in_place_of_a_statement(tmp_path: Path, release: Release) -> None:
    heads = {"shop": release.heads["shop"], "library": release.heads["shop"]}
    write_release(tmp_path / "m", Release(MERGED, release.adapter, release.adapter_config, heads, {}, {"schema": 1}))
    back = read_release(tmp_path / "m")
    assert (back.party, back.statement, back.merge, sorted(back.heads)) == (
        MERGED,
        {},
        {"schema": 1},
        ["library", "shop"],
    )


def test_no_release_without_statement(release: Release) -> None:
    with pytest.raises(ValueError, match="either a statement or a merge record"):
        Release("shop", release.adapter, release.adapter_config, release.heads)


@pytest.mark.parametrize("name", ["/models/x", "./x", "~/x", "C:\\x", "", None])
def test_base_is_named_never_located(release: Release, name: str | None) -> None:
    with pytest.raises(ValueError, match="not a path"):
        Release("shop", {}, {"base_model_name_or_path": name}, release.heads, release.statement)


def test_a_folder_in_use_is_left_alone(tmp_path: Path, release: Release) -> None:
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(DpmergeError, match="DPM-301"):
        write_release(tmp_path, release)
    assert [path.name for path in tmp_path.iterdir()] == ["note.txt"]


def test_a_failed_write_leaves_nothing(tmp_path: Path, release: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_release(tmp_path / "shop", release)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_values_are_never_written(release: Release, value: float) -> None:
    bad = Release(
        "shop", {"a.lora_A.weight": torch.tensor([[value]])}, release.adapter_config, release.heads, release.statement
    )
    with pytest.raises(ValueError, match="finite fp32"):
        to_files(bad)
    with pytest.raises(ValueError, match="JSON"):
        to_files(Release("shop", {}, release.adapter_config, release.heads, {"party": "shop", "epsilon": value}))


def swap(name: str, change: Callable[[bytes], bytes]) -> Callable[[Files], Files]:
    return lambda files: files | {name: change(files[name])}


def with_header(data: bytes, header: object) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + int.from_bytes(data[:8], "little") :]


def nan_head(_: bytes) -> bytes:
    return save({"shop.weight": torch.full((2, 16), float("nan"))}, {"heads": "{}"})


def heads_that_say(**about: object) -> Callable[[Files], Files]:
    heads = {"shop": {"kind": "linear", "labels": ["bad", "good"], "feature_scale": 8.0} | about}
    tensors = {"shop.weight": torch.zeros(2, 16), "shop.bias": torch.zeros(2)}
    return swap(HEAD, lambda _: save(tensors, {"heads": json.dumps(heads)}))


MALFORMED: dict[str, tuple[str, Callable[[Files], Files]]] = {
    "pickle beside safetensors": ("pickle", lambda files: files | {"adapter_model.bin": b""}),
    "pickle under the safetensors name": (
        "header-too-large",
        swap(ADAPTER, lambda _: pickle.dumps({"a": 1} | {"b": [2] * 9})),
    ),
    "traversal": ("path", lambda files: files | {"../evil.json": b"{}"}),
    "absolute": ("path", lambda files: files | {"/etc/evil.json": b"{}"}),
    "hidden": ("path", lambda files: files | {".bashrc": b"{}"}),
    "extra": ("unknown-file", lambda files: files | {"notes.txt": b""}),
    "no statement": ("missing-file", lambda files: {k: v for k, v in files.items() if k != STATEMENT}),
    "no adapter": ("missing-file", lambda files: {k: v for k, v in files.items() if k != ADAPTER}),
    "statement and merge": ("config", lambda files: files | {MERGE: b"{}"}),
    "cut file": ("truncated", swap(ADAPTER, lambda data: data[:-4])),
    "cut header": ("truncated", swap(ADAPTER, lambda data: data[:60])),
    "empty file": ("truncated", swap(ADAPTER, lambda _: b"")),
    "trailing bytes": ("truncated", swap(ADAPTER, lambda data: data + b"x")),
    "header bomb": ("header-too-large", swap(ADAPTER, lambda data: (100 << 20).to_bytes(8, "little") + data[8:])),
    "nested header": ("json", swap(ADAPTER, lambda data: with_header(data, [[[[[[[[]]]]]]]] * 3))),
    "half precision": ("dtype", swap(ADAPTER, lambda _: save({"a": torch.zeros(2, dtype=torch.float16)}))),
    "NaN in head": ("non-finite", swap(HEAD, nan_head)),
    "head without metadata": ("json", swap(HEAD, lambda _: save({"shop.weight": torch.zeros(2, 16)}))),
    "head unknown": ("party-mismatch", swap(HEAD, lambda _: save({}, {"heads": "{}"}))),
    "nested statement": ("json", swap(STATEMENT, lambda _: b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}")),
    "repeated key": ("json", swap(STATEMENT, lambda _: b'{"party": "shop", "party": "library"}')),
    "NaN in JSON": ("json", swap(STATEMENT, lambda _: b'{"party": "shop", "epsilon": NaN}')),
    "not UTF-8": ("json", swap(CONFIG, lambda _: b"\xff\xfe")),
    "list": ("json", swap(CONFIG, lambda _: b"[]")),
    "a feature scale that is no float": ("json", heads_that_say(feature_scale=10**400)),
    "a feature scale in words": ("head", heads_that_say(feature_scale="8.0")),
    "labels in one word": ("head", heads_that_say(labels="ab")),
    "labels that are numbers": ("head", heads_that_say(labels=[0, 1])),
    "huge JSON": ("size", swap(CONFIG, lambda data: data + b" " * MAX_JSON_BYTES)),
    "path of somebody's disk": ("config", swap(CONFIG, lambda data: data.replace(b'"minilm-l6"', b'"/home/x"'))),
    "statement of another party": ("party-mismatch", swap(STATEMENT, lambda data: data.replace(b"shop", b"library"))),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_files_are_refused_with_a_reason(release: Release, case: str) -> None:
    reason, change = MALFORMED[case]
    with pytest.raises(ReleaseRefused) as caught:
        release_from_files(change(to_files(release)), "shop")
    assert caught.value.reason == reason
    assert str(caught.value).startswith("DPM-401: shop: ")


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 4]}, "truncated"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [0, 1 << 40]}, "truncated"),
        ({"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}, "shape"),
        ({"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}, "shape"),
        ({"dtype": "F32", "shape": [0, 2**64 - 1], "data_offsets": [0, 0]}, "json"),
        ({"dtype": "F32", "shape": [0, 2**40, 2**40], "data_offsets": [0, 0]}, "shape"),
        ({"dtype": "F32", "shape": [1] * 65, "data_offsets": [0, 4]}, "shape"),
        ({"dtype": "F32", "shape": 1, "data_offsets": [0, 4]}, "shape"),
        ({"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}, "dtype"),
        ("F32", "dtype"),
    ],
)
def test_lying_headers_are_refused(entry: object, reason: str) -> None:
    with pytest.raises(ReleaseRefused) as caught:
        parse_tensors(with_header(bytes(8) + bytes(4), {"a": entry}), "shop")
    assert caught.value.reason == reason


@pytest.mark.parametrize("metadata", [None, [], "x", {"heads": 1}, {"heads": None}])
def test_metadata_is_an_object_of_texts(metadata: object) -> None:
    with pytest.raises(ReleaseRefused, match="__metadata__") as caught:
        parse_tensors(with_header(bytes(8), {"__metadata__": metadata}), "shop")
    assert caught.value.reason == "json"


@pytest.mark.parametrize(
    "value",
    ["1" + "0" * 400, "-1" + "0" * 400, "1" + "0" * 5000, str(2**53 + 1), "1e309", "-1e999", "1.1e308", r'"\ud800"'],
)
def test_what_no_reader_could_use_later_is_refused(value: str) -> None:
    for text in (f'{{"a": {value}}}', f'{{"a": [{{"b": {value}}}]}}'):
        with pytest.raises(ReleaseRefused) as caught:
            parse_json(text.encode(), "shop")
        assert caught.value.reason == "json"
        str(caught.value).encode()  # a refusal can itself be written down


def test_the_largest_numbers_and_whole_surrogate_pairs_are_read() -> None:
    text = rb'{"int": -9007199254740992, "float": -1e308, "tiny": 1e-400, "text": "\ud83d\ude00 \\ud800"}'
    assert parse_json(text, "x") == {"int": -(2**53), "float": -1e308, "tiny": 0.0, "text": "\U0001f600 \\ud800"}


@pytest.mark.parametrize("start", [b'"', b'{"a": "', b'{"a": "x', b"{"])
@pytest.mark.parametrize("unit", [b'\\"', b"\\", b'"', b'""', b'a\\"'])
def test_a_mebibyte_is_judged_in_no_time(start: bytes, unit: bytes) -> None:
    data = start + unit * ((MAX_JSON_BYTES - len(start)) // len(unit))
    begin = time.process_time()
    with pytest.raises(ReleaseRefused, match="json"):
        parse_json(data, "shop")
    assert time.process_time() - begin < 1.0  # 0.1 s; the square of the length would be hours


def test_header_limit_leaves_room_for_large_models() -> None:
    assert 80 * 7 * 2 * 200 < MAX_HEADER_BYTES


def test_brackets_inside_strings_are_no_nesting() -> None:
    assert parse_json(b'{"a": "[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[\\"["}', "x")


def test_brackets_after_a_string_are_nesting() -> None:
    for string in (b'""', b'"\\\\"', b'"\\""', b'"a\\nb"'):
        with pytest.raises(ReleaseRefused, match="more than 32 deep"):
            parse_json(b'{"a": [' + string + b"," + b"[" * 40 + b"]" * 40 + b"]}", "x")


def test_pickle_folder_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(ReleaseRefused, match="pickle"):
        read_release(tmp_path)
    with pytest.raises(ReleaseRefused, match="no folder"):
        read_release(tmp_path / "absent")


def test_refusal_survives_the_trip_between_processes() -> None:
    error = pickle.loads(pickle.dumps(ReleaseRefused("norm", "shop: too large", "clip")))
    assert (error.reason, error.code, str(error)) == ("norm", "DPM-401", "DPM-401: shop: too large [norm]; clip")
    assert error.code in CODES


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tree", ("a", "b"), torch.zeros(2, 3)), "kind"),
        (("linear", ("a",), torch.zeros(1, 3)), "labels"),
        (("linear", ("a", "a"), torch.zeros(2, 3)), "labels"),
        (("linear", ("a", "b"), torch.zeros(3, 3)), "weight"),
        (("linear", ("a", "b"), torch.zeros(2, 3), torch.zeros(1)), "bias"),
        (("linear", ("a", "b"), torch.zeros(2, 3), None, 0.0), "feature_scale"),
    ],
)
def test_heads_check_themselves(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Head(*arguments)  # type: ignore[arg-type]  # wrong on purpose


def test_every_constant_file_is_in_the_format() -> None:
    assert {
        getattr(module, name)
        for name in ("CONFIG", "ADAPTER", "HEAD", "STATEMENT", "MERGE", "SIGNATURE", "README", "PICTURE", "MODULES")
    } == (module.FILES)


def test_a_card_and_its_picture_are_read_past_and_change_no_hash(tmp_path: Path, release: Release) -> None:
    write_release(tmp_path / "shop", release)
    before = release_hash(to_files(release))
    (tmp_path / "shop" / "README.md").write_text("# a card")
    (tmp_path / "shop" / "explain.svg").write_text("<svg/>")
    assert read_release(tmp_path / "shop").party == "shop"
    assert release_hash(release_files(tmp_path / "shop")) == before


def test_large_modules_of_a_merged_model_are_read_as_they_were_written(tmp_path):
    names = ("adapter_config.json", "adapter_model.safetensors", "head.safetensors", "merge.json")
    files = {"modules.safetensors": bytes(3 << 20)} | dict.fromkeys(names, b"{}")
    write_files(tmp_path / "merged", files)
    assert release_files(tmp_path / "merged") == files
