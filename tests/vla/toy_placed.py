"""The worker of a real run, which once kills itself, or raises, in the middle of
what the name of a file in the run says."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from hilt.vla import worker as roles


def make_worker(settings, run, *, ranks, stop, role="both"):
    worker = roles.make_worker(settings, run, ranks=ranks, stop=stop, role=role)

    def once(name, function):
        def wrapped(*given, **named):
            flag = Path(run) / name
            if ranks.rank == 1 and flag.exists():
                flag.unlink()
                if name.startswith("raise"):
                    raise ZeroDivisionError("in mid-update")
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*given, **named)

        return wrapped

    if role != "train":
        worker.policy.act = once("die-in-rollout", worker.policy.act)
    if role != "roll_out":  # after the backward passes, while the other ranks go on to add up
        worker.optimizer.step = once("die-in-update", once("raise-in-update", worker.optimizer.step))
    return worker
