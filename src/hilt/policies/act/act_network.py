"""The networks of ACT: one joins the observation with a style, one decodes a chunk of it, and one infers the style.

    observation, z ──► joined ──► decoded ──► actions          when it acts, z = 0
    state, actions ──► inferred ──► mean and log-variance of z     in training only

Images and words become tokens as those of `small_vla` do, so that the two differ in how they answer, and not in what
they see. A query for each action of the chunk looks at the other queries and at the observation in one attention, where
the published decoder has two, one after the other.
"""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor, nn

from hilt.policies.act.act_config import ACTConfig
from hilt.policies.base import Record
from hilt.policies.observation_tokens import TEXT_WIDTH, Keypoints, Patches, Text, observation_tokens
from hilt.policies.precision import in_bfloat16
from hilt.policies.vla.flow import embed_times
from hilt.policies.vla.small_vla import TransformerBlock, initialize

SMALL = 0.1
"""Of the last layers at the start, beside others: first answers are near the middle of each range, first styles near
the prior"""


class ACTNetwork(nn.Module):
    """All that is trained. What is random at its birth comes from `seed`."""

    def __init__(self, config: ACTConfig, seed: int = 0):
        super().__init__()
        self.config = config
        width, cameras = config.width, len(config.cameras)
        with torch.random.fork_rng(devices=[]):  # what torch draws here is drawn again below
            self.eyes = (
                Keypoints(width, cameras, config.keypoints, config.precision)
                if config.vision == "keypoints"
                else Patches(width, cameras, config.image_size, config.precision)
            )
            self.text = Text()
            self.words = nn.Linear(TEXT_WIDTH, width)
            self.summary = nn.Sequential(
                nn.Linear(config.state_dim + self.eyes.places, width), nn.ReLU(), nn.Linear(width, width)
            )
            self.style = nn.Linear(config.latent, width)
            self.blocks = nn.ModuleList([TransformerBlock(width, config.heads) for _ in range(config.depth)])
            self.norm = nn.LayerNorm(width)
            self.queries = nn.Parameter(torch.empty(config.chunk, width))
            self.decoder_blocks = nn.ModuleList(
                [TransformerBlock(width, config.heads) for _ in range(config.decoder_depth)]
            )
            self.decoder_norm = nn.LayerNorm(width)
            self.actions = nn.Linear(width, config.action_dim)
            self.posterior = Posterior(config)
        chance = torch.Generator().manual_seed(seed)
        initialize(self, chance)
        nn.init.normal_(self.queries, generator=chance)
        self.posterior.initialize(chance)
        with torch.no_grad():
            self.actions.weight.mul_(SMALL)

    def joined(self, record: Record, state: Tensor | None, style: Tensor) -> Tensor:
        """Returns the tokens of observations with a style [B, latent]: [B, tokens, width]. The first is that of the
        places and the normalized `state`."""
        x = observation_tokens(self.eyes, self.text, self.words, self.summary, record, state)
        x = torch.cat([x, self.style(style)[:, None]], dim=1)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=in_bfloat16(self.config.precision, x.device)):
            for block in self.blocks:
                x = block(x, x)
        return self.norm(x)

    def decoded(self, tokens: Tensor) -> Tensor:
        """Returns the chunks [B, chunk, action_dim], from -1 to 1 over the range of each number, of `joined` tokens."""
        x = self.queries.expand(len(tokens), -1, -1)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=in_bfloat16(self.config.precision, x.device)):
            for block in self.decoder_blocks:
                x = block(x, torch.cat([x, tokens], dim=1))
        chunks: Tensor = self.actions(self.decoder_norm(x))
        return chunks


class Posterior(nn.Module):
    """The style of a chunk that was shown: a token of its own looks at the state and at the actions.

    Actions that were not shown are 0 and marked as such; the published encoder leaves them out of its attention."""

    def __init__(self, config: ACTConfig):
        super().__init__()
        self.config, width = config, config.width
        self.first = nn.Parameter(torch.empty(width))
        self.state = nn.Linear(config.state_dim, width) if config.state_dim else None
        self.action = nn.Linear(config.action_dim + 1, width)
        self.blocks = nn.ModuleList([TransformerBlock(width, config.heads) for _ in range(config.depth)])
        self.norm = nn.LayerNorm(width)
        self.law = nn.Linear(width, 2 * config.latent)

    def initialize(self, generator: Generator) -> None:
        nn.init.normal_(self.first, generator=generator)
        with torch.no_grad():
            self.law.weight.mul_(SMALL)

    def forward(self, state: Tensor | None, chunks: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the mean and the log-variance of z, [B, latent] each, of chunks [B, chunk, action_dim] that were
        shown where `mask` [B, chunk] is true."""
        known = mask[..., None]
        shown = self.action(torch.cat([torch.where(known, chunks, 0.0), known.to(chunks.dtype)], dim=-1))
        places = torch.arange(chunks.shape[1], device=chunks.device, dtype=chunks.dtype)
        shown = shown + embed_times(places, self.config.width, 4.0, 4.0 * max(2, chunks.shape[1]))
        tokens = [self.first.expand(len(chunks), 1, -1), shown]
        if self.state is not None and state is not None:
            tokens.insert(1, self.state(state)[:, None])
        x = torch.cat(tokens, dim=1)
        for block in self.blocks[:-1]:
            x = block(x, x)
        x = self.blocks[-1](x[:, :1], x)
        mean, log_variance = self.law(self.norm(x[:, 0])).chunk(2, dim=-1)
        return mean, log_variance.clamp(-math.log(1e6), math.log(1e3))
