"""A reward classifier: trained from frames with labels, judged on frames of other
episodes, kept in a folder, asked by an environment.

FOLDER/classifier.json   what it looks at, its threshold and why, how good it is on held-out frames, all settings
FOLDER/held_out.json     how it judged each held-out frame
FOLDER/weights.pt        read without running what it carries
FOLDER/thresholds.png    precision and recall over thresholds
FOLDER/mistakes.png      the held-out frames it is most wrong about
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hilt.algos import classifier as algo
from hilt.algos.adam import Adam
from hilt.classifier.frames import Clip, class_count, counts, split, with_cameras
from hilt.classifier.held_out import HELD_OUT_FILE, HeldOut
from hilt.core.checksums import read_json, write_json
from hilt.core.errors import ConfigError, CorruptError, HiltError, NotFiniteError, SchemaError, optional_module, suggest
from hilt.core.files import DISK, replacing, storage_errors
from hilt.core.tree import Array, Observation, Spec, flatten
from hilt.core.validate import check, setting
from hilt.observe.drawing import Chart, Line, Pixels, draw
from hilt.observe.training_alarms import TrainingAlarms, silent
from hilt.policies.agent.config import EncoderConfig
from hilt.policies.agent.encoders import Encoder, initialize, random_crop
from hilt.recording.film import GREEN, RED, picture
from hilt.recording.recording_folder import nested
from hilt.replay.schema import spec_of_space
from hilt.replay.tensors import generator, load_pt, save_pt

if TYPE_CHECKING:
    from gymnasium.spaces import Space

CLASSIFIER_FILE, WEIGHTS = "classifier.json", "weights.pt"
CHUNK = 256
"""Frames that are looked at together when nothing is learned"""
SHOWN = 12
"""Mistakes in the picture"""
LOOKS, LOOKED_AT = 10, 512
"""Looks at held-out frames while it learns, for alarms alone; frames at each, as many of each class"""


@dataclass
class ClassifierConfig:
    """How a reward classifier is trained. As HIL-SERL does it: encoder=resnet10 weights=resnet10_params.pkl
    features=256 steps=150 batch_size=256 learning_rate=1e-4."""

    image_keys: list[str] = field(default_factory=list)
    """The cameras it looks at, such as images/front; empty: all"""
    encoder: str = setting("small", choices=("small", "resnet10"))
    """How images become numbers: "small" (three convolutions per camera), or "resnet10" (HIL-SERL's)"""
    weights: str = ""
    """A file for the trunk of "resnet10", which then stays as it is, such as HIL-SERL's
    resnet10_params.pkl; empty: all is learned"""
    features: int = setting(64, minimum=1)
    """Numbers that each camera becomes"""
    hidden: int = setting(256, minimum=1)
    """Width of the layer after them"""
    dropout: float = setting(0.1, minimum=0, below=1)
    """Share of that layer that is left out at each step of training"""
    random_crop: int = setting(4, minimum=0)
    """The maximum shift of images in training, in pixels; 0: none"""
    steps: int = setting(300, minimum=1)
    """Gradient steps"""
    batch_size: int = setting(128, minimum=1)
    """Frames in each, as many of each class"""
    learning_rate: float = setting(1e-3, above=0, maximum=1)
    """Of Adam"""
    held_out: float = setting(0.25, minimum=0.01, maximum=0.9)
    """Share of the initial states whose frames are not trained on, but judged"""
    success: int = -1
    """The class that is success; -1: the highest label"""
    threshold: float = setting(0.0, minimum=0, below=1)
    """A frame is a success from this probability on; 0: as the held-out frames recommend"""
    stop_on: list[str] = field(default_factory=list)
    """Alarms that end the training when they are raised, and nothing is written: validation, ranking, not_finite"""
    seed: int = 0
    """Of the split, the first weights and the batches"""


@dataclass(frozen=True)
class TrainedClassifier:
    """A classifier that was trained, and what is known of it."""

    model: algo.Classifier
    metadata: dict[str, Any]
    """The contents of classifier.json"""
    pictures: Mapping[str, bytes]
    """PNG files by name"""
    held_out: HeldOut
    """The frames that it was judged on"""


NOT_KEPT = "Nothing was written."
Watch = Callable[[int, float, float], None]
"""Called after each step with its number, the loss, and the share of its batch that was right"""


def train(
    clips: Sequence[Clip],
    config: ClassifierConfig,
    watch: Watch | None = None,
    notify: Callable[[str], None] = silent,
) -> TrainedClassifier:
    """Trains on most episodes and judges on the others, whose frames nothing was chosen by but the threshold. `notify`
    is called with the text of each alarm; one that `config.stop_on` names is an `AlarmError`."""
    check(config)
    alarms = TrainingAlarms("classifier", config.stop_on, notify, config.learning_rate)
    optional_module("PIL.Image", "The pictures of a classifier", "images", "pillow")  # before the work, not after it
    clips = with_cameras(clips, config.image_keys)
    classes = class_count(clips)
    success = classes - 1 if config.success < 0 else config.success
    if success >= classes:
        raise ConfigError(f"success={success}: the labels are 0 to {classes - 1}. Choose one of them.")
    if config.batch_size < classes:
        raise ConfigError(f"batch_size={config.batch_size}: expected at least one frame of each of {classes} classes.")
    learned, held, by = split(clips, config.held_out, classes, config.seed)
    draws = generator(config.seed)
    shapes = {name: image.shape[1:] for name, image in clips[0].images.items()}
    model = _model(shapes, classes, config, draws)
    began = time.monotonic()
    losses = _fit(model, learned, held, classes, config, draws, watch, alarms)
    probability = _probabilities(model, held)
    labels = torch.from_numpy(np.concatenate([clip.labels for clip in held]))
    points = algo.curve(probability[:, success], labels == success)
    best = algo.recommended(points)
    threshold = config.threshold or best.threshold
    judgment = {
        **_size(held, classes),
        "by": by,
        **_at(threshold, probability, labels, held, success),
        "curve": [[point.threshold, point.precision, point.recall, point.false_successes] for point in points],
    }
    metadata = {
        "image_keys": {name: list(shape) for name, shape in shapes.items()},
        "classes": classes,
        "success": success,
        "threshold": threshold,
        "why": _why(config.threshold, best, judgment["successes"], by),
        "settings": asdict(config),
        "training": {
            **_size(learned, classes),
            "loss": losses[-1][1],
            "losses": losses,
            "alarms": alarms.raised,
            "seconds": round(time.monotonic() - began, 1),
        },
        "held_out": judgment,
    }
    if ends := alarms.take(_ranking(probability[:, success], judgment), config.steps):
        raise alarms.ended(ends, NOT_KEPT)
    curve, mistakes = _curve_picture(points, threshold), _mistakes(held, probability, labels)
    judged = HeldOut.of(held, probability[:, success].numpy(), success)
    return TrainedClassifier(model, metadata, {"thresholds.png": curve, "mistakes.png": mistakes}, judged)


def save(folder: Path, trained: TrainedClassifier) -> None:
    """Writes the folder, whole or not at all; power-safe when it returns."""
    folder = folder.absolute()
    check_free(folder)
    DISK.make_folders(folder.parent)
    with replacing(folder, sole_writer=True) as beside:
        DISK.make_folder(beside)
        file = io.BytesIO()
        save_pt({name: value.detach() for name, value in trained.model.state_dict().items()}, file)
        for name, data in {WEIGHTS: file.getvalue(), **trained.pictures}.items():
            DISK.replace(beside / name, data)
        write_json(beside / HELD_OUT_FILE, trained.held_out.to_json())
        write_json(beside / CLASSIFIER_FILE, trained.metadata)


def check_free(folder: Path) -> None:
    """Refuses a folder in which something is, before the work."""
    with storage_errors(folder):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(
                f"{folder} exists already, and nothing is written over. Choose another --out, or remove it."
            )


def reward_function(folder: str | Path, threshold: float | None = None, space: Space = None) -> RewardClassifier:
    """What an environment asks for its reward: 1.0 where the observation is a success, else 0.0. `threshold`
    takes the place of the classifier's own; with the environment's observation `space`, one that it cannot
    judge is an error now, not at the first step."""
    folder = Path(folder)
    if not (folder / CLASSIFIER_FILE).is_file():
        cure = f"Make one with: hilt train classifier DATA --out {folder}"
        raise ConfigError(f"{folder} is no reward classifier: it has no {CLASSIFIER_FILE}. {cure}")
    if threshold is not None and not 0 < threshold < 1:
        raise ConfigError(f"threshold={threshold}: expected a probability between 0 and 1.")
    metadata = read_json(folder / CLASSIFIER_FILE)
    try:
        config, classes = ClassifierConfig(**metadata["settings"]), int(metadata["classes"])
        shapes = {str(name): tuple(int(size) for size in shape) for name, shape in metadata["image_keys"].items()}
        success, own = int(metadata["success"]), float(metadata["threshold"])
        model = _model(shapes, classes, config, None)
        model.load_state_dict(load_pt(folder / WEIGHTS))
    except HiltError:
        raise
    except (LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        cure = "Train it again with: hilt train classifier"
        raise CorruptError(f"{folder}: {CLASSIFIER_FILE} and {WEIGHTS} do not fit ({error}). {cure}") from error
    made = RewardClassifier(model, shapes, success, own if threshold is None else threshold, folder)
    if space is not None:
        made.check(space)
    return made


class RewardClassifier:
    """Calls an observation a success or not, as it comes from the environment: nested, or HIL-SERL's with a stack, of
    which the newest frame counts. A camera is found by its name in either (``images/front``, ``front``)."""

    def __init__(
        self,
        model: algo.Classifier,
        shapes: Mapping[str, tuple[int, ...]],
        success: int,
        threshold: float,
        folder: Path,
    ):
        self.threshold, self.folder = threshold, folder
        self._model, self._shapes, self._success = model, dict(shapes), success

    def __call__(self, observation: Any) -> float:
        return float(self.probability(observation) >= self.threshold)

    def probability(self, observation: Observation) -> float:
        """Returns the probability of success."""
        leaves = flatten(nested(observation)) if isinstance(observation, Mapping) else {}
        images = {}
        for name, shape in self._shapes.items():
            image = np.asarray(leaves[self._camera(name, leaves)])
            self._check_shape(name, image.dtype, image.shape)
            # a copy: an environment may use its arrays again
            images[name] = torch.from_numpy(np.array(image.reshape(-1, *shape)[-1:]))
        with torch.no_grad():
            return float(algo.probabilities(self._model(images))[0, self._success])

    def probabilities(self, images: Mapping[str, Array]) -> Array:
        """The probability of success [N] of frames uint8 [N, H, W, 3], by the names that `cameras` has."""
        with torch.no_grad():
            given = {name: torch.from_numpy(np.ascontiguousarray(image)) for name, image in images.items()}
            found: Array = algo.probabilities(self._model(given))[:, self._success].numpy()
            return found

    def cameras(self, leaves: Mapping[str, Any]) -> dict[str, str]:
        """Where its cameras are among these leaves of an observation; raises where one is missing or does not fit."""
        found = {name: self._camera(name, leaves) for name in self._shapes}
        for name, path in found.items():
            self._check_shape(name, leaves[path].dtype, leaves[path].shape)
        return found

    def check(self, space: Space) -> None:
        """Raises where an environment with this observation space cannot be judged."""
        tree = nested(spec_of_space(space, "observation_space"))
        leaves = Spec(flatten(tree) if isinstance(tree, Mapping) else {"observation": tree})
        self.cameras(leaves)

    def _camera(self, name: str, leaves: Mapping[str, Any]) -> str:
        """Where the camera is: under its own path, or the only one that ends with it or that it ends with."""
        near = [path for path in leaves if f"/{path}".endswith(f"/{name}") or f"/{name}".endswith(f"/{path}")]
        if name in leaves or len(near) == 1:
            return name if name in leaves else near[0]
        cure = (
            "Give the environment this camera, or train a classifier without it (image_keys=). Here: "
            f"{', '.join(leaves) or 'nothing'}."
        )
        raise SchemaError(
            f"the classifier {self.folder} looks at {name}, which is not in the "
            f"observation{suggest(name, leaves)} {cure}"
        )

    def _check_shape(self, name: str, dtype: Any, shape: tuple[int, ...]) -> None:
        wanted = self._shapes[name]
        if dtype != np.uint8 or shape[-3:] != wanted or len(shape) not in (3, 4) or not shape[0]:
            cure = (
                f"Make the environment with that size (task_options.image_size={wanted[0]}), or train "
                "one on frames of this size."
            )
            raise SchemaError(
                f"{name} is {dtype} {shape}, and the classifier {self.folder} was trained on uint8 {wanted}. {cure}"
            )


# Training


def _model(
    shapes: Mapping[str, Any], classes: int, config: ClassifierConfig, draws: torch.Generator | None
) -> algo.Classifier:
    """With first weights that `draws` draws; None: to be filled from a file of ours, so the trunk's own file is not
    needed."""
    # float32 everywhere: what it answers is a reward, and must not depend on the machine
    encoder = EncoderConfig(
        config.encoder, config.weights, "head" if config.weights else "critic", config.features, "float32"
    )
    if draws is None:
        encoder.weights, encoder.pretrain_updates = "", 1  # a trunk that was trained, in words that the encoder knows
    made = algo.Classifier(
        Encoder(shapes, encoder, draws), len(shapes) * config.features, classes, config.hidden, config.dropout
    )
    for part in (made.dense, made.norm, made.out) if draws is not None else ():
        initialize(part, draws)
    return made


def _fit(
    model: algo.Classifier,
    clips: Sequence[Clip],
    held: Sequence[Clip],
    classes: int,
    config: ClassifierConfig,
    draws: torch.Generator,
    watch: Watch | None,
    alarms: TrainingAlarms,
) -> list[list[float]]:
    """Moves the weights. Returns the step, the loss of the last batch and the held-out loss of each look."""
    images, labels = _joined(clips)
    some = _some_of_each(held, classes)
    parameters = [
        *model.encoder.trained_by_imitation(),
        *model.dense.parameters(),
        *model.norm.parameters(),
        *model.out.parameters(),
    ]
    adam, losses, ends = Adam(parameters, config.learning_rate), [], ""
    period = max(1, config.steps // LOOKS)
    for step in range(1, config.steps + 1):
        rows = algo.balanced(labels, classes, config.batch_size, draws)
        logits = model(
            {name: random_crop(image[rows], config.random_crop, draws) for name, image in images.items()}, draws
        )
        loss = algo.loss(logits, labels[rows])
        try:
            adam.descend(loss)
            alarms.learned(step)
        except NotFiniteError as error:
            ends = alarms.left_out(step, error)
        last = float(loss.detach())
        if watch is not None:
            watch(step, last, algo.accuracy(algo.probabilities(logits.detach()), labels[rows]))
        if step % period == 0 or step == config.steps:
            losses.append([step, last, _held_out_loss(model, some)])
            ends = alarms.take({"loss": last, "validation_loss": losses[-1][2]}, step) or ends
        if ends:
            raise alarms.ended(ends, NOT_KEPT)
    alarms.check_finite(losses[-1][2], config.steps)
    return losses


def _joined(clips: Sequence[Clip]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The images by camera, and the labels, of all frames."""
    images = {name: torch.from_numpy(np.concatenate([clip.images[name] for clip in clips])) for name in clips[0].images}
    return images, torch.from_numpy(np.concatenate([clip.labels for clip in clips]))


def _some_of_each(clips: Sequence[Clip], classes: int) -> list[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """Frames of each class at even distances, with their labels."""
    images, labels = _joined(clips)
    out = []
    for number in range(classes):
        mine = torch.nonzero(labels == number)[:, 0]
        places = mine[torch.linspace(0, len(mine) - 1, min(len(mine), LOOKED_AT // classes)).long()]
        out.append(({name: image[places] for name, image in images.items()}, labels[places]))
    return out


def _held_out_loss(model: algo.Classifier, some: Sequence[tuple[dict[str, torch.Tensor], torch.Tensor]]) -> float:
    """The loss of frames, each class as much as another, as in the batches that it learns from."""
    with torch.no_grad():
        return float(np.mean([float(algo.loss(model(images), labels)) for images, labels in some]))


def _probabilities(model: algo.Classifier, clips: Sequence[Clip]) -> torch.Tensor:
    """[N, classes]"""
    out = []
    with torch.no_grad():
        for clip in clips:
            for first in range(0, len(clip), CHUNK):
                images = {
                    name: torch.from_numpy(image[first : first + CHUNK].copy()) for name, image in clip.images.items()
                }
                out.append(algo.probabilities(model(images)))
    return torch.cat(out)


# The report


def _size(clips: Sequence[Clip], classes: int) -> dict[str, Any]:
    return {
        "episodes": len(clips),
        "initial_states": len({clip.state for clip in clips}),
        "frames": sum(map(len, clips)),
        "of_class": counts(clips, classes).tolist(),
    }


def _at(
    threshold: float, probabilities: torch.Tensor, labels: torch.Tensor, clips: Sequence[Clip], success: int
) -> dict[str, Any]:
    """How often the likeliest class is right, and what happens at the threshold that is used, near misses apart."""
    probability, truth = probabilities[:, success], labels == success
    point = algo.curve(probability, truth, [threshold])[0]
    called = (probability >= threshold).numpy()
    before = np.concatenate([clip.before_success(success) for clip in clips])
    failed = np.concatenate([clip.failed(success) for clip in clips])
    return {
        "accuracy": algo.accuracy(probabilities, labels),
        "majority": algo.majority(labels),
        "accuracy_at_threshold": float((torch.from_numpy(called) == truth).float().mean()),
        "precision": point.precision,
        "recall": point.recall,
        "successes": int(truth.sum()),
        "false_successes": point.false_successes,
        "just_before_success": {"frames": int(before.sum()), "false_successes": int((called & before).sum())},
        "failed_attempts": {"frames": int(failed.sum()), "false_successes": int((called & failed).sum())},
    }


def _ranking(probability: torch.Tensor, held: Mapping[str, Any]) -> dict[str, float]:
    """The figures that the alarm `ranking` looks at: a classifier that is no better than chance calls failures
    a success as often as successes."""
    return {
        "held_out_lowest": float(probability.min()),
        "held_out_highest": float(probability.max()),
        "held_out_recall": held["recall"],
        "held_out_false": held["false_successes"] / max(1, held["frames"] - held["successes"]),
    }


def _why(given: float, best: algo.At, successes: int, by: str) -> str:
    if given:
        return f"given as threshold={given:g}"
    if best.precision is None or not best.recall:
        return (
            f"the middle of those from {algo.LOWEST:g} up, none of which finds one of the {successes} "
            f"held-out successes, split by {by}"
        )
    return (
        f"the middle of the thresholds with the best held-out F{algo.BETA:g} ({best.score:.3f}: precision "
        f"{best.precision:.1%}, recall {best.recall:.1%} of {successes} successes, {best.false_successes} false "
        "ones). Precision counts twice: a policy learns to reach false successes, and a missed success costs it a "
        f"step. Chosen on the frames it is judged on, split by {by}"
    )


def _curve_picture(points: Sequence[algo.At], threshold: float) -> bytes:
    x = np.array([point.threshold for point in points])
    defined = np.array(
        [(point.threshold, point.precision) for point in points if point.precision is not None], np.float64
    )
    lines = [
        *([Line("precision", defined[:, 0], defined[:, 1], 0)] if len(defined) else []),
        Line("recall", x, np.array([point.recall for point in points]), 1),
        Line(f"chosen: {threshold:g}", np.array([threshold, threshold]), np.array([0.0, 1.0]), 7, dash=1),
    ]
    on = Pixels(1, 1, 0)
    draw(Chart("Which threshold?", "share of held-out frames", "threshold of p(success)", lines, percent=True), on)
    return on.png()


def _mistakes(clips: Sequence[Clip], probability: torch.Tensor, labels: torch.Tensor) -> bytes:
    """The frames whose own class it finds least likely, the worst first; green where it is right nevertheless."""
    own = probability[torch.arange(len(labels)), labels]
    places = [(clip, step) for clip in clips for step in range(len(clip))]
    tiles: list[Array] = []
    for place in torch.argsort(own)[:SHOWN].tolist():
        (clip, step), guess = places[place], int(probability[place].argmax())
        right = guess == int(labels[place])
        words = f"p(class {guess}) = {float(probability[place, guess]):.2f}, labeled {int(labels[place])}"
        images = [image[step] for image in clip.images.values()]
        tile = picture(images, GREEN if right else RED, [words, f"{clip.where}, step {step}"[-60:]], None)
        tiles.append(np.pad(tile, ((0, 8), (0, 8), (0, 0)), constant_values=255))
    while len(tiles) % 3:
        tiles.append(np.zeros_like(tiles[0]))
    rows = [np.concatenate(tiles[first : first + 3], 1) for first in range(0, len(tiles), 3)]
    image = optional_module("PIL.Image", "The pictures of a classifier", "images", "pillow").fromarray(
        np.concatenate(rows)
    )
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
