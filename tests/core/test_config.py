"""Settings: layers, errors that name the nearest key, freezing."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hilt.core.config import build, describe, freeze, thaw
from hilt.core.errors import ConfigError


@dataclass
class Replay:
    capacity_steps: int = 1000
    """Steps that are kept at most"""
    durability: str = "every episode"
    """When a step is power-safe"""


@dataclass
class Training:
    batch_size: int = 256
    """Elements per update"""
    cameras: list[str] = field(default_factory=lambda: ["wrist"])
    """Which images the policy sees"""
    replay: Replay = field(default_factory=Replay)
    options: dict[str, float] = field(default_factory=lambda: {"speed": 0.5})
    """What a script is opened with"""


def test_the_last_layer_counts(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("batch_size: 64\nreplay:\n  capacity_steps: 5\n")
    config = build(Training(), tmp_path / "run.yaml", {"cameras": ["front"]}, "replay.capacity_steps=7")
    assert config == Training(64, ["front"], Replay(7))
    assert isinstance(config.replay, Replay)
    assert build(Training()) == Training()
    assert build(Training(), "replay.durability=robot/arm.yaml").replay.durability == "robot/arm.yaml"  # a value, not a file of settings


def test_options_are_added_and_emptied() -> None:
    assert build(Training(), "options.state/q=2").options == {"speed": 0.5, "state/q": 2}
    assert build(Training(), "options={}", "options.slow=1").options == {"slow": 1} and build(Training(), {"options": {}}).options == {}
    assert build(Training(), "replay={}") == Training(), "which is not one of options"


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        ("batchsize=1", r"no setting named 'batchsize'; did you mean 'batch_size'\? Known here: batch_size, cameras, replay, options\."),
        ("replay.capacity=1", r"no setting named 'replay\.capacity'; did you mean 'capacity_steps'\? Known here: capacity_steps, dur"),
        ("batch_size=many", r"batch_size: Value 'many' of type 'str' could not be converted to Integer"),
        ("capacity_steps=1", r"no setting named 'capacity_steps'; did you mean 'replay\.capacity_steps'\? Known here: batch_size"),
        ("cameras=front", r"^cameras: expected a list, got 'front': write cameras=\[front\]\.$"),
        ("batch_size", r"'batch_size': expected an override such as key=value, or the path of a \.yaml file"),
        ("nowhere.yaml", r"nowhere\.yaml: No such file"),
    ],
)
def test_errors_name_the_key(layer: str, text: str) -> None:
    with pytest.raises(Exception, match=text) as caught:
        build(Training(), layer)
    assert "\n" not in str(caught.value)


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("batch_size: [")
    with pytest.raises(ConfigError, match=r"a\.yaml: not readable as YAML"):
        build(Training(), tmp_path / "a.yaml")
    (tmp_path / "b.yaml").write_text("- 1\n- 2\n")
    with pytest.raises(ConfigError, match=r"b\.yaml: expected settings by name, got a list"):
        build(Training(), tmp_path / "b.yaml")
    (tmp_path / "c.yaml").write_text("batch: 3\n")
    with pytest.raises(ConfigError, match=r"c\.yaml: no setting named 'batch'; did you mean 'batch_size'"):
        build(Training(), tmp_path / "c.yaml")


def test_frozen_and_thawed(tmp_path: Path) -> None:
    config = build(Training(), "batch_size=3", "replay.durability=never")
    freeze(config, tmp_path / "config.yaml")
    assert thaw(Training, tmp_path / "config.yaml") == config


def test_described_with_the_text_under_each_field() -> None:
    assert describe(Training)[0] == ("batch_size", "int", 256, "Elements per update")
    assert ("replay.durability", "str", "every episode", "When a step is power-safe") in describe(Training)
