"""What the algorithms are told. Without torch, so that a command line that only reads settings is quick."""

from __future__ import annotations

from dataclasses import dataclass

from hilt.core.errors import ConfigError, UnknownNameError

IMITATION_LOSSES = ("nll", "mse")


@dataclass
class Rlpd:
    """Soft actor-critic as HIL-SERL has it, with RLPD's options; the formulas are in `hilt.algos.rlpd`."""

    discount: float = 0.97
    """What a reward one step later is worth"""
    tau: float = 0.005
    """Share of the critics that their slow copies take over at each update"""
    critics: int = 2
    """How many critics"""
    subset: int = 0
    """The target is the smallest of so many critics, drawn anew for each update; 0: of all"""
    learning_rate: float = 3e-4
    """Of every network's own Adam"""
    temperature: float = 0.01
    """Weight of the entropy at the start; it is learned from there"""
    target_entropy: float | None = None
    """Where the temperature steers the entropy, in nats; none: minus half the number of continuous actions"""
    backup_entropy: bool = False
    """Whether the critics' target counts the entropy too"""
    reward_bias: float = 0.0
    """Added to every reward before any loss"""
    target_range: list[float] | None = None
    """The critics' target is kept within [low, high]; none: as it comes"""
    actor_q: str = "mean"
    """What the actor climbs: the "mean" of the critics, or their "min"imum"""
    actor_average: float = 0.0
    """Share of the actor that its slow copy, the one that is evaluated, takes over at each update; 0: there is none"""
    critic_warmup: int = 0
    """So many first updates of the actor imitate demonstrations instead of climbing Q"""
    imitation_weight: float = 0.0
    """Weight of imitating demonstrations beside climbing Q, at the start"""
    imitation_updates: int = 0
    """It fades to 0 over so many updates of the actor; 0: it stays"""
    imitation_loss: str = "nll"
    """What imitating means: "nll", the actions are made likely, or "mse", the actor's mean comes near to them"""
    grasp_margin: float = 0.1
    """By how much a learned gripper's shown move should be worth more than others, when it is imitated"""
    random_crop: int = 4
    """Images are moved by up to so many pixels in each update; 0: not at all"""
    feature_noise: float = 0.0
    """Deviation of the noise on what a frozen encoder made of the images, in each update; its numbers are from -1 to 1"""


def check(settings: Rlpd) -> None:
    """Refuse what cannot work, with a sentence."""
    rules = (
        ("discount", 0 <= settings.discount <= 1, "a number from 0 to 1"),
        ("tau", 0 < settings.tau <= 1, "above 0 and at most 1"),
        ("critics", settings.critics >= 1, "at least 1"),
        ("subset", 0 <= settings.subset <= settings.critics, "0 for all, or at most as many as there are critics"),
        ("learning_rate", settings.learning_rate >= 0, "0 or more"),
        ("temperature", settings.temperature > 0, "above 0"),
        ("actor_average", 0 <= settings.actor_average <= 1, "a number from 0 to 1"),
        ("critic_warmup", settings.critic_warmup >= 0, "0 or more"),
        ("imitation_weight", settings.imitation_weight >= 0, "0 or more"),
        ("imitation_updates", settings.imitation_updates >= 0, "0 or more"),
        ("random_crop", settings.random_crop >= 0, "0 or more pixels"),
        ("feature_noise", settings.feature_noise >= 0, "0 or more"),
    )
    for name, fits, wanted in rules:
        if not fits:
            raise ConfigError(f"rlpd.{name} is {getattr(settings, name)}; expected {wanted}.")
    bounds = settings.target_range
    if bounds is not None and (len(bounds) != 2 or not bounds[0] < bounds[1]):
        raise ConfigError(f"rlpd.target_range is {bounds}; expected [low, high] with low < high, or none.")
    if settings.actor_q not in ("mean", "min"):
        raise UnknownNameError("actor_q", settings.actor_q, ("mean", "min"))
    if settings.imitation_loss not in IMITATION_LOSSES:
        raise UnknownNameError("imitation loss", settings.imitation_loss, IMITATION_LOSSES)
