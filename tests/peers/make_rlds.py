"""Writes TFDS datasets that have every kind of feature with the real
tensorflow_datasets, and what it reads back from them.

Runs where `tensorflow_datasets` is installed, from the root of the repository:

    python -m tests.peers.make_rlds FOLDER

makes ``FOLDER/all_features/1.0.0`` with ``FOLDER/all_features_expected.npz``, whose keys are
``split/episode/step/path``, and the same of ``ragged_features`` as ``ragged_features.npz``: there the step is ``-`` for
what belongs to the whole episode, and the elements of what has no fixed shape are numbered. Text is uint8 bytes. Beside
them ``sharded`` and ``array_record`` hold all_features in several files and in ArrayRecord files; ``splits.json`` says
which records the real library takes for many slices of splits.
"""

from __future__ import annotations

import io
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds
from PIL import Image

tfds.core.utils.gcs_utils._is_gcs_disabled = True  # it would ask the network for these datasets first
F = tfds.features
INTEGERS = [np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)]
FLOATS = [np.dtype(f"float{bits}") for bits in (16, 32, 64)]
RAW = [dtype for dtype in (*INTEGERS, *FLOATS) if dtype not in (np.uint32, np.uint64)]
"""What TensorFlow can read when it is stored as bytes."""
FLAGS = {"is_first": F.Scalar(np.bool_), "is_last": F.Scalar(np.bool_), "is_terminal": F.Scalar(np.bool_)}


class AllFeatures(tfds.core.GeneratorBasedBuilder):
    """Features whose values have one shape in each step."""

    VERSION = tfds.core.Version("1.0.0")
    EPISODES: ClassVar = {"train": [3, 1, 2, 4, 1], "val": [2, 1, 1]}

    def steps(self) -> dict[str, Any]:
        return {
            **FLAGS,
            "reward": F.Scalar(np.float32),
            "discount": F.Scalar(np.float64),
            "action": {"arm": F.Tensor(shape=(3,), dtype=np.float32), "grip": F.Scalar(np.int8)},
            "language_instruction": F.Text(),
            "observation": {
                **{str(dtype): F.Tensor(shape=(2, 3), dtype=dtype) for dtype in (*INTEGERS, *FLOATS)},
                **{f"zlib_{dtype}": F.Tensor(shape=(2, 3), dtype=dtype, encoding="zlib") for dtype in RAW},
                **{f"bytes_{dtype}": F.Tensor(shape=(4,), dtype=dtype, encoding="bytes") for dtype in RAW},
                "zlib_bool": F.Tensor(shape=(2, 3), dtype=np.bool_, encoding="zlib"),
                "bytes_complex64": F.Tensor(shape=(2,), dtype=np.complex64, encoding="bytes"),
                "bool": F.Tensor(shape=(2,), dtype=np.bool_),
                "label": F.ClassLabel(names=["closed", "open", "broken"]),
                "box": F.BBoxFeature(),
                "png": F.Image(shape=(9, 7, 3), encoding_format="png"),
                "png_gray": F.Image(shape=(9, 7, 1), encoding_format="png"),
                "png_alpha": F.Image(shape=(9, 7, 4), encoding_format="png"),
                "png_depth": F.Image(shape=(9, 7, 1), dtype=np.uint16, encoding_format="png"),
                "png_deep_color": F.Image(shape=(9, 7, 3), dtype=np.uint16, encoding_format="png"),
                "png_float": F.Image(shape=(9, 7, 1), dtype=np.float32, encoding_format="png"),
                "png_palette": F.Image(shape=(9, 7, 3), encoding_format="png"),
                "png_of_gray": F.Image(shape=(9, 7, 3), encoding_format="png"),
                "png_of_depth": F.Image(shape=(9, 7, 1), encoding_format="png"),
                "png_made_deep": F.Image(shape=(9, 7, 1), dtype=np.uint16, encoding_format="png"),
                "jpeg": F.Image(shape=(19, 27, 3), encoding_format="jpeg"),
                "jpeg_gray": F.Image(shape=(19, 27, 1), encoding_format="jpeg"),
                "jpeg_of_color": F.Image(shape=(19, 27, 1), encoding_format="jpeg"),
                "jpeg_full": F.Image(shape=(19, 27, 3), encoding_format="jpeg"),
                "jpeg_progressive": F.Image(shape=(19, 27, 3), encoding_format="jpeg"),
                "any_encoding": F.Image(shape=(9, 7, 3)),
                "labels": F.LabeledImage(labels=4, shape=(9, 7, 1)),
            },
        }

    def step(self, rng: np.random.Generator, i: int, length: int) -> dict[str, Any]:
        def numbers(dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
            if dtype.kind == "f":
                return rng.choice([0.0, -0.0, 1.5, np.inf, -np.inf, np.nan, 1e-7, rng.normal()], size=shape).astype(
                    dtype
                )
            low, high = np.iinfo(dtype).min, min(np.iinfo(dtype).max, 2**63 - 1)  # what tf.train.Example can hold
            return rng.choice(np.array([low, high, 0, 1, 100], dtype), size=shape)

        def picture(*shape: int, dtype: Any = np.uint8) -> Any:
            noise = rng.integers(0, np.iinfo(dtype).max, shape, endpoint=True)
            return (noise // 2 + np.arange(shape[1])[:, None] * (np.iinfo(dtype).max // 100)).astype(dtype)

        return {
            **flags(i, length),
            "reward": rng.normal(),
            "discount": 0.9,
            "action": {"arm": rng.normal(size=3).astype(np.float32), "grip": rng.integers(-128, 128)},
            "language_instruction": ["pick up the cup", "put it down: 放下", ""][i % 3],
            "observation": {
                **{str(dtype): numbers(dtype, (2, 3)) for dtype in (*INTEGERS, *FLOATS)},
                **{f"zlib_{dtype}": numbers(dtype, (2, 3)) for dtype in RAW},
                **{f"bytes_{dtype}": numbers(dtype, (4,)) for dtype in RAW},
                "zlib_bool": rng.random((2, 3)) > 0.5,
                "bytes_complex64": rng.normal(size=2).astype(np.complex64) * 1j,
                "bool": rng.random(2) > 0.5,
                "label": ["open", 0, 2][i % 3],
                "box": F.BBox(0.1, 0.2, 0.3, 1.0),
                "png": picture(9, 7, 3),
                "png_gray": picture(9, 7, 1),
                "png_alpha": picture(9, 7, 4),
                "png_depth": picture(9, 7, 1, dtype=np.uint16),
                "png_deep_color": picture(9, 7, 3, dtype=np.uint16),
                "png_float": rng.normal(size=(9, 7, 1)).astype(np.float32),
                "png_palette": stored(Image.fromarray(picture(9, 7, 3)).quantize(16), "png"),
                "png_of_gray": stored(Image.fromarray(picture(9, 7, 1)[..., 0]), "png"),
                "png_of_depth": stored(Image.fromarray(picture(9, 7, 1, dtype=np.uint16)[..., 0]), "png"),
                "png_made_deep": stored(Image.fromarray(picture(9, 7, 1)[..., 0]), "png"),
                "jpeg": picture(19, 27, 3),
                "jpeg_gray": picture(19, 27, 1),
                "jpeg_of_color": stored(Image.fromarray(picture(19, 27, 3)), "jpeg"),
                "jpeg_full": stored(Image.fromarray(picture(19, 27, 3)), "jpeg", subsampling=0, quality=60),
                "jpeg_progressive": stored(Image.fromarray(picture(19, 27, 3)), "jpeg", progressive=True, quality=80),
                "any_encoding": picture(9, 7, 3) if i % 2 else stored(Image.fromarray(picture(9, 7, 3)), "jpeg"),
                "labels": rng.integers(0, 4, (9, 7, 1)).astype(np.uint8),
            },
        }

    def metadata(self) -> dict[str, Any]:
        return {"episode_metadata": {"episode_id": F.Scalar(np.int32), "file_path": F.Text()}}

    def metadata_of(self, rng: np.random.Generator, number: int) -> dict[str, Any]:
        return {"episode_metadata": {"episode_id": number, "file_path": f"/data/{number}.hdf5"}}

    def _info(self) -> Any:
        features = F.FeaturesDict({**self.metadata(), "steps": F.Dataset(self.steps())})
        return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

    def _split_generators(self, dl_manager: Any) -> Any:
        return {split: self._generate_examples(split) for split in self.EPISODES}

    def _generate_examples(self, split: str) -> Iterator[tuple[int, Any]]:  # type: ignore[override]
        rng = np.random.default_rng(len(split))
        for number, length in enumerate(self.EPISODES[split]):
            steps = [self.step(rng, i, length) for i in range(length)]
            yield number, {**self.metadata_of(rng, number), "steps": steps}


class RaggedFeatures(AllFeatures):
    """Features whose shape differs from step to step, features of the whole episode, and episodes without steps."""

    EPISODES: ClassVar = {"train": [3, 0, 2], "val": [1]}

    def steps(self) -> dict[str, Any]:
        return {
            **FLAGS,
            "observation": F.FeaturesDict({"state": F.Tensor(shape=(2,), dtype=np.float32)}),
            "numbers": F.Sequence(F.Scalar(np.int64)),
            "vectors": F.Sequence(F.Tensor(shape=(2,), dtype=np.float32)),
            "words": F.Sequence(F.Text()),
            "rows": F.Sequence(F.Sequence(F.Scalar(np.int32))),
            "objects": F.Sequence({"box": F.BBoxFeature(), "label": F.ClassLabel(num_classes=4)}),
            "frames": F.Sequence(F.Image(shape=(4, 5, 3), encoding_format="png")),
            "video": F.Video(shape=(None, 4, 5, 3)),
            "any_size": F.Image(shape=(None, None, 3), encoding_format="png"),
            "any_size_jpeg": F.Image(shape=(None, None, 3), encoding_format="jpeg"),
            "one_size": F.Image(),
            "cloud": F.Tensor(shape=(None, 3), dtype=np.float32, encoding="zlib"),
            "grid": F.Tensor(shape=(None, None), dtype=np.float64, encoding="zlib"),
            "grid_bytes": F.Tensor(shape=(None, 2, None), dtype=np.uint8, encoding="bytes"),
            "names": F.Tensor(shape=(2,), dtype=np.str_),
            "brain": F.Tensor(shape=(2, 3), dtype=tf.bfloat16, encoding="zlib"),
        }

    def step(self, rng: np.random.Generator, i: int, length: int) -> dict[str, Any]:
        def picture(*shape: int) -> Any:
            return rng.integers(0, 256, shape).astype(np.uint8)

        many = int(rng.integers(0, 4))
        return {
            **flags(i, length),
            "observation": {"state": rng.normal(size=2).astype(np.float32)},
            "numbers": list(range(many)),
            "vectors": [rng.normal(size=2).astype(np.float32) for _ in range(many)],
            "words": ["a", "", "三"][:many],
            "rows": [list(range(i + k)) for k in range(many)],
            "objects": [{"box": F.BBox(0.0, 0.0, 0.5, 1.0), "label": k} for k in range(many)],
            "frames": [picture(4, 5, 3) for _ in range(many)],
            "video": picture(i, 4, 5, 3),
            "any_size": picture(4 + i, 6, 3),
            "any_size_jpeg": picture(9, 10 + i, 3),
            "one_size": picture(4, 6, 3),
            "cloud": rng.normal(size=(many, 3)).astype(np.float32),
            "grid": rng.normal(size=(many, i)),
            "grid_bytes": picture(i, 2, many),
            "names": ["left", "右"],
            "brain": rng.normal(size=(2, 3)).astype(ml_dtypes.bfloat16),
        }

    def metadata(self) -> dict[str, Any]:
        return {
            "episode_metadata": {
                "success": F.Scalar(np.bool_),
                "names": F.Sequence(F.Text()),
                "scores": F.Sequence(F.Scalar(np.float32), length=2),
                "rows": F.Sequence(F.Sequence(F.Scalar(np.int32))),
                "any_length": F.Tensor(shape=(None, 2), dtype=np.int16),
                "texts": F.Tensor(shape=(None,), dtype=np.str_),
                "map": F.Tensor(shape=(None, None), dtype=np.int8, encoding="zlib"),
                "sound": F.Audio(shape=(None,), dtype=np.int16),
                "languages": F.Translation(languages=["de", "en"]),
                "any_languages": F.TranslationVariableLanguages(languages=["de", "en"]),
                "picture": F.Image(shape=(4, 5, 3), encoding_format="png"),
            },
            "number": F.Scalar(np.uint16),
        }

    def metadata_of(self, rng: np.random.Generator, number: int) -> dict[str, Any]:
        return {
            "episode_metadata": {
                "success": number % 2 == 0,
                "names": ["x"] * number,
                "scores": [1.0, number],
                "rows": [[1] * k for k in range(number)],
                "any_length": np.ones((number, 2), np.int16),
                "texts": np.array(["a", "bc"][:number], object),
                "map": np.full((number, 3), number, np.int8),
                "sound": np.arange(5 * number, dtype=np.int16),
                "languages": {"de": "ja", "en": "yes"},
                "any_languages": {"en": ["yes", "yea"]},
                "picture": rng.integers(0, 256, (4, 5, 3)).astype(np.uint8),
            },
            "number": number,
        }


def flags(i: int, length: int) -> dict[str, bool]:
    return {"is_first": i == 0, "is_last": i == length - 1, "is_terminal": i == length - 1}


def stored(image: Image.Image, format: str, **options: Any) -> io.BytesIO:
    file = io.BytesIO()
    image.save(file, format, **options)
    return io.BytesIO(file.getvalue())


def expected(builder: Any, splits: Any, number_objects: bool) -> dict[str, Any]:
    """Everything that the real library reads from a dataset."""
    values: dict[str, Any] = {}
    for split in splits:
        for number, episode in enumerate(builder.as_dataset(split=split)):
            steps = episode.pop("steps")
            for i, step in enumerate(steps):
                values.update(named(step, f"{split}/{number}/{i}"))
            if number_objects:
                values.update(named(episode, f"{split}/{number}/-"))
    return values


def named(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from named(inner, f"{path}/{name}")
    elif isinstance(value, tf.RaggedTensor):
        for i in range(value.nrows()):
            yield from named(value[i], f"{path}/{i}")
    elif value.dtype == tf.string and value.shape.rank:
        for i, text in enumerate(value.numpy().reshape(-1)):
            yield f"{path}/{i}", np.frombuffer(text, np.uint8)
    else:
        array = value.numpy()
        yield path, np.frombuffer(array, np.uint8) if isinstance(array, bytes) else plain(np.asarray(array))


def plain(array: Any) -> Any:
    """numpy's files know no bfloat16."""
    return array.astype(np.float32) if array.dtype == ml_dtypes.bfloat16 else array


def make(folder: Path, builder_class: Any, file_format: str = "tfrecord", shards: int | None = None) -> Any:
    builder = builder_class(data_dir=str(folder), file_format=file_format)
    builder.download_and_prepare(download_config=tfds.download.DownloadConfig(num_shards=shards, verify_ssl=False))
    return builder


def slices(rng: random.Random) -> list[dict[str, Any]]:
    """Random slices of random splits: ``[file, first, count]`` for each part, or
    None where the real library refuses."""
    found = []
    for _ in range(400):
        lengths = [rng.choice((0, 1, 2, 7, 10, 33, 100)) for _ in range(rng.randint(1, 5))]
        unit = rng.choice(("", "", "%", "%", "shard"))
        total = {"": sum(lengths), "%": 100, "shard": len(lengths)}[unit]

        def border(unit: str = unit, total: int = total) -> str:
            if rng.random() < 0.2:
                return ""
            value = rng.randint(-total - 1, total + 1)
            return f"{value + rng.choice((0, 0, 0.5)) if unit == '%' else value}{unit}"

        spec = f"train[{border()}:{border()}]" if rng.random() < 0.9 else f"train[{border()}]"
        template = tfds.core.ShardedFileTemplate(
            data_dir="/", dataset_name="d", filetype_suffix="tfrecord", split="train"
        )
        info = tfds.core.SplitInfo(name="train", shard_lengths=lengths, num_bytes=0, filename_template=template)
        try:
            instructions = tfds.core.splits.SplitDict([info])[spec].file_instructions
            (whole,) = tfds.core.splits._make_absolute_instructions([info], spec)
            if whole.to is not None and whole.to < (whole.from_ or 0):  # there it means too much, here nothing
                continue
            parts = [
                [int(i.filename.rsplit("-", 3)[-3]), i.skip, i.take if i.take >= 0 else i.examples_in_shard - i.skip]
                for i in instructions
            ]
        except (ValueError, NotImplementedError):
            parts = None
        found.append({"lengths": lengths, "spec": spec, "parts": parts})
    return found


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    make(folder / "sharded", AllFeatures, shards=3)
    make(folder / "array_record", AllFeatures, "array_record")
    (folder / "splits.json").write_text(json.dumps(slices(random.Random(0))))
    np.savez_compressed(
        folder / "all_features_expected.npz", **expected(make(folder, AllFeatures), AllFeatures.EPISODES, False)
    )
    np.savez_compressed(
        folder / "ragged_features.npz", **expected(make(folder, RaggedFeatures), RaggedFeatures.EPISODES, True)
    )
