"""A view as a dataset: every step once in an epoch, the same batches for any number
of workers, and a resume bit for bit."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hilt.core.errors import ConfigError, EmptyError, UnknownNameError
from hilt.replay import Log
from tests.replay.toy_steps import new_log, numbers, step, write

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from hilt.replay.sampling.torch_dataset import StepBatches, StepDataset, StepLoader  # noqa: E402

STEPS = 53


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Steps whose rewards are 0 to 52, in six episodes."""
    with new_log(tmp_path_factory.mktemp("dataset")) as opened:
        for first in range(0, STEPS, 10):
            write(opened, numbers(first, min(10, STEPS - first)))
        yield opened


@pytest.fixture
def dataset(log: Log) -> StepDataset:
    return StepDataset(log.all(), ["observations", "rewards"])


def rewards(batches: Any) -> list[list[float]]:
    return [batch["rewards"].tolist() for batch in batches]


def every(batches: list[list[float]]) -> list[float]:
    """All numbers of some batches, sorted."""
    return sorted(number for batch in batches for number in batch)


def test_a_step_is_nested_tensors(log: Log, dataset: StepDataset):
    assert len(dataset) == STEPS
    one, expected = dataset[7], log.read(dataset.keys[7:8], ["observations", "rewards"])
    assert set(one) == {"observations", "rewards"} and one["rewards"].item() == 7
    assert one["observations"]["image"].dtype is torch.uint8
    np.testing.assert_array_equal(one["observations"]["image"].numpy(), expected["observations"]["image"][0])
    assert dataset[-1]["rewards"].item() == STEPS - 1
    with pytest.raises(IndexError, match="step 53 of 53"):
        dataset[STEPS]
    assert set(StepDataset(log.all())[0]) >= {"actions", "terminated", "source"}, "all columns, unless some are named"


def test_step_dataset_refuses_wrong_arguments(log: Log, tmp_path: Path):
    with pytest.raises(UnknownNameError, match="no column named 'reward'; did you mean 'rewards'"):
        StepDataset(log.all(), ["reward"])
    with new_log(tmp_path) as empty, pytest.raises(EmptyError, match="holds no step yet"):
        StepDataset(empty.all())


@pytest.mark.parametrize("workers", [0, 2])
def test_map_style_in_a_data_loader(dataset: StepDataset, workers: int):
    source = torch.Generator().manual_seed(3)
    loader = torch.utils.data.DataLoader(dataset, 8, shuffle=True, num_workers=workers, generator=source)
    batches = list(loader)
    assert [len(batch["rewards"]) for batch in batches] == [8] * 6 + [5]
    assert every(rewards(batches)) == list(range(STEPS))
    for batch in batches:  # what belongs together stays together
        assert torch.equal(batch["observations"]["state"][:, 0], batch["rewards"])


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_iterable_style_has_one_order_for_any_number_of_workers(dataset: StepDataset, workers: int):
    stream = StepBatches(dataset, 8, seed=5, epochs=2)
    loader = torch.utils.data.DataLoader(stream, batch_size=None, num_workers=workers, generator=torch.Generator())
    drawn = rewards(loader)
    assert drawn == rewards(stream) and len(drawn) == 14
    assert every(drawn[:7]) == every(drawn[7:]) == list(range(STEPS)) and drawn[:7] != drawn[7:]


@pytest.mark.parametrize(("context", "workers"), [("fork", 2), ("spawn", 1)])
def test_a_loader_goes_through_shuffled_epochs_in_workers(dataset: StepDataset, context: str, workers: int):
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].tolist()  # type: ignore[index,union-attr]
    here, there = StepLoader(dataset, 8, seed=1), StepLoader(dataset, 8, seed=1, workers=workers, context=context)
    for epoch in range(2):
        assert here.epoch == there.epoch == epoch and len(there) == 7
        assert (drawn := rewards(there)) == rewards(here)
        assert every(drawn) == list(range(STEPS))
    there.close()
    assert torch.equal(before, torch.get_rng_state()) and np.random.get_state()[1].tolist() == numpy_before  # type: ignore[index,union-attr]


@settings(max_examples=25, deadline=None)
@given(data=st.data(), size=st.integers(1, 60), shuffle=st.booleans(), drop=st.booleans())
def test_a_loader_resumes_bit_for_bit(log: Log, data: st.DataObject, size: int, shuffle: bool, drop: bool):
    def made() -> StepLoader:
        return StepLoader(
            StepDataset(log.all(), ["rewards"]),
            min(size, STEPS) if drop else size,
            seed=9,
            shuffle=shuffle,
            drop_last=drop,
        )

    whole, loader = made(), made()
    batches = [batch for _ in range(3) for batch in rewards(whole)]
    stop = data.draw(st.integers(0, len(batches)))
    drawn: list[list[float]] = []
    while len(drawn) < stop:
        for batch in loader:
            drawn.append(batch["rewards"].tolist())
            if len(drawn) == stop:
                break
    file = io.BytesIO()
    torch.save(loader.state_dict(), file)  # as a checkpoint keeps it
    resumed = made()
    resumed.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    while len(drawn) < len(batches):
        drawn += rewards(resumed)
    assert drawn == batches


def test_a_resume_with_other_workers_goes_on_after_the_last_delivered_batch(dataset: StepDataset):
    """Workers have read ahead of what was delivered when the state is taken."""
    whole = StepLoader(dataset, 8, seed=2)
    expected = rewards(whole) + rewards(whole)
    loader = StepLoader(dataset, 8, seed=2, workers=2, ahead=4)
    first = [batch["rewards"].tolist() for batch, _ in zip(loader, range(5), strict=False)]  # zip takes a sixth
    state = loader.state_dict()
    loader.close()
    assert state["delivered"] == 6 and first == expected[:5]
    resumed = StepLoader(dataset, 8, seed=2, workers=1)
    resumed.load_state_dict(state)
    assert rewards(resumed) + rewards(resumed) == expected[6:]
    resumed.close()


def test_a_state_of_other_batches_is_refused(log: Log, dataset: StepDataset):
    state = StepLoader(dataset, 8, seed=2).state_dict()
    with pytest.raises(ConfigError, match=r"of other batches \(seed 2, here 3\)"):
        StepLoader(dataset, 8, seed=3).load_state_dict(state)
    fewer = StepDataset(log.last(2), ["observations", "rewards"])
    with pytest.raises(ConfigError, match=r"steps 53, here 13; fingerprint"):
        StepLoader(fewer, 8, seed=2).load_state_dict(state)
    with pytest.raises(ConfigError, match="delivered None"):
        StepLoader(dataset, 8, seed=2).load_state_dict({name: state[name] for name in state if name != "delivered"})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch_size": 0}, "batch_size=0: expected 1 to 53"),
        ({"batch_size": 60, "drop_last": True}, "batch_size=60: expected 1 to 53"),
        ({"seed": -1}, "seed=-1, first=0: expected whole numbers from 0 up"),
        ({"workers": -1}, "workers=-1, ahead=2: expected at least 0 workers"),
        ({"context": "spawn"}, "is how workers are started, and there are none"),
    ],
)
def test_settings_that_cannot_work(dataset: StepDataset, options: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said):
        StepLoader(dataset, **{"batch_size": 8, **options})


def test_pinned_memory_needs_a_gpu(dataset: StepDataset):
    if torch.cuda.is_available():
        (batch, *_) = StepLoader(dataset, 8, pin_memory=True)
        assert (
            batch["rewards"].is_pinned()
            and not next(iter(StepLoader(dataset, 8, pin_memory=False)))["rewards"].is_pinned()
        )
    else:
        with pytest.raises(ConfigError, match="pin_memory=True is for copies to a GPU, and torch finds none here"):
            StepLoader(dataset, 8, pin_memory=True)


def test_workers_read_while_the_log_is_written(tmp_path: Path):
    """A dataset has the steps of the moment it was made, and forked workers use nothing
    of a log that other threads are busy with."""
    with new_log(tmp_path) as log:
        write(log, numbers(0, 40))
        dataset, stop = StepDataset(log.all(), ["rewards"]), threading.Event()

        def writing() -> None:
            first = 1000
            while not stop.is_set():
                write(log, numbers(first, 20))
                first += 20

        thread = threading.Thread(target=writing)
        thread.start()
        try:
            loader = StepLoader(dataset, 8, workers=2)
            for _ in range(3):
                assert every(rewards(loader)) == list(range(40))
            loader.close()
        finally:
            stop.set()
            thread.join()
    assert every(rewards(StepLoader(dataset, 8))) == list(range(40)), "also when the log was closed: it is opened again"


def test_late_labels_are_seen(tmp_path: Path):
    with new_log(tmp_path) as log:
        write(log, [*numbers(0, 3), step(3, terminated=True)])
        write(log, numbers(10, 2))
        dataset = StepDataset(log.all(), ["rewards"])
        log.relabel(0, "rewards", [5.0, 6.0], first=1)
        assert rewards(StepLoader(dataset, 8, shuffle=False)) == [[0, 5, 6, 3, 10, 11]]
        log.delete(0)
        assert len(StepDataset(log.all())) == 2
