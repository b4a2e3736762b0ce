"""Drawing from a learner's log and handing over from another process: the same as
there, exactly once, and never without an end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hilt.core.errors import ClosedError, ConfigError, DeadlineError, EmptyError, RequestError, SchemaError
from hilt.core.tree import flatten
from hilt.replay import Channel
from hilt.replay.sampling.limiters import MinSize
from tests.wire.pair import Pair, eventually
from tests.wire.proxy import DOWN, UP, Proxy
from tests.wire.steps import ENV, transition


@pytest.fixture
def stocked(pair: Pair) -> Iterator[tuple[Pair, Any]]:
    """A learner with six episodes of 20 steps, of three sources, the even ones successful."""
    buffer = pair.buffer()
    for n in range(120):
        buffer.insert({**transition(1, 0, n), "source": n // 20 % 3}, "a", n)
    for number, trajectory in enumerate(buffer.log.trajectories()):
        buffer.log.annotate(trajectory, success=number % 2 == 0)
    yield pair, buffer


def same(here: Any, there: Any) -> None:
    left, right = flatten(here), flatten(there)
    assert set(left) == set(right)
    for path in left:
        assert left[path].dtype == right[path].dtype and np.array_equal(left[path], right[path]), path
    for name in ("steps", "probabilities", "weights"):
        assert np.array_equal(getattr(here, name), getattr(there, name)), name


# Batches


@pytest.mark.parametrize(
    ("how", "selection", "options"),
    [
        ("uniform", {}, {}),
        ("uniform", {"sources": ["human"]}, {}),
        ("uniform", {"last": 2}, {}),
        ("uniform", {"successes": True}, {}),
        ("uniform", {"sources": ["policy", "demo"], "successes": True, "last": 3}, {"replace": False}),
        ("prioritized", {}, {"exponent": 0.7, "beta": 0.5}),
        ("fifo", {}, {"max_times_sampled": 2}),
        ("uniform", {}, {"n_step": 3, "discount": 0.9}),
        ("uniform", {}, {"sequence_length": 4}),
        ("uniform", {}, {"stack": (3, ["observations/image"])}),
    ],
)
def test_the_same_as_there(stocked: Any, how: str, selection: dict[str, Any], options: dict[str, Any]):
    pair, buffer = stocked
    pair.server(stores={ENV: buffer})
    view = buffer.log.by_source(*selection["sources"]) if "sources" in selection else buffer.log.all()
    if selection.get("successes"):
        view = view & buffer.log.successes()
    if "last" in selection:
        view = view.last(selection["last"])
    seed = {} if how == "fifo" else {"seed": 7}
    local = view.sampler(how, **seed, **options)
    remote = pair.client(stores={}).sampler(ENV, how, **selection, **seed, **options)
    assert len(remote) == len(local)
    for keys in (None, ["actions", "rewards"], None):
        same(local.sample(16, keys), remote.sample(16, keys))


def test_priorities_change_draws_as_there(stocked: Any):
    pair, buffer = stocked
    pair.server(stores={ENV: buffer})
    local = buffer.log.all().sampler("prioritized", seed=3)
    remote = pair.client(stores={}).sampler(ENV, "prioritized", seed=3)
    rng = np.random.default_rng(0)
    for _ in range(8):
        here, there = local.sample(32, ["actions"]), remote.sample(32, ["actions"])
        same(here, there)
        new = rng.random(32) * 5
        assert remote.update_priorities(there.steps, new) == local.update_priorities(here.steps, new)
    gone = np.array([1 << 50])
    assert remote.update_priorities(gone, [1.0]) == 0


def test_a_sampler_of_the_learners_own(stocked: Any):
    """Both draw from the very same one."""
    pair, buffer = stocked
    server = pair.server(stores={ENV: buffer})
    server.register_sampler("mine", buffer.log.all().sampler("fifo", max_times_sampled=1))
    client = pair.client(stores={})
    first = client.sampler("mine").sample(10, ["actions"])["actions"][:, 0]
    second = client.sampler("mine").sample(10, ["actions"])["actions"][:, 0]
    assert first.tolist() == list(range(10)) and second.tolist() == list(range(10, 20))


def test_a_batch_is_drawn_once_when_its_answer_is_lost(stocked: Any):
    pair, buffer = stocked
    server = pair.server(stores={ENV: buffer})
    server.register_sampler("mine", buffer.log.all().sampler("fifo", max_times_sampled=1))
    with Proxy(*pair.ports) as proxy:
        client = pair.client(stores={}, port_number=proxy.ports[0], broadcast_port=proxy.ports[1])
        seen: list[float] = []
        for _ in range(2):
            proxy.cut_after(300, DOWN)  # in the middle of the answer
            seen += client.sampler("mine").sample(10, ["actions"], timeout=60)["actions"][:, 0].tolist()
        proxy.heal()
        seen += client.sampler("mine").sample(10, ["actions"], timeout=60)["actions"][:, 0].tolist()
    assert seen == list(range(30))


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner's own answer is waited for, however late it comes."""
    monkeypatch.setattr("hilt.wire.link.Link.ask.__defaults__", (None, 60.0))


@pytest.mark.usefixtures("late")
def test_a_limiter_has_a_deadline(pair: Pair):
    buffer = pair.buffer()
    server = pair.server(stores={ENV: buffer})
    server.register_sampler("limited", buffer.view.sampler(limiter=MinSize(5)))
    remote = pair.client(stores={}).sampler("limited")
    with pytest.raises(
        DeadlineError, match=r"waited \d+\.\d+ s to sample 2: 0 of 5 items needed are there; insert more"
    ):
        remote.sample(2, timeout=0.1)
    batch: list[Any] = []
    thread = threading.Thread(target=lambda: batch.append(remote.sample(2, timeout=60)))
    thread.start()
    for n in range(5):
        buffer.insert(transition(1, 0, n))
    thread.join(60)
    assert len(batch[0]["rewards"]) == 2


def test_remote_sampler_raises_the_errors_of_a_local_one(stocked: Any):
    pair, buffer = stocked

    class Own:
        def insert(self, step: Any) -> None: ...

    pair.server(stores={ENV: buffer, "own": Own(), "empty": pair.buffer("empty")})
    client = pair.client(stores={})
    with pytest.raises(
        RequestError, match="no data store or sampler at the learner named 'actor_emv'; did you mean 'actor_env'"
    ):
        client.sampler("actor_emv").sample(1)
    with pytest.raises(ConfigError, match="own: this store keeps no log, so there is no view to draw from"):
        client.sampler("own").sample(1)
    with pytest.raises(RequestError, match="no sampler named 'unifrom'; did you mean 'uniform'"):
        client.sampler(ENV, "unifrom").sample(1)
    with pytest.raises(RequestError, match="no column named 'reward'; did you mean 'rewards'"):
        client.sampler(ENV).sample(1, ["reward"])
    with pytest.raises(RequestError, match="'robot'"):
        client.sampler(ENV, sources=["robot"]).sample(1)
    with pytest.raises(ConfigError, match="batch_size: expected at least 1, got 0"):
        client.sampler(ENV).sample(0)
    with pytest.raises(ConfigError, match="a uniform sampler has no priorities"):
        client.sampler(ENV).update_priorities([1], [1.0])
    with pytest.raises(EmptyError):
        client.sampler("empty").sample(1)
    with pytest.raises(RequestError, match="unexpected keyword argument 'sede'"):
        client.sampler(ENV, sede=3).sample(1)
    with pytest.raises(SchemaError, match="payload/options/limiter: a value of type MinSize"):
        client.sampler(ENV, limiter=MinSize(1)).sample(1)
    assert len(client.sampler(ENV).sample(3)["rewards"]) == 3


def test_a_batch_larger_than_a_message_may_be(stocked: Any):
    pair, buffer = stocked
    pair.server(stores={ENV: buffer}, max_message_bytes=1 << 16)
    client = pair.client(stores={}, max_message_bytes=1 << 16)
    with pytest.raises(RequestError, match="the answer has 172800 bytes in one array, but max_message_bytes=65536"):
        client.sampler(ENV).sample(100)
    assert len(client.sampler(ENV).sample(10)["rewards"]) == 10
    assert client.stats()["reconnects"] == 0


def test_no_learner(stocked: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hilt.wire.link.Link.ask.__defaults__", (None, 0.0))
    pair, buffer = stocked
    server = pair.server(stores={ENV: buffer})
    client = pair.client(stores={}, options={"timeout_ms": 200})
    server.stop()
    said = r"hilt/sample: no answer from the learner at 127.0.0.1:\d+ within 0.1 s. Check that it runs"
    for _ in range(2):
        with pytest.raises(DeadlineError, match=said):
            client.sampler(ENV).sample(1, timeout=0.1)
    assert not client._link._asked and not client._link._open  # nobody asks for it for ever


def test_samplers_do_not_pile_up(stocked: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hilt.wire.remote.SAMPLERS", 4)
    pair, buffer = stocked
    server = pair.server(stores={ENV: buffer})
    client = pair.client(stores={})
    for _ in range(10):
        client.sampler(ENV).sample(1, ["rewards"])
    assert len(server._samplers._made) == 4


# Channels


def channel_pair(pair: Pair, size: int = 0, **settings: Any) -> tuple[Channel[Any], Any]:
    server = pair.server(stores={})
    channel: Channel[Any] = Channel(size, "trajectories")
    server.register_channel("trajectories", channel)
    return channel, pair.client(stores={}, **settings)


def test_remote_channel_keeps_order_in_both_directions(pair: Pair):
    channel, client = channel_pair(pair)
    for i in range(20):
        client.channel("trajectories").put({"i": i})
    assert [channel.get(timeout=0)["i"] for _ in range(20)] == list(range(20))
    for i in range(20):
        channel.put({"i": i})
    assert [client.channel("trajectories").get(timeout=60)["i"] for _ in range(20)] == list(range(20))


def test_trajectories_of_arrays(pair: Pair):
    """As RLinf hands them over: [T, B, ...] arrays of a rollout."""
    channel, client = channel_pair(pair)
    rng = np.random.default_rng(0)
    sent = {
        "obs": {
            "main_images": rng.integers(0, 255, (7, 2, 32, 32, 3), np.uint8),
            "states": rng.random((7, 2, 8)).astype(np.float32),
        },
        "actions": rng.random((7, 2, 7)).astype(np.float32),
        "rewards": rng.random((7, 2)).astype(np.float32),
        "dones": rng.random((7, 2)) < 0.5,
        "model_weights_id": "step-40",
        "versions": np.full((7, 2), 3),
    }
    client.channel("trajectories").put(sent)
    sent["actions"][:] = -1  # whoever put it may use its arrays again
    got = channel.get(timeout=0)
    assert set(got) == set(sent) and got["model_weights_id"] == "step-40"
    assert np.array_equal(got["obs"]["main_images"], sent["obs"]["main_images"]) and got["dones"].dtype == bool
    assert (got["actions"] >= 0).all()


@pytest.mark.usefixtures("late")
def test_full_and_empty_have_deadlines_and_go_on_afterwards(pair: Pair):
    """A wait that ended is not the answer to the next one."""
    channel, client = channel_pair(pair, 1)
    remote = client.channel("trajectories")
    for _ in range(2):
        with pytest.raises(
            DeadlineError, match=r"channel 'trajectories': waited \d+\.\d+ s for an item, and 0 items were waiting"
        ):
            remote.get(timeout=0.05)
    channel.put("here")
    assert remote.get(timeout=60) == "here"
    remote.put("first")
    for _ in range(2):
        with pytest.raises(
            DeadlineError,
            match=r"channel 'trajectories': waited \d+\.\d+ s for room for an item, and 1 items were waiting",
        ):
            remote.put("second", timeout=0.05)
    assert channel.get(timeout=0) == "first"
    item = {"i": 2}
    remote.put(item, timeout=60)
    assert channel.get(timeout=0) == {"i": 2}
    assert channel.qsize() == 0
    assert not client._link._asked and not client._link._open


def test_remote_channel_with_waiters_on_both_sides(pair: Pair):
    channel, client = channel_pair(pair, 1)
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(client.channel("trajectories").get(timeout=60)))
    thread.start()
    channel.put(1)
    thread.join(60)
    assert got == [1]
    channel.put(2)
    thread = threading.Thread(target=lambda: client.channel("trajectories").put(3, timeout=60))
    thread.start()
    assert channel.get(timeout=60) == 2
    thread.join(60)
    assert channel.get(timeout=60) == 3


def test_unknown_and_closed(pair: Pair):
    channel, client = channel_pair(pair)
    with pytest.raises(RequestError, match="no channel at the learner named 'trajectory'; did you mean 'trajectories'"):
        client.channel("trajectory").put(1)
    with pytest.raises(SchemaError, match="payload/item/what: a value of type object"):
        client.channel("trajectories").put({"what": object()})
    channel.close()
    with pytest.raises(ClosedError, match="channel 'trajectories' is closed: nothing can be put into it"):
        client.channel("trajectories").put(1)
    with pytest.raises(ClosedError, match="channel 'trajectories' is closed: all that was put into it has been taken"):
        client.channel("trajectories").get()
    assert not client._link._asked and not client._link._open


@pytest.mark.parametrize("way", [UP, DOWN])
def test_exactly_once_over_a_bad_network(pair: Pair, way: str):
    """Connections are cut in the middle of questions and of answers."""
    server = pair.server(stores={})
    channel: Channel[Any] = Channel(0, "c")
    server.register_channel("c", channel)
    with Proxy(*pair.ports) as proxy:
        client = pair.client(stores={}, port_number=proxy.ports[0], broadcast_port=proxy.ports[1])
        remote = client.channel("c")
        for i in range(3):
            proxy.cut_after(60 + 37 * i, way)
            remote.put({"i": i, "x": np.full(2000, i)}, timeout=60)
        assert [item["i"] for item in (channel.get(timeout=0) for _ in range(3))] == list(
            range(3)
        ) and not channel.qsize()
        for i in range(3):
            channel.put({"i": i, "x": np.full(2000, i)})
        got = []
        for i in range(3):
            proxy.cut_after(60 + 37 * i, way)
            got.append(remote.get(timeout=60)["i"])
        assert got == list(range(3)) and not channel.qsize()


def test_remote_channel_delivers_an_item_whose_reply_was_lost(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hilt.wire.link.Link.ask.__defaults__", (None, 0.0))
    server = pair.server(stores={})
    channel: Channel[Any] = Channel(0, "c")
    server.register_channel("c", channel)
    with Proxy(*pair.ports) as proxy:
        client = pair.client(
            stores={}, port_number=proxy.ports[0], broadcast_port=proxy.ports[1], options={"timeout_ms": 300}
        )
        channel.put("first")
        proxy.stall(DOWN)
        with pytest.raises(DeadlineError, match="hilt/get: no answer from the learner"):
            client.channel("c").get(timeout=0.3)
        eventually(lambda: not channel.qsize(), "it to be taken")
        item = ["put once"]
        with pytest.raises(DeadlineError, match="hilt/put: no answer from the learner"):
            client.channel("c").put(item, timeout=0.3)
        eventually(channel.qsize, "it to be put")
        proxy.heal()
        channel.put("second")
        assert client.channel("c").get(timeout=60) == "first"
        client.channel("c").put(item, timeout=60)
        assert [client.channel("c").get(timeout=60) for _ in range(2)] == [["put once"], "second"]
        assert not channel.qsize()
