"""HIL-SERL's pickles, read and written. The transitions are those from which the
golden numbers of its buffers were made."""

from __future__ import annotations

import copy
import io
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hilt.core.errors import ConfigError, CorruptError, FormatError, SchemaError, UnsafeError
from hilt.core.tree import flatten, unflatten
from hilt.formats import Dataset, Writer, create, hilserl
from hilt.formats import open_dataset as open_any
from hilt.formats.convert import convert
from hilt.formats.episodes import Episode
from tests.effort import rounds
from tests.formats.toy_episodes import assert_all_same, made, write, write_killed, write_stopped_at_every_call

GOLDEN = Path(__file__).parent.parent / "golden" / "hilserl" / "buffers_n1.npz"
LENGTHS = [4, 1, 6, 3, 5]  # the last one is still running


def open_dataset(path: Path) -> Dataset:
    return open_any(path, format="hil-serl")


def golden() -> list[dict[str, Any]]:
    with np.load(GOLDEN) as file:
        columns = {key[3:]: file[key] for key in file if key.startswith("in/")}
    steps = [unflatten({path: values[i] for path, values in columns.items()}) for i in range(19)]
    return [
        {**step, "rewards": float(step["rewards"]), "masks": float(step["masks"]), "dones": bool(step["dones"])}
        for step in steps
    ]


def save(path: Path, steps: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        pickle.dump(steps, file)
    return path


def assert_steps(episodes: list[Episode], steps: list[dict[str, Any]]) -> None:
    """The transitions of all episodes are these, in this order."""
    at = 0
    for episode in episodes:
        for i in range(len(episode)):
            row = {path: column[i] for path, column in flatten(episode.columns).items()}
            wanted = flatten(steps[at])
            for path in wanted:
                if path not in ("dones", "masks"):
                    assert np.array_equal(row[path], wanted[path]), path
            assert row["terminated"] == (wanted["dones"] and wanted["masks"] == 0)
            assert row["truncated"] == (wanted["dones"] and wanted["masks"] == 1)
            at += 1
    assert at == len(steps)


def test_demonstrations_are_cut_where_they_are_done(tmp_path: Path) -> None:
    path = save(tmp_path / "demo_data" / "pick_5_demos_2025-01-01_00-00-00.pkl", golden())
    for place in (path, path.parent, tmp_path):
        assert hilserl.matches(place)
        dataset = open_dataset(place)
        episodes = list(dataset)
        assert [len(e) for e in episodes] == LENGTHS and len(dataset) == 5
        assert_steps(episodes, golden())
        assert all((e.columns["source"] == 2).all() for e in episodes)
        assert [bool(e.columns["terminated"][-1]) for e in episodes] == [True] * 4 + [False]
        assert episodes[0].columns["observations"]["front"].shape == (4, 1, 8, 8, 3)
        assert episodes[0].columns["rewards"].dtype == np.float32
        assert not dataset.notes.counts


@pytest.mark.parametrize("cuts", [[19], [5, 9, 19], [1, 2, 3, 4, 5, 19], [10, 19]])
def test_an_episode_goes_on_in_the_next_file(cuts: list[int], tmp_path: Path) -> None:
    steps, first = golden(), 0
    for number, cut in enumerate(cuts):
        # 900, 1800: not in the order of text
        save(tmp_path / "buffer" / f"transitions_{(number + 1) * 900}.pkl", steps[first:cut])
        first = cut
    episodes = list(open_dataset(tmp_path))
    assert [len(e) for e in episodes] == LENGTHS
    assert_steps(episodes, steps)
    assert all((e.columns["source"] == 0).all() for e in episodes)


def test_a_time_limit_without_dones_ends_an_episode_where_the_observations_break_off(tmp_path: Path) -> None:
    steps = [{**step, "dones": False, "masks": 1.0} for step in golden()]
    dataset = open_dataset(save(tmp_path / "buffer" / "transitions_19.pkl", steps))
    assert [len(e) for e in dataset] == LENGTHS
    assert not any(flags.any() for e in dataset for flags in (e.columns["terminated"], e.columns["truncated"]))
    assert dataset.notes.counts == {
        "an episode without dones at its end (a time limit): it ends where observations do not go on": 4
    }
    steps[3] |= {"dones": True}
    first = next(iter(open_dataset(save(tmp_path / "buffer" / "transitions_19.pkl", steps))))
    assert first.columns["truncated"].tolist() == [False] * 3 + [True] and not first.columns["terminated"].any()


def test_interventions_mark_the_steps_of_the_actor(tmp_path: Path) -> None:
    steps, people = golden(), [2, 3, 7, 12, 18]
    for number, (first, stop) in enumerate([(0, 9), (9, 19)]):
        save(tmp_path / "buffer" / f"transitions_{number + 1}.pkl", steps[first:stop])
        save(
            tmp_path / "demo_buffer" / f"transitions_{number + 1}.pkl",
            copy.deepcopy([steps[i] for i in people if first <= i < stop]),
        )
    dataset = open_dataset(tmp_path)
    episodes = list(dataset)
    assert_steps(episodes, steps)
    assert np.flatnonzero(np.concatenate([e.columns["source"] for e in episodes])).tolist() == people
    assert not dataset.notes.counts
    assert dataset.describe() == {"files (online)": 2, "files (human)": 2}


def test_interventions_that_are_nowhere_else_are_episodes_of_their_own(tmp_path: Path) -> None:
    steps = golden()
    changed = copy.deepcopy(steps[7])
    changed["actions"] += 1
    save(tmp_path / "buffer" / "transitions_9.pkl", steps[:9])
    save(tmp_path / "demo_buffer" / "transitions_9.pkl", [steps[6], changed, steps[8]])
    save(tmp_path / "demo_buffer" / "transitions_19.pkl", [steps[9], steps[10], steps[15]])  # of a file that was lost
    dataset = open_dataset(tmp_path)
    episodes = list(dataset)
    assert [(len(e), e.columns["source"].tolist()) for e in episodes] == [
        (4, [0] * 4), (1, [0]), (4, [0, 1, 0, 1]), (1, [1]), (2, [1, 1]), (1, [1]),
    ]  # fmt: skip
    assert np.array_equal(episodes[3].columns["actions"][0], changed["actions"])
    assert dataset.notes.counts == {"an intervention not among the actor's steps: in an episode of its own": 4}


def test_infos(tmp_path: Path) -> None:
    steps = golden()
    for i, step in enumerate(steps):
        step["infos"] = {
            "grasp_penalty": -0.02 * i,
            "succeed": i in (3, 10),
            "left": False,
            "pose": {"x": np.full(2, i)},
            "note": "text",
        }
        step["infos"] |= {"intervene_action": step["actions"].copy()} if i % 2 else {}
        step["infos"] |= {"episode": {"r": np.ones(1)}} if step["dones"] else {}
    dataset = open_dataset(save(tmp_path / "a_2_demos_now.pkl", steps))
    episodes = list(dataset)
    assert episodes[0].columns["grasp_penalty"].dtype == np.float32
    assert np.allclose(episodes[0].columns["grasp_penalty"], [0, -0.02, -0.04, -0.06])
    assert episodes[0].columns["infos"]["pose"]["x"].tolist() == [[0, 0], [1, 1], [2, 2], [3, 3]]
    assert sorted(episodes[0].columns["infos"]) == ["left", "pose"]
    assert [e.facts for e in episodes] == [{"success": s} for s in (True, False, True, False)] + [{}]
    assert all((e.columns["source"] == 2).all() for e in episodes), "in a demonstration a person acts throughout"
    assert dataset.notes.counts == {
        "infos/note: no numbers, not carried over": 1,
        "infos/episode/r: in 4 of 19 transitions only, not carried over": 1,
    }
    online = list(open_dataset(save(tmp_path / "buffer" / "transitions_19.pkl", steps)))
    assert np.concatenate([e.columns["source"] for e in online]).tolist() == [i % 2 for i in range(19)]
    steps[1]["infos"]["intervene_action"] = steps[1]["actions"] + 1
    dataset = open_dataset(save(tmp_path / "b.pkl", steps))
    assert len(dataset) == 5
    assert dataset.notes.counts["infos/intervene_action: another action than the one stored, not carried over"] == 1


def test_pictures_for_a_classifier_say_what_they_show(tmp_path: Path) -> None:
    steps = golden()
    save(tmp_path / "classifier_data" / "pick_3_success_images_now.pkl", [steps[i] for i in (3, 4, 10)])
    save(tmp_path / "classifier_data" / "pick_failure_images_now.pkl", [steps[i] for i in (0, 1, 5, 6, 7)])
    episodes = [(len(e), e.facts) for e in open_dataset(tmp_path)]
    assert episodes == [(1, {"success": True})] * 3 + [(2, {"success": False}), (3, {"success": False})]


def test_each_file_of_demonstrations_stands_for_itself(tmp_path: Path) -> None:
    save(tmp_path / "demo_data" / "a_1_demos_1.pkl", golden()[:2])
    save(tmp_path / "demo_data" / "a_1_demos_2.pkl", golden()[2:4])
    save(tmp_path / "buffer" / "transitions_4.pkl", golden()[2:4])
    dataset = open_dataset(tmp_path)
    assert [(len(e), int(e.columns["source"][0])) for e in dataset] == [(2, 2), (2, 2), (2, 0)]
    assert not dataset.notes.counts


def test_bytes_of_another_machine_and_flags_of_any_shape(tmp_path: Path) -> None:
    steps = golden()
    for step in steps:
        step["actions"] = step["actions"].astype(">f4")
        step |= {
            "rewards": np.array([step["rewards"]]),
            "dones": np.array([step["dones"]]),
            "masks": np.array([step["masks"]] * 2),
        }
        step["infos"] = {"succeed": [[1], [2, 3]]}
    episodes = list(open_dataset(save(tmp_path / "a.pkl", steps)))
    assert [len(e) for e in episodes] == LENGTHS
    assert episodes[0].columns["actions"].dtype == np.dtype("=f4") and episodes[0].columns["rewards"].shape == (4,)
    assert np.array_equal(episodes[1].columns["actions"], [golden()[4]["actions"]])


def test_what_not_all_transitions_have_is_named(tmp_path: Path) -> None:
    steps = golden()
    for i, step in enumerate(steps):
        step["observations"]["depth"] = np.zeros((2 + i % 2, 2), np.float32)
        step["next_observations"]["depth"] = np.zeros((2, 2), np.float32)
        step["infos"] = {"a/b": 1, 3: 4, "": 2, "list": [[1], [2, 3]], "odd": None}
    dataset = open_dataset(save(tmp_path / "a.pkl", steps))
    assert_steps(list(dataset), golden())
    assert set(dataset.notes.counts) == {
        "observations/depth: not of one shape, not carried over",
        "next_observations/depth: no pair of observation and next observation, not carried over",
        *(f"infos/{name}: no numbers, not carried over" for name in ("'a/b'", "3", "''", "list", "odd")),
    }
    steps[2]["actions"] = np.zeros(5)
    with pytest.raises(SchemaError, match="not all transitions have actions of one shape"):
        len(open_dataset(save(tmp_path / "a.pkl", steps)))


def test_without_images(tmp_path: Path) -> None:
    dataset = open_dataset(save(tmp_path / "a.pkl", golden()))
    episode = next(dataset.jobs(first=2, images=False))()
    assert episode is not None and len(episode) == 6
    assert list(episode.columns["observations"]) == ["state"] == list(episode.columns["next_observations"])


# What cannot be read


class Gadget:
    def __init__(self, how: Any):
        self._how = how

    def __reduce__(self) -> Any:
        return self._how


GADGETS = [
    (exec, ("import pathlib; pathlib.Path({!r}).touch()",)),
    (eval, ("__import__('pathlib').Path({!r}).touch()",)),
    (__import__("os").system, ("touch {!r}",)),
    (__import__("subprocess").check_output, (["touch", "{}"],)),
    (__import__("shutil").copyfile, ("/etc/hostname", "{}")),
    (open, ("{}", "w")),
]
PLACES = [
    "demo_data/a_1_demos_now.pkl",
    "buffer/transitions_1000.pkl",
    "demo_buffer/transitions_1000.pkl",
    "classifier_data/a_5_success_images_now.pkl",
    "classifier_data/a_failure_images_now.pkl",
    "anything.pkl",
]


def filled(how: Any, target: Path) -> Any:
    if isinstance(how, str):
        return how.format(str(target))
    return type(how)(filled(part, target) for part in how) if isinstance(how, (tuple, list)) else how


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("gadget", range(len(GADGETS) + 3))
def test_a_pickle_that_would_run_code_is_refused_and_nothing_runs(gadget: int, place: str, tmp_path: Path) -> None:
    target, steps = tmp_path / "it-ran", golden()[:3]
    if gadget < len(GADGETS):
        steps[1]["infos"] = {"x": Gadget(filled(GADGETS[gadget], target))}
        data = pickle.dumps(steps)
        assert str(target).encode() in data
    else:  # the instructions that call without REDUCE: INST, OBJ, and NEWOBJ with a class
        command = f"touch {target}".encode()
        data = [
            b"\x80\x02]((S'" + command + b"'\nios\nsystem\na.",
            b"\x80\x02](cos\nsystem\nS'" + command + b"'\noa.",
            b"\x80\x02]csubprocess\nPopen\n(]X\x05\x00\x00\x00touchaX"
            + len(str(target)).to_bytes(4, "little")
            + str(target).encode()
            + b"at\x81a.",
        ][gadget - len(GADGETS)]
    path = tmp_path / "data" / place
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    for opened in (path, tmp_path / "data"):
        with pytest.raises(UnsafeError, match="refused and nothing was run"):
            list(open_dataset(opened))
    with pytest.raises(UnsafeError):
        convert(tmp_path / "data", tmp_path / "log", format="hil-serl", skip_corrupt=True)
    assert not target.exists()
    if gadget < len(GADGETS):
        with io.BytesIO(data) as file:
            pickle.load(file)
        assert target.exists(), "else this test shows nothing"


def test_a_damaged_file_costs_its_own_episodes(tmp_path: Path) -> None:
    steps = golden()
    for number, (first, stop) in enumerate([(0, 5), (5, 11), (11, 19)]):
        save(tmp_path / "buffer" / f"transitions_{number}.pkl", steps[first:stop])
    path = tmp_path / "buffer" / "transitions_1.pkl"
    path.write_bytes(path.read_bytes()[:-1000])
    dataset = open_dataset(tmp_path)
    lengths = []
    for job in dataset.jobs():
        try:
            lengths.append(len(job() or ()))
        except CorruptError as error:
            assert "transitions_1.pkl is not a whole pickle" in str(error)
            lengths.append(-1)
    assert lengths == [4, 1, -1, 3, 5] and len(dataset) == 5
    with pytest.raises(CorruptError, match="--skip-corrupt"):
        convert(tmp_path, tmp_path / "log", format="hil-serl")
    shutil.rmtree(tmp_path / ".log.converting")
    summary = convert(tmp_path, tmp_path / "log", format="hil-serl", skip_corrupt=True)
    assert (summary.episodes, summary.steps, summary.damaged) == (4, 13, 1)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ({"a": 1}, "a.pkl: expected a list of transitions, as HIL-SERL writes, got a dict"),
        ([{"observations": {}}], "a.pkl, transition 0: expected a dictionary with observations, actions"),
        ([1], "transition 0: expected a dictionary"),
        ([{**golden()[0], "dones": "yes"}], "transition 0: dones, masks"),
        ([{**golden()[0], "dones": {}}], "transition 0: dones, masks"),
        ([{**golden()[0], "masks": [[1], [2, 3]]}], "transition 0: dones, masks"),
        ([{**golden()[0], "observations": {}}], "not all transitions have"),
    ],
)
def test_files_of_another_kind(what: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises((FormatError, SchemaError), match=text):
        list(open_dataset(save(tmp_path / "a.pkl", what)))


def test_other_folders_are_not_taken_for_it(tmp_path: Path) -> None:
    rlinf = Path(__file__).parent.parent / "golden" / "rlinf" / "pkl"
    assert not hilserl.matches(rlinf) and not hilserl.matches(next(rlinf.glob("*.pkl")))
    (tmp_path / "buffer").mkdir()
    assert not hilserl.matches(tmp_path)
    with pytest.raises(FormatError, match=r"no \.pkl file in it, nor in its demo_data"):
        open_dataset(tmp_path)


# Writing


def mixed() -> list[Episode]:
    """Demonstrations, steps of the policy with a person's among them, an unfinished
    episode, one with a gap, one that ends twice."""
    episodes = [
        made(4, 0),
        made(5, 1, source=[0, 1, 1, 0, 0], ended="truncated"),
        made(1, 2, source=0),
        made(3, 3),
        made(6, 4, source=1, ended=""),
        made(2, 5, source=3),
        made(7, 6, source=[2, 2, 2, 2, 2, 2, 0]),
    ]
    episodes[5].columns["truncated"][-1] = True
    apart = episodes[6].columns["next_observations"]["state"].copy()
    apart[3] += 1
    episodes[6].columns["next_observations"]["state"] = apart
    episodes[3].facts = {}
    return episodes


@pytest.mark.parametrize("period", [1, 6, 1000])
def test_what_we_write_is_read_as_it_was(period: int, tmp_path: Path) -> None:
    write(create(tmp_path, "hil-serl", buffer_period=period, exp_name="pick"), mixed())
    assert_all_same(list(open_dataset(tmp_path)), mixed())
    assert hilserl.matches(tmp_path)
    names = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file())
    if period == 1000:
        assert names[:2] == ["buffer/transitions_21.pkl", "demo_buffer/transitions_21.pkl"]
        assert names[2].startswith("demo_data/pick_2_demos_") and names[3:] == ["hilt.json"]


@settings(max_examples=rounds(10, 100), deadline=None)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=8),
    sources=st.randoms(use_true_random=False),
    period=st.integers(1, 20),
    cut=st.booleans(),
)
def test_round_trips(
    lengths: list[int], sources: Any, period: int, cut: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("trip")
    episodes = [
        made(
            n,
            i,
            source=[sources.choice([0, 1, 2, 3]) for _ in range(n)],
            ended=sources.choice(["", "terminated", "truncated"]),
        )
        for i, n in enumerate(lengths)
    ]
    write(create(folder, "hil-serl", buffer_period=period), episodes)
    assert_all_same(list(open_dataset(folder)), episodes)


def test_further_columns_and_single_arrays_come_back(tmp_path: Path) -> None:
    more = {
        "times": {"sent": np.arange(4.0)},
        "masks": np.full(4, 0.5, np.float32),
        "infos": {"grasp_penalty": np.ones(4)},
    }
    more["phase"] = np.full((4, 2), 1j, np.complex64)
    episode = made(4, 1, **more)
    episode.columns["observations"] = np.arange(8.0).reshape(4, 2)
    episode.columns["next_observations"] = np.arange(8.0).reshape(4, 2) + 2
    episode.columns["rewards"] = episode.columns["rewards"].astype(np.float64)
    episode.columns["dones"] = np.ones((4, 2), bool)  # of RLinf's two chunks, say
    write(create(tmp_path, "hil-serl"), [episode])
    assert_all_same(list(open_dataset(tmp_path)), [episode])
    step = original_loop(list((tmp_path / "demo_data").glob("*.pkl")), hoist=True)[0]
    assert step["dones"].shape == () and step["masks"] == 0.5 and step["grasp_penalty"] == 1


def original_loop(paths: list[Path], hoist: bool) -> list[dict[str, Any]]:
    """As train_rlpd.py reads files: every one whole, with pickle, and inserts what is in it."""
    inserted = []
    for path in paths:
        with path.open("rb") as file:
            for transition in pickle.load(file):
                if hoist and "infos" in transition and "grasp_penalty" in transition["infos"]:
                    transition["grasp_penalty"] = transition["infos"]["grasp_penalty"]
                inserted.append(transition)
    return inserted


def test_the_original_loading_loop_reads_what_we_write(tmp_path: Path) -> None:
    episodes = mixed()
    write(create(tmp_path, "hil-serl", buffer_period=5), episodes)
    demos = original_loop(sorted((tmp_path / "demo_data").glob("*.pkl")), hoist=True)
    online = original_loop(
        sorted((tmp_path / "buffer").glob("*.pkl"), key=lambda p: int(p.stem.split("_")[1])), hoist=False
    )
    people = original_loop(
        sorted((tmp_path / "demo_buffer").glob("*.pkl"), key=lambda p: int(p.stem.split("_")[1])), hoist=False
    )
    assert [d["infos"]["succeed"] for d in demos[:4]] == [False] * 4 and "infos" not in demos[4]
    wanted = [(e, i) for e in episodes if not (e.columns["source"] == 2).all() for i in range(len(e))]
    assert (len(demos), len(online), len(people)) == (7, len(wanted), 8)
    for got, (episode, i) in zip(online, wanted, strict=True):
        for path, value in flatten(
            {name: got[name] for name in ("observations", "next_observations", "actions", "rewards")}
        ).items():
            column = flatten(episode.columns)[path]
            assert value.dtype == column.dtype and np.array_equal(value, column[i])
        ended, stopped = bool(episode.columns["terminated"][i]), bool(episode.columns["truncated"][i])
        assert (
            got["dones"] == (ended or stopped)
            and got["masks"] == (0.0 if ended else 1.0)
            and got["masks"].dtype == np.float32
        )
    assert all(step["source"] == 1 for step in people)


def test_without_hilt_json_it_is_what_hil_serl_sees(tmp_path: Path) -> None:
    episodes = mixed()[:5]
    write(create(tmp_path, "hil-serl", buffer_period=5), episodes)
    (tmp_path / "hilt.json").unlink()
    got = list(open_dataset(tmp_path))
    assert [len(e) for e in got] == [4, 3, 5, 1, 6]  # demonstrations first
    assert got[2].columns["source"].tolist() == [0, 1, 1, 0, 0] and got[2].columns["truncated"][-1]
    assert got[0].facts == {"success": False} and got[2].facts == {}


def test_a_stopped_writer_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    episodes = mixed()

    def check(folder: Path) -> None:
        assert_all_same(list(open_dataset(folder)), episodes)
        assert not list(folder.rglob(".*")), "left over"

    def make(folder: Path) -> Writer:
        return create(folder, "hil-serl", buffer_period=8)

    with monkeypatch.context() as patch:
        assert write_stopped_at_every_call(make, episodes, check, tmp_path, patch) > 30
    write_killed(make, episodes, check, tmp_path, kills=rounds(4, 20))


def test_a_log_goes_there_and_back(tmp_path: Path) -> None:
    write(create(tmp_path / "log", "log"), mixed())
    there = convert(tmp_path / "log", tmp_path / "pickles", format="log", to="hil-serl", buffer_period=3)
    back = convert(tmp_path / "pickles", tmp_path / "again", format="hil-serl")
    assert not there.notes and not back.notes
    assert_all_same(list(open_any(tmp_path / "again", "log")), list(open_any(tmp_path / "log", "log")))
    assert_all_same(list(open_any(tmp_path / "again", "log")), mixed())


def test_hilt_json_that_does_not_fit(tmp_path: Path) -> None:
    write(create(tmp_path, "hil-serl"), mixed()[:2])
    path = tmp_path / "hilt.json"
    known = json.loads(path.read_text())
    for damage in (
        "[]",
        "{",
        '{"episodes": 3}',
        json.dumps({**known, "columns": {"a": ["O", []]}}),
        json.dumps({**known, "columns": {"a": ["<U3", []]}}),
        json.dumps({**known, "columns": []}),
        json.dumps(
            {**known, "columns": {name: kind for name, kind in known["columns"].items() if name != "truncated"}}
        ),
        json.dumps({**known, "episodes": [""]}),
        json.dumps({**known, "episodes": [[known["episodes"][0][0], 0, 1e999, True, {}], known["episodes"][1]]}),
    ):
        path.write_text(damage)
        with pytest.raises(CorruptError, match=r"hilt\.json: not as Hilt writes it"):
            list(open_dataset(tmp_path))
    for columns in ({"nothing": ["<f4", []]}, {"actions": ["<f4", [5]]}):
        path.write_text(json.dumps({**known, "columns": {**known["columns"], **columns}}))
        with pytest.raises(CorruptError, match=r"not the transitions that hilt\.json or the other files tell of"):
            list(open_dataset(tmp_path))
    for first, stop in ((3, 3), (2, 9), (-1, 2), (9, 10), (0, 10**15)):
        path.write_text(
            json.dumps({**known, "episodes": [[known["episodes"][0][0], first, stop, True, {}], known["episodes"][1]]})
        )
        with pytest.raises(CorruptError, match="transitions for"):
            list(open_dataset(tmp_path))
    path.write_text(json.dumps(known))
    save(tmp_path / "buffer" / "transitions_99.pkl", [])
    dataset = open_dataset(tmp_path)
    assert [len(e) for e in dataset] == [4, 5]
    assert dataset.notes.counts == {"hilt.json names other files than there are: it was passed over": 1}


def test_writing_refuses(tmp_path: Path) -> None:
    for options in ({"buffer_period": 0}, {"exp_name": "../x"}, {"exp_name": ""}):
        with pytest.raises(ConfigError, match="expected at least 1, and letters"):
            create(tmp_path, "hil-serl", **options)  # type: ignore[arg-type]
    writer = create(tmp_path, "hil-serl")
    writer.add(0, made(2))
    with pytest.raises(SchemaError, match="grasp_penalty: not as in the episodes before"):
        writer.add(1, made(2, grasp_penalty=np.zeros(2)))
    writer.close()
