"""The bench of `hilt serve-policy` at its smallest: every row, with the sides in the tests' own process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("websockets", reason="a policy server needs websockets: pip install 'hilt[serve]'")

from bench import serve, serve_sides
from bench.__main__ import main
from bench.lab import Lab

from hilt.policies.registry import load_policy
from hilt.serving import PolicyServer
from hilt.serving.policy_server import ServerAccess


def test_the_serve_suite_lists_its_rows(capsys: pytest.CaptureFixture[str]):
    assert main(["serve", "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "round_trip: round_trip, round_trip_p99",
        "throughput: throughput, throughput_small",
    ]


def test_serve_rows_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    @contextmanager
    def here(folder: Path) -> Iterator[str]:
        with PolicyServer(load_policy(folder).eval(), access=ServerAccess(port=0)) as server:
            yield server.url

    def side(kind: str, first: Any, number: int, seconds: float, pixels: int) -> dict[str, Any]:
        return getattr(serve_sides, kind)(first, number, 0.05, pixels)

    monkeypatch.setattr(serve, "server", here)
    monkeypatch.setattr(serve, "side", side)
    monkeypatch.setattr(serve, "CLIENTS", 3)
    lab = Lab(tmp_path, quick=True, only=frozenset(["round_trip", "round_trip_p99", "throughput_small"]))
    median, high = serve.GROUPS["round_trip"].run(lab)
    assert median.ours is not None and high.ours is not None and median.spread is not None
    assert 0 < median.spread[0] <= median.ours <= high.ours <= median.spread[1]
    assert median.target == "<= 3 ms" and not median.met and "32 pixels instead of 224" in median.notes
    (small,) = serve.GROUPS["throughput"].run(lab)
    assert small.name == "throughput_small" and small.ours and small.peers[serve.ALONE] > 0 and small.met is None
    assert list(tmp_path.iterdir()) == [], "the policies are removed"
