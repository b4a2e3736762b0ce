"""RECAP in rounds: the policy acts, a value model learns how its episodes end and labels them, the policy learns from
all of them.

    RUN/rounds/0/sft/           without a policy to begin with: fine-tuning on the demonstrations
    RUN/rounds/1/log-TASK/      episodes of the policy before
    RUN/rounds/1/value/         the value model of all episodes so far, which writes its advantages into their logs
    RUN/rounds/1/sft/           fine-tuning on all of them, from the policy that the run began with
    RUN/rounds.json             what came of each round
    RUN/policy/                 the policy of the last round

Each part is a run, a log or a model of its own, so that the same command continues after an interruption.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hilt.core.checksums import read_json, write_json
from hilt.core.config import build
from hilt.core.errors import ConfigError, OutcomesError
from hilt.core.files import DISK, replacing
from hilt.core.progress import Report, silent
from hilt.observe.statistics import wilson
from hilt.policies.base import Policy
from hilt.policies.registry import is_new, load_policy
from hilt.runs import checkpoint
from hilt.runs.folder import failure_noted, note_end
from hilt.value.value_config import ValueConfig
from hilt.value.value_episodes import ValueEpisodes
from hilt.value.value_facts import write_estimates
from hilt.value.value_model import VALUE_FILE, load_value_model
from hilt.value.value_training import train_value
from hilt.vla import sft
from hilt.vla.demonstrations import words
from hilt.vla.recap.recap_episodes import EpisodePlan, record_episodes
from hilt.vla.recap.recap_settings import Recap
from hilt.vla.sft import POLICY, RESULT, Sft, SftSummary

ROUNDS, ROUNDS_FILE, VALUE = "rounds", "rounds.json", "value"
KEPT = "kept"
"""The reason of a run that found nothing to learn, and kept the policy that it began with"""


def train(config: Sft, run: Path, *, stop: Callable[[], bool] = lambda: False, **options: Any) -> SftSummary:
    """Trains a run of fine-tuning, in rounds if it has some. `options`: the callbacks of `hilt.vla.sft.train`."""
    if not config.recap.rounds:
        return sft.train(config, run, stop=stop, **options)
    config.check()
    if config.demonstrations and not is_new(config.policy):
        raise ConfigError(
            f"demonstrations={config.demonstrations}: with recap.rounds they are what a new policy begins with, and "
            f"policy={config.policy} has begun. Give the log of the demonstrations as data, or leave them out."
        )
    with checkpoint.alone(run, "is being trained already"), failure_noted(run):
        note_end(run)
        done = _Rounds(config, run, stop, **options).run()
        note_end(run, done.reason, done.step, f"{done.reason}, after {done.step:,} steps")
        return done


@dataclass(frozen=True)
class RoundResult:
    """What came of one round."""

    number: int
    episodes: int
    """Of the policy before"""
    successes: int
    auc: float | None
    """How well the value model ranks held-out episodes half-way"""
    steps: int
    """Gradient steps of the policy that was kept"""
    loss: float


class _Stopped(Sequence[int]):
    """Asks `stop` whether a signal has come."""

    def __init__(self, stop: Callable[[], bool]):
        self._stop = stop

    def __len__(self) -> int:
        return int(self._stop())

    def __getitem__(self, place: Any) -> Any:
        raise IndexError(place)


class _Rounds:
    """The rounds of one run."""

    def __init__(
        self,
        config: Sft,
        run: Path,
        stop: Callable[[], bool],
        notify: Callable[[str], None] = lambda text: None,
        watch: sft.Watch = lambda step, values: None,
        report: Report = silent,
    ):
        self._config, self._run, self._stop = config, run, stop
        self._notify, self._watch, self._report = notify, watch, report
        self._data = list(config.data)
        self._last = SftSummary("stopped", 0, 0, float("nan"), 0.0)

    def run(self) -> SftSummary:
        config, first = self._config, self._config.policy
        if is_new(config.policy):
            began = replace(config, recap=Recap())
            if not self._fine_tuned(0, began):
                return self._last
            first = str(self._sft(0) / POLICY)
            self._data += [
                str(sft.demonstrations_of(self._sft(0), task) / "log") for task in config.tasks if config.demonstrations
            ]
        policy = first
        for number in range(1, config.recap.rounds + 1):
            made = self._round(number, first, policy)
            if made is None:
                return replace(self._last, reason="stopped") if self._stop() else self._end(policy)
            policy = made
        return self._end(policy)

    def _round(self, number: int, first: str, policy: str) -> str | None:
        """The folder of the policy of a round, that begins with `policy`; None: it was stopped, or nothing is left to
        learn."""
        config, folder = self._config, self._folder(number)
        counts = self._collected(number, policy)
        if counts is None:
            return None
        if counts[0] == counts[1]:
            self._keep(number, f"all {counts[0]} episodes succeeded, and there is nothing to tell apart.")
            return None
        try:
            auc = self._labeled(folder)
        except OutcomesError as error:
            self._keep(number, str(error))
            return None
        if self._stop():
            return None
        changed = replace(
            config,
            policy=first,
            data=list(self._data),
            demonstrations=0,
            demonstration_options={},
            recap=replace(config.recap, rounds=0, episodes=Recap().episodes, temperature=1.0, value={}),
        )
        if not self._fine_tuned(number, changed):
            return None
        result = RoundResult(number, *counts, auc, self._last.best_step, self._last.loss)
        path = self._run / ROUNDS_FILE
        known = read_json(path)[ROUNDS] if path.is_file() else []
        write_json(path, {ROUNDS: [*(one for one in known if one["number"] < number), asdict(result)]})
        return str(self._sft(number) / POLICY)

    def _keep(self, number: int, why: str) -> None:
        """Says why nothing can be learned of the episodes of a round, and how there would be more of them."""
        more = f"hilt train sft --run {self._run} --resume recap.episodes={2 * self._config.recap.episodes}"
        self._notify(f"round {number}: {why} The policy is kept as it was. To try more episodes: {more}")

    def _folder(self, number: int) -> Path:
        return self._run / ROUNDS / str(number)

    def _sft(self, number: int) -> Path:
        return self._folder(number) / "sft"

    def _collected(self, number: int, policy: str) -> tuple[int, int] | None:
        """Episodes of the policy, and how many succeeded; their logs are data from now on. A round whose policy is
        trained keeps the episodes that it has, where more are asked for now."""
        config, folder = self._config, self._folder(number)
        wanted = config.recap.episodes if self._trained(number) is None else 0
        DISK.make_folders(folder)
        acting: Policy | None = None
        counts = [0, 0]
        for place, task in enumerate(config.tasks):
            path = folder / f"log-{task.replace('/', '-').replace(':', '-')}"
            acting = acting or load_policy(policy, device=config.device).eval()
            seed = [config.seed, number, place]
            plan = EpisodePlan(task, config.task_options, config.instruction, wanted, config.recap.temperature, seed)
            found = record_episodes(acting, words(config), plan, path, self._stop, self._report)
            if self._stop():
                return None
            low, high = wilson(found[1], found[0])
            share = f"{100 * found[1] / found[0]:.0f}%, 95% interval {100 * low:.0f}% to {100 * high:.0f}%"
            self._notify(f"round {number}, {task}: {found[1]} of {found[0]} sampled episodes succeeded ({share})")
            self._data.append(str(path))
            counts = [counts[0] + found[0], counts[1] + found[1]]
        return counts[0], counts[1]

    def _labeled(self, folder: Path) -> float | None:
        """Trains the value model of all episodes so far and writes its advantages into their logs. Returns how well it
        ranks half-way."""
        out = folder / VALUE
        with ValueEpisodes(self._data, self._report) as episodes:
            if (out / VALUE_FILE).is_file():
                model: Any = load_value_model(out)
            else:
                settings = build(ValueConfig(), self._config.recap.value)
                model = train_value(episodes, settings, out, self._report, _Stopped(self._stop), self._notify)
            if model is None:
                return None
            write_estimates(model, episodes, report=self._report)
        found = model.metadata["held_out"]["after"][1]["auc"]
        if found is None:
            self._notify(f"the value model {out}: too few held-out episodes last half as long, so no AUC is known")
            return None
        self._notify(f"the value model {out} ranks held-out episodes half-way with an AUC of {found:.3f}")
        return float(found)

    def _fine_tuned(self, number: int, config: Sft) -> bool:
        """Trains the policy of a round, unless it has one; whether it has."""
        folder = self._sft(number)
        if (known := self._trained(number)) is not None:
            self._last = known
            return True
        if sft.is_run(folder):
            settled = sft.KIND.frozen(folder)
        else:
            settled = sft.begin_run(folder, "", config)
        self._last = sft.train(
            settled, folder, stop=self._stop, notify=self._notify, watch=self._watch, report=self._report
        )
        return self._last.reason != "stopped"

    def _trained(self, number: int) -> SftSummary | None:
        """How the training of a round ended, if it has ended."""
        path = self._sft(number) / RESULT
        known = read_json(path) if path.is_file() else {"reason": "stopped"}
        return None if known["reason"] in ("stopped", "alarm") else SftSummary(**known)

    def _end(self, policy: str) -> SftSummary:
        """The policy of the last round becomes that of the run; without one, the policy that the run began with."""
        if self._last.reason == "stopped":
            self._last = replace(self._last, reason=KEPT)
        with replacing(self._run / POLICY, sole_writer=True) as made:
            load_policy(policy).save_pretrained(made)
        write_json(self._run / RESULT, asdict(self._last))
        return self._last
