"""The three heads: their log-probabilities, entropies and gradients, and that draws
have the distribution they are said to have."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, Normal

from hilt.core.errors import ConfigError
from hilt.policies.vla.flow import Flow
from hilt.policies.vla.heads import FlowHead, GaussianHead, TokensHead
from tests.policies.differences import assert_gradients

ROWS, WIDTH, CHUNK, DIM = 5, 6, 3, 2
HEADS = {
    "tokens": lambda: TokensHead(WIDTH, CHUNK, DIM, bins=7),
    "gaussian": lambda: GaussianHead(WIDTH, CHUNK, DIM, std=0.4),
    "flow-sde": lambda: FlowHead(WIDTH, CHUNK, DIM, Flow("sde", steps=3), hidden=8),
    "flow-noise": lambda: FlowHead(WIDTH, CHUNK, DIM, Flow("noise", steps=3), hidden=8),
}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def made(kind: str) -> Any:
    head = HEADS[kind]()
    for number, parameter in enumerate(head.parameters()):
        torch.nn.init.normal_(parameter, std=0.7, generator=generator(number))
    return head


def features(rows: int = ROWS) -> Tensor:
    return torch.randn(rows, WIDTH, generator=generator(7))


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("sample", [True, False])
def test_a_draw_and_its_evaluation_agree_to_the_last_bit(kind: str, sample: bool) -> None:
    head, heat = made(kind), torch.linspace(0.5, 1.5, ROWS)
    drawn = head.draw(features(), heat, generator(), sample)
    log_prob, entropy = head.evaluate(features(), drawn.memory, heat)
    assert torch.equal(drawn.log_prob, log_prob)
    assert drawn.actions.shape == log_prob.shape == entropy.shape == (ROWS, CHUNK, DIM)
    again = head.draw(features(), heat, generator(), sample)
    assert torch.equal(drawn.actions, again.actions)
    if sample:
        assert not torch.equal(head.draw(features(), heat, generator(1), sample).actions, drawn.actions)
        assert not torch.equal(head.evaluate(features(), drawn.memory, heat * 2)[0], log_prob)


@pytest.mark.parametrize("kind", HEADS)
def test_gradients_equal_finite_differences(kind: str) -> None:
    head, heat = made(kind), torch.linspace(0.5, 1.5, ROWS)
    memory = head.draw(features(), heat, generator(), True).memory
    memory = {name: each.double() if each.is_floating_point() else each for name, each in memory.items()}
    head.double()
    shown = torch.linspace(-1, 1, ROWS * CHUNK * DIM, dtype=torch.float64).view(ROWS, CHUNK, DIM)
    assert_gradients(head, lambda: head.evaluate(features().double(), memory, heat.double())[0].sum())
    assert_gradients(head, lambda: head.loss(features().double(), shown, generator())[0].sum())
    if kind != "flow-sde":  # whose entropy no weight can change
        assert_gradients(head, lambda: head.evaluate(features().double(), memory, heat.double())[1].sum())


def test_tokens_and_gaussians_are_torchs_own_distributions() -> None:
    heat = torch.full((ROWS,), 0.7)
    tokens, gaussian = made("tokens"), made("gaussian")
    law: Any = Categorical(logits=tokens.out(features()).view(ROWS, CHUNK, DIM, 7) / 0.7)
    memory = tokens.draw(features(), heat, generator(), True).memory
    log_prob, entropy = tokens.evaluate(features(), memory, heat)
    torch.testing.assert_close((log_prob, entropy), (law.log_prob(memory["tokens"]), law.entropy()), rtol=0, atol=1e-5)

    law = Normal(gaussian.out(features()).view(ROWS, CHUNK, DIM), (0.4 * gaussian.more.exp()).clamp(0.01, 2.0) * 0.7)
    memory = gaussian.draw(features(), heat, generator(), True).memory
    log_prob, entropy = gaussian.evaluate(features(), memory, heat)
    torch.testing.assert_close(
        (log_prob, entropy), (law.log_prob(memory["actions"]), law.entropy().expand(ROWS, -1, -1)), rtol=0, atol=1e-5
    )


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    head, rows = made("tokens"), 20_000
    seen = features(1).expand(rows, -1)
    drawn = head.draw(seen, torch.full((rows,), 1.3), generator(), True)
    for chunk in range(CHUNK):
        likely = torch.softmax(head.out(seen[0]).view(CHUNK, DIM, 7)[chunk, 0] / 1.3, -1)
        often = torch.bincount(drawn.memory["tokens"][:, chunk, 0], minlength=7) / rows
        assert ((often - likely).abs() < 5 * torch.sqrt(likely / rows) + 1e-6).all()
    assert torch.equal(drawn.actions, torch.linspace(-1, 1, 7)[drawn.memory["tokens"]])


def test_token_head_decodes_and_is_trained() -> None:
    head, heat = made("tokens"), torch.ones(ROWS)
    likely = torch.softmax(head.out(features()).view(ROWS, CHUNK, DIM, 7), -1)
    mean = head.draw(features(), heat, None, False).actions
    torch.testing.assert_close(mean, (likely * torch.linspace(-1, 1, 7)).sum(-1))
    head.decode = "likeliest"
    assert torch.equal(head.draw(features(), heat, None, False).actions, torch.linspace(-1, 1, 7)[likely.argmax(-1)])

    shown = torch.full((ROWS, CHUNK, DIM), 0.3)  # between the bins at 0 and 1/3, nearer to the second: bin 4
    head.smoothing = 0.0
    torch.testing.assert_close(head.loss(features(), shown, None)[0], -likely[..., 4].log())
    head.smoothing = 2.0
    near = torch.softmax(-0.5 * ((torch.arange(7) - 3.9) / 2) ** 2, -1)
    torch.testing.assert_close(head.loss(features(), shown, None)[0], -(near * likely.log()).sum(-1))
    assert torch.equal(head.loss(features(), shown, None)[1]["accuracy"], (likely.argmax(-1) == 4).float())


def test_a_gaussian_keeps_within_its_bounds() -> None:
    head = made("gaussian")
    torch.nn.init.constant_(head.more, 50.0)
    _, entropy = head.evaluate(
        features(), head.draw(features(), torch.ones(ROWS), generator(), True).memory, torch.ones(ROWS)
    )
    torch.testing.assert_close(entropy, torch.full_like(entropy, 0.5 * math.log(2 * math.pi * math.e * 4)))
    assert torch.equal(
        head.draw(features(), torch.ones(ROWS), None, False).actions, head.out(features()).view(ROWS, CHUNK, DIM)
    )


@pytest.mark.parametrize("kind", HEADS)
def test_chance_without_a_generator_is_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match="needs a generator: give"):
        made(kind).draw(features(), torch.ones(ROWS), None, True)
