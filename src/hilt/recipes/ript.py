"""`hilt train rloo --config FILE`: the YAML of a distributed RLOO trainer of RIPT's kind, as the settings of a run here.

    task:     {benchmark_name: libero_spatial, task_names_to_use: [0, 1, 2], num_parallel_envs: 2, max_episode_length: 50}
    algo:     {rloo_batch_size: 2, data_batch_size: 4, num_epochs: 1, gradient_accumulation_steps: 1}
    training: {num_train_steps: 6}

Each rank works on one of its tasks in an iteration and on the next one in the next. A key that is not known here is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hilt.algos.config import Batching, Optimiser, PolicyGradient
from hilt.core.config import read_yaml
from hilt.core.errors import ConfigError, UnknownNameError, suggest
from hilt.runtime.collect import Collecting
from hilt.runtime.tasks import chosen
from hilt.runtime.vla_config import Simulators, Validation, Vla

CHUNKS_PER_PASS = 64


def _given(config: Vla, path: str, value: Any) -> None:
    *parents, name = path.split(".")
    place: Any = config
    for parent in parents:
        place = getattr(place, parent)
    kind = type(getattr(place, name))
    fits = isinstance(value, kind) or (kind is float and isinstance(value, int))
    if not fits or (isinstance(value, bool) and kind is not bool):
        names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
        raise ConfigError(f"{value!r} was given; expected is {names[kind]}.")
    setattr(place, name, kind(value))


def _environments(config: Vla, count: Any) -> None:
    """So many simulators, each in its process; and as many states at a time."""
    _given(config, "pool.slots", count)
    _given(config, "collect.groups_at_once", count)
    config.pool.workers = count if count > 1 else 0


def _evaluated(config: Vla, episodes: Any) -> None:
    _given(config, "validation.episodes", episodes)
    config.validation.after = config.validation.episodes > 0


def _accumulated(config: Vla, steps: Any) -> None:
    """The gradient of a step is the sum over its passes in any case: with more of them, each has fewer chunks."""
    if not isinstance(steps, int) or not 1 <= steps <= CHUNKS_PER_PASS:
        raise ConfigError(f"{steps!r} was given; expected is a whole number from 1 to {CHUNKS_PER_PASS}.")
    config.algorithm.batch.chunks_per_pass = CHUNKS_PER_PASS // steps


def _to(path: str) -> Callable[[Vla, Any], None]:
    return lambda config, value: _given(config, path, value)


KEYS: Mapping[str, Callable[[Vla, Any], None]] = {
    "policy_path": _to("policy"),
    "task.num_parallel_envs": _environments,
    "task.rollouts_per_env": _evaluated,
    "task.max_episode_length": lambda config, value: config.task_options.update(step_limit=value),
    "algo.rloo_batch_size": _to("collect.group_size"),
    "algo.data_batch_size": _to("collect.data_batch_size"),
    "algo.num_epochs": _to("algorithm.epochs"),
    "algo.gradient_accumulation_steps": _accumulated,
    "algo.max_sampling_attempts": _to("collect.max_sampling_attempts"),
    "algo.enable_dynamic_sampling": _to("collect.dynamic_sampling"),
    "algo.enable_rollout_stats_tracking": _to("collect.skip_solved"),
    "algo.init_state_mode": _to("collect.init_state_mode"),
    "algo.ppo_clip_range": _to("algorithm.clip_low"),
    "algo.ppo_clip_high": _to("algorithm.clip_high"),
    "algo.lr": _to("optimiser.learning_rate"),
    "training.num_train_steps": _to("max_steps"),
    "training.seed": _to("seed"),
}
"""What each key sets; those that choose the tasks are beside"""
TASKS = ("task.benchmark_name", "task.task_names_to_use", "task.task_name")


def rloo(path: str | Path) -> Vla:
    """The settings that a file of RIPT's kind stands for."""
    known = [*KEYS, *TASKS]
    given = _read(Path(path), {key.rpartition(".")[2]: key for key in known})
    for key in given:
        if key not in known:
            raise ConfigError(f"{path}: no setting named {key!r}{suggest(key, known)} Known: {', '.join(known)}.")
    config = Vla(
        tasks=_tasks(given, path),
        pool=Simulators(slots=1),
        collect=Collecting(group_size=2, data_batch_size=4, tasks_per_step=1),
        algorithm=PolicyGradient(estimator="rloo", clip_low=0.1, clip_high=0.1, batch=Batching(chunks_per_pass=CHUNKS_PER_PASS)),
        optimiser=Optimiser(learning_rate=1e-5),
        validation=Validation(before=False, period=0, after=False),
    )
    for key, value in given.items():
        if key in KEYS and value is not None:
            try:
                KEYS[key](config, value)
            except ConfigError as error:
                raise ConfigError(f"{path}: {key}: {error}") from None
    return config


def _tasks(given: Mapping[str, Any], path: str | Path) -> list[str]:
    from hilt.envs.libero import SUITES
    from hilt.envs.suite import SUITE

    benchmark = str(given.get("task.benchmark_name", "libero_spatial")).lower()
    suites = {name: [f"{name}/{number}" for number in range(count)] for name, count in SUITES.items()}
    suites["tabletop"] = [f"tabletop/{name}" for name in SUITE]
    if benchmark not in suites:
        raise UnknownNameError("benchmark", benchmark, suites)
    named = [given[key] for key in TASKS[1:] if given.get(key) is not None]
    if len(named) == 2:
        raise ConfigError(f"{path}: task.task_name and task.task_names_to_use both choose the tasks: give one of them.")
    return chosen(named[0] if named else None, suites[benchmark])


def _read(path: Path, sections: Mapping[str, str]) -> dict[str, Any]:
    """The keys of a file, dotted; a list is a value. One that stands outside its section is found too: ``task_name: 9``."""
    try:
        tree = OmegaConf.to_container(read_yaml(path), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: not readable as YAML ({str(error).strip().splitlines()[0]}).") from None
    assert isinstance(tree, dict)
    found: dict[str, Any] = {}
    for name, value in tree.items():
        section = {f"{name!s}.{inner!s}": one for inner, one in value.items()} if isinstance(value, dict) else {}
        for key, one in (section or {sections.get(str(name), str(name)): value}).items():
            if key in found:
                raise ConfigError(f"{path}: {key} is given twice, {found[key]!r} and {one!r}: leave one out.")
            found[key] = one
    return found
