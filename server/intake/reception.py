"""What happens to a release that arrives: sizes, names, signature, hashes, meaning; to disk; then the receipt.

A party is who holds its key. Whoever sends the bytes, through whatever node or run, proves nothing by it and needs to
prove nothing: the signature covers every file, and for which federation they were made.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from dpmerge.common.config.sections import Late, Loud
from dpmerge.common.errors import DpmergeError
from dpmerge.common.release.format import SIGNATURE, Release, check_names, release_from_files
from dpmerge.common.release.key_list import KeyList
from dpmerge.common.release.manifest import check_signed, manifest_hash
from dpmerge.common.release.receipt import parse_receipt
from dpmerge.common.release.signing import SigningKey
from dpmerge.common.untrusted.parsing import ReleaseRefused
from dpmerge.server.intake.loudness import usual_bound, words
from dpmerge.server.intake.receipts import Receipts
from dpmerge.server.intake.spool import Spool
from dpmerge.server.intake.validation import ReleaseSpec, check_size, validate
from dpmerge.server.merging.adapters.deltas import lora_factors
from dpmerge.server.merging.low_rank.algebra import total_norm


@dataclass(frozen=True)
class Received:
    """A release that is on disk: its hash in the spool, the receipt for its sender, and what is odd about it."""

    sha256: str
    receipt: bytes
    warning: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class Reception:
    """Where one federation's releases are received.

    Attributes:
        federation: The federation's own id; what was signed for another is refused.
        release_spec: Who takes part, and what a release must look like.
        keys: Which key is whose.
        key: The server's, for receipts.
        spool: Where accepted bytes go.
        receipts: Where receipts are kept.
        deadline: When releases are late, with time zone; None for never.
        late: Whether a late release is received all the same, or refused.
        loud: Whether a release far larger than those accepted before it is received with a warning, or refused.
        norms: Party → norm of its accepted weight change, of what this object has received.
    """

    federation: str
    release_spec: ReleaseSpec
    keys: KeyList
    key: SigningKey
    spool: Spool
    receipts: Receipts
    deadline: datetime | None = None
    late: Late = "keep"
    loud: Loud = "warn"
    norms: dict[str, float] = field(default_factory=dict)

    def is_over(self, at: datetime) -> bool:
        """Return whether the deadline has passed."""
        return self.deadline is not None and at > self.deadline

    def receive(self, party: str, files: Mapping[str, bytes], at: datetime) -> Received:
        """Check a release, store it durably, and return the receipt: for the same bytes, the same one for ever.

        The order is that of what a stranger could spend of the server: bytes are counted first, no content is parsed
        before its hash is known to be signed by the party's key, and nothing is promised before it is on disk.

        Args:
            party: Whose the release is said to be.
            files: File name → bytes.
            at: Now, with time zone.

        Raises:
            ReleaseRefused: DPM-401 with a reason.
        """
        check_size(party, files, self.release_spec)
        check_names(files, party)
        manifest = check_signed(
            files, party=party, federation=self.federation, keys=self.keys, at=self._received_at(party, files, at)
        )
        self._check_time(party, files, at)
        if manifest.base_sha256 != self.release_spec.base_sha256:
            problem = f"{party}: {SIGNATURE} is for base model {manifest.base_sha256[:16]}…"
            raise ReleaseRefused("base-mismatch", problem, "train on the federation's base model")
        release = validate(party, files, self.release_spec)
        self.receipts.check(manifest, manifest_hash(files[SIGNATURE]))  # decided before anything is kept
        norm, warning = self._loudness(party, release)
        digest = self.spool.accept(party, files)
        receipt = self.receipts.issue(
            manifest, manifest_sha256=manifest_hash(files[SIGNATURE]), spool_sha256=digest, time=at, key=self.key
        )
        self.norms[party] = norm
        return Received(digest, receipt, warning)

    def is_signed(self, party: str, files: Mapping[str, bytes], at: datetime) -> bool:
        """Return whether a party signed these very files for this federation, whatever else is wrong with them."""
        try:
            check_size(party, files, self.release_spec)
            check_signed(files, party=party, federation=self.federation, keys=self.keys, at=at)
        except Exception:  # a defect of the checks, which these files have found, must not end the run a second time
            return False
        return True

    def _loudness(self, party: str, release: Release) -> tuple[float, str]:
        """Return the norm of a release's weight change, and a warning if it is far above those received before.

        Raises:
            ReleaseRefused: norm, where that is the policy.
        """
        if not self.norms:  # of an earlier process
            self.norms.update((name, _norm(release_from_files(kept))) for name, kept in self.releases()[0].items())
        norm = _norm(release)
        bound = usual_bound([other for name, other in self.norms.items() if name != party])
        if bound is None or norm <= bound:
            return norm, ""
        if self.loud == "refuse" and self.spool.find(party) is None:
            raise ReleaseRefused("norm", words(party, norm, bound), "train with a smaller step")
        return norm, words(party, norm, bound)

    def releases(self) -> tuple[dict[str, dict[str, bytes]], dict[str, DpmergeError]]:
        """Return what is to be merged of the spool, and why the rest is not, each by party.

        Left out is what was damaged on the server's disk or is no longer there, and what a key signed that the key list
        no longer trusts at the time of the receipt. Merging goes on without them.
        """
        kept: dict[str, dict[str, bytes]] = {}
        left_out: dict[str, DpmergeError] = {}
        for party in sorted(self.receipts.parties() - self.spool.parties()):
            fix = "have the party send the same bytes again"
            left_out[party] = ReleaseRefused("corrupted", f"{party} has a receipt and no release in the spool", fix)
        for party in self.spool.to_merge():
            try:
                files = self.spool.release(party)
                at = self._received_at(party, files, datetime.now(UTC))
                check_signed(files, party=party, federation=self.federation, keys=self.keys, at=at)
            except DpmergeError as refusal:
                left_out[party] = refusal
            else:
                kept[party] = files
        return kept, left_out

    def _check_time(self, party: str, files: Mapping[str, bytes], now: datetime) -> None:
        """Refuse what is late where that is the policy; what is in the spool came in time, with a receipt or without.

        Raises:
            ReleaseRefused: late.
        """
        if self.late == "refuse" and self.is_over(now) and not self.spool.holds(party, files):
            problem = f"{party}: received {now:%Y-%m-%d %H:%M} UTC, and the deadline was {self.deadline:%Y-%m-%d %H:%M}"
            raise ReleaseRefused("late", problem, "ask for another federation; this one takes no more releases")

    def _received_at(self, party: str, files: Mapping[str, bytes], now: datetime) -> datetime:
        """Return when this very manifest first came: a key revoked after that does not undo what it signed."""
        stored = self.receipts.find(party)
        if stored is None or SIGNATURE not in files:
            return now
        receipt, _ = parse_receipt(stored, f"stored receipt of {party}")
        return receipt.received_at if receipt.manifest_sha256 == manifest_hash(files[SIGNATURE]) else now


def _norm(release: Release) -> float:
    return total_norm(lora_factors(release.adapter, release.adapter_config, release.party).values())
