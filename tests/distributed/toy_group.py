"""Workers for the tests of groups, clusters and shards. Without pytest, whose import would be half of their life."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from hilt.algos.config import Optimizer
from hilt.core.errors import ConfigError
from hilt.distributed.optimizer import DataParallelOptimizer
from hilt.distributed.placement import Placement, Sharding, rank_folder
from hilt.distributed.ranks import LostRankError, join
from hilt.policies.vla.vit import layers

LEARNING_RATE = 1e-2


class OddError(Exception):
    """Cannot be made again from its message."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def is_there(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


class NeverReady:
    """A worker whose start takes for ever: it says who it is, and waits until it is stopped or ended."""

    def __init__(self, folder, ranks, stop, role="both"):
        (folder / str(os.getpid())).touch()
        while not stop():
            time.sleep(0.01)


class Toy:
    """A worker that adds, raises, hangs and dies on demand."""

    def __init__(self, start, ranks, stop, role="both"):
        if start == "broken":
            raise ConfigError("this worker cannot be made.")
        self.start, self.ranks, self.stop, self.role = start, ranks, stop, role
        self.report = None

    def count(self, total):
        for done in range(1, total + 1):
            self.report("counting", done, total, note="by one")

    def add(self, number, own=0):
        return self.start + number + own + int(self.ranks.sum_(torch.tensor(self.ranks.rank)))

    def mirror(self, tree):
        return tree

    def raise_at(self, rank):
        if self.ranks.rank == rank:
            raise ZeroDivisionError(f"rank {rank} divides by zero")
        self.ranks.barrier()

    def unsendable(self):
        return lambda: None

    def odd(self):
        raise OddError(1, 2)

    def die_at(self, rank):
        if self.ranks.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        self.ranks.barrier()

    def hang_at(self, rank):
        if self.ranks.rank == rank:
            time.sleep(60)
        self.ranks.barrier()

    def lose(self):
        raise LostRankError("rank 2 is gone")

    def until_stopped(self):
        for _ in range(600):
            if self.stop():
                return "stopped"
            time.sleep(0.05)
        return "not stopped"

    def leave_in_turn(self, rank):
        """What a rank sees when another one raises, and says so, while it waits."""
        if self.ranks.rank == rank:
            self.ranks.leave("ZeroDivisionError: by zero")
            return ""
        return self._error(self.ranks.barrier)

    def wait_for(self, rank, folder):
        """What a rank sees when another one is late: later than all the others have waited, who say so by files."""
        if self.ranks.rank == rank:
            end = time.monotonic() + 120
            while len(list(Path(folder).iterdir())) < self.ranks.size - 1 and time.monotonic() < end:
                time.sleep(0.05)
            return ""
        error = self._error(self.ranks.barrier)
        (Path(folder) / str(self.ranks.rank)).touch()
        return error

    def in_world(self, address, size):
        """All that ranks do together, in a world of so many; who is beyond has nothing to do there."""
        getattr(self, "world", self.ranks).leave("for another world")
        rank = self.ranks.rank
        if rank >= size:
            return None
        self.world = ranks = join(address, rank, size, timeout_seconds=60)
        empty = ranks.sum_(torch.zeros(0))
        gathered = ranks.gather({"rank": rank, "text": "é" * rank, "none": None})
        ranks.barrier()
        return (
            float(ranks.sum_(torch.tensor([rank + 0.5])).sum()),
            len(empty),
            ranks.max(rank),
            ranks.any(rank == 1),
            gathered,
        )

    def _error(self, function):
        try:
            function()
        except LostRankError as error:
            return f"{type(error).__name__}: {error}"
        return "no error"


class Piece(nn.Module):
    """A layer, of sizes that do not divide by the number of ranks."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(7), nn.Linear(7, 7)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    """With what is awkward: a method of its own, weights that are frozen, that nobody uses, and of one row."""

    def __init__(self, checkpointed=0.0):
        super().__init__()
        self.checkpointed = checkpointed
        self.first, self.layers = nn.Linear(5, 7), nn.ModuleList([Piece(), Piece()])
        self.last, self.unused, self.frozen = (
            nn.Linear(7, 1),
            nn.Linear(3, 3),
            nn.Parameter(torch.ones(7), requires_grad=False),
        )

    def evaluate(self, x):
        x = self.first(x)
        for layer in layers(self.layers, self.checkpointed):
            x = layer(x)
        return self.last(x * self.frozen)[:, 0]


VLA = {
    "image_size": 16,
    "state_dim": 3,
    "chunk": 2,
    "action_dim": 3,
    "width": 16,
    "depth": 2,
    "heads": 2,
    "keypoints": 2,
}


def seen_by_vla(count):
    """Observations of the small VLA, with three instructions in turn."""
    draws, words = np.random.default_rng(0), ("push it", "lift the red cube", "close the drawer")
    return [
        {
            "full_image": draws.integers(0, 255, (16, 16, 3)).astype(np.uint8),
            "state": draws.normal(size=3),
            "instruction": words[i % 3],
        }
        for i in range(count)
    ]


class Shards:
    """A worker that trains `Net` on its share of a fixed batch, in one piece or
    sharded, in worlds of fewer ranks than there are."""

    def __init__(self, device="cpu", *, ranks, stop=None):
        self.ranks, self.world, self.device = ranks, ranks, device

    def enter(self, address, size):
        """Leaves the world that there is for one of so many ranks; who is beyond has nothing to do there."""
        if self.world is not None:
            self.world.leave("for another world")
        inside = self.ranks.rank < size
        self.world = (
            join(address, self.ranks.rank, size, name=f"world-{size}", timeout_seconds=60, device=self.device)
            if inside
            else None
        )

    def build(self, sharding, state=None, checkpointed=0.0):
        if self.world is None:
            return
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self._give(Net(checkpointed).to(self.device), sharding)
        if state is not None:
            self.optimizer.load_state_dict(state)

    def _give(self, net, sharding, head=None):
        settings = Optimizer(learning_rate=LEARNING_RATE, weight_decay=0.1, gradient_clip=0.5)
        if sharding is None:
            self.optimizer = DataParallelOptimizer(net, settings, self.world, head)
        else:
            from hilt.distributed.shard import Sharded

            self.optimizer = Sharded(net, settings, self.world, Sharding(enabled=True, **sharding), head)
        return self.optimizer

    def train_vla(self, sharding, steps, value="none"):
        """A small VLA in float64, and what it has after some steps; a value head has a rate of
        its own, and the first step to itself."""
        if self.world is None:
            return None
        from hilt.policies.vla.small_vla import SmallVLA, SmallVLAConfig  # not in the life of the others

        policy = SmallVLA(SmallVLAConfig(**VLA, value=value)).double()
        record = policy.act(seen_by_vla(3), generator=torch.Generator().manual_seed(0))[1]
        self._give(
            policy, sharding, None if value == "none" else Optimizer(learning_rate=LEARNING_RATE / 3, gradient_clip=0.1)
        )
        mine = {name: array[self.world.rank :: self.world.size] for name, array in record.items()}
        for step in range(steps):
            found = policy.evaluate(mine)
            self.optimizer.backward(
                (found.log_prob.sum() + (0 if found.value is None else found.value.square().sum())) / 10
            )
            self.optimizer.step(1.0, head_only=value != "none" and step == 0)
        return self.optimizer.state_dict()["trained"]

    def learn_outcomes(self, sharding, deal, updates):
        """PRIME, in float64: the figures of some updates, and what the policy and the reward policy have after them.

        `deal`: the episodes of each rank, of two groups of three with different numbers of chunks."""
        if self.world is None:
            return None
        from hilt.algos.config import Batching, PolicyGradient, Prime  # not in the life of the others
        from hilt.policies.vla.small_vla import SmallVLA, SmallVLAConfig
        from hilt.vla.episode import RolloutEpisode, Start
        from hilt.vla.update import ProcessReward, Updater

        policy, judge, kept = (SmallVLA(SmallVLAConfig(**VLA), seed=seed).double() for seed in (0, 1, 2))
        lengths, made = [3, 1, 2, 1, 2, 1], []
        record = policy.act(seen_by_vla(sum(lengths)), generator=torch.Generator().manual_seed(0))[1]
        record["log_prob"] = record["log_prob"].astype(np.float32)  # as logs have it
        for number, length in enumerate(lengths):
            part = {name: array[sum(lengths[:number]) :][:length] for name, array in record.items()}
            executed, success = np.full(length, 2, np.int32), number in (0, 4, 5)
            executed[-1] = 1 + number % 2
            start = Start("toy", "train", number // 3, 0, number // 3, number)
            made.append(
                RolloutEpisode(
                    start, part, executed, np.zeros(length, np.float32), success, int(executed.sum()), False, 0, b""
                )
            )
        mine = made[sum(deal[: self.world.rank]) :][: deal[self.world.rank]]
        rewards = [np.eye(1, episode.rows, episode.rows - 1)[0] * episode.success for episode in mine]
        optimizer = self._give(policy, sharding)
        settings = Prime(coefficient=0.7, beta=0.3, granularity="token")
        process = ProcessReward(settings, self._give(judge, sharding), kept.requires_grad_(False))
        updater = Updater(
            PolicyGradient(estimator="rloo", batch=Batching(chunks_per_pass=2)),
            optimizer,
            ranks=self.world,
            process=process,
        )
        figures = [updater.update(mine, rewards) for _ in range(updates)]
        return figures, optimizer.state_dict()["trained"], process.optimizer.state_dict()["trained"]

    def train(self, steps):
        """[loss, length of the gradient] of each step. Rank 1 has one row, and the last of three or more has none."""
        if self.world is None:
            return None
        size = self.world.size
        whose = [
            0 if (row % size == 1 and row > 1) or (size > 2 and row % size == size - 1) else row % size
            for row in range(9)
        ]
        mine = [row for row in range(9) if whose[row] == self.world.rank]
        x, figures = torch.randn(9, 5, generator=torch.Generator().manual_seed(3)).to(self.device), []
        for _ in range(steps):
            total = torch.zeros(1)
            for half in (mine[::2], mine[1::2]):
                rows, weight = (half, 1.0) if half else ([0], 0.0)  # the same passes at every rank
                loss = (
                    weight * (self.optimizer.module.evaluate(x[rows]).float() - x[rows].sin().sum(1)).square().sum() / 9
                )
                self.optimizer.backward(loss)
                total += loss.detach().cpu()
            length = self.optimizer.step(1.0)["gradient_norm"]
            figures.append([float(self.world.sum_(total)), length])
        return figures

    def gradients(self):
        """Of one pass at each rank, whole, and then forgotten."""
        if self.world is None:
            return None
        self.optimizer.backward(
            self.optimizer.module.evaluate(torch.ones(2, 5, device=self.device)).sum() / self.world.size
        )
        pieces, parameters = self.optimizer._gradients(), self.optimizer.trained.values()
        gather = getattr(self.optimizer, "_gathered", lambda piece, _: piece)
        whole = [
            None if piece is None else gather(piece, p).clone() for piece, p in zip(pieces, parameters, strict=True)
        ]
        self.optimizer.module.zero_grad()
        self.optimizer._offloaded = {}
        return whole

    def state(self):
        return None if self.world is None else self.optimizer.state_dict()

    def alone(self):
        """Each rank uses the whole module by itself, as often as its number says."""
        if self.world is None:
            return None
        with self.optimizer.whole(), torch.no_grad():
            return [
                float(self.optimizer.module.evaluate(torch.ones(1, 5, device=self.device)))
                for _ in range(self.world.rank + 1)
            ]

    def sizes(self):
        return None if self.world is None else sum(p.numel() for p in self.optimizer._pieces())

    def places(self):
        """Where weights are, gradients after a backward pass (as torch has them,
        and what is kept of them), and moments."""
        self.optimizer.backward(self.optimizer.module.evaluate(torch.ones(1, 5, device=self.device)).sum())
        given = {p.grad.device.type for p in self.optimizer.trained.values() if p.grad is not None}
        kept = {g.device.type for g in self.optimizer._gradients() if g is not None}
        self.optimizer.step(1.0)
        weights = {p.device.type for p in self.optimizer._pieces()}
        return weights, given, kept, {m.device.type for m in self.optimizer._adam._first}


class Roller:
    """A worker for machines of their own: rolls out pictures, trains a number on them, and keeps files where it is."""

    def __init__(self, run, ranks, stop, role="both"):
        self.run, self.ranks, self.stop, self.role = Path(run), ranks, stop, role
        self.weight, self.version, self.taken = np.zeros(4, np.float32), 0, []

    def collect(self, rows, pixels=0, until_stopped=False):
        folder = rank_folder(Placement(kind="ray", folder="$HILT_NODE_FOLDER"), self.run, self.ranks.rank)
        folder.mkdir(exist_ok=True)  # in one that only this machine has
        (folder / f"{self.role}-{self.ranks.rank}.txt").write_text(str(self.version))
        while until_stopped and not self.stop():
            time.sleep(0.05)
        self.frames = np.full((rows, pixels, pixels, 3), self.version, np.uint8)
        return {"version": self.version, "machine": (folder.parent / "machine.txt").read_text()}

    def hand_out(self):
        return {"frames": self.frames, "rank": self.ranks.rank}

    def take_in(self, payloads):
        self.taken = payloads

    def update(self, fail=""):
        if fail == "raise" and self.ranks.rank == 1:
            raise ZeroDivisionError("in mid-update")
        if fail == "die" and self.ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        self.version += 100 if fail == "slow" else 1
        self.weight = self.ranks.sum_(torch.from_numpy(self.weight + 1)).numpy()
        return [(part["rank"], part["frames"].nbytes, int(part["frames"].max())) for part in self.taken]

    def load_shared(self, version):
        self.version = version

    def weights(self):
        return self.version, {"weight": self.weight}

    def take_weights(self, version, weights):
        time.sleep(60 if version >= 100 else 0)
        self.version, self.weight = version, weights["weight"].copy()
