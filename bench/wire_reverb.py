"""A real Reverb server and a client of it, each a process of its own, in the interpreter that has dm-reverb."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import reverb

from bench.sides import serve
from bench.workloads import W1, for_peers

TABLE = "w1"
SEEN = (*W1.cameras, "state")
"""Of both steps of an item; of the first one only:"""
REST = ("actions", "rewards", "masks", "dones")


class Server:
    def start(self, transitions: int) -> int:
        """The port of a server with a table that keeps everything and never makes anybody wait."""
        table = reverb.Table(
            TABLE, reverb.selectors.Uniform(), reverb.selectors.Fifo(), transitions, reverb.rate_limiters.MinSize(1)
        )
        self._server = reverb.Server([table])
        return self._server.port  # type: ignore[no-any-return]

    def close(self) -> None:
        self._server.stop()


class Client:
    """Inserts W1 as items of two steps, of which each frame is sent and stored once."""

    def start(self, port: int) -> None:
        self._client = reverb.Client(f"127.0.0.1:{port}")
        self._work = W1()

    def prepare(self, episodes: list[int]) -> None:
        """The steps of these episodes, in memory before the clock starts: an
        episode of 100 transitions has 101 of them."""
        self._ready = []
        for e in episodes:
            columns = self._work.columns(e)
            seen, after = columns["observations"], columns["next_observations"]
            flat = for_peers({k: v for k, v in columns.items() if k not in ("observations", "next_observations")})
            steps = [
                {**{k: v[i] for k, v in seen.items()}, **{k: v[i] for k, v in flat.items()}}
                for i in range(self._work.episode)
            ]
            # The last observation is a step of its own; what else it carries belongs to no transition.
            steps.append({**steps[-1], **{k: v[-1] for k, v in after.items()}})
            self._ready.append(steps)

    def stream(self) -> dict[str, Any]:
        """From the first append until the server has confirmed the last item."""
        ready = self._ready
        writer = self._client.trajectory_writer(num_keep_alive_refs=2)
        start = time.monotonic()
        for steps in ready:
            for i, step in enumerate(steps):
                writer.append(step)
                if i:
                    past = writer.history
                    pair, first = {k: past[k][-2:] for k in SEEN}, {k: past[k][-2:-1] for k in REST}
                    writer.create_item(TABLE, priority=1.0, trajectory={**pair, **first})
            writer.end_episode()
        writer.flush()
        end = time.monotonic()
        writer.close()
        return {"start": start, "end": end}

    def check(self, transitions: int) -> None:
        """That the table holds so many items, and that a sample of them has every pixel."""
        held = self._client.server_info(60)[TABLE].current_size
        assert held == transitions, f"{held} items in the table, {transitions} were sent"
        for sample in self._client.sample(TABLE, num_samples=32, emit_timesteps=False):
            # A table without a signature gives the columns as a list, in the order of their names.
            columns = dict(zip(sorted((*SEEN, *REST)), sample.data, strict=True))
            names = enumerate(("observations", "next_observations"))
            self._work.check({name: {k: np.asarray(columns[k])[i : i + 1] for k in SEEN} for i, name in names})


if __name__ == "__main__":
    serve({"server": Server, "client": Client})
