"""Tensors, their files, devices and random numbers."""

from __future__ import annotations

import importlib
import io
import json
import os
import pickle
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hilt.core.errors import (
    ConfigError,
    CorruptError,
    FormatError,
    MissingPackageError,
    SchemaError,
    StorageError,
    UnsafeError,
)
from hilt.replay import tensors as bridge

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

GOLDEN = Path(__file__).parent.parent / "golden" / "rlinf"


def test_importing_the_module_does_not_import_torch() -> None:
    code = "import sys, hilt.replay.tensors; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600).stdout == "False\n"


def test_without_torch_the_error_has_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    for call in (
        lambda: bridge.generator(0),
        lambda: bridge.load_pt("x.pt"),
        lambda: bridge.to_torch({"a": np.zeros(1)}),
        lambda: bridge.check_device("cpu"),
    ):
        with pytest.raises(MissingPackageError, match=r"pip install 'hilt\[torch\]'"):
            call()
    assert bridge.check_device(None) is None
    assert not bridge.is_tensor(np.zeros(1))


# Trees


def batch() -> dict[str, Any]:
    return {
        "observations": {
            "state": np.arange(6, dtype=np.float32).reshape(2, 3),
            "image": np.full((2, 4, 4, 3), 7, np.uint8),
        },
        "rewards": np.array([0.5, 1.0]),
        "dones": np.array([True, False]),
        "tokens": np.arange(4).reshape(2, 2),
    }


@pytest.mark.parametrize("device", (None, "cpu", torch.device("cpu")))
def test_arrays_become_tensors_and_share_their_memory(device: Any) -> None:
    arrays = batch()
    tensors = bridge.to_torch(arrays, device)
    assert list(tensors) == list(arrays)
    assert tensors["observations"]["state"].dtype is torch.float32
    assert tensors["dones"].dtype is torch.bool
    tensors["observations"]["image"][0] = 9
    assert (arrays["observations"]["image"][0] == 9).all()


def test_a_list_of_devices_gets_one_copy_each() -> None:
    copies = bridge.to_torch(batch(), ["cpu", torch.device("cpu")])
    assert len(copies) == 2
    for copy in copies:
        np.testing.assert_array_equal(copy["tokens"].numpy(), batch()["tokens"])


def test_a_mover_checks_the_device_at_once() -> None:
    assert bridge.mover("cpu")(batch())["rewards"].tolist() == [0.5, 1.0]
    with pytest.raises(ConfigError, match="no torch device"):
        bridge.mover("gpu")


def test_tensors_that_cannot_be_shared_are_copied_without_a_warning() -> None:
    fixed = np.arange(3.0)
    fixed.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensors = bridge.to_torch(
            {
                "fixed": fixed,
                "swapped": np.arange(3, dtype=">i4"),
                "reversed": np.arange(3)[::-1],
                "number": 2.5,
                "scalar": np.float32(1),
            }
        )
    assert [t.tolist() for t in tensors.values()] == [[0.0, 1.0, 2.0], [0, 1, 2], [2, 1, 0], 2.5, 1.0]
    tensors["fixed"][0] = 5
    assert fixed[0] == 0


@pytest.mark.parametrize("value", [["a"], "text", None, np.array(["a"]), np.array([None])])
def test_a_field_that_is_no_number_is_named(value: Any) -> None:
    with pytest.raises(SchemaError, match=r"^observations/task"):
        bridge.to_torch({"observations": {"task": value}})


def test_tensors_become_arrays_that_share_their_memory() -> None:
    values = torch.arange(6.0).reshape(2, 3)
    for value, expected in (
        (values, values.numpy()),
        (values.T, values.numpy().T),
        (torch.ones(2, requires_grad=True), np.ones(2, np.float32)),
        (torch.tensor([1j]).conj(), np.array([-1j], np.complex64)),
        (np.ones(1), np.ones(1)),
        (2.5, np.array(2.5)),
    ):
        array, name = bridge.raw_array(value, "a")
        assert array.dtype == expected.dtype and name == ""
        np.testing.assert_array_equal(array, expected)
    assert np.shares_memory(bridge.raw_array(values, "a")[0], values.numpy())


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float8_e4m3fn))
def test_floats_that_numpy_lacks_keep_their_bits(dtype: Any) -> None:
    values = torch.randn(100, generator=torch.Generator().manual_seed(0)).to(dtype)
    array, name = bridge.raw_array(values, "a")
    assert array.dtype in (np.int16, np.uint8)
    back = bridge.from_raw_array(array, name)
    assert back.dtype is dtype and torch.equal(back.float(), values.float())


def test_a_sparse_tensor_is_refused_by_name() -> None:
    with pytest.raises(SchemaError, match=r"^deep/a is a Tensor, not a dense tensor"):
        bridge.raw_array(torch.eye(2).to_sparse(), "deep/a")


def test_batches_of_tensors_and_arrays_are_concatenated() -> None:
    assert bridge.concatenate([torch.ones(1, 2), np.zeros((1, 2), np.float32)], 0).tolist() == [[1, 1], [0, 0]]
    assert bridge.concatenate([torch.ones(1, 1), torch.zeros(1, 1)], 1).tolist() == [[1, 0]]


# Devices


def test_devices() -> None:
    cpu = torch.device("cpu")
    assert bridge.check_device(None) is None
    assert bridge.check_device("cpu") == cpu == bridge.check_device(cpu)
    assert bridge.check_device(["cpu", cpu]) == [cpu, cpu] == bridge.check_device(("cpu", "cpu:0"))[:1] * 2


class Sharding:
    """Stands for a jax device or sharding, which HIL-SERL passes here."""


@pytest.mark.parametrize(
    "device, said",
    [
        (Sharding(), "Sharding"),
        ([Sharding()], "Sharding"),
        (0, "builtins.int"),
        ("gpu", "'gpu' is no torch device"),
        ("meta", "holds no data"),
        ([], "empty list"),
        ("cuda:99", "'cuda:99' is not on this machine, which has"),
        (True, "builtins.bool"),
    ],
)
def test_tensors_on_an_unknown_device_are_an_error(device: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        bridge.check_device(device)
    assert "torch" in str(error.value) and "pass None" in str(error.value)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_cuda() -> None:
    tensors = bridge.to_torch(batch(), "cuda")
    assert all(t.is_cuda for t in (tensors["rewards"], tensors["observations"]["image"]))
    np.testing.assert_array_equal(
        bridge.raw_array(tensors["observations"]["image"], "")[0], batch()["observations"]["image"]
    )
    first, second = bridge.to_torch(batch(), ["cuda:0", "cpu"])
    assert first["tokens"].is_cuda and not second["tokens"].is_cuda
    assert bridge.to_torch(first, "cuda:0")["tokens"].data_ptr() == first["tokens"].data_ptr()


# Random numbers


def test_the_index_stream_is_the_one_rlinf_draws() -> None:
    for seed, draws in json.loads((GOLDEN / "expected.json").read_text())["index_stream"].items():
        source = bridge.generator(int(seed))
        for draw in draws:
            ids = bridge.randint(source, draw["high"], draw["n"])
            assert ids.dtype == np.int64
            assert ids.tolist() == draw["ids"]


def test_the_global_generator_is_left_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3).tolist()
    torch.manual_seed(1)
    bridge.randint(bridge.generator(5), 10, 10)
    bridge.generator(None)
    assert torch.rand(3).tolist() == expected


def test_seeds() -> None:
    assert bridge.generator(None).initial_seed() != bridge.generator(None).initial_seed()
    assert (
        bridge.randint(bridge.generator(np.int64(3)), 9, 4).tolist()
        == bridge.randint(bridge.generator(3), 9, 4).tolist()
    )
    for seed in ("3", 1.5, 2**64, True):
        with pytest.raises(ConfigError, match="pass an integer of at most 64 bits"):
            bridge.generator(seed)  # type: ignore[arg-type]


# Files


def trajectory() -> dict[str, Any]:
    return {
        "max_episode_length": 8,
        "model_weights_id": "x",
        "rewards": torch.arange(6.0).reshape(3, 2),
        "flags": torch.tensor([[True, False]]),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 4),
        "number": torch.tensor(3),
        "curr_obs": {"image": torch.full((2, 4), 255, dtype=torch.uint8), "tokens": torch.tensor([2**40])},
        "forward_inputs": {},
    }


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert list(ours) == list(theirs)
    for key, value in theirs.items():
        if isinstance(value, dict):
            same(ours[key], value)
        elif isinstance(value, torch.Tensor):
            assert ours[key].dtype is value.dtype and torch.equal(ours[key], value)
        else:
            assert ours[key] == value


@pytest.mark.parametrize("kind", ("pt", "pkl"))
def test_a_dictionary_comes_back(kind: str, tmp_path: Path) -> None:
    save, load = getattr(bridge, f"save_{kind}"), getattr(bridge, f"load_{kind}")
    save(trajectory(), tmp_path / "a")
    same(load(tmp_path / "a"), trajectory())
    with (tmp_path / "b").open("wb") as file:
        save(trajectory(), file)
    same(load(str(tmp_path / "b")), trajectory())
    for path in (tmp_path / "a", tmp_path / "b"):  # as RLinf reads it
        theirs = torch.load(path, map_location="cpu") if kind == "pt" else pickle.loads(path.read_bytes())
        same(theirs, trajectory())


@pytest.mark.parametrize("kind", ("pt", "pkl"))
def test_files_of_rlinf_are_read(kind: str) -> None:
    index = json.loads((GOLDEN / kind / "trajectory_index.json").read_text())["trajectory_index"]
    for number, info in index.items():
        path = GOLDEN / kind / f"trajectory_{number}_{info['model_weights_id']}.{kind}"
        loaded = getattr(bridge, f"load_{kind}")(path)
        reference = torch.load(path) if kind == "pt" else pickle.loads(path.read_bytes())
        same(loaded, reference)
        assert loaded["prev_logprobs"].shape == tuple(info["shape"])
        assert loaded["model_weights_id"] == info["model_weights_id"]


@pytest.mark.parametrize("kind", ("pt", "pkl"))
def test_a_view_is_saved_without_what_it_is_a_view_of(kind: str, tmp_path: Path) -> None:
    whole = torch.zeros(1000, 1000)
    getattr(bridge, f"save_{kind}")({"row": whole[3], "column": whole[:, 2], "array": np.arange(3)}, tmp_path / "a")
    assert (tmp_path / "a").stat().st_size < 20_000
    loaded = getattr(bridge, f"load_{kind}")(tmp_path / "a")
    assert loaded["column"].shape == (1000,) and loaded["array"].tolist() == [0, 1, 2]


def test_save_pt_refuses_what_rlinf_cannot_read(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match=r"^obs/task is a list"):
        bridge.save_pt({"obs": {"task": ["a"]}}, tmp_path / "a")


@pytest.mark.parametrize("kind", ("pt", "pkl"))
def test_a_missing_file_is_named(kind: str, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"nothing\.pt: No such file or directory. Check the path"):
        getattr(bridge, f"load_{kind}")(tmp_path / "nothing.pt")


@pytest.mark.parametrize("kind", ("pt", "pkl"))
def test_a_cut_file_is_corrupt(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"cut.{kind}"
    getattr(bridge, f"save_{kind}")(trajectory(), path)
    whole = path.read_bytes()
    for length in [0, 1, 10, *range(20, len(whole), 97), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(CorruptError, match=rf"cut\.{kind}"):
            getattr(bridge, f"load_{kind}")(path)


def test_a_flipped_bit_in_a_pt_file_is_found(tmp_path: Path) -> None:
    path = tmp_path / "flipped.pt"
    bridge.save_pt(trajectory(), path)
    whole = path.read_bytes()
    rewards = trajectory()["rewards"].numpy().tobytes()
    for at in (whole.index(rewards) + 5, whole.index(b"FloatStorage"), whole.index(b"max_episode_length") + 2):
        damaged = bytearray(whole)
        damaged[at] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(CorruptError, match=r"flipped\.pt is damaged: the checksum of .* does not match"):
            bridge.load_pt(path)


def test_an_archive_of_several_disks_is_corrupt(tmp_path: Path) -> None:
    bridge.save_pt({"a": torch.zeros(3)}, path := tmp_path / "disks.pt")
    raw = bytearray(path.read_bytes())
    locator = raw.index(b"PK\x06\x07")
    raw[locator + 16] = 2
    path.write_bytes(raw)
    # by Python or by torch
    with pytest.raises(CorruptError, match=r"disks\.pt is (a damaged archive|not a whole file of torch\.save) \("):
        bridge.load_pt(path)


def test_a_cut_pickle_in_an_archive_with_good_checksums_is_corrupt(tmp_path: Path) -> None:
    bridge.save_pt(trajectory(), tmp_path / "whole.pt")
    with zipfile.ZipFile(tmp_path / "whole.pt") as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = next(name for name in members if name.endswith("data.pkl"))
    for length in range(0, len(members[name]), 3):
        with zipfile.ZipFile(tmp_path / "cut.pt", "w") as archive:
            for member, data in members.items():
                archive.writestr(member, data[:length] if member == name else data)
        with pytest.raises((CorruptError, UnsafeError), match=r"cut\.pt (is not a whole file of torch\.save|asks for)"):
            bridge.load_pt(tmp_path / "cut.pt")


@pytest.mark.parametrize("data", [b"hello" * 20, bytes(1000), b"PK\x03\x04" + bytes(100), pickle.dumps([1, 2, 3], 0)])
def test_load_pt_refuses_other_files(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_bytes(data)
    for load in (bridge.load_pt, bridge.load_pkl):
        with pytest.raises((CorruptError, FormatError), match="other"):
            load(path)


def test_a_file_without_a_dictionary_is_named(tmp_path: Path) -> None:
    torch.save([1], tmp_path / "list.pt")
    with pytest.raises(FormatError, match=r"list\.pt holds a list"):
        bridge.load_pt(tmp_path / "list.pt")


class Call:
    def __init__(self, function: Any, *arguments: Any):
        self.reduced = (function, arguments)

    def __reduce__(self) -> Any:
        return self.reduced


def legacy(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, _use_new_zipfile_serialization=False)
    return file.getvalue()


def test_load_pt_executes_nothing(tmp_path: Path) -> None:
    sentinel = tmp_path / "ran"
    evil = Call(os.system, f"touch {sentinel}")
    path = tmp_path / "evil.file"
    torch.save({"rewards": torch.ones(2), "x": evil}, path)
    with pytest.raises(UnsafeError, match=r"evil\.file asks for .*system.* nothing was run"):
        bridge.load_pt(path)
    path.write_bytes(legacy({"x": evil}))
    with pytest.raises(UnsafeError, match=r"evil\.file asks for .*system"):
        bridge.load_pt(path)
    load_from_bytes = torch.storage._load_from_bytes
    for hidden in (evil, Call(load_from_bytes, legacy(evil)), Call(torch.load, str(path)), Call(torch.hub.load, "x")):
        path.write_bytes(pickle.dumps({"rewards": torch.ones(2), "x": hidden}))
        with pytest.raises(UnsafeError, match=r"evil\.file asks for"):
            bridge.load_pkl(path)
    path.write_bytes(pickle.dumps({"x": Call(load_from_bytes, pickle.dumps(evil, 2))}))
    with pytest.raises((UnsafeError, CorruptError), match=r"evil\.file"):
        bridge.load_pkl(path)
    assert not sentinel.exists()


REBUILD = importlib.import_module("torch._utils")._rebuild_tensor_v2


def storage(count: int) -> Any:
    return torch.storage.TypedStorage(
        wrap_storage=torch.zeros(count).untyped_storage(), dtype=torch.float32, _internal=True
    )


@pytest.mark.parametrize(
    "arguments",
    [
        (0, (3,), (1,)),  # beyond the end
        (1, (2,), (1,)),
        (0, (10**12,), (0,)),  # no memory until someone copies it
        (0, (2**40, 2**40), (1, 1)),
        (-1, (1,), (1,)),
        (0, (1,), (1, 1)),
        (0, (-1,), (1,)),
        (0, ("a",), (1,)),
    ],
)
def test_a_tensor_stays_within_its_memory(arguments: Any, tmp_path: Path) -> None:
    path = tmp_path / "tensor.pkl"
    path.write_bytes(pickle.dumps({"x": Call(REBUILD, storage(2), *arguments, False, {})}))
    with pytest.raises(CorruptError, match=r"tensor\.pkl is not a whole pickle \(a tensor of shape"):
        bridge.load_pkl(path)


def test_whole_numbers_have_no_gradients(tmp_path: Path) -> None:
    memory = torch.storage.TypedStorage(
        wrap_storage=torch.zeros(2).untyped_storage(), dtype=torch.int32, _internal=True
    )
    (tmp_path / "tensor.pkl").write_bytes(pickle.dumps({"x": Call(REBUILD, memory, 0, (2,), (1,), True, {})}))
    with pytest.raises(CorruptError, match=r"a tensor of torch\.int32 with gradients"):
        bridge.load_pkl(tmp_path / "tensor.pkl")


def test_a_tensor_needs_memory_and_no_hooks(tmp_path: Path) -> None:
    path = tmp_path / "tensor.pkl"
    for reduced in (
        Call(REBUILD, storage(2), 0, (2,), (1,), False, {"hook": 1}),
        Call(REBUILD, np.zeros(2), 0, (2,), (1,), False, {}),
    ):
        path.write_bytes(pickle.dumps({"x": reduced}))
        with pytest.raises(UnsafeError, match="with hooks or without memory"):
            bridge.load_pkl(path)


def test_dtypes_and_sizes_are_read(tmp_path: Path) -> None:
    path = tmp_path / "more.pkl"
    path.write_bytes(pickle.dumps({"dtype": torch.bfloat16, "size": torch.Size([2, 3])}))
    assert bridge.load_pkl(path) == {"dtype": torch.bfloat16, "size": torch.Size([2, 3])}
