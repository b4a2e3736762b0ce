"""Training a value model on all episodes of some logs: successes, failures, demonstrations and take-overs.

The episodes are split by initial state into three parts: those that are learned from, those by which the weights are
chosen (the lowest cross-entropy), and those that the report is about, by which nothing was chosen.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hilt.algos.adam import Adam
from hilt.algos.value_distribution import ValueSupport, loss
from hilt.core.checksums import write_json
from hilt.core.errors import ConfigError, NotFiniteError, OutcomesError, optional_module
from hilt.core.files import DISK, storage_errors
from hilt.core.progress import Report, silent
from hilt.core.tree import Array
from hilt.core.validate import check
from hilt.observe.training_alarms import TrainingAlarms
from hilt.observe.training_alarms import silent as no_notice
from hilt.policies.agent.encoders import random_crop
from hilt.policies.io.tensor_files import Tensors, write_tensors
from hilt.replay.tensors import generator
from hilt.value.policy_features import FrozenFeatures
from hilt.value.value_config import ValueConfig
from hilt.value.value_episodes import MIN_OF_EACH, ValueEpisodes, ValueInputs
from hilt.value.value_model import (
    CHECKPOINT_FILE,
    CHUNK,
    HELD_OUT_FILE,
    REPORT_FILE,
    VALUE_FILE,
    WEIGHTS_FILE,
    ValueModel,
    ValueNetwork,
    inputs_json,
    logits_of,
    model_id,
    seen_in,
)
from hilt.value.value_report import HALF_WAY, HeldOutEpisode, held_out_report, report_picture

MAX_LOOKED_AT = 4096
"""Steps at most by which the state is normalized, and by which weights are chosen"""
MIN_DEVIATION = 1e-3
QUANTILES = 101


@dataclass
class ValueSplit:
    """The episodes of each part."""

    train: list[int]
    validation: list[int]
    held_out: list[int]
    by: str
    """What was held out as a whole: "initial state" or "episode" """


@dataclass
class _Progress:
    """How far training is."""

    step: int = 0
    best_step: int = 0
    best_loss: float = float("inf")
    seconds: float = 0.0
    losses: list[list[float | None]] = field(default_factory=list)
    """Step, loss of the last batch, loss on the validation episodes; None: it was not finite"""
    alarms: list[dict[str, Any]] = field(default_factory=list)
    """Those that were raised"""


def train_value(
    episodes: ValueEpisodes,
    config: ValueConfig,
    out: Path,
    report: Report = silent,
    stopped: Sequence[int] = (),
    notify: Callable[[str], None] = no_notice,
) -> ValueModel | None:
    """Trains a model into the folder `out`, or goes on there where the same was begun. The folder is a model when this
    returns, and power-safe. None: `stopped` was not empty any more, and a checkpoint was written. `notify` is called
    with the text of each alarm; one that `config.stop_on` names is an `AlarmError`, after a checkpoint."""
    check(config)
    alarms = TrainingAlarms("value", config.stop_on, notify, config.learning_rate)
    optional_module("PIL.Image", "The picture of the report", "images", "pillow")  # before the work, not after it
    check_out(out)
    check_outcomes(episodes)
    split = split_episodes(episodes, config)
    inputs = episodes.inputs(config)
    support = _support(episodes, split, config)
    words = len({episode.task for episode in episodes}) > 1
    extractor = FrozenFeatures(config.policy, config.suite, columns=config.columns) if config.policy else None
    cached = _cached_features(extractor, episodes, split, report) if extractor is not None else None
    draws = generator(config.seed)
    width = cached.features.shape[1] if cached is not None else 0
    network = ValueNetwork(inputs, words, width, support.bins, config, draws)
    _normalize(network, episodes, split.train, inputs, cached)
    lessons = _Lessons(episodes, split, inputs, support, config, cached)
    progress = _fit(network, lessons, draws, out, report, stopped, alarms)
    if progress is None:
        return None
    report("judging it on the episodes that were held out")
    metadata: dict[str, Any] = {
        "inputs": inputs_json(inputs),
        "words": words,
        "features": {"width": width, "weights": extractor.weights} if extractor is not None else None,
        "support": asdict(support),
        "advantage_steps": config.advantage_steps,
        "tasks": {},
        "settings": asdict(config),
        "id": "",
    }
    model = ValueModel(network, metadata, out, cached or extractor)
    metadata["tasks"] |= _tasks(model, episodes, [*split.train, *split.validation])
    metadata["id"] = model.id = model_id(network.state_dict(), metadata)
    judged = [HeldOutEpisode.of(model, episodes, number) for number in split.held_out]
    metadata["training"] = _training(episodes, split, progress)
    metadata["held_out"] = {**_size(episodes, split.held_out), "by": split.by, **held_out_report(judged, config.seed)}
    if inputs.chunk is not None:
        metadata["held_out"]["chunks"] = _chunk_report(model, lessons, draws)
    if ends := alarms.take(_ranking(judged, metadata["held_out"]["after"]), progress.step):
        raise alarms.ended(ends, _kept(out))
    _save(out, model, judged)
    model.extractor = extractor
    return model


def check_out(out: Path) -> None:
    """Refuses a folder that is a model already, or something else, before the work; an unfinished one goes on."""
    with storage_errors(out):
        if (out / VALUE_FILE).is_file():
            raise ConfigError(
                f"{out} is a value model already, and nothing is written over. Choose another --out; or write its "
                f"values into a log that has new episodes: hilt data value LOG --model {out}"
            )
        if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / CHECKPOINT_FILE).is_file())):
            raise ConfigError(f"{out} exists already, and is no value model. Choose another --out, or remove it.")


def check_outcomes(episodes: ValueEpisodes) -> None:
    """Raises where values could not be learned: there is no episode, no outcome, or all of them are the same."""
    where = ", ".join(str(log.path) for log in episodes.logs)
    count, known = len(episodes), episodes.known()
    if not count:
        lost = "; ".join(f"{n} {why}" for why, n in episodes.passed_over.items())
        raise ConfigError(f"{where}: there is no episode to learn from{f' ({lost})' if lost else ''}. Record some.")
    if not known:
        raise ConfigError(
            f"{where}: of {count} episodes none has a known outcome. Label them: hilt data label LOG 0-9 --success, "
            "hilt data label LOG 10-19 --failure, or in the page of hilt open."
        )
    outcomes = Counter(bool(episodes.episodes[number].success) for number in known)
    if len(outcomes) < 2:
        what, other = ("succeeded", "failures") if outcomes[True] else ("failed", "successes")
        raise OutcomesError(
            f"{where}: all {len(known)} episodes {what}, and a value that has seen no {other} cannot rank. Give logs "
            f"with {other} too, such as that of a run (hilt train value RUN), or record some: hilt record TASK "
            "--keep all"
        )


def split_episodes(episodes: ValueEpisodes, config: ValueConfig) -> ValueSplit:
    """Three parts, by initial state."""
    known = [number for number in episodes.known() if len(episodes.episodes[number]) >= config.actions]
    successes = sum(bool(episodes.episodes[number].success) for number in known)
    if min(successes, len(known) - successes) < MIN_OF_EACH:
        raise episodes.too_few(known)
    rest, held_out, by = episodes.split(known, config.held_out, config.seed)
    train, validation, _ = episodes.split(rest, config.validation, config.seed + 1)
    return ValueSplit(train, validation, held_out, by)


def _support(episodes: ValueEpisodes, split: ValueSplit, config: ValueConfig) -> ValueSupport:
    lengths = [len(episodes.episodes[n]) for n in split.train + split.validation if episodes.episodes[n].success]
    return ValueSupport(
        config.horizon or max(lengths),
        config.bins,
        config.returns,
        config.discount if config.returns == "discounted" else 1.0,
        config.failure_penalty,
    )


class CachedFeatures:
    """The features of all steps, computed once: they are frozen."""

    def __init__(self, episodes: ValueEpisodes, numbers: Sequence[int], features: Tensor):
        rows = episodes.rows(numbers)
        self._starts = {number: 0 for number in numbers}
        for place, (number, step) in enumerate(rows.tolist()):
            if not step:
                self._starts[number] = place
        self.features = features

    def __call__(self, episodes: ValueEpisodes, rows: Array) -> Tensor:
        return self.features[[self._starts[number] + step for number, step in rows.tolist()]]


def _cached_features(
    extractor: FrozenFeatures, episodes: ValueEpisodes, split: ValueSplit, report: Report
) -> CachedFeatures:
    numbers, parts, done = [*split.train, *split.validation, *split.held_out], [], 0
    total = sum(len(episodes.episodes[number]) for number in numbers)
    for number in numbers:
        parts.append(extractor(episodes, episodes.rows([number])))
        done += len(parts[-1])
        report("features of the policy, steps", done, total)
    return CachedFeatures(episodes, numbers, torch.cat(parts))


def _normalize(
    network: ValueNetwork,
    episodes: ValueEpisodes,
    train: Sequence[int],
    inputs: ValueInputs,
    cached: CachedFeatures | None,
) -> None:
    if inputs.chunk is not None:
        whole = episodes.rows(train)
        actions = episodes.chunks(_some(whole), replace(inputs.chunk, actions=1))[:, 0]
        network.get_buffer("action_mean").copy_(torch.from_numpy(actions.mean(0)))
        network.get_buffer("action_std").copy_(torch.from_numpy(actions.std(0)).clamp(min=MIN_DEVIATION))
    if not len(network.mean):
        return
    rows = _some(episodes.rows(train))
    if cached is not None:
        seen = cached(episodes, rows)
    else:
        rows = rows[episodes.remaining(rows) >= (inputs.chunk.actions if inputs.chunk is not None else 0)]
        seen = torch.from_numpy(episodes.batch(rows, replace(inputs, cameras={})).state)
    network.mean.copy_(seen.mean(0))
    network.std.copy_(seen.std(0, unbiased=False).clamp(min=MIN_DEVIATION))


def _some(rows: Array) -> Array:
    """Evenly spaced ones, where there are many."""
    return rows[:: -(-len(rows) // MAX_LOOKED_AT)]


@dataclass
class _Lessons:
    """All that training needs besides the weights."""

    episodes: ValueEpisodes
    split: ValueSplit
    inputs: ValueInputs
    support: ValueSupport
    config: ValueConfig
    cached: CachedFeatures | None

    def seen(self, rows: Array, words: bool, draws: torch.Generator) -> dict[str, Tensor]:
        """What is seen in steps, with pictures that are shifted at random."""
        seen = seen_in(self.episodes, rows, self.inputs, words, self.cached)
        for name in [name for name in seen if name.startswith("images/")]:
            seen[name] = random_crop(seen[name], self.config.random_crop, draws)
        return seen

    def rows(self, numbers: Sequence[int]) -> Array:
        """The steps of episodes that are looked at: of a value of chunks those from which on a whole one was executed.
        What fills up a shorter one would tell that the end is near."""
        found = self.episodes.rows(numbers)
        return found[self.episodes.remaining(found) >= self.config.actions]

    def targets(self, rows: Array) -> Tensor:
        """What came of steps, as distributions over the bins."""
        success = torch.from_numpy(self.episodes.successes(rows))
        left = torch.from_numpy(self.episodes.remaining(rows))
        return self.support.targets(success, left, self.config.target, self.config.smoothing)


def _fit(
    network: ValueNetwork,
    lessons: _Lessons,
    draws: torch.Generator,
    out: Path,
    report: Report,
    stopped: Sequence[int],
    alarms: TrainingAlarms,
) -> _Progress | None:
    """Moves the weights, from a checkpoint if there is one, and leaves the best ones in the network; None where it was
    stopped before."""
    episodes, config = lessons.episodes, lessons.config
    rows, judged = lessons.rows(lessons.split.train), _some(lessons.rows(lessons.split.validation))
    wanted = lessons.targets(judged)
    adam = Adam(network.trained(), config.learning_rate, config.weight_decay)
    best = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    data = {"data": episodes.digest(), "settings": asdict(config)}
    progress = _resume(out, network, best, adam, draws, data)
    alarms.resume(progress.alarms, [(int(step or 0), _figures(loss, held)) for step, loss, held in progress.losses])
    progress.alarms = alarms.raised
    began, before = time.monotonic(), progress.seconds
    while progress.step < config.steps:
        chosen = rows[torch.randint(0, len(rows), (config.batch_size,), generator=draws).numpy()]
        found = loss(network(lessons.seen(chosen, network.words, draws), draws), lessons.targets(chosen))
        progress.step, ends = progress.step + 1, ""
        try:
            adam.descend(found)
            alarms.learned(progress.step)
        except NotFiniteError as error:
            ends = alarms.left_out(progress.step, error)
        report("training", progress.step, config.steps, f"loss {float(found.detach()):.3f}{_best(progress)}")
        due = progress.step % config.evaluate_every == 0 or progress.step == config.steps
        if due:
            held = float(loss(logits_of(network, episodes, judged, lessons.inputs, lessons.cached), wanted))
            learned = float(found.detach())
            progress.losses.append([progress.step, *(loss if isfinite(loss) else None for loss in (learned, held))])
            ends = alarms.take(_figures(learned, held), progress.step) or ends
            if held < progress.best_loss:
                progress.best_loss, progress.best_step = held, progress.step
                for name, tensor in network.state_dict().items():
                    best[name].copy_(tensor)
        if due or stopped or ends:
            progress.seconds = before + time.monotonic() - began
            _write_checkpoint(out, network, best, adam, draws, progress, data)
        if ends:
            raise alarms.ended(ends, _kept(out))
        if stopped and progress.step < config.steps:
            return None
    alarms.check_finite(progress.best_loss, progress.step)
    network.load_state_dict(best)
    return progress


def _figures(learned: float | None, held: float | None) -> dict[str, float | None]:
    """What alarms look at."""
    return {"loss": learned, "validation_loss": held}


def _kept(out: Path) -> str:
    """What is left of a training that an alarm ended."""
    return f"There is no model, but a checkpoint in {out}: the same command without stop_on goes on from there."


def _best(progress: _Progress) -> str:
    return f", validation {progress.best_loss:.3f} at step {progress.best_step}" if progress.best_step else ""


# Checkpoints


def _write_checkpoint(
    out: Path,
    network: ValueNetwork,
    best: Mapping[str, Tensor],
    adam: Adam,
    draws: torch.Generator,
    progress: _Progress,
    data: Mapping[str, Any],
) -> None:
    """One file, which takes the place of the one before."""
    DISK.make_folders(out)
    text = json.dumps({**asdict(progress), **data}).encode()
    state = {
        **{f"model.{name}": tensor for name, tensor in network.state_dict().items()},
        **{f"best.{name}": tensor for name, tensor in best.items()},
        **{f"adam.{name}": tensor for name, tensor in adam.tensors().items()},
        "generator": draws.get_state(),
        "progress": torch.frombuffer(bytearray(text), dtype=torch.uint8),
    }
    write_tensors(out, state, name=CHECKPOINT_FILE)


def _resume(
    out: Path,
    network: ValueNetwork,
    best: dict[str, Tensor],
    adam: Adam,
    draws: torch.Generator,
    data: Mapping[str, Any],
) -> _Progress:
    if not (out / CHECKPOINT_FILE).is_file():
        return _Progress()
    found = Tensors(out / CHECKPOINT_FILE)
    known = json.loads(bytes(found["progress"].numpy()))
    cure = f"Give the command as it was, choose another --out, or begin anew: remove {out}"
    if known.pop("data") != data["data"]:
        raise ConfigError(f"{out} was begun with other episodes than there are now. {cure}")
    then, now = known.pop("settings"), data["settings"]
    # what ends the training may be another
    if changed := [name for name in now if now[name] != then.get(name) and name != "stop_on"]:
        name = changed[0]
        raise ConfigError(f"{out} was begun with {name}={then.get(name)}, and now it is {now[name]}. {cure}")
    network.load_state_dict({name: found[f"model.{name}"] for name in network.state_dict()})
    for name, tensor in best.items():
        found.read(f"best.{name}", tensor)
    with torch.no_grad():
        for name, tensor in adam.tensors().items():
            tensor.copy_(found[f"adam.{name}"])
    draws.set_state(found["generator"])
    return _Progress(**known)


# What is known at the end


def _tasks(model: ValueModel, episodes: ValueEpisodes, numbers: Sequence[int]) -> dict[str, Any]:
    """For each task, from the episodes that are not held out: the usual number of steps left at the beginning, by which
    progress is measured, and the quantiles of its advantages, by which they become percentiles."""
    out = {}
    for task in sorted({episode.task for episode in episodes}):
        mine = [number for number in numbers if episodes.episodes[number].task == task]
        if not mine:  # all of it is held out, or of unknown outcome
            mine = list(numbers)
        firsts, advantages = [], []
        for number in mine:
            found, episode = model.predict(episodes, number), episodes.episodes[number]
            firsts.append(float(found.steps_left[0]))
            if model.inputs.chunk is not None:
                continue
            values = torch.from_numpy(found.value)
            advantages.append(model.support.advantages(values, episode.success, model.config.advantage_steps).numpy())
        quantiles: Array = np.zeros(0)
        if advantages:
            quantiles = np.quantile(np.concatenate(advantages).astype(np.float64), np.linspace(0, 1, QUANTILES))
        out[task] = {
            "episodes": len(mine),
            "successes": sum(bool(episodes.episodes[number].success) for number in mine),
            "steps_at_start": float(np.median(firsts)),
            "advantage_quantiles": [round(float(value), 6) for value in quantiles],
        }
    return out


def _chunk_report(model: ValueModel, lessons: _Lessons, draws: torch.Generator) -> dict[str, float]:
    """Whether a value of chunks looks at them: its loss on held-out episodes, and the same where each step is given the
    chunk of another step of its task. If the second is no higher, it tells no chunk from another."""
    episodes, rows = lessons.episodes, _some(lessons.rows(lessons.split.held_out))
    wanted, seen = lessons.targets(rows), []
    other = np.array([episodes.episodes[number].task for number in rows[:, 0]])
    exchanged = np.arange(len(rows))
    for task in sorted(set(other)):
        mine = np.flatnonzero(other == task)
        exchanged[mine] = mine[torch.randperm(len(mine), generator=draws).numpy()]
    for chunks in (rows, rows[exchanged]):
        assert model.inputs.chunk is not None
        actions = torch.from_numpy(episodes.chunks(chunks, model.inputs.chunk))
        parts = []
        with torch.no_grad():
            for first in range(0, len(rows), CHUNK):
                part = seen_in(
                    episodes, rows[first : first + CHUNK], lessons.inputs, model.network.words, lessons.cached
                )
                parts.append(model.network({**part, "actions": actions[first : first + CHUNK]}))
        seen.append(float(loss(torch.cat(parts), wanted)))
    return {"steps": len(rows), "loss": seen[0], "loss_of_other_chunks": seen[1]}


def _training(episodes: ValueEpisodes, split: ValueSplit, progress: _Progress) -> dict[str, Any]:
    return {
        **_size(episodes, split.train),
        "validation": _size(episodes, split.validation),
        "steps": progress.step,
        "best_step": progress.best_step,
        "validation_loss": progress.best_loss,
        "seconds": round(progress.seconds, 1),
        "losses": progress.losses,
        "alarms": progress.alarms,
    }


def _ranking(judged: Sequence[HeldOutEpisode], after: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What the alarm `ranking` looks at: predictions half-way through the held-out episodes."""
    predicted = [float(episode.success[episode.after(HALF_WAY)]) for episode in judged]
    half = next(one for one in after if one["share"] == HALF_WAY)
    figures = {"held_out_lowest": min(predicted), "held_out_highest": max(predicted)}
    return figures | {"held_out_auc": half["auc"], "held_out_auc_low": half["interval"][0]}


def _size(episodes: ValueEpisodes, numbers: Sequence[int]) -> dict[str, Any]:
    chosen = [episodes.episodes[number] for number in numbers]
    return {
        "episodes": len(chosen),
        "successes": sum(bool(episode.success) for episode in chosen),
        "with_a_person": sum(episode.human for episode in chosen),
        "initial_states": len({episode.state for episode in chosen}),
        "frames": sum(map(len, chosen)),
    }


def _save(out: Path, model: ValueModel, judged: Sequence[HeldOutEpisode]) -> None:
    """`value.json` comes last: with it the folder is a model."""
    DISK.make_folders(out)
    write_tensors(out, model.network.state_dict(), name=WEIGHTS_FILE)
    write_json(out / HELD_OUT_FILE, {"model": model.id, "episodes": [episode.to_json() for episode in judged]})
    DISK.replace(out / REPORT_FILE, report_picture(judged, model.metadata["held_out"], model.support))
    write_json(out / VALUE_FILE, model.metadata)
    DISK.remove(out / CHECKPOINT_FILE)
