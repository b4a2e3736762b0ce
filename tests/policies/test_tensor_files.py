"""Weights as files: read by others and from others, tensor by tensor; damage is found and named."""

from __future__ import annotations

import json
import resource
import weakref
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from hilt.core.errors import (
    ConfigError,
    CorruptError,
    DiskFullError,
    FormatError,
    MissingFieldError,
    SchemaError,
    StorageError,
    UnknownNameError,
    UnsafeError,
)
from hilt.policies.io import tensor_files as weights
from hilt.policies.io.tensor_files import INDEX, Tensors, load_into, read_pt, write_tensors


class Net(nn.Module):
    """A tied pair, a buffer and a type of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6, bias=False), nn.Linear(4, 6)
        self.tied = nn.Linear(4, 6, bias=False)
        self.tied.weight = self.first.weight
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


def filled(seed: int = 0) -> Net:
    net, generator = Net(), torch.Generator().manual_seed(seed)
    for tensor in net.state_dict().values():
        tensor.copy_(torch.randint(-9, 9, tensor.shape, generator=generator))
    return net


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


@pytest.mark.parametrize("shard_bytes", [10**9, 150])
def test_round_trip_and_the_library_beside(tmp_path: Path, shard_bytes: int):
    net = filled()
    files = write_tensors(tmp_path, net.state_dict(), shard_bytes)
    assert len(files) == (1 if shard_bytes > 1000 else 3) and (tmp_path / INDEX).exists() == (len(files) > 1)
    theirs = {name: tensor for file in files for name, tensor in safetensors.torch.load_file(file).items()}
    assert all(torch.equal(theirs[name], tensor) for name, tensor in net.state_dict().items())
    assert {p.name for p in tmp_path.iterdir()} == {p.name for p in files} | ({INDEX} if len(files) > 1 else set())
    with torch.device("meta"):
        again = Net()
    assert load_into(again, Tensors(tmp_path)) == []
    assert same(net, again) and again.tied.weight is again.first.weight and again.first.weight.requires_grad


def test_the_same_tensors_make_the_same_file(tmp_path: Path):
    state = {f"layer {number} \N{GREEK SMALL LETTER PI}": torch.full((3,), float(number)) for number in range(40)}
    files = []
    for _ in range(3):
        (path,) = write_tensors(tmp_path, state)
        files.append(path.read_bytes())
    assert files[0] == files[1] == files[2]
    again, ours = safetensors.torch.load_file(path), Tensors(tmp_path)
    assert all(torch.equal(again[name], tensor) and torch.equal(ours[name], tensor) for name, tensor in state.items())
    assert all(len(entry.crc32) == 8 for entry in ours.entries.values())


def test_tensor_files_read_into_another_type_and_names(tmp_path: Path):
    net = filled()
    safetensors.torch.save_file(
        {f"model.{n}": t.clone() for n, t in net.state_dict().items()}, tmp_path / "model.safetensors"
    )
    with torch.device("meta"):
        again = Net()
    load_into(again, Tensors(tmp_path), rename=lambda name: f"model.{name}", dtype=torch.bfloat16)
    assert again.second.bias.dtype == torch.bfloat16 and again.count.dtype == torch.int64
    assert torch.equal(again.second.bias.float(), net.second.bias)
    present = filled(1)
    load_into(present, Tensors(tmp_path / "model.safetensors"), rename=lambda name: f"model.{name}")
    assert same(present, net)


def test_damage_names_tensor_and_file(tmp_path: Path):
    net = filled()
    file = write_tensors(tmp_path, net.state_dict())[0]
    whole = file.read_bytes()
    flipped = bytearray(whole)
    flipped[whole.index(weights._bytes_of(net.second.weight.detach())) + 5] ^= 1
    file.write_bytes(flipped)
    with pytest.raises(
        CorruptError, match=r"model\.safetensors: the bytes of the tensor second\.weight do not have their checksum"
    ):
        load_into(Net(), Tensors(file))
    file.write_bytes(whole[:-3])
    with pytest.raises(
        CorruptError, match=r"model\.safetensors: not a whole safetensors file \(.*not fully covered\)\. Copy it again"
    ):
        Tensors(file)
    file.write_bytes(whole)
    cut = Tensors(file)
    file.write_bytes(whole[:-3])
    with pytest.raises(CorruptError, match=r"model\.safetensors: not a whole safetensors file"):
        cut["second.weight"]  # it was cut after it had been opened
    for broken in (b"", b"\xff" * 20, whole[:30], whole[:8] + b"[]" + whole[10:]):
        file.write_bytes(broken)
        with pytest.raises(CorruptError, match=r"model\.safetensors: not a whole safetensors file"):
            Tensors(file)


def test_names_and_shapes_are_compared_before_anything_is_read(tmp_path: Path):
    net = filled()
    file = write_tensors(tmp_path, net.state_dict())[0]
    bare = filled(1)
    before = {name: tensor.clone() for name, tensor in bare.state_dict().items()}
    bare.extra = nn.Linear(2, 2, bias=False)
    with pytest.raises(MissingFieldError, match=r"1 missing \(extra\.weight\)"):
        load_into(bare, Tensors(file))
    assert load_into(bare, Tensors(file), strict=False) == [] and torch.equal(bare.second.bias, net.second.bias)
    with pytest.raises(MissingFieldError, match=r"3 unknown \(count, first\.weight, tied\.weight\)"):
        load_into(nn.ModuleDict({"second": nn.Linear(4, 6)}), Tensors(file))
    wrong = filled(1)
    wrong.second = nn.Linear(5, 6)
    with pytest.raises(
        SchemaError,
        match=r"model\.safetensors: the tensor second\.weight has the shape \[6, 4\], and the config asks for \[6, 5\]",
    ):
        load_into(wrong, Tensors(file))
    assert torch.equal(wrong.first.weight, before["first.weight"])


def test_devices_types_and_places_are_checked(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"device 'cuda:7' is not on this machine, which has \d+ CUDA devices"):
        weights.check_device("cuda:7")
    assert weights.check_device("cpu") == torch.device("cpu") and weights.check_dtype("bfloat16") == torch.bfloat16
    with pytest.raises(UnknownNameError, match=r"no type of weights named 'float23'; did you mean 'float32'\?"):
        weights.check_dtype("float23")
    file = write_tensors(tmp_path, filled().state_dict())[0]
    for shape in ((7, 4), (5, 4)):
        with pytest.raises(
            SchemaError,
            match=r"model\.safetensors: the tensor second\.weight has the shape \[6, 4\], and \[\d, 4\] was asked for",
        ):
            Tensors(file).read("second.weight", torch.empty(shape))


def test_an_index_that_is_not_true(tmp_path: Path):
    write_tensors(tmp_path, filled().state_dict(), 150)
    index = json.loads((tmp_path / INDEX).read_text())
    places = index["weight_map"]
    other = next(file for file in places.values() if file != places["second.bias"])
    (tmp_path / INDEX).write_text(json.dumps(index | {"weight_map": places | {"second.bias": other}}))
    with pytest.raises(MissingFieldError, match=rf"{other}: the tensor second\.bias is not in it"):
        Tensors(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "../secret"}}))
    with pytest.raises(FormatError, match="does not name the file of each tensor, in the same folder"):
        Tensors(tmp_path)
    with pytest.raises(StorageError, match=r"nothing.*No such file.*Check the path"):
        Tensors(tmp_path / "nothing")


def test_tensors_that_are_made_while_they_are_written_live_no_longer_than_their_shard(tmp_path: Path):
    net, alive, most = filled(), 0, 0

    def value(name: str) -> torch.Tensor:
        nonlocal alive, most
        made = net.state_dict()[name] * 2
        alive, most = alive + made.nbytes, max(most, alive + made.nbytes)

        def gone(size: int) -> None:
            nonlocal alive
            alive -= size

        weakref.finalize(made, gone, made.nbytes)
        return made

    write_tensors(tmp_path, net.state_dict(), 120, value=value)
    assert alive == 0 and most <= 120 < sum(tensor.nbytes for tensor in net.state_dict().values())
    assert torch.equal(Tensors(tmp_path)["second.bias"], 2 * net.second.bias)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(SchemaError, match=r"count was to be torch.int64 \[\]: it is torch.float64"):
        write_tensors(tmp_path, net.state_dict(), value=lambda name: net.state_dict()[name].double())
    with pytest.raises(SchemaError, match=r"tensors of torch\.complex128 have no place in a safetensors file"):
        write_tensors(tmp_path, {"a": torch.zeros(2, dtype=torch.complex128)})
    assert sorted(path.name for path in tmp_path.iterdir()) == before, "what failed leaves nothing behind"


def test_written_files_have_the_permissions_of_other_files(tmp_path: Path):
    (tmp_path / "other").touch()
    (file,) = write_tensors(tmp_path, filled().state_dict())
    assert file.stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(DiskFullError, match=r"model\.safetensors: no room left to write"):
            write_tensors(tmp_path, {"a": torch.zeros(10_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_files_of_torch_save(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    torch.save({"module.fc.weight": torch.ones(2), "bias": torch.zeros(1)}, tmp_path / "a.pt")
    assert {name: tensor.tolist() for name, tensor in read_pt(tmp_path / "a.pt").items()} == {
        "fc.weight": [1, 1],
        "bias": [0],
    }
    torch.save({"a": print}, tmp_path / "b.pt")
    with pytest.raises(UnsafeError, match=r"b\.pt holds more than tensors; it was refused"):
        read_pt(tmp_path / "b.pt")
    (tmp_path / "c.pt").write_bytes((tmp_path / "a.pt").read_bytes()[:300])
    with pytest.raises(CorruptError, match=r"c\.pt is not a whole file"):
        read_pt(tmp_path / "c.pt")
    torch.save([1], tmp_path / "d.pt")
    with pytest.raises(FormatError, match=r"d\.pt holds no dictionary of tensors"):
        read_pt(tmp_path / "d.pt")
    assert capsys.readouterr().out == ""
