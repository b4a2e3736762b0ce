"""``hilt doctor``: what this machine has, what it lacks, and the cure.

Every answer comes from trying: a lock is taken, bytes are synced, a checksum is timed. A finding is *ok*, *portable*
(it is done in another way than on Linux, at the cost that is named), *warn* (it works, but slower or with less), or
*missing*; the exit code is 1 only when something is missing that Hilt cannot work without.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import fcntl
import glob
import importlib
import importlib.util
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from hilt.cli.show import PROGRESS, heavy_module
from hilt.cli.train_options import option_values
from hilt.core import platform
from hilt.core.children import run_code
from hilt.core.errors import ConfigError, CorruptError
from hilt.core.platform import filesystem

app = typer.Typer(add_completion=False)

OLDEST_PYTHON = (3, 10)

Status = Literal["ok", "portable", "warn", "missing"]
QUIET = ("ok", "portable")
"""What needs no attention"""


@dataclass(frozen=True)
class DoctorLine:
    """One line of the table."""

    name: str
    status: Status
    found: str
    cure: str = ""
    required: bool = False
    """Whether Hilt cannot work without it."""
    package: str = ""
    """The Debian package that cures it, if one does."""


@app.command()
def doctor(
    folder: Annotated[
        Path, typer.Argument(help="Where experience will be stored.", exists=True, file_okay=False)
    ] = Path("."),
    fix: Annotated[
        bool, typer.Option("--fix", help="Install missing Debian packages, where it may (root, apt-get).")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Say only what is missing or may need attention.")] = False,
    calibrate: Annotated[
        bool,
        typer.Option("--calibrate", help="Measure this machine, for the times that `train --dry-run` shows."),
    ] = False,
    device: Annotated[str, typer.Option("--device", help="With --calibrate: what is measured, cpu or cuda.")] = "cpu",
    task: Annotated[
        list[str] | None,
        typer.Option("--task", help="With --calibrate: a simulator to measure, such as tabletop/reach."),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-o", metavar="NAME=VALUE", help="An option of the tasks.", show_default=False),
    ] = None,
) -> None:
    """Check that this machine has what Hilt needs, and print how to install what is missing."""
    if calibrate:
        measure_machine(device, task or [], option_values(option))
        return
    if task or option or device != "cpu":
        raise ConfigError("--device, --task and --option are of --calibrate: add it, or leave them out.")
    findings = examine(folder)
    packages = [finding.package for finding in findings if finding.status not in QUIET and finding.package]
    if fix and packages:
        install(packages)
        findings = examine(folder)
    show([finding for finding in findings if not (quiet and finding.status in QUIET)])
    if any(finding.status == "missing" and finding.required for finding in findings):
        raise typer.Exit(1)


def measure_machine(device: str, tasks: list[str], options: dict[str, Any]) -> None:
    """Measures the machine if that has not been done, or no task is named; then each task; and keeps it in a file."""
    heavy_module("torch", "hilt doctor --calibrate", "torch")
    from hilt.policies.cost.machine_speed import Calibration, measure
    from hilt.vla.plan.step_time import measure_simulator

    known = None
    with contextlib.suppress(CorruptError):  # it is measured again
        known = Calibration.load(device)
    if known is None or not tasks:
        with PROGRESS.phases() as report:
            found = measure(device, report)
        known = found if known is None else replace(found, simulators=known.simulators)
    for task in tasks:
        with PROGRESS.phase(f"measuring {task}"):
            known = known.with_simulator(*measure_simulator(task, options, device=device))
    typer.echo(f"{known.device}: {known.machine}; load of the machine before {known.machine_load:.1f}")
    typer.echo(f"products up to {known.product_rate / 1e9:,.1f} Gflop/s, memory {known.bandwidth / 1e9:,.1f} GB/s")
    for layer in known.layers:
        rate = layer.rows / layer.measured_s
        sizes = f"width {layer.width}, {layer.rows} rows of {layer.tokens} tokens"
        typer.echo(f"{layer.kind} layer of {sizes}, {layer.way}: {rate:,.0f} rows/s")
    for key, one in known.simulators.items():
        rate, observe, start = 1 / max(one.step_s, 1e-9), 1e3 * one.observe_s, 1e3 * one.start_s
        typer.echo(f"{key}: {rate:,.0f} steps/s, {observe:.1f} ms to observe, {start:.1f} ms to start")
    typer.echo(f"kept in {known.save()}")


def examine(folder: Path) -> list[DoctorLine]:
    found: list[DoctorLine] = []
    with PROGRESS.phases() as report:
        for number, check in enumerate(CHECKS):
            report(
                "examining this machine", number, len(CHECKS), check.__name__.removeprefix("check_").replace("_", " ")
            )
            found += check(folder)
    return found


def show(findings: list[DoctorLine]) -> None:
    if not findings:
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("", "", "found", "cure, or cost", box=None, pad_edge=False)
    color = {"ok": "green", "portable": "cyan", "warn": "yellow", "missing": "red"}
    for finding in findings:
        # Text, because rich would take the brackets of 'hilt[torch]' for a style
        table.add_row(
            Text(finding.status, color[finding.status]), Text(finding.name), Text(finding.found), Text(finding.cure)
        )
    Console().print(table)


def install(packages: list[str]) -> None:
    """One package at a time: a release of Debian that lacks one still gets the others.
    What failed shows in the next examination."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        typer.echo("cannot install packages: that needs root and apt-get", err=True)
        return
    apt = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=60"]
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for arguments in [["update"], *(["install", "-y", "--no-install-recommends", package] for package in packages)]:
        typer.echo(f"apt-get {' '.join(arguments)}", err=True)
        try:
            with PROGRESS.phase(f"apt-get {' '.join(arguments)}"):
                subprocess.run([*apt, *arguments], env=environment, stdout=subprocess.DEVNULL, timeout=300)
        except subprocess.TimeoutExpired:
            typer.echo(f"apt-get {arguments[0]} took over 300 s: given up", err=True)
            return


# --- the checks: each takes the folder and yields findings
# ------------------------------------------------------------------------


def check_python(folder: Path) -> Iterator[DoctorLine]:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info >= OLDEST_PYTHON:
        yield DoctorLine("python", "ok", version)
    else:
        yield DoctorLine(
            "python",
            "missing",
            version,
            f"install Python {OLDEST_PYTHON[0]}.{OLDEST_PYTHON[1]} or newer",
            required=True,
        )


def check_system(folder: Path) -> Iterator[DoctorLine]:
    """What is done here in its portable form, and what that costs; `docs/core.md` has the whole table."""
    system = os.uname()
    portable = platform.in_portable_form()
    forced = f", forced by {platform.VARIABLE}" if platform.FORCED else ""
    how = (
        f"{len(portable)} of {len(platform.FACILITIES)} facilities in their portable form{forced}"
        if portable
        else "all native"
    )
    yield DoctorLine("system", "ok", f"{system.sysname} {system.machine}: {how}")
    for facility in portable:
        yield DoctorLine(
            facility.name, "portable", f"{facility.portable} (Linux: {facility.linux})", f"cost: {facility.cost}"
        )


def check_numpy(folder: Path) -> Iterator[DoctorLine]:
    try:
        numpy = importlib.import_module("numpy")
    except ImportError as error:
        yield DoctorLine("numpy", "missing", str(error), "pip install 'numpy>=1.26'", required=True)
    else:
        yield DoctorLine("numpy", "ok", numpy.__version__)


def check_crc32c(folder: Path) -> Iterator[DoctorLine]:
    try:
        crc32c = importlib.import_module("crc32c")
    except ImportError as error:
        yield DoctorLine("crc32c", "missing", str(error), "pip install 'crc32c>=2.4'", required=True)
        return
    data = b"\1" * (8 << 20)  # not zeros, which the kernel would map to one page
    start = time.perf_counter()
    crc32c.crc32c(data)
    speed = f"{len(data) / (time.perf_counter() - start) / 1e9:.1f} GB/s"
    if crc32c.hardware_based:
        yield DoctorLine("crc32c", "ok", f"in hardware, {speed}")
    else:
        yield DoctorLine(
            "crc32c", "warn", f"in software, {speed}", "a processor with SSE4.2 or ARMv8 CRC makes writes faster"
        )


def check_zmq(folder: Path) -> Iterator[DoctorLine]:
    try:
        zmq = importlib.import_module("zmq")
    except ImportError as error:
        yield DoctorLine("zmq", "missing", str(error), "pip install 'pyzmq>=26.0'", required=True)
        return
    if zmq.has("curve"):
        yield DoctorLine("zmq", "ok", f"{zmq.zmq_version()}, with keys")
    else:
        yield DoctorLine(
            "zmq",
            "warn",
            f"{zmq.zmq_version()}, without CURVE",
            "learner and actors only on this machine; pip's pyzmq has it",
        )


def check_torch(folder: Path) -> Iterator[DoctorLine]:
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:  # OSError: a shared library of it that does not load
        yield DoctorLine(
            "torch", "missing", str(error), "pip install 'hilt[torch]' (not needed on the robot's computer)"
        )
        return
    if torch.cuda.is_available():
        yield DoctorLine("torch", "ok", f"{torch.__version__}, {torch.cuda.get_device_name()}")
    elif torch.version.cuda is None:
        yield DoctorLine("torch", "ok", f"{torch.__version__}, CPU")
    else:
        yield DoctorLine(
            "torch", "warn", f"{torch.__version__}, built for CUDA, sees no GPU", "nvidia-smi; or a CPU build of torch"
        )


def check_formats(folder: Path) -> Iterator[DoctorLine]:
    absent = [name for name in FORMATS if importlib.util.find_spec(name) is None]
    if absent:
        yield DoctorLine(
            "datasets", "missing", f"no {', '.join(absent)}", "pip install 'hilt[formats]' (for hilt data convert)"
        )
    else:
        yield DoctorLine("datasets", "ok", ", ".join(FORMATS))


def check_disk(folder: Path) -> Iterator[DoctorLine]:
    free = shutil.disk_usage(folder).free / 1e9
    if free >= 5:
        yield DoctorLine("disk", "ok", f"{free:.0f} GB free")
    else:
        yield DoctorLine(
            "disk", "warn", f"{free:.1f} GB free", "20,000 transitions with two small images take 2 GB: make room"
        )
    kind = filesystem(folder)
    if kind in MEMORY_FILESYSTEMS:
        yield DoctorLine("filesystem", "warn", kind, "this is memory: nothing here survives a power cut, synced or not")
    elif kind.startswith(NETWORK_FILESYSTEMS):
        yield DoctorLine(
            "filesystem", "warn", kind, "over a network, locks may not reach other machines: prefer a local disk"
        )
    else:
        yield DoctorLine("filesystem", "ok", kind)


def check_file_calls(folder: Path) -> Iterator[DoctorLine]:
    """Locks, syncs and non-waiting reads, tried on a temporary file in the folder."""
    try:
        file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed by the with below
    except OSError as error:
        yield DoctorLine(
            "writing", "missing", str(error), "choose a folder that you may write to: hilt doctor FOLDER", required=True
        )
        return
    with file:
        yield _try_lock(file.fileno())
        yield _try_sync(file.fileno())
        if platform.NATIVE:  # otherwise `check_system` has reported it
            yield _try_nowait(file.fileno())


def _try_lock(fd: int) -> DoctorLine:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return DoctorLine(
            "flock", "missing", str(error), "use another filesystem: a lock keeps out a second writer", required=True
        )
    return DoctorLine("flock", "ok", "locks are taken")


def _try_sync(fd: int) -> DoctorLine:
    delays = []
    for _ in range(5):
        os.write(fd, bytes(1 << 16))
        start = time.perf_counter()
        platform.sync(fd)
        delays.append((time.perf_counter() - start) * 1e3)
    found = f"{statistics.median(delays):.1f} ms for 64 KiB"
    if statistics.median(delays) < 50:
        return DoctorLine("fsync", "ok", found)
    return DoctorLine(
        "fsync", "warn", found, "power-safe writes wait this long: sync per episode, or use a faster disk"
    )


def _try_nowait(fd: int) -> DoctorLine:
    """Whether a read can decline to wait for the disk, which is how sampling tells cold data from data in memory."""
    os.pwrite(fd, bytes(4096), 0)
    if platform.is_cached(fd, 0) is None:
        cure = (
            "works, but cold data is sampled at the speed of a memory map, about a quarter: use "
            "ext4, xfs or btrfs on Linux"
        )
        return DoctorLine("non-waiting reads", "warn", "not known to this file system or kernel", cure)
    return DoctorLine("non-waiting reads", "ok", "RWF_NOWAIT works")


def check_rendering(folder: Path) -> Iterator[DoctorLine]:
    for library, package in RENDERING.items() if platform.LINUX else ():
        found = ctypes.util.find_library(library)
        if found:
            yield DoctorLine(f"lib{library}, to render", "ok", found)
        else:
            yield DoctorLine(
                f"lib{library}, to render", "missing", "not found", f"apt-get install {package}", package=package
            )
    yield _try_picture()


def _try_picture() -> DoctorLine:
    if importlib.util.find_spec("mujoco") is None:
        return DoctorLine("simulation", "missing", "no mujoco", "pip install 'hilt[sim]' (for the tabletop tasks)")
    program = run_code("from hilt.envs.tabletop.world import World; World().render()")
    tried = subprocess.run(program, capture_output=True, text=True, timeout=120)
    if tried.returncode == 0:
        return DoctorLine("simulation", "ok", f"renders with MUJOCO_GL={platform.renderer_name()}")
    why = [f"ended with code {tried.returncode}", *tried.stderr.strip().splitlines()][-1]
    if not platform.LINUX:
        return DoctorLine("simulation", "missing", why, "MUJOCO_GL=disable simulates without pictures")
    return DoctorLine("simulation", "missing", why.partition("): ")[0], f"apt-get install {DRIVERS}", package=DRIVERS)


TELEOP = "pip install 'hilt[teleop]' (for hilt record)"


def check_devices(folder: Path) -> Iterator[DoctorLine]:
    """What a person needs to take over: the packages, and the permission to read what is plugged in."""
    try:
        from hilt.teleop import gamepad, spacemouse
    except ImportError:
        return  # without numpy, which has its own line
    absent = importlib.util.find_spec("nicegui") is None
    yield DoctorLine("page", "missing", "no nicegui", TELEOP) if absent else DoctorLine("page", "ok", "nicegui")
    for name, package, nodes, library, cure in (
        ("gamepad", "pygame", "/dev/input/event*", "", gamepad.PERMISSION),
        ("SpaceMouse", "pyspacemouse", "/dev/hidraw*", spacemouse.LIBRARY, spacemouse.PERMISSION),
    ):
        there = glob.glob(nodes) if platform.DEVICE_NODES else []
        closed = [node for node in there if not os.access(node, os.R_OK)]
        if importlib.util.find_spec(package) is None:
            yield DoctorLine(name, "missing", f"no {package}", TELEOP)
        elif library and ctypes.util.find_library(library) is None:
            yield DoctorLine(
                name,
                "missing",
                f"no lib{library}",
                spacemouse.INSTALL,
                package=platform.LINUX * spacemouse.INSTALL.split()[-1],
            )
        elif closed:
            yield DoctorLine(
                name,
                "warn",
                f"{len(closed)} of {len(there)} in {nodes} may not be read",
                f"if yours is among them: {cure}",
            )
        else:
            readable = f", {len(there)} of {len(there)} in {nodes} may be read" if platform.DEVICE_NODES else ""
            yield DoctorLine(name, "ok", f"{package}{readable}")


def check_open_files(folder: Path) -> Iterator[DoctorLine]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        yield DoctorLine("open files", "ok", "no limit")
    elif soft >= 1024:
        yield DoctorLine("open files", "ok", f"{soft:,} allowed")
    else:
        more = platform.MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, platform.MAX_OPEN_FILES)
        yield DoctorLine("open files", "warn", f"{soft:,} allowed", f"ulimit -n {more}")


CHECKS: list[Callable[[Path], Iterator[DoctorLine]]] = [
    check_python,
    check_system,
    check_numpy,
    check_crc32c,
    check_zmq,
    check_torch,
    check_formats,
    check_disk,
    check_file_calls,
    check_open_files,
    check_rendering,
    check_devices,
]

FORMATS = ("PIL", "simplejpeg", "av", "pyarrow", "h5py")  # what datasets of other systems need

# library: its Debian package
RENDERING = {"EGL": "libegl1", "GL": "libgl1", "GLESv2": "libgles2", "OSMesa": "libosmesa6"}
DRIVERS = "libgl1-mesa-dri"  # what renders where there is no GPU

MEMORY_FILESYSTEMS = ("tmpfs", "ramfs")
NETWORK_FILESYSTEMS = ("nfs", "cifs", "smb", "9p", "fuse.sshfs", "afs", "lustre", "ceph")
