"""The precision of a run: decided when it begins, frozen with its settings, recorded in its run.json and shown by its commands.

All processes of a run compute in the precision that it began with, on whatever machine they are and after whatever resume.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from hilt.core.files import read_json
from hilt.policies.precision import AUTO, FLOAT32, Choice, choose, of_former_name, slowness
from hilt.runtime.config import Hil

Run = TypeVar("Run")
"""The settings of a run of any kind: `Hil`, `Sft` or `Vla`"""


@dataclass(frozen=True)
class Setting:
    """The setting that chooses the precision of a run."""

    name: str
    """Its dotted key"""
    value: str
    device: str


def settle(config: Run) -> tuple[Run, Choice | None]:
    """The settings with `auto` replaced by what is chosen here, and the choice; None where nothing has a precision to choose."""
    setting = setting_of(config)
    if setting is None:
        return config, None
    choice = _chosen(setting)
    if isinstance(config, Hil):
        encoder = replace(config.agent.encoder, precision=choice.precision)
        return replace(config, agent=replace(config.agent, encoder=encoder)), choice
    settled: Any = config
    options = {**of_former_name(settled.policy_options), setting.name.rpartition(".")[2]: choice.precision}
    return replace(settled, policy_options=options), choice


def described(choice: Choice | None) -> dict[str, Any]:
    """What run.json has of it."""
    return {} if choice is None else {"precision": choice.precision, "precision_why": choice.why}


def lines(config: Any, run: Path | None = None, resumed: bool = False) -> list[str]:
    """What a command shows: the precision with its reason, and a warning where it is far slower on this machine than the other.

    `run` is the folder that has it in its run.json; without one, as for a run that only would begin, it is decided.
    """
    setting = setting_of(config)
    if setting is None:
        return []
    card = read_json(run / "run.json") if run is not None else {}
    if resumed and setting.value != AUTO:
        choice = Choice(setting.value, "as the run was begun")
    else:
        choice = Choice(setting.value, card["precision_why"]) if "precision_why" in card else _chosen(setting)
    return [str(choice), *warnings(config)]


def warnings(config: Any) -> list[str]:
    """A line where the precision of a run is far slower on this machine than the other; else none."""
    setting = setting_of(config)
    found = slowness(setting.value, setting.device, setting.name) if setting is not None else ""
    return [found] if found else []


def setting_of(config: Any) -> Setting | None:
    """None where nothing has a precision to choose: no encoder, or a policy that computes in that of its weights."""
    if isinstance(config, Hil):
        encoder = config.agent.encoder
        return None if encoder.kind == "none" else Setting("agent.encoder.precision", encoder.precision, config.agent.device)
    name = _option(config.policy)
    if name is None:
        return None
    return Setting(f"policy_options.{name}", str(of_former_name(config.policy_options).get(name, AUTO)), config.device)


def _option(policy: str) -> str | None:
    """The option that chooses the precision of a policy."""
    kind = "hilt_small_vla" if policy == "small_vla" else ""
    if (document := Path(policy, "config.json")).is_file():
        from hilt.policies.weights import read_json as read_any  # needs torch, which the settings of a learner and actors do without

        kind = str(read_any(document).get("model_type", ""))
    return {"hilt_small_vla": "precision", "openvla": "compute"}.get(kind)


def _chosen(setting: Setting) -> Choice:
    if setting.name.endswith(".compute") and setting.value == AUTO and not setting.device.startswith("cpu"):
        return Choice(FLOAT32, "products in the precision of the weights, unless compute=bfloat16 is set")
    return choose(setting.value, setting.device)
