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


def test_ray_starts_alone_whatever_surrounds_it(tmp_path):
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    address = "192.0.2.1:6379"  # reserved for documentation: nobody answers there
    environment = {**os.environ, "RAY_ADDRESS": address, "TMPDIR": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", START], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    num_nodes, ran_there, others, folder = done.stdout.strip().splitlines()[-1].split(maxsplit=3)
    assert (num_nodes, ran_there, others) == ("1", "True", "0")  # no other user gets at Ray's sockets
    assert len(str(Path(folder).parents[1])) <= LONGEST_FOLDER
    assert len(folder) + 64 <= 107  # a session's name and a socket's
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


def test_folders_of_killed_runs_are_removed_and_no_others(monkeypatch, tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    names = (f"ray-{ended.pid}-left", f"ray-{os.getpid()}-mine", "ray-of-somebody", f"ray-{'9' * 30}-odd")
    for name in names:
        (tmp_path / name / "r").mkdir(parents=True)
    (tmp_path / f"ray-{ended.pid}-link").symlink_to(tmp_path / "ray-of-somebody")
    local_ray_module._remove_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*names[1:], f"ray-{ended.pid}-link"}
