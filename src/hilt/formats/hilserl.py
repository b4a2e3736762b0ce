"""HIL-SERL's pickles: demonstrations, the two buffers of a run, and the pictures of a reward classifier.

    demo_data/{experiment}_{n}_demos_{time}.pkl                  whole episodes, one after the other
    classifier_data/{experiment}_..._{success|failure}_images_{time}.pkl
    buffer/transitions_{step}.pkl                                every step of the actor; a file begins and ends
                                                                 anywhere
    demo_buffer/transitions_{step}.pkl                           those of them on which a person acted, once more

Each is a list of transitions, read without executing code. The end of an episode is only marked by
``dones``, which a time limit does not set; so an episode goes on, also into the next file, as long
as a step sees what the step before it ended with.

In ``hilt.json`` beside them, which HIL-SERL does not look at, our writer keeps what has no place in a transition.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from hilt.core.errors import ConfigError, CorruptError, FormatError, SchemaError
from hilt.core.files import DISK, read, replacing, storage_errors
from hilt.core.trajectory import Source, ends_from_done_and_mask
from hilt.core.tree import Array, JsonObject, Spec, equal, flatten, unflatten
from hilt.core.unpickle import dump, safe_load
from hilt.formats.episodes import Episode, ListedDataset, Notes, cut, gaps, natural, plain
from hilt.formats.units import FolderWriter
from hilt.replay.schema import mate

Row = dict[str, Any]  # a transition's leaves by path
FOLDERS = ("demo_data", "classifier_data", "buffer", "demo_buffer", ".")
NEEDED = ("observations", "actions", "next_observations", "rewards", "dones")
ENDS = ("dones", "masks", "terminated", "truncated")
ACTED = "infos/intervene_action"
NO_COLUMNS = (*ENDS, ACTED, "infos/grasp_penalty", "infos/succeed")  # carried over in another way
SOURCES = {"online": Source.POLICY, "human": Source.HUMAN}  # all other files are a person's demonstrations
KINDS = ("demo", "online", "success", "failure")
"""Of files that are written one by one; those of interventions come with ``online``"""
TYPES = {"rewards": np.float32, "grasp_penalty": np.float32, "source": np.uint8, "policy_version": np.int64}


def matches(path: Path) -> bool:
    if path.is_file():
        return path.suffix == ".pkl" and not path.name.startswith("trajectory_")  # those are RLinf's
    return not (path / "trajectory_index.json").exists() and bool(_files(path))


def open_dataset(path: Path) -> HilSerlDataset:
    """One file, a folder of them, or the folder above ``demo_data``, ``buffer`` and
    so on, such as a run's checkpoint folder."""
    return HilSerlDataset(path)


@dataclass
class _Found:
    """An episode: where its steps are, and what is known of it."""

    pieces: dict[int, tuple[int, int]]
    """By file: its first step there, and its end"""
    facts: dict[str, Any]
    whole: bool = True
    """Whether it has no gaps"""


@dataclass
class _Plan:
    """What there is to read: episodes, and the errors of files that cannot be read."""

    columns: Spec
    episodes: list[_Found | CorruptError] = field(default_factory=list)
    people: dict[int, set[int]] = field(default_factory=dict)
    """By file: the steps on which a person acted"""
    exact: bool = False
    """Whether all columns are as we wrote them"""


class HilSerlDataset(ListedDataset):
    """Interventions are found again among the actor's steps and mark these as a
    person's; the rest are episodes of their own."""

    format = "hil-serl"

    def __init__(self, path: Path):
        super().__init__(path)
        self._paths = _files(path)
        if not self._paths:
            raise FormatError(f"{path}: no .pkl file in it, nor in its {', '.join(FOLDERS[:-1])}. Check the path.")
        self._kinds = [_kind(path) for path in self._paths]
        self._loaded: dict[int, list[Row]] = {}
        self._lock = threading.Lock()

    @property
    def _episodes(self) -> list[_Found | CorruptError]:
        return self._plan.episodes

    def describe(self) -> JsonObject:
        return {f"files ({kind})": self._kinds.count(kind) for kind in dict.fromkeys(self._kinds)}

    def kind_of(self, episode: int) -> str:
        """Returns the files that an episode belongs to: ``online``, ``human`` (an intervention that is not
        among the actor's steps), ``demo``, ..."""
        found = self._episodes[episode]
        return "damaged" if isinstance(found, CorruptError) else self._kinds[min(found.pieces)]

    def _load(self, number: int) -> list[Row]:
        """The transitions of a file. The last two are kept: an episode may lie in
        two, and interventions beside the steps."""
        with self._lock:
            if number not in self._loaded:
                self._loaded = dict([*self._loaded.items()][-1:])
                self._loaded[number] = _read(self._paths[number])
            return self._loaded[number]

    @cached_property
    def _plan(self) -> _Plan:
        return self._as_written() or self._surveyed()

    def _as_written(self) -> _Plan | None:
        """Returns the episodes by `hilt.json`, if it is there."""
        path = self.path / "hilt.json"
        if not path.is_file():
            return None
        numbers = {
            p.relative_to(self.path).as_posix(): i for i, p in enumerate(self._paths) if self._kinds[i] != "human"
        }
        try:
            known = json.loads(read(path))
            if {entry[0] for entry in known["episodes"]} != set(numbers):
                self.notes.add("hilt.json names other files than there are: it was passed over")
                return None
            episodes: list[_Found | CorruptError] = []
            for name, first, stop, whole, facts in known["episodes"]:
                episodes.append(_Found({numbers[name]: (int(first), int(stop))}, plain(dict(facts)), bool(whole)))
            columns = Spec({path: (np.dtype(kind), tuple(shape)) for path, (kind, shape) in known["columns"].items()})
            if any(spec.dtype.kind not in "biufc" for spec in columns.values()) or not {
                "rewards",
                "source",
                *ENDS[2:],
            } <= set(columns):
                raise ValueError("columns that are no numbers, or none of rewards, ends and sources")
            return _Plan(columns, episodes, exact=True)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
            raise CorruptError(
                f"{path}: not as Hilt writes it ({error!r}). Remove it: the pickles are then read as HIL-SERL's."
            ) from None

    def _surveyed(self) -> _Plan:
        """Reads all files once: which columns every transition has, where episodes
        begin, and on which steps a person acted."""
        plan, last, count = _Plan(Spec({})), None, 0
        kinds: dict[str, Counter[Any]] = {}
        again: dict[int, set[int]] = {}  # by file of interventions: those that are among the actor's steps
        for number, kind in enumerate(self._kinds):
            last = last if kind == "online" == self._kinds[number - 1] else None
            try:
                rows = self._load(number)
            except CorruptError as error:
                plan.episodes.append(error)
                last = None
                continue
            plan.people[number] = self._people(number, rows, again)
            new = {i: row for i, row in enumerate(rows) if i not in again.get(number, ())}
            if kind == "human" and new:
                self.notes.add("an intervention not among the actor's steps: in an episode of its own", len(new))
            count += len(new)
            for path, value in (leaf for row in new.values() for leaf in row.items()):
                array = _numbers(value)
                kinds.setdefault(path, Counter())[
                    None if array is None else (array.dtype.newbyteorder("="), array.shape)
                ] += 1
            last = self._split(number, new, last, plan.episodes)
        if count:
            plan.columns = _columns_of(kinds, count, self.notes, self.path)
        return plan

    def _split(
        self, number: int, rows: dict[int, Row], last: Row | None, episodes: list[_Found | CorruptError]
    ) -> Row | None:
        """Adds a file's steps to the last episode while it goes on, and then to new ones. `last`
        is its last step, if it has not ended."""
        kind, episode = self._kinds[number], episodes[-1] if last is not None else None
        labeled = kind in ("success", "failure")
        for i, row in rows.items():
            if ACTED in row and not np.array_equal(row[ACTED], row.get("actions", ())):
                self.notes.add(f"{ACTED}: another action than the one stored, not carried over")
            if i and i - 1 not in rows:
                last = None
            if last is None or not _goes_on(last, row):
                if last is not None and kind == "online":
                    self.notes.add(
                        "an episode without dones at its end (a time limit): it ends where observations do not go on"
                    )
                episode = _Found({}, {"success": kind == "success"} if labeled else {})
                episodes.append(episode)
            assert isinstance(episode, _Found)
            first, _ = episode.pieces.get(number, (i, i))
            episode.pieces[number] = first, i + 1
            ended = any(_ends(row, f"{self._paths[number]}, transition {i}"))
            if not ended and not np.any(row.get("masks", True)):
                self.notes.add("masks: 0 on a step that is not done, not carried over")
            if ended and not labeled and "infos/succeed" in row:
                episode.facts["success"] = bool(_array(row["infos/succeed"]).any())
            last = None if ended else row
        return last

    def _people(self, number: int, rows: list[Row], again: dict[int, set[int]]) -> set[int]:
        """The steps of the actor on which a person acted; `again` learns where they are stored once more."""
        if self._kinds[number] != "online":
            return set()
        found = {i for i, row in enumerate(rows) if ACTED in row}
        for twin, path in enumerate(self._paths):
            if self._kinds[twin] == "human" and path.name == self._paths[number].name:
                try:
                    copies = self._load(twin)
                except CorruptError:  # reported when its own turn comes
                    continue
                places: dict[bytes, list[int]] = {}  # of steps that have all but their pictures in common
                for i, row in enumerate(rows):
                    places.setdefault(_small(row), []).append(i)
                for i, row in enumerate(copies):
                    near = places.get(_small(row), [])
                    same = next((place for place in near if _same(rows[place], row)), None)
                    if same is not None:
                        near.remove(same)
                        found.add(same)
                        again.setdefault(twin, set()).add(i)
        return found

    def _read(self, found: _Found, images: bool) -> Episode:
        rows: list[Row] = []
        sources: list[int] = []
        try:
            for number, (first, stop) in found.pieces.items():
                rows += (part := self._load(number)[first:stop])
                if not part or len(part) != stop - first:
                    raise ValueError(f"{len(part)} transitions for {stop - first} steps")
                people, other = self._plan.people.get(number, set()), SOURCES.get(self._kinds[number], Source.DEMO)
                sources += [Source.HUMAN if i in people else other for i in range(first, stop)]
            columns = _stacked(rows, self._plan.columns, found.whole, images)
        except (FormatError, CorruptError):
            raise
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            names = ", ".join(str(self._paths[number]) for number in found.pieces)
            raise CorruptError(
                f"{names}: not the transitions that hilt.json or the other files tell of ({error!r})."
            ) from None
        if not self._plan.exact:
            columns["terminated"], columns["truncated"] = np.array([_ends(row, "") for row in rows], bool).T.copy()
            columns.setdefault("source", np.array(sources, np.uint8))
        return Episode(unflatten(columns), dict(found.facts))


def _columns_of(kinds: dict[str, Counter[Any]], count: int, notes: Notes, where: Path) -> Spec:
    """The columns that all transitions have; what is left out is noted. `kinds`: how often
    a leaf has which type and shape (or None)."""
    left_out: dict[str, str] = {}
    for path, found in kinds.items():
        if None in found or (
            path in ("source", "policy_version") and any(dtype.kind not in "iu" for dtype, _ in found)
        ):
            left_out[path] = "no numbers"
        elif found.total() < count:
            left_out[path] = f"in {found.total()} of {count} transitions only"
        elif len({shape for _, shape in found}) > 1:
            left_out[path] = "not of one shape"
    kept = [path for path in kinds if path not in left_out]
    # observations and what follows them
    pairs = {other: path for path in kinds for other in (path, mate(path)) if mate(path)}
    for path in kept:
        if (pair := pairs.get(path)) and (pair not in kept or mate(pair) not in kept):
            left_out[path] = "no pair of observation and next observation"
    for path in (path for path in left_out if path not in NO_COLUMNS):
        notes.add(f"{path}: {left_out[path]}, not carried over")
    kept = [path for path in kept if path not in left_out and path not in NO_COLUMNS]
    for name in NEEDED[:-1]:
        if not any(path == name or path.startswith(f"{name}/") for path in kept):
            raise SchemaError(f"{where}: not all transitions have {name} of one shape. Convert its files one by one.")
    specs = {path: (np.result_type(*(dtype for dtype, _ in kinds[path])), next(iter(kinds[path]))[1]) for path in kept}
    return Spec({path: (TYPES[path], ()) if path in TYPES else spec for path, spec in specs.items()})


def create(path: Path, *, exp_name: str = "hilt", buffer_period: int = 1000) -> HilSerlWriter:
    """`exp_name` begins the names of demonstrations; a file is written when there are at
    least `buffer_period` transitions for it."""
    if buffer_period < 1 or not re.fullmatch(r"[\w.-]+", exp_name):
        raise ConfigError(
            f"buffer_period={buffer_period}, exp_name={exp_name!r}: expected at least 1, and "
            "letters, digits, '.', '_', '-'."
        )
    return HilSerlWriter(path, exp_name, buffer_period)


class HilSerlWriter(FolderWriter):
    """Episodes whose steps are all demonstrations, or that were recorded as such, go to ``demo_data``; frames recorded
    with labels to ``classifier_data``, episodes cut where the label changes; all others to ``buffer``, with their human
    steps in ``demo_buffer`` too. A file holds whole episodes; every column of the log is a key of the transition."""

    def __init__(self, path: Path, exp_name: str, buffer_period: int):
        super().__init__(path)
        self._name, self._period = exp_name, buffer_period
        self._state: dict[str, Any] = {"began": int(time.time()), "files": 0, "steps": 0, "columns": {}}
        self._episodes: list[list[Any]] = []
        for line in self._lines:
            self._state = line["state"]
            self._episodes += line["episodes"]
        self._waiting: dict[str, list[Row]] = {kind: [] for kind in KINDS}
        self._entries: list[list[Any]] = []
        if not self.next and not self._complete:  # nothing is known of what a stopped writer left
            for folder in FOLDERS[:-1]:
                DISK.remove(path / folder)
            self._commit(state=self._state, episodes=[])

    def _add(self, number: int, episode: Episode) -> None:
        columns, whole = flatten(episode.columns), not len(gaps(episode))
        layout = {path: [column.dtype.str, list(column.shape[1:])] for path, column in columns.items()}
        if self._state["columns"] and layout != self._state["columns"]:
            known = self._state["columns"]
            differs = ", ".join(sorted(p for p in {**known, **layout} if known.get(p) != layout.get(p)))
            raise SchemaError(
                f"{differs}: not as in the episodes before, and all transitions of a buffer have the same columns."
            )
        self._state["columns"], self.next = layout, number + 1
        recorded = episode.facts.get("recorded_as")  # set by `hilt record`
        if recorded == "labeled frames" and "labels" in columns and columns["labels"].ndim == 1:
            for part in cut(episode, (np.flatnonzero(np.diff(columns["labels"])) + 1).tolist()):
                good = bool(part.columns["labels"][0])
                self._put(
                    "success" if good else "failure", Episode(part.columns, {**part.facts, "success": good}), whole
                )
        elif recorded == "demonstrations" or (columns["source"] == Source.DEMO).all():
            self._put("demo", episode, whole)
        else:
            self._put("online", episode, whole)
        if max(map(len, self._waiting.values())) >= self._period:
            self._end_unit()

    def _put(self, kind: str, episode: Episode, whole: bool) -> None:
        rows = self._waiting[kind]
        self._entries.append([kind, len(rows), len(rows) + len(episode), whole, plain(episode.facts)])
        rows += _transitions(flatten(episode.columns), whole, episode.facts.get("success") if kind == "demo" else None)

    def _finish(self) -> None:
        self._end_unit()
        self._mark_complete(columns=self._state["columns"], episodes=self._episodes)

    def _end_unit(self) -> None:
        """Writes the buffered steps, and then the line that records them."""
        online, marked = self._waiting["online"], len(self._waiting["success"])
        moment = time.strftime("%Y-%m-%d_%H-%M-%S", time.gmtime(self._state["began"] + self._state["files"]))
        count = sum(entry[0] == "demo" for entry in self._entries)
        self._state["files"] += 1
        self._state["steps"] += len(online)
        file = f"transitions_{self._state['steps']}.pkl"
        names = {
            "demo": f"demo_data/{self._name}_{count}_demos_{moment}.pkl",
            "online": f"buffer/{file}",
            "success": f"classifier_data/{self._name}_{marked}_success_images_{moment}.pkl",
            "failure": f"classifier_data/{self._name}_failure_images_{moment}.pkl",
        }
        for kind, rows in self._waiting.items():
            if rows:
                self._write(names[kind], rows)
        if online:
            self._write(f"demo_buffer/{file}", [row for row in online if row["source"] == Source.HUMAN])
        written = [[names[kind], *rest] for kind, *rest in self._entries]
        self._commit(state=self._state, episodes=written)
        self._episodes += written
        self._waiting, self._entries = {kind: [] for kind in KINDS}, []

    def _write(self, name: str, rows: list[Row]) -> None:
        path = self._path / name
        DISK.make_folders(path.parent)
        with replacing(path, sole_writer=True) as place, place.open("wb") as file:
            dump(rows, file)


def write_buffers(run: Path, step: int, episodes: Sequence[Mapping[str, Array]]) -> None:
    """The two files that HIL-SERL's actor writes every `buffer_period` steps: all steps of these episodes, given as
    columns by path, and those of them on which a person acted."""
    rows = [row for columns in episodes for row in _transitions(dict(columns), False, None)]
    for name, chosen in (("buffer", rows), ("demo_buffer", [row for row in rows if row["source"] == Source.HUMAN])):
        path = run / name / f"transitions_{step}.pkl"
        DISK.make_folders(path.parent)
        with replacing(path, sole_writer=True) as place, place.open("wb") as file:
            dump(chosen, file)


def _files(path: Path) -> list[Path]:
    """The pickles of a dataset, each kind in the order of the numbers in their names."""
    if path.is_file():
        return [path]
    return [file for folder in FOLDERS for file in sorted((path / folder).glob("*.pkl"), key=natural)]


def _kind(path: Path) -> str:
    if label := re.search(r"_(success|failure)_images_", path.name):
        return label[1]
    if re.fullmatch(r"transitions_\d+\.pkl", path.name):
        return "human" if path.parent.name == "demo_buffer" else "online"
    return "demo"


def _read(path: Path) -> list[Row]:
    with storage_errors(path), path.open("rb") as file:
        steps = safe_load(file, where=str(path))
    if not isinstance(steps, list):
        raise FormatError(f"{path}: expected a list of transitions, as HIL-SERL writes, got a {type(steps).__name__}.")
    rows = []
    for i, step in enumerate(steps):
        if not isinstance(step, Mapping) or any(name not in step for name in NEEDED):
            raise FormatError(
                f"{path}, transition {i}: expected a dictionary with {', '.join(NEEDED)}, as HIL-SERL writes."
            )
        rows.append(dict(_leaves(step)))
        if "infos/grasp_penalty" in rows[-1]:  # as HIL-SERL's learner does
            rows[-1].setdefault("grasp_penalty", rows[-1]["infos/grasp_penalty"])
    return rows


def _leaves(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Returns the leaves by path; what a column cannot be named by is None, which is no number."""
    for key, value in tree.items():
        if not isinstance(key, str) or not key or "/" in key:
            yield f"{prefix}{key!r}", None
        elif isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


def _ends(row: Row, where: str) -> tuple[bool, bool]:
    """(terminated, truncated) of a transition."""
    try:
        done = bool(np.asarray(row["dones"], float).any())
        mask = float(np.asarray(row.get("masks", 1.0 - done), float).min())
        derived = ends_from_done_and_mask(done, mask)
        return bool(row.get("terminated", derived[0])), bool(row.get("truncated", derived[1]))
    except (KeyError, TypeError, ValueError):
        raise FormatError(
            f"{where}: dones, masks, terminated and truncated are numbers, or absent but for dones."
        ) from None


def _goes_on(last: Row, row: Row) -> bool:
    """Whether a step begins with what the last one ended with, bit by bit."""
    paths = [path for path in row if mate(path)]
    return all(mate(path) in last and equal(_array(last[mate(path)]), _array(row[path])) for path in paths)


def _small(row: Row) -> bytes:
    arrays = [_array(value) for path, value in row.items() if not path.startswith("infos/")]
    return b"".join(array.tobytes() for array in arrays if array.nbytes <= 4096)


def _same(a: Row, b: Row) -> bool:
    paths = {path for path in {**a, **b} if not path.startswith("infos/")}
    return all(path in a and path in b and equal(_array(a[path]), _array(b[path])) for path in paths)


def _array(value: Any) -> Array:
    """Anything that can be compared bit by bit."""
    found = _numbers(value)
    return np.frombuffer(repr(value).encode(), np.uint8) if found is None else found


def _numbers(value: Any) -> Array | None:
    with contextlib.suppress(ValueError):  # ragged
        array = np.asarray(value)
        if array.dtype.kind in "biufc":
            return array
    return None


def _stacked(rows: list[Row], columns: Spec, whole: bool, images: bool) -> dict[str, Array]:
    """Columns ``[T, ...]`` of rows; each observation is there once when there are no gaps."""
    out: dict[str, Array] = {}
    for path in sorted(columns, key=lambda path: not mate(path)):
        spec, after = columns[path], mate(path)
        if path in out or (not images and spec.dtype == np.uint8 and len(spec.shape) > 2):
            continue
        shared = whole and after in columns
        name = f"hilt/{path}" if f"hilt/{path}" in rows[0] else path  # what is something else in a transition
        values = [row[name] for row in rows] + ([rows[-1][after]] if shared else [])
        column = np.stack([np.asarray(value, spec.dtype).reshape(spec.shape) for value in values])
        out[path] = column[:-1] if shared else column
        if shared:
            out[after] = column[1:]
    return out


def _transitions(columns: dict[str, Array], whole: bool, success: bool | None) -> list[Row]:
    """What HIL-SERL stores of each step. An observation that ends a step and begins
    the next is one object, and pickled once."""
    columns = {
        f"hilt/{path}" if path in ("dones", "masks") and column.ndim > 1 else path: column
        for path, column in columns.items()
    }
    columns.setdefault("dones", columns["terminated"] | columns["truncated"])
    columns.setdefault("masks", (~columns["terminated"]).astype(np.float32))
    values = {path: list(column) for path, column in columns.items()}
    for path in [path for path in values if whole and mate(path) in values]:
        values[mate(path)] = [*values[path][1:], values[mate(path)][-1]]
    steps = [unflatten({path: rows[i] for path, rows in values.items()}) for i in range(len(columns["dones"]))]
    if success is not None and not any(path.startswith("infos") for path in columns):
        for i, step in enumerate(steps):
            step["infos"] = {"succeed": bool(success) and i == len(steps) - 1}
    return steps
