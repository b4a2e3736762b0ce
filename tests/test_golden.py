"""`python -m tests.golden`: everything in tests/golden is as it should be, and a single
changed number is noticed in each kind of file."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import golden
from tests.effort import need, sampled
from tests.forked import TIMEOUT_S, ForkServer
from tests.golden.__main__ import main
from tests.golden.kinds import algos
from tests.replay.rlinf_golden import packed

pytest.importorskip("torch")
FOLDER = golden.FOLDER
FOUND, UNKNOWN = golden.find([FOLDER])


@pytest.fixture
def copied(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """A copy of a folder of golden files, to be spoilt."""
    yield lambda name: Path(shutil.copytree(FOLDER / name, tmp_path / name))


@pytest.mark.parametrize("case", FOUND, ids=lambda case: f"{case.parent.name}-{case.name}")
def test_equal_to_the_original(case: Path):
    if "video" in case.name or case.name.startswith("all_features"):
        need("av")
    result = golden.run(case, FOUND[case])
    assert not result.failures
    assert result.cases >= 5


def test_every_golden_file_is_compared():
    """Every kind has files, and every file a kind."""
    assert UNKNOWN == []
    assert {kind.__name__.rpartition(".")[2] for kind in FOUND.values()} == set(golden.KINDS)


def test_golden_command(fork_server: ForkServer, tmp_path: Path):
    script, files = (
        tmp_path / "command.py",
        [str(FOLDER / "reverb" / name) for name in ("removers.json", "tables.json")],
    )
    script.write_text(
        f"import runpy, sys\nsys.argv = ['golden', *{files}]\nrunpy.run_module('tests.golden', run_name='__main__')\n"
    )
    done = fork_server.run(script, TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert rows[1:] == [["reverb/removers.json", "8", "0", "ok"], ["reverb/tables.json", "32", "0", "ok"]]


# --- one changed number ---


def change_npz(path: Path, key: str, change: Callable[[Any], Any] | None = None) -> None:
    """Changes one value of a file, or one number of it, at random but as little as it can be."""
    with np.load(path) as file:
        values = dict(file)
    values[key] = (change or nudged)(values[key])
    np.savez(path, **values)


def nudged(array: Any) -> Any:
    """With one number changed by the least that its type allows."""
    array, place = np.array(array), random.Random(0).randrange(array.size)
    flat = array.reshape(-1)
    if array.dtype == bool:
        flat[place] = not flat[place]
    elif array.dtype.kind == "f":
        flat[place] = np.nextafter(flat[place], np.inf, dtype=array.dtype)
    else:
        flat[place] += 1 if flat[place] < np.iinfo(array.dtype).max else -1
    return array


def change_packed(path: Path, key: str) -> None:
    """The same in RLinf's files, which hold one flat array for each dtype."""
    with np.load(path) as file:
        dtype, shape, start = json.loads(str(file["index"]))[key]

    def change(flat: Any) -> Any:
        part = slice(start, start + int(np.prod(shape, dtype=int)))
        flat[part] = nudged(flat[part])
        return flat

    change_npz(path, dtype, change)
    assert packed(path.name, path.parent)[key].shape == tuple(shape)


def change_json(path: Path, *keys: Any) -> None:
    document = json.loads(path.read_text())
    node = document
    for key in keys[:-1]:
        node = node[key]
    value = node[keys[-1]]
    node[keys[-1]] = (
        not value if isinstance(value, bool) else value + "." if isinstance(value, str) else value + type(value)(1)
    )
    path.write_text(json.dumps(document))


def fails(capsys: pytest.CaptureFixture[str], path: Path, *says: str) -> None:
    assert main([str(path)]) == 1
    printed = capsys.readouterr().out
    assert "FAIL" in printed
    for text in says:
        assert text in printed


@pytest.mark.parametrize(
    ("name", "key"),
    sampled(
        [
            *(
                ("bridge_like", f"train/0/2/{path}")
                for path in ("action", "language_embedding", "language_instruction", "is_last", "reward")
            ),
            *(("bridge_like", f"val/0/1/observation/{path}") for path in ("joint_state", "state", "wrist_image")),
            ("d4rl_like", "train/1/0/observation"),
            ("d4rl_like", "val/0/0/discount"),
        ],
        ("bridge_like", "train/0/2/language_instruction"),
        ("bridge_like", "val/0/1/observation/wrist_image"),
        ("d4rl_like", "val/0/0/discount"),
        names=2,
    ),
)
def test_one_number_of_rlds(name: str, key: str, copied: Any, capsys: pytest.CaptureFixture[str]):
    """In the expected numbers: one more in a byte, a PNG or a text, the next float in all others."""
    path = copied("rlds") / f"{name}_expected.npz"
    change_npz(path, key)
    fails(capsys, path, key)
    fails(capsys, path.with_name(name), key)  # the folder stands for it, too


def test_one_pixel_of_a_jpeg(copied: Any, capsys: pytest.CaptureFixture[str]):
    path = copied("rlds") / "bridge_like_expected.npz"

    def spot(levels: int) -> Callable[[Any], Any]:
        return lambda image: np.where(np.arange(image.size).reshape(image.shape) == 77, image ^ np.uint8(levels), image)

    change_npz(path, "train/0/1/observation/image", spot(1))
    assert main([str(path)]) == 0
    change_npz(path, "train/0/1/observation/image", spot(1 ^ 4))
    fails(capsys, path, "train/0/1/observation/image[")


@pytest.mark.parametrize(
    ("key", "levels"), [("1.raw", 40), ("2.decoded", 1), ("0.lanczos224", 2), ("3.center_crop", 1), ("1.jpeg", 1)]
)
def test_one_number_of_a_picture(key: str, levels: int, copied: Any, capsys: pytest.CaptureFixture[str]):
    path = copied("image") / "openvla_image_path.npz"

    def change(array: Any) -> Any:
        return np.where(np.arange(array.size).reshape(array.shape) == array.size // 2, array ^ np.uint8(levels), array)

    change_npz(path, key, change)
    fails(capsys, path)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("pi0_tiny", "out.sample_actions"),
        *(("pi05_tiny", key) for key in ("out.flow_loss", "in.tokens")),
        *(("smolvla_tiny", key) for key in ("out.sample_actions", "in.state")),
        *(
            pytest.param("pi05_tiny", key, marks=pytest.mark.long)
            for key in ("out.sample_actions", "in.noise", "in.time", "in.image_mask1", "seed")
        ),
        *(
            pytest.param("smolvla_tiny", key, marks=pytest.mark.long)
            for key in ("out.flow_loss", "in.image0", "in.token_mask")
        ),
    ],
)
def test_one_number_of_pi0(name: str, key: str, copied: Any, capsys: pytest.CaptureFixture[str]):
    """The first: an output by 1e-4 of the largest (less may be rounding), an input by a tenth or by one."""
    path = copied("pi0") / f"{name}.npz"

    def change(array: Any) -> Any:
        moved = np.array(array)
        first = moved.reshape(-1)[:1]
        if key.startswith("out."):
            first[:] = first + 1e-4 * np.abs(array).max()
        else:
            first[:] = first * 1.1 if moved.dtype.kind == "f" else first ^ 1
        return moved

    change_npz(path, key, change)
    fails(capsys, path)


@pytest.mark.parametrize(
    "key",
    [
        *(
            "grpo",
            "gae_adv_g0.99_l0.95",
            "gae_ret_g0.99_l0.95",
            "reinforce_pp_g0.98",
            "policy_loss_h0.28_l0.2",
            "clip_fraction",
            "ppo_kl",
        ),
        *(
            "value_loss_c0.5",
            "value_clip_fraction",
            "kl_penalty_kl",
            "kl_penalty_abs",
            "kl_penalty_mse",
            "entropy_mean_first6",
            "mask",
        ),
        *("adaptive_kl_values", "rewards", "finish", "group", "values", "log_prob", "ref_log_prob", "value_pred"),
    ],
)
def test_one_number_of_the_algorithms(key: str, copied: Any, capsys: pytest.CaptureFixture[str]):
    """The first, by 1e-5 or by one; an input by a tenth."""
    path = copied("algos") / "algos.npz"

    def change(array: Any) -> Any:
        moved = np.array(array)
        first = moved.reshape(-1)[:1]
        first[:] = (
            ~first
            if moved.dtype == bool
            else first + (1 if moved.dtype.kind == "i" else 0.1 if key in algos.INPUTS else 1e-5)
        )
        return moved

    change_npz(path, key, change)
    fails(capsys, path)


def test_a_dataset_of_other_bytes(copied: Any, capsys: pytest.CaptureFixture[str]):
    """What is compared comes from the dataset: one bit of it is noticed, and so is one episode less."""
    folder = copied("rlds")
    shard = next((folder / "d4rl_like/1.0.0").glob("*val*"))
    data = bytearray(shard.read_bytes())
    data[300] ^= 1
    shard.write_bytes(data)
    fails(capsys, folder / "d4rl_like", "does not have its checksum")
    change_json(folder / "bridge_like/1.0.0/dataset_info.json", "splits", 0, "name")
    fails(capsys, folder / "bridge_like")
    shutil.rmtree(folder / "d4rl_like")
    assert main([str(folder / "d4rl_like_expected.npz")]) == 1
    assert "no kind of golden file that is known" in capsys.readouterr().out


@pytest.mark.parametrize(
    "keys",
    sampled(
        [
            *((1, "trajectories", 0, field) for field in range(6)),
            (0, "error"),
            *((1, "episodes", 0, 1, name) for name in ("observation", "action", "reward", "discount", "is_first")),
        ],
        *((1, "trajectories", 0, field) for field in (0, 5)),
        (0, "error"),
        *((1, "episodes", 0, 1, name) for name in ("action", "is_first")),
    ),
)
def test_one_number_of_a_conversion(keys: tuple[Any, ...], copied: Any, capsys: pytest.CaptureFixture[str]):
    path = copied("rlds") / "trajectories.json"
    change_json(path, *keys)
    fails(capsys, path, f"{keys[0]}")


@pytest.mark.parametrize(
    ("name", "key"),
    sampled(
        [
            (name, key)
            for name in ("v3_image", "v3_video")
            for key in (
                *("observation.state", "action", "next.reward", "next.done"),
                "complementary_info.is_intervention",
            )
        ],
        *(("v3_image", key) for key in ("observation.state", "complementary_info.is_intervention")),
        ("v3_video", "next.done"),
        names=2,
    ),
)
def test_one_number_of_lerobot(name: str, key: str, copied: Any, capsys: pytest.CaptureFixture[str]):
    need(*["av"] * name.endswith("video"))
    path = copied("lerobot") / f"{name}_expected.npz"
    change_npz(path, f"2/5/{key}")
    fails(capsys, path.with_name(name), f"2/5/{key}")


def test_pictures_of_lerobot(copied: Any, capsys: pytest.CaptureFixture[str]):
    """One level of one pixel in a PNG; in a video, where every frame differs from
    what went in, the frame before instead."""
    need("av")
    folder, key = copied("lerobot"), "1/2/observation.images.wrist"
    change_npz(folder / "v3_image_expected.npz", key)
    fails(capsys, folder / "v3_image", f"{key}[")
    with np.load(folder / "v3_video_expected.npz") as file:
        before = file["1/1/observation.images.wrist"]
    change_npz(folder / "v3_video_expected.npz", key, lambda _: before)
    fails(capsys, folder / "v3_video", f"{key}: ", "dB from what is expected, and at least 23 are needed")
    shutil.copy(FOLDER / "lerobot/v3_video_expected.npz", folder)
    with np.load(folder / "v3_video_expected.npz") as file:
        darker = {
            name: np.uint8(file[name] // 1.07) if name.endswith("images.front") else file[name] for name in file.files
        }
    np.savez(folder / "v3_video_expected.npz", **darker)
    fails(capsys, folder / "v3_video", "observation.images.front: ", "dB on average, and at least 31 are needed")


@pytest.mark.parametrize("stack", [1, 2])
@pytest.mark.parametrize(
    "key",
    sampled(
        [
            "plain_seed3_0/observations/state",
            "plain_seed3_1/rewards",
            "plain_indx/actions",
            "plain_download_2_6/next_observations/front",
            "efficient_cap50_packed/observations/wrist",
            "efficient_cap12_unpacked/dones",
            "plain_wrapped7_seed11/masks",
            "plain_indx/indx",
            "in/observations/front",
            "in/actions",
        ],
        "plain_seed3_0/observations/state",
        "efficient_cap50_packed/observations/wrist",
    ),
)
def test_one_number_of_hilserl(key: str, stack: int, copied: Any, capsys: pytest.CaptureFixture[str]):
    path = copied("hilserl") / f"buffers_n{stack}.npz"
    change_npz(path, key)
    fails(capsys, path)


@pytest.mark.parametrize(
    "keys",
    [
        ("layout", "efficient_packed_n2", "observations/front", 1, 1),
        ("slots", "efficient_cap50_n1", "valid"),
        ("wrong", "gaps", 2, 0),
    ],
    ids=lambda keys: keys[0],
)
def test_one_fact_of_hilserl(keys: tuple[Any, ...], copied: Any, capsys: pytest.CaptureFixture[str]):
    path = copied("hilserl") / "facts.json"
    change_json(path, *keys)
    fails(capsys, path, keys[1])


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("tables.json", ("cases", 3, "steps", 7, -2)),
        ("tables.json", ("cases", 31, "steps", -1, -1)),
        ("removers.json", ("cases", 0, "steps", 9, 2, 0)),
        ("prioritized.json", ("cases", 1, "rounds", 0, "counts", 2, 1)),
        ("prioritized.json", ("cases", 4, "rounds", 1, "probabilities", 0, 1)),
        ("prioritized.json", ("cases", 0, "rounds", 0, "probabilities", 0, 0)),
    ],
)
def test_one_number_of_reverb(name: str, keys: tuple[Any, ...], copied: Any, capsys: pytest.CaptureFixture[str]):
    path = copied("reverb") / name
    change_json(path, *keys)
    fails(capsys, path, f"case {keys[1]}")


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("trajectories.npz", "3/prev_logprobs"),
        ("trajectories.npz", "0/curr_obs/main_images"),
        ("rollout.npz", "split/1/3/2/rewards"),
        ("rollout.npz", "sizes/2/1-1/1/dones"),
        ("rollout.npz", "extract/1/any/0/next_obs/states"),
        ("rollout.npz", "cat_out/versions"),
        ("rollout.npz", "update/chunk/1/new_flags"),
        ("rollout.npz", "update/flat/0/intervene_actions"),
    ],
)
def test_one_number_of_rlinf(name: str, key: str, copied: Any, capsys: pytest.CaptureFixture[str]):
    path = copied("rlinf") / name
    change_packed(path, key)
    fails(capsys, path)


@pytest.mark.parametrize(
    ("name", "keys"),
    sampled(
        [
            ("expected.json", ("index_stream", "0", 0, "ids", 0)),
            ("expected.json", ("cases", -3, "size")),
            ("rollout.json", ("extract/1/any",)),
            ("rollout.json", ("weights_ids", 1, "id")),
        ],
        ("expected.json", ("cases", -3, "size")),
        ("rollout.json", ("weights_ids", 1, "id")),
        names=2,
    ),
)
def test_one_number_of_rlinfs_notes(name: str, keys: tuple[Any, ...], copied: Any, capsys: pytest.CaptureFixture[str]):
    path = copied("rlinf") / name
    cases = json.loads(path.read_text()).get("cases", [])
    if keys[-1] == "size":
        keys = ("cases", next(i for i, case in enumerate(cases) if "size" in case), "size")
    if keys[0] == "index_stream":
        keys = ("index_stream", next(iter(json.loads(path.read_text())["index_stream"])), *keys[2:])
    change_json(path, *keys)
    fails(capsys, path)


def test_one_number_that_rlinf_sampled(copied: Any, capsys: pytest.CaptureFixture[str]):
    path = copied("rlinf") / "expected.npz"
    change_npz(path, "forward_inputs/tokens")
    fails(capsys, path, "forward_inputs/tokens[")


# --- more, fewer, others ---


def test_a_key_too_many_too_few_and_of_another_type(copied: Any, capsys: pytest.CaptureFixture[str]):
    path = copied("hilserl") / "buffers_n1.npz"
    with np.load(path) as file:
        values = dict(file)
    np.savez(path, **values, **{"plain_seed3_0/more": np.zeros(8)})
    fails(capsys, path, "plain_seed3_0/more: expected, but not among ours")
    np.savez(path, **{key: value for key, value in values.items() if key != "plain_seed3_0/actions"})
    fails(capsys, path, "plain_seed3_0/actions: among ours, but not expected")
    np.savez(path, **values | {"plain_seed3_0/actions": values["plain_seed3_0/actions"].astype(np.float64)})
    fails(capsys, path, "plain_seed3_0/actions: ours is float32[8, 2], expected float64[8, 2]")


def test_a_damaged_file_is_a_fail_and_the_others_are_compared(copied: Any, capsys: pytest.CaptureFixture[str]):
    folder = copied("reverb")
    (folder / "tables.json").write_text("{")
    assert main([str(folder)]) == 1
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["reverb/removers.json", "8", "0", "ok"] in rows
    assert ["reverb/tables.json", "0", "inf", "FAIL", "JSONDecodeError:"] in [row[:5] for row in rows]


def test_a_file_of_no_known_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Named by itself it is an error; in a folder it may be for a later version, and is listed."""
    (tmp_path / "later.npz").write_bytes(b"")
    assert main([str(tmp_path / "later.npz")]) == 1
    assert "later.npz: no kind of golden file that is known here." in capsys.readouterr().out
    assert main([str(tmp_path)]) == 1
    assert "There is nothing to compare." in capsys.readouterr().out
    shutil.copy(FOLDER / "reverb/removers.json", tmp_path)
    assert main([str(tmp_path)]) == 0
    assert "later.npz: no kind of golden file that is known yet; passed over." in capsys.readouterr().out
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "there is no such file or folder" in capsys.readouterr().out


# --- how values are compared ---


@pytest.mark.parametrize(
    ("ours", "theirs", "says"),
    [
        (np.float32([1, np.nan]), np.float32([1, np.nan]), None),
        (np.float32([1, np.nan]), np.float32([1, 2]), "[1]: ours is nan, expected 2.0"),
        (np.float64([1, np.inf]), np.float64([1, -np.inf]), "[1]: ours is inf, expected -inf"),
        (np.int64([2**62]), np.int64([2**62 + 1]), f"[0]: ours is {2**62}, expected {2**62 + 1}"),
        (np.uint64([2**64 - 1]), np.uint64([2**64 - 1]), None),
        (np.bool_(True), np.bool_(False), ": ours is True, expected False"),
        (1.0, np.float32(1), ": ours is of type float, expected an array of float32"),
        (np.zeros(0, np.uint8), np.zeros(0, np.uint8), None),
        (np.zeros((2, 0), np.int64), np.zeros((2, 0), np.int64), None),
        (np.zeros((1, 2)), np.zeros(2), ": ours is float64[1, 2], expected float64[2]"),
        (np.array(["a"]), np.array(["b"]), "[0]: ours is a, expected b"),
        ([1, [2.0, "x"]], [1, [2.0, "y"]], "[1][1]: ours is 'x', expected 'y'"),
        ([1, 2], [1, 2, 3], ": ours has 2 entries, expected 3"),
        ({"a": True}, {"a": 1}, "/a: ours is True, expected 1"),
        (None, 1, ": ours is None, expected 1"),
        ({"a": 1}, {"b": 1}, ": ours has the keys ['a'], expected ['b']"),
    ],
)
def test_exactly(ours: Any, theirs: Any, says: str | None):
    assert golden.exact(ours, theirs)[1] == says


def test_jpeg_may_differ_a_little():
    picture = np.full((20, 20, 5), 100, np.uint8)
    assert golden.jpeg(picture + np.uint8(1), picture) == (1.0, None)
    spot = picture.copy()
    spot[3, 4, 0] = 103
    spot[3, 4, 1] = 98
    assert golden.jpeg(spot, picture) == (3.0, None)
    spot[3, 5, 0] = 102
    assert (
        golden.jpeg(spot, picture)[1]
        == ": 99.85% of the numbers are within one level of what is expected, and 99.9% have to be"
    )
    spot[3, 4, 0] = 104
    assert golden.jpeg(spot, picture)[1] == "[3, 4, 0]: ours is 104, expected 100"


def test_lossy_pictures_may_differ_more():
    picture = np.random.default_rng(0).integers(30, 200, (16, 16, 3)).astype(np.uint8)
    assert golden.lossy(23)(picture + np.uint8(17), picture)[1] is None
    assert "22.1 dB from what is expected, and at least 23 are needed" in str(
        golden.lossy(23)(picture + np.uint8(20), picture)[1]
    )
    assert golden.signal_to_noise(picture, picture) == np.inf


def test_golden_without_a_file_fails():
    assert golden.compare({}, {}).failures == ["there is nothing in it to compare with"]
