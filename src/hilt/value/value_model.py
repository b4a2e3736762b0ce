"""A value model: from pictures, words and state, or from the frozen features of a policy, to a distribution over what
comes of them; and its folder.

FOLDER/value.json          what it looks at, its tasks, how good it is on held-out episodes, all settings, its id
FOLDER/model.safetensors   its weights
FOLDER/held_out.json       its values of every step of the held-out episodes
FOLDER/report.png          reliability, and curves of some held-out episodes

While it is trained the folder has ``checkpoint.safetensors`` alone, from which the same command goes on.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor, nn
from torch.nn.utils import skip_init

from hilt.algos.value_distribution import ValueSupport
from hilt.core.checksums import read_json
from hilt.core.errors import ConfigError, CorruptError, HiltError, SchemaError
from hilt.core.tree import Array
from hilt.policies.agent.config import EncoderConfig
from hilt.policies.agent.encoders import Encoder, Linear, dropout, initialize
from hilt.policies.io.tensor_files import Tensors, load_into
from hilt.value.chunk_inputs import ChunkInputs
from hilt.value.value_config import ValueConfig
from hilt.value.value_episodes import ObservedBatch, ValueEpisodes, ValueInputs

VALUE_FILE, WEIGHTS_FILE, HELD_OUT_FILE, REPORT_FILE = (
    "value.json",
    "model.safetensors",
    "held_out.json",
    "report.png",
)
CHECKPOINT_FILE = "checkpoint.safetensors"
WORD_WIDTH, STATE_WIDTH, CHUNK_WIDTH = 256, 64, 128
"""Numbers that the words are hashed to, that the state becomes, and that the actions of a chunk become"""
MAX_DEVIATIONS = 5.0
CHUNK = 256
"""Steps that are looked at together when nothing is learned"""


class ValueNetwork(nn.Module):
    """Logits of the bins, from an encoder of its own or from features of a policy."""

    def __init__(
        self,
        inputs: ValueInputs,
        words: bool,
        features: int,
        bins: int,
        config: ValueConfig,
        draws: Generator | None,
    ):
        """`features`: how many a policy has; 0: it has an encoder of its own. `draws` gives the first weights; None:
        they are to be loaded."""
        super().__init__()
        self.words, self.dropout = words, config.dropout
        states = sum(inputs.state.values())
        self.encoder = _encoder(inputs, config, draws) if inputs.cameras and not features else None
        self.proprio = Linear(states, STATE_WIDTH) if states and not features else None
        self.text = Linear(WORD_WIDTH, STATE_WIDTH) if words and not features else None
        chunk = inputs.chunk
        self.chunk = Linear(chunk.actions * chunk.action_dim, CHUNK_WIDTH) if chunk is not None else None
        width = features or sum(
            (
                self.encoder.width if self.encoder is not None else 0,
                STATE_WIDTH if states else 0,
                STATE_WIDTH if words else 0,
            )
        )
        self.register_buffer("mean", torch.zeros(features or states))
        self.register_buffer("std", torch.ones(features or states))
        if chunk is not None:
            width += CHUNK_WIDTH
            self.register_buffer("action_mean", torch.zeros(chunk.action_dim))
            self.register_buffer("action_std", torch.ones(chunk.action_dim))
        sizes = [width, config.hidden, config.hidden]
        self.layers = nn.ModuleList(Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.norms = nn.ModuleList(skip_init(nn.LayerNorm, config.hidden) for _ in self.layers)
        self.out = Linear(config.hidden, bins)
        if draws is not None:
            own = [self.proprio, self.text, self.chunk, self.layers, self.norms, self.out]
            for part in own:
                if part is not None:
                    initialize(part, draws)
            with torch.no_grad():
                self.out.weight.mul_(0.01)  # it begins with no opinion

    def trained(self) -> list[nn.Parameter]:
        """The parameters that are learned: all, but for a trunk that was given."""
        encoder = [] if self.encoder is None else self.encoder.trained_by_imitation()
        frozen = set() if self.encoder is None else {id(p) for p in self.encoder.parameters()}
        return [*encoder, *(parameter for parameter in self.parameters() if id(parameter) not in frozen)]

    def forward(self, seen: Mapping[str, Tensor], generator: Generator | None = None) -> Tensor:
        """Logits [B, bins] of what `observed_tensors` gives. Dropout only with a `generator`, that is, in training."""
        if "features" in seen:
            x = (seen["features"].float() - self.mean) / self.std
        else:
            parts = []
            if self.encoder is not None:
                parts.append(self.encoder({name: seen[f"images/{name}"] for name in self.encoder.paths}, generator))
            if self.proprio is not None:
                state = ((seen["state"] - self.mean) / self.std).clamp(-MAX_DEVIATIONS, MAX_DEVIATIONS)
                parts.append(torch.tanh(self.proprio(state)))
            if self.text is not None:
                parts.append(torch.tanh(self.text(seen["words"])))
            x = torch.cat(parts, -1)
        if self.chunk is not None:
            actions = ((seen["actions"] - self.action_mean) / self.action_std).clamp(-MAX_DEVIATIONS, MAX_DEVIATIONS)
            x = torch.cat([x, torch.relu(self.chunk(actions.flatten(1)))], -1)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = torch.relu(norm(layer(x)))
            if generator is not None and self.dropout:
                x = dropout(x, self.dropout, generator)
        return self.out(x)


@dataclass(frozen=True)
class Predictions:
    """What a model predicts of the steps of one episode."""

    value: Array
    """float32 [T]"""
    success: Array
    """The probability of success, float32 [T]"""
    steps_left: Array
    """The expected number of steps to success, if it succeeds, float32 [T]"""


class ValueModel:
    """A trained model, as its folder describes it."""

    def __init__(self, network: ValueNetwork, metadata: dict[str, Any], folder: Path, extractor: Any = None):
        self.network, self.metadata, self.folder, self.extractor = network, metadata, folder, extractor
        self.id: str = str(metadata["id"])
        """Names the model: a hash of its weights and of all that its values depend on"""
        self.inputs = inputs_of(metadata)
        self.support = ValueSupport(**metadata["support"])
        self.tasks: dict[str, dict[str, Any]] = metadata["tasks"]
        self.config = ValueConfig(**metadata["settings"])

    def check(self, episodes: ValueEpisodes) -> None:
        """Raises where it cannot judge these episodes."""
        if self.inputs.chunk is not None:
            raise ConfigError(
                f"{self.folder} is a value of chunks (actions={self.inputs.chunk.actions}), by which a policy chooses: "
                "hilt eval RUN --best-of 8 --verifier FOLDER. Values of the steps of a log come from a model without "
                "actions=N."
            )
        episodes.check(self.inputs)
        strange = sorted({episode.task for episode in episodes} - self.tasks.keys())
        if strange:
            raise SchemaError(
                f"the value model {self.folder} was trained on {_listed(self.tasks)}, and there are episodes of "
                f"{_listed(strange)}. Train one on both: hilt train value DATA... --out NEW"
            )

    def logits(self, episodes: ValueEpisodes, rows: Array) -> Tensor:
        """Returns the logits of steps of episodes, [N, bins]."""
        return logits_of(self.network, episodes, rows, self.inputs, self.extractor)

    def predict(self, episodes: ValueEpisodes, number: int) -> Predictions:
        """Predicts all steps of one episode. Of a value of chunks, the last steps, from which on fewer actions are
        left than a chunk has, have the value of the last whole chunk."""
        rows = episodes.rows([number])
        if self.inputs.chunk is not None:
            rows[:, 1] = rows[:, 1].clip(max=len(rows) - self.inputs.chunk.actions)
        logits = self.logits(episodes, rows)
        found = (self.support.value(logits), self.support.success(logits), self.support.steps_left(logits))
        return Predictions(*(each.numpy().astype(np.float32) for each in found))


def logits_of(
    network: ValueNetwork, episodes: ValueEpisodes, rows: Array, inputs: ValueInputs, extractor: Any = None
) -> Tensor:
    """What a network makes of steps of episodes, [N, bins], without gradients."""
    out = []
    with torch.no_grad():
        for first in range(0, len(rows), CHUNK):
            part = rows[first : first + CHUNK]
            out.append(network(seen_in(episodes, part, inputs, network.words, extractor)))
    return torch.cat(out)


def seen_in(
    episodes: ValueEpisodes, rows: Array, inputs: ValueInputs, words: bool, extractor: Any = None
) -> dict[str, Tensor]:
    """What a network reads of steps of episodes."""
    if extractor is None:
        return observed_tensors(episodes.batch(rows, inputs), words)
    seen = {"features": extractor(episodes, rows)}
    return seen if inputs.chunk is None else {**seen, "actions": torch.from_numpy(episodes.chunks(rows, inputs.chunk))}


def observed_tensors(batch: ObservedBatch, words: bool) -> dict[str, Tensor]:
    """A batch as `ValueNetwork` reads it."""
    seen = {f"images/{name}": torch.from_numpy(image) for name, image in batch.images.items()}
    seen["state"] = torch.from_numpy(batch.state)
    if words:
        known = {text: word_features(text) for text in set(batch.texts)}
        seen["words"] = torch.from_numpy(np.stack([known[text] for text in batch.texts]))
    if batch.actions is not None:
        seen["actions"] = torch.from_numpy(batch.actions)
    return seen


def word_features(text: str) -> Array:
    """An instruction as `WORD_WIDTH` numbers of length 1: each of its words, and each pair of neighbors, adds 1 or -1
    at a place, both given by its checksum."""
    words = text.casefold().split()
    out = np.zeros(WORD_WIDTH, np.float32)
    for term in [*words, *(" ".join(pair) for pair in itertools.pairwise(words))]:
        code = zlib.crc32(term.encode())
        out[code % WORD_WIDTH] += 1.0 if code >> 31 else -1.0
    length = float(np.linalg.norm(out))
    return out / length if length else out


def model_id(weights: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> str:
    """A hash of the weights and of all else that values depend on."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode() + np.ascontiguousarray(weights[name].detach().cpu().numpy()).tobytes())
    kept = {name: metadata[name] for name in ("inputs", "words", "features", "support", "tasks", "advantage_steps")}
    digest.update(json.dumps(kept, sort_keys=True).encode())
    return digest.hexdigest()[:12]


def load_value_model(folder: str | Path) -> ValueModel:
    """The model of a folder of `hilt train value`."""
    from hilt.value.policy_features import FrozenFeatures

    folder = Path(folder)
    if not (folder / VALUE_FILE).is_file():
        cure = f"Make one with: hilt train value DATA --out {folder}"
        if (folder / CHECKPOINT_FILE).is_file():
            cure = "Its training has not ended: give the same hilt train value command again, which goes on."
        raise ConfigError(f"{folder} is no value model: it has no {VALUE_FILE}. {cure}")
    metadata = read_json(folder / VALUE_FILE)
    try:
        config = ValueConfig(**metadata["settings"])
        features = metadata["features"]
        network = ValueNetwork(
            inputs_of(metadata),
            bool(metadata["words"]),
            features["width"] if features else 0,
            int(metadata["support"]["bins"]),
            config,
            None,
        )
        load_into(network, Tensors(folder / WEIGHTS_FILE))
        found = model_id(network.state_dict(), metadata)
        if found != metadata["id"]:
            raise ValueError(f"their hash is {found}, expected {metadata['id']}")
    except HiltError:
        raise
    except (LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise CorruptError(
            f"{folder}: {VALUE_FILE} and {WEIGHTS_FILE} do not fit ({error}). Train it again with: hilt train value"
        ) from error
    extractor = None
    if features:
        extractor = FrozenFeatures(config.policy, config.suite, features["weights"], config.columns)
    return ValueModel(network, metadata, folder, extractor)


def inputs_of(metadata: Mapping[str, Any]) -> ValueInputs:
    """What a model looks at, from its value.json."""
    found = metadata["inputs"]
    cameras = {str(name): (int(size[0]), int(size[1])) for name, size in found["cameras"].items()}
    chunk = ChunkInputs(**found["chunk"]) if found.get("chunk") else None
    return ValueInputs(cameras, {str(path): int(count) for path, count in found["state"].items()}, chunk)


def inputs_json(inputs: ValueInputs) -> dict[str, Any]:
    """What a model looks at, as `inputs_of` reads it."""
    cameras = {name: list(size) for name, size in inputs.cameras.items()}
    chunk = {} if inputs.chunk is None else {"chunk": inputs.chunk.to_json()}
    return {"cameras": cameras, "state": inputs.state, **chunk}


def _encoder(inputs: ValueInputs, config: ValueConfig, draws: Generator | None) -> Encoder:
    # float32 everywhere: what it answers is written into logs, and must not depend on the machine
    made = EncoderConfig(
        config.encoder, config.weights, "head" if config.weights else "critic", config.features, "float32"
    )
    if draws is None:
        made.weights, made.pretrain_updates = "", 1  # a trunk that was trained, in words that the encoder knows
    return Encoder({name: (*size, 3) for name, size in inputs.cameras.items()}, made, draws)


def _listed(names: Sequence[str] | Mapping[str, Any]) -> str:
    shown = [repr(name) for name in list(names)[:3]]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(shown)}{more}"
