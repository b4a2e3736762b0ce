"""The workloads, as shared by every store that is measured.

    W1  a robot's transition: two uint8 images 128x128x3, float32[19] state,
        float32[7] action, reward, mask, done and the
        next observation; episodes of 100; 20,000 transitions. A batch of 256 with next observations is 50.4 MB.
    W2  a VLA trajectory [T=64, B=8]: one 224x224x3 image, int64[56] tokens, float32[56] log-probabilities; 50 of them.
        256 chunks are 38.7 MB.
    W3  state only: float32[17], action[6], reward, mask, done and the next state; 1,000,000 transitions.

Images are noise. They are cut from one pool of about 100 MB, larger than the processor's cache, so that a run needs no
disk for its input and every store is fed the same bytes. A log says `terminated` and `truncated`;
peers get the same two facts as `done` and `mask`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
BATCH = 256


@dataclass(frozen=True)
class W1:
    transitions: int = 20_000
    episode: int = 100
    cameras: tuple[str, ...] = ("wrist_1", "wrist_2")
    pool: int = 1024
    """Distinct frames per camera."""

    @property
    def episodes(self) -> int:
        return self.transitions // self.episode

    @cached_property
    def _frames(self) -> dict[str, Array]:
        rng = np.random.default_rng(1)
        found = {}
        for camera in self.cameras:
            pool = np.frombuffer(rng.bytes(self.pool * 49152), np.uint8).reshape(-1, 128, 128, 3)
            # An episode is a slice of the pool: its beginning is repeated at its end, so that slices do not wrap.
            found[camera] = np.concatenate([pool, pool[: self.episode + 1]])
        return found

    @cached_property
    def _numbers(self) -> Array:
        return np.random.default_rng(2).standard_normal((self.episode + 1, 19)).astype(np.float32)

    def first_frame(self, episode: int) -> int:
        """Where in the pool the frames of an episode begin."""
        return episode * (self.episode + 1) % self.pool

    def frames(self, episode: int) -> dict[str, Array]:
        """Per camera ``[101, 128, 128, 3]``: the frames of one episode, each once."""
        first = self.first_frame(episode)
        return {c: self._frames[c][first : first + self.episode + 1] for c in self.cameras}

    def columns(self, episode: int) -> dict[str, Any]:
        """One episode as ``[100, ...]`` columns. The state's first two numbers say which step it is."""
        seen: dict[str, Array] = self.frames(episode)
        state = self._numbers.copy()
        state[:, 0], state[:, 1] = episode, np.arange(self.episode + 1)
        seen = {**seen, "state": state}
        n = self.episode
        return {
            "observations": {k: v[:-1] for k, v in seen.items()},
            "actions": self._numbers[:-1, :7],
            "rewards": self._numbers[:-1, 7].copy(),
            "next_observations": {k: v[1:] for k, v in seen.items()},
            **_ends(n, terminated=episode % 2 == 0),
        }

    def check(self, batch: dict[str, Any]) -> None:
        """Every pixel of a sampled batch is that of the step it says it is."""
        for name, ahead in (("observations", 0), ("next_observations", 1)):
            state = batch[name]["state"]
            for i, (episode, t) in enumerate(state[:, :2].astype(int).tolist()):
                now = np.asarray(batch["observations"]["state"][i, :2]).astype(int).tolist()
                assert [episode, t - ahead] == now, (
                    f"element {i}: {name} is step {t} of episode {episode}, expected the one after {now}"
                )
                for camera in self.cameras:
                    expected = self._frames[camera][self.first_frame(episode) + t]
                    assert np.array_equal(batch[name][camera][i], expected), (
                        f"element {i}: {name}/{camera} is another frame"
                    )


@dataclass(frozen=True)
class W2:
    trajectories: int = 50
    length: int = 64
    width: int = 8
    pool: int = 700

    @property
    def chunks(self) -> int:
        return self.trajectories * self.length * self.width

    @cached_property
    def _frames(self) -> Array:
        raw = np.random.default_rng(3).bytes(self.pool * 224 * 224 * 3)
        return np.frombuffer(raw, np.uint8).reshape(self.pool, 224, 224, 3)

    def columns(self, trajectory: int) -> dict[str, Any]:
        """One trajectory as ``[64, 8, ...]`` columns."""
        rng = np.random.default_rng(trajectory)
        axes, n = (self.length, self.width), self.length * self.width
        first = trajectory * 37 % (self.pool - n)
        return {
            "observations": {"image": self._frames[first : first + n].reshape(*axes, 224, 224, 3)},
            "tokens": rng.integers(0, 32_000, (*axes, 56)),
            "log_probs": rng.standard_normal((*axes, 56)).astype(np.float32),
        }


@dataclass(frozen=True)
class W3:
    transitions: int = 1_000_000
    block: int = 10_000
    """Transitions of one block, which is ten episodes."""
    columns_asked: tuple[str, ...] = (
        "observations",
        "actions",
        "rewards",
        "next_observations",
        "terminated",
        "truncated",
    )
    """The columns that peers hold too, by our names."""

    @property
    def blocks(self) -> int:
        return self.transitions // self.block

    @cached_property
    def _numbers(self) -> Array:
        return np.random.default_rng(4).standard_normal((self.block + 1, 24)).astype(np.float32)

    def columns(self, block: int) -> dict[str, Any]:
        """One block as ``[10000, ...]`` columns."""
        states = np.ascontiguousarray(self._numbers[:, :17])
        states[:, 0] = block
        return {
            "observations": states[:-1],
            "actions": np.ascontiguousarray(self._numbers[:-1, 17:23]),
            "rewards": self._numbers[:-1, 23].copy(),
            "next_observations": states[1:],
            **_ends(self.block, terminated=False, every=1000),
        }


def _ends(n: int, terminated: bool, every: int | None = None) -> dict[str, Array]:
    ends = np.zeros(n, bool)
    ends[(every or n) - 1 :: every or n] = True
    return {"terminated": ends & terminated, "truncated": ends & (not terminated)}


def steps_of(columns: dict[str, Any]) -> list[dict[str, Any]]:
    """The single steps of ``[T, ...]`` columns."""
    length = len(columns["rewards"])
    return [_pick(columns, i) for i in range(length)]


def as_trajectory(columns: dict[str, Any]) -> dict[str, Any]:
    """``[T, ...]`` columns as a ``[T, 1, ...]`` trajectory."""
    return {k: as_trajectory(v) if isinstance(v, dict) else v[:, None] for k, v in columns.items()}


def own_memory(columns: dict[str, Any]) -> dict[str, Any]:
    """The same, with no two columns in the same memory."""
    return {k: own_memory(v) if isinstance(v, dict) else np.array(v) for k, v in columns.items()}


def for_peers(columns: dict[str, Any]) -> dict[str, Any]:
    """The same with `dones` and `masks` in place of `terminated` and `truncated`, and flat names."""
    flat = {}
    for key, value in columns.items():
        if isinstance(value, dict):
            flat.update({f"{key}.{k}": v for k, v in value.items()})
        elif key not in ("terminated", "truncated"):
            flat[key] = value
    if "terminated" in columns:
        flat["dones"] = columns["terminated"] | columns["truncated"]
        flat["masks"] = 1.0 - columns["terminated"].astype(np.float32)
    return flat


def _pick(columns: dict[str, Any], i: int) -> dict[str, Any]:
    return {k: _pick(v, i) if isinstance(v, dict) else v[i] for k, v in columns.items()}
