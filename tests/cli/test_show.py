"""What commands show: a module that takes long to import is named before, and nothing steers the terminal."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from hilt import cli
from hilt.cli.show import heavy_module, table
from hilt.core.errors import MissingPackageError
from hilt.core.progress import printable
from hilt.replay import Log, Schema


def test_a_slow_import_is_announced_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for name in ("hilt_test_heavy", "hilt_test_ours"):
        (tmp_path / f"{name}.py").write_text("")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    for _ in range(2):
        assert heavy_module("hilt_test_heavy", "a test", "torch", then="hilt_test_ours").__name__ == "hilt_test_heavy"
    assert capsys.readouterr().err == "importing hilt_test_heavy ...\n" and "hilt_test_ours" in sys.modules
    with pytest.raises(MissingPackageError, match=r"pip install 'hilt\[torch\]'"):
        heavy_module("hilt_test_absent", "a test", "torch")


HOSTILE = "\x1b]0;owned\x07\x1b[2Jx\x9b31m\r\u202e[bold]\ud800"
SHOWN = r"\x1b]0;owned\x07\x1b[2Jx\x9b31m\r\u202e[bold]\ud800"


def test_nothing_that_is_shown_steers_the_terminal():
    assert printable(HOSTILE) == SHOWN and printable("a\tb\nc é 漢 ✓") == "a\tb\nc é 漢 ✓"
    console = Console(file=io.StringIO(), width=200)
    console.print(table("name", rows=[[HOSTILE]]))
    assert console.file.getvalue().split("\n")[1].strip() == SHOWN  # type: ignore[attr-defined]


def test_inspect_shows_names_facts_and_senders_of_a_log_as_text(tmp_path: Path):
    column, fact = "a\x1b[31m", "f\x1b]0;x\x07"
    with Log.create(
        tmp_path / "log", Schema.of({column: np.float32(0), "rewards": np.float32(0)}), capacity_steps=100
    ) as log:
        with log.episode(actor="sender\x1b[5m") as episode:
            episode.append({column: np.float32(1), "rewards": np.float32(1), "terminated": True})
            number = episode.trajectory
        log.annotate(number, **{fact: "v\x1b[2J"})
    done = CliRunner().invoke(cli.app, ["data", "inspect", str(tmp_path / "log")], env={"COLUMNS": "200"})
    assert done.exit_code == 0 and "\x1b" not in done.output and "\x07" not in done.output
    assert r"a\x1b[31m" in done.output and r"v\x1b[2J" in done.output
    done = CliRunner().invoke(cli.app, ["data", "inspect", str(tmp_path / "no\x1b[2J")])
    assert done.exit_code == 1 and "\x1b" not in done.output


def test_names_stay_whole_where_sentences_can_be_wrapped(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "60")
    name, sentence = "observations/a_rather_long_name", "one two three four five six seven eight nine ten eleven twelve"
    console = Console(width=60, file=io.StringIO(), record=True)
    console.print(table("column", "meaning", "bytes", rows=[[name, sentence, "405.5 kB"], [name, "short", "1 B"]]))
    text = console.export_text()
    assert text.count(name) == 2 and "405.5 kB" in text and max(map(len, text.splitlines())) <= 60
    assert all(word in text.split() for word in sentence.split())
