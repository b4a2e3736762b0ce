"""Settings that would change nothing, given the others: they are refused with a sentence. Defaults, and what is off, pass.

A command line that switches something off, as ``demonstrations=0`` does, takes along what the recipe had set for it: see `settings`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from hilt.core.config import build
from hilt.core.errors import ConfigError, Problems
from hilt.hil.config import IMITATIONS, Hil, reinforces


def _under(prefix: str, *names: str) -> list[str]:
    return [f"{prefix}.{name}" for name in names]


def _looks(config: Hil) -> bool:
    return config.agent.encoder.kind != "none"


def _pretrains(config: Hil) -> bool:
    return config.agent.encoder.pretrain_updates > 0


def _imitates(config: Hil) -> bool:
    return not reinforces(config) or _pretrains(config)


ENCODER, RLPD = "agent.encoder", "agent.rlpd"
NEEDS: list[tuple[Sequence[str], str, Callable[[Hil], Any]]] = [
    (["demonstration_options"], "demonstrations=N", lambda c: c.demonstrations),
    (["operator_options", "lost_contact", "lost_contact_seconds"], "an operator, such as operator=browser", lambda c: c.operator),
    (["lost_contact_seconds"], "lost_contact=policy", lambda c: c.lost_contact == "policy"),
    (_under("goal", "states", "period", "hold"), "goal.success", lambda c: c.goal.success),
    (["wire.key_name"], "wire.keys=FOLDER", lambda c: c.wire.keys),
    (["checkpoint_path", "buffer_period", "collect_steps"], "store=log", lambda c: c.store == "log"),
    (["algorithm_options"], "another algorithm, algorithm=module:Class", lambda c: c.algorithm not in ("rlpd", *IMITATIONS)),
    (["agent.options"], "another agent, agent.kind=module:Class", lambda c: c.agent.kind != "actor_critic"),
    (["agent.proprio_floor"], "agent.normalize_proprio=true", lambda c: c.agent.normalize_proprio),
    (
        [
            *("n_step", "cta_ratio", "update_to_data", "training_starts", "collect_steps"),
            *_under(RLPD, "discount", "tau", "critics", "subset", "temperature", "target_entropy", "backup_entropy", "reward_bias"),
            *_under(RLPD, "target_range", "actor_q", "critic_warmup", "imitation_weight", "imitation_updates"),
        ],
        "algorithm=rlpd",
        reinforces,
    ),
    ([f"{RLPD}.imitation_updates"], f"{RLPD}.imitation_weight", lambda c: c.agent.rlpd.imitation_weight),
    (
        [f"{RLPD}.imitation_loss"],
        f"imitation ({RLPD}.imitation_weight, {RLPD}.critic_warmup, or {ENCODER}.pretrain_updates)",
        lambda c: _imitates(c) or c.agent.rlpd.imitation_weight or c.agent.rlpd.critic_warmup,
    ),
    ([f"{RLPD}.grasp_margin"], "agent.setup_mode=...-learned-gripper", lambda c: c.agent.setup_mode.endswith("learned-gripper")),
    ([f"{RLPD}.grasp_margin"], f"imitation (algorithm=bc or hg-dagger, or {ENCODER}.pretrain_updates)", _imitates),
    (
        ["image_keys", f"{RLPD}.random_crop", *_under(ENCODER, "training", "features", "precision", "pretrain_crop", "pretrain_predict")],
        f"an encoder ({ENCODER}.kind=small or resnet10)",
        _looks,
    ),
    ([f"{RLPD}.random_crop"], f"{ENCODER}.training=critic or head", lambda c: c.agent.encoder.training != "frozen"),
    ([f"{RLPD}.feature_noise"], f"{ENCODER}.training=frozen", lambda c: _looks(c) and c.agent.encoder.training == "frozen"),
    (
        ["collect_steps", *_under(ENCODER, "pretrain_batch", "pretrain_predict", "pretrain_crop", "pretrain_learning_rate")],
        f"{ENCODER}.pretrain_updates",
        _pretrains,
    ),
    ([f"{ENCODER}.pretrain_predict_weight"], f"{ENCODER}.pretrain_predict", lambda c: c.agent.encoder.pretrain_predict),
]
"""Which settings need what, in words, and whether it is there"""


def refuse_idle(config: Hil) -> None:
    """Refuses settings that would change nothing, each once."""
    plain, found = Hil(), dict[str, ConfigError]()
    for names, needed, there in NEEDS:
        for name in names if not there(config) else ():
            if (value := _get(config, name)) and value != _get(plain, name):
                wrong = ConfigError(f"{name}={value} changes nothing without {needed}: set that, too, or leave this out.")
                found.setdefault(name, wrong)
    problems = Problems()
    problems.errors += found.values()
    problems.report()


def settings(base: Hil, *layers: str | Path | Mapping[str, Any]) -> Hil:
    """`base` changed by overrides, as a command line does it: what they switch off takes along the settings that `base` had for it."""
    config, plain = build(base, *layers), Hil()
    for names, _, there in NEEDS:
        for name in names if there(base) and not there(config) else ():
            if _get(config, name) == _get(base, name):
                owner, _, leaf = name.rpartition(".")
                setattr(_get(config, owner), leaf, _get(plain, name))
    return config


def _get(config: Any, name: str) -> Any:
    return reduce(getattr, name.split("."), config) if name else config
