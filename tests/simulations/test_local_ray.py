"""Our Ray does not look around: other clusters, long folders and another user's folder do not reach it."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dpmerge.common.errors import DpmergeError
from dpmerge.simulations import local_ray as local_ray_module
from dpmerge.simulations.local_ray import LONGEST_FOLDER, local_ray

START = """
import os, ray
from dpmerge.simulations.local_ray import local_ray

with local_ray(1):
    @ray.remote
    def where():
        return ray.get_runtime_context().get_node_id()
    alone = ray.get(where.remote()) == ray.nodes()[0]["NodeID"]
    folder = ray._private.worker._global_node.temp_dir
    print(len(ray.nodes()), alone, os.stat(os.path.dirname(folder)).st_mode & 0o077, folder)
"""


@pytest.mark.parametrize("surroundings", ["an address", "a long folder"])
def test_ray_starts_alone_whatever_surrounds_it(surroundings, tmp_path):
    environment = dict(os.environ)
    if surroundings == "an address":
        environment["RAY_ADDRESS"] = "192.0.2.1:6379"  # reserved for documentation: nobody answers there
    else:
        folder = tmp_path / ("long" * 30)
        folder.mkdir()
        environment["TMPDIR"] = str(folder)
    done = subprocess.run(
        [sys.executable, "-c", START], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    num_nodes, ran_there, others, folder = done.stdout.strip().splitlines()[-1].split(maxsplit=3)
    assert (num_nodes, ran_there, others) == ("1", "True", "0")  # no other user gets at Ray's sockets
    assert len(str(Path(folder).parent)) <= LONGEST_FOLDER
    assert not Path(folder).exists()  # nothing is left


def test_a_failure_is_one_line(monkeypatch):
    def fail(**_settings):
        raise ConnectionError("first line\nsecond line")

    monkeypatch.setattr(local_ray_module.ray, "init", fail)
    with pytest.raises(DpmergeError, match=r"^DPM-304: .*: first line; .*--resume$"), local_ray(1):
        raise AssertionError("it started")


def test_no_short_folder_is_one_line(monkeypatch):
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/" + "x" * LONGEST_FOLDER)
    monkeypatch.setattr(local_ray_module.os, "access", lambda *_: False)
    with pytest.raises(DpmergeError, match=r"^DPM-304: no temporary folder .* TMPDIR"), local_ray(1):
        raise AssertionError("it started")
