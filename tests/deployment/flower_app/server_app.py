"""The product's ServerApp, for the folder that the run's configuration names."""

import threading
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from points import reach

from dpmerge.common.config.federation import load_federation, party_plan
from dpmerge.common.encoder.base_model import load_base
from dpmerge.common.public.terms import terms_hash
from dpmerge.common.release.wire import Terms
from dpmerge.server import app as app_module
from dpmerge.server.app import Collection, server_app
from dpmerge.server.intake.receipts import Receipts
from dpmerge.server.intake.reception import Reception
from dpmerge.server.intake.release_spec import release_spec_of
from dpmerge.server.intake.spool import Spool
from dpmerge.simulations.keys import create_federation

HOST = "superlink"

app_module.VERDICT_SECONDS = 600  # a slow machine needs more than 30 s to start the process that takes a receipt

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    folder = Path(str(context.run_config["folder"]))
    federation, simulated = load_federation(folder / "federation.toml"), create_federation(folder, [])
    plans = [party_plan(federation, party.name) for party in federation.parties]
    base = load_base(plans[0].base.model)
    reception = Reception(
        federation=simulated.id,
        release_spec=release_spec_of(base, plans),
        keys=simulated.keys,
        key=simulated.server_key,
        spool=WatchedSpool(folder),
        receipts=WatchedReceipts(folder),
    )
    collection = Collection()
    terms = Terms(terms_hash(plans[0], base.sha256), simulated.id)
    product = server_app(terms, reception, collection, num_parties=len(plans), stop=threading.Event())
    product(grid, context)
    (folder / f"collection-{context.run_id}").write_text(repr(collection))


class WatchedSpool(Spool):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "spool")
        self.folder = folder

    def accept(self, party, files):
        reach(self.folder, f"{party}:spool", HOST)
        return super().accept(party, files)


class WatchedReceipts(Receipts):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "receipts")
        self.folder = folder

    def issue(self, manifest, **options):
        reach(self.folder, f"{manifest.party}:receipt", HOST)
        receipt = super().issue(manifest, **options)
        reach(self.folder, f"{manifest.party}:verdict", HOST)
        return receipt
