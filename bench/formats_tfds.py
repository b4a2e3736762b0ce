"""tensorflow_datasets, and TF-Agents with a real Reverb server, in the interpreter that has them."""

from __future__ import annotations

import os
import time
from typing import Any

import reverb
import tensorflow as tf
import tensorflow_datasets as tfds
from tf_agents.replay_buffers import reverb_utils, rlds_to_reverb
from tf_agents.specs import tensor_spec

from bench.sides import serve

CORES = 2


def two_cores() -> None:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    tf.config.threading.set_intra_op_parallelism_threads(CORES)
    tf.config.threading.set_inter_op_parallelism_threads(CORES)


class Reader:
    """Three ways of reading every step of a folder. The graph of each is made before its clock starts."""

    def __init__(self) -> None:
        two_cores()
        self._made: dict[tuple[str, str], Any] = {}

    def ready(self) -> None:
        """TensorFlow is loaded."""

    def read(self, path: str, way: str) -> dict[str, Any]:
        """`check` is a sum over all pixels, where the arrays are episodes as ours are."""
        data = self._data(path, way)
        start, steps, check = time.perf_counter(), 0, 0
        for batch in self._batches(data, way):
            steps += len(batch["reward"])
            check += int(batch["observation"].ravel()[::4099].sum()) if way != "flat" else 0
        return {"seconds": time.perf_counter() - start, "steps": steps, "check": check}

    def peak(self, path: str) -> float:
        data = self._data(path, "episodes")
        before = most = _anonymous()
        for _ in self._batches(data, "episodes"):
            most = max(most, _anonymous())
        return most - before

    def _data(self, path: str, way: str) -> Any:
        if (path, way) not in self._made:
            data = tfds.builder_from_directory(path).as_dataset(split="train")
            if way == "flat":  # the steps of all episodes, in batches
                data = data.flat_map(lambda episode: episode["steps"]).batch(50).prefetch(tf.data.AUTOTUNE)
            elif way == "episodes":  # each episode as one batch, several of them at a time
                one = tf.autograph.experimental.do_not_convert(
                    lambda episode: episode["steps"].batch(10_000).get_single_element()
                )
                data = data.map(one, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)
            self._made[path, way] = data
        return self._made[path, way]

    def _batches(self, data: Any, way: str) -> Any:
        if way == "nested":  # as the documentation of RLDS does
            return (batch for episode in data for batch in episode["steps"].batch(10_000).as_numpy_iterator())
        return data.as_numpy_iterator()


class Pusher:
    """TF-Agents' own function, into a table in memory."""

    def __init__(self) -> None:
        two_cores()

    def ready(self) -> None:
        """TensorFlow is loaded."""

    def push(self, path: str, most: int) -> dict[str, Any]:
        data = tfds.builder_from_directory(path).as_dataset(split="train")
        spec = tensor_spec.add_outer_dim(rlds_to_reverb.create_trajectory_data_spec(data))
        table = reverb.Table(
            "t",
            reverb.selectors.Uniform(),
            reverb.selectors.Fifo(),
            most,
            reverb.rate_limiters.MinSize(1),
            signature=spec,
        )
        server = reverb.Server([table])
        client = reverb.Client(f"127.0.0.1:{server.port}")
        observer = reverb_utils.ReverbAddTrajectoryObserver(client, "t", sequence_length=2)
        start = time.perf_counter()
        steps = rlds_to_reverb.push_rlds_to_reverb(data, observer)
        observer.flush()
        seconds = time.perf_counter() - start
        observer.close()
        held = client.server_info(60)["t"].current_size
        server.stop()
        return {"seconds": seconds, "steps": int(steps), "items": held}


def _anonymous() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


if __name__ == "__main__":
    serve({"reader": Reader, "pusher": Pusher})
