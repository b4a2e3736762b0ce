"""The best of several chunks: on a problem whose answer is known, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hilt.core.errors import ConfigError, MissingFieldError, SchemaError
from hilt.core.tree import ArraySpec
from hilt.policies.agent.agent import Agent
from hilt.policies.agent.agent_policy import AgentPolicy
from hilt.policies.agent.config import AgentConfig, EncoderConfig
from hilt.policies.base import Policy
from hilt.policies.vla.observation_adapters import SUITES, Suite
from hilt.policies.vla.small_vla import SmallVLA, SmallVLAConfig
from hilt.value.best_of import BestOf, BestOfSettings, ChunkVerifier
from hilt.value.online_value import OnlineValue
from hilt.value.value_config import ValueConfig
from hilt.value.value_episodes import ValueEpisodes
from hilt.value.value_facts import write_estimates
from hilt.value.value_model import ValueModel, load_value_model
from hilt.value.value_training import train_value
from tests.value.chosen import QUICK, RandomChunks, is_right, save_verifier, states, write_choices


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("chosen")
    with ValueEpisodes([write_choices(place / "log", 400)]) as episodes:
        made = train_value(episodes, ValueConfig(**QUICK), place / "verifier")
        assert made is not None
        found = made.metadata["held_out"]["chunks"]
        assert found["loss_of_other_chunks"] > found["loss"] + 0.5, found
        for use in (lambda: write_estimates(made, episodes), lambda: made.check(episodes)):
            with pytest.raises(ConfigError, match="is a value of chunks"):
                use()
        with pytest.raises(ConfigError, match="judges chunks"):
            OnlineValue(made)
    return place


@pytest.fixture(scope="module")
def model(folder: Path) -> ValueModel:
    return load_value_model(folder / "verifier")


def test_the_chunk_that_is_right_is_chosen(model: ValueModel):
    signs, seen = states(300, 1)
    policy = RandomChunks()
    alone, _ = policy.act(seen, generator=torch.Generator().manual_seed(0))
    assert 0.4 < is_right(signs, alone).mean() < 0.6
    best = BestOf(policy, ChunkVerifier(model), count=8)
    chosen, record = best.act(seen, generator=torch.Generator().manual_seed(0))
    # one of eight draws at least has the right sign in all but 1 of 256 states
    assert is_right(signs, chosen).mean() > 0.97
    assert chosen.shape == (300, 2, 1) and (record["drawn"] == chosen[:, 0, 0]).all()
    figures = best.acting_figures()
    assert figures["best_of"] == 8 and figures["plans"] == 300 and figures["gain"] > 0.1
    assert figures["draw_ms"] > 0 and figures["judge_ms"] > 0 and figures["likeliest"] == 0


def test_scores_are_values_of_the_observation_and_the_chunk(model: ValueModel, folder: Path):
    signs, seen = states(5, 2)
    chunks = np.random.default_rng(0).normal(size=(5, 3, 2, 1)).astype(np.float32)
    scores = ChunkVerifier(model).scores(seen, chunks)
    for row in range(5):
        for n in range(3):
            inputs = {
                "state": torch.tensor(signs[row : row + 1, None]),
                "actions": torch.from_numpy(chunks[row, n][None]),
            }
            with torch.no_grad():
                assert scores[row, n] == pytest.approx(float(model.support.value(model.network(inputs))[0]), abs=1e-5)


def test_the_action_of_an_agent_that_is_valued_most_is_executed(model: ValueModel):
    """Of a run with a person: the agent sees the environment's own observations, and the verifier names them."""
    seen = {"state": ArraySpec(np.dtype(np.float32), (1,))}
    settings = AgentConfig(encoder=EncoderConfig(kind="none"), hidden=[16], chunk=2)
    policy = AgentPolicy(Agent.make(seen, ArraySpec(np.dtype(np.float32), (1,)), settings, seed=0))
    best = BestOf(policy, ChunkVerifier(model, "choose"), count=8)
    signs, rows = states(200, 1)
    chosen, _ = best.act(rows, generator=torch.Generator().manual_seed(0))
    alone, _ = policy.act(rows, generator=torch.Generator().manual_seed(0))
    assert is_right(signs, chosen).mean() > 0.95 > 0.85 > is_right(signs, alone).mean()
    drawn, _ = policy.act([row for row in rows for _ in range(8)], generator=torch.Generator().manual_seed(0))
    inputs = {"state": torch.tensor(np.repeat(signs, 8)[:, None]), "actions": torch.from_numpy(drawn)}
    with torch.no_grad():
        values = model.support.value(model.network(inputs)).view(200, 8)
    np.testing.assert_array_equal(chosen, drawn.reshape(200, 8, 2, 1)[np.arange(200), values.argmax(1)])


def test_actions_and_observations_of_a_task_are_named_as_by_its_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    halved = Suite(lambda raw: {"state": raw["place"]["here"]}, taught=lambda actions: np.asarray(actions)[..., :1] / 2)
    monkeypatch.setitem(SUITES, "mine", halved)
    model = load_value_model(save_verifier(tmp_path / "verifier", {}, 1, 2, 1))
    chunks = np.random.default_rng(0).normal(size=(3, 4, 2, 7)).astype(np.float32)
    places = np.arange(3, dtype=np.float32)[:, None]
    ours = ChunkVerifier(model, "mine/reach").scores([{"place": {"here": one}} for one in places], chunks)
    halves, wholes = (
        ChunkVerifier(model).scores([{"state": one} for one in places], chunks[..., :1] * factor) for factor in (0.5, 1)
    )
    np.testing.assert_allclose(ours, halves, atol=1e-6)
    assert np.abs(ours - wholes).max() > 1e-4
    other = RandomChunks()
    other.action_dim = 7
    ChunkVerifier(model, "mine/reach").check(other)
    with pytest.raises(MissingFieldError, match=r"looks at more: .* has no 'there'.* Train one on logs of what"):
        ChunkVerifier(load_value_model(save_verifier(tmp_path / "more", {"state": "there"}, 1, 2, 1)), "mine").scores(
            [{"place": 1}], chunks[:1]
        )
    with pytest.raises(ConfigError, match=r"no suite named 'other:Task'.*'columns=\{full_image: PATH, state: PATH\}'"):
        ChunkVerifier(model, "other:Task")


def test_a_policy_that_has_drawn_differently_may_be_sure_of_a_later_chunk(model: ValueModel):
    policy, (_, seen) = RandomChunks(), states(2, 5)
    best = BestOf(policy, ChunkVerifier(model))
    best.act(seen, sample=False)
    policy.fixed = True
    for _ in range(10):
        assert (best.act(seen, sample=False)[0] == 1).all()


def test_without_sampling_the_likeliest_is_one_of_them(model: ValueModel):
    policy = RandomChunks()
    _, seen = states(4, 3)
    best = BestOf(policy, ChunkVerifier(model), count=3, temperature=0.5)
    chosen, record = best.act(seen, sample=False, generator=torch.Generator().manual_seed(0))
    assert policy.asked == [(8, True, 0.5), (4, False, 0.5)]
    assert (record["drawn"] == chosen[:, 0, 0]).all() and 0 <= best.acting_figures()["likeliest"] < 1
    best.act(seen, sample=True, temperature=2.0, generator=torch.Generator().manual_seed(0))
    assert policy.asked[-1] == (12, True, 2.0)


def test_a_record_is_that_of_the_chunk(model: ValueModel):
    """Of a policy with prompts and tokens: what its record evaluates to is what was chosen."""
    sizes = {"cameras": ("full_image",), "image_size": 16, "state_dim": 1, "action_dim": 1, "chunk": 2, "width": 16}
    policy = SmallVLA(SmallVLAConfig(**sizes, depth=1, heads=2, keypoints=2, decode="likeliest"), seed=0).eval()
    seen = [{**row, "full_image": np.zeros((16, 16, 3), np.uint8)} for row in states(6, 4)[1]]
    best = BestOf(policy, ChunkVerifier(model), count=4)
    chosen, record = best.act(seen, sample=False, generator=torch.Generator().manual_seed(0))
    np.testing.assert_allclose(chosen, record["tokens"].reshape(6, 2, 1) / 6 - 1, atol=1e-5)
    with torch.no_grad():
        np.testing.assert_allclose(policy.evaluate(record).log_prob, record["log_prob"], atol=1e-5)
    fields = best.observed_fields()
    assert fields is not None and fields.cameras == ("full_image",) and not best.takes_prefix
    for call in (lambda: best.evaluate(record), lambda: best.supervised_loss(seen, chosen, chosen[..., 0] > 9)):
        with pytest.raises(ConfigError, match="is for acting"):
            call()


def test_what_cannot_be_chosen_is_refused(model: ValueModel, blind_model: ValueModel, folder: Path):
    with pytest.raises(ConfigError, match=r"is a value of observations: all chunks .* hilt train value DATA actions=5"):
        ChunkVerifier(blind_model)
    verifier, (_, seen) = ChunkVerifier(model), states(2, 5)
    fixed = BestOf(RandomChunks(fixed=True), verifier)
    for _ in range(4):
        fixed.act(seen, sample=False)
    with pytest.raises(ConfigError, match=r"7 draws of this RandomChunks are all the same: it cannot sample"):
        fixed.act(seen, sample=False)

    class OneAnswer(RandomChunks):
        def act(self, *given: object, **named: object) -> object:  # type: ignore[override]
            raise ConfigError("the L1 head gives one action and draws none.")

    with pytest.raises(ConfigError, match="needs a policy that can sample: the L1 head"):
        BestOf(OneAnswer(), verifier).act(seen)
    other: Policy = RandomChunks()
    other.action_dim = 7
    with pytest.raises(ConfigError, match="judges actions of 1 numbers, and the policy gives 7"):
        BestOf(other, verifier)
    other.action_dim, other.chunk = 1, 1
    with pytest.raises(
        ConfigError, match=r"looks at 2 actions, and the policy answers with 1\. Train one with actions=1"
    ):
        BestOf(other, verifier)
    best = BestOf(RandomChunks(), verifier)
    with pytest.raises(MissingFieldError, match="has no 'state', which the verifier"):
        best.act([{"instruction": "choose"}])
    with pytest.raises(SchemaError, match=r"has 2 numbers, and the verifier .* looks at 1"):
        best.act([{"state": np.zeros(2, np.float32), "instruction": "choose"}])
    with pytest.raises(ConfigError, match="what chooses"):
        BestOfSettings(8).wrap(RandomChunks())
    with pytest.raises(ConfigError, match="count"):
        BestOfSettings(1, str(folder / "verifier")).check()
    assert BestOfSettings(4, str(folder / "verifier")).wrap(RandomChunks()).count == 4


def test_features_of_a_policy_are_looked_at_and_other_weights_are_refused(tmp_path: Path):
    sizes = {"cameras": ("full_image",), "image_size": 16, "state_dim": 2, "action_dim": 2, "chunk": 3, "width": 16}
    from tests.value.valued import write_log

    SmallVLA(SmallVLAConfig(**sizes, depth=1, heads=2, keypoints=2), seed=0).save_pretrained(tmp_path / "policy")
    columns = {"full_image": "images/front", "state": "state"}
    config = ValueConfig(policy=str(tmp_path / "policy"), columns=columns, actions=3, hidden=16, steps=10)
    with ValueEpisodes([write_log(tmp_path / "log", 16)]) as episodes:
        made = train_value(episodes, replace(config, evaluate_every=5, batch_size=16), tmp_path / "value")
        assert made is not None and made.metadata["features"]["width"] == 16
    policy = SmallVLA(SmallVLAConfig(**sizes, depth=1, heads=2, keypoints=2), seed=5).eval()  # any other one
    best = BestOf(policy, ChunkVerifier(load_value_model(tmp_path / "value")), 4)
    seen = {"full_image": np.zeros((16, 16, 3), np.uint8), "state": np.zeros(2, np.float32), "instruction": "lift it"}
    actions, _ = best.act([seen, seen], sample=False, generator=torch.Generator().manual_seed(0))
    assert actions.shape == (2, 3, 2)
    with ValueEpisodes([tmp_path / "log"]) as episodes:  # of a model with pictures, in other sizes, or in stacks
        seeing = ValueConfig(columns=columns, actions=3, features=8, hidden=16, steps=2, evaluate_every=2)
        pictured = train_value(episodes, seeing, tmp_path / "seeing")
    assert pictured is not None
    verifier, chunk = ChunkVerifier(pictured), np.zeros((1, 1, 3, 2), np.float32)
    frames = np.random.default_rng(0).integers(0, 255, (2, 16, 16, 3), np.uint8)
    stacked = verifier.scores([{**seen, "full_image": frames}], chunk)
    np.testing.assert_array_equal(stacked, verifier.scores([{**seen, "full_image": frames[1]}], chunk))
    assert stacked != verifier.scores([{**seen, "full_image": frames[0]}], chunk)
    with pytest.raises(SchemaError, match=r"full_image of observation 0 has 8 x 16 pixels, and .* looks at 16 x 16"):
        verifier.scores([{**seen, "full_image": frames[0, :8]}], chunk)
    with pytest.raises(MissingFieldError, match="has no 'full_image', which the verifier"):
        verifier.scores([{"state": seen["state"]}], chunk)
    policy.save_pretrained(tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").replace(tmp_path / "policy" / "model.safetensors")
    with pytest.raises(ConfigError, match="its weights have the hash"):
        BestOfSettings(4, str(tmp_path / "value")).wrap(policy)
