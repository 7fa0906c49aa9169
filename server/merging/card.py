"""The model card of a merge: what went in, how it was merged, and what its privacy claims are and are not."""

from collections.abc import Sequence

from huggingface_hub import ModelCard, ModelCardData

from dpmerge.common.errors import DpmergeError
from dpmerge.common.printable import code
from dpmerge.common.printable import markdown as _escaped
from dpmerge.common.release.format import MERGE, MODULES, PICTURE, Release, by_party
from dpmerge.common.statement.statement import mechanism_from_statement, sentence
from dpmerge.server.merging.gate.compatibility import listed
from dpmerge.server.merging.gate.gate import Entry
from dpmerge.server.merging.registry import METHODS

POST_PROCESSING = (
    "Merging read the released adapters, public data where this card names any, and nothing else. It is "
    "post-processing of what was private already: it costs no privacy, and each party's ε and δ hold for the merged "
    "model as they held for its release."
)
OVERLAP = (
    "A record (or user) that is in the data of several parties is covered by the sum of their budgets only: ε and δ "
    "add up over the parties that hold it. If one of these claims no privacy, it is not covered."
)
UNVERIFIED = "ε and δ are the parties' own statements; `dpmerge verify` recomputes them from a release."


def merge_card(release: Release, entries: Sequence[Entry], *, materialized: bool, pictured: bool) -> str:
    """Return the text of README.md for a merged model.

    Args:
        release: From `as_release`, with its merge record.
        entries: The gate's rows of the adapters that were merged.
        materialized: Whether the folder holds the full model in place of an adapter.
        pictured: Whether the picture of `--explain` lies beside it.

    Raises:
        ValueError: For a release that is no merged model.
    """
    if release.merge is None:
        raise ValueError(f"Expected release of {release.party!r} to be a merged model.")
    private = any(entry.private for entry in entries)
    base = str(release.adapter_config["base_model_name_or_path"])
    data = ModelCardData(
        base_model=base,
        base_model_relation="merge" if materialized else "adapter",
        library_name="transformers" if materialized else "peft",
        tags=["lora", "merge", "dpmerge", *(["differential-privacy"] if private else [])],
    )
    sections = [
        f"# Merged from {_escaped(listed([entry['party'] for entry in release.merge['inputs']]))}",
        _what(base, materialized=materialized),
        "## Inputs",
        _inputs(release, entries),
        "## Privacy",
        _privacy(entries),
        "## How it was merged",
        _how(release),
    ]
    if release.modules:
        sections[3:3] = ["## Heads", _heads(release)]
    if pictured:
        sections.append(f"![Overlap of the parties' changes, and how much of each is noise]({PICTURE})")
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(sections) + "\n"))


def _what(base: str, *, materialized: bool) -> str:
    if materialized:
        opening = 'from transformers import AutoModel\nmodel = AutoModel.from_pretrained("FOLDER")'
        kind = "The full model: the base model with the merged change added to its weights."
    else:
        opening = 'from peft import PeftModel\nmodel = PeftModel.from_pretrained(base, "FOLDER")'
        kind = "One LoRA adapter with exact module names and a scaling of 1."
    return f"{kind} Base model: {_escaped(base)}.\n\n```python\n{opening}\n```"


def _heads(release: Release) -> str:
    parties = ", ".join(_escaped(party) for party in sorted(by_party(release.modules)))
    code = 'from dpmerge.server.merging.party_heads import load_head\nload_head(model, Path("FOLDER"), "PARTY")'
    return (
        f"`{MODULES}` holds a head each of {parties}, trained with the adapter and not merged. Open the base model "
        f"with a head of that party's classes, then:\n\n```python\n{code}\n```"
    )


def _inputs(release: Release, entries: Sequence[Entry]) -> str:
    weights = {entry["party"]: entry["weight"] for entry in (release.merge or {})["inputs"]}
    rows = ["| party | weight | ε | δ | unit | SHA-256 |", "|---|---|---|---|---|---|"]
    for entry in sorted(entries, key=lambda entry: entry.party):
        delta = "–" if entry.target_delta is None else f"{entry.target_delta:g}"
        cells = (_escaped(entry.party), f"{weights[entry.party]:g}", entry.claim, delta, _escaped(entry.unit or "–"))
        rows.append(f"| {' | '.join(cells)} | `{entry.sha256}` |")
    return "\n".join(rows)


def _privacy(entries: Sequence[Entry]) -> str:
    claims = [f"- {_claim(entry)}" for entry in sorted(entries, key=lambda entry: entry.party)]
    return "\n".join([*claims, f"- {POST_PROCESSING}", f"- {OVERLAP}", f"- {UNVERIFIED}"])


def _claim(entry: Entry) -> str:
    party = _escaped(entry.party)
    if entry.private is None:
        return f"{party} came without a privacy statement: nothing is claimed for it, and merging adds no privacy."
    try:
        private = mechanism_from_statement(entry.statement).private
    except DpmergeError:
        private = None
    if private is None or (private and (entry.epsilon is None or entry.target_delta is None)):
        return f"{party} came with an incomplete privacy statement: nothing is claimed for it here."
    return _escaped(sentence(entry.statement))


def _how(release: Release) -> str:
    record = release.merge or {}
    row = METHODS[record["method"]]
    source = f"[arXiv {row.source}](https://arxiv.org/abs/{row.source})" if row.source != "-" else "this project"
    set_values = {key: value for key, value in record["parameters"].items() if value is not None}
    parameters = ", ".join(code(f"{key} = {value}") for key, value in sorted(set_values.items()))
    lines = [
        f"- Method: `{row.name}` ({source}). {row.summary}",
        f"- Parameters: {parameters}",
        f"- Coefficient used on the sum: {record['coefficient']:.6g}",
        f"- Left out by the rank: {record['truncation_error']:.3g} of the merged change, relative",
    ]
    if record.get("statistics_sha256"):
        lines.append(f"- Statistics of public texts, SHA-256 `{record['statistics_sha256']}`")
    for party, file in record.get("validation", {}).get("files", {}).items():
        lines.append(f"- Measured on public data of {_escaped(party)}, SHA-256 `{file['sha256']}`")
    if record["absent"]:
        lines.append(f"- Taken as 0: {', '.join(map(_escaped, record['absent']))}")
    return "\n".join(
        [*lines, f"- `{MERGE}` holds all that is needed to merge the same inputs to the same bytes again."]
    )
