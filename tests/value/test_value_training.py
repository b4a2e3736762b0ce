"""Training a value model: it ranks, goes on where it was stopped, and refuses what it cannot learn from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hilt.core.checksums import read_json, write_json
from hilt.core.errors import AlarmError, ConfigError, CorruptError, SchemaError, UnknownNameError
from hilt.replay import Log
from hilt.value import value_training
from hilt.value.value_config import ValueConfig
from hilt.value.value_episodes import ValueEpisodes
from hilt.value.value_model import ValueModel, load_value_model
from hilt.value.value_training import split_episodes, train_value
from tests.value.valued import BLIND, QUICK, write_log


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_log(tmp_path_factory.mktemp("value") / "log", 32)


@pytest.fixture(scope="module")
def model(log: Path) -> ValueModel:
    with ValueEpisodes([log]) as episodes:
        made = train_value(episodes, ValueConfig(**QUICK), log.parent / "model")
        assert made is not None
        return made


def test_values_rank_held_out_episodes_by_their_outcome(model: ValueModel, log: Path):
    held = model.metadata["held_out"]
    assert held["by"] == "initial state" and held["episodes"] == 8 and held["successes"] == 4
    # the outcome is seen from a third of an episode on, and not before
    assert held["after"][1]["auc"] > 0.9 and held["after"][2]["auc"] > 0.9
    assert held["after"][1]["interval"][0] > 0.5
    with ValueEpisodes([log]) as episodes:
        split = split_episodes(episodes, ValueConfig(**QUICK))
        assert not {*split.train} & {*split.validation} and not {*split.held_out} & {*split.train, *split.validation}
        good, bad = (next(n for n in split.held_out if episodes.episodes[n].success is kind) for kind in (True, False))
        won, lost = model.predict(episodes, good), model.predict(episodes, bad)
    assert won.value[-1] > -0.7 and lost.value[-1] < -1.3 and won.success[-1] > 0.6 > 0.4 > lost.success[-1]
    assert won.value[-1] > won.value[0] and won.steps_left[-1] < won.steps_left[0]
    assert set(np.sign(np.diff(won.value[4:]))) >= {1}


def test_a_folder_gives_the_same_values(model: ValueModel, log: Path):
    again = load_value_model(model.folder)
    assert again.id == model.id and again.metadata["held_out"] == model.metadata["held_out"]
    with ValueEpisodes([log]) as episodes:
        assert (again.predict(episodes, 3).value == model.predict(episodes, 3).value).all()
    listed = {path.name for path in model.folder.iterdir()}
    assert listed == {"value.json", "model.safetensors", "held_out.json", "report.png"}
    shown = read_json(model.folder / "held_out.json")
    assert shown["model"] == model.id and len(shown["episodes"]) == 8


def test_a_folder_that_does_not_fit_is_refused(model: ValueModel, tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes((model.folder / "model.safetensors").read_bytes())
    metadata = read_json(model.folder / "value.json")
    write_json(tmp_path / "value.json", {**metadata, "advantage_steps": 3})
    with pytest.raises(CorruptError, match=r"their hash is .* expected"):
        load_value_model(tmp_path)
    write_json(tmp_path / "value.json", {**metadata, "settings": {"unknown": 1}})
    with pytest.raises(CorruptError, match="do not fit"):
        load_value_model(tmp_path)
    with pytest.raises(ConfigError, match=r"is no value model: it has no value.json. Make one with: hilt train value"):
        load_value_model(tmp_path / "nothing")


def test_training_that_was_stopped_goes_on_bit_for_bit(tmp_path: Path):
    path, config = write_log(tmp_path / "log", 16, pictures=False), ValueConfig(**BLIND)
    with ValueEpisodes([path]) as episodes:
        whole = train_value(episodes, config, tmp_path / "whole")
        stopped: list[int] = []

        def report(phase: str, done: int = 0, total: int = 0, note: str = "") -> None:
            if phase == "training" and done in (7, 20):
                stopped.append(2)

        assert train_value(episodes, config, tmp_path / "parts", report, stopped) is None
        with pytest.raises(ConfigError, match="Its training has not ended: give the same hilt train value command"):
            load_value_model(tmp_path / "parts")
        with pytest.raises(ConfigError, match="was begun with hidden=16, and now it is 8"):
            train_value(episodes, ValueConfig(**{**BLIND, "hidden": 8}), tmp_path / "parts")
        stopped.clear()
        assert train_value(episodes, config, tmp_path / "parts", report, stopped) is None
        stopped.clear()
        made = train_value(episodes, config, tmp_path / "parts")
        assert made is not None and whole is not None and made.id == whole.id
        losses = [model.metadata["training"]["losses"] for model in (made, whole)]
        assert losses[0] == losses[1] and len(losses[0]) == 3
        with pytest.raises(ConfigError, match=r"is a value model already.*hilt data value LOG --model"):
            train_value(episodes, config, tmp_path / "parts")
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "file").touch()
        with pytest.raises(ConfigError, match="exists already, and is no value model"):
            train_value(episodes, config, tmp_path / "other")


def test_an_alarm_ends_training_with_a_checkpoint_and_without_stop_on_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What is learned is the opposite of what is true in the episodes that it is judged by."""
    path, said = write_log(tmp_path / "log", 24, pictures=False), list[str]()
    settings = BLIND | {"steps": 100, "bins": 5}
    with ValueEpisodes([path]) as episodes:
        split = split_episodes(episodes, ValueConfig(**settings))
        monkeypatch.setattr(value_training, "split_episodes", lambda *given: split)
        for number in [*split.validation, *split.held_out]:
            one = episodes.episodes[number]
            episodes.episodes[number] = replace(one, success=not one.success)
        quiet = train_value(episodes, ValueConfig(**settings), tmp_path / "whole", notify=said.append)
        assert quiet is not None
        alarms = quiet.metadata["training"]["alarms"]
        assert [one["name"] for one in alarms] == ["validation", "ranking"]
        assert all(f"step {one['step']}: {one['text']}" in said for one in alarms)
        stops = ValueConfig(**settings, stop_on=["validation"])
        with pytest.raises(
            AlarmError,
            match=r"alarm validation: the held-out loss is .* It was ended because stop_on names this alarm. There is "
            r"no model, but a checkpoint in .*parts: the same command without stop_on goes on from there",
        ):
            train_value(episodes, stops, tmp_path / "parts")
        assert [file.name for file in (tmp_path / "parts").iterdir()] == ["checkpoint.safetensors"]
        ranks = ValueConfig(**settings, stop_on=["ranking"])
        with pytest.raises(
            AlarmError, match=r"alarm ranking: .* but a checkpoint in .*parts: the same command without"
        ):
            train_value(episodes, ranks, tmp_path / "parts")
        assert [file.name for file in (tmp_path / "parts").iterdir()] == ["checkpoint.safetensors"]
        made = train_value(episodes, ValueConfig(**settings), tmp_path / "parts")
        assert made is not None and made.id == quiet.id
        kept = made.metadata["training"]["alarms"]
        assert kept[0]["stops"] and [one["name"] for one in kept][-1] == "ranking"
        with pytest.raises(UnknownNameError, match="no alarm named 'entropy'"):
            train_value(episodes, ValueConfig(**settings, stop_on=["entropy"]), tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_training_without_a_finite_loss_ends_without_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write_log(tmp_path / "log", 16, pictures=False)
    with ValueEpisodes([path]) as episodes:
        monkeypatch.setattr(value_training, "logits_of", lambda *given: torch.full((1, 1), torch.nan))
        monkeypatch.setattr(value_training, "loss", lambda logits, targets: logits.mean())
        with pytest.raises(
            AlarmError, match=r"not a finite number until step 30, so nothing was kept. Begin anew with"
        ):
            train_value(episodes, ValueConfig(**BLIND), tmp_path / "out")
        monkeypatch.setattr(value_training, "loss", lambda logits, targets: logits.mean() * torch.nan)
        with pytest.raises(
            AlarmError, match=r"the last 5 steps were left out; of the last one, step 5, the gradient of"
        ):
            train_value(episodes, ValueConfig(**BLIND), tmp_path / "second")
    assert not (tmp_path / "second").exists() and not (tmp_path / "out" / "value.json").exists()


def test_other_episodes_than_at_the_beginning_are_refused(tmp_path: Path):
    path, config = write_log(tmp_path / "log", 16, pictures=False), ValueConfig(**BLIND)
    with ValueEpisodes([path]) as episodes:
        assert train_value(episodes, config, tmp_path / "out", stopped=[2]) is None
    with Log.open(path, "r") as log:
        from hilt.replay import Edits

        Edits(log).delete(5)
    with ValueEpisodes([path]) as episodes, pytest.raises(ConfigError, match="other episodes than there are now"):
        train_value(episodes, config, tmp_path / "out")


@pytest.mark.parametrize(
    ("outcomes", "words"),
    [
        ((True,), "all 6 episodes succeeded, and a value that has seen no failures cannot rank"),
        ((False,), "all 6 episodes failed, and a value that has seen no successes cannot rank"),
        ((None,), "of 6 episodes none has a known outcome. Label them: hilt data label"),
        ((True, True, False), "too few episodes to hold some out: 4 successes and 2 failures"),
        ((True, True, True, True, True, False), "too few episodes to hold some out: 5 successes and 1 failures"),
    ],
)
def test_outcomes_that_teach_nothing_are_refused(tmp_path: Path, outcomes: tuple[bool | None, ...], words: str):
    path = write_log(tmp_path / "log", 6, outcomes, pictures=False)
    with ValueEpisodes([path]) as episodes, pytest.raises(ConfigError, match=words):
        train_value(episodes, ValueConfig(**BLIND), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_missing_pictures_and_idle_settings_are_refused(tmp_path: Path):
    with ValueEpisodes([write_log(tmp_path / "log", 12, pictures=False)]) as episodes:
        with pytest.raises(SchemaError, match=r"no picture among its observations.*encoder=none"):
            train_value(episodes, ValueConfig(**QUICK), tmp_path / "out")
        with pytest.raises(ConfigError, match="random_crop"):
            train_value(episodes, ValueConfig(**BLIND, random_crop=2), tmp_path / "out")
        with pytest.raises(ConfigError, match="discount"):
            train_value(episodes, ValueConfig(**BLIND, discount=0.9), tmp_path / "out")
    missing = pytest.raises(SchemaError, match="camera images/front is missing, expected 16 x 16")
    with ValueEpisodes([write_log(tmp_path / "seen", 12), tmp_path / "log"]) as episodes, missing:
        train_value(episodes, ValueConfig(**QUICK), tmp_path / "out")


def test_several_tasks_are_told_apart_by_their_words(tmp_path: Path):
    """Discounted returns and two-hot targets, too."""
    path = write_log(tmp_path / "log", 32, tasks=("lift", "push"), pictures=False)
    config = ValueConfig(**BLIND, returns="discounted", target="two_hot", discount=0.9)
    with ValueEpisodes([path]) as episodes:
        made = train_value(episodes, config, tmp_path / "out")
        assert made is not None
        assert made.metadata["words"] and set(made.tasks) == {"lift", "push"}
        assert made.metadata["held_out"]["after"][1]["auc_within_tasks"] is not None
        assert 0 < made.predict(episodes, 0).value.min() < made.predict(episodes, 0).value.max() < 1
    other = write_log(tmp_path / "other", 4, tasks=("drop",), pictures=False)
    with (
        ValueEpisodes([other]) as episodes,
        pytest.raises(SchemaError, match=r"trained on 'lift', 'push', and .*'drop'"),
    ):
        load_value_model(tmp_path / "out").check(episodes)
