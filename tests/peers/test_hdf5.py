"""Real Minari writes what we read; real robomimic reads what we write, and we read
what it made. Run in a venv of its own:

make test-peers
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from hilt.core.tree import flatten
from hilt.formats import create, detect, open_dataset
from hilt.formats.convert import convert
from hilt.formats.episodes import Episode
from tests.formats.test_robomimic import demonstrations
from tests.formats.toy_episodes import assert_same, made, write

gymnasium = pytest.importorskip("gymnasium")
minari = pytest.importorskip("minari")
pytestmark = pytest.mark.peers


@pytest.fixture(autouse=True)
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    return tmp_path / "minari"


def assert_as_minari_says(folder: Path, dataset: Any) -> list[Episode]:
    """Every value equals what Minari itself reads."""
    assert detect(folder) == "minari"
    episodes = list(open_dataset(folder))
    assert len(episodes) == dataset.total_episodes

    def tree(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: tree(inner) for name, inner in value.items()}
        return {str(i): tree(inner) for i, inner in enumerate(value)} if isinstance(value, tuple) else value

    for ours, theirs in zip(episodes, dataset.iterate_episodes(), strict=True):
        columns, compared = flatten(ours.columns), 0
        wanted = {
            "observations": tree(theirs.observations),
            "actions": tree(theirs.actions),
            "infos": tree(theirs.infos or {}),
        }
        wanted |= {"rewards": theirs.rewards, "terminated": theirs.terminations, "truncated": theirs.truncations}
        for path, values in flatten(wanted).items():
            if isinstance(values, list):  # text
                assert ours.facts["language_instruction"] == values[0] and len(set(values)) == 1
                continue
            values = np.asarray(values)
            if path.startswith("observations"):
                assert np.array_equal(columns[f"next_{path}"], values[1:]), path
                values = values[:-1]
            assert np.array_equal(columns[path], values[-len(ours) :]) and columns[path].dtype == values.dtype, path
            compared += 1
        assert compared >= 5
    return episodes


@pytest.mark.parametrize("jpeg", [True, False])
@pytest.mark.parametrize("kind", ["hdf5", "arrow", "parquet"])
def test_minari_with_nested_spaces_images_and_text(kind: str, jpeg: bool, datasets: Path) -> None:
    from gymnasium import spaces
    from minari.data_collector import EpisodeBuffer

    rng = np.random.default_rng(0)
    seen = {
        "camera": spaces.Box(0, 255, (40, 48, 3), np.uint8),
        "flags": spaces.MultiBinary(4),
        "mission": spaces.Text(40),
        "pair": spaces.Tuple((spaces.Discrete(5), spaces.Box(-9, 9, (2, 2), np.float64))),
        "state": spaces.Box(-9, 9, (3,), np.float32),
    }

    def buffer(number: int, length: int) -> Any:
        return EpisodeBuffer(
            id=number,
            seed=number + 5,
            options={"level": {"hard": 1}},
            observations={
                "camera": rng.integers(0, 256, (length + 1, 40, 48, 3), np.uint8),
                "flags": rng.integers(0, 2, (length + 1, 4), np.int8),
                "mission": [f"go{number}"] * (length + 1),
                "pair": (rng.integers(0, 5, length + 1), rng.normal(size=(length + 1, 2, 2))),
                "state": rng.normal(size=(length + 1, 3)).astype(np.float32),
            },
            actions=(rng.integers(0, 4, length), rng.uniform(-1, 1, (length, 2)).astype(np.float32)),
            rewards=list(rng.normal(size=length)),
            terminations=[False] * (length - 1) + [number == 0],
            truncations=[False] * (length - 1) + [number == 1],
            infos={"distance": np.arange(2.0 * length + 2).reshape(-1, 2)},
        )

    dataset = minari.create_dataset_from_buffers(
        f"toy/{kind}-v0",
        [buffer(0, 4), buffer(1, 3), buffer(2, 7)],
        observation_space=spaces.Dict(seen),
        action_space=spaces.Tuple((spaces.Discrete(4), spaces.Box(-1, 1, (2,), np.float32))),
        data_format=kind,
        jpeg_encoding=jpeg,
    )
    episodes = assert_as_minari_says(datasets / "toy" / f"{kind}-v0", dataset)
    assert [e.facts["seed"] for e in episodes] == [5, 6, 7] and episodes[0].facts["options"] == {"level": {"hard": 1}}
    assert episodes[0].columns["terminated"][-1] and episodes[1].columns["truncated"][-1]


def test_minari_from_a_real_environment(datasets: Path) -> None:
    from minari.data_collector import EpisodeBuffer

    env, buffers = gymnasium.make("CartPole-v1"), []
    for seed in range(5):
        observation, _ = env.reset(seed=seed)
        observations, actions, rewards, ends, cuts = [observation], [], [], [False], [False]
        while not (ends[-1] or cuts[-1]):
            actions.append(env.action_space.sample())
            observation, reward, end, cut, _ = env.step(actions[-1])
            observations.append(observation)
            rewards.append(reward)
            ends.append(end)
            cuts.append(cut)
        buffers.append(
            EpisodeBuffer(
                seed=seed,
                observations=observations,
                actions=actions,
                rewards=rewards,
                terminations=ends[1:],
                truncations=cuts[1:],
            )
        )
    dataset = minari.create_dataset_from_buffers("cartpole/random-v0", buffers, env="CartPole-v1")
    episodes = assert_as_minari_says(datasets / "cartpole" / "random-v0", dataset)
    summary = convert(datasets / "cartpole" / "random-v0", datasets / "log")
    assert (summary.episodes, summary.steps) == (5, dataset.total_steps) == (5, sum(map(len, episodes)))


@pytest.fixture(scope="module")
def real() -> Any:
    """robomimic's own functions; torchvision, which only its networks need, is left out."""
    pytest.importorskip("robomimic")
    for name in ("torchvision", "torchvision.models", "torchvision.transforms", "torchvision.transforms.functional"):
        sys.modules[name] = mock.MagicMock()
    import robomimic.utils.dataset
    import robomimic.utils.file_utils

    return robomimic.utils


def assert_as_robomimic_says(real: Any, path: Path, episodes: list[Episode], filter_key: str | None = None) -> None:
    """Its SequenceDataset, which trains its policies, gives every step as we do."""
    names = [name for name in flatten({"o": episodes[0].columns["observations"]})]
    dataset = real.dataset.SequenceDataset(
        hdf5_path=str(path),
        obs_keys=[name[2:] for name in names],
        dataset_keys=["actions", "rewards", "dones"],
        filter_by_attribute=filter_key,
    )
    assert dataset.n_demos == len(episodes) and len(dataset) == sum(map(len, episodes))
    at = 0
    for episode in episodes:
        columns = flatten(episode.columns)
        for i in range(len(episode)):
            step = dataset[at]
            for name in names:
                assert np.array_equal(step["obs"][name[2:]][0], columns[f"observations{name[1:]}"][i])
                assert np.array_equal(step["next_obs"][name[2:]][0], columns[f"next_observations{name[1:]}"][i])
            assert np.array_equal(step["actions"][0], columns["actions"][i])
            assert step["rewards"][0] == columns["rewards"][i] and step["dones"][0] == columns["terminated"][i]
            at += 1


def test_robomimic_and_we_read_the_same(real: Any, tmp_path: Path) -> None:
    path = demonstrations(tmp_path / "low_dim.hdf5", (5, 3, 4, 2))
    lengths = real.file_utils.create_hdf5_filter_key(str(path), ["demo_3", "demo_1"], "chosen")
    assert real.file_utils.get_env_metadata_from_dataset(str(path))["env_name"] == "Lift"
    assert detect(path) == "robomimic"
    assert_as_robomimic_says(real, path, list(open_dataset(path)))
    chosen = list(open_dataset(path, filter_key="chosen"))
    assert [len(e) for e in chosen] == [3, 2] == sorted(lengths, reverse=True)
    assert_as_robomimic_says(real, path, chosen, "chosen")


def test_robomimic_reads_what_we_write(real: Any, tmp_path: Path) -> None:
    episodes = [made(5, 1), made(3, 2, source=1), made(1, 3, ended="truncated"), made(4, 4, ended="")]
    write(create(tmp_path / "log", "log"), episodes)
    convert(tmp_path / "log", tmp_path / "out", to="robomimic")
    path = tmp_path / "out" / "data.hdf5"
    assert_as_robomimic_says(real, path, episodes)
    assert real.file_utils.get_env_metadata_from_dataset(str(path)) == {}
    from robomimic.scripts.split_train_val import split_train_val_from_hdf5

    split_train_val_from_hdf5(str(path), val_ratio=0.25)
    train, valid = (list(open_dataset(path, filter_key=key)) for key in ("train", "valid"))
    assert (len(train), len(valid)) == (3, 1)
    assert_as_robomimic_says(real, path, train, "train")
    for episode, got in zip(episodes, open_dataset(path), strict=True):
        assert got.facts.pop("filter_keys") in (["train"], ["valid"])
        assert_same(got, episode)
