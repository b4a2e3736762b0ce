"""`hilt train rloo --config FILE`: the YAML of a distributed RLOO trainer of RIPT's
kind, as the settings of a run here.

    task:     {benchmark_name: libero_spatial, task_names_to_use: [0, 1, 2],
              num_parallel_envs: 2, max_episode_length: 50}
    algo:     {rloo_batch_size: 2, data_batch_size: 4, num_epochs: 1, gradient_accumulation_steps: 1}
    training: {num_train_steps: 6}

Each rank works on one of its tasks in an iteration and on the next one in the next, from initial states that are all
different (`algo.init_state_mode: group` gives one to all members of a group). A key that is not known here is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hilt.algos.config import Batching, Optimizer, PolicyGradient
from hilt.core.config import read_yaml
from hilt.core.errors import ConfigError, Problems, UnknownNameError, suggest
from hilt.vla.collect import Collecting
from hilt.vla.config import SimulatorSettings, Validation, Vla
from hilt.vla.tasks import chosen

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
    """Returns the settings for this number of simulators, each in its process, and as many states at a time."""
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


def _ratio(config: Vla, mode: Any) -> None:
    if mode != "sum_on_action_dim":
        raise ConfigError(
            f"{mode!r} was given; expected is sum_on_action_dim. Others: algorithm.ratio=token, action or chunk."
        )
    config.algorithm.ratio = "action"


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
    "algo.lr": _to("optimizer.learning_rate"),
    "training.num_train_steps": _to("max_steps"),
    "training.seed": _to("seed"),
    "algo.weight_decay": _to("optimizer.weight_decay"),
    "algo.grad_norm_clip_model": _to("optimizer.gradient_clip"),
    "algo.lora_rank": _to("lora.rank"),
    "algo.log_prob_mode": _ratio,
}
"""What each key sets; those that choose the tasks are beside"""
ALIASES = {
    "algo.num_ppo_epochs": "algo.num_epochs",
    "algo.num_parallel_envs": "task.num_parallel_envs",
    "algo.rollouts_per_env": "task.rollouts_per_env",
    "algo.max_episode_length": "task.max_episode_length",
    "training.n_steps": "training.num_train_steps",
    "algo.checkpoint_path": "policy_path",
    "checkpoint_path": "policy_path",
}
"""Names of the same in RIPT's own files"""
STATES = "train_dataloader.batch_size"
"""RIPT's own: initial states of a step at each rank, of which each has `algo.rloo_batch_size` episodes"""
PASSING: Mapping[str, tuple[tuple[Any, ...], str]] = {
    **dict.fromkeys(("exp_name", "variant_name", "logging_folder", "make_unique_experiment_dir", "stage"), ((), "")),
    **dict.fromkeys(("train_dataloader.shuffle", "algo.max_step_batch_size", "algo.early_stop_percentage"), ((), "")),
    **dict.fromkeys(
        ("training.rollout_steps", "training.save_interval", "rollout.enabled", "rollout.interval"), ((), "")
    ),
    "algo.use_val_init": ((False,), "states of the validation are not trained on"),
    "algo.mix_val_init_in_rloo": ((False,), "states of the validation are not trained on"),
    "algo.rloo_over_all_rollouts": ((False,), "the members of a group are compared with each other"),
    "algo.eval_only": ((False,), "hilt eval RUN evaluates"),
    "algo.use_laplace_sampling": (
        (False,),
        "how a policy draws is its head's: policy_options.head=laplace for an L1 head",
    ),
    "algo.scale_factor": (
        (1, 1.0),
        "a scale is multiplied by the temperature: collect.temperature=VALUE on the command line",
    ),
    "algo.fix_scale_head": (
        (False,),
        "all that policy_options and lora leave trainable is trained: lora.targets=[...] chooses",
    ),
    "algo.log_scale_clip": ((), "the head of a checkpoint has bounds of its own"),
    "algo.header_lr": ((), "one learning rate counts for all: algo.lr"),
    "algo.header_checkpoint": ((), "a checkpoint folder has its heads in it: policy=FOLDER"),
    "algo.lora_adaptor_ckpt": (
        (),
        "merge the adapter into its policy first, or give the folder of the merged one: policy=FOLDER",
    ),
}
"""RIPT's own keys that set nothing here: the values with which they may stay (none
listed and no reason: any), and why others may not"""
SUITES_OF = {"libero_long": "libero_10"}
"""What RIPT calls a suite, where it is not LIBERO's word"""
TASKS = ("task.benchmark_name", "task.task_names_to_use", "task.task_name")


def rloo(path: str | Path) -> Vla:
    """The settings that a file of RIPT's kind stands for."""
    known, problems = [*KEYS, *TASKS], Problems()
    given = _renamed(_read(Path(path), {key.rpartition(".")[2]: key for key in known}), path)
    for key, value in list(given.items()):
        with problems.collected():
            if key in PASSING or key not in known:
                del given[key]
                _pass(key, value, known, path)
    tasks: list[str] = []
    with problems.collected():
        tasks = _tasks(given, path)
    config = Vla(
        tasks=tasks,
        pool=SimulatorSettings(slots=1),
        collect=Collecting(
            group_size=2,
            data_batch_size=4,
            tasks_per_step=1,
            init_state_mode="distinct",
            when_exhausted="partial",
            report_ranks=True,
        ),
        algorithm=PolicyGradient(
            estimator="rloo", clip_low=0.1, clip_high=0.1, batch=Batching(chunks_per_pass=CHUNKS_PER_PASS)
        ),
        optimizer=Optimizer(learning_rate=1e-5),
        validation=Validation(before=False, period=0, after=False),
    )
    for key, value in given.items():
        if key in KEYS and value is not None:
            try:
                KEYS[key](config, value)
            except ConfigError as error:
                problems.errors.append(ConfigError(f"{path}: {key}: {error}"))
    problems.report()
    return config


def _pass(key: str, value: Any, known: Sequence[str], path: str | Path) -> None:
    """Refuses a key of which nothing could be made, and one that is not known."""
    if key not in PASSING:
        raise ConfigError(f"{path}: no setting named {key!r}{suggest(key, known)} Known: {', '.join(known)}.")
    values, why = PASSING[key]
    if (
        why
        and value is not None
        and not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in values)
    ):
        raise ConfigError(f"{path}: {key}: {value!r} has no meaning here: {why}. Leave it out.")


def _renamed(given: dict[str, Any], path: str | Path) -> dict[str, Any]:
    """RIPT's own names and sizes in those of `KEYS`. Of Hydra's `defaults` the suite
    counts; the files that it names are not read."""
    for entry in given.pop("defaults", None) or []:
        for name, value in entry.items() if isinstance(entry, dict) else ():
            if str(name).split()[-1] == "task":
                suite = str(value).removesuffix("_rl")
                given.setdefault("task.benchmark_name", SUITES_OF.get(suite, suite))
    for theirs, ours in ALIASES.items():
        if theirs in given:
            if given.get(ours) is not None and given[theirs] is not None:
                raise ConfigError(f"{path}: {theirs} and {ours} are one setting: leave one out.")
            given[ours] = given.pop(theirs) if given.get(ours) is None else (given.pop(theirs), given[ours])[1]
    if (states := given.pop(STATES, None)) is not None:
        members = given.get("algo.rloo_batch_size", 2)
        if not (isinstance(states, int) and isinstance(members, int)) or "algo.data_batch_size" in given:
            raise ConfigError(
                f"{path}: {STATES}: {states!r} was given; expected is a whole number, and no "
                "algo.data_batch_size beside it."
            )
        given["algo.data_batch_size"] = states * members
        given.setdefault("algo.init_state_mode", "group")  # which is what RIPT does with its states
    return given


def _tasks(given: Mapping[str, Any], path: str | Path) -> list[str]:
    from hilt.envs.libero import SUITES
    from hilt.envs.tabletop.suite import SUITE

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
    """The keys of a file, dotted; a list is a value. One that stands outside its
    section is found too: ``task_name: 9``."""
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
