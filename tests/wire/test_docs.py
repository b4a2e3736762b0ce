"""The scripts of docs/wire.md, followed literally: a learner and two actors, each
in a folder of its own with its own keys."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from hilt.replay import Log
from hilt.wire.keys import new_keys
from tests.wire.processes import free_port

PAGE = (Path(__file__).parent.parent.parent / "docs" / "wire.md").read_text()


def script(name: str, ports: tuple[int, int]) -> str:
    found = re.search(rf"\*\*{name}\*\*.*?```python\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None, f"docs/wire.md has no script {name}"
    # others may use the usual ones now
    own_ports = f"make_trainer_config(port_number={ports[0]}, broadcast_port={ports[1]}, "
    return found[1].replace("make_trainer_config(", own_ports)


def test_a_learner_and_two_actors_each_with_only_its_keys(tmp_path: Path):
    new_keys(tmp_path / "all", ["learner", "bench-1", "bench-2"])
    ports, running = (free_port(), free_port()), []
    keys = {"learner": ["learner.key", "learner.pub", "bench-1.pub", "bench-2.pub"]}
    keys |= {actor: ["learner.pub", f"{actor}.key"] for actor in ("bench-1", "bench-2")}
    for machine, files in keys.items():
        folder = tmp_path / machine
        (folder / "keys").mkdir(parents=True)
        for file in files:
            shutil.copy(tmp_path / "all" / file, folder / "keys")
        name = "learner.py" if machine == "learner" else "actor.py"
        (folder / name).write_text(script(name, ports))
        arguments = ["400"] if machine == "learner" else ["127.0.0.1", machine]
        running.append(
            subprocess.Popen([sys.executable, name, *arguments], cwd=folder, stderr=subprocess.PIPE, text=True)
        )
    try:
        for process in running:
            _, said = process.communicate(timeout=600)
            assert process.returncode == 0, said
    finally:
        for process in running:
            process.kill()
    with Log.open(tmp_path / "learner" / "log", "r") as log:
        assert len(log) == 400
        actors = {log.facts.origins()[int(origin)][0] for origin in log.index.entries["origin"]}
        assert actors == {"bench-1", "bench-2"}
