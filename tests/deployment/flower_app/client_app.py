"""The product's ClientApp, for the party and the folder that the node's configuration names."""

from pathlib import Path

from flwr.app import Context
from points import reach

from dpmerge.client import app as app_module
from dpmerge.client.app import participant_app
from dpmerge.client.party import party as party_module
from dpmerge.common.config.federation import load_federation, party_plan
from dpmerge.common.release.key_list import SERVER
from dpmerge.simulations.flower import SimulatedSite
from dpmerge.simulations.keys import create_federation


def site_of(context: Context) -> SimulatedSite:
    folder, party = (Path(str(context.node_config["folder"])), str(context.node_config["party"]))
    watch(folder, party)
    simulated = create_federation(folder, [])
    return SimulatedSite(
        plan=party_plan(load_federation(folder / "federation.toml"), party),
        folder=folder / "parties" / party,
        num_threads=1,
        federation=simulated.id,
        key_file=simulated.key_file(party),
        server_keys=simulated.keys.keys[SERVER],
    )


def watch(folder: Path, party: str) -> None:
    """Note every training and the step it starts from, keep a checkpoint of every step, and reach points."""
    train, save, put, run_party = (
        party_module.train,
        party_module.save_checkpoint,
        party_module.put,
        app_module.run_party,
    )

    def at(point: str) -> None:
        reach(folder, f"{party}:{point}", host=f"supernode-{party}")

    def noting_train(*arguments, resume_from, **options):
        with (folder / "trained").open("a") as file:
            file.write(f"{party} {resume_from.step if resume_from else 0}\n")
        return train(*arguments, resume_from=resume_from, **options)

    def noted_save(path, state, binding):
        save(path, state, binding)
        at(f"step-{state.step}")

    def noted_put(*arguments):
        put(*arguments)
        at("outbox")

    def noted_run_party(*arguments, **options):
        files = run_party(*arguments, **options)
        at("upload")
        return files

    party_module.CHECKPOINT_EVERY_STEPS = 1
    party_module.train, party_module.save_checkpoint, party_module.put = noting_train, noted_save, noted_put
    app_module.run_party = noted_run_party


app = participant_app(site_of)
