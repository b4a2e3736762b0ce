"""Log-probabilities of flows: against closed forms, against Flow-GRPO's formula, and of draws against evaluations."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from hilt.core.errors import ConfigError, UnknownNameError
from hilt.policies.vla import flow
from hilt.policies.vla.flow import Flow, FlowStep

ROWS, SHAPE = 64, (64, 3, 2)
FLOWS = [Flow(kind, steps=5, joint=joint) for kind in flow.KINDS for joint in (False, True)]
WEIGHTS = torch.linspace(-0.5, 0.6, 6, dtype=torch.float64)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def field_of(weights: Tensor, noisy: bool = True) -> flow.Field:
    """A field that depends on all it is given, row by row, with a standard deviation and a value."""

    def field(x: Tensor, times: Tensor) -> FlowStep:
        a, b, c, d, e, f = weights.to(x.dtype)
        t = times[:, None, None]
        raw = torch.tanh(d * x + e * t)
        return FlowStep(
            a * x + b * t + c * x * t, flow.bounded_std(raw, Flow()) if noisy else None, (f * x).mean((1, 2)) + times
        )

    return field


@pytest.mark.parametrize("how", FLOWS, ids=lambda f: f"{f.kind}-{f.drawn}")
def test_a_draw_and_its_evaluation_agree_to_the_last_bit(how: Flow) -> None:
    heat = torch.linspace(0.5, 1.5, ROWS)
    drawn = flow.draw(field_of(WEIGHTS), SHAPE, how, heat, generator())
    again = flow.evaluate(field_of(WEIGHTS), drawn.chain, drawn.step, how, heat)
    assert drawn.value is not None and again.value is not None
    assert torch.equal(drawn.log_prob, again.log_prob) and torch.equal(drawn.value, again.value)
    assert drawn.chain.shape == (ROWS, how.drawn + 1, 3, 2) and drawn.log_prob.shape == SHAPE
    assert drawn.log_prob.abs().min() > 0
    # other weights, another temperature: the log-probability of what was drawn is another one
    assert not torch.equal(
        flow.evaluate(field_of(WEIGHTS * 1.1), drawn.chain, drawn.step, how, heat).log_prob, drawn.log_prob
    )
    assert not torch.equal(
        flow.evaluate(field_of(WEIGHTS), drawn.chain, drawn.step, how, heat * 1.1).log_prob, drawn.log_prob
    )


@pytest.mark.parametrize("how", FLOWS, ids=lambda f: f"{f.kind}-{f.drawn}")
def test_gradients_equal_finite_differences(how: Flow) -> None:
    heat = torch.full((4,), 0.9, dtype=torch.float64)
    drawn = flow.draw(field_of(WEIGHTS), (4, 3, 2), how, heat.float(), generator())
    chain = drawn.chain.double()

    def sums(weights: Tensor) -> tuple[Tensor, ...]:
        found = flow.evaluate(field_of(weights), chain, drawn.step, how, heat)
        assert found.value is not None
        return found.log_prob.sum(), found.value.sum(), *([found.entropy.sum()] if how.kind == "noise" else [])

    assert torch.autograd.gradcheck(sums, WEIGHTS.clone().requires_grad_())


def test_flow_sde_is_flow_grpos_formula() -> None:
    """As Flow-GRPO writes it, with times that are not even, at each of the steps; sigma is its table of times."""
    how = Flow("sde", steps=8, level=0.7, shift=3.0)
    times = flow.schedule(how, WEIGHTS)
    x, v, after = torch.randn((3, 8, 5), generator=generator(), dtype=torch.float64)
    sigma, dt = times[:8, None], (times[1:] - times[:-1])[:, None]
    spread = 0.7 * torch.sqrt(sigma / (1 - torch.where(sigma == 1, times[1], sigma)))
    mean = x * (1 + spread**2 / (2 * sigma) * dt) + v * (1 + spread**2 * (1 - sigma) / (2 * sigma)) * dt
    std = spread * torch.sqrt(-dt)
    log_prob = -((after - mean) ** 2) / (2 * std**2) - torch.log(std) - math.log(math.sqrt(2 * math.pi))

    ours, width = flow.transition(x, FlowStep(v), torch.arange(8), how, torch.ones(8, dtype=torch.float64))
    torch.testing.assert_close(ours, mean, rtol=0, atol=1e-12)
    torch.testing.assert_close(width, std, rtol=0, atol=1e-12)
    torch.testing.assert_close(flow.gaussian_log_prob(after, ours, width), log_prob, rtol=0, atol=1e-9)


def test_the_noise_of_flow_sde_leaves_the_distribution_as_it_is() -> None:
    """Actions N(0.4, 0.3^2): the best field is linear, so mean and variance can be
    followed through every drawn step."""
    how = Flow("sde", steps=400, level=0.5, joint=True)
    times, goal, spread = flow.schedule(how, WEIGHTS), 0.4, 0.3
    mean, variance, two = (
        torch.zeros(()).double(),
        torch.ones(()).double(),
        torch.tensor([[0.0], [1.0]], dtype=torch.float64),
    )
    for i in range(400):
        t = times[i]
        slope = (t - (1 - t) * spread**2) / (t**2 + (1 - t) ** 2 * spread**2)
        velocity = -goal + slope * (two - (1 - t) * goal)  # of noise - action, given x
        (b,), (sum_,) = (made := flow.transition(two, FlowStep(velocity), torch.tensor([i, i]), how, torch.ones(2)))[0]
        mean, variance = b + (sum_ - b) * mean, (sum_ - b) ** 2 * variance + made[1][0, 0].double() ** 2
    assert abs(float(mean) - goal) < 0.01 and abs(float(variance.sqrt()) - spread) < 0.01


@pytest.mark.parametrize("kind", flow.KINDS)
def test_flow_samples_have_their_distribution(kind: str) -> None:
    how = Flow(kind, steps=4, joint=True)
    drawn = flow.draw(field_of(WEIGHTS), (4000, 1, 1), how, torch.ones(4000), generator())
    for i in range(3):
        said = field_of(WEIGHTS)(drawn.chain[:, i], flow.schedule(how, drawn.chain)[i].expand(4000))
        mean, std = flow.transition(drawn.chain[:, i], said, torch.full((4000,), i), how, torch.ones(4000))
        scores = (drawn.chain[:, i + 1] - mean) / std
        assert abs(float(scores.mean())) < 4 / math.sqrt(4000) and abs(float(scores.std()) - 1) < 4 / math.sqrt(8000)


def test_the_joint_log_probability_is_the_mean_over_the_noise_and_the_steps() -> None:
    how, heat = Flow("noise", steps=3), torch.full((2,), 0.5)
    drawn = flow.draw(field_of(WEIGHTS), (2, 1, 1), how, heat, generator())
    start = torch.distributions.Normal(0.0, 1.0)
    terms, entropies = [start.log_prob(drawn.chain[:, 0])], [start.entropy()]
    for i in range(3):
        said = field_of(WEIGHTS)(drawn.chain[:, i], torch.full((2,), 1 - i / 3))
        assert said.std is not None
        law = torch.distributions.Normal(drawn.chain[:, i] - said.velocity / 3, 0.5 * said.std)
        terms.append(law.log_prob(drawn.chain[:, i + 1]))
        entropies.append(law.entropy())
    found = flow.evaluate(field_of(WEIGHTS), drawn.chain, drawn.step, how, heat)
    torch.testing.assert_close(found.log_prob, sum(terms) / 4, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.entropy, sum(entropies) / 4, rtol=0, atol=1e-5)


def test_one_drawn_step_is_any_of_them_and_the_others_are_eulers() -> None:
    for kind, last in (("sde", 4), ("cps", 3), ("noise", 4)):
        how = Flow(kind, steps=5, joint=False)
        cold = torch.full((ROWS,), 1e-9)
        drawn = flow.draw(
            lambda x, t: FlowStep(torch.ones_like(x), torch.full_like(x, 0.1)), SHAPE, how, cold, generator()
        )
        assert sorted(set(drawn.step.tolist())) == list(range(last + 1))
        if kind != "cps":  # where nearly no noise is left, all of it is a straight line
            straight = torch.randn(SHAPE, generator=generator()) - 1
            torch.testing.assert_close(drawn.actions, straight, rtol=0, atol=1e-5)


def test_without_sampling_nothing_but_the_start_is_random() -> None:
    still = flow.draw(lambda x, t: FlowStep(x, None, t), (2, 3, 1), Flow(steps=4), torch.ones(2), None, sample=False)
    assert still.step.tolist() == [-1, -1] and not still.actions.any() and not still.log_prob.any()
    begun = flow.draw(
        lambda x, t: FlowStep(x, None, t), (2, 3, 1), Flow(steps=4), torch.ones(2), generator(), sample=False
    )
    torch.testing.assert_close(begun.actions, torch.randn((2, 3, 1), generator=generator()) * 0.75**4)
    again = flow.evaluate(lambda x, t: FlowStep(x, None, t), begun.chain, begun.step, Flow(steps=4), torch.ones(2))
    assert not again.log_prob.any() and begun.value is not None and begun.value.tolist() == [1.0, 1.0]
    given = flow.draw(
        lambda x, t: FlowStep(x), (2, 3, 1), Flow(steps=4), torch.ones(2), None, sample=False, start=torch.ones(2, 3, 1)
    )
    torch.testing.assert_close(given.actions, torch.full((2, 3, 1), 0.75**4))
    with pytest.raises(ConfigError, match=r"a flow needs a generator: give act\(\) one, or sample=False"):
        flow.draw(lambda x, t: FlowStep(x), (2, 3, 1), Flow(), torch.ones(2), None)


def test_times() -> None:
    assert flow.schedule(Flow(steps=4), WEIGHTS).tolist() == [1, 0.75, 0.5, 0.25, 0]
    assert flow.schedule(Flow(steps=2, shift=3.0), WEIGHTS).tolist() == [1, 0.75, 0]
    assert flow.schedule(Flow(steps=10), torch.zeros(1)).tolist() == [float(np.float32(1 - i / 10)) for i in range(11)]
    drawn = np.sort(flow.training_times(20_000, generator()).numpy())
    assert drawn[0] >= 0.001 and drawn[-1] <= 1
    # Kolmogorov: Beta(1.5, 1)
    assert np.abs(((drawn - 0.001) / 0.999) ** 1.5 - (np.arange(20_000) + 0.5) / 20_000).max() < 0.015
    embedded = flow.embed_times(torch.tensor([0.25]), 6)
    turns = [2 * math.pi * 0.25 / period for period in (4e-3, math.sqrt(4e-3 * 4), 4.0)]
    np.testing.assert_allclose(embedded[0], [*map(math.sin, turns), *map(math.cos, turns)], atol=1e-6)
    x, v = flow.toward(torch.full((1, 1), 2.0), torch.full((1, 1), 6.0), torch.tensor([0.25]))
    assert (x.item(), v.item()) == (3.0, 4.0)


def test_the_learned_deviation_stays_within_its_bounds() -> None:
    found = flow.bounded_std(torch.tensor([-50.0, 0.0, 50.0]), Flow("noise", std_range=(0.1, 0.4)))
    torch.testing.assert_close(found, torch.tensor([0.1, 0.2, 0.4]))


def test_flow_refuses_wrong_settings() -> None:
    with pytest.raises(UnknownNameError, match="no kind of flow named 'sda'; did you mean 'sde'"):
        Flow("sda")
    with pytest.raises(ConfigError, match="steps=1: expected a whole number of at least 2"):
        Flow(steps=1)
    with pytest.raises(ConfigError, match=r"level of cps is 1\.5; it is above 0 and at most 1"):
        Flow("cps", level=1.5)
    with pytest.raises(ConfigError, match="level=0: expected a number above 0"):
        Flow(level=0)
    with pytest.raises(ConfigError, match=r"std_range is \(0.2, 0.1\)"):
        Flow("noise", std_range=(0.2, 0.1))
    with pytest.raises(ConfigError, match=r"std_range=\(0.1, 0.4\) would do nothing: it needs kind \"noise\""):
        Flow(std_range=(0.1, 0.4))
    with pytest.raises(ConfigError, match=r"level=0\.7 would do nothing"):
        Flow("noise", level=0.7)
    with pytest.raises(ConfigError, match="needs a field that also returns a standard deviation"):
        flow.draw(field_of(WEIGHTS, noisy=False), SHAPE, Flow("noise"), torch.ones(ROWS), generator())
