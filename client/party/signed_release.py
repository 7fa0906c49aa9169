"""The outbox: a release with its card and its signature, complete on disk before anything is sent."""

from collections.abc import Mapping

from dpmerge.common.release.format import CONFIG, README, SIGNATURE, STATEMENT
from dpmerge.common.release.manifest import make_manifest, sign_manifest
from dpmerge.common.release.signing import SigningKey
from dpmerge.common.statement.card import release_card
from dpmerge.common.untrusted.parsing import parse_json


def sign_release(files: Mapping[str, bytes], *, federation: str, ledger_head: str, key: SigningKey) -> dict[str, bytes]:
    """Return a release's files with README.md and signature.json; equal arguments give equal bytes.

    Args:
        files: From `to_files`. A card or a signature among them is made anew.
        federation: The federation's own id.
        ledger_head: Head of the ledger after this release's training was reserved.
        key: The party's.
    """
    plain = {name: data for name, data in files.items() if name not in (README, SIGNATURE)}
    draft = make_manifest(plain, federation=federation, ledger_head=ledger_head)
    base_model = parse_json(plain[CONFIG], CONFIG)["base_model_name_or_path"]
    card = release_card(parse_json(plain[STATEMENT], STATEMENT), draft, base_model=base_model)
    with_card = plain | {README: card.encode()}
    manifest = make_manifest(with_card, federation=federation, ledger_head=ledger_head)
    return with_card | {SIGNATURE: sign_manifest(manifest, key)}
