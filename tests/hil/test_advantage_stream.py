"""RECAP in the stream of a run: episodes are valued as they come, their steps are good or bad, and the policy learns
which, acts by it, and goes on bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hilt.core.config import build
from hilt.core.errors import ConfigError, SchemaError
from hilt.core.trajectory import ESTIMATES, Source
from hilt.core.tree import flatten, unflatten
from hilt.hil.config import Hil, check
from hilt.hil.data import columns_for, open_logs
from hilt.hil.learner import Learner, LearnerSummary
from hilt.hil.make_agent import make_agent
from hilt.hil.preflight import check_recap
from hilt.hil.stream.advantage_stream import EARLIER, LIVE, AdvantageStream, open_model
from hilt.hil.stream.labelled import GOOD
from hilt.observe.metrics import read_metrics
from hilt.policies.conditioned import ADVANTAGE, NEGATIVE, POSITIVE, UNKNOWN, ConditionedPolicy
from hilt.policies.vla.small_vla import SmallVLA, SmallVLAConfig
from hilt.replay import Edits, Log, Schema
from hilt.replay.key_ranges import OFFSET_BITS
from hilt.runs.checkpoint import load
from hilt.value.value_config import ValueConfig
from hilt.value.value_episodes import ValueEpisodes
from hilt.value.value_training import train_value
from tests.hil.toy_run import NO_CHUNK, episode, spaces, wire
from tests.value.chosen import save_verifier
from tests.value.valued import save_untrained

torch.set_num_threads(1)
TASK, LENGTH, REACH = "toy", 4, 0.8
POINT = {"observations/state/point": 3}
SIZES = {"image_size": 32, "state_dim": 3, "action_dim": 2, "chunk": 2, "width": 16, "depth": 1, "heads": 2}


def steps_of(
    number: int, human: tuple[int, ...] = (), source: Source = Source.POLICY, blind: bool = True
) -> Iterator[dict[str, Any]]:
    """An even episode moves by 0.8 and succeeds, an odd one by -0.8 and fails; a person always moves by 0.8. `blind`:
    nothing can be seen of where to move."""
    for place, step in enumerate(episode(number, LENGTH, human, images=True, more=NO_CHUNK)):
        for seen in (step["observations"], step["next_observations"]) if blind else ():
            seen["images"]["front"] = np.zeros_like(seen["images"]["front"])
            seen["state"]["point"] = np.zeros(3, np.float32)
        sign = 1 if number % 2 == 0 or place in human else -1
        acted = step["source"] if place in human else np.uint8(source)
        yield {**step, "actions": np.full(2, sign * REACH, np.float32), "source": acted}


def fill(log: Log, numbers: range, facts: dict[str, Any] | None = None, **options: Any) -> None:
    """Episodes as actors send them; with facts, as the learner leaves them."""
    drawn = {path: spec for path, spec in log.schema.columns.items() if path.startswith("record/")}
    record = unflatten({path: np.zeros(spec.shape, spec.dtype) for path, spec in drawn.items()})
    for number in numbers:
        with log.episode(actor="toy", boot="1", store="actor_env") as running:
            for step in steps_of(number, **options):
                running.append({**step, **record, "decided": np.int16(-1)})
        if facts is not None:
            log.annotate(running.trajectory, **{"success": number % 2 == 0, **facts})


def asked(folder: Path, **changes: Any) -> Hil:
    """The settings of a run with the policy and the value model of a folder."""
    options = {"policy": str(folder / "policy"), "instruction": "move", "learning_rate": 3e-3}
    options |= {"columns": {"full_image": "images/front", "state": "state/point"}, **changes.pop("options", {})}
    base = {"task": TASK, "algorithm": "recap", "batch_size": 16, "log_period": 1, "seed": 3}
    recap = {"model": str(folder / "value"), "threshold": 0.5, **changes.pop("recap", {})}
    return build(Hil(), base, {"recap": recap, "agent": {"kind": "vla", "options": options}}, changes)


def logs_of(run: Path, settings: Hil) -> dict[str, Log]:
    agent = make_agent(settings, spaces(True))
    schema = Schema.declare({**columns_for(settings, spaces(True)), **agent.step_columns()})
    demos, log = open_logs(run, settings, schema, lambda _: None)
    return {LIVE: log, EARLIER: demos}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy, a value model, and a run with eight episodes, of which a person corrected a step in the last two; it
    began with two demonstrations, and two episodes of another policy."""
    folder = tmp_path_factory.mktemp("template")
    SmallVLA(SmallVLAConfig(**SIZES), seed=0).save_pretrained(folder / "policy")
    save_untrained(folder / "value", POINT, TASK)
    (run := folder / "run").mkdir()
    logs = logs_of(run, asked(folder))
    fill(logs[LIVE], range(6))
    fill(logs[LIVE], range(6, 8), human=(2,))
    fill(logs[EARLIER], range(0, 4, 2), {"imported": "shown"}, source=Source.DEMO)
    fill(logs[EARLIER], range(2), {"imported": "tried"})  # without a task: it is the run's only one
    for log in logs.values():
        log.close()
    return folder


def learner(template: Path, run: Path, **changes: Any) -> Learner:
    """On a copy of the template's run, or what became of it."""
    if not run.exists():
        shutil.copytree(template / "run", run)
    return Learner(asked(template, **changes), run, resume=True, env=spaces(True), wire=wire())


# Which steps are good


def test_labels_are_those_of_the_formula_by_task_and_a_persons_steps_are_not_judged(tmp_path: Path):
    save_untrained(tmp_path / "value", POINT, ("a", "b"))
    SmallVLA(SmallVLAConfig(**SIZES), seed=0).save_pretrained(tmp_path / "policy")
    settings, said = asked(tmp_path, task="a+b", recap={"threshold": 0.7}), list[str]()
    logs = logs_of(tmp_path, settings)
    for number in range(12):
        fill(logs[LIVE], range(number, number + 1), {"task": "ab"[number % 3 == 0]}, human=(1,), blind=False)
    stream = AdvantageStream(settings, logs, said.append)
    judged: dict[str, list[tuple[int, float]]] = {"a": [], "b": []}
    for number in logs[LIVE].trajectories():
        facts, keys = logs[LIVE].facts.about(number), logs[LIVE].trajectory_keys(number)
        values = facts[ESTIMATES]["value"]
        for t, key in enumerate(keys.tolist()):
            # ten steps ahead is beyond the end: a tenth of the horizon is paid for each step, then comes the outcome
            came = -(LENGTH - t) / 10 + (0.0 if facts["success"] else -2.0)
            assert facts[ESTIMATES]["advantage"][t] == pytest.approx(came - values[t], abs=1e-3)
            if t != 1:
                judged[facts["task"]].append((key, facts[ESTIMATES]["advantage"][t]))
    for steps in judged.values():
        limit = np.quantile([advantage for _, advantage in steps], 0.7)
        good = stream.good(LIVE, np.array([key for key, _ in steps]))
        assert good.tolist() == [advantage > limit for _, advantage in steps] and 0.25 < good.mean() < 0.35
    assert sorted(stream.judged[LIVE].keys().tolist()) == sorted(key for part in judged.values() for key, _ in part)
    assert stream.counts() == {"policy_steps": 36, "valued_episodes": 12}
    assert said[0] == f"12 episodes of before were valued by {tmp_path / 'value'}"
    assert said[1].startswith("a: 8 episodes were valued, of which 4 failed; 29% of 24 steps of the policy have an adv")
    assert said[1].endswith("and are good, and so are 8 steps of a person")
    for log in logs.values():
        log.close()


def test_values_are_facts_of_the_log_that_are_renewed_where_model_or_outcome_are_others(template: Path, tmp_path: Path):
    shutil.copytree(template / "run", tmp_path / "run")
    settings, said = asked(template), list[str]()
    logs = logs_of(tmp_path / "run", settings)
    stream = AdvantageStream(settings, logs, said.append)
    assert said[0].startswith("2 episodes of before were valued")  # those of the other policy
    log = logs[LIVE]
    assert not len(stream.judged[LIVE]) and len(stream.judged[EARLIER]) == 2 * LENGTH == len(stream.shown)
    log.annotate(0, task=TASK, success=True)
    stream.value(0)
    first = log.facts.about(0)[ESTIMATES]
    assert first["model"] == open_model(settings).id and len(stream.judged[LIVE]) == LENGTH
    assert AdvantageStream(settings, logs, said.append).counts()["valued_episodes"] == 3 and "before" not in said[-1]
    # a person says that it failed, and somebody else's model has an opinion
    Edits(log).label([0], False)
    Edits(log).estimates({0: {**first, "model": "other", "advantage": [9.0] * LENGTH}})
    assert not len(stream.judged[LIVE])
    AdvantageStream(settings, logs, said.append)
    renewed = log.facts.about(0)[ESTIMATES]
    assert renewed["model"] == first["model"] and renewed["success"] is False
    assert renewed["advantage"][0] == pytest.approx(first["advantage"][0] - 2, abs=1e-3)
    for one in logs.values():
        one.close()


# Learning


@pytest.mark.parametrize("condition", ["words", "embedding"])
def test_the_policy_learns_from_failures_and_acts_as_in_good_steps(template: Path, tmp_path: Path, condition: str):
    """Nothing but the condition tells the one from the other, so without it there is nothing to choose by."""
    run, recap = tmp_path / "run", {"guidance": 1.5, "condition": condition}
    assert learner(template, run, max_steps=150, recap=recap).run().update == 150
    with Log.open(run / "log", "r") as log:
        facts = [log.facts.about(number) for number in log.trajectories()]
    assert [about["success"] for about in facts] == [True, False] * 4 and all(ESTIMATES in about for about in facts)
    agent = make_agent(asked(template, recap=recap), spaces(True))
    agent.load_state_dict(load(run, 150).agent)
    policy = agent.policy.eval()
    assert isinstance(policy, ConditionedPolicy) and (policy.guidance, policy.dropout) == (1.5, 0.3)
    row = {"full_image": np.zeros((32, 32, 3), np.uint8), "state": np.zeros(3, np.float32), "instruction": "move"}
    assert policy.kind == condition
    plain = ConditionedPolicy(policy.policy, kind=condition)
    moves = {
        label: float(plain.act([row if label is None else {**row, ADVANTAGE: label}], sample=False)[0].mean())
        for label in (None, POSITIVE, UNKNOWN, NEGATIVE)
    }
    assert moves[None] == moves[POSITIVE] > 0.4 and moves[NEGATIVE] < -0.4
    assert moves[NEGATIVE] < moves[UNKNOWN] < moves[POSITIVE]
    assert float(policy.act([row], sample=False)[0].mean()) > moves[POSITIVE]  # guidance
    agent.begin("move")
    seen = {"images": {"front": row["full_image"]}, "state": {"point": row["state"]}}
    assert agent.sample_actions(seen).mean() > moves[POSITIVE]
    agent.close()
    updates = read_metrics(run, ["update"])
    last = updates[-1]
    assert (last["policy_steps"], last["valued_episodes"], last["demo_steps"]) == (30 + 8, 10, 10)
    shares = np.array([[one[f"share/{name}"] for name in ("demonstrations", "human", "policy", "earlier")]
                       for one in updates])  # fmt: skip
    assert (shares.sum(1) == 1).all() and np.abs(shares.mean(0) - np.array([8, 2, 30, 8]) / 48).max() < 0.03
    assert np.mean([one["share/good"] for one in updates]) == pytest.approx((10 + 19) / 48, abs=0.04)
    read = [one for one in updates if "imitation/loss_of_wrong_condition" in one]
    assert len(read) == 7 and read[-1]["imitation/loss_of_wrong_condition"] > 2 * read[-1]["imitation/conditioned_loss"]
    assert not [one for one in read_metrics(run, ["event"]) if one.get("alarm") == "condition"]


def test_a_batch_has_the_label_of_each_step_and_no_chunk_goes_on_where_another_one_acts(template: Path, tmp_path: Path):
    one = learner(template, tmp_path / "run", view_shares={"human": 1.0, "policy": 1.0}, recap={"threshold": 0.01})
    one._look()  # episodes that ended are reported, and valued
    batch = one.experience.sample(64, "recap")
    human, alone = batch["source"] == Source.HUMAN, ~batch["mask"].all(1)
    assert batch.counts == {"human": 32, "policy": 32} and batch[GOOD][human].all() and human.sum() == 32
    assert alone[human].all() and 0 < alone[~human].mean() < 1  # the person acted in single steps
    numbers, first = batch.steps >> OFFSET_BITS, (batch.steps & ((1 << OFFSET_BITS) - 1)) == 0
    assert (batch[GOOD] == ~(first & (numbers % 2 == 1))).all(), "the first steps of failures have the least advantage"
    assert not batch[GOOD].all()
    learned = list[Any]()
    one.agent.policy.policy.supervised_loss = lambda rows, *given, **named: learned.extend(rows) or _no_loss(one.agent)
    one.agent.policy.dropout = 0.0
    one.agent.imitate(batch)
    assert [row["instruction"] for row in learned] == [
        f"move. {POSITIVE if good else NEGATIVE}" for good in batch[GOOD]
    ]
    one._undo.close()


def _no_loss(agent: Any) -> Any:
    return sum(p.sum() for p in agent.policy.parameters()) * 0, {"loss": 0.0}


def test_the_settings_of_recap_change_what_is_learned(template: Path, tmp_path: Path):
    save_untrained(tmp_path / "other" / "value", {"observations/state/point": 3}, TASK)
    weights = {}
    for name, recap in {
        "model": {"model": str(tmp_path / "other" / "value"), "threshold": 0.9},
        "threshold": {"threshold": 0.1},
        "dropout": {"dropout": 0.9},
        "guidance": {"guidance": 2.0},
        "condition": {"condition": "embedding"},
        "none": {},
    }.items():
        one = learner(template, tmp_path / name, max_steps=3, recap=recap)
        one.run()
        weights[name] = one.agent.acting_state()
    assert not same(weights["none"], weights["threshold"]) and not same(weights["none"], weights["dropout"])
    assert not same(weights["none"], weights["model"])
    assert weights["condition"].keys() - weights["none"].keys() == {"policy.condition_embedding.weight"}
    assert same(weights["none"], weights["guidance"])  # it is for acting: see above


def same(a: Any, b: Any) -> bool:
    ours, theirs = flatten(a), flatten(b)
    return ours.keys() == theirs.keys() and all(
        np.array_equal(np.asarray(ours[path]), np.asarray(theirs[path])) for path in ours
    )


@pytest.mark.parametrize("shares", [{}, {"demonstrations": 1.0, "human": 1.0, "policy": 2.0}], ids=["steps", "shares"])
def test_resumed_it_learns_the_same_bit_for_bit(template: Path, tmp_path: Path, shares: dict[str, float]):
    changes: dict[str, Any] = {"view_shares": shares, "options": {"average": 0.1}}
    changes |= {"recap": {"condition": "embedding" if shares else "words"}}
    learner(template, tmp_path / "whole", max_steps=12, **changes).run()
    learner(template, tmp_path / "cut", max_steps=7, **changes).run()
    with Log.open(tmp_path / "cut" / "log", "r") as log:
        before = [log.facts.about(number)[ESTIMATES] for number in log.trajectories()]
    ended = learner(template, tmp_path / "cut", max_steps=12, **changes).run()
    assert ended == LearnerSummary("max_steps", 12, 32)
    whole, cut = (load(tmp_path / name, 12) for name in ("whole", "cut"))
    assert same(whole.agent, cut.agent) and whole.state["experience"] == cut.state["experience"]
    names = ("imitation/loss", "share/good", "share/policy", "policy_steps", "valued_episodes")
    curves = [
        [[record.get(name) for name in names] for record in read_metrics(tmp_path / run, ["update"])]
        for run in ("whole", "cut")
    ]
    assert curves[0] == curves[1] and len(curves[0]) == 12
    with Log.open(tmp_path / "cut" / "log", "r") as log:
        assert before == [log.facts.about(number)[ESTIMATES] for number in log.trajectories()]


# What is refused


def test_a_model_on_features_of_a_policy_values_the_stream_and_those_of_other_weights_are_refused(
    template: Path, tmp_path: Path
):
    shutil.copytree(template / "run", tmp_path / "run")
    shutil.copytree(template / "policy", tmp_path / "seeing")
    logs = logs_of(tmp_path / "run", asked(template))
    for number in logs[LIVE].trajectories():
        logs[LIVE].annotate(number, task=TASK, success=number % 2 == 0)
    for log in logs.values():
        log.close()
    names = {"full_image": "images/front", "state": "state/point"}
    quick = {"hidden": 16, "steps": 4, "evaluate_every": 2, "batch_size": 8}
    with ValueEpisodes([tmp_path / "run" / "log"]) as episodes:
        train_value(episodes, ValueConfig(policy=str(tmp_path / "seeing"), columns=names, **quick), tmp_path / "value")
    settings, said = asked(template, recap={"model": str(tmp_path / "value")}), list[str]()
    check_recap(settings, spaces(True))
    logs = logs_of(tmp_path / "run", settings)
    stream = AdvantageStream(settings, logs, said.append)
    assert stream.counts()["valued_episodes"] == 10 and stream.good(LIVE, stream.judged[LIVE].keys()).any()
    for log in logs.values():
        log.close()
    SmallVLA(SmallVLAConfig(**SIZES), seed=1).save_pretrained(tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").replace(tmp_path / "seeing" / "model.safetensors")
    with pytest.raises(ConfigError, match=r"its weights have the hash .*, and the value model was trained on features"):
        check_recap(settings, spaces(True))


def test_a_value_model_that_does_not_fit_is_refused(template: Path, tmp_path: Path):
    save_untrained(tmp_path / "task", POINT, "another")
    save_untrained(tmp_path / "numbers", {"observations/state/point": 4}, TASK)
    save_untrained(tmp_path / "column", {"observations/state/gripper": 1}, TASK)
    save_verifier(tmp_path / "chunks", {"state": "state/point"}, 3, 2, 2)
    cases = {
        "task": r"recap\.model=.*task was trained on 'another', and this run has the task 'toy'\. Train one",
        "numbers": r"value model .*numbers looks at state/point of 4 numbers, and here it has 3",
        "column": r"value model .*column looks at state/gripper of 1 numbers, and here it has none",
        "chunks": r"recap\.model=.*chunks judges chunks \(actions=2\), and steps are labeled by a value",
        "nothing": r"nothing is no value model: it has no value\.json\. Make one with: hilt train value",
    }
    for name, error in cases.items():
        settings = asked(template, recap={"model": str(tmp_path / name)})
        with pytest.raises((ConfigError, SchemaError), match=error):
            check_recap(settings, spaces(True))
    with pytest.raises(SchemaError, match=r"observations/state/gripper has no numbers, expected 1"):
        learner(template, tmp_path / "run", recap={"model": str(tmp_path / "column")})
    check_recap(asked(template, algorithm="hg-dagger", recap={"model": "nothing"}), spaces(True))
    shutil.copytree(template / "run", tmp_path / "strange")
    logs = logs_of(tmp_path / "strange", settings := asked(template))
    logs[EARLIER].annotate(2, task="another")
    with pytest.raises(SchemaError, match=r"tried: the value model .* was trained on 'toy', and there are.*'another'"):
        AdvantageStream(settings, logs, lambda _: None)
    for log in logs.values():
        log.close()


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"recap": {"model": ""}}, r"algorithm=recap: which episodes are good\? Give recap\.model=FOLDER"),
        ({"agent": {"kind": "actor_critic"}}, r"algorithm=recap with agent\.kind=actor_critic: only a vision-language"),
        ({"store": "trajectories"}, r"algorithm=recap with store=trajectories: values are facts of the log"),
        (
            {"view_shares": {"successes": 1}},
            r"view_shares has 'successes', and recap imitates demonstrations",
        ),
        ({"algorithm": "mixed", "mixed": {"imitation": "recap"}}, r"recap"),
    ],
)
def test_settings_of_recap_that_cannot_work_are_refused(template: Path, changes: dict[str, Any], error: str):
    with pytest.raises((ConfigError, KeyError), match=error):
        check(asked(template, **changes))


def test_a_chunk_cannot_be_continued_with_guidance(template: Path):
    options = {"options": {"mode": "rtc"}, "recap": {"guidance": 2.0}}
    with pytest.raises(ConfigError, match="mode=rtc needs a policy that continues a chunk"):
        make_agent(asked(template, **options), spaces(True))
