"""A simulated federation's id and keys, made once per run folder, so that its signatures are as real as a deployment's.

    keys/federation       the id: a word and random bits
    keys/founded          when, by this machine's clock: deadlines count from here
    keys/keys.toml        whose public key is which, for `dpmerge verify --allow`
    keys/<name>.pem       the secret of each party, and of the server

A deployment has no such folder: every side makes its own key and hands out the public half.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from dpmerge.common.errors import DpmergeError
from dpmerge.common.release.format import new_folder
from dpmerge.common.release.key_list import SERVER, KeyList, load_key_list
from dpmerge.common.release.signing import SigningKey, generate_key, load_key

KEYS = "keys"
KEY_LIST = "keys.toml"


@dataclass(frozen=True)
class SimulatedFederation:
    """The id, the keys and the beginning of a federation on one machine.

    Attributes:
        folder: Where it lies.
        id: What messages and releases name it by.
        created: When, in UTC.
        keys: Public keys by party, and the server's.
        server_key: The server's secret.
    """

    folder: Path
    id: str
    created: datetime
    keys: KeyList
    server_key: SigningKey

    def key_file(self, party: str) -> Path:
        """Return where a party's secret lies."""
        return (self.folder / f"{party}.pem").resolve()


def create_federation(out: Path, parties: Sequence[str]) -> SimulatedFederation:
    """Return the federation of a run's folder, created now unless it was before; complete or not at all.

    Args:
        out: The run's folder.
        parties: Names of all parties.

    Raises:
        DpmergeError: DPM-103 if a party has the server's name; DPM-205 if a key cannot be used.
    """
    if SERVER in parties:
        raise DpmergeError("DPM-103", f"a party is named {SERVER!r}, as the server is in key lists", "rename the party")
    folder = out / KEYS
    if not folder.exists():
        with new_folder(folder) as new:
            public = {name: generate_key(new / f"{name}.pem").public for name in (*parties, SERVER)}
            lines = [f'{name} = "{key}"' for name, key in public.items()]
            (new / KEY_LIST).write_text("\n".join(["schema = 1", "", "[keys]", *lines, ""]))
            (new / "federation").write_text(f"simulation-{secrets.token_hex(16)}")
            (new / "founded").write_text(datetime.now(UTC).isoformat())
    return SimulatedFederation(
        folder=folder,
        id=(folder / "federation").read_text(),
        created=datetime.fromisoformat((folder / "founded").read_text()),
        keys=load_key_list(folder / KEY_LIST),
        server_key=load_key(folder / f"{SERVER}.pem"),
    )
