"""The file by which `hilt open` finds the page of a running actor."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from hilt.core.errors import StorageError
from hilt.hil.operator_page import OPERATOR_FILE, OperatorPage, PageAnnouncement, operator_pages

URL = "http://127.0.0.1:5000/?token=secret"


@pytest.fixture
def actor(tmp_path: Path) -> Path:
    folder = tmp_path / "actors" / "actor-1"
    folder.mkdir(parents=True)
    return folder


def test_operator_page_is_found_while_its_actor_runs(tmp_path: Path, actor: Path):
    assert operator_pages(tmp_path) == []
    announced = PageAnnouncement(actor, URL)
    assert operator_pages(tmp_path) == [OperatorPage("actor-1", URL)]
    assert stat.S_IMODE((actor / OPERATOR_FILE).stat().st_mode) == 0o600, "the token is for this user alone"
    assert os.listdir(actor) == [OPERATOR_FILE]
    announced.close()
    announced.close()
    assert operator_pages(tmp_path) == [] and os.listdir(actor) == []


def test_operator_page_of_a_killed_actor_counts_as_none(tmp_path: Path, actor: Path, fork: Any):
    process = fork.Process(target=announce_and_die, args=(actor,))
    process.start()
    process.join(120)
    assert process.exitcode == 9 and (actor / OPERATOR_FILE).exists() and operator_pages(tmp_path) == []
    announced = PageAnnouncement(actor, URL)
    assert operator_pages(tmp_path) == [OperatorPage("actor-1", URL)], "the next one takes its place"
    announced.close()


def announce_and_die(folder: Path) -> None:
    PageAnnouncement(folder, URL)
    os._exit(9)


def test_operator_page_lock_is_not_inherited_by_forked_processes(tmp_path: Path, actor: Path):
    announced, (heard, says) = PageAnnouncement(actor, URL), os.pipe()
    if not (child := os.fork()):
        os.write(says, b"1" if announced._fd < 0 else b"0")
        os._exit(0)
    assert os.read(heard, 1) == b"1" and os.waitpid(child, 0)[1] == 0
    assert operator_pages(tmp_path) == [OperatorPage("actor-1", URL)], "it is still the actor's"
    announced.close()
    os.close(heard), os.close(says)


def test_operator_page_file_of_the_next_actor_is_not_removed(tmp_path: Path, actor: Path):
    first = PageAnnouncement(actor, URL)
    second = PageAnnouncement(actor, "http://127.0.0.1:6000/")
    first.close()
    assert operator_pages(tmp_path) == [OperatorPage("actor-1", "http://127.0.0.1:6000/")]
    second.close()


@pytest.mark.parametrize("content", ["", "[]", "{}", json.dumps({"url": URL, "host": "another machine"})])
def test_operator_page_file_that_is_damaged_or_of_another_machine_counts_as_none(
    tmp_path: Path, actor: Path, content: str
):
    announced = PageAnnouncement(actor, URL)
    with open(actor / OPERATOR_FILE, "r+") as file:
        file.truncate()
        file.write(content)
    assert operator_pages(tmp_path) == []
    announced.close()


def test_operator_page_through_a_link_counts_as_none(tmp_path: Path, actor: Path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    announced = PageAnnouncement(elsewhere, URL)
    (actor / OPERATOR_FILE).symlink_to(elsewhere / OPERATOR_FILE)
    assert operator_pages(tmp_path) == []
    announced.close()


def test_operator_page_that_cannot_be_written_is_an_error_with_its_path(tmp_path: Path):
    with pytest.raises(StorageError, match="nowhere"):
        PageAnnouncement(tmp_path / "nowhere", URL)
