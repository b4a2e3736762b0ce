"""A run decides its precision when it begins, freezes and records it, and keeps it when it is resumed elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hilt.core.checksums import read_json
from hilt.core.config import build, freeze, thaw
from hilt.core.errors import ConfigError
from hilt.distributed.placement import Sharding
from hilt.hil import launch as train
from hilt.hil.config import Hil
from hilt.policies import precision as policies
from hilt.policies.precision import PrecisionChoice, Trial
from hilt.policies.vla.small_vla import SmallVLA, SmallVLAConfig
from hilt.recipes import recipe, sft_recipe, vla_recipe
from hilt.runs.run_precision import frozen, lines, settle, warnings
from hilt.vla import sft
from hilt.vla import train as post_train
from hilt.vla.config import Vla
from hilt.vla.sft import Sft

KINDS: dict[str, Any] = {
    "hil": (train, Hil, lambda: recipe("hil_debug"), "agent.encoder.precision"),
    "sft": (sft, Sft, lambda: sft_recipe("sft_debug"), "policy_options.precision"),
    "vla": (post_train, Vla, lambda: vla_recipe("vla_debug"), "policy_options.precision"),
}


def of(config: Any) -> str:
    return str(config.agent.encoder.precision if isinstance(config, Hil) else config.policy_options["precision"])


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Any:
    return KINDS[request.param]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Makes this machine one that decides for a precision, and on which bfloat16 gains so many times."""

    def become(precision: str, gain: float = 1.0) -> None:
        monkeypatch.setattr(policies, "_automatic", lambda device: PrecisionChoice(precision, "this CPU likes it"))
        monkeypatch.setattr(policies, "_by_instructions", lambda: None)
        monkeypatch.setattr(policies, "trial", lambda: Trial(gain, 1.0))

    return become


def test_the_choice_is_made_frozen_recorded_and_kept(kind: Any, machine: Any, tmp_path: Path):
    module, settings, make, name = kind
    machine("bfloat16", 2.0)
    config = module.begin_run(tmp_path / "run", "recipe", make())
    card = read_json(tmp_path / "run" / "run.json")
    assert of(config) == of(thaw(settings, tmp_path / "run" / "config.yaml")) == card["precision"] == "bfloat16"
    assert card["precision_why"] == "this CPU likes it"
    assert lines(config, tmp_path / "run") == ["precision: bfloat16 (this CPU likes it)"]
    machine("float32", 0.05)  # another machine, where it is emulated
    again = module.resume_run(tmp_path / "run", "", ["max_steps=3"])
    assert of(again) == "bfloat16" == of(thaw(settings, tmp_path / "run" / "config.yaml"))
    assert lines(again, tmp_path / "run", resumed=True) == [
        "precision: bfloat16 (as the run was begun)",
        (
            "precision: bfloat16 is at least 20 times slower than float32 on this CPU: a run with "
            f"{name}=float32 would be faster"
        ),
    ]
    if module is not sft:  # which has learned nothing yet
        with pytest.raises(ConfigError, match=r"'bfloat16'.* a resumed run cannot change"):
            module.resume_run(tmp_path / "run", "", [f"{name}=float32"])


def test_a_choice_by_hand_is_kept_and_a_slow_one_named(kind: Any, machine: Any, tmp_path: Path):
    module, _, make, name = kind
    machine("float32", 0.04)
    config = module.begin_run(tmp_path / "run", "recipe", build(make(), f"{name}=bfloat16"))
    assert of(config) == "bfloat16" and read_json(tmp_path / "run" / "run.json")["precision_why"] == "as set"
    assert lines(config, tmp_path / "run") == [
        "precision: bfloat16 (as set)",
        (
            "precision: bfloat16 is at least 25 times slower than float32 on this CPU: a run with "
            f"{name}=float32 would be faster"
        ),
    ]


def test_the_former_name_forces_it_too(kind: Any, machine: Any):
    machine("float32")
    config = build(kind[2](), kind[3].replace("precision", "bfloat16") + "=true")
    assert of(settle(config)[0]) == "bfloat16"


def test_a_run_that_does_not_look_has_no_precision(machine: Any, tmp_path: Path):
    machine("bfloat16")
    config = train.begin_run(
        tmp_path / "run", "recipe", build(recipe("hil_debug"), "agent.encoder.kind=none", "agent.encoder.features=64")
    )
    assert config.agent.encoder.precision == "auto" and "precision" not in read_json(tmp_path / "run" / "run.json")
    assert lines(config) == []
    train.resume_run(tmp_path / "run", "", [])  # nothing was frozen that would be refused


def test_a_folder_of_a_small_vla_gets_the_choice_of_the_run(machine: Any, tmp_path: Path):
    machine("bfloat16")
    SmallVLA(SmallVLAConfig(precision="float32")).save_pretrained(tmp_path / "policy")
    config, choice = settle(Sft(policy=str(tmp_path / "policy")))
    assert config.policy_options == {"precision": "bfloat16"} and choice == PrecisionChoice(
        "bfloat16", "this CPU likes it"
    )


def test_an_openvla_computes_in_what_is_faster_on_a_cpu_and_as_its_weights_are_on_a_gpu(machine: Any, tmp_path: Path):
    machine("bfloat16")
    (tmp_path / "config.json").write_text('{"model_type": "openvla"}')
    config, choice = settle(Sft(policy=str(tmp_path)))
    assert config.policy_options == {"compute": "bfloat16"} and choice == PrecisionChoice(
        "bfloat16", "this CPU likes it"
    )
    config, choice = settle(Sft(policy=str(tmp_path), device="cuda"))
    assert config.policy_options == {"compute": "float32"} and choice == PrecisionChoice(
        "float32", "in the precision of the weights"
    )


def test_weights_in_bfloat16_are_named_where_they_are_slow(machine: Any, tmp_path: Path):
    machine("float32", 0.1)
    (tmp_path / "config.json").write_text('{"type": "pi0"}')
    config, choice = settle(Vla(policy=str(tmp_path), policy_options={"dtype": "bfloat16"}))
    assert choice == PrecisionChoice("bfloat16", "as set")
    first, second = lines(config)
    assert (
        first == "precision: bfloat16 (as set)"
        and "at least 10 times slower" in second
        and "policy_options.dtype=float32" in second
    )
    assert settle(Vla(policy=str(tmp_path)))[1] is None and lines(Vla(policy=str(tmp_path))) == []


def test_units_in_bfloat16_are_named_where_they_are_slow(machine: Any, tmp_path: Path):
    machine("float32", 0.1)
    (tmp_path / "config.json").write_text('{"type": "pi0"}')
    config = Vla(policy=str(tmp_path), sharding=Sharding(enabled=True, precision="bfloat16", units=["Block"]))
    slow = (
        "precision: bfloat16 is at least 10 times slower than float32 on this CPU: a run with "
        "sharding.precision=float32 would be faster"
    )
    assert warnings(config) == [slow]
    assert warnings(Vla(policy=str(tmp_path), device="cuda", sharding=config.sharding)) == []


def test_precision_of_runs_of_earlier_versions_is_float32(machine: Any, tmp_path: Path):
    machine("bfloat16")
    freeze(Vla(policy_options={"chunk": 3}), tmp_path / "config.yaml")
    assert frozen(Vla, tmp_path).policy_options == {"chunk": 3, "precision": "float32"}
    freeze(Vla(policy_options={"bfloat16": True}), tmp_path / "config.yaml")
    assert settle(frozen(Vla, tmp_path))[0].policy_options == {"precision": "bfloat16"}


def test_precision_of_earlier_runs_from_a_folder_is_the_folders(machine: Any, tmp_path: Path):
    machine("float32")
    (tmp_path / "config.json").write_text('{"model_type": "hilt_small_vla", "bfloat16": true}')
    freeze(Sft(policy=str(tmp_path)), tmp_path / "config.yaml")
    assert frozen(Sft, tmp_path).policy_options == {"precision": "bfloat16"}
