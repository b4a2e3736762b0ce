"""Defaults by what the policy sees: chosen when a run begins, shown, recorded, and overridden by whatever is set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict

from hilt.core.checksums import read_json
from hilt.core.config import build, override, thaw
from hilt.core.errors import ConfigError, UnknownNameError
from hilt.hil import launch as train
from hilt.hil.config import Hil, check
from hilt.hil.defaults import FROZEN_ENCODER, SHOWN, SIMULATED_AHEAD, STATE, chosen, lines
from hilt.hil.environment import Spaces, trainer_config
from hilt.hil.launch import begin_run, own_ports, resume_run

NUMBERS = Dict({"state": Dict({"arm": Box(-1, 1, (7,), np.float32), "cube": Box(-1, 1, (2, 3), np.float32)})})
PICTURES = Dict({"images": Dict({"front": Box(0, 255, (32, 32, 3), np.uint8)}), **NUMBERS.spaces})
SHOWS = {"demonstrations": 20}


def choose(seen: Any = NUMBERS, keeps_rate: bool = False, **settings: Any) -> Any:
    config, choice = chosen(build(Hil(), settings), Spaces(seen, Box(-1, 1, (4,), np.float32), keeps_rate))
    check(config)
    return config, choice


def test_a_policy_that_sees_numbers_alone_has_no_image_machinery_and_imitates_first():
    config, choice = choose(**SHOWS)
    assert choice.changed == {**STATE, **SHOWN, "max_ahead": SIMULATED_AHEAD} and config.defaults == "state"
    assert config.agent.encoder.kind == "none" and config.agent.encoder.pretrain_updates == 1_000 and config.n_step == 3
    assert str(choice).startswith(
        "state only: the policy sees 13 numbers and no images: agent.encoder.kind=none, agent.proprio_width=0"
    )
    bare, choice = choose()
    assert choice.changed == {**STATE, "max_ahead": SIMULATED_AHEAD} and not bare.agent.normalize_proprio, (
        "there is nothing to imitate"
    )


def test_defaults_keep_given_settings_and_images_keep_all():
    config, choice = choose(**SHOWS, cta_ratio=3, agent={"rlpd": {"tau": 0.02}})
    assert (config.cta_ratio, config.agent.rlpd.tau) == (3, 0.02) and not {
        "cta_ratio",
        "agent.rlpd.tau",
    } & choice.changed.keys()
    for seen, settings in ((PICTURES, {}), (PICTURES, SHOWS), (NUMBERS, SHOWS)):
        config, choice = choose(seen, **settings, **({"defaults": "images"} if settings else {}))
        assert choice.changed == {} and config == build(Hil(), settings, {"defaults": "images"})
    # it has images, and looks at none
    for settings in ({"defaults": "state"}, {"agent": {"encoder": {"kind": "none"}}}):
        assert choose(PICTURES, **SHOWS, **settings)[0].agent.encoder.kind == "none"
    with pytest.raises(UnknownNameError, match="no defaults named 'pixels'"):
        check(Hil(defaults="pixels"))


def test_on_a_cpu_demonstrations_train_the_encoder_of_images_before():
    config, choice = choose(PICTURES, **SHOWS)
    assert choice.changed == {**FROZEN_ENCODER, "max_ahead": SIMULATED_AHEAD} and config.defaults == "frozen_encoder"
    encoder = config.agent.encoder
    assert (encoder.kind, encoder.training, encoder.pretrain_updates, encoder.kept_shifts) == (
        "small",
        "frozen",
        1000,
        8,
    )
    assert choice.why == "the policy sees 1 image and learns on a CPU, so that demonstrations train its encoder first"
    alone = Dict({"images": PICTURES["images"]})
    assert not [key for key in choose(alone, **SHOWS)[1].changed if "proprio" in key], "there is none"
    assert choose(PICTURES, **SHOWS, n_step=5)[0].n_step == 5
    assert choose(PICTURES, **SHOWS, agent={"encoder": {"pretrain_crop": 0}})[0].agent.encoder.kept_shifts == 1
    assert choose(PICTURES, demo_path=["recorded"])[0].agent.encoder.training == "frozen"
    assert choose(PICTURES, **SHOWS, agent={"encoder": {"features": 32}})[0].agent.encoder.training == "frozen"


@pytest.mark.parametrize(
    "settings",
    [
        {"demonstrations": 0},
        {"agent": {"encoder": {"training": "critic"}}},
        {"agent": {"encoder": {"kind": "resnet10"}}},
        {"agent": {"encoder": {"pretrain_updates": 50}}},
        {"agent": {"rlpd": {"random_crop": 6}}},
        {"agent": {"device": "cuda"}},
        {"algorithm": "hg-dagger"},
    ],
)
def test_runs_that_choose_their_encoder_or_have_a_gpu_keep_the_defaults_of_images(settings: dict[str, Any]):
    seen = Spaces(PICTURES, Box(-1, 1, (4,), np.float32), False)
    config, choice = chosen(build(Hil(), SHOWS | settings), seen)
    assert (choice.name, choice.changed) == ("images", {}) and config.agent.encoder.training == "critic"


@pytest.mark.parametrize("case", [(NUMBERS, 20, "sees 0 images"), (PICTURES, 0, "there are no demonstrations")])
def test_frozen_encoder_without_images_or_demonstrations_is_refused(case: tuple[Any, int, str]):
    seen, demonstrations, named = case
    with pytest.raises(ConfigError, match=f"expected a task with images, and demonstrations=N.*{named}"):
        choose(seen, demonstrations=demonstrations, defaults="frozen_encoder")


@pytest.mark.parametrize(
    "agent", [{"encoder": {"training": "critic"}}, {"encoder": {"pretrain_updates": 0}}, {"kind": "vla"}]
)
def test_frozen_encoder_beside_settings_that_contradict_it_is_refused(agent: dict[str, Any]):
    with pytest.raises(ConfigError, match=r"defaults=frozen_encoder freezes the encoder.*Leave them out, or give"):
        choose(PICTURES, **SHOWS, defaults="frozen_encoder", agent=agent)
    given, choice = choose(PICTURES, **SHOWS, defaults="frozen_encoder", agent={"device": "cuda"})
    assert given.agent.encoder.training == "frozen" and "CPU" not in choice.why


def test_a_side_that_chooses_other_defaults_is_refused_in_the_handshake():
    versions = {
        device: trainer_config(choose(PICTURES, **SHOWS, agent={"device": device})[0], learner=False).version
        for device in ("cpu", "cuda")
    }
    assert "defaults=frozen_encoder" in versions["cpu"] and "defaults" not in versions["cuda"]


PLAIN = {"n_step": 1, "batch_size": 256, "cta_ratio": 2, "max_ahead": 0, "agent": {"rlpd": {"learning_rate": 3e-4}}}
"""Set to what `Hil` has anyway, and other defaults for numbers alone"""
FILE = "n_step: 1\nbatch_size: 256\ncta_ratio: 2\nmax_ahead: 0\nagent:\n  rlpd: {learning_rate: 3.0e-4}\n"
WORDS = ("n_step=1", "batch_size=256", "cta_ratio=2", "max_ahead=0", "agent.rlpd.learning_rate=3e-4")


@pytest.mark.parametrize("how", ["mapping", "file", "words"])
def test_defaults_keep_settings_given_with_the_default_value(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "mine.yaml").write_text(FILE)
    base = build(Hil(), SHOWS, *{"mapping": [PLAIN], "file": [tmp_path / "mine.yaml"], "words": WORDS}[how])
    monkeypatch.setattr(train, "_taken", lambda host, port: True)
    # it stays so whoever changes something else
    for config in (base, build(base, "seed=3"), override(base, "seed=3"), own_ports(base)):
        config, choice = chosen(config, Spaces(NUMBERS, Box(-1, 1, (4,), np.float32), False))
        assert (config.n_step, config.batch_size, config.cta_ratio, config.max_ahead) == (1, 256, 2, 0)
        assert config.agent.rlpd.learning_rate == 3e-4 and config.agent.rlpd.tau == SHOWN["agent.rlpd.tau"]
        assert (
            not {"n_step", "batch_size", "cta_ratio", "max_ahead", "agent.rlpd.learning_rate"} & choice.changed.keys()
        )


@pytest.mark.parametrize(
    ("keeps_rate", "settings"),
    [(True, {}), (False, {"operator": "browser"}), (False, {"control_hz": 10.0}), (False, {"update_to_data": 0.5})],
)
def test_only_a_simulation_as_fast_as_it_can_waits_for_the_learner(keeps_rate: bool, settings: dict[str, Any]):
    assert choose(keeps_rate=keeps_rate, **settings)[0].max_ahead == 0
    assert choose(training_starts=500)[0].max_ahead == 500


@pytest.mark.parametrize("algorithm", ["bc", "hg-dagger"])
def test_imitation_alone_has_nothing_that_would_do_nothing(algorithm: str):
    config, choice = choose(**SHOWS, algorithm=algorithm)
    assert config.agent.normalize_proprio and not {"n_step", "cta_ratio", "agent.rlpd.tau"} & choice.changed.keys()


def test_the_choice_is_recorded_and_frozen_with_the_run(tmp_path: Path):
    run = tmp_path / "run"
    own = {"task": "Pendulum-v1", "steps_per_update": Hil().steps_per_update, "wire": {"port": 0, "broadcast_port": 0}}
    config = begin_run(run, "mine", build(Hil(), own))
    card = read_json(run / "run.json")
    assert (
        card["defaults"] == "state"
        and card["defaults_changed"]["cta_ratio"] == 1
        and card["defaults_why"].startswith("state only")
    )
    assert (
        lines(run)[0].startswith("state only: the policy sees 3 numbers") and thaw(Hil, run / "config.yaml") == config
    )
    assert config.steps_per_update == Hil().steps_per_update and "steps_per_update" not in card["defaults_changed"], (
        "it was given"
    )
    assert resume_run(run, "", []) == config
    assert resume_run(run, "", ["max_ahead=0"]).max_ahead == 0, "it is chosen once"
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("defaults: state\n", ""))
    older = resume_run(run, "", [])
    assert older.defaults == "images" and thaw(Hil, run / "config.yaml") == older, (
        "one of an older version has made no choice, and makes none"
    )
