"""HIL-SERL's file of weights: read without running it."""

from __future__ import annotations

import os
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hilt.core.errors import FormatError, HiltError, UnsafeError
from hilt.policies.agent.resnet10_file import read_resnet10
from tests.policies.flax_weights import nested, write


def test_kernels_are_turned_and_names_are_ours(tmp_path: Path) -> None:
    tensors, tree = read_resnet10(write(tmp_path)), nested()
    kernel = tree["ResNetBlock_1"]["Conv_0"]["kernel"]  # [height, width, inputs, outputs]
    assert np.array_equal(tensors["blocks.1.conv_0.weight"].numpy(), kernel.transpose(3, 2, 0, 1))
    assert np.array_equal(tensors["blocks.3.norm_proj.bias"].numpy(), tree["ResNetBlock_3"]["norm_proj"]["bias"])
    assert len(tensors) == 3 + 6 + 3 * 9 and "blocks.0.conv_proj.weight" not in tensors


class Evil:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def test_a_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    for name, tree in [
        ("whole", Evil(tmp_path / "ran")),
        ("inside", nested() | {"conv_init": {"kernel": Evil(tmp_path / "ran")}}),
    ]:
        path = tmp_path / f"{name}.pkl"
        path.write_bytes(pickle.dumps(tree))
        with pytest.raises(UnsafeError, match=r"asks for posix\.system.*it was refused and nothing was run"):
            read_resnet10(path)
    assert not (tmp_path / "ran").exists()


@pytest.fixture
def jax_arrays(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for JAX that pickles as it does: by a function of its own, with the state of a numpy array."""

    def _reconstruct_array(*given: Any) -> Any:
        raise AssertionError("the file was run")

    _reconstruct_array.__module__ = "jax._src.array"
    module = types.ModuleType("jax._src.array")
    module._reconstruct_array = _reconstruct_array  # type: ignore[attr-defined]
    for name, made in (
        ("jax", types.ModuleType("jax")),
        ("jax._src", types.ModuleType("jax._src")),
        ("jax._src.array", module),
    ):
        monkeypatch.setitem(sys.modules, name, made)
    _reconstruct_array.__qualname__ = "_reconstruct_array"

    class JaxArray:
        def __init__(self, array: Any, *spoiled: Any):
            self.array, self.spoiled = array, spoiled

        def __reduce__(self) -> Any:
            function, arguments, state = self.array.__reduce__()
            return _reconstruct_array, (
                function,
                arguments,
                *(self.spoiled or [state]),
                {"weak_type": False, "named_shape": {}},
            )

    return JaxArray


def changed(tree: Any, make: Any) -> Any:
    return {key: changed(value, make) for key, value in tree.items()} if isinstance(tree, dict) else make(tree)


def test_arrays_of_jax_are_read_without_it(tmp_path: Path, jax_arrays: Any) -> None:
    path = tmp_path / "jax.pkl"
    path.write_bytes(pickle.dumps(changed(nested(), jax_arrays)))
    expected = read_resnet10(write(tmp_path))
    assert all(np.array_equal(tensor.numpy(), expected[name].numpy()) for name, tensor in read_resnet10(path).items())


@pytest.mark.parametrize(
    "state", [(1, (4,), np.dtype("f4"), False, b"too few"), (1, (1,), np.dtype("O"), False, [1]), "text", (1, 2)]
)
def test_arrays_of_jax_that_are_none_are_refused(tmp_path: Path, jax_arrays: Any, state: Any) -> None:
    path = tmp_path / "jax.pkl"
    tree = changed(nested(), jax_arrays) | {"conv_init": {"kernel": jax_arrays(np.zeros(3, np.float32), state)}}
    path.write_bytes(pickle.dumps(tree))
    with pytest.raises(HiltError, match=r"jax\.pkl (has an array of JAX that is none|is not a whole pickle)"):
        read_resnet10(path)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda tree: tree.pop("norm_init"),
            "has no 'norm_init/scale', which HIL-SERL's ResNet-10 has; it begins with conv_init/kernel",
        ),
        (
            lambda tree: tree["conv_init"].update(kernel=np.zeros((7, 7, 6, 64))),
            r"conv_init/kernel has the shape \(7, 7, 6, 64\)",
        ),
        (
            lambda tree: tree["norm_init"].update(bias=np.full(64, np.nan)),
            "norm_init/bias has numbers that are not finite",
        ),
        (lambda tree: tree["norm_init"].update(bias="text"), "norm_init/bias is no array of numbers"),
    ],
)
def test_resnet10_file_refuses_other_files(tmp_path: Path, spoil: Any, message: str) -> None:
    tree = nested()
    spoil(tree)
    path = tmp_path / "other.pkl"
    path.write_bytes(pickle.dumps(tree))
    with pytest.raises(FormatError, match=message):
        read_resnet10(path)
    with pytest.raises(HiltError, match=r"missing\.pkl"):
        read_resnet10(tmp_path / "missing.pkl")
