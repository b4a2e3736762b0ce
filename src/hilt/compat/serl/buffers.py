"""The replay buffers that HIL-SERL users know, as faces of a log.

Same constructors, same batches; right where the originals are not: a gap, a truncation, several actors or a reload in
any order never pair an observation with another one's image.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import os
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hilt.core.errors import ArgumentError, ConfigError, SchemaError, UnknownNameError, explained_calls, refuse_unknown
from hilt.core.trajectory import ends_from_done_and_mask
from hilt.core.tree import Array, ArraySpec, Spec, Tree, unflatten
from hilt.replay.log import Log
from hilt.replay.sampling.assembly import Batch
from hilt.replay.sampling.randomness import NumpyStream
from hilt.replay.sampling.sampler import Sampler
from hilt.replay.schema import Schema, spec_of_space
from hilt.replay.settings import as_folder, as_generator, as_sequence, as_transitions, as_whole_number
from hilt.replay.step_encoder import PackedBlock
from hilt.replay.storage.lock import wait_before_fork
from hilt.replay.view import View
from hilt.replay.writer import RunningEpisodes

if TYPE_CHECKING:
    import torch

    from hilt.replay.sampling.prefetch import Prefetch
    from hilt.replay.snapshot import Snapshot

logger = logging.getLogger("hilt.replay")

_NUMBERS = (bool, int, float, np.generic)
OPEN_CHAINS = 8
"""The number of running episodes of unnamed actors that are distinguished by their frames."""


@explained_calls
class ReplayBufferDataStore:
    """A learner's buffer of transitions.

    A transition is a mapping with ``observations``, ``actions``, ``next_observations``, ``rewards``, ``masks`` and
    ``dones``; ``source`` and ``policy_version`` may be added. Other keys are not stored, as in HIL-SERL's buffer:
    ``infos``, and ``grasp_penalty`` without `include_grasp_penalty`, without a word; all others with one warning that
    names them, such as ``times``, which recordings have. Done with mask 0 is kept as terminated, done with mask 1 as
    truncated. A slash in a key, as two arms have them (``left/wrist``), is a level. With `path` the buffer is a log
    that outlives the process; without, it lives in a temporary folder. `settings` go to `Log.create`.
    """

    _stacked: tuple[str, ...] = ()

    def __init__(
        self,
        observation_space: Any,
        action_space: Any,
        capacity: int,
        next_observation_space: Any = None,
        include_next_actions: bool = False,
        include_label: bool = False,
        include_grasp_penalty: bool = False,
        *,
        path: str | os.PathLike[str] | None = None,
        seed: int | None = None,
        **settings: Any,
    ):
        capacity = as_whole_number(
            "capacity", capacity, "the number of transitions that the buffer keeps, such as 200000", 1
        )
        self._check_settings(settings)
        self._passed_over = {"infos", "grasp_penalty"}
        """Keys of transitions that are not stored, without a (further) warning; scripts always pass these two"""
        self._has_slashes = any("/" in key for key in getattr(observation_space, "spaces", {}))
        columns = _columns(observation_space, action_space, next_observation_space)
        if include_next_actions:
            columns["next_actions"], columns["next_intvn"] = columns["actions"], ArraySpec(np.dtype(bool))
        if include_label:
            columns["labels"] = ArraySpec(np.dtype(int))
        if include_grasp_penalty:
            columns["grasp_penalty"] = ArraySpec(np.dtype(np.float32))
        schema = Schema.declare(columns, self._stacked)
        settings = {"capacity_steps": capacity, **settings}
        self.log = _open_or_create(path, schema, settings)
        self._upstream_keys = list(columns)
        self._stored = dict.fromkeys(path.partition("/")[0] for path in self.log.schema.columns)
        # a running episode cannot be evicted as a whole
        self._chains = RunningEpisodes(self.log, unnamed=max(1, min(OPEN_CHAINS, capacity // 4)))
        self.lock, self.cut_by_fork = threading.RLock(), False
        wait_before_fork(self)
        self.view: View = self.log.all()
        self._inserted = len(self.view)
        self._newest = deque(self.view.keys().tolist(), maxlen=capacity)  # keys in the order they were inserted
        self.seed(seed)

    @property
    def takes_blocks(self) -> bool:
        """Whether `insert_block` may be called instead of `insert`: not where `insert` is
        overridden, so that it sees every step."""
        return type(self).insert is ReplayBufferDataStore.insert

    def insert(
        self,
        transition: Tree,
        actor: str = "",
        sequence: int = -1,
        timeout: float | None = None,
        *,
        boot: str = "",
        store: str = "",
    ) -> int:
        """Stores one transition, process-safe when it returns; returns the step's key.

        Transitions of several actors may come in any order. Name the `actor`, or let the buffer tell unnamed ones apart
        by their frames. With `boot`, `store` and `sequence` the row identifies the transition and its sender.
        """
        leaves, sequence = self.check(transition), as_sequence(sequence)
        with self.lock:
            key = self._chains.insert((actor, boot, store), leaves, sequence, timeout)
            self._inserted += 1
            self._newest.append(key)
            return key

    def insert_block(
        self, block: PackedBlock, actor: str, sequence: int, timeout: float | None, *, boot: str, store: str
    ) -> int:
        """Stores packed transitions whose numbers begin at `sequence`; returns how many.
        The rest must be inserted one by one."""
        with self.lock:
            keys = self._chains.insert_block((actor, boot, store), self._block_with_ends(block), sequence, timeout)
            self._inserted += len(keys)
            self._newest.extend(keys)
            return len(keys)

    def check(self, transition: Tree) -> list[Array]:
        """What `insert` would store, or its error; nothing is stored."""
        return self.log.check(self._with_ends(transition), cast=True)

    def batch_insert(self, transitions: Iterable[Tree], actor: str = "") -> None:
        """Stores transitions one after the other."""
        for transition in as_transitions(transitions):
            self.insert(transition, actor)

    def sample(self, batch_size: int, keys: Sequence[str] | None = None, indx: npt.ArrayLike | None = None) -> Batch:
        """A batch, drawn uniformly with replacement, or the transitions at `indx`, counted from the oldest. Columns are
        chosen by `keys`, whole paths or subtrees such as ``observations``."""
        return self._batch(batch_size, keys, indx, lambda steps, drawn, paths: steps.gather(drawn, paths))

    def get_iterator(
        self,
        queue_size: int = 2,
        sample_args: Mapping[str, object] | None = None,
        device: str | torch.device | None = None,
    ) -> Prefetch:
        """Batches for ever, made ahead by a thread. With `device` (a torch device, or a list of
        them: a copy for each) as tensors there."""
        from hilt.replay.sampling.prefetch import Prefetch

        arguments = self._sample_arguments({} if sample_args is None else sample_args)
        queue_size = as_whole_number(
            "queue_size", queue_size, "the number of batches that are made ahead, such as 2", 1
        )
        return Prefetch(lambda: self.sample(**arguments), queue_size, device)

    def seed(self, seed: int | None = None) -> None:
        """Begins the buffer's own stream of random numbers anew."""
        self._sampler = Sampler(self.view, seed=_Integers(as_generator(seed)))

    def latest_data_id(self) -> int:
        """How many transitions were inserted so far."""
        return self._inserted

    def get_latest_data(self, from_id: int) -> list[dict[str, object]]:
        """The transitions inserted since `latest_data_id` was `from_id`, as far as they are still there."""
        from_id = as_whole_number("from_id", from_id, "what latest_data_id() returned before, or 0 for everything")
        with self.lock:
            wanted = max(0, len(self._newest) - max(0, self._inserted - from_id))
            keys = np.array(list(itertools.islice(self._newest, wanted, None)), np.int64)
            with self.log.lock, self.log.reading() as steps:
                keys = keys[steps.exist(keys)]
                batch = steps.gather(keys, self.log.schema.select(self._upstream_keys))
        return [unflatten({path: values[i] for path, values in batch.items()}) for i in range(len(keys))]

    def __len__(self) -> int:
        """How many transitions can be sampled."""
        return len(self.view)

    def forget(self, actor: str, boot: str, store: str) -> None:
        """This sender will send no more: what it left running is ended."""
        with self.lock:
            self._chains.forget((actor, boot, store))

    def stats(self) -> dict[str, object]:
        return self.log.stats()

    def close(self) -> None:
        self.log.close()

    # Inside

    def _check_settings(self, settings: Mapping[str, Any]) -> None:
        kind = type(self)
        own = dict.fromkeys(name for base in kind.__mro__[:-1] for name in inspect.signature(base).parameters)
        known = [*own, *(name for name in inspect.signature(Log.create).parameters if name not in {*own, "schema"})]
        if "image_keys" in settings and "image_keys" not in own:
            raise ArgumentError(
                f"{kind.__name__}: image_keys={settings['image_keys']!r} was given, and this buffer stores "
                "images as it stores other arrays. Leave it out, or use MemoryEfficientReplayBufferDataStore."
            )
        refuse_unknown(kind.__name__, settings, [name for name in known if name not in ("settings", "options")])

    def _sample_arguments(self, given: Any) -> dict[str, Any]:
        """The arguments of `sample`, checked before a thread calls it."""
        known = list(inspect.signature(self.sample).parameters)
        if not isinstance(given, Mapping) or "batch_size" not in given:
            raise ConfigError(
                "sample_args: expected a mapping of sample()'s arguments, such as "
                f"{{'batch_size': 128}}, got {given!r}."
            )
        for name in given:
            if name == "pack_obs_and_next_obs" and name not in known:
                raise ConfigError(
                    f"sample_args: {name} was given, which {type(self).__name__} does not have: its observations "
                    "are not stacks of images. Leave it out, or use MemoryEfficientReplayBufferDataStore."
                )
            if name not in known:
                raise UnknownNameError("argument of sample()", str(name), known, setting="sample_args")
        return dict(given)

    def _batch(self, batch_size: int, keys: Sequence[str] | None, indx: Any, gather: Any) -> Batch:
        batch_size = as_whole_number("batch_size", batch_size, "the number of transitions of a batch", 1)
        keys = list(keys) if isinstance(keys, Iterable) and not isinstance(keys, str) else keys
        if keys is not None and (not isinstance(keys, list) or not all(isinstance(key, str) for key in keys)):
            raise ConfigError(
                f"keys: expected the names of columns, such as ['observations', 'actions'], got {keys!r}."
            )
        paths = self.log.schema.select(self._upstream_keys if keys is None else keys)
        if indx is None:
            return self._sampler.sample_with(batch_size, lambda steps, drawn: gather(steps, drawn, paths))
        try:
            places = np.asarray(indx)
        except ValueError:  # lists of different lengths
            places = np.empty((0, 0))
        with self.log.lock:
            size = len(self)
            if places.ndim != 1 or places.dtype.kind not in "iu" or (places < 0).any() or (places >= size).any():
                raise ConfigError(f"indx: expected whole numbers in [0, {size}), got {indx!r}.")
            drawn = self.view.runs().draw(places.astype(np.int64))
            reading = self.log.reading()
        with reading as steps:
            batch = Batch(unflatten(gather(steps, drawn, paths)))
        batch.steps, batch.probabilities, batch.weights = drawn, np.ones(len(drawn)), np.ones(len(drawn))
        return batch

    def _with_ends(self, transition: Tree) -> dict[str, Any]:
        if not isinstance(transition, Mapping):
            raise SchemaError(
                f"a transition: expected a mapping with {', '.join(self._upstream_keys)}, got "
                f"{type(transition).__name__}. A list of transitions is stored with batch_insert()."
            )
        given = {key: value for key, value in transition.items() if key in self._stored}
        if len(given) < len(transition):
            self._pass_over(transition)
        if self._has_slashes:
            given |= {key: _levels(given[key]) for key in ("observations", "next_observations") if key in given}
        infos = transition.get("infos")
        if "grasp_penalty" in self.log.schema.columns and isinstance(infos, Mapping) and "grasp_penalty" in infos:
            given.setdefault("grasp_penalty", infos["grasp_penalty"])
        if "terminated" not in given and "truncated" not in given:
            done: Any = given.get("dones")
            mask: Any = given.get("masks")
            if _is_number(done) and _is_number(mask):  # what else they may be is named by the check
                given["terminated"], given["truncated"] = ends_from_done_and_mask(bool(done), float(mask))
        return given

    def _pass_over(self, keys: Iterable[str]) -> None:
        """Logs a warning once for each key that is not stored."""
        if new := [key for key in dict.fromkeys(keys) if key not in self._stored and key not in self._passed_over]:
            names, stored = ", ".join(map(str, new)), ", ".join(self._stored)
            logger.warning("transitions have %s, which this buffer does not store; it stores %s", names, stored)
            self._passed_over.update(new)

    def _block_with_ends(self, block: PackedBlock) -> PackedBlock:
        """Does what `_with_ends` does for packed transitions that have plain columns of ends;
        others are left to be inserted one by one."""
        columns = {path: column for path, column in block.columns.items() if path.partition("/")[0] in self._stored}
        if len(columns) < len(block.columns):
            self._pass_over(path.partition("/")[0] for path in block.columns)
        if "grasp_penalty" in self.log.schema.columns and "infos/grasp_penalty" in block.columns:
            columns.setdefault("grasp_penalty", block.columns["infos/grasp_penalty"])
        ends = [columns[name] for name in ("dones", "masks") if name in columns]
        plain = len(ends) == 2 and all(column.ndim == 1 and column.dtype.kind in "biuf" for column in ends)
        if "terminated" not in columns and "truncated" not in columns and plain:
            done, mask = ends
            columns["terminated"], columns["truncated"] = (
                done.astype(bool) & (mask == 0),
                done.astype(bool) & (mask != 0),
            )
        return block.with_columns(columns)


def _images(observation_space: Any, image_keys: Any) -> dict[str, tuple[str, ArraySpec]]:
    """Returns for each key the path of the image in the observation space, and its spec."""
    if isinstance(image_keys, str) or not isinstance(image_keys, Iterable):
        raise ConfigError(f"image_keys: expected a list of names, such as ['wrist_1', 'wrist_2'], got {image_keys!r}.")
    observations = _levels(spec_of_space(observation_space, "observations"))
    if isinstance(observations, ArraySpec):
        raise ConfigError(
            f"observation_space: expected a Dict space that has the images by name, got {observation_space}."
        )
    columns, found = Spec(observations), {}
    for key in image_keys:
        ending = [path for path in columns if f"/{path}".endswith(f"/{key}")]
        paths = [path for path in columns if path == key] or ending
        if not paths and (inside := [path for path in columns if path.startswith(f"{key}/")]):
            raise ConfigError(
                f"image_keys: {key!r} is not an image but a group of {', '.join(inside)}; give the images' names."
            )
        if not paths:
            raise UnknownNameError("image key in the observation space", str(key), columns)
        if len(paths) > 1:
            raise ConfigError(
                f"image_keys: {key!r} was given, and {', '.join(paths)} all end so; give the whole paths."
            )
        spec = columns[paths[0]]
        if len(spec.shape) not in (3, 4):
            raise ConfigError(
                f"image_keys: expected an image (H, W, C) or a stack (stack, H, W, C), got {spec} for {key!r}."
            )
        found[key] = paths[0], spec
    return found


def _columns(observation_space: Any, action_space: Any, next_observation_space: Any) -> dict[str, Any]:
    """Returns the columns that every buffer has. The space of next observations may be None, and is no other one."""
    observations = after = _levels(spec_of_space(observation_space, "observations"))
    if next_observation_space is not None:
        after = _levels(spec_of_space(next_observation_space, "next_observations"))
        if dict(Spec({"o": after})) != dict(Spec({"o": observations})):
            raise ConfigError(
                "next_observation_space: expected the observation space, since a frame that "
                "ends a step begins the next."
            )
    return {
        "observations": observations,
        "next_observations": after,
        "actions": spec_of_space(action_space, "actions"),
        "rewards": ArraySpec(np.dtype(np.float32)),
        "masks": ArraySpec(np.dtype(np.float32)),
        "dones": ArraySpec(np.dtype(bool)),
    }


def _levels(observations: Any) -> Any:
    """With a level for each slash in a key."""
    return unflatten(dict(observations)) if isinstance(observations, Mapping) else observations


def _is_number(value: Any) -> bool:
    return isinstance(value, _NUMBERS) or (
        isinstance(value, np.ndarray) and not value.ndim and value.dtype.kind in "biuf"
    )


class _Integers(NumpyStream):
    """Draws the places that HIL-SERL's plain buffer draws for the same seed."""

    def places(self, n: int, size: int) -> Array:
        return self.generator.integers(size, size=n)


@explained_calls
class MemoryEfficientReplayBufferDataStore(ReplayBufferDataStore):
    """The same for observations with images: every frame is stored once, also where
    it ends one step and begins the next.

    `image_keys` are named by path (``images/wrist_1``) or, where only one path ends so, by its last part (``wrist_1``).
    An image is a stack ``(stack, H, W, C)``, as ``ChunkingWrapper`` makes it, or a single ``(H, W, C)``.
    """

    def __init__(
        self,
        observation_space: Any,
        action_space: Any,
        capacity: int,
        image_keys: Sequence[str] = ("image",),
        **options: Any,
    ):
        self._check_settings(options)
        images = _images(observation_space, image_keys)
        stacks = {key: spec.shape[0] if len(spec.shape) == 4 else 0 for key, (_, spec) in images.items()}
        if len(set(stacks.values())) > 1:
            raise ConfigError(
                f"image_keys: expected one stack size for all images, got {stacks}; 0 is an image without a stack."
            )
        self._image_paths = [f"observations/{path}" for path, _ in images.values()]
        self._stacked = tuple(self._image_paths) if any(stacks.values()) else ()
        super().__init__(observation_space, action_space, capacity, **options)

    def sample(
        self,
        batch_size: int,
        keys: Sequence[str] | None = None,
        indx: npt.ArrayLike | None = None,
        pack_obs_and_next_obs: bool = False,
    ) -> Batch:
        """A batch. Packed, ``observations[image]`` has the stack and the next frame, ``(batch, stack +
        1, H, W, C)``, and ``next_observations`` has no images: half the bytes for the same content. A
        single image counts as a stack of one."""
        if not pack_obs_and_next_obs:
            return super().sample(batch_size, keys, indx)
        frame_of = self.log.schema.layout.frame_of
        pairs = dict(self.log.schema.layout.pairs)

        def gather(steps: Snapshot, drawn: Array, paths: Sequence[str]) -> dict[str, Array]:
            images = [p for p in self._image_paths if p in paths]
            rest = [p for p in paths if p not in self._image_paths and p not in {pairs[i] for i in self._image_paths}]
            small = [p for p in images if p not in frame_of]  # images of a few bytes lie in their rows
            both = steps.gather(drawn, [*rest, *small, *(pairs[p] for p in small)])
            packed = {p: np.stack([both.pop(p), both.pop(pairs[p])], axis=1) for p in small}
            return {**both, **packed, **{p: steps.gather_packed(drawn, frame_of[p]) for p in images if p in frame_of}}

        return self._batch(batch_size, keys, indx, gather)


def _open_or_create(path: str | os.PathLike[str] | None, schema: Schema, settings: dict[str, Any]) -> Log:
    if path is None:
        return Log.anonymous(schema, **settings)
    exists = (as_folder(path) / "log.json").exists()
    return Log.open(path, schema=schema, **settings) if exists else Log.create(path, schema, **settings)
