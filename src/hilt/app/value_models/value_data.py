"""The data of the page of value models: those that there are, and the report of one."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from hilt.app.classifiers.classifier_data import log_places
from hilt.app.episodes.episode_shelf import EpisodeShelf, data_key
from hilt.app.table_parts import when
from hilt.app.words import Words
from hilt.core.checksums import read_json
from hilt.core.errors import CorruptError, HiltError
from hilt.observe.sinks import config_of
from hilt.recipes import recipe_of
from hilt.runs.folder import RUN_FILE

VALUE_FILE, HELD_OUT_FILE = "value.json", "held_out.json"
BELOW = ("", "*/", "*/*/", "rounds/*/value/", "*/rounds/*/value/")
"""Where they are looked for in a folder of the app; the last are the rounds of RECAP"""
HALF_WAY, SHARES = 0.5, (0.25, 0.5, 0.75)
MAX_WORST = 12
"""Held-out episodes that are shown"""
POINTS = 80
"""Of their curves"""


@dataclass(frozen=True)
class KnownValueModel:
    """A value model that the page can show."""

    key: str
    name: str
    path: Path


def value_models_of(roots: Sequence[Path], shelf: EpisodeShelf) -> list[KnownValueModel]:
    """Those in the folders of the app, and those that its runs use; the newest first."""
    files = [file for root in roots for pattern in BELOW for file in root.glob(f"{pattern}{VALUE_FILE}")]
    files += [Path(used) / VALUE_FILE for data in shelf.listed() if (used := _used_by(data.path))]
    folders = {file.parent.absolute() for file in files if file.is_file()}
    newest = sorted(folders, key=lambda folder: (-(folder / VALUE_FILE).stat().st_mtime, folder))
    return [KnownValueModel(data_key(folder), _name(folder), folder) for folder in newest]


def _used_by(path: Path) -> str:
    """The value model in the settings of a run; empty where there is none."""
    try:
        value = config_of(path).get("value") if (path / RUN_FILE).is_file() else None
    except (HiltError, OSError):
        return ""
    return str(value.get("model") or "") if isinstance(value, Mapping) else ""


def _name(folder: Path) -> str:
    inside = folder.parent.parent.name == "rounds"
    return "/".join(folder.parts[-4:] if inside else folder.parts[-1:])


def report_of(known: KnownValueModel, shelf: EpisodeShelf, word: Words) -> dict[str, Any]:
    """How good a model is on held-out episodes, which of them it judges worst, and the commands that use it."""
    metadata = read_json(known.path / VALUE_FILE)
    try:
        held, training = metadata["held_out"], metadata["training"]
        alarms = training.get("alarms", [])  # older ones have none
        ranks = not any(one["name"] == "ranking" for one in alarms)
        return {
            "path": str(known.path),
            "made": when((known.path / VALUE_FILE).stat().st_mtime),
            "id": str(metadata["id"]),
            "trained": {name: training[name] for name in ("episodes", "successes", "frames")},
            "held": {name: held[name] for name in ("episodes", "successes", "initial_states", "by")},
            "alarms": [word.event(one["text"]) for one in alarms],
            "after": held["after"],
            "error": held["calibration_error"],
            "reliability": held["reliability"],
            "tasks": held.get("tasks", []),
            "chunk": bool(metadata["inputs"].get("chunk")),
            "worst": list(_worst(read_json(known.path / HELD_OUT_FILE)["episodes"], shelf)),
            "commands": _commands(known.path, metadata) if ranks else [],
        }
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        cure = "Train it again with: hilt train value"
        raise CorruptError(f"{known.path}: this is no report of a value model ({error!r}). {cure}") from error


def _commands(folder: Path, metadata: Mapping[str, Any]) -> list[str]:
    """What is done with it next."""
    if metadata["inputs"].get("chunk"):
        return [shlex.join(["hilt", "eval", "RUN", "--best-of", "8", "--verifier", str(folder)])]
    tasks = list(metadata["tasks"])
    recipe = (recipe_of(tasks[0]) if len(tasks) == 1 else "") or "RECIPE"
    return [
        shlex.join(["hilt", "data", "value", "LOG", "--model", str(folder)]),
        shlex.join(["hilt", "train", recipe, f"value.model={folder}"]),
    ]


def _worst(episodes: Sequence[Mapping[str, Any]], shelf: EpisodeShelf) -> Iterator[dict[str, Any]]:
    """The held-out episodes whose outcome it expects least half-way, the worst first."""
    places = log_places(shelf)
    order = sorted(episodes, key=lambda one: -abs(one["succeeded"] - one["success"][_after(one, HALF_WAY)]))
    for one in order[:MAX_WORST]:
        curve, half = one["success"], _after(one, HALF_WAY)
        place = places.get(str(Path(one["log"]).resolve()))
        named = {"number": one["trajectory"], "step": half}
        yield {
            "log": one["log"],
            "number": one["trajectory"],
            "task": one["task"],
            "succeeded": one["succeeded"],
            "after": [curve[_after(one, share)] for share in SHARES],
            "wrong": abs(one["succeeded"] - curve[half]) > HALF_WAY,
            "curve": curve[:: -(-len(curve) // POINTS)],
            "href": "/episode?" + urlencode({"data": place[0], "source": place[1], **named}) if place else "",
        }


def _after(episode: Mapping[str, Any], share: float) -> int:
    """The step that comes after this share of an episode, as in `hilt.value.value_report`."""
    steps = len(episode["success"])
    return min(int(share * steps), steps - 1)
