"""Where the ranks of a run are, and how each holds what it trains: settings of `hilt.distributed.group`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hilt.core.errors import ConfigError
from hilt.core.validate import Need, check, setting

KINDS = ("here", "processes", "ray")
STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
_SEVERAL = Need("{here}kind=processes or ray", lambda c: c.kind != "here")
_RAY = Need("{here}kind=ray", lambda c: c.kind == "ray")


@dataclass
class Placement:
    """Where the ranks of a run are."""

    kind: str = setting("here", choices=KINDS, noun="kind of placement")
    """ "here": one rank, in this process; "processes": of this machine; "ray": actors on one or more machines"""
    ranks: int = setting(1, minimum=1)
    """Processes that train, each with simulators of its own"""
    rollout_ranks: int = setting(0, minimum=0, needs=_RAY)
    """Ray: the number of processes that only roll out, while the others only train; 0: each does both"""
    address: str = setting("", needs=_RAY)
    """Ray: of a running cluster, host:port or "auto"; empty: a new one, on this machine alone"""
    strategy: str = setting("PACK", choices=STRATEGIES, noun="strategy of placement", needs=_RAY)
    """Ray: PACK (as few machines as can be), SPREAD, STRICT_PACK (one machine) or
    STRICT_SPREAD (each rank on another machine)"""
    cpus: float = setting(1.0, minimum=0, needs=_RAY)
    """Ray: cores that are set aside for each rank and its simulators"""
    gpus: float = setting(0.0, minimum=0, needs=_RAY)
    """Ray: GPUs that are set aside for each rank that trains; rollout ranks get as many"""
    folder: str = setting("", needs=_RAY)
    """Ray: where a rank keeps its files on its own machine, such as /scratch/$USER, its
    variables as they are there; empty: in the run"""
    wait_seconds: float = setting(600.0, minimum=1, needs=_SEVERAL)
    """How long one rank waits for another"""
    call_seconds: float = setting(7200.0, minimum=1, needs=_SEVERAL)
    """How long the collection of a step, or its update, may take"""
    restarts: int = setting(3, minimum=0, needs=_SEVERAL)
    """How often, in one run, lost workers are started again, from the last checkpoint; 0: the first loss ends it"""

    def check(self) -> None:
        """Raises for what cannot work, and for what would change nothing."""
        check(self, "placement")

    def conflicts(self, here: str) -> Iterator[str]:
        if self.kind == "here" and self.ranks > 1:
            yield f"{here}ranks={self.ranks} needs {here}kind=processes or ray: in this process there is one."


_ENABLED = Need("{here}enabled=true", lambda c: c.enabled)


@dataclass
class Sharding:
    """How a rank holds what it trains. With FSDP2 each has a part of every weight, gradient and moment."""

    enabled: bool = False
    """Shard over all ranks (with one rank there is nothing to divide, but offloading works)"""
    precision: str = setting("float32", choices=("float32", "bfloat16"), needs=_ENABLED)
    """In which the units are gathered and compute: float32 or bfloat16. Their parts, sums
    of gradients and moments stay as they are"""
    units: list[str] = setting(factory=list, needs=_ENABLED)
    """Classes of modules that are gathered one after the other, such as
    LlamaDecoderLayer; empty: all weights at once"""
    offload_parameters: bool = setting(False, needs=_ENABLED)
    """The parts lie on the CPU and are copied when they are needed; gradients and moments are then there too"""
    offload_gradients: bool = setting(False, needs=_ENABLED)
    """Gradients go to the CPU after each backward pass, and are summed there"""
    offload_optimizer: bool = setting(False, needs=_ENABLED)
    """Adam's moments lie on the CPU, and come to the device one weight at a time"""

    def check(self) -> None:
        """Raises for what cannot work, and for what would change nothing."""
        check(self, "sharding")

    def conflicts(self, here: str) -> Iterator[str]:
        if self.precision != "float32" and not self.units:
            yield (
                f"{here}precision={self.precision} is that of units: give "
                f"{here}units=[LlamaDecoderLayer], or leave it out."
            )


def rank_folder(placement: Placement, run: Path, rank: int) -> Path:
    """Where a rank keeps its files: in the run, or in a folder of its own machine, whose variables are read there."""
    if not placement.folder:
        return run
    folder = os.path.expandvars(placement.folder)
    if "$" in folder:
        raise ConfigError(
            f"placement.folder={placement.folder}: rank {rank}'s machine does not have this variable; set it there."
        )
    return Path(folder).absolute() / run.name
