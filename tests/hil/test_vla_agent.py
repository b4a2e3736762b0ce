"""A vision-language-action policy in a run with a person: chunks and take-overs, imitation, weights, and what is
refused."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from hilt.cli.servers.serve_policy import find_policy
from hilt.core.errors import ConfigError
from hilt.core.trajectory import Source
from hilt.hil import learner as learner_module
from hilt.hil.actor import act
from hilt.hil.config import HelpRequests, Hil
from hilt.hil.environment import make_env
from hilt.hil.evaluate import evaluate, load_agent
from hilt.hil.launch import begin_run
from hilt.hil.learner import Learner
from hilt.hil.make_agent import make_agent
from hilt.hil.vla_agent import BASE
from hilt.observe.metrics import read_metrics
from hilt.policies.act.act_config import ACTConfig
from hilt.policies.act.act_policy import ACT
from hilt.policies.base import rejoin
from hilt.policies.conditioned import ConditionedPolicy, guided_more
from hilt.policies.vla.small_vla import SmallVLA, SmallVLAConfig
from hilt.recording.record import Settings
from hilt.recording.script import record_with_script
from hilt.replay import Log
from hilt.serving import PolicyServer
from hilt.serving.policy_server import ServerAccess
from hilt.value.best_of import BestOfSettings
from tests.value.chosen import save_verifier
from tests.value.valued import save_untrained

TASKS = "tabletop/press_red+tabletop/press_blue"
OPTIONS = {"image_size": 16, "cameras": ["wrist"], "control_hz": 5, "step_limit": 9}
SIZES = {"cameras": ["wrist_image"], "image_size": 16, "state_dim": 1, "action_dim": 3, "chunk": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("policy") / "small"
    SmallVLA(SmallVLAConfig.from_json({**SIZES, "width": 32, "depth": 1, "keypoints": 2}), seed=0).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def shown(tmp_path_factory) -> Path:
    """One demonstration of each of the two tasks."""
    path = tmp_path_factory.mktemp("shown")
    wanted = Settings(TASKS, OPTIONS, 2, seed=0)
    record_with_script(wanted, path, lambda: make_env(Hil(task=TASKS, task_options=OPTIONS), operator=False), {})
    return path / "log"


def config(folder: Path, **changes) -> Hil:
    made = Hil(task=TASKS, task_options=dict(OPTIONS), algorithm="hg-dagger", batch_size=8, seed=1)
    made.agent.kind, made.agent.options = "vla", {"policy": str(folder), **changes.pop("options", {})}
    for name, value in changes.items():
        setattr(made, name, value)
    return made


@pytest.fixture(scope="module")
def env(folder: Path):
    made = make_env(config(folder), operator=False)
    yield made
    made.close()


def begun(folder: Path, env, **options):
    agent = make_agent(config(folder, options=options), env)
    observation, _ = env.reset(seed=0, options={"split": "train", "state": 1})
    agent.begin(env.get_wrapper_attr("instruction"))
    return agent, observation


def test_actions_of_a_chunk_one_by_one_and_dropped_when_a_person_takes_over(folder: Path, env):
    agent, observation = begun(folder, env)
    planned = []
    act_once = agent.policy.act
    agent.policy.act = lambda rows, **named: planned.append(rows[0]["instruction"]) or act_once(rows, **named)
    noted, versions, records, shown, agent.version = [], [], [], [], 5
    for source in [Source.POLICY] + [Source.HUMAN] * 2 + [Source.POLICY] * 5:
        action = agent.sample_actions(observation)
        assert action.shape == (7,) and np.isfinite(action).all()
        shown.append((plan := agent.planned()) and (plan.number, plan.done, plan.actions.shape))
        given = agent.acted(source, action)
        noted.append((int(given["chunk"]), int(given["chunk_index"])))
        agent.version += 1  # newer weights come while a chunk is executed
        versions.append(int(given.get("policy_version", -1)))
        records.append((int(given["decided"]), given["record"]))
    # one of a chunk, two by the person; one in which the policy holds, since they might go on; then it plans anew
    assert noted == [(0, 0), (-1, -1), (-1, -1), (-1, -1), (1, 0), (1, 1), (1, 2), (2, 0)]
    assert versions == [5, -1, -1, -1, 9, 9, 9, 12]  # those with which each chunk was planned
    assert planned == ["press the blue button and no other"] * 3
    # what a person sees of it: nothing while they act, or while the policy waits for them
    assert shown == [
        (0, 1, (3, 7)),
        (0, 2, (3, 7)),
        None,
        None,
        *((1, done, (3, 7)) for done in (1, 2, 3)),
        (2, 1, (3, 7)),
    ]
    assert agent.metrics()["chunks/dropped"] == 1
    # the record of each chunk is in its first step, and is whole again with the observation
    assert [decided for decided, _ in records] == [0, -1, -1, -1, 0, -1, -1, 0]
    assert all(not np.any(array) for decided, record in records if decided < 0 for array in record.values())
    columns = agent.step_columns()["record"]
    for decided, record in records:
        assert {name: (spec.dtype, spec.shape) for name, spec in columns.items()} == {
            name: (np.asarray(array).dtype, np.shape(array)) for name, array in record.items()
        }
        if decided == 0:
            seen = agent._suite.observe(observation, agent._instruction)
            whole = rejoin(agent.policy, [seen], {name: np.asarray(array)[None] for name, array in record.items()})
            found = agent.policy.evaluate(whole).log_prob.detach().numpy()[0]
            np.testing.assert_allclose(found, record["log_prob"], atol=1e-5)
            assert np.abs(record["log_prob"]).max() > 0
    agent.close()


def test_disagreement_is_the_spread_of_chunks_that_are_drawn_beside_each_plan(folder: Path, env):
    """help.samples of them, which change no action, and nothing is drawn in an evaluation."""
    plain, observation = begun(folder, env)
    made = config(folder)
    made.help = HelpRequests(quantile=0.9, samples=3)
    agent = make_agent(made, env)
    agent.begin(env.get_wrapper_attr("instruction"))
    asked, act_once = [], agent.policy.act
    agent.policy.act = lambda rows, **named: asked.append(len(rows)) or act_once(rows, **named)
    found = []
    for _ in range(5):
        action = agent.sample_actions(observation)
        assert np.array_equal(action, plain.sample_actions(observation)) and plain.disagreement is None
        found.append(agent.disagreement)
        for one in (agent, plain):
            one.acted(Source.POLICY, action)
    assert asked == [1, 3, 1, 3] and [one is None for one in found] == [False, True, True, False, True]
    draws = torch.Generator().manual_seed(made.seed)
    row = agent._suite.observe(observation, agent._instruction)
    for value in (None, found[0], found[3]):  # the first is drawn when the policy is looked at
        seen = agent._suite.observe(agent._empty, "-") if value is None else row
        drawn = np.float64(act_once([seen] * 3, sample=True, generator=draws)[0])
        assert value is None or value == pytest.approx(np.sqrt(drawn.var(0, ddof=1).mean()), rel=1e-5)
    agent._executor.reset()
    agent.sample_actions(observation, argmax=True)
    assert agent.disagreement is None and asked[4:] == [1], "nobody is asked in an evaluation"
    for one in (agent, plain):
        one.close()


def test_one_of_several_chunks_is_chosen(folder: Path, env, tmp_path: Path):
    agent, observation = begun(folder, env)
    verifier = save_verifier(tmp_path / "verifier", {"state": "state"}, 1, 3, 3)
    agent.choose_by(BestOfSettings(4, str(verifier)).wrap)
    agent.begin(env.get_wrapper_attr("instruction"))
    assert agent.sample_actions(observation, seed=0, argmax=True).shape == (7,)
    assert agent.execution()["best_of"] == 4 and agent.execution()["plans"] == 2  # one of them to see that it fits
    agent.close()


def batch_of(shown: Path) -> tuple[dict, dict]:
    """Eight steps of a log, and a batch for imitation made of them."""
    with Log.open(shown, "r") as log:
        read = log.read(log.all().keys()[:8])
    return read, {
        "observations": read["observations"],
        "actions": np.repeat(read["actions"][:, None], 3, 1),
        "mask": np.ones((8, 3), bool),
        "task": np.arange(8) % 2,
    }


def test_imitation_lowers_the_loss_and_goes_on_bit_for_bit(folder: Path, env, shown: Path):
    agent = make_agent(config(folder, options={"learning_rate": 3e-3}), env)
    read, batch = batch_of(shown)
    losses = [agent.imitate(batch)["imitation/loss"] for _ in range(30)]
    assert losses[-1] < 0.7 * losses[0] and agent.imitations == 30
    saved = agent.state_dict()
    other = make_agent(config(folder, options={"learning_rate": 3e-3}), env)
    other.load_state_dict(saved)
    first, second = (each.imitate(batch) for each in (agent, other))
    assert first == second and other.imitations == 31
    assert all(torch.equal(a, b) for a, b in zip(agent.policy.parameters(), other.policy.parameters(), strict=True))
    # the words of a batch count: the same picture, another task
    one, two = (agent.policy.supervised_loss(
        [{"wrist_image": read["observations"]["images"]["wrist"][0], "state": np.zeros(1, np.float32),
          "instruction": text}], np.zeros((1, 3, 3), np.float32), np.ones((1, 3), bool))[0].item()
        for text in agent.instructions)  # fmt: skip
    assert one != two


def test_the_health_of_a_policy_of_chunks_and_that_looking_changes_nothing(folder: Path, env, shown: Path):
    one, other = (make_agent(config(folder, options={"learning_rate": 3e-3, "average": 0.1}), env) for _ in range(2))
    _, batch = batch_of(shown)
    assert one.imitate(batch) == other.imitate(batch)
    first, average = one.health(batch), one.acting_state()
    assert set(first) == {"effective_rank", "dead_relus"} and first["effective_rank"] >= 1
    assert 0 <= first["dead_relus"] < 0.5
    assert one.health(batch)["policy_kl"] == pytest.approx(0, abs=1e-5)
    for _ in range(3):
        assert one.imitate(batch) == other.imitate(batch)
    assert abs(one.health(batch)["policy_kl"]) > 1e-4, "it looks at the weights that learn"
    assert set(one.health(batch)) == {"effective_rank", "dead_relus", "policy_kl", "entropy"}
    assert all(np.array_equal(value, other.acting_state()[name]) for name, value in one.acting_state().items())
    assert not all(np.array_equal(value, average[name]) for name, value in one.acting_state().items())
    assert not one.lacking
    one.policy._compiles = lambda: True  # type: ignore[assignment]
    assert one.health(batch) == {} and set(one.lacking) == {"effective_rank", "dead_relus", "policy_kl"}


def test_gradient_that_is_suddenly_larger_moves_weights_by_one_learning_rate_at_most(folder: Path, env, shown: Path):
    """A policy that has learned has small gradients, until a person corrects it."""
    agent = make_agent(config(folder, options={"learning_rate": 1e-3}), env)
    agent.imitate(batch_of(shown)[1])
    adam = agent._adam
    for _ in range(200):
        adam.step([torch.full_like(weight, 1e-3) for weight in adam.parameters])
    before = [weight.detach().clone() for weight in adam.parameters]
    adam.step([torch.full_like(weight, 0.5) for weight in adam.parameters])
    moved = max(float((weight - old).abs().max()) for weight, old in zip(adam.parameters, before, strict=True))
    assert 0 < moved < 1.05e-3


def test_learning_rate_falls_to_a_half_after_that_number_of_updates_and_goes_on_when_resumed(folder, env, shown: Path):
    _, batch = batch_of(shown)
    options = {"learning_rate": 1e-3, "halved_after": 4}
    agent = make_agent(config(folder, options=options), env)
    rates = []
    for _ in range(6):
        agent.imitate(batch)
        rates.append(agent._adam.learning_rate)
    assert np.allclose(rates, 1e-3 / np.sqrt(1 + 3 * np.arange(6) / 4)) and np.isclose(rates[4], 5e-4)
    resumed = make_agent(config(folder, options=options), env)
    resumed.load_state_dict(agent.state_dict())
    assert resumed.imitate(batch) == agent.imitate(batch) and resumed._adam.learning_rate == agent._adam.learning_rate
    assert all(torch.equal(a, b) for a, b in zip(agent.policy.parameters(), resumed.policy.parameters(), strict=True))
    constant = make_agent(config(folder, options={"learning_rate": 1e-3}), env)
    constant.imitate(batch)
    constant.imitate(batch)
    assert constant._adam.learning_rate == 1e-3


def test_a_moving_average_acts_while_the_newest_weights_learn(folder: Path, env, shown: Path):
    _, batch = batch_of(shown)
    plain, slow = (make_agent(config(folder, options={"average": share}), env) for share in (0.0, 0.25))
    begun_with = plain.acting_state()
    for _ in range(2):
        assert plain.imitate(batch) == slow.imitate(batch), "the same weights learn"
    resumed = make_agent(config(folder, options={"average": 0.25}), env)
    resumed.load_state_dict(slow.state_dict())
    expected = {name: torch.from_numpy(value) for name, value in begun_with.items()}
    other = make_agent(config(folder, options={"average": 0.0}), env)
    for _ in range(3):
        other.imitate(batch)
        for name, newest in other.acting_state().items():
            expected[name] = torch.lerp(expected[name], torch.from_numpy(newest), 0.25)
    for agent in (slow, resumed):
        agent.imitate(batch)
        for name, value in agent.acting_state().items():
            assert torch.allclose(torch.from_numpy(value), expected[name], atol=1e-7), name
    assert all(np.array_equal(resumed.acting_state()[name], value) for name, value in slow.acting_state().items())
    agent = make_agent(config(folder, options={"average": 0.25, "policy_options": {"precision": "float32"}}), env)
    agent.policy.to(torch.bfloat16)
    with pytest.raises(ConfigError, match=r"agent\.options\.average needs weights in float32"):
        agent.imitate(batch)


def test_adapters_alone_are_sent_and_those_of_another_policy_are_refused(folder: Path, env, tmp_path: Path):
    whole, small = (make_agent(config(folder, options=options), env) for options in ({}, {"lora_rank": 2}))
    sent = small.acting_state()
    assert {name for name in sent if ".lora_" not in name and name != BASE} <= {n for n in whole.acting_state()}
    assert sum(a.size for a in sent.values()) < 0.5 * sum(a.size for a in whole.acting_state().values())
    small.load_acting_state(sent)
    SmallVLA(SmallVLAConfig.from_json({**SIZES, "width": 32, "depth": 1, "keypoints": 2}), seed=1).save_pretrained(
        tmp_path / "other"
    )
    other = make_agent(config(tmp_path / "other", options={"lora_rank": 2}), env)
    with pytest.raises(ConfigError, match=r"weights for another policy than the one in .*other"):
        other.load_acting_state(sent)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"algorithm": "rlpd"}, "agent.kind=vla learns by imitation: give algorithm=hg-dagger"),
        ({"options": {"policy": "small_vla"}}, "policy is 'small_vla'; expected the folder of a policy that has"),
        ({"options": {"mode": "quick"}}, "quick"),
        ({"options": {"ensemble_decay": 0.2}}, "ensemble_decay=0.2 would do nothing: it needs agent.options.mode=ens"),
        (
            {"options": {"mode": "ensemble", "server": "ws://127.0.0.1:1"}},
            "while the server is lost, earlier chunks would go on",
        ),
        (
            {"options": {"policy_options": {"rollout_precision": "fp8_emulated"}}},
            "policy_options.rollout_precision: with a person nothing corrects for another precision of acting",
        ),
        ({"options": {"server": "http://arm"}}, "server is 'http://arm'; expected ws://HOST:PORT"),
        ({"options": {"mode": "rtc"}}, "mode=rtc needs a policy that continues a chunk"),
        (
            {"options": {"suite": "tabletop/pick"}},
            r"small does not fit the task: the state of observation 0 is \[10\]; expected is \[1\]",
        ),
    ],
)
def test_what_cannot_work_is_refused(folder: Path, env, changes, error):
    with pytest.raises((ConfigError, KeyError), match=error):
        make_agent(config(folder, **changes), env)


def test_act_is_taught_by_a_person_and_executes_the_mean_of_its_chunks(env, shown: Path, tmp_path: Path):
    sizes = {**SIZES, "width": 32, "depth": 1, "keypoints": 2, "latent": 4}
    ACT(ACTConfig.from_json(sizes), seed=0).save_pretrained(tmp_path / "act")
    agent, observation = begun(tmp_path / "act", env, mode="ensemble", ensemble_decay=0.5, learning_rate=3e-3)
    plans, act_once = [], agent.policy.act
    agent.policy.act = lambda rows, **named: plans.append(act_once(rows, **named)) or plans[-1]
    actions = [agent.sample_actions({**observation, "state": moved(observation, n)}) for n in range(3)]
    chunks = [answer[0] for answer, _ in plans]
    weights = np.exp([0.0, -0.5, -1.0])
    mean = sum(weight * chunk[2 - n] for n, (weight, chunk) in enumerate(zip(weights, chunks, strict=True)))
    np.testing.assert_allclose(actions[2], agent._command(mean / weights.sum()), atol=1e-6)
    noted = agent.acted(Source.POLICY, actions[2])
    assert noted["record"]["style"].shape == (4,) and int(noted["chunk"]) == 2
    agent.close()
    _, batch = batch_of(shown)
    losses = [agent.imitate(batch)["imitation/l1"] for _ in range(20)]
    assert losses[-1] < 0.8 * losses[0]


def moved(observation, number: int) -> dict[str, object]:
    """The state of an observation after a step, so that plans differ."""
    return {name: np.asarray(each) + 0.1 * number for name, each in observation["state"].items()}


@pytest.mark.parametrize("max_delay", [0, 2])
def test_real_time_chunking_by_a_guided_and_by_a_trained_flow(env, tmp_path: Path, max_delay: int):
    sizes = {**SIZES, "width": 32, "depth": 1, "keypoints": 2, "head": "flow", "max_delay": max_delay}
    SmallVLA(SmallVLAConfig.from_json(sizes), seed=0).save_pretrained(tmp_path / "flow")
    agent, observation = begun(tmp_path / "flow", env, mode="rtc", execute=1)
    given, act_once = [], agent.policy.act
    agent.policy.act = lambda rows, **named: given.append(named.get("prefix")) or act_once(rows, **named)
    actions = [agent.sample_actions(observation) for _ in range(4)]
    assert np.isfinite(actions).all() and given[0] is None and given[1].actions.shape == (1, 2, 3)
    agent.close()
    if max_delay:
        agent, observation = begun(tmp_path / "flow", env, mode="rtc", execute=1, sample=True)
        assert np.isfinite([agent.sample_actions(observation) for _ in range(4)]).all()
        agent.close()
    else:
        with pytest.raises(ConfigError, match=r"mode=rtc with sample=true needs a policy .* give sample=false"):
            begun(tmp_path / "flow", env, mode="rtc", sample=True)


def test_a_whole_run_with_take_overs_in_the_middle_of_chunks(
    folder: Path, shown: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A real learner and a real actor, two tasks by turns, and a script that takes over in the second half."""
    monkeypatch.setattr(learner_module, "LOOK_RECORDS", 5)
    run, shares = tmp_path / "run", {"demonstrations": 1.0, "human": 2.0, "successes": 1.0}
    settings = {"algorithm": "filtered", "view_shares": shares, "demo_path": [str(shown)], "operator": "script"}
    settings |= {
        "max_env_steps": 72,
        "steps_per_update": 2,
        "log_period": 1,
        "max_ahead": 40,
        "checkpoint_period": 1000,
    }
    asked = config(folder, **settings)
    asked.wire.port = asked.wire.broadcast_port = 0
    frozen = begin_run(run, "vla", asked)
    learner = Learner(frozen, run)
    with ThreadPoolExecutor(1) as pool:
        learning = pool.submit(learner.run)
        acted = act(frozen, run / "actors" / "actor-1", stop=learning.done)
        summary = learning.result(300)
    assert (acted.steps, summary.reason) == (72, "max_env_steps")
    with Log.open(run / "log", "r") as log:
        names = ["source", "chunk", "chunk_index", "task", "policy_version", "decided", "record"]
        read = log.read(log.all().keys(), names)
        facts = [log.facts.about(number) for number in log.trajectories()]
    human = read["source"] == Source.HUMAN
    assert human.any() and (~human).any() and (read["chunk"][human] == -1).all()
    held = ~human & (read["chunk"] < 0)  # the step in which the person lets go
    assert (read["chunk_index"][~human & ~held] % 3 >= 0).all() and held.sum() < human.sum()
    decided = read["decided"] >= 0
    assert (decided == (read["chunk_index"] == 0)).all(), "each chunk begins with the record of its decision"
    assert (np.abs(read["record"]["log_prob"]).max((1, 2)) > 0).tolist() == decided.tolist()
    assert (read["policy_version"][~human] >= 1_000_000).all() and set(read["task"]) == {0, 1}
    ended = [about for about in facts if "task" in about]
    assert {about["task"] for about in ended} == set(TASKS.split("+"))
    assert all(about["task"].rpartition("_")[2] in about["language_instruction"] for about in ended)
    updates = [record for record in read_metrics(run, ["update"]) if "share/human" in record]
    assert updates and all(record["imitation/loss"] > 0 for record in updates)
    looks = [record for record in updates if "effective_rank" in record]
    assert looks and all(record["update"] % 5 == 0 and record["dead_relus"] < 0.9 for record in looks)
    assert all("policy_kl" in record for record in looks[1:])
    whole = [record for record in updates if record["share/human"] and record["share/successes"]]
    assert all((r["share/demonstrations"], r["share/human"]) == (0.25, 0.5) for r in whole)
    result = evaluate(frozen, load_agent(run), "test", range(4))
    assert [outcome.error for outcome in result.outcomes] == [""] * 4
    served = find_policy(str(run), "", "", {})
    assert (served.version, served.newest()) == (summary.update,) * 2
    weights = served.load(served.version)
    assert all(torch.equal(weights[name], p) for name, p in served.policy.named_parameters())


def test_a_whole_run_of_recap_values_what_arrives_and_is_served_with_its_condition(
    folder: Path, shown: Path, env, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A real learner and a real actor: episodes are valued while the run goes on."""
    monkeypatch.setattr("hilt.hil.actor.TELL_S", 0.0)  # an episode is valued once the actor has reported its outcome
    run, (name, space) = tmp_path / "run", next(iter(env.observation_space["state"].items()))
    state = {f"observations/state/{name}": int(np.prod(space.shape))}
    model = save_untrained(tmp_path / "value", state, tuple(TASKS.split("+")))
    settings = {"algorithm": "recap", "demo_path": [str(shown)], "operator": "script", "max_env_steps": 90}
    asked = config(folder, **settings, steps_per_update=2, log_period=1, max_ahead=10, checkpoint_period=1000)
    asked.recap.model, asked.recap.guidance, asked.recap.threshold = str(model), 1.5, 0.5
    asked.wire.port = asked.wire.broadcast_port = 0
    frozen = begin_run(run, "vla", asked)
    learner = Learner(frozen, run)
    with ThreadPoolExecutor(1) as pool:
        learning = pool.submit(learner.run)
        act(frozen, run / "actors" / "actor-1", stop=learning.done)
        summary = learning.result(300)
    with Log.open(run / "log", "r") as log:
        facts = [log.facts.about(number) for number in log.trajectories()]
    valued = [about for about in facts if "task" in about]
    assert valued and all(len(about["estimates"]["advantage"]) for about in valued)
    updates = [record for record in read_metrics(run, ["update"]) if "share/good" in record]
    assert any(record["share/policy"] > 0 for record in updates)
    before_the_last_update = updates[-1]["valued_episodes"]  # the run may end with episodes that have just arrived
    assert 1 <= before_the_last_update <= len(valued)
    assert min(record["share/good"] for record in updates) < 1
    served = find_policy(str(run), "", "", {})
    assert isinstance(served.policy, ConditionedPolicy) and served.policy.guidance == 1.5
    assert served.version == summary.update
    agent = load_agent(run)
    agent.choose_by(lambda policy: guided_more(policy, 3.0))
    assert [outcome.error for outcome in evaluate(frozen, agent, "test", range(2)).outcomes] == [""] * 2


def test_an_actor_asks_a_policy_server_and_holds_while_it_is_gone(folder: Path, env, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hilt.hil.vla_agent.SERVER_TIMEOUT_S", 60.0)  # the machine may be busy
    policy = SmallVLA.from_pretrained(folder).eval()
    local, observation = begun(folder, env)
    with PolicyServer(policy, version=7, access=ServerAccess(port=0)) as server:
        agent, _ = begun(folder, env, server=server.url)
        port = int(server.url.rpartition(":")[2])
        for _ in range(4):
            np.testing.assert_allclose(agent.sample_actions(observation), local.sample_actions(observation), atol=1e-5)
            noted = agent.acted(Source.POLICY, None)
        assert (int(noted["chunk"]), int(noted["policy_version"])) == (1, 7)
        assert "record" not in noted and agent.step_columns() == {}, "a server sends none"
        assert "policy" not in agent.__dict__  # the weights stay where the server is
        agent.load_acting_state({"of the learner": np.zeros(1)})  # which does not matter here
    agent.acted(Source.HUMAN, None)
    agent.acted(Source.POLICY, None)
    monkeypatch.setattr(agent._remote._link, "timeout_s", 0.3)
    assert agent.sample_actions(observation).tolist() == [0, 0, 0, 0, 0, 0, -1]  # no server: it holds, fingers closed
    assert int(agent.acted(Source.POLICY, None)["chunk"]) == -1 and agent.metrics()["server_absent"] == 1
    monkeypatch.undo()
    monkeypatch.setattr(agent._remote._link, "timeout_s", 60.0)
    with PolicyServer(policy, version=9, access=ServerAccess(port=port)):
        assert np.abs(agent.sample_actions(observation)[:3]).max() > 0
        assert int(agent.acted(Source.POLICY, None)["policy_version"]) == 9
        agent.close()
    local.close()
