"""The paper's backbone for vectors: a residual MLP reads the noisy token, a GRU updates the latent z, a residual MLP predicts.

    e_t = encode(x_t, k_t, cond_t);   z_t = GRU(e_t, z_{t-1});   out_t = predict(e_t, z_t)

The latent is a belief: at k = 0 its update is the posterior of a Bayes filter, at k = K its prior.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..checks import check_counts
from .base import BackboneConfig
from .layers import LevelEmbedding, ResidualMLP, width_of, zeroed


@dataclass(frozen=True)
class RNNConfig(BackboneConfig):
    """Residual MLP and GRU, the paper's network for vectors."""

    hidden: int = 128
    """Width of the latent z."""
    layers: int = 1
    """GRUs on top of each other, each adding to the output of the one below."""
    blocks: int = 2
    """Residual MLPs before and after the GRUs."""

    def build(self, event: tuple[int, ...], cond: int, levels: int, codec: nn.Module | None = None, variance: Tensor | None = None) -> RNN:
        return RNN(width_of(event, "RNN"), cond, levels=levels, **asdict(self))


class RNN(nn.Module):
    """Residual MLP and stacked GRU over vector tokens. Causal. State: (b, layers, hidden), the latents z.

    width: numbers a token; cond: width of the per-token condition; levels: K; options: of `RNNConfig`.
    """

    causal = True
    wavefront = True
    stabilization = "path"  # the latent to carry on is the one estimated on the way down, at a slightly higher level

    def __init__(self, width: int, cond: int = 0, *, levels: int = 1000, **options: Any) -> None:
        super().__init__()
        config = RNNConfig(**options)
        self.hidden, self.layers = hidden, layers = config.hidden, config.layers
        check_counts(width=width, hidden=hidden, layers=layers)
        self.config: dict[str, Any] = {"width": width, "cond": cond, **asdict(config), "levels": levels}
        self.level = LevelEmbedding(hidden, levels)
        self.proj_in = nn.Linear(width + cond, hidden)
        self.encoder = nn.Sequential(*(ResidualMLP(hidden) for _ in range(config.blocks)))
        self.grus = nn.ModuleList(nn.GRU(hidden, hidden, batch_first=True) for _ in range(layers))
        self.decoder = nn.Sequential(*(ResidualMLP(hidden) for _ in range(config.blocks)), nn.LayerNorm(hidden))
        self.proj_out = zeroed(nn.Linear(hidden, width))

    def forward(self, x: Tensor, k: Tensor, cond: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x: (b, t, width); k: (b, t); cond: (b, t, c). Returns (b, t, width) and the latents after the last token."""
        feature = self.encode(x, self.level(k), cond)
        latents = []
        for layer, gru in enumerate(self.grus):
            before = None if state is None else state[:, layer].contiguous()[None]
            z, last = gru(feature, before)
            feature = feature + z
            latents.append(last[0])
        return self.predict(feature), torch.stack(latents, dim=1)

    def encode(self, x: Tensor, level: Tensor, cond: Tensor) -> Tensor:
        """The noisy token, its embedded level and its condition as one feature: (b, t, hidden). Needs no past."""
        return self.encoder(self.proj_in(torch.cat([x, cond], dim=-1)) + level)

    def step(self, feature: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """One token of n sequences: feature (n, hidden), latents z (n, layers, hidden). Returns (n, hidden) and new latents."""
        latents = []
        for layer, gru in enumerate(self.grus):
            new = _cell(gru, feature, z[:, layer])
            feature = feature + new
            latents.append(new)
        return feature, torch.stack(latents, dim=1)

    def predict(self, feature: Tensor) -> Tensor:
        """The observation model: from feature and latent to the network's output."""
        return self.proj_out(self.decoder(feature))

    def initial_state(self, n: int) -> Tensor:
        """The latents before the first token of n sequences: zeros (n, layers, hidden)."""
        return self.proj_out.weight.new_zeros(n, self.layers, self.hidden)

    def forced(self, x: Tensor, k: Tensor, cond: Tensor, past_x: Tensor, past_k: Tensor) -> Tensor:
        """Each token x_t at level k_t given a past at other levels: tokens past_x at levels past_k. All t at once."""
        past = self.encode(past_x, self.level(past_k), cond)
        feature = self.encode(x, self.level(k), cond)
        for gru in self.grus:
            z, _ = gru(past)
            before = torch.cat([torch.zeros_like(z[:, :1]), z[:, :-1]], dim=1)
            feature = feature + _cell(gru, feature.flatten(0, 1), before.flatten(0, 1)).view_as(feature)
            past = past + z
        return self.predict(feature)


def _cell(gru: Any, x: Tensor, z: Tensor) -> Tensor:
    """One step of a GRU layer on (n, hidden) inputs and latents."""
    return torch.gru_cell(x, z, gru.weight_ih_l0, gru.weight_hh_l0, gru.bias_ih_l0, gru.bias_hh_l0)
