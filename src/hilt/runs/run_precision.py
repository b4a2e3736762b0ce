"""The precision of a run: decided when it begins, frozen with its settings,
recorded in its run.json and shown by its commands.

All processes of a run compute in the precision that it began with, on whatever
machine they are and after whatever resume.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hilt.core.checksums import read_json
from hilt.core.config import thaw
from hilt.policies.precision import AUTO, FLOAT32, PrecisionChoice, choose, of_former_name, slowness
from hilt.policies.precision import measures as trial_needed
from hilt.policies.registry import document_of, is_new, policy_class

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
"""The settings of a run: `Hil`, `Sft` or `Vla`"""


@dataclass(frozen=True)
class Setting:
    """The setting that chooses the precision of a run."""

    name: str
    """Its dotted key"""
    value: str
    device: str


def settle(config: T) -> tuple[T, PrecisionChoice | None]:
    """The settings with `auto` replaced by what is chosen here, and the choice;
    None where nothing has a precision to choose."""
    setting = setting_of(config)
    if setting is None:
        return config, None
    choice = _chosen(setting)
    return _with_precision(config, setting.name, choice.precision), choice


def frozen(kind: type[T], run: Path) -> T:
    """The settings that a run of fine-tuning or post-training was begun with.

    Before there was `auto`, settings without a precision meant float32, or the precision in the policy's folder.
    """
    config = thaw(kind, run / "config.yaml")
    setting = setting_of(config)
    if setting is None or setting.value != AUTO:
        return config
    settings: Any = config  # of either kind
    was = of_former_name(document_of(settings.policy)).get("precision", FLOAT32)
    settled: T = _with_precision(config, setting.name, was)
    return settled


def described(choice: PrecisionChoice | None) -> dict[str, Any]:
    """What run.json has of it."""
    return {} if choice is None else {"precision": choice.precision, "precision_why": choice.why}


def lines(config: Any, run: Path | None = None, resumed: bool = False) -> list[str]:
    """What a command shows: the precision with its reason, and a warning where it
    is far slower on this machine than the other.

    `run` is the folder that has it in its run.json; without one, as for a run that only would begin, it is decided.
    """
    setting = setting_of(config)
    if setting is None:
        return []
    metadata = read_json(run / "run.json") if run is not None else {}
    if resumed and setting.value != AUTO:
        choice = PrecisionChoice(setting.value, "as the run was begun")
    else:
        choice = (
            PrecisionChoice(setting.value, metadata["precision_why"])
            if "precision_why" in metadata
            else _chosen(setting)
        )
    return [str(choice), *warnings(config)]


def measures(config: Any) -> bool:
    """Whether `settle` or `lines` measures something, for which torch is imported."""
    setting = setting_of(config)
    return setting is not None and trial_needed(setting.value, setting.device)


def warnings(config: Any) -> list[str]:
    """A line where the precision of a run is far slower on this machine than the other; else none."""
    settings = [setting_of(config)]
    if (sharding := getattr(config, "sharding", None)) is not None and sharding.enabled:
        settings.append(Setting("sharding.precision", sharding.precision, config.device))
    found = [slowness(setting.value, setting.device, setting.name) for setting in settings if setting is not None]
    return [line for line in found if line]


def setting_of(config: Any) -> Setting | None:
    """The setting that decides; None where there is none: no encoder, or a policy that
    computes in the precision of its weights."""
    if _has_agent(config):
        encoder = config.agent.encoder
        return (
            None
            if encoder.kind == "none"
            else Setting("agent.encoder.precision", encoder.precision, config.agent.device)
        )
    options = of_former_name(config.policy_options)
    # weights that are not float32 decide in which precision they are multiplied
    if str(options.get("dtype", FLOAT32)) != FLOAT32:
        return Setting("policy_options.dtype", str(options["dtype"]), config.device)
    name = policy_class(config.policy).precision_option if is_new(config.policy) or document_of(config.policy) else ""
    return None if not name else Setting(f"policy_options.{name}", str(options.get(name, AUTO)), config.device)


def _has_agent(config: Any) -> bool:
    """Returns whether the run trains a per-step agent, whose encoder has the
    precision; else it trains a policy with options."""
    return hasattr(config, "agent")


def _with_precision(config: Any, name: str, value: str) -> Any:
    """Returns the settings with this precision, which the setting of this dotted key decides."""
    if _has_agent(config):
        encoder = replace(config.agent.encoder, precision=value)
        return replace(config, agent=replace(config.agent, encoder=encoder))
    return replace(config, policy_options={**of_former_name(config.policy_options), name.rpartition(".")[2]: value})


def _chosen(setting: Setting) -> PrecisionChoice:
    if setting.value != AUTO:
        return PrecisionChoice(setting.value, "as set")
    if setting.name.endswith(".compute") and not setting.device.startswith("cpu"):
        return PrecisionChoice(FLOAT32, "in the precision of the weights")
    return choose(AUTO, setting.device)
