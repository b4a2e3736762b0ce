"""features.json and the records it describes, without a dataset around them."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from hilt.core.errors import CorruptError, FormatError
from hilt.formats import images
from hilt.formats.episodes import StoredSteps
from hilt.formats.tensorflow_files import example
from hilt.formats.tensorflow_files.features import TEXT, Features, Leaf

PREFIX = "tensorflow_datasets.core.features."


def tensor(dtype: str, *shape: int, encoding: str = "none") -> dict[str, Any]:
    return {
        "pythonClassName": PREFIX + "tensor_feature.Tensor",
        "tensor": {"dtype": dtype, "encoding": encoding, "shape": {"dimensions": [str(size) for size in shape]}},
    }


def image(*shape: int, dtype: str = "uint8") -> dict[str, Any]:
    content = {"dtype": dtype, "encodingFormat": "png", "shape": {"dimensions": [str(size) for size in shape]}}
    return {"pythonClassName": PREFIX + "image_feature.Image", "image": content}


def text() -> dict[str, Any]:
    return {"pythonClassName": PREFIX + "text_feature.Text", "text": {}}


def group(**features: Any) -> dict[str, Any]:
    return {"pythonClassName": PREFIX + "features_dict.FeaturesDict", "featuresDict": {"features": features}}


def sequence(feature: Any, length: int = -1, kind: str = "sequence_feature.Sequence") -> dict[str, Any]:
    return {"pythonClassName": PREFIX + kind, "sequence": {"feature": feature, "length": str(length)}}


def steps(**features: Any) -> dict[str, Any]:
    return group(steps=sequence(group(**features), kind="dataset_feature.Dataset"))


def load(tmp_path: Path, data: Any) -> Features:
    (tmp_path / "features.json").write_text(json.dumps(data))
    return Features.load(tmp_path / "features.json")


def decode(tmp_path: Path, data: Any, **fields: Any) -> dict[str, Any]:
    return load(tmp_path, data).decode(
        example.encode({name.replace("__", "/"): values for name, values in fields.items()})
    )


def test_steps_are_columns(tmp_path: Path):
    found = decode(
        tmp_path,
        steps(
            reward=tensor("float32"),
            action=tensor("float64", 2),
            done=tensor("bool"),
            note=text(),
            inner=group(count=tensor("uint8")),
        ),
        steps__reward=np.array([1.0, 2.0]),
        steps__action=np.arange(4.0),
        steps__done=np.array([0, 1]),
        steps__note=[b"a", b"b"],
        steps__inner__count=np.array([255, 256]),
    )["steps"]
    assert isinstance(found, StoredSteps) and len(found) == 2
    assert found.columns["reward"].dtype == np.float32 and found.columns["reward"].tolist() == [1, 2]
    assert found.columns["action"].dtype == np.float64 and found.columns["action"].tolist() == [[0, 1], [2, 3]]
    assert found.columns["done"].dtype == bool and found.columns["done"].tolist() == [False, True]
    assert found[1]["note"] == b"b"
    assert found.columns["inner"]["count"].tolist() == [255, 0]  # as TensorFlow casts


@pytest.mark.filterwarnings("error")
def test_numbers_too_large_for_float16_are_infinite(tmp_path: Path):
    assert decode(tmp_path, group(a=tensor("float16", 2)), a=np.array([1e30, 2.0]))["a"].tolist() == [np.inf, 2]


def test_values_of_an_episode(tmp_path: Path):
    found = decode(
        tmp_path,
        group(
            a=tensor("int16"),
            b=text(),
            c=tensor("float32", -1, 2),
            d=sequence(tensor("int32"), 2),
            e=tensor("string", 2),
        ),
        a=np.array([-7]),
        b=["日本".encode()],
        c=np.arange(6.0),
        d=np.array([4, 5]),
        e=[b"x", b"y"],
    )
    assert found["a"] == -7 and found["a"].dtype == np.int16 and found["b"].decode() == "日本"
    assert (
        found["c"].tolist() == [[0, 1], [2, 3], [4, 5]]
        and found["d"].tolist() == [4, 5]
        and found["e"].tolist() == [b"x", b"y"]
    )


def test_rows_of_rows(tmp_path: Path):
    found = decode(
        tmp_path,
        steps(i=tensor("int64"), rows=sequence(sequence(tensor("int64"))), pairs=sequence(tensor("int64"), 2)),
        steps__i=np.array([0, 1]),
        steps__rows__ragged_flat_values=np.arange(6),
        steps__rows__ragged_row_lengths_0=np.array([2, 1]),
        steps__rows__ragged_row_lengths_1=np.array([1, 2, 3]),
        steps__pairs__ragged_flat_values=np.arange(4),
        steps__pairs__ragged_row_lengths_0=np.array([2, 2]),
    )["steps"]
    assert [[row.tolist() for row in rows] for rows in found.columns["rows"]] == [[[0], [1, 2]], [[3, 4, 5]]]
    assert found.columns["pairs"].tolist() == [[0, 1], [2, 3]]  # their length is declared: one array


def test_elements_without_size_do_not_count(tmp_path: Path):
    found = decode(
        tmp_path,
        steps(nothing=tensor("float32", 0), i=tensor("int64")),
        steps__i=np.array([1, 2, 3]),
        steps__nothing=np.zeros(0),
    )
    assert found["steps"].columns["nothing"].shape == (3, 0)


def test_bytes_and_compressed_tensors(tmp_path: Path):
    half = np.array([[1.5, -2.0]], ml_dtypes.bfloat16)
    found = decode(
        tmp_path,
        steps(
            z=tensor("bfloat16", 1, 2, encoding="zlib"),
            b=tensor("bool", 3, encoding="bytes"),
            any=tensor("uint8", -1, -1, encoding="zlib"),
        ),
        steps__z=[zlib.compress(half.tobytes())] * 2,
        steps__b=[b"\x01\x00\x07", b"\x00\x00\x01"],
        steps__any__value=[zlib.compress(bytes(6)), zlib.compress(b"")],
        steps__any__shape=np.array([2, 3, 0, 9]),
    )["steps"]
    assert found.columns["z"].dtype == ml_dtypes.bfloat16 and (found.columns["z"] == half).all()
    assert found.columns["b"].tolist() == [[True, False, True], [False, False, True]]
    assert [array.shape for array in found.columns["any"]] == [(2, 3), (0, 9)]


def test_the_form_of_before_2022(tmp_path: Path):
    """``type`` and ``content``, plain or as the JSON of a message."""
    old = {
        "type": PREFIX + "features_dict.FeaturesDict",
        "content": {
            "steps": {
                "type": PREFIX + "dataset_feature.Dataset",
                "content": {
                    "feature": {
                        "type": PREFIX + "features_dict.FeaturesDict",
                        "content": {
                            "image": {
                                "type": PREFIX + "image_feature.Image",
                                "content": {"shape": [None, None, 3], "dtype": "uint8", "encoding_format": "png"},
                            },
                            "label": {"type": PREFIX + "class_label_feature.ClassLabel", "content": {"num_classes": 3}},
                            "state": {
                                "type": PREFIX + "feature.Tensor",
                                "content": {"shape": [2], "dtype": "float32", "encoding": "none"},
                            },
                            "text": {"type": PREFIX + "text_feature.Text", "content": {"use_encoder": False}},
                            "clip": {
                                "type": PREFIX + "tensor_feature.Tensor",
                                "proto_cls": "tensorflow_datasets.TensorFeature",
                                "content": json.dumps(
                                    {"shape": {"dimensions": ["1"]}, "dtype": "int32", "encoding": "none"}
                                ),
                            },
                        },
                    },
                    "length": None,
                },
            }
        },
    }
    features = load(tmp_path, old)
    assert features.tree["steps"].steps and features.tree["steps"].feature == {
        "image": Leaf(np.dtype(np.uint8), (None, None, 3), "image"),
        "label": Leaf(np.dtype(np.int64)),
        "state": Leaf(np.dtype(np.float32), (2,)),
        "text": TEXT,
        "clip": Leaf(np.dtype(np.int32), (1,)),
    }
    assert features.left_out == {}


def test_a_name_with_a_slash_is_a_path(tmp_path: Path):
    found = decode(
        tmp_path, group(**{"a/b": tensor("int64"), "a/c": tensor("int64")}), a__b=np.array([1]), a__c=np.array([2])
    )
    assert found == {"a": {"b": 1, "c": 2}}


def test_what_cannot_be_read_is_named_and_the_rest_is_read(tmp_path: Path):
    unknown = {"pythonClassName": PREFIX + "optional_feature.Optional", "optional": {"feature": tensor("int64")}}
    lazy = {"pythonClassName": PREFIX + "audio_feature.Audio", "audio": {"dtype": "int64", "lazyDecode": True}}
    data = group(
        good=tensor("int64"),
        maybe=unknown,
        inner=group(sound=lazy, gif=image(4, 8, 8, 3)),
        wide=sequence(tensor("float32", -1, -1)),
        number=tensor("complex64"),
        packed=tensor("float32", encoding="gzip"),
        huge=tensor("float32", 2**40, 2**40),
        tiny=tensor("int4"),
        mine={"pythonClassName": "my.package.Custom", "jsonFeature": {"json": "{}"}},
    )
    features = load(tmp_path, data)
    assert features.left_out == {
        "maybe": f"a feature of class {PREFIX}optional_feature.Optional, which is not supported",
        "inner/sound": "audio that is stored as files, which is not supported",
        "inner/gif": "images of uint8 and shape (4, 8, 8, 3), which are not supported",
        "wide": "a tensor of float32 and shape (None, None), which TFDS cannot read either",
        "number": "a tensor of complex64 and shape (), which TFDS cannot read either",
        "packed": "a tensor of float32 in the encoding 'gzip', which is not supported",
        "huge": "a tensor of shape (1099511627776, 1099511627776), which is too large",
        "tiny": f"a feature of class {PREFIX}tensor_feature.Tensor with numbers of int4, which is not supported",
        "mine": "a feature of class my.package.Custom, which is not supported",
    }
    assert features.decode(example.encode({"good": np.array([3])})) == {"good": 3, "inner": {}}


def test_without_images(tmp_path: Path):
    data = steps(i=tensor("int64"), image=image(2, 2, 3), inner=group(image=image(2, 2, 3), state=tensor("int64")))
    found = (
        load(tmp_path, data)
        .without_images()
        .decode(example.encode({"steps/i": np.array([1]), "steps/inner/state": np.array([2])}))
    )
    assert found["steps"].columns == {"i": np.array([1]), "inner": {"state": np.array([2])}}


STEPS = steps(
    i=tensor("int64"), v=tensor("float32", 2), z=tensor("uint8", 4, encoding="zlib"), t=text(), p=image(2, 2, 3)
)
GOOD = {
    "steps/i": np.array([1]),
    "steps/v": np.ones(2, np.float32),
    "steps/z": [zlib.compress(bytes(4))],
    "steps/t": [b"x"],
    "steps/p": [images.encode(np.zeros((2, 2, 3), np.uint8))],
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps/i": np.array([1, 2])}, "features of 'steps': 'i' has 2 steps and 'v' has 1"),
        ({"steps/i": np.ones(1)}, "feature 'steps/i': expected int64, got float32"),
        ({"steps/i": [b"x"]}, "feature 'steps/i': expected int64, got bytes"),
        ({"steps/v": np.ones(3)}, "feature 'steps/v': cannot reshape"),
        ({"steps/v": np.array([1])}, "feature 'steps/v': expected float32, got int64"),
        ({"steps/t": np.array([1])}, "feature 'steps/t': expected bytes, got int64"),
        ({"steps/z": [b"yy"]}, "feature 'steps/z': not a compressed tensor"),
        (
            {"steps/z": [zlib.compress(bytes(50))]},
            "feature 'steps/z': a compressed tensor was cut off, or is larger than its shape",
        ),
        ({"steps/z": [zlib.compress(bytes(3))]}, r"feature 'steps/z': 3 bytes for a tensor of uint8 and shape \[4\]"),
        ({"steps/z": [zlib.compress(bytes(4))[:-2]]}, "feature 'steps/z': a compressed tensor was cut off"),
        ({"steps/z": np.array([1])}, "feature 'steps/z': expected bytes, got numbers of int64"),
        ({"steps/p": [b"x"]}, "feature 'steps/p': neither a PNG nor a JPEG image"),
        ({"steps/p": []}, "features of 'steps': 'i' has 1 steps and 'p' has 0"),
    ],
)
def test_a_record_that_does_not_fit_is_refused(tmp_path: Path, change: dict[str, Any], message: str):
    features = load(tmp_path, STEPS)
    assert len(features.decode(example.encode(GOOD))["steps"]) == 1
    with pytest.raises(CorruptError, match=message):
        features.decode(example.encode({**GOOD, **change}))


def test_a_missing_value_of_the_episode_is_refused(tmp_path: Path):
    with pytest.raises(CorruptError, match="feature 'a': it is missing"):
        decode(tmp_path, group(a=tensor("int64")))
    with pytest.raises(CorruptError, match="feature 'a': expected one value, got 2"):
        decode(tmp_path, group(a=tensor("int8", 1, encoding="bytes")), a=[b"x", b"y"])


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([3, 3], "rows of 6 values in all, and 4 values"),
        ([-1, 5], "rows of 4 values"),
        ([2**62, 2**62], "rows of"),
        ([1], "rows of 1"),
    ],
)
def test_rows_that_do_not_add_up_are_refused(tmp_path: Path, lengths: list[int], message: str):
    data = sequence(sequence(tensor("int64")))
    with pytest.raises(CorruptError, match=f"feature 'r': {message}"):
        decode(tmp_path, group(r=data), r__ragged_flat_values=np.arange(4), r__ragged_row_lengths_0=np.array(lengths))


def test_a_compressed_bomb_is_not_inflated(tmp_path: Path):
    bomb = zlib.compress(bytes(1 << 26))
    for shape, sizes in (((-1, -1), [1 << 40, 1]), ((-1, -1), [-1, 1]), ((-1, -1), [4, 4])):
        with pytest.raises(
            CorruptError,
            match=r"feature 'a': a tensor of shape|feature 'a': a compressed tensor was cut off, or is larger",
        ):
            decode(
                tmp_path, group(a=tensor("uint8", *shape, encoding="zlib")), a__value=[bomb], a__shape=np.array(sizes)
            )


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {},
        tensor("int64"),
        group(a=None),
        group(a=tensor("int64", 10**30) | {"tensor": {"shape": "abc", "dtype": "int64"}}),
        {"featuresDict": {"features": []}},
        group(a=sequence(None)),
        {
            "pythonClassName": PREFIX + "features_dict.FeaturesDict",
            "featuresDict": {"features": {"a": {"tensor": {"shape": 1e400}}}},
        },
    ],
)
def test_what_is_no_features_is_refused(tmp_path: Path, data: Any):
    with pytest.raises(
        FormatError, match=r"features\.json: (not the features of a TFDS dataset|expected a FeaturesDict at the top)"
    ):
        load(tmp_path, data)


def test_features_inside_features_have_a_limit(tmp_path: Path):
    data = tensor("int64")
    for _ in range(40):
        data = group(a=data)
    with pytest.raises(FormatError, match="more than 32 features inside features"):
        load(tmp_path, data)
    (tmp_path / "features.json").write_text('{"featuresDict":{"features":{"a":' * 20_000)
    with pytest.raises(FormatError, match="not the features"):
        Features.load(tmp_path / "features.json")
