"""Settings: layers, errors that name the nearest key, freezing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hilt.core import config as config_module
from hilt.core.config import build, describe, freeze, given, thaw
from hilt.core.errors import ConfigError, HiltError


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
    # a value, not a file of settings
    assert build(Training(), "replay.durability=robot/arm.yaml").replay.durability == "robot/arm.yaml"


@pytest.mark.parametrize("steps", ["256", "${batch_size}"])
def test_config_knows_given_settings(steps: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"batch_size: 256\nreplay:\n  capacity_steps: {steps}\n")
    config = build(
        build(Training(), tmp_path / "run.yaml"),
        {"cameras": ["wrist"]},
        "options.speed=0.5",
        "replay={durability: never}",
    )
    assert given(config) == {"batch_size", "replay.capacity_steps", "cameras", "options.speed", "replay.durability"}
    assert given(Training(batch_size=256)) == given(build(Training())) == frozenset()


def test_options_are_added_and_emptied() -> None:
    assert build(Training(), "options.state/q=2").options == {"speed": 0.5, "state/q": 2}
    assert (
        build(Training(), "options={}", "options.slow=1").options == {"slow": 1}
        and build(Training(), {"options": {}}).options == {}
    )
    assert build(Training(), "replay={}") == Training(), "which is not one of options"


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        (
            "batchsize=1",
            (
                r"no setting named 'batchsize'; did you mean 'batch_size'\? Known here: batch_size, "
                r"cameras, replay, options\."
            ),
        ),
        (
            "replay.capacity=1",
            r"no setting named 'replay\.capacity'; did you mean 'capacity_steps'\? Known here: capacity_steps, dur",
        ),
        ("batch_size=many", r"batch_size: Value 'many' of type 'str' could not be converted to Integer"),
        (
            "capacity_steps=1",
            r"no setting named 'capacity_steps'; did you mean 'replay\.capacity_steps'\? Known here: batch_size",
        ),
        ("cameras=front", r"^cameras: expected a list, got 'front': write cameras=\[front\]\.$"),
        ("batch_size", r"'batch_size': expected an override such as key=value, or the path of a \.yaml file"),
        ("nowhere.yaml", r"nowhere\.yaml: No such file"),
    ],
)
def test_errors_name_the_key(layer: str, text: str) -> None:
    with pytest.raises(Exception, match=text) as caught:
        build(Training(), layer)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "word", ["replay.durability=", "replay.durability= ", 'replay.durability=""', "replay.durability=''"]
)
def test_a_text_without_anything_after_its_sign_is_empty(word: str) -> None:
    assert build(Training(), word, "batch_size=1").replay.durability == ""
    with pytest.raises(ConfigError, match=r"no setting named 'replay\.durablity'"):
        build(Training(), word, "replay.durablity=")


def test_a_number_without_anything_after_its_sign_is_refused() -> None:
    with pytest.raises(ConfigError, match="batch_size"):
        build(Training(), "batch_size=")


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


@pytest.mark.parametrize(
    "layers",
    [
        [],
        ["batch_size=3"],
        ["replay.capacity_steps=1e3", "replay={}", "batch_size=0x10"],
        ["options={}", "options.slow=1", {"options": {"fast": 2}}, "options.fast=3"],
        [{"cameras": []}, "cameras=[a,b]", {"replay": {"durability": "never"}}],
        ["batch_size=${replay.capacity_steps}", "replay.capacity_steps=9"],
        ["options.a=null"],
        ["replay=null"],
        ["batch_size=null"],
        ["cameras=[1,2]", "options.speed=2"],
        ["replay.durability=true"],
    ],
)
@pytest.mark.parametrize(
    "base",
    [Training(), Training(8, [], Replay(2, "never"), {}), Training(options={"speed": 1}), Training(batch_size="9")],
    ids=str,
)  # type: ignore[arg-type]
def test_with_only_what_is_named_it_is_the_same_as_with_all_of_it(base: Training, layers: list[Any]) -> None:
    """OmegaConf is given only the settings that a layer names; what comes out, and
    what is refused, is as if it had all of them."""

    def outcome(make: Callable[[], Training]) -> str:
        try:
            return repr(make())
        except HiltError as error:
            return f"{type(error).__name__}: {error}"

    assert outcome(lambda: build(base, *layers)) == outcome(lambda: config_module._built_whole(base, layers))


def test_config_fast_path_copies_other_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "_built_whole", lambda base, layers: pytest.fail("all of it"))
    base = Training()
    made = build(base, "batch_size=3", {"replay": {"capacity_steps": 4}})
    assert (
        made == Training(3, ["wrist"], Replay(4))
        and made.options is not base.options
        and made.cameras is not base.cameras
    )


def test_a_base_of_the_wrong_type_is_refused_though_no_layer_names_it() -> None:
    with pytest.raises(ConfigError, match="batch_size: Value 'many' of type 'str' could not be converted to Integer"):
        build(Training(batch_size="many"), "replay.capacity_steps=3")  # type: ignore[arg-type]
