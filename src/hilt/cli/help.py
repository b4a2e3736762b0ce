"""What ``--help`` shows: no type behind a flag, commands in quotes (a terminal renders
no backticks), examples, and the page to read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

EXAMPLES: dict[str, tuple[str, ...]] = {
    "": ("hilt demo --fast", "hilt train tabletop_pick operator=browser", "docs/command-line.md"),
    "demo": ("hilt demo --fast", "hilt demo --human", "docs/training.md"),
    "demo store": ("hilt demo store", "hilt demo store --steps 2000 --keep", "docs/replay.md"),
    "demo wire": ("hilt demo wire", "hilt demo wire --steps 200", "docs/wire.md"),
    "demo vla": ("hilt demo vla --fast", "hilt demo vla --minutes 0 --demonstrations 30", "docs/demo-vla.md"),
    "demo person": ("hilt demo person --fast", "hilt demo person --human", "docs/person-and-vla.md"),
    "eval": (
        "hilt eval runs/tabletop_pick --videos 3",
        "hilt eval runs/sft --best-of 8 --verifier verifier --json result.json",
        "docs/observe.md",
    ),
    "open": ("hilt open runs", "hilt open runs/mine --view", "docs/open.md"),
    "plot": ("hilt plot runs/tabletop_pick", "hilt plot runs/seed-0 runs/seed-1 --out compared", "docs/observe.md"),
    "recipes": ("hilt recipes", "hilt recipes --json", "docs/recipes.md"),
    "settings": (
        "hilt settings tabletop_pick encoder max_",
        "hilt settings runs/mine/config.yaml --changed",
        "docs/recipes.md",
    ),
    "train": (
        "hilt train tabletop_pick operator=browser --run runs/mine",
        "hilt train --run runs/mine --resume",
        "docs/training.md",
    ),
    "train classifier": (
        "hilt train classifier frames",
        "hilt train classifier frames steps=150 --out classifier",
        "docs/classifier.md",
    ),
    "train value": (
        "hilt train value runs/mine",
        "hilt train value runs/mine recordings/tabletop-pick actions=5 --out verifier",
        "docs/value.md",
    ),
    "train sft": (
        "hilt train sft sft_debug",
        "hilt train sft demos policy=FOLDER lora.rank=32 --run runs/sft",
        "docs/fine-tuning.md",
    ),
    "train rloo": (
        "hilt train rloo --config FILE policy=FOLDER --dry-run",
        "hilt train rloo --run runs/rloo --resume",
        "docs/rloo.md",
    ),
    "train simplevla": (
        "hilt train simplevla data.task_suite_name=libero_10 data.n_samples=8 --dry-run",
        "hilt train simplevla examples/run_openvla_oft_rl_libero.sh hilt.pool.workers=16",
        "docs/simplevla.md",
    ),
    "learner": (
        "hilt learner tabletop_pick --run runs/mine",
        "hilt learner my_task.yaml wire.host=192.168.1.5 wire.keys=keys --run runs/mine",
        "docs/learner.md",
    ),
    "actor": (
        "hilt actor tabletop_pick --learner 127.0.0.1",
        "hilt actor my_task.yaml wire.keys=keys --learner 192.168.1.5 --name arm-1",
        "docs/training.md",
    ),
    "record": (
        "hilt record tabletop/pick --device browser --episodes 20",
        "hilt record robot/arm.yaml --device spacemouse --classifier",
        "docs/recording.md",
    ),
    "data": (
        "hilt data inspect recordings/tabletop-pick",
        "hilt data convert bridge/1.0.0 bridge-log",
        "docs/formats.md",
    ),
    "data inspect": (
        "hilt data inspect recordings/tabletop-pick",
        "hilt data inspect bridge/1.0.0 --frames",
        "docs/formats.md",
    ),
    "data convert": (
        "hilt data convert bridge/1.0.0 bridge-log",
        "hilt data convert bridge-log bridge-lerobot --to lerobot",
        "docs/formats.md",
    ),
    "data formats": ("hilt data formats", "hilt data formats | less", "docs/formats.md"),
    "data check": ("hilt data check bridge/1.0.0", "hilt data check runs/mine --skip idle --json", "docs/formats.md"),
    "data score": (
        "hilt data score runs/mine",
        "hilt data score runs/mine --classifier classifier --frames 500",
        "docs/classifier.md",
    ),
    "data value": (
        "hilt data value runs/mine --model value",
        "hilt data value recordings/tabletop-pick --model value --json",
        "docs/value.md",
    ),
    "data verify": ("hilt data verify runs/mine", "hilt data verify runs/mine --json", "docs/replay.md"),
    "data repair": ("hilt data verify runs/mine", "hilt data repair runs/mine", "docs/replay.md"),
    "data merge": (
        "hilt data merge first second --into both",
        "hilt data merge log --into new --without observations/wrist",
        "docs/replay.md",
    ),
    "data split": (
        "hilt data split log train held-out --ratios 0.9,0.1",
        "hilt data split log --parts 4",
        "docs/replay.md",
    ),
    "data label": (
        "hilt data label log 3,7-9 --failure --reward 0",
        "hilt data label log --where 'steps<10' --bad --dry-run",
        "docs/editing.md",
    ),
    "data tag": (
        "hilt data tag log rescued 3,7-9",
        "hilt data tag log rescued --where source=human",
        "docs/editing.md",
    ),
    "data trim": ("hilt data trim log 3 --first 12 --last 80", "hilt data trim log 3 --clear", "docs/editing.md"),
    "data cut": ("hilt data cut log 3 --step 40", "hilt data cut log 3 --mark grasp", "docs/editing.md"),
    "data join": ("hilt data join log 3,4", "hilt data join log 7-9 --dry-run", "docs/editing.md"),
    "data delete": (
        "hilt data delete log 3,7-9",
        "hilt data delete log --where success=false --dry-run",
        "docs/editing.md",
    ),
    "data undo": ("hilt data undo log", "hilt data undo log 12", "docs/editing.md"),
    "data history": ("hilt data history log", "hilt data history log 3 --json", "docs/editing.md"),
    "fetch": ("hilt fetch hf:datasets/lerobot/pusht", "hilt fetch hf:org/policy@v1.0", "docs/formats.md"),
    "push": (
        "hilt push runs/sft/policy hf:org/mine",
        "hilt push dataset hf:datasets/org/mine --public",
        "docs/formats.md",
    ),
    "keys": ("hilt keys new learner arm-1", "hilt keys list", "docs/wire.md"),
    "keys new": ("hilt keys new learner arm-1", "hilt keys new arm-2 --dir keys", "docs/wire.md"),
    "keys list": ("hilt keys list", "hilt keys list --dir keys", "docs/wire.md"),
    "serve-policy": (
        "hilt serve-policy runs/mine",
        "hilt serve-policy runs/sft/policy --host 0.0.0.0 --key-file policy.key",
        "docs/serve-policy.md",
    ),
    "serve-robot": (
        "hilt serve-robot --task pick",
        "hilt serve-robot --backend my_arm:MyArm --set robot_ip=172.16.0.2",
        "docs/robot.md",
    ),
    "docs": ("hilt docs training", "hilt docs gripper never closes", "docs/command-line.md"),
    "completion": (
        "hilt completion bash >> ~/.bashrc",
        "hilt completion fish > ~/.config/fish/completions/hilt.fish",
        "docs/command-line.md",
    ),
    "doctor": ("hilt doctor --fix", "hilt doctor --calibrate --task tabletop/pick", "docs/core.md"),
}
"""For each command its examples, and the page of the documentation that describes it"""


def write_examples(name: str, formatter: SupportsWrite[str]) -> None:
    """Writes the examples of a command, and the page that describes it, below its help."""
    *examples, page = EXAMPLES[name]
    formatter.write(
        "".join(
            f" {line}\n" for line in ("Examples:", *(f"  {example}" for example in examples), f"Documentation: {page}")
        )
    )


def with_page(text: str, words: Sequence[str]) -> str:
    """The text of an error, and at its end the page that describes the command of these words, unless it names one."""
    if "docs/" in text or "hilt docs" in text:
        return text
    names = [word for word in words if not word.startswith("-")]
    command = next(name for count in (3, 2, 1, 0) if (name := " ".join(names[:count])) in EXAMPLES)
    see = f"hilt docs {EXAMPLES[command][-1].removeprefix('docs/').removesuffix('.md')}"
    if "\n" in text:
        return f"{text}\nSee: {see}"
    return f"{text} See: {see}" if text.endswith((".", "?", "!")) else f"{text} (see: {see})"


def tidy(command: Any, name: str) -> Any:
    """Returns the same command, and the commands below it, with tidy help and examples."""
    command.help = quoted(joined(command.help))
    get_params, format_help = command.get_params, command.format_help

    def tidied(ctx: object) -> list[Any]:
        return tidy_params(get_params(ctx))

    def formatted(ctx: object, formatter: SupportsWrite[str]) -> None:
        format_help(ctx, formatter)
        write_examples(name, formatter)

    command.get_params, command.format_help = tidied, formatted  # the option --help is made when it is asked for
    for below, inner in getattr(command, "commands", {}).items():
        tidy(inner, f"{name} {below}")
    return command


def tidy_params(params: list[Any]) -> list[Any]:
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""  # some versions of typer show <bool>
        if getattr(param, "help", None):
            param.help = quoted(param.help)
    return params


def joined(text: str | None) -> str | None:
    """A docstring with each paragraph in one line: the terminal breaks lines by its own width."""
    return re.sub(r"(?<=\S)\n(?=\S)", " ", text) if text else text


def quoted(text: str | None) -> str | None:
    return text and text.replace("`", "'")
