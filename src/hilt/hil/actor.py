"""The actor: drives a task with the newest weights, lets a person take over, and
keeps every step until the learner has it.

It never waits for the network. A step is process-safe in the spool before the next one begins, another thread sends it;
weights come in by themselves and are taken up between two steps; a thread of its own reports to the learner. The only
thing that it waits for is the first weights: it never acts with untrained weights.

    FOLDER/spool/       steps that the learner does not have yet
    FOLDER/acted        one byte for each step and for each episode that began, so that a
                        restarted actor goes on counting
    FOLDER/run.json     the run that the spool belongs to
    FOLDER/operator.json    where its operator's page is, while it runs: `hilt.hil.operator_page`
"""

from __future__ import annotations

import contextlib
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hilt.core.checksums import read_json, write_json
from hilt.core.errors import ConfigError, DeadlineError, EmergencyStopError, HiltError, RefusedError, SchemaError
from hilt.core.files import DISK
from hilt.core.names import load_own
from hilt.core.progress import Report, silent
from hilt.core.trajectory import STOPPED, Source
from hilt.core.tree import unflatten
from hilt.envs.env_protocol import TASK_REWARD, TASK_SUCCESS, Env, success_of
from hilt.envs.task_mix import TASK_NUMBER
from hilt.hil.config import MIXED, SENDERS, TASK_COLUMN, Hil, of_run
from hilt.hil.contact import ASKING, ESTOPPED, LOST, Contact, HelpAsker
from hilt.hil.environment import GroupPlay, control_rate, make_env, simulated, trainer_config
from hilt.hil.make_agent import make_agent
from hilt.hil.moments import Moment, Moments
from hilt.hil.operator_page import PageAnnouncement
from hilt.policies.precision import AUTO
from hilt.recording.recording_folder import GRASP, SHAPING, TIMES, nested_copy
from hilt.replay import QueuedDataStore
from hilt.runs.acted_journal import ActedJournal
from hilt.runs.run_precision import warnings
from hilt.teleop.intervene import attribute
from hilt.wire import TrainerClient, TrainerConfig

IN_MEMORY = 2_000
"""Steps that wait for the learner in memory too; older ones are read from the disk"""
LEARNER_TIMEOUT_S = 3_600.0
"""Timeout in seconds for the learner and its first weights: an encoder may be pretrained before"""
TELL_S, AGAIN_S = 1.0, 0.1
"""Seconds between two reports to the learner, and while it waits for the learner's updates"""
POLL_INTERVAL_S = 0.005
ANSWER_S = 5.0
FLUSH_S = 5.0
"""At the end, the seconds that steps in transit have; the others stay in the spool"""
SPLIT = "train"
PAUSED = "paused"
"""Who acts while a person has paused a simulation"""


@dataclass
class Acted:
    """What an actor has done."""

    name: str
    steps: int = 0
    """Since it was started, and"""
    episodes: int = 0
    """episodes that came to their end"""
    version: int = -1
    """Of the weights that it drives with"""
    acting: str = "waiting"
    """Who acts: policy, human, random; or waiting; or contact lost"""
    spooled: int = 0
    """Steps that the learner did not have in the end; episodes, where those are sent whole"""
    reason: str = ""
    """Why it ended: "the run has ended", "stop was pressed" or "stopped" """


def act(
    config: Hil,
    folder: Path,
    name: str = "actor-1",
    *,
    stop: Callable[[], bool] = lambda: False,
    notify: Callable[[str], None] = lambda text: None,
    report: Report = silent,
    learner_timeout_s: float = LEARNER_TIMEOUT_S,
    simulation: bool = False,
) -> Acted:
    """Acts until the run ends, the operator presses stop, or `stop()` returns True. `notify`
    is called with lines of text for the user. `simulation`: it plays groups of episodes for algorithm=mixed."""
    config = simulated(config) if simulation else config
    report(f"opening {config.task}")
    # a classifier judges pictures of an arm; a simulation knows success itself
    with make_env(replace(config, classifier="") if simulation else config, operator=True) as env:
        play = GroupPlay(config.mixed.group_size) if simulation else GroupPlay()
        actor = Actor(config, env, folder, name, stop, notify, learner_timeout_s, report, play)
        try:
            actor.run()
        finally:
            actor.close()
        return actor.acted


class Actor:
    """One actor; `act` is all that others need."""

    def __init__(
        self,
        config: Hil,
        env: Env,
        folder: Path,
        name: str,
        stop: Callable[[], bool],
        notify: Callable[[str], None],
        learner_timeout_s: float,
        report: Report = silent,
        play: GroupPlay | None = None,
    ):
        encoder = replace(config.agent.encoder)  # its own: the learner may say in which precision it computes
        config = replace(config, agent=replace(config.agent, encoder=encoder))
        self._report, self._play = report, play or GroupPlay()
        self._config, self._env, self._folder, self._stop, self._notify = config, env, folder, stop, notify
        self._learner_timeout_s = learner_timeout_s
        self._states = attribute(env, "initial_states", {SPLIT: 1})
        if SPLIT not in self._states:
            raise ConfigError(
                f"{config.task} has initial states for {', '.join(self._states)}: a run needs the split {SPLIT!r}."
            )
        self.acted = Acted(name)
        DISK.make_folders(folder)
        self._journal = ActedJournal(folder / "acted")
        self._seeds = (config.seed, zlib.crc32(name.encode()))  # no two actors do the same
        seed = self._seed(self._journal.steps)
        self._env.action_space.seed(seed)
        self._agent = make_agent(config, env, seed)
        self._weights: Weights | None = None
        self._client: TrainerClient | None = None
        self._store: Any = None
        self._spool: QueuedDataStore | None = None
        self._run = ""  # the run that these steps belong to, as its learner reported it
        self._pressed = self._over = False
        self._refused = ""
        # online steps before learner steps without its own of this life, and when that was heard
        self._ahead = 0.0, float("-inf")
        # steps of this life, its own, with which the run has max_env_steps; none: no such limit
        self._most: int | None = None
        self._says = "not yet"  # whether the environment tells success
        self._closing = threading.Event()
        self._teller = threading.Thread(target=self._tell, name="hilt-actor-tells", daemon=True)
        self._rate, self._timing = control_rate(env, config)
        attribute(env, "count_down", lambda of: None)(lambda: self._most and self._most - self.acted.steps)
        self._contact, self._help = Contact(env, config, notify), HelpAsker(env, config, notify)
        self._moments = Moments(env, offer=config.store == "log")
        self._rewinds: list[dict[str, int]] = []  # that the learner does not know yet
        self._clock = time.time() - time.perf_counter()  # one that never goes back, whatever happens to the computer's
        self._began = time.monotonic()
        self._page: PageAnnouncement | None = None

    # The whole, and one episode

    def run(self) -> None:
        self._connect()
        if self._client is not None:
            for line in warnings(self._config):
                self._notify(line)
            attribute(self._env, "connect", lambda: None)()
            if url := getattr(attribute(self._env, "device", None), "url", ""):
                self._notify(f"open {url}")
                self._page = PageAnnouncement(self._folder, url)
            self._teller.start()
        while not self._ended():
            self._episode()
        self.acted.reason = "stop was pressed" if self._pressed else "the run has ended" if self._over else "stopped"

    def close(self) -> None:
        """Steps in transit are delivered if the learner is there; the rest stays in the spool."""
        self._closing.set()
        self._agent.close()
        if self._teller.ident is not None:
            self._teller.join(ANSWER_S)
        if self._client is not None:
            self._flush()
            self._client.stop()
        if self._spool is not None:
            self._spool.close()
        if self._page is not None:
            self._page.close()
        self._journal.close()

    def _flush(self) -> None:
        """Sends the remaining steps, then signs off: a learner that ends waits until every actor has done so."""
        assert self._client is not None
        if self._spool is None:
            self.acted.spooled = self._store.close(FLUSH_S)
        elif self._client.stats()["connected"]:
            latest = self._spool.latest_data_id()
            self._client.update(timeout_ms=1e3 * FLUSH_S)
            self._client.wait_acknowledged(of_run(self._run), latest, power=True, timeout=1.0)
            self.acted.spooled = max(0, latest - self._client.stats()["stores"][of_run(self._run)]["process_safe"])
        else:
            self.acted.spooled = len(self._spool)
        if self._client.stats()["connected"]:
            self._ask({**self._stats(), "bye": True})

    def _episode(self) -> None:
        number = self._play.begin(self._journal.begin_episode())
        count, order = self._states[SPLIT], np.random.default_rng([*self._seeds, number // self._states[SPLIT]])
        state = int(order.permutation(count)[number % count])
        if not self._ready():
            return
        self._does("resetting the task")
        try:
            observation, info = self._env.reset(seed=self._seed(number, 1), options={"split": SPLIT, "state": state})
        except EmergencyStopError:  # the next episode begins when it is released
            self._await_operator(ESTOPPED)
            return
        if self._rate is not None:
            self._rate.restart()
        self._agent.begin(str(attribute(self._env, "instruction", "") or ""), paced=self._rate is not None)
        before, steps, human, total, ended = nested_copy(observation), 0, 0, 0.0, False
        self._moments.begin()
        while not ended and self._ready():
            self._moments.note(steps, before, human, total)
            made, before, ended, info, source = self._step(before)
            self._does(f"step {steps + 1}, {self.acted.acting} acts")
            steps, human = steps + 1, human + (source == Source.HUMAN and not info.get("lost"))
            total += float(made["rewards"])
            moment = self._paused(steps) if info.get("paused") and not ended else None
            self._store.insert({**made, "truncated": np.bool_(True)} if moment else made)
            if moment is not None:
                self._moments.restore(moment)
                self._agent.acted(Source.HUMAN, None)
                before, steps, human, total = moment.observation, moment.step, moment.human, moment.total
            elif info.get("lost") and not ended:
                self._await_operator(ESTOPPED if info.get("estop") else LOST)
        if ended:
            self._says = "no" if self._says == "not yet" else self._says
            self.acted.episodes += 1
            how = {True: "success", False: "no success", None: "success unknown"}[success_of(info)]
            if info.get(TASK_SUCCESS) not in (None, success_of(info)):
                says = "success" if info[TASK_SUCCESS] else "no success"
                how += f" by the classifier, and the task itself says {says}"
            by = f", {human} by a person" if human else ""
            self._notify(
                f"episode {self.acted.episodes}: {steps} steps{by}, {how}, return {total:g}; "
                f"weights {self.acted.version}"
            )

    def _step(self, before: Any) -> tuple[dict[str, Any], Any, bool, dict[str, Any], Source]:
        """One step; the spool has it before the next one begins."""
        observed = self._now()
        random = self._random()
        action = (
            self._agent.layout.unlocked(self._env.action_space.sample())
            if random
            else self._agent.sample_actions(before)
        )
        version = -1 if random else self.acted.version
        helped = random or self.acted.acting == Source.HUMAN.name.lower()
        if not helped and (text := self._help.needed(self._agent.disagreement)):
            self._ask_for_help(text)
        if self._rate is not None:
            self._rate.wait()
        sent = self._now()
        observation, reward, terminated, truncated, reported = self._env.step(action)
        info: dict[str, Any] = {**reported}
        times = dict(zip(TIMES, (observed, sent, self._now()), strict=True))
        after, source, executed = nested_copy(observation), Source(info["source"]), info["executed_action"]
        # an environment whose own wrapper lets a person take over
        if source == Source.POLICY and "intervene_action" in info:
            source, executed = Source.HUMAN, info["intervene_action"]
        elif source == Source.POLICY and random:
            source = Source.RANDOM
        noted, succeed = self._agent.acted(source, executed), success_of(info)
        self._says = "yes" if succeed is not None else self._says
        self._journal.step()
        made = {
            "observations": before,
            "actions": np.asarray(executed, self._env.action_space.dtype),
            **reward_columns(float(reward), info, self._config),
            "next_observations": after,
            "terminated": np.bool_(terminated),
            "truncated": np.bool_(truncated),
            "source": np.uint8(source),
            "policy_version": np.int64(version if source == Source.POLICY else -1),
            "times": {name: np.float64(value) for name, value in times.items()},
            "succeed": np.bool_(bool(succeed)),
            "lost": np.bool_(info.get("lost", False)),
            **noted,
            **(self._play.columns() if self._config.algorithm == MIXED else {}),
            **({TASK_COLUMN: np.int16(info[TASK_NUMBER])} if TASK_NUMBER in info else {}),
            **self._penalty(info),
            **(
                {TASK_SUCCESS: np.int8(-1 if info.get(TASK_SUCCESS) is None else info[TASK_SUCCESS])}
                if self._config.classifier
                else {}
            ),
            **({STOPPED: np.float32(info.get(STOPPED, -1))} if self._config.value.stop_below else {}),
        }
        self.acted.steps, self.acted.acting = self.acted.steps + 1, source.name.lower()
        self._pressed = self._pressed or bool(info.get("stop"))
        return made, after, bool(terminated or truncated), info, source

    def _paused(self, step: int) -> Moment | None:
        """Waits during a pause; returns the moment to which the person goes back, if they do. The learner is told
        before it gets the last step, which ends what is rewound away."""
        self.acted.acting = PAUSED
        self._does(PAUSED)
        moment = self._moments.wait(self._ended)
        if moment is not None and self._spool is not None:
            self._rewinds.append({"rewound_at": self._spool.latest_data_id() + 1, "rewound_to": moment.step})
            deadline = time.monotonic() + ANSWER_S
            while self._rewinds and time.monotonic() < deadline and not self._ended():
                time.sleep(POLL_INTERVAL_S)
            self._notify(f"rewound from step {step} to step {moment.step}: tries again from there")
        if self._rate is not None:
            self._rate.restart()
        return moment

    def _await_operator(self, why: str) -> None:
        """No step is made meanwhile, but for two: the one that finds out why, and the first one after it."""
        self.acted.acting = why
        self._does(why)
        self._contact.wait(self._ended)
        self._agent.acted(Source.HUMAN, None)
        if self._rate is not None:
            self._rate.restart()

    def _ask_for_help(self, text: str) -> None:
        """Before a step of the policy: no step is made while it waits."""
        self.acted.acting = ASKING
        self._does(ASKING)
        self._help.ask(text, self._ended)
        if self._rate is not None:
            self._rate.restart()

    def _penalty(self, info: dict[str, Any]) -> dict[str, Any]:
        if "learned-gripper" not in self._config.agent.setup_mode:
            return {}
        if GRASP not in info:
            raise SchemaError(
                f"{self._config.task}: info has no {GRASP}, which {self._config.agent.setup_mode} "
                "learns from. Give it one."
            )
        return {GRASP: np.float32(info[GRASP])}

    # What decides who drives

    def _random(self) -> bool:
        return self._journal.steps < self._config.random_steps

    def _ready(self) -> bool:
        """Takes up the newest weights; waits for the first ones. False when it is time to end."""
        deadline = time.monotonic() + self._learner_timeout_s
        while not self._ended():
            if self._refused:
                raise RefusedError(f"the learner refuses this actor's steps: {self._refused}")
            if self._weights is not None and (new := self._weights.take()) is not None:
                self._agent.load_acting_state(new[0])
                self.acted.version = self._agent.version = new[1]
            if self._enough():
                self._waits("all steps of the run are made, and the learner has not ended it", deadline)
                continue
            if self._outruns():
                what = f"is less than {self._config.max_ahead} steps behind"
                self._does(f"waiting until the learner {'needs groups' if self._play.size else what}")
                time.sleep(POLL_INTERVAL_S)
                continue
            if self._play.size and self._play.fresh and time.monotonic() - self._ahead[1] > ANSWER_S:
                # what it played meanwhile would be too old
                self._waits("the learner does not answer", max(deadline, self._ahead[1] + self._learner_timeout_s))
                continue
            if self.acted.version >= 0 or self._random():
                return True
            self.acted.acting = "waiting"
            where = f"{self._config.wire.host}:{self._config.wire.broadcast_port}"
            self._waits(f"no weights from {where} yet", deadline)
        return False

    def _outruns(self) -> bool:
        """Whether it is to wait for the learner's updates; not for a learner that does not answer."""
        ahead, heard = self._ahead
        limit, made = self._config.max_ahead, self.acted.steps
        if self._play.size:
            limit, made = self._config.mixed.groups * self._play.fresh, 0  # a group that it has begun is played
        return bool(limit) and time.monotonic() - heard < ANSWER_S and ahead + made >= limit

    def _enough(self) -> bool:
        """Whether one more step would exceed max_env_steps, as far as the learner has reported."""
        return self._most is not None and self.acted.steps >= self._most

    def _waits(self, what: str, deadline: float) -> None:
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"{what}, after {self._learner_timeout_s:g} s: look at the learner's output, "
                "and start this actor again."
            )
        self._does(f"waiting: {what}")
        time.sleep(0.02)

    def _does(self, what: str) -> None:
        self._report(f"episode {self.acted.episodes + 1}", note=what)

    def _ended(self) -> bool:
        return self._stop() or self._pressed or self._over

    # The learner

    def _connect(self) -> None:
        deadline = time.monotonic() + self._learner_timeout_s
        config = trainer_config(self._config, learner=False)
        while self._client is None and not self._stop():
            try:
                self._client = self._connected(config)
            except DeadlineError as error:
                reason = getattr(error, "reason", "")
                why = f" ({reason})" if reason else ""
                self._waits(f"no learner answers at {self._config.wire.host}:{config.port_number} yet{why}", deadline)

    def _connected(self, config: TrainerConfig) -> TrainerClient:
        """First asks whose run it is, without the spool: no step of one run goes into another, of other names."""
        name, host = self.acted.name, self._config.wire.host
        answer = self._greeted(config)
        self._run, left, encoder = str(answer.get("run", "")), answer.get("left"), self._config.agent.encoder
        if encoder.precision == AUTO:  # as the run does, whatever is faster here
            encoder.precision = str(answer.get("precision", AUTO))
        self._belongs_to(self._run)
        self._most = None if left is None or self._spool is None or self._play.size else left - len(self._spool)
        stores = {} if self._spool is None else {of_run(self._run): self._spool}
        client = TrainerClient(name, host, config, data_stores=stores, wait_for_server=1.0)
        if self._spool is None:
            self._store = load_own(SENDERS[self._config.store])(client, name, self._run)
        self._weights = Weights()
        client.recv_network_callback(self._weights.arrived, self._weights.numbered)
        waiting = f"; {len(self._spool)} steps wait for it" if self._spool else ""
        self._notify(f"{name}: the learner is at {host}:{config.port_number}{waiting}")
        return client

    def _greeted(self, config: TrainerConfig) -> Mapping[str, Any]:
        """Returns the learner's answer: its run, the precision that it computes in, and the number
        of steps left if the run has a limit."""
        name = self.acted.name
        with TrainerClient(name, self._config.wire.host, config, wait_for_server=1.0) as client:
            answer: Mapping[str, Any] | None = client.request("send-stats", {"actor": name}, timeout_ms=1e3 * ANSWER_S)
        if answer is None:
            raise DeadlineError("it was there a moment ago")
        return answer

    def _belongs_to(self, run: str) -> None:
        """This actor's folder does from now on; refused while it has steps of
        another run. For a new run it counts anew."""
        run_file, path = self._folder / "run.json", self._folder / "spool"
        before = read_json(run_file).get("run", "") if run_file.exists() else run
        if self._config.store == "log":
            self._store = self._spool = (
                self._spool if self._spool is not None else QueuedDataStore(IN_MEMORY, path=path)
            )
            if before != run and len(self._spool):
                raise ConfigError(
                    f"{path} has {len(self._spool)} steps that the learner of another run has not got, and "
                    "they would go into this one. Start an actor for that run, or give this one "
                    "another folder with --spool."
                )
        if before != run:
            self._journal.restart()
        write_json(run_file, {"run": run})

    def _tell(self) -> None:
        """Runs in a thread: reports to the learner, and receives its progress and whether the run is over."""
        assert self._client is not None
        reported_at = 0.0
        while not self._closing.wait(AGAIN_S):
            due, stats = time.monotonic() - reported_at >= TELL_S, self._client.stats()
            while self._rewinds and stats["connected"] and self._ask({"actor": self.acted.name, **self._rewinds[0]}):
                self._rewinds.pop(0)
            wrong = next((store["refusal"] for store in stats["stores"].values() if store["refused"]), "")
            self._refused = f"{wrong} Give both sides the same recipe and settings." if wrong else self._refused
            if stats["refusal"] and due:
                self._refused, reported_at = self._another_run(), time.monotonic()
            elif (due or self._outruns() or self._enough()) and stats["connected"]:
                self._ask(self._stats() if due else {"actor": self.acted.name})
                reported_at = time.monotonic() if due else reported_at

    def _another_run(self) -> str:
        """Whether the learner that refuses is of another run, in words; else it may
        take steps again, and acting goes on."""
        with contextlib.suppress(HiltError):
            if str(self._greeted(trainer_config(self._config, learner=False)).get("run", "")) != self._run:
                left = (
                    f" {len(self._spool)} steps wait in {self._folder} for their own."
                    if self._spool is not None
                    else ""
                )
                return f"it is of another run.{left}"
        return ""

    def _ask(self, words: dict[str, Any]) -> bool:
        """Reports to the learner; returns whether it has answered."""
        assert self._client is not None
        own, spooled = self.acted.steps, len(self._spool) if self._spool is not None else 0
        try:
            answer = self._client.request("send-stats", words, timeout_ms=1e3 * ANSWER_S)
        except HiltError as error:  # the learner could not process the report; acting goes on
            self._notify(f"the learner: {error}")
            return False
        if answer is not None:
            self._over = self._over or bool(answer["stop"])
            if self._play.size:  # its steps count for neither of the limits below
                self._ahead = float(answer.get("groups", 0)), time.monotonic()
                return True
            # without its own steps of this life, which are added when it is asked
            learned = int(answer["update"]) / self._config.updates_per_step
            self._ahead = int(answer.get("online", self._journal.steps)) - learned - own, time.monotonic()
            if "left" in answer and self._spool is not None:  # episodes that are sent whole have no such end
                self._most = own + int(answer["left"]) - spooled
        return answer is not None

    def _stats(self) -> dict[str, Any]:
        acted = self.acted
        stats: dict[str, Any] = {
            "actor": acted.name,
            "steps": self._journal.steps,
            "episodes": acted.episodes,
            "steps_per_second": acted.steps / max(time.monotonic() - self._began, 1e-9),
            "acting": acted.acting,
            "version": acted.version,
            "spooled": len(self._spool) if self._spool is not None else self._store.waiting(),
            "stop": self._pressed,
            "says_success": self._says,
            **({"simulation": True} if self._play.size else {}),
            **self._contact.stats(),
            **self._help.stats(),
            **unflatten(self._agent.metrics()),
            **attribute(self._env, "value_figures", dict)(),
        }
        if self._timing is not None:
            timing = self._timing()
            stats |= {f"lateness_{p}_ms": 1e3 * timing[f"late_{p}"] for p in ("p50", "p99")} | {
                "missed": timing["missed"]
            }
        return stats

    def _seed(self, *numbers: int) -> int:
        return int(np.random.SeedSequence([*self._seeds, *numbers]).generate_state(1)[0])

    def _now(self) -> float:
        """Seconds since 1970."""
        return self._clock + time.perf_counter()


def reward_columns(reward: float, info: Mapping[str, Any], config: Hil) -> dict[str, np.float32]:
    """The reward of a step; of a run with a dense reward that of the task, and the dense part in a column of its
    own."""
    if not config.value.reward:
        return {"rewards": np.float32(reward)}
    of_task = float(info.get(TASK_REWARD, reward))
    return {"rewards": np.float32(of_task), SHAPING: np.float32(reward - of_task)}


class Weights:
    """The newest weights with their version: set by one thread, taken by another between two steps."""

    def __init__(self) -> None:
        self._payload: Any = None
        self._newest: tuple[Any, int] = None, -1
        self._taken = -1

    def arrived(self, payload: object) -> None:
        self._payload = payload

    def numbered(self, version: int) -> None:
        self._newest = self._payload, version

    def take(self) -> tuple[Any, int] | None:
        """None when there are none that were not taken before."""
        newest = self._newest  # looked at once: the next ones may come at any moment
        if newest[1] == self._taken:
            return None
        self._taken = newest[1]
        return newest
