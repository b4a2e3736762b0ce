"""robomimic's and LIBERO's HDF5 demonstrations, read and written. The real robomimic
reads and writes in tests/peers/test_hdf5.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hilt.core.errors import CorruptError, FormatError, SchemaError, UnknownNameError, UnsafeError
from hilt.core.tree import flatten
from hilt.formats import Writer, create, robomimic
from hilt.formats.convert import convert
from hilt.formats.episodes import Episode
from hilt.formats.robomimic import open_dataset
from hilt.policies.vla.observation_adapters import suite
from tests.effort import rounds
from tests.formats.toy_episodes import assert_all_same, made, write, write_killed, write_stopped_at_every_call

h5py = pytest.importorskip("h5py")


def demonstrations(path: Path, lengths: tuple[int, ...] = (5, 3), next_obs: bool = True) -> Path:
    """As robomimic's own conversion script writes them."""
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["total"] = sum(lengths)
        data.attrs["env_args"] = json.dumps({"env_name": "Lift", "type": 1, "env_kwargs": {"robots": ["Panda"]}})
        for number, length in enumerate(lengths):
            demo = data.create_group(f"demo_{number}")
            seen = {
                "agentview_image": rng.integers(0, 256, (length + 1, 8, 8, 3), np.uint8),
                "robot0_eef_pos": rng.normal(size=(length + 1, 3)),
            }
            for name, values in seen.items():
                demo.create_dataset(f"obs/{name}", data=values[:-1], compression="gzip")
                if next_obs:
                    demo[f"next_obs/{name}"] = values[1:]
            demo["actions"] = rng.normal(size=(length, 7))
            demo["states"] = rng.normal(size=(length, 32))
            demo["rewards"] = np.eye(length)[-1]
            demo["dones"] = np.eye(length, dtype=np.int64)[-1]
            demo.attrs["num_samples"], demo.attrs["model_file"] = length, "<mujoco>" + "x" * 5000
        file["mask/train"] = np.array([b"demo_0", b"demo_10"])
        file["mask/valid"] = np.array([b"demo_1"])
    return path


def test_demonstrations_of_robomimic(tmp_path: Path) -> None:
    path = demonstrations(tmp_path / "low_dim.hdf5", (2,) * 11)
    assert robomimic.matches(path) and robomimic.matches(tmp_path)
    dataset = open_dataset(path)
    episodes = list(dataset)
    assert len(episodes) == len(dataset) == 11
    with h5py.File(path) as file:
        for number, episode in enumerate(episodes):  # demo_2 before demo_10
            demo, columns = file[f"data/demo_{number}"], flatten(episode.columns)
            for ours, theirs in {
                "observations/agentview_image": "obs/agentview_image",
                "next_observations/robot0_eef_pos": "next_obs/robot0_eef_pos",
                "actions": "actions",
                "states": "states",
                "rewards": "rewards",
                "terminated": "dones",
            }.items():
                assert np.array_equal(columns[ours], demo[theirs][()]), ours
            assert columns["rewards"].dtype == np.float64 and columns["terminated"].dtype == bool
            assert (columns["source"] == 2).all() and not columns["truncated"].any()
            keys = {0: ["train"], 1: ["valid"], 10: ["train"]}.get(number)
            known = {"env_args": {"env_name": "Lift", "type": 1, "env_kwargs": {"robots": ["Panda"]}}}
            assert episode.facts == (known | {"filter_keys": keys} if keys else known)
    assert dataset.notes.counts == {"model_file: a text of more than 4,096 characters, not carried over": 11}
    assert dataset.describe()["filter keys"] == ["train", "valid"]
    assert [len(list(open_dataset(path, filter_key=key))) for key in ("train", "valid")] == [2, 1]
    with pytest.raises(UnknownNameError, match="no filter key named 'tain'; did you mean 'train'"):
        len(open_dataset(path, filter_key="tain"))
    (job,) = list(dataset.jobs(first=10, images=False))
    episode = job()  # type: ignore[assignment]
    assert list(episode.columns["observations"]) == ["robot0_eef_pos"]


def test_a_folder_of_libero_is_one_dataset(tmp_path: Path) -> None:
    for number, words in enumerate(["put the bowl on the plate", "open the drawer"]):
        path = demonstrations(tmp_path / f"task{number}_demo.hdf5", (4, 2), next_obs=False)
        with h5py.File(path, "a") as file:
            data = file["data"]
            data.attrs["problem_info"] = json.dumps(
                {"problem_name": "libero_tabletop", "language_instruction": [f'"{words}"']}
            )
            data.attrs["bddl_file_name"] = "a/b.bddl"
            for demo in data.values():
                demo["robot_states"] = np.ones((len(demo["actions"]), 9))
                del demo["rewards"]
                demo["rewards"] = np.eye(len(demo["actions"]), dtype=np.uint8)[-1]
    dataset = open_dataset(tmp_path)
    episodes = list(dataset)
    assert [(len(e), e.facts["language_instruction"]) for e in episodes] == [
        (4, "put the bowl on the plate"),
        (2, "put the bowl on the plate"),
        (4, "open the drawer"),
        (2, "open the drawer"),
    ]
    first = flatten(episodes[0].columns)
    now, after = first["observations/robot0_eef_pos"], first["next_observations/robot0_eef_pos"]
    assert np.array_equal(after[:-1], now[1:]) and np.array_equal(after[-1], now[-1])
    assert np.shares_memory(now, after)
    assert first["rewards"].dtype == np.float32 and first["robot_states"].shape == (4, 9)
    assert episodes[0].facts["bddl_file_name"] == "a/b.bddl"
    wanted = "no next_obs in this dataset: after the last step its own observation stands for the next one"
    assert dataset.notes.counts[wanted] == 4


def test_odd_columns(tmp_path: Path) -> None:
    path = demonstrations(tmp_path / "a.hdf5", (3,))
    with h5py.File(path, "a") as file:
        demo = file["data/demo_0"]
        demo["observations"] = np.zeros(3)
        demo["language_instruction"] = ["go", "go", "stop"]
        demo["short"], demo["scalar"], demo["compound"] = np.zeros(2), 3.0, np.zeros(3, [("a", "f4")])
        demo["swapped"] = np.arange(3, dtype=">i4")
        demo["flag"] = np.array([True, False, True])
        demo.attrs["success"], demo.attrs["operator"] = True, "ann"
        del demo["rewards"], demo["dones"]
    dataset = open_dataset(path)
    (episode,) = dataset
    assert episode.facts["success"] is True and episode.facts["episode_metadata"] == {"operator": "ann"}
    assert episode.facts["language_instruction"] == {"texts": ["go", "stop"], "begins": [0, 2]}
    columns = flatten(episode.columns)
    assert (
        columns["extra/observations"].tolist() == [0, 0, 0]
        and not columns["rewards"].any()
        and not columns["terminated"].any()
    )
    assert (
        columns["swapped"].dtype == np.int32
        and columns["swapped"].tolist() == [0, 1, 2]
        and columns["flag"].dtype == bool
    )
    notes = [f"{name}: not numbers for each step, not carried over" for name in ("short", "scalar", "compound")]
    assert set(notes) | {"no rewards in this dataset: 0 everywhere"} <= set(dataset.notes.counts)


def test_a_demonstration_does_not_end_before_its_last_step(tmp_path: Path) -> None:
    path = demonstrations(tmp_path / "demo.hdf5", (5,))
    with h5py.File(path, "a") as file:
        file["data/demo_0/dones"][:] = [0, 0, 1, 1, 1]  # success, and some steps more
    dataset = open_dataset(path)
    (episode,) = dataset
    assert episode.columns["terminated"].tolist() == [False] * 4 + [True]
    assert any(note.startswith("dones before the last step") for note in dataset.notes.counts)


def test_dones_may_be_of_any_kind_of_number(tmp_path: Path) -> None:
    with h5py.File(demonstrations(tmp_path / "a.hdf5", (3,)), "r+") as file:
        del file["data/demo_0/dones"]
        file["data/demo_0/dones"] = np.array([0.0, 0.0, 1.0], np.float32)
    (episode,) = open_dataset(tmp_path / "a.hdf5")
    assert episode.columns["terminated"].tolist() == [False, False, True]


def test_an_observation_that_is_too_short_is_damage(tmp_path: Path) -> None:
    with h5py.File(demonstrations(tmp_path / "a.hdf5", (5, 3), next_obs=False), "r+") as file:
        del file["data/demo_0/obs/robot0_eef_pos"]
        file["data/demo_0/obs/robot0_eef_pos"] = np.zeros((4, 3))
    with pytest.raises(
        CorruptError, match=r"a.hdf5: /data/demo_0/obs/robot0_eef_pos has 4 rows, and there are 5 actions"
    ):
        convert(tmp_path / "a.hdf5", tmp_path / "log")
    summary = convert(tmp_path / "a.hdf5", tmp_path / "log", skip_corrupt=True)
    assert (summary.episodes, summary.damaged) == (1, 1)
    (sentence,) = [note for note in summary.notes if note.startswith("no next_obs")]
    assert summary.notes[sentence] == 1, "once for the episode, however many observations it has"


def test_states_stand_for_observations_that_were_not_rendered(tmp_path: Path) -> None:
    path = demonstrations(tmp_path / "demo.hdf5", (3,))
    with h5py.File(path, "a") as file:
        states = file["data/demo_0/states"][()]
        del file["data/demo_0/obs"], file["data/demo_0/next_obs"]
    (episode,) = open_dataset(path)
    assert np.array_equal(episode.columns["observations"]["states"], states)


def spoiled(how: str, folder: Path) -> Path:
    path, secret = demonstrations(folder / "a.hdf5", (3,)), folder / "secret.bin"
    secret.write_bytes(b"s" * 4096)
    with h5py.File(folder / "other.h5x", "w") as other:
        other["x"] = np.zeros((3, 2))
    with h5py.File(path, "a") as file:
        demo = file["data/demo_0"]
        if how == "external link":
            demo["obs/x"] = h5py.ExternalLink(str(folder / "other.h5x"), "x")
        elif how == "soft link":
            demo["obs/x"] = h5py.SoftLink("/data/demo_0/actions")
        elif how == "external storage":
            demo.create_dataset("obs/x", (3, 2), "u1", external=[(str(secret), 0, 6)])
        elif how == "virtual":
            layout = h5py.VirtualLayout((3, 2), "f8")
            layout[:] = h5py.VirtualSource(str(folder / "other.h5x"), "x", (3, 2))
            demo.create_virtual_dataset("obs/x", layout)
        elif how == "linked data":
            del file["data"]
            file["data"] = h5py.ExternalLink(str(folder / "other.h5x"), "/")
        elif how == "holds itself":
            demo["obs/x"] = demo
        elif how == "holds itself often":
            below = demo
            for _ in range(14):
                group = demo.file.create_group(None)
                for name in "abcdef":
                    group[name] = below
                below = group
            demo["obs/x"] = below
        elif how == "bomb":
            demo.create_dataset("obs/x", (3, 1 << 40), "u1", chunks=(1, 1 << 20), compression="gzip")
    return path


@pytest.mark.parametrize("how", ["external link", "soft link", "external storage", "virtual", "linked data"])
def test_a_file_that_leads_elsewhere_is_refused(how: str, tmp_path: Path) -> None:
    with pytest.raises(UnsafeError, match="leads to another place or file"):
        list(open_dataset(spoiled(how, tmp_path)))


@pytest.mark.parametrize("how", ["holds itself", "holds itself often", "bomb"])
def test_a_file_that_promises_too_much_is_refused(how: str, tmp_path: Path) -> None:
    with pytest.raises(CorruptError, match=r"holds itself, or too much|promises 3,298,534,883,328 bytes"):
        list(open_dataset(spoiled(how, tmp_path)))


def test_files_of_another_kind(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"no \.hdf5 file in it"):
        open_dataset(tmp_path)
    (tmp_path / "a.hdf5").write_bytes(b"nothing")
    assert not robomimic.matches(tmp_path)
    dataset = open_dataset(tmp_path)
    (job,) = dataset.jobs()
    with pytest.raises(CorruptError, match=r"a\.hdf5: damaged, or no HDF5 file"):
        job()
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        file["other"] = 1
    with pytest.raises(FormatError, match="no group named 'data'"):
        len(open_dataset(tmp_path))


def test_filter_keys_that_are_none(tmp_path: Path) -> None:
    path = demonstrations(tmp_path / "a.hdf5")
    with h5py.File(path, "a") as file:
        del file["mask"]
        file["mask"] = np.array([b"train"])
    assert open_dataset(path).describe()["filter keys"] == []
    with pytest.raises(UnknownNameError, match="no filter key named 'train'"):
        len(open_dataset(path, filter_key="train"))


def test_damage_costs_one_episode(tmp_path: Path) -> None:
    path = demonstrations(tmp_path / "a.hdf5", (3, 3, 3))
    with h5py.File(path, "a") as file:
        place = file["data/demo_1/obs/agentview_image"].id.get_chunk_info(0)
        del file["data/demo_2/actions"]
    raw = bytearray(path.read_bytes())
    raw[place.byte_offset : place.byte_offset + place.size] = b"x" * place.size
    path.write_bytes(raw)
    outcome = []
    for job in open_dataset(path).jobs():
        try:
            outcome.append(len(job() or ()))
        except CorruptError as error:
            outcome.append(str(error))
    assert outcome[0] == 3 and "damaged" in outcome[1] and "demo_2 has no actions" in outcome[2]


# Writing


def episodes() -> list[Any]:
    made_here = [made(4, 0), made(1, 1, source=0, ended="truncated"), made(3, 2, source=[0, 1, 2], ended="")]
    made_here[2].columns["next_observations"]["state"] = made_here[2].columns["next_observations"]["state"] + 1
    for episode in made_here:
        episode.columns |= {
            "dones": np.zeros(len(episode)),
            "obs": {"x": np.ones(len(episode), np.int8)},
            "hilt": np.ones(len(episode)),
        }
    made_here[0].facts = {"env_args": {"env_name": "Lift", "type": 1}, "filter_keys": ["train"]}
    return made_here


def test_what_we_write_is_read_as_it_was(tmp_path: Path) -> None:
    write(create(tmp_path / "a", "robomimic"), episodes())
    dataset = open_dataset(tmp_path / "a")
    assert_all_same(list(dataset), episodes())
    assert not dataset.notes.counts and sorted(path.name for path in (tmp_path / "a").iterdir()) == [
        "data.hdf5",
        "hilt.json",
    ]
    with h5py.File(tmp_path / "a" / "data.hdf5") as file:
        assert file["data"].attrs["total"] == 8 and json.loads(file["data"].attrs["env_args"])["env_name"] == "Lift"
        assert file["mask/train"][()].tolist() == [b"demo_0"]
        assert file["data/demo_0/dones"][()].tolist() == [0, 0, 0, 1] and file["data/demo_1"].attrs["num_samples"] == 1
    alone = made(3, 1)
    alone.facts["filter_keys"] = 3  # not ours
    alone.columns["observations"], alone.columns["next_observations"] = np.zeros((3, 2)), np.ones((3, 2))
    write(create(tmp_path / "b", "robomimic"), [alone])
    assert_all_same(list(open_dataset(tmp_path / "b")), [alone])


def of_libero(instruction: str, length: int = 4) -> Episode:
    """An episode as Hilt records it in LIBERO's simulator."""
    rng = np.random.default_rng(length)
    turns = rng.normal(size=(length + 1, 4))
    seen = {
        "agentview_image": rng.integers(0, 256, (length + 1, 8, 8, 3), np.uint8),
        "robot0_eye_in_hand_image": rng.integers(0, 256, (length + 1, 8, 8, 3), np.uint8),
        "robot0_eef_pos": rng.normal(size=(length + 1, 3)),
        "robot0_eef_quat": turns / np.linalg.norm(turns, axis=1, keepdims=True),
        "robot0_gripper_qpos": rng.normal(size=(length + 1, 2)),
    }
    seen["robot0_eef_quat"][0] = [0, 0, 0, 1]
    columns = {
        "observations": {name: values[:-1] for name, values in seen.items()},
        "next_observations": {name: values[1:] for name, values in seen.items()},
        "actions": rng.normal(size=(length, 7)).astype(np.float32),
        "rewards": np.eye(length, dtype=np.float32)[-1],
        "terminated": np.eye(length, dtype=bool)[-1],
        "truncated": np.zeros(length, bool),
        "source": np.zeros(length, np.uint8),
    }
    return Episode(columns, {"language_instruction": instruction, "success": True})


def test_libero_names_are_those_of_its_demonstrations(tmp_path: Path) -> None:
    """A policy is taught the same by the file as by the recording."""
    episode = of_libero("put the bowl on the stove")
    write(create(tmp_path / "out", "robomimic", names="libero"), [episode, episode])
    with h5py.File(tmp_path / "out/data.hdf5") as file:
        data = file["data"]
        assert json.loads(data.attrs["problem_info"]) == {"language_instruction": "put the bowl on the stove"}
        assert (data.attrs["num_demos"], data.attrs["total"]) == (2, 8)
        demo = data["demo_1"]
        names = {"agentview_rgb", "eye_in_hand_rgb", "ee_pos", "ee_ori", "ee_states", "gripper_states"}
        assert set(demo["obs"]) == names and "next_obs" not in demo and demo["dones"][()].tolist() == [0, 0, 0, 1]
        libero, theirs = suite("libero"), {name: demo[f"obs/{name}"][()] for name in names}
        for step in range(4):
            ours = {name: values[step] for name, values in episode.columns["observations"].items()}
            expected = libero.observe(ours, "")
            row = libero.observe({name: values[step] for name, values in theirs.items()}, "")
            assert all(np.allclose(row[name], expected[name]) for name in ("full_image", "wrist_image", "state"))
    back = list(open_dataset(tmp_path / "out"))
    assert len(back) == 2 and back[0].facts["language_instruction"] == "put the bowl on the stove"


def test_libero_names_need_one_task_in_its_simulator(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="has one task; given 2: open, shut"):
        write(create(tmp_path / "two", "robomimic", names="libero"), [of_libero("open"), of_libero("shut")])
    other = of_libero("open")
    other.columns["observations"]["joints"] = np.zeros((4, 7))
    with pytest.raises(SchemaError, match="observations/joints: not an observation of LIBERO's simulator"):
        write(create(tmp_path / "other", "robomimic", names="libero"), [other])
    with pytest.raises(UnknownNameError, match="names of observations"):
        create(tmp_path / "name", "robomimic", names="liberty")


def test_a_log_goes_there_and_back(tmp_path: Path) -> None:
    write(create(tmp_path / "log", "log"), episodes())
    convert(tmp_path / "log", tmp_path / "hdf5", format="log", to="robomimic")
    convert(tmp_path / "hdf5", tmp_path / "again", format="robomimic")
    from hilt.formats.experience import open_dataset as open_log

    assert_all_same(list(open_log(tmp_path / "again")), list(open_log(tmp_path / "log")))


def test_a_stopped_writer_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = episodes()

    def check(folder: Path) -> None:
        assert_all_same(list(open_dataset(folder)), wanted)
        assert sorted(path.name for path in folder.iterdir()) == ["data.hdf5", "hilt.json"]

    def make(folder: Path) -> Writer:
        return create(folder, "robomimic")

    with monkeypatch.context() as patch:
        assert write_stopped_at_every_call(make, wanted, check, tmp_path, patch) > 10
    write_killed(make, wanted, check, tmp_path, kills=rounds(4, 20))


def test_writing_refuses_what_has_no_place(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="token: complex128 has no place in HDF5"):
        create(tmp_path, "robomimic").add(0, made(2, token=np.zeros(2, complex)))


def test_facts_that_are_not_ours(tmp_path: Path) -> None:
    for text in ("{", "[]", "[3, false]", "3"):
        path = demonstrations(tmp_path / "a.hdf5", (2,))
        with h5py.File(path, "a") as file:
            file["data/demo_0/hilt_facts"] = text
        with pytest.raises(CorruptError, match="damaged"):
            list(open_dataset(path))
