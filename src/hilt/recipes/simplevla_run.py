"""From SimpleVLA-RL: its command line is a run here.

    hilt train simplevla data.task_suite_name=libero_10 data.n_samples=8 ... actor_rollout_ref.model.path=FOLDER

Every key of its ``ppo_trainer.yaml`` is in one of six tables. It becomes a setting of ours as it is (`SETTINGS`), goes
into one by arithmetic (`READ`), must be what another key is (`AGREE`), passes with values that change nothing
(`PASSING`), or belongs to a critic (`CRITIC`) or to PRIME (`PRIME`). Other values are refused with a sentence. What
upstream ignores (`entropy_coeff`, `ppo_epochs`, cosine, `filter_format`, all estimators but grpo, PRIME) works here.
``hilt.KEY=VALUE`` sets a setting of ours that it has not, such as ``hilt.pool.workers=4``.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hilt.algos.config import GROUPED
from hilt.core.config import build
from hilt.core.errors import ConfigError, Problems, UnknownNameError
from hilt.envs import libero, robotwin
from hilt.envs.task import STATES
from hilt.policies.io.tensor_files import read_json
from hilt.policies.vla.normalize import read_statistics, resolve_key
from hilt.recipes.simplevla_keys import (
    ACTOR,
    AGREE,
    CRITIC,
    MODEL,
    PASSING,
    PRIME,
    PRIME_WORDS,
    READ,
    REF,
    RM,
    ROLLOUT,
    SETTINGS,
    known,
)
from hilt.recipes.simplevla_names import tasks_of
from hilt.recipes.simplevla_script import words_of
from hilt.recipes.simplevla_words import KINDS, default_of, is_of_kind, kind_of, nested, parsed
from hilt.vla.config import Vla

PLATFORMS = {
    "LIBERO": (8, 7),
    "ALOHA": (25, 14),
    "ALOHA_12": (12, 14),
    "ALOHA_8": (8, 14),
    "ALOHA_6": (6, 14),
    "BRIDGE": (5, 7),
}
"""ROBOT_PLATFORM: actions of a chunk, numbers of an action"""
STEP_LIMIT = 512
"""Of an episode in every suite of LIBERO there, in actions"""
UNITS = ["Block", "LlamaDecoderLayer", "Projector"]
"""What FSDP gathers at a time, as there: blocks of the vision transformers, layers
of the language model, the projector"""
SINKS = ("wandb", "tensorboard")
OFFLOADS = {"parameters": "param", "gradients": "grad", "optimizer": "optimizer"}
"""Ours to theirs"""


@dataclass
class SimpleVLARun:
    """What a command line comes to."""

    config: Vla
    folder: Path
    """trainer.default_local_dir"""
    environment: dict[str, str] = field(default_factory=dict)
    """What is set for Weights & Biases"""
    lines: list[str] = field(default_factory=list)
    """The arithmetic of sizes in words, and what else should be known before the start"""


def simplevla(words: Sequence[str], environment: Mapping[str, str] | None = None, here: bool = False) -> SimpleVLARun:
    """The run that a command line of SimpleVLA-RL asks for; the first word may be a script of it. Nothing is started,
    and nothing but that and the checkpoint's config.json is read. All that cannot work is listed at once; with
    `here`, beside it what this machine lacks."""
    environment = os.environ if environment is None else environment
    if words and words[0].endswith(".sh") and "=" not in words[0]:
        keys, variables = words_of(Path(words[0]))
        words, environment = [*keys, *words[1:]], {**variables, **environment}
    return CommandLine(words, environment).run(here)


class CommandLine:
    """A command line, on its way to a `SimpleVLARun`."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str]):
        self._environment = environment
        self._ours = [word.removeprefix("hilt.") for word in words if word.startswith("hilt.")]
        self.given: dict[str, Any] = {}
        self.lines: list[str] = []
        self.problems, keys = Problems(), set(known())
        for word in words:
            with self.problems.collected():
                key, value = ("", "") if word.startswith("hilt.") else parsed(word)
                if key and key not in keys:
                    raise UnknownNameError("key of SimpleVLA-RL", key, keys)
                self.given |= {key: value} if key else {}
        for key, value in list(self.given.items()):
            if not self.problems.check(self._refuse, key, value):
                del self.given[key]  # as it is there, so that the rest can be looked at
        self.problems.check(self._refuse_critic)
        self.problems.check(self._refuse_prime)
        self.suite = str(self["data.task_suite_name"])
        self.tasks, self.nodes, self.gpus = list[str](), 1, 0
        with self.problems.collected():
            self.tasks = tasks_of(self.suite)
        with self.problems.collected():
            self.nodes, self.gpus = self.whole("trainer.nnodes", 1), self.whole("trainer.n_gpus_per_node", 0)
        self.ranks = self.nodes * max(self.gpus, 1)

    def __getitem__(self, key: str) -> Any:
        """Returns the value that was given, or SimpleVLA-RL's default."""
        if key in self.given:
            return self.given[key]
        return self[AGREE[key]] if key in AGREE else default_of(key)

    def whole(self, key: str, least: int = 1) -> int:
        if (value := int(self[key])) < least:
            raise ConfigError(f"{key}={value}: expected a whole number from {least} on.")
        return value

    def _refuse(self, key: str, value: Any) -> None:
        if (kind := kind_of(default_of(key))) and not is_of_kind(value, kind):
            raise ConfigError(f"{key}={value}: expected {KINDS[kind]}, such as {default_of(key)}.")
        passing, why = PASSING.get(key, ((value,), ""))
        if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in passing):
            raise ConfigError(f"{key}={value} has no meaning here: {why}." + " Leave it out." * (passing != ()))
        words = (
            ("prime", "normal") if key == f"{RM}rm_type" else PRIME_WORDS[key][1] if key in PRIME_WORDS else (value,)
        )
        if value not in words:
            raise UnknownNameError(key, str(value), words)
        if key in AGREE and value is not None and value != self[AGREE[key]]:  # null: as the other one
            raise ConfigError(
                f"{key}={value} and {AGREE[key]}={self[AGREE[key]]} differ: one value counts for "
                "both. Leave out the first."
            )

    def _refuse_critic(self) -> None:
        gae = self["algorithm.adv_estimator"] == "gae"
        for key, (default, _) in CRITIC.items():
            if not gae and self[key] != default:
                raise ConfigError(
                    f"{key}={self[key]} would do nothing: only algorithm.adv_estimator=gae has a critic. Leave it out."
                )

    def _refuse_prime(self) -> None:
        learns = self[f"{RM}prime_model.update"] != "none"
        for key in (*PRIME, *PRIME_WORDS):
            there, needed = self._process_rewards, f"{RM}rm_coef above 0 and rm_type=prime"
            if there and ".optim." in key:
                there, needed = learns, f"{RM}prime_model.update=after or before"
            if not there and self[key] != default_of(key):
                raise ConfigError(f"{key}={self[key]} would do nothing: it needs {needed}. Give that, or leave it out.")

    @property
    def _process_rewards(self) -> bool:
        return bool(self[f"{RM}enable"] and self[f"{RM}rm_coef"] and self[f"{RM}rm_type"] == "prime")

    # --- to a run ---

    def run(self, here: bool = False) -> SimpleVLARun:
        self.problems.check(_check_platform, self)
        made = self._gathered()
        if self.problems.errors and here:
            self.problems.check(self._look_around, made)
        self.problems.report()
        return SimpleVLARun(build(Vla(), nested(made), *self._ours), self.folder, self.tracker(), self.lines)

    @property
    def folder(self) -> Path:
        default = Path("checkpoints", str(self["trainer.project_name"]), str(self["trainer.experiment_name"]))
        return Path(self["trainer.default_local_dir"] or default)

    def settings(self) -> dict[str, object]:
        """Ours, by their dotted names."""
        made = self._gathered()
        self.problems.report()
        return made

    def _gathered(self) -> dict[str, Any]:
        """Returns the settings that are right; what is wrong is in `problems`."""
        made = self._settings(SETTINGS)
        for part in (self._policy, self._places, self._sizes, self._learning, self._schedule, self._sinks):
            if part is self._sizes and not self.tasks:
                continue  # nothing to divide
            with self.problems.collected():
                made |= part()
        return made

    def _look_around(self, made: Mapping[str, Any]) -> None:
        """Beside what is wrong already: whether the checkpoint, the simulator and the device are there."""
        build(
            Vla(), {name: made[name] for name in ("policy", "tasks", "device", "sinks") if name in made}
        ).check_place()

    def _settings(self, table: Mapping[str, tuple[Any, str]]) -> dict[str, Any]:
        """Returns our settings; a null stands for our default."""
        return {ours: self[key] for key, (_, ours) in table.items() if self[key] is not None}

    def _policy(self) -> dict[str, Any]:
        """The checkpoint, and how it is opened."""
        folder = str(self[f"{MODEL}path"] or self._environment.get("SFT_MODEL_PATH", ""))
        if not folder:
            raise ConfigError(f"which checkpoint? Give {MODEL}path=FOLDER, or export SFT_MODEL_PATH=FOLDER.")
        variants = {"openvla-oft": "oft", "openvla": "ar"}
        if self[f"{MODEL}vla"] not in variants:
            raise UnknownNameError("vla of SimpleVLA-RL", str(self[f"{MODEL}vla"]), variants)
        options: dict[str, Any] = {
            "variant": variants[self[f"{MODEL}vla"]],
            "action_dim": self.whole(f"{MODEL}action_token_len"),
        }
        options["chunk"] = self.chunk
        options["max_prompt_length"] = min(
            self.whole(key) for key in ("data.max_prompt_length", f"{ROLLOUT}max_prompt_length")
        )
        if (most := self.whole("data.max_response_length")) < self.chunk:
            raise ConfigError(
                f"data.max_response_length={most} actions: an answer has {self.chunk}. Give {self.chunk} or more."
            )
        options["checkpointed"] = 1.0 if self[f"{MODEL}enable_gradient_checkpointing"] else 0.0
        if self[f"{ROLLOUT}use_proprio"] or f"{ROLLOUT}use_proprio" in self.given:
            options["use_proprio"] = self[f"{ROLLOUT}use_proprio"]
        name = str(self[f"{ROLLOUT}unnorm_key"] or (self.suite if self.suite in libero.SUITES else ""))
        if name:
            options["unnorm_key"] = name.removeprefix("robotwin_").removeprefix("robotwin2_")
        rank, alpha, targets = (
            self[f"{MODEL}lora_rank"],
            self[f"{MODEL}lora_alpha"],
            _listed(self[f"{MODEL}target_modules"]),
        )
        if not rank and (alpha != READ[f"{MODEL}lora_alpha"] or targets != ["all-linear"]):
            raise ConfigError(
                f"{MODEL}lora_alpha and target_modules would do nothing: they need {MODEL}lora_rank=N. Leave them out."
            )
        made = {"policy": folder, **{f"policy_options.{key}": value for key, value in options.items()}}
        if rank:
            made |= {"lora.alpha": float(alpha), "lora.targets": [] if targets == ["all-linear"] else targets}
        return made

    @property
    def chunk(self) -> int:
        key = f"{MODEL}action_chunks_len"
        return 1 if self[f"{MODEL}vla"] == "openvla" and key not in self.given else self.whole(key)

    @property
    def step_limit(self) -> int:
        """Actions after which an episode is cut off: with data.filter_truncated, those of
        data.max_response_length. 0: the task's own."""
        key, there = "data.max_response_length", STEP_LIMIT if self.suite in libero.SUITES else 0
        if not self["data.filter_truncated"] or key not in self.given:
            return there
        if "/" in self.suite:
            raise ConfigError(
                f"{key} with data.filter_truncated=True: {self.suite} has a step limit of its own. Leave {key} out."
            )
        if there and self[key] > there:
            raise ConfigError(
                f"{key}={self[key]} with data.filter_truncated=True: an episode has {there} "
                f"actions. Give {there} at most."
            )
        return self.whole(key)

    def _places(self) -> dict[str, Any]:
        """Tasks, ranks, and who holds which weights."""
        options: dict[str, Any] = {}
        if self.suite in libero.SUITES:
            options = {"step_limit": self.step_limit, "wait_steps": self.whole(f"{ROLLOUT}num_steps_wait", 0)}
        elif self.suite.startswith("robotwin2_"):
            options = {
                "task_config": self[f"{ROLLOUT}twin2_task_config"],
                "instruction_type": self[f"{ROLLOUT}twin2_instruction_type"],
            }
        if self["data.filter_truncated"] and self.step_limit and self.suite not in libero.SUITES:
            options["step_limit"] = self.step_limit
        for key in ("num_steps_wait", "twin2_task_config", "twin2_instruction_type"):
            if self[ROLLOUT + key] != READ[ROLLOUT + key] and self[ROLLOUT + key] not in options.values():
                raise ConfigError(
                    f"{ROLLOUT}{key}={self[ROLLOUT + key]} would do nothing with {self.suite}. Leave it out."
                )
        offload = {ours: self[f"{ACTOR}fsdp_config.{theirs}_offload"] for ours, theirs in OFFLOADS.items()}
        sharded = self.ranks > 1 or any(offload.values())
        given = self.gpus or f"{ROLLOUT}dtype" in self.given
        precision = str(self[f"{ROLLOUT}dtype"]) if given else "auto"  # their default is meant for a GPU
        made: dict[str, Any] = {
            "tasks": self.tasks,
            "device": "cuda" if self.gpus else "cpu",
            "sharding.enabled": sharded,
        }
        made |= {f"task_options.{name}": value for name, value in options.items()}
        if sharded:
            made |= {f"sharding.offload_{name}": value for name, value in offload.items()}
            # torch up to 2.11 casts the input of a layer that is computed twice only the first
            # time: there autocast alone does it
            twice = self[f"{MODEL}enable_gradient_checkpointing"]
            made |= {"sharding.precision": precision if given and not twice else "float32", "sharding.units": UNITS}
        made["policy_options.compute"] = precision
        if self.ranks > 1:
            made |= {"placement.kind": "processes" if self.nodes == 1 else "ray", "placement.ranks": self.ranks}
        if self.nodes > 1:
            made |= {"placement.address": "auto", "placement.gpus": float(bool(self.gpus))}
        if len(self.tasks) < self.ranks:
            made["collect.idle_ranks"] = "steal"
        return made

    def _sizes(self) -> dict[str, Any]:
        """Their sizes are of all ranks together and are divided by their number; ours are per rank, unless noted."""
        ranks, group = self.ranks, self.whole("data.n_samples")
        prompts, mini, micro = (
            self.whole(key)
            for key in ("data.train_batch_size", f"{ACTOR}ppo_mini_batch_size", f"{ACTOR}ppo_micro_batch_size")
        )
        no_grad = min(self.whole(f"{part}log_prob_micro_batch_size") for part in (ROLLOUT, REF))
        self._check_divisible(prompts, group, mini, micro, no_grad)
        slices, episodes = self.whole(f"{ACTOR}traj_mini_batch_size"), prompts * group
        waves = self.whole(f"{ROLLOUT}micro_batch_size") * group
        length = math.ceil(self.step_limit / self.chunk) or slices
        slots = max(waves, self.whole(f"{ROLLOUT}val_micro_batch_size"))
        tokens = self.whole(f"{ACTOR}ppo_max_token_len_per_gpu") if self[f"{ACTOR}use_dynamic_bsz"] else 0
        if f"{ACTOR}ppo_max_token_len_per_gpu" in self.given and not tokens:
            raise ConfigError(
                f"{ACTOR}ppo_max_token_len_per_gpu would do nothing: it needs "
                f"{ACTOR}use_dynamic_bsz=True. Leave it out."
            )
        passes = (
            f"{tokens:,} tokens at most" if tokens else f"{micro // ranks} x {slices} (traj_mini_batch_size) chunks"
        )
        self.lines += [
            f"ranks: {self.nodes} machine(s) x {self.gpus or 'no'} GPU(s) = {ranks}",
            f"training step: {prompts} groups (train_batch_size) x {group} (n_samples) = {episodes} episodes, "
            f"{episodes // ranks} at each rank",
            f"optimizer step: {mini} trajectories (ppo_mini_batch_size), {mini // ranks} at each rank; "
            f"{math.ceil(episodes / mini)} of them in a training step",
            f"gradient accumulation: {mini} / {micro} (ppo_micro_batch_size) = {mini // micro}; a pass "
            f"has {passes} at each rank",
            f"log-probabilities: a pass has {no_grad // ranks} trajectories x {length} = "
            f"{no_grad // ranks * length} chunks at each rank",
            f"rollouts: {slots} environments at each rank (micro_batch_size x n_samples = "
            f"{waves}, or val_micro_batch_size)",
        ]
        if self["data.filter_truncated"]:
            limit = "the task's own step limit"
            if self.step_limit:
                limit = f"{self.step_limit} actions (data.max_response_length)"
            self.lines.append(
                f"truncation: an episode is cut off after {limit}, in validation too; a group with one is dropped"
            )
        workers = 0
        if not self.suite.startswith("tabletop"):
            workers = min(slots, max((os.cpu_count() or 1) // max(self.gpus, 1), 1))
        batch: dict[str, Any] = {"tokens_per_pass": tokens} if tokens else {"chunks_per_pass": micro // ranks * slices}
        batch["log_prob_chunks_per_pass"] = no_grad // ranks * length
        made = {f"algorithm.batch.{name}": value for name, value in batch.items()}
        return {**made, "collect.data_batch_size": episodes // ranks, "pool.slots": slots, "pool.workers": workers}

    def _check_divisible(self, prompts: int, group: int, mini: int, micro: int, no_grad: int) -> None:
        """Raises for sizes that do not divide among the ranks, or one another."""
        for key, size, unit in (
            ("data.train_batch_size", prompts, "groups"),
            (f"{ACTOR}ppo_mini_batch_size", mini, "trajectories"),
            (f"{ACTOR}ppo_micro_batch_size", micro, "trajectories"),
            ("log_prob_micro_batch_size", no_grad, "trajectories"),
        ):
            if size % self.ranks:
                fitting = math.ceil(size / self.ranks) * self.ranks
                raise ConfigError(f"{key}={size} {unit} do not divide among {self.ranks} ranks: give {fitting}.")
        if mini % micro or prompts * group % mini:
            raise ConfigError(
                f"ppo_micro_batch_size={micro} must divide ppo_mini_batch_size={mini} trajectories, and "
                f"that the {prompts * group} episodes of a training step (train_batch_size x "
                "n_samples): choose sizes that do."
            )

    def _learning(self) -> dict[str, Any]:
        """Rewards, advantages, and the divergence from a reference."""
        made: dict[str, Any] = {"algorithm.recompute_log_prob": True}
        if self["algorithm.adv_estimator"] == "gae":
            made |= self._settings(CRITIC) | {"critic.kind": "separate"}
        if self._process_rewards:
            made |= self._prime()
        elif self["reward_model.enable"] and self["reward_model.rm_coef"]:
            made |= {
                "rewards.learned": self["reward_model.rm_coef"],
                "rewards.classifier": str(self["reward_model.model.path"]),
            }
        if "reward_model.model.path" in self.given and "rewards.classifier" not in made:
            raise ConfigError(
                "reward_model.model.path would do nothing: it needs reward_model.rm_coef above 0 and "
                "rm_type=normal. Leave it out."
            )
        adaptive, control = self["algorithm.kl_ctrl.type"] == "adaptive", "algorithm.kl_ctrl."
        for key in ("horizon", "target_kl"):
            if adaptive != (control + key in self.given):
                raise ConfigError(f"{control}{key} and {control}type=adaptive go together: give both, or neither.")
        if self[control + "kl_coef"]:
            made |= {"algorithm.kl.where": "reward", "algorithm.kl.estimate": self["algorithm.kl_penalty"]}
            made |= {
                "algorithm.kl.coefficient": self[control + "kl_coef"],
                "algorithm.kl.controller": self[control + "type"],
            }
            made["reference.offload"] = self[f"{REF}fsdp_config.param_offload"]
            if adaptive:
                made |= {
                    "algorithm.kl.horizon": self[control + "horizon"],
                    "algorithm.kl.target": self[control + "target_kl"],
                }
        elif adaptive or self["algorithm.kl_penalty"] != "kl":
            raise ConfigError(
                f"algorithm.kl_penalty and {control}type would do nothing: they need "
                f"{control}kl_coef above 0. Leave them out."
            )
        return made

    def _prime(self) -> dict[str, Any]:
        """PRIME's process reward. A folder that is the policy's own need not be opened once more."""
        made = {"prime.coefficient": self[f"{RM}rm_coef"], **self._settings(PRIME)}
        made |= {ours: words[self[key]] for key, (ours, words) in PRIME_WORDS.items()}
        own = str(self[f"{MODEL}path"] or self._environment.get("SFT_MODEL_PATH", ""))
        made = {
            name: value
            for name, value in made.items()
            if name not in ("prime.policy", "prime.reference_policy") or value != own
        }
        if made["prime.granularity"] == "token" and self["algorithm.adv_estimator"] not in GROUPED:
            made["prime.granularity"] = "chunk"  # what a chunk's numbers earn is added up, and its critic sees chunks
        if made["prime.update"] == "none":
            made = {name: value for name, value in made.items() if not name.startswith("prime.optimizer.")}
        if made["prime.reference"] == "frozen":
            made["reference.offload"] = self[f"{REF}fsdp_config.param_offload"]
        return made

    def _schedule(self) -> dict[str, Any]:
        """How long, how often."""
        trials, epochs = self.whole("data.num_trials_per_task"), self.whole("trainer.total_epochs")
        drawn = int(self.whole("data.train_batch_size") * float(self["data.oversample_factor"]))
        prompts = len(self.tasks) * trials
        if not self["trainer.total_training_steps"] and prompts < drawn:
            raise ConfigError(
                f"data.train_batch_size={drawn} groups, and {self.suite} has {len(self.tasks)} tasks x "
                f"{trials} initial states = {prompts}: an epoch would have no step. Give at most {prompts}, or "
                "trainer.total_training_steps=N."
            )
        steps = int(self["trainer.total_training_steps"] or epochs * (prompts // drawn))
        size = (
            "total_training_steps"
            if self["trainer.total_training_steps"]
            else f"{epochs} epochs x ({prompts} initial states / {drawn})"
        )
        self.lines.append(f"run: {steps} training steps ({size})")
        if self.suite in libero.SUITES:
            self.lines.append(self._states())
        save, test = (max(int(self[f"trainer.{name}_freq"]), 0) for name in ("save", "test"))
        made: dict[str, Any] = {
            "max_steps": steps,
            "checkpoint_period": save or steps,
            "validation.period": test,
            "export_period": save,
        }
        made["collect.max_sampling_attempts"] = max(10, prompts // drawn)
        there = (
            {split: len(numbers) for split, numbers in libero.SPLITS.items()} if self.suite in libero.SUITES else STATES
        )
        there = robotwin.STATES if self.suite.startswith("robotwin") else there
        tried = math.ceil(self.whole("data.val_batch_size") / len(self.tasks))
        made["collect.states_per_task"] = trials if trials < there["train"] else 0  # 0: all that there are
        made["validation.episodes"] = tried if tried < there["eval"] else 0
        most = self.whole("data.val_batch_size")
        made["validation.at_most"] = most if most < min(tried, there["eval"]) * len(self.tasks) else 0
        if self["trainer.val_only"]:
            made |= {"max_steps": 0, "checkpoint_period": 1, "export_period": 0}
            made |= {"validation.before": True, "validation.period": 0, "validation.after": False}
            self.lines.append("trainer.val_only: the policy is validated, and nothing is trained")
        return made

    def _states(self) -> str:
        """One line: which initial states of LIBERO train, and which validate."""
        if any(word.startswith("task_options.splits") for word in self._ours):
            return "initial states: those of hilt.task_options.splits"
        (train, valid), stored = (libero.SPLITS[split] for split in ("train", "eval")), libero.STORED
        return (
            f"initial states: {train[0]} to {train[-1]} of each task's {stored} train, {valid[0]} to "
            f"{valid[-1]} validate; all {stored} for both, as SimpleVLA-RL has it: "
            f"hilt.task_options.splits='{{train: [0, {stored}], eval: [0, {stored}]}}'"
        )

    def _sinks(self) -> dict[str, Any]:
        loggers, mode = [str(name) for name in _listed(self["trainer.logger"])], str(self["trainer.wandb_mode"])
        for kind, given, choices in (
            ("logger", loggers, (*SINKS, "console")),
            ("wandb_mode", [mode], ("online", "offline", "disabled")),
        ):
            if unknown := [name for name in given if name not in choices]:
                raise UnknownNameError(kind, unknown[0], choices)
        if "wandb" in loggers and not self._tracked:
            self.lines.append(
                "wandb is off or not installed: metrics are in RUN/metrics.jsonl, and `hilt plot RUN` draws them"
            )
        return {"sinks": [name for name in loggers if name in SINKS and (name != "wandb" or self._tracked)]}

    @property
    def _tracked(self) -> bool:
        """Whether Weights & Biases is there and wanted. Who does not name it does without where it is not installed."""
        wanted = "wandb" in _listed(self["trainer.logger"]) and self["trainer.wandb_mode"] != "disabled"
        return wanted and ("trainer.logger" in self.given or _installed("wandb"))

    def tracker(self) -> dict[str, str]:
        """Returns the environment variables for Weights & Biases."""
        if not self._tracked:
            return {}
        mode = str(self["trainer.wandb_mode"])
        if mode == "online" and not self._environment.get("WANDB_API_KEY"):
            mode = "offline"
            self.lines.append("WANDB_API_KEY is not set: wandb is offline; later: wandb sync RUN/wandb/offline-run-*")
        names = {
            "WANDB_PROJECT": self["trainer.project_name"],
            "WANDB_RUN_GROUP": self["trainer.experiment_name"],
            "WANDB_MODE": mode,
        }
        return {name: str(value) for name, value in names.items()}


# --- helpers ---


def _check_platform(line: CommandLine) -> None:
    """ROBOT_PLATFORM is not needed; one that contradicts the checkpoint would have
    been the cause of a policy that does nothing."""
    name = line._environment.get("ROBOT_PLATFORM", "").upper()
    if not name:
        return
    if name not in PLATFORMS:
        raise UnknownNameError("ROBOT_PLATFORM", name, PLATFORMS)
    folder = Path(str(line[f"{MODEL}path"] or line._environment.get("SFT_MODEL_PATH", "")))
    chunk, numbers, where = line.chunk, int(line[f"{MODEL}action_token_len"]), "the command line"
    if (folder / "config.json").is_file():
        document, file = read_json(folder / "config.json"), folder / "dataset_statistics.json"
        stats = read_statistics(file) if file.is_file() else document.get("norm_stats") or {}
        key = str(line[f"{ROLLOUT}unnorm_key"] or line.suite)
        action = stats[resolve_key(stats, key if len(stats) > 1 else None)]["action"]
        chunk, numbers, where = (
            document.get("hilt", {}).get("chunk", chunk),
            len(action.get("q01") or action["min"]),
            str(folder),
        )
    if (chunk, numbers) != PLATFORMS[name] and line[f"{MODEL}vla"] == "openvla-oft":
        wanted = PLATFORMS[name]
        raise ConfigError(
            f"ROBOT_PLATFORM={name} has chunks of {wanted[0]} actions of {wanted[1]} numbers, and {where} has "
            f"{chunk} of {numbers}: unset the variable (the checkpoint determines it), or take the "
            "checkpoint that it is meant for."
        )


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value]
