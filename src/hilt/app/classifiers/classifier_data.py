"""The data of the page of classifiers: classifiers of a run or log, commands, held-out frames, frames to label."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from hilt.app.episodes.episode_index import find_sources
from hilt.app.episodes.episode_shelf import EpisodeData, EpisodeShelf, OpenedData, data_key
from hilt.app.error_words import PageError
from hilt.app.run_commands import StartedCommand
from hilt.app.run_library import RunSummary
from hilt.app.table_parts import when
from hilt.classifier.held_out import HeldOutFrame, read_held_out
from hilt.core.checksums import read_json
from hilt.core.errors import HiltError
from hilt.formats.listing.episode_source import EpisodeSource, source_key
from hilt.formats.listing.log_episodes import LogEpisodes
from hilt.observe.sinks import config_of
from hilt.recording.recording_folder import LABELS
from hilt.replay.edits import FRAME_LABELS, frame_labels
from hilt.runs.folder import HIL, RUN_FILE

CLASSIFIER_FILE = "classifier.json"
FRAMES = 500
"""Frames that are judged for the queue"""
MAX_WORST = 12
"""Mistakes of each kind that are shown"""
THUMB = 160
"""Height of their pictures in pixels"""
SETTING = re.compile(r"[a-z_]+=\S+")
PROGRESS = re.compile(r"training: ([\d,]+) of ([\d,]+)")


@dataclass(frozen=True)
class KnownClassifier:
    """A classifier that the page can show."""

    key: str
    name: str
    path: Path


def classifiers_of(data: EpisodeData, roots: Sequence[Path]) -> list[KnownClassifier]:
    """Those that were trained from this page, the newest first; the one that the run uses; and others in the folders of
    the app."""
    own = sorted(own_folder(data.path).glob(f"*/{CLASSIFIER_FILE}"), key=lambda file: -file.stat().st_mtime)
    used = run_classifier(data.path)
    others = [
        file for root in roots for pattern in ("*", "*/*") for file in sorted(root.glob(f"{pattern}/{CLASSIFIER_FILE}"))
    ]
    files = [*own, *([Path(used) / CLASSIFIER_FILE] if used else []), *others]
    found: dict[str, KnownClassifier] = {}
    for folder in (file.parent.absolute() for file in files if file.is_file()):
        name = f"{folder.parent.name}/{folder.name}" if folder.name.isdecimal() else folder.name
        found.setdefault(data_key(folder), KnownClassifier(data_key(folder), name, folder))
    return list(found.values())


def own_folder(path: Path) -> Path:
    """Where classifiers that are trained from this page lie: beside the run, recording or log."""
    path = path.absolute()
    if path.name == "log" and any((path.parent / name).is_file() for name in (RUN_FILE, "recording.json")):
        path = path.parent
    return path.with_name(f"{path.name}-classifiers")


def run_classifier(path: Path) -> str:
    """The classifier in the settings of a run; empty where there is none."""
    try:
        return str(config_of(path).get("classifier") or "") if (path / RUN_FILE).is_file() else ""
    except (HiltError, OSError):
        return ""


def log_paths(data: EpisodeData) -> list[Path]:
    """The logs of a run or log whose frames can be labeled."""
    return [path for _, path in find_sources(data.path) if (path / "log.json").is_file()]


def sources_of(opened: OpenedData) -> list[LogEpisodes]:
    """The same, opened, without those that have no images."""
    return [
        source
        for source in opened.index.sources
        if isinstance(source, LogEpisodes) and any(name.startswith("observations/") for name in source.cameras(0))
    ]


def has_labels(source: LogEpisodes) -> bool:
    """Whether a classifier could be trained from it."""
    log = source.log
    if LABELS in log.schema.columns:
        return True
    return any(None is not value for n in log.trajectories() for value in frame_labels(log.facts.about(n)).values())


# Commands


def score_words(paths: Sequence[Path], classifier: KnownClassifier | None) -> list[str]:
    """The command that finds the frames that are worth a label."""
    judge = ["--classifier", str(classifier.path)] if classifier is not None else []
    return ["hilt", "data", "score", *map(str, paths), *judge, "--frames", str(FRAMES), "--json"]


def train_words(data: EpisodeData, sources: Sequence[LogEpisodes], settings: str) -> list[str]:
    """The command that trains the next classifier from what is labeled, with settings such as ``steps=150``."""
    given = settings.split()
    for word in given:
        if not SETTING.fullmatch(word):
            raise PageError("error.setting", given=word)
    chosen = [source for source in sources if has_labels(source)] or sources
    # the frames that a killed session left are passed over in a recording, and not in its log alone
    recorded = [(source.path, (source.path.parent / "recording.json").is_file()) for source in chosen]
    labeled = [path.parent if inside else path for path, inside in recorded]
    folder = own_folder(data.path)
    numbers = [int(path.name) for path in folder.glob("*") if path.name.isdecimal()]
    out = folder / str(max(numbers, default=0) + 1)
    return ["hilt", "train", "classifier", *map(str, labeled), *given, "--out", str(out)]


@dataclass(frozen=True)
class UseCommand:
    """The command by which a run uses a classifier with a threshold."""

    words: tuple[str, ...]
    why: str
    """The word of the catalog that explains it"""
    resumes: bool = False
    """Whether it can be started from the page"""


def use_command(run: RunSummary | None, path: Path, classifier: KnownClassifier, threshold: float) -> UseCommand:
    """A run that has a classifier is resumed with this one. Another run begins with it: its log needs a column for what
    the task itself reports."""
    if not 0 < threshold < 1:
        raise PageError("error.threshold", threshold=f"{threshold:g}")
    settings = (f"classifier={classifier.path}", f"classifier_threshold={threshold:g}")
    if run is None or run.kind != HIL or not run.metadata:
        return UseCommand(("hilt", "train", "RECIPE", *settings), "classifier.use_begin")
    if not run_classifier(path):
        return UseCommand(("hilt", "train", run.recipe or "RECIPE", *settings), "classifier.use_without")
    words = ("hilt", "train", *settings, "--run", str(run.path), "--resume")
    return UseCommand(words, "classifier.use_stop" if run.writer else "classifier.use_resume", not run.writer)


def progress_of(started: StartedCommand) -> list[int]:
    """How many of how many steps of training are done; empty where that is not known."""
    found = [match for line in started.lines() for match in PROGRESS.finditer(line)]
    return [int(text.replace(",", "")) for text in found[-1].groups()] if found else []


# Frames


def queue_of(opened: OpenedData, started: StartedCommand, cameras: Sequence[str]) -> dict[str, object]:
    """The frames that a score found, with what the page needs to show and label each."""
    assert started.answer is not None
    found = json.loads(started.answer.read_bytes())
    sources = {str(source.path.resolve()): source for source in sources_of(opened)}
    for one in sources.values():
        one.refresh()
    frames, labeled = [], found["labeled"]
    for frame in found["frames"]:
        source = sources.get(str(Path(frame["log"]).resolve()))
        if source is None:
            continue
        given = frame_labels(source.log.facts.about(frame["trajectory"]))
        if frame["step"] in given:  # since then
            labeled[FRAME_LABELS[given[frame["step"]]].partition(" ")[0]] += 1
        else:
            shown = frame["step"] - frame["first"] + 1  # what the step led to
            place = {"source": source.key, "number": frame["trajectory"], "step": frame["step"], "shown": shown}
            frames.append({**place, **{name: frame[name] for name in ("probability", "label", "log")}})
    seen = {source.key: looked_at(source, cameras) for source in sources.values()}
    return {
        "frames": frames,
        "cameras": seen,
        **{name: found[name] for name in ("labeled", "episodes", "steps", "wide")},
    }


def looked_at(source: EpisodeSource, cameras: Sequence[str]) -> list[str]:
    """The images of a log that a classifier looks at, by the names of its cameras; without those, all that are
    observed."""
    every = [name for name in source.cameras(0) if name.startswith("observations/")]
    named = [name for name in every if any(f"/{name}".endswith(f"/{camera}") for camera in cameras)]
    return named or every


def cameras_of(classifier: KnownClassifier) -> list[str]:
    """The cameras that a classifier looks at."""
    return list(read_json(classifier.path / CLASSIFIER_FILE)["image_keys"])


def report_of(classifier: KnownClassifier, shelf: EpisodeShelf) -> dict[str, Any]:
    """What is known of a classifier: counts, precision and recall at each threshold, and its worst mistakes."""
    metadata = read_json(classifier.path / CLASSIFIER_FILE)
    held = metadata["held_out"]
    out = {
        "name": classifier.name,
        "path": str(classifier.path),
        "made": when((classifier.path / CLASSIFIER_FILE).stat().st_mtime),
        "threshold": metadata["threshold"],
        "cameras": list(metadata["image_keys"]),
        **{name: held[name] for name in ("frames", "episodes", "initial_states", "by", "accuracy", "majority")},
        "trained": metadata["training"]["frames"],
        "curve": [],
        "worst": [],
    }
    frames = read_held_out(classifier.path)
    if frames is not None:
        out["curve"] = frames.curve([*(point[0] for point in held["curve"]), metadata["threshold"]])
        places = log_places(shelf)
        out["worst"] = [_worst(frame, places, shelf, out["cameras"]) for frame in frames.worst(MAX_WORST)]
    return out


def log_places(shelf: EpisodeShelf) -> dict[str, tuple[str, str]]:
    """Logs that the app shows, each with the keys of its data and its source."""
    found: dict[str, tuple[str, str]] = {}
    for data in shelf.listed():
        for path in log_paths(data):
            found.setdefault(str(path.resolve()), (data.key, source_key(path)))
    return found


def _worst(
    frame: HeldOutFrame, places: dict[str, tuple[str, str]], shelf: EpisodeShelf, cameras: Sequence[str]
) -> dict[str, Any]:
    """A mistake with its picture and a link to its frame, where the app shows its log."""
    out: dict[str, Any] = {**asdict(frame), "href": "", "picture": ""}
    place = places.get(str(Path(frame.log).resolve())) if frame.log else None
    if place is None:
        return out
    data, key = place
    opened = shelf.opened(data)
    opened.index.wait_until_opened(10.0)
    try:
        source = opened.index.source(key)
    except HiltError:  # it cannot be opened
        return out
    shown = frame.step - source.first_step(frame.trajectory) + 1  # what the step led to
    if shown < 1 or source.place(frame.trajectory) < 0:
        return out
    named = {"data": data, "source": key, "number": frame.trajectory, "step": shown}
    out["href"] = "/episode?" + urlencode(named)
    camera = next(iter(looked_at(source, cameras)), "")
    out["picture"] = "/episodes/frame?" + urlencode({**named, "camera": camera, "height": THUMB})
    return out
