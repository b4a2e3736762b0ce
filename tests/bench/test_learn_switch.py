"""The bench of the switch from offline to online: every run differs in its settings alone, and a row tells the deepest
dip of its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bench import learn_switch
from bench.lab import Lab

from hilt.core.config import build
from hilt.recipes import recipe
from tests.bench.test_learn_methods import Machine


def test_runs_differ_in_what_comes_before_the_first_online_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    machine, made = Machine(monkeypatch), {}
    for name in learn_switch.SETTINGS:
        machine.calls.clear()
        result = learn_switch.measured(Lab(tmp_path, quick=False), name, 2)
        (train,) = [words for words in machine.calls if words[0] == "train"]
        made[name] = {word for word in train if word not in ("--run", "run")}
        assert list(result["curve"]) == [str(update) for update in range(0, 10_001, 1_000)]
        assert all(len(tried) == 100 for tried in result["curve"].values())
        tried = [words[words.index("--checkpoint") + 1] for words in machine.calls if words[0] == "eval"]
        assert tried == list(result["curve"]) and "--split eval" in result["commands"][-1]
        build(recipe("tabletop_peg"), *[word for word in train if "=" in word])
        assert not list(tmp_path.iterdir()), "its folder is removed"
    added = {name: words - made["random"] for name, words in made.items()}
    assert added["random"] == set() and added["offline"] == {"offline_updates=3000"}
    assert added["cql"] - added["cal_ql"] == {"agent.rlpd.calibrated=false"}
    assert added["cal_ql"] - added["offline"] == {"agent.rlpd.conservative=0.05", "agent.rlpd.calibrated=true"}
    assert {"demo_share=0", "training_starts=2000", "agent.rlpd.conservative_updates=3000"} < added["wsrl"]


def test_row_tells_the_deepest_dip_of_the_mean_over_seeds():
    def curve(*successes: int) -> dict[str, Any]:
        rates = {str(1000 * number): [state < count for state in range(100)] for number, count in enumerate(successes)}
        return {"curve": rates, "commands": ["hilt train"]}

    lab = Lab(Path("unused"), quick=False)
    row = learn_switch.row(lab, "cal_ql", [curve(80, 70, 60, 90), curve(80, 50, 80, 90), curve(80, 60, 70, 90)])
    assert row.ours == pytest.approx(-20) and row.spread == (-30, -20) and row.size == ""
    assert "at update 1000; % by update: 0: 80, 1000: 60, 2000: 70, 3000: 90" in row.note
    assert learn_switch.row(lab, "random", [curve(50, 60)]).ours == pytest.approx(10), "no dip, but a rise"
