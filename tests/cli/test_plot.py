"""``hilt plot``: where the files go, and what its options change."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hilt import cli
from tests.lines import all_lines, no_line_twice
from tests.observe.toy_run import make_run

pytest.importorskip("PIL")


def run(*words: str) -> Result:
    return CliRunner().invoke(cli.app, ["plot", *words])


def test_one_run_several_and_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    one, two = (make_run(tmp_path / name, seed, episodes=12) for seed, name in enumerate(("one", "two")))
    done = run(str(one))
    assert done.exit_code == 0 and done.stdout.splitlines() == [
        str(one / "plots" / name) for name in ("curves.html", "curves-steps.png", "curves-minutes.png")
    ]
    assert "Success of the last 20 episodes" in (one / "plots" / "curves.html").read_text()
    all_lines(monkeypatch)
    both = run(str(one), str(two), "--smooth", "3")
    assert (
        both.exit_code == 0
        and f"reading runs: 1 of 2, {two}" in no_line_twice(both.stderr)
        and "drawing curves: 3 of 4" in both.stderr
    )
    page = Path("plots/curves.html").read_text()
    assert "2 runs" in page and "Success of the last 3 episodes" in page
    monkeypatch.setattr("hilt.observe.plots.picture", lambda *given: b"")  # which take a while
    assert run(str(one), "--out", "elsewhere").exit_code == 0 and Path("elsewhere/curves.html").exists()
    missing = run(str(tmp_path / "three"))
    assert missing.exit_code == 1 and "is not a run: there is no metrics.jsonl in it" in missing.output
