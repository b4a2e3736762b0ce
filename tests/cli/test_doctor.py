"""The checks for real, then each with something faked to be absent."""

from __future__ import annotations

import ctypes.util
import errno
import fcntl
import glob
import importlib.util
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hilt import cli
from hilt.cli import doctor
from hilt.cli.doctor import DoctorLine
from hilt.core import platform
from tests.lines import all_lines, no_line_twice

PACKAGES = {**doctor.RENDERING, "hidapi-hidraw": "libhidapi-hidraw0"}


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.app, ["doctor", *map(str, arguments)], env={"COLUMNS": "200"})


def examined(folder: Path) -> dict[str, DoctorLine]:
    return {finding.name: finding for finding in doctor.examine(folder)}


@pytest.fixture(autouse=True)
def no_picture(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """A picture takes a second; one test renders it for real."""
    if "picture" not in request.node.name:
        monkeypatch.setattr(doctor, "_try_picture", lambda: DoctorLine("simulation", "ok", "not tried"))


@pytest.fixture
def no_libraries(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: None)


@pytest.fixture
def apt(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Root with an apt-get that installs all that it is asked for: the commands it got."""
    calls: list[list[str]] = []

    def fake_run(command: list[str], **options: object) -> None:
        assert options["timeout"], "every wait has a deadline"
        calls.append([word for word in command[1:] if not word.startswith(("-", "DPkg"))])

    monkeypatch.setattr(
        ctypes.util, "find_library", lambda name: name if ["install", PACKAGES[name]] in calls else None
    )
    monkeypatch.setattr(subprocess, "run", fake_run)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    return calls


# --- for real
# ---------------------------------------------------------------------------------------------------------------------


def test_this_machine(tmp_path: Path):
    found = examined(tmp_path)
    for name in ("python", "numpy", "crc32c", "zmq", "flock"):
        assert found[name].status != "missing"
    assert found["python"].found == ".".join(map(str, sys.version_info[:3]))
    assert "GB/s" in found["crc32c"].found
    assert " ms for 64 KiB" in found["fsync"].found
    assert list(tmp_path.iterdir()) == []
    assert run(tmp_path).exit_code == 0


def test_every_finding_that_is_not_ok_has_a_cure(tmp_path: Path):
    assert [finding for finding in doctor.examine(tmp_path) if finding.status != "ok" and not finding.cure] == []


def test_a_folder_that_is_not_there_is_a_usage_error(tmp_path: Path):
    result = run(tmp_path / "absent")
    assert result.exit_code == 2
    assert "does not exist" in result.stderr


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no filesystem in memory here")
def test_memory_is_not_a_disk():
    finding = examined(Path("/dev/shm"))["filesystem"]
    assert (finding.status, finding.found) == ("warn", "tmpfs")
    assert "power cut" in finding.cure


# --- rendering, and --fix
# ---------------------------------------------------------------------------------------------------------


def test_a_picture_is_rendered_or_the_reason_and_its_cure_are_told(monkeypatch: pytest.MonkeyPatch):
    assert (doctor._try_picture().status, doctor._try_picture().cure) == ("ok", "")
    monkeypatch.setenv("MUJOCO_GL", "glfw")
    monkeypatch.delenv("DISPLAY", raising=False)
    finding = doctor._try_picture()
    assert (finding.status, finding.package) == ("missing", "libgl1-mesa-dri")
    assert "MUJOCO_GL=glfw" in finding.found and "\n" not in finding.found


def test_absent_rendering_libraries_are_not_required(no_libraries, tmp_path: Path):
    result = run(tmp_path)
    assert result.exit_code == 0
    for package in PACKAGES.values():
        assert f"apt-get install {package}" in result.stdout


def test_fix_installs_what_is_absent_and_looks_again(
    apt: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    all_lines(monkeypatch)
    result = run("--fix", tmp_path)
    assert "examining this machine: 3 of " in no_line_twice(result.stderr)
    assert apt == [["update"], *(["install", package] for package in PACKAGES.values())]
    assert "not found" not in result.stdout


def test_without_fix_nothing_is_installed(apt: list[list[str]], tmp_path: Path):
    run(tmp_path)
    assert apt == []


def test_fix_without_root_says_so(no_libraries, apt: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    result = run("--fix", tmp_path)
    assert apt == []
    assert "needs root and apt-get" in result.stderr


def test_fix_gives_up_on_an_apt_that_hangs(
    no_libraries, apt: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    def hang(command: list[str], **options: object) -> None:
        raise subprocess.TimeoutExpired(command, 300)

    monkeypatch.setattr(subprocess, "run", hang)
    result = run("--fix", tmp_path)
    assert result.exit_code == 0
    assert "given up" in result.stderr


def test_quiet_says_only_what_is_not_ok(no_libraries, tmp_path: Path):
    result = run("--quiet", tmp_path)
    assert "missing" in result.stdout
    assert "numpy" not in result.stdout


def test_quiet_is_silent_when_all_is_well(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(doctor, "CHECKS", [doctor.check_python])
    assert run("--quiet", tmp_path).output == ""


# --- each check, with its trouble
# -------------------------------------------------------------------------------------------------


def test_an_old_python_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(doctor, "OLDEST_PYTHON", (4, 2))
    result = run(tmp_path)
    assert result.exit_code == 1
    assert "install Python 4.2 or newer" in result.stdout


def test_a_zmq_without_keys_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(
        sys.modules, "zmq", types.SimpleNamespace(zmq_version=lambda: "4.3.5", has=lambda capability: False)
    )
    finding = examined(tmp_path)["zmq"]
    assert (finding.status, finding.found) == ("warn", "4.3.5, without CURVE")
    assert "only on this machine" in finding.cure


@pytest.mark.parametrize("package", ["numpy", "crc32c", "zmq"])
def test_an_absent_package_is_required(package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(sys.modules, package, None)
    result = run(tmp_path)
    assert result.exit_code == 1
    assert f"pip install '{'pyzmq' if package == 'zmq' else package}>=" in result.stdout


def test_checksums_in_software_are_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(
        sys.modules, "crc32c", types.SimpleNamespace(hardware_based=False, crc32c=lambda data: time.sleep(0.01))
    )
    finding = examined(tmp_path)["crc32c"]
    assert finding.status == "warn"
    assert finding.found.startswith("in software, 0.")


def test_absent_torch_is_not_required(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "torch", None)
    result = run(tmp_path)
    assert result.exit_code == 0
    assert "pip install 'hilt[torch]'" in result.stdout


def test_absent_packages_of_datasets_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(doctor, "FORMATS", ("json", "no_such_package"))
    finding = examined(tmp_path)["datasets"]
    assert (finding.status, finding.found, finding.required) == ("missing", "no no_such_package", False)
    assert "hilt[formats]" in finding.cure


@pytest.mark.parametrize(
    ("cuda", "available", "status", "found"),
    [
        (None, False, "ok", "9.9, CPU"),
        ("13.0", True, "ok", "9.9, GPU X"),
        ("13.0", False, "warn", "9.9, built for CUDA, sees no GPU"),
    ],
)
def test_torch_and_its_device(
    cuda, available: bool, status: str, found: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    fake = types.SimpleNamespace(
        __version__="9.9",
        version=types.SimpleNamespace(cuda=cuda),
        cuda=types.SimpleNamespace(is_available=lambda: available, get_device_name=lambda: "GPU X"),
    )
    monkeypatch.setitem(sys.modules, "torch", fake)
    finding = examined(tmp_path)["torch"]
    assert (finding.status, finding.found) == (status, found)


def test_a_full_disk_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: types.SimpleNamespace(free=10**9))
    finding = examined(tmp_path)["disk"]
    assert (finding.status, finding.found) == ("warn", "1.0 GB free")


def test_a_network_filesystem_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(doctor, "filesystem", lambda folder: "nfs4")
    assert "prefer a local disk" in examined(tmp_path)["filesystem"].cure


def test_a_folder_that_cannot_be_written_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def refuse(**options: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    result = run(tmp_path)
    assert result.exit_code == 1
    assert "choose a folder that you may write to" in result.stdout


def test_a_filesystem_without_locks_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    result = run(tmp_path)
    assert result.exit_code == 1
    assert "No locks available" in result.stdout


def test_a_slow_disk_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(os, "fsync", lambda fd: time.sleep(0.06))
    finding = examined(tmp_path)["fsync"]
    assert finding.status == "warn"
    assert float(finding.found.split()[0]) >= 60


def test_reads_that_cannot_decline_to_wait_are_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def refuse(*arguments: object) -> int:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(platform, "NATIVE", True)
    monkeypatch.setattr(os, "preadv", refuse)
    assert examined(tmp_path)["non-waiting reads"].status == "warn"
    monkeypatch.setattr(platform, "NON_WAITING_READS", False)
    assert "about a quarter" in examined(tmp_path)["non-waiting reads"].cure
    monkeypatch.setattr(platform, "NATIVE", False)
    assert "non-waiting reads" not in examined(tmp_path), "it is among what is done in its portable form"


@pytest.mark.parametrize(
    ("limit", "status", "cure"),
    [
        ((256, 4096), "warn", "ulimit -n 4096"),
        ((256, -1), "warn", "ulimit -n 65536"),
        ((1024, 4096), "ok", ""),
        ((-1, -1), "ok", ""),
    ],
)
def test_open_files(limit: tuple[int, int], status: str, cure: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limit)
    finding = examined(tmp_path)["open files"]
    assert (finding.status, finding.cure) == (status, cure)


def test_devices_that_may_not_be_read_come_with_their_cure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(glob, "glob", lambda pattern: [pattern.replace("*", "0"), pattern.replace("*", "1")])
    monkeypatch.setattr(os, "access", lambda path, mode: path.endswith("0"))
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: name)
    found = examined(tmp_path)
    assert (
        found["gamepad"].found == "1 of 2 in /dev/input/event* may not be read"
        and "usermod -aG input" in found["gamepad"].cure
    )
    assert found["SpaceMouse"].status == "warn" and "udev/rules.d/70-spacemouse.rules" in found["SpaceMouse"].cure
    monkeypatch.setattr(os, "access", lambda path, mode: True)
    assert examined(tmp_path)["SpaceMouse"].found == "pyspacemouse, 2 of 2 in /dev/hidraw* may be read"


def test_absent_packages_of_devices_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    finding = examined(tmp_path)["gamepad"]
    assert (finding.status, finding.found, finding.required) == ("missing", "no pygame", False)
    assert examined(tmp_path)["page"].found == "no nicegui"
    assert "hilt[teleop]" in finding.cure
