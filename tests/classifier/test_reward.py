"""The reward classifier: how good it is on episodes it has not seen, its folder,
and the reward that an environment gets from it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hilt.classifier.frames import Clip, read_frames, split
from hilt.classifier.reward import ClassifierConfig, TrainedClassifier, reward_function, save, train
from hilt.core.config import build
from hilt.core.errors import AlarmError, ConfigError, CorruptError, HiltError, SchemaError, StorageError, UnsafeError
from hilt.core.files import DISK, Files
from hilt.core.tree import unflatten
from hilt.core.unpickle import dump
from hilt.envs.rewards import MultiCameraBinaryRewardClassifierWrapper
from hilt.envs.task import make
from hilt.policies.agent.resnet10_file import _NAMES, _shape, read_resnet10
from hilt.recording.buffered_device import GoesOn, as_hil_serl
from hilt.recording.record import Settings, record
from hilt.replay.tensors import save_pt
from hilt.teleop.devices import Device, Reading
from hilt.teleop.intervene import TakeOver
from hilt.teleop.operator import Script
from tests.classifier.labeled import PICK, clips, clumsy, drawn
from tests.effort import need_rendering, rounds

torch.set_num_threads(1)
QUICK = ("steps=12", "batch_size=24", "features=16", "hidden=32", "random_crop=1")


def quick(*overrides: str, given: list[Clip] | None = None) -> TrainedClassifier:
    return train(clips() if given is None else given, build(ClassifierConfig(), *QUICK, *overrides))


@pytest.fixture(scope="module")
def trained() -> TrainedClassifier:
    return quick()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> list[Clip]:
    """Labeled frames of the embedded pick, successes and near misses, as `hilt record --classifier` makes them."""
    need_rendering()
    return record_pick(tmp_path_factory.mktemp("pick"), rounds(200, 320))


def record_pick(folder: Path, successes: int, split: str = "train", seed: int = 0) -> list[Clip]:
    env = make("tabletop/pick", **PICK)
    settings = Settings("tabletop/pick", PICK, successes_needed=successes, split=split, seed=seed)
    record(env, Script(expert=clumsy), folder, settings, videos=False)
    env.close()
    return read_frames([folder])


@pytest.fixture(scope="module")
def pick(recorded: list[Clip], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainedClassifier]:
    trained = train(recorded, build(ClassifierConfig(), f"steps={rounds(60, 150)}", f"batch_size={rounds(32, 128)}"))
    folder = tmp_path_factory.mktemp("made") / "classifier"
    save(folder, trained)
    return folder, trained


def judged(trained: TrainedClassifier) -> str:
    held, learned = trained.metadata["held_out"], trained.metadata["training"]
    near = [
        f"{held[name]['false_successes']} of {held[name]['frames']}"
        for name in ("just_before_success", "failed_attempts")
    ]
    sizes = (
        f"{learned['frames']} frames of {learned['episodes']} episodes, {held['frames']} of {held['episodes']} held out"
    )
    return (
        f"{sizes}: accuracy {held['accuracy']:.1%}, majority {held['majority']:.1%}; near misses called "
        f"success: {', '.join(near)}"
    )


# How good it is


def test_classifier_recognizes_a_picked_cube_in_unseen_episodes(
    recorded: list[Clip], pick: Any, counted: Callable[[str], None]
):
    """The issue's figure, at the threshold 0.5, which nothing was chosen by: at
    least 95%, with near misses among the frames."""
    _, trained = pick
    held = trained.metadata["held_out"]
    counted(judged(trained))
    assert held["accuracy"] >= 0.95 > 0.9 > held["majority"]
    assert held["by"] == "initial state" and held["initial_states"] >= 8
    assert held["just_before_success"]["frames"] >= 30 and held["failed_attempts"]["frames"] >= 100
    assert held["failed_attempts"]["false_successes"] <= 0.05 * held["failed_attempts"]["frames"]
    sides = split(recorded, 0.25, 2, 0)[:2]
    assert not {clip.state for clip in sides[0]} & {clip.state for clip in sides[1]}
    assert [sum(map(len, side)) for side in sides] == [trained.metadata["training"]["frames"], held["frames"]]


def shuffled(given: list[Clip]) -> list[Clip]:
    rng = np.random.default_rng(0)
    return [replace(clip, labels=rng.permutation(clip.labels)) for clip in given]


def test_classifier_does_not_learn_random_labels():
    """With labels in any order the same check fails: it measures what was learned."""
    right, wrong = (
        quick("steps=30", given=given).metadata["held_out"]["accuracy"] for given in (clips(24), shuffled(clips(24)))
    )
    assert right >= 0.95 > 0.9 > wrong


def test_classifier_of_random_labels_raises_alarms_while_it_learns_them_by_heart():
    said: list[str] = []
    settings = build(ClassifierConfig(), *QUICK, "steps=150", "dropout=0", "random_crop=0", "learning_rate=0.003")
    trained = train(shuffled(clips(24)), settings, notify=said.append)
    training = trained.metadata["training"]
    assert len(training["losses"]) == 10 and training["losses"][-1][:2] == [150, training["loss"]]
    assert training["alarms"][0]["name"] == "validation"
    assert [one for one in said if not one.endswith("is over")] == [
        f"step {one['step']}: {one['text']}" for one in training["alarms"]
    ]
    with pytest.raises(
        AlarmError, match=r"alarm validation: the held-out loss .* names this alarm. Nothing was written"
    ):
        train(shuffled(clips(24)), replace(settings, stop_on=["validation"]))
    assert quick("steps=60").metadata["training"]["alarms"] == []


@pytest.mark.long
def test_classifier_does_not_learn_random_labels_of_a_picked_cube(recorded: list[Clip]):
    assert train(shuffled(recorded), build(ClassifierConfig(), "steps=60")).metadata["held_out"]["accuracy"] < 0.9


@pytest.mark.peers
@pytest.mark.timeout(1200)
def test_the_same_with_the_settings_as_they_are_for_three_seeds_and_for_states_of_another_split(
    tmp_path: Path, counted: Callable[[str], None]
):
    given, other = record_pick(tmp_path / "train", 600), record_pick(tmp_path / "eval", 200, "eval", 1)
    for seed in range(3):
        trained = train(given, ClassifierConfig(seed=seed))
        save(tmp_path / f"classifier-{seed}", trained)
        counted(f"seed {seed}: {judged(trained)}")
        assert trained.metadata["held_out"]["accuracy"] >= 0.95
        reward = reward_function(tmp_path / f"classifier-{seed}", threshold=0.5)
        right = [
            reward({name.split("/")[1]: image[step] for name, image in clip.images.items()}) == clip.labels[step]
            for clip in other
            for step in range(len(clip))
        ]
        counted(f"seed {seed}: {np.mean(right):.1%} of {len(right)} frames of the split eval")
        assert np.mean(right) >= 0.95


def test_three_classes(tmp_path: Path):
    """n logits; success is the highest label, or the one that is asked for."""
    given = clips(24, classes=3)
    trained = quick("steps=40", given=given)
    held = trained.metadata["held_out"]
    assert (
        trained.model.out.weight.shape[0] == 3 and trained.metadata["classes"] == 3 and trained.metadata["success"] == 2
    )
    assert held["accuracy"] >= 0.95 and len(held["of_class"]) == 3
    save(tmp_path / "three", trained)
    middle = quick("steps=40", "success=1", given=given)
    save(tmp_path / "middle", middle)
    for folder, success in (("three", 2), ("middle", 1)):
        reward = reward_function(tmp_path / folder)
        assert [reward(frame(label)) for label in range(3)] == [float(label == success) for label in range(3)]
    with pytest.raises(ConfigError, match=r"success=3: the labels are 0 to 2"):
        quick("success=3", given=given)
    with pytest.raises(ConfigError, match=r"batch_size=2: expected at least one frame of each of 3"):
        quick("batch_size=2", given=given)


def frame(label: int) -> dict[str, Any]:
    """An observation of this class."""
    return {
        "images": {
            name.split("/")[1]: image[0] for name, image in drawn(np.array([label]), np.random.default_rng(5)).items()
        }
    }


# What an environment gets


def test_the_reward_of_an_environment_nested_or_as_hil_serl_has_it(pick: Any):
    """The expert succeeds by the classifier's word as by the environment's, at nearly the
    same step, from a state that none began in."""
    folder, _ = pick
    start: dict[str, Any] = {"seed": 0, "options": {"split": "test", "state": 3}}
    env, stacked = make("tabletop/pick", **PICK), as_hil_serl(make("tabletop/pick", **PICK))
    reward = reward_function(folder, space=env.observation_space)
    env = GoesOn(env, 3)
    judging = MultiCameraBinaryRewardClassifierWrapper(env, reward)
    seen = judging.reset(**start)[0]
    reward_function(folder, space=stacked.observation_space)
    assert reward.probability(stacked.reset(**start)[0]) == reward.probability(seen)
    expert, ended, really = env.get_wrapper_attr("expert")(), False, 0
    while not ended:
        _, given, terminated, truncated, info = judging.step(expert())
        really, ended = really + env.unwrapped.succeeded(), terminated or truncated
    assert given == 1.0 and terminated and info["succeed"] and really <= 3
    env.close()
    stacked.close()


def test_classifier_reward_respects_a_persons_mark(pick: Any):
    class Person(Device):
        def read(self) -> Reading:
            return Reading(events=("success",))

    env = TakeOver(make("tabletop/pick", **PICK), Person())
    judging = MultiCameraBinaryRewardClassifierWrapper(env, reward_function(pick[0], threshold=0.99))
    judging.reset(seed=0, options={"split": "test", "state": 0})
    _, reward, terminated, _, info = judging.step(np.zeros(7, np.float32))
    assert reward == 1.0 and terminated and info["succeed"] and not env.unwrapped.succeeded()
    env.close()


def test_the_threshold_is_its_own_or_a_given_one(tmp_path: Path):
    save(tmp_path / "c", quick("steps=20"))
    own = reward_function(tmp_path / "c")
    seen = frame(1)
    p = own.probability(seen)
    assert 0.5 <= own.threshold < 1
    assert reward_function(tmp_path / "c", threshold=p - 1e-4)(seen) == 1.0
    assert reward_function(tmp_path / "c", threshold=p + 1e-4)(seen) == 0.0
    for wrong in (0.0, 1.0, -1, float("nan")):
        with pytest.raises(ConfigError, match="expected a probability between 0 and 1"):
            reward_function(tmp_path / "c", threshold=wrong)


def test_an_observation_that_it_cannot_judge_is_an_error_with_a_cure(trained: TrainedClassifier, tmp_path: Path):
    save(tmp_path / "c", trained)
    reward = reward_function(tmp_path / "c")
    black = np.zeros((32, 32, 3), np.uint8)
    for seen in (
        {"images": {"front": black, "wrist": black}, "state": {"x": np.zeros(2)}},
        {"front": black[None], "wrist": black[None], "state": np.zeros((1, 2))},
        {"images": {"front": np.stack([black] * 3), "wrist": black}},  # of a stack the newest
        {"images/front": black, "images/wrist": black},
    ):
        assert reward.probability(seen) == reward.probability({"front": black, "wrist": black})
    for seen in (
        {"images": {"front": black}},
        {},
        np.zeros(3),
        {"left": {"wrist": black}, "right": {"wrist": black}, "front": black},
    ):
        with pytest.raises(
            SchemaError, match=r"looks at images/wrist, which is not in the observation|looks at images/front"
        ):
            reward(seen)
    for wrong in (
        np.zeros((64, 64, 3), np.uint8),
        np.zeros((32, 32, 3), np.float32),
        np.zeros((0, 32, 32, 3), np.uint8),
        np.uint8(0),
    ):
        with pytest.raises(
            SchemaError,
            match=r"images/front is .* trained on uint8 \(32, 32, 3\)\. Make the environment with .*image_size=32",
        ):
            reward({"front": wrong, "wrist": black})
    env = make("tabletop/pick", image_size=48)
    with pytest.raises(SchemaError, match=r"images/front is uint8 \(48, 48, 3\)"):
        reward_function(tmp_path / "c", space=env.observation_space)
    env.close()
    env = make("tabletop/pick", image_size=None)
    with pytest.raises(SchemaError, match=r"looks at images/front, which is not in the observation"):
        reward_function(tmp_path / "c", space=env.observation_space)
    env.close()


# Its folder


def test_loaded_it_is_the_same_and_its_seed_decides(tmp_path: Path):
    torch.manual_seed(7)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    first, again, other = quick("steps=4"), quick("steps=4"), quick("steps=4", "seed=1")
    assert torch.equal(torch.get_rng_state(), before[0]) and np.random.get_state()[1].tolist() == before[1]
    weights = [trained.model.state_dict() for trained in (first, again, other)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not all(torch.equal(weights[0][name], weights[2][name]) for name in weights[0])
    save(tmp_path / "deep" / "c", first)
    loaded = reward_function(tmp_path / "deep" / "c")
    seen = frame(1)
    expected = torch.sigmoid(
        first.model({f"images/{name}": torch.from_numpy(image[None]) for name, image in seen["images"].items()})
    )
    assert loaded.probability(seen) == pytest.approx(float(expected.detach()), abs=1e-6)
    assert {path.name for path in (tmp_path / "deep" / "c").iterdir()} == {
        "classifier.json",
        "weights.pt",
        "thresholds.png",
        "mistakes.png",
        "held_out.json",
    }


def test_classifier_folder_is_written_atomically(
    trained: TrainedClassifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder, names = tmp_path / "c", list[str]()

    def full(files: Files, path: Path, data: bytes, durable: bool = True) -> None:
        names.append(path.name)
        if len(names) == fail_at:
            raise StorageError(f"{path}: no room")
        original(files, path, data, durable)

    original = Files.replace
    monkeypatch.setattr(Files, "replace", full)
    for fail_at in (1, 2, 3, 4, 5):  # noqa: B007 - `full` reads it
        names.clear()
        with pytest.raises(StorageError):
            save(folder, trained)
        assert not any(tmp_path.iterdir())
    fail_at = 0
    save(folder, trained)
    assert len(names) == 10 and reward_function(folder)
    with pytest.raises(ConfigError, match=r"c exists already, and nothing is written over\. Choose another --out"):
        save(folder, trained)
    DISK.make_folder(tmp_path / ".d.new")  # of a process that was killed
    (tmp_path / ".d.new" / "weights.pt").write_text("half")
    save(tmp_path / "d", trained)
    assert {path.name for path in tmp_path.iterdir()} == {"c", "d"}


def test_classifier_folder_that_is_incomplete_is_reported(trained: TrainedClassifier, tmp_path: Path):
    class Evil:
        def __reduce__(self) -> Any:
            return print, ("this must never be run",)

    with pytest.raises(
        ConfigError, match=r"is no reward classifier: it has no classifier\.json\. Make one with: hilt train classifier"
    ):
        reward_function(tmp_path / "nothing")
    for name, spoil, error in (
        ("cut", lambda path: path.write_bytes(path.read_bytes()[:-200]), CorruptError),
        ("gone", lambda path: path.unlink(), StorageError),
        ("code", lambda path: torch.save({"out.weight": Evil()}, path), UnsafeError),
        ("pickle", lambda path: path.write_bytes(b"cos\nsystem\n(S'true'\ntR."), HiltError),
        ("other", lambda path: save_pt({"out.weight": torch.zeros(1)}, path), CorruptError),
    ):
        save(tmp_path / name, trained)
        spoil(tmp_path / name / "weights.pt")
        with pytest.raises(error):
            reward_function(tmp_path / name)
    save(tmp_path / "json", trained)
    metadata = tmp_path / "json" / "classifier.json"
    metadata.write_bytes(metadata.read_bytes().replace(b'"success": 1', b'"success": 0'))
    with pytest.raises(CorruptError, match="checksum"):
        reward_function(tmp_path / "json")


# Its settings


def small_clips(few: bool) -> list[Clip]:
    """Frames of one camera."""
    given = clips(4, steps=2) if few else clips()
    return [replace(clip, images={"images/front": clip.images["images/front"]}) for clip in given]


@functools.cache
def small_base(few: bool, *steps: str) -> TrainedClassifier:
    return quick(*steps, given=small_clips(few))


@pytest.mark.parametrize(
    "change",
    [
        "encoder=resnet10",
        "features=8",
        "hidden=16",
        "dropout=0.5",
        "random_crop=0",
        "steps=3",
        "batch_size=26",
        "learning_rate=1e-4",
        "held_out=0.5",
        "seed=3",
    ],
)
def test_each_setting_changes_what_is_learned(change: str, tmp_path: Path):
    steps = ("steps=1", "batch_size=2") if "resnet" in change else ("steps=2",)
    small = small_clips("resnet" in change)
    base, other = small_base("resnet" in change, *steps), quick(*steps, change, given=small)
    a, b = (trained.model.state_dict() for trained in (base, other))
    assert a.keys() != b.keys() or any(
        a[name].shape != b[name].shape or not torch.equal(a[name], b[name]) for name in a
    )
    save(tmp_path / "c", other)
    seen = {"front": np.zeros((32, 32, 3), np.uint8)}
    assert 0 < reward_function(tmp_path / "c").probability(seen) < 1


def test_a_trunk_from_hil_serls_file_stays_as_it_is_and_the_file_is_not_needed_again(tmp_path: Path):
    file, theirs = tmp_path / "resnet10_params.pkl", {}
    draws = np.random.default_rng(0)
    for path, name in _NAMES.items():
        array = draws.normal(0, 0.05, _shape(name)).astype(np.float32)
        theirs[path] = array if "kernel" in path else array + ("scale" in path)
    with file.open("wb") as opened:
        dump(unflatten(theirs), opened)
    trained = quick("encoder=resnet10", f"weights={file}", "steps=1", "batch_size=2", given=clips(4, steps=2))
    trunk = {
        name.removeprefix("encoder.trunks.0."): value
        for name, value in trained.model.state_dict().items()
        if "trunk" in name
    }
    # one for both cameras
    assert trunk and all(torch.equal(value, trunk[name]) for name, value in read_resnet10(file).items())
    save(tmp_path / "c", trained)
    file.unlink()
    assert 0 < reward_function(tmp_path / "c").probability(frame(1)) < 1


def test_classifier_report_depends_on_the_settings(trained: TrainedClassifier):
    given = quick("image_keys=[images/front]", "threshold=0.9", "steps=2").metadata
    assert list(given["image_keys"]) == ["images/front"]
    assert given["threshold"] == 0.9 and "given" in given["why"]
    assert "Precision counts twice" in trained.metadata["why"]
    for wrong in (
        "steps=0",
        "batch_size=0",
        "dropout=1",
        "held_out=0",
        "threshold=1",
        "random_crop=-1",
        "learning_rate=0",
        "features=0",
    ):
        with pytest.raises(ConfigError, match=rf"{wrong.split('=')[0]}=.*: expected a (whole )?number"):
            quick(wrong)
    with pytest.raises(HiltError, match=r"no encoder named 'mobilenet'.*resnet10, small"):
        quick("encoder=mobilenet")
    with pytest.raises(ConfigError, match="only kind=resnet10 reads a file"):
        quick("weights=x.pkl")


def test_classifier_watch_is_called_at_every_step():
    told: list[tuple[int, float, float]] = []
    train(clips(), build(ClassifierConfig(), *QUICK), lambda *what: told.append(what))
    assert (
        [step for step, *_ in told] == [*range(1, 13)]
        and told[-1][1] < told[0][1]
        and all(0 <= right <= 1 for *_, right in told)
    )
