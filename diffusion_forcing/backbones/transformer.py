"""A transformer over noisy tokens: causal with a KV cache, or bidirectional.

Bidirectional attention sees the future only as far as noise lets it: a token at level K carries no information, one at level 0
all, one in between a little (the paper's appendix on transformer backbones).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ..checks import check_counts, check_divides
from .base import BackboneConfig
from .layers import LevelEmbedding, Modulated, RMSNorm, Rotary, width_of, zeroed

Cache = tuple[Tensor, Tensor]  # keys and values of the past, (b, heads, n, head_width) each
Modulation = tuple[Tensor, ...]  # shift, scale and gate of attention, then of the MLP
Mask = Tensor | Literal["causal"] | None  # True where attention is allowed; None: everywhere


class Past(NamedTuple):
    """Committed tokens as they were given, for a bidirectional model: x (b, n, width), k (b, n), cond (b, n, c)."""

    x: Tensor
    k: Tensor
    cond: Tensor


@dataclass(frozen=True)
class TransformerConfig(BackboneConfig):
    """Transformer for vectors: causal with a KV cache, or bidirectional."""

    hidden: int = 128
    """Width of a token inside the network."""
    layers: int = 4
    """Attention blocks."""
    heads: int = 4
    """Attention heads; must divide hidden."""
    causal: bool = True
    """Attend backwards only."""
    window: int | None = None
    """Tokens a token attends to, itself included; None: all."""

    def build(
        self, event: tuple[int, ...], cond: int, levels: int, codec: nn.Module | None = None, variance: Tensor | None = None
    ) -> Transformer:
        return Transformer(width_of(event, "Transformer"), cond, levels=levels, **asdict(self))


class Transformer(nn.Module):
    """Vector tokens through attention blocks, each token's level modulating its own normalisations.

    causal: attend backwards only. State then: a KV cache for each block.
    Otherwise the state is the past itself, read again at each call.
    window: a token attends to itself and the window-1 before it (a bidirectional model keeps that many past tokens), so a
    roll-out costs O(window) a token and stays within distances seen in training. None: unlimited.
    width: numbers a token; cond: width of the per-token condition; levels: K; options: of `TransformerConfig`.
    """

    stabilization = "noise"  # the context is noised to, and labelled with, the small level

    def __init__(self, width: int, cond: int = 0, *, levels: int = 1000, **options: Any) -> None:
        super().__init__()
        config = TransformerConfig(**options)
        hidden, layers, heads, window = config.hidden, config.layers, config.heads, config.window
        check_counts(width=width, hidden=hidden, layers=layers, heads=heads)
        check_divides(heads, hidden, "heads of a transformer must divide its hidden width")
        check_divides(2, hidden // heads, "rotary positions need an even head width (hidden / heads)")
        if window is not None and window < 1:
            raise ValueError(f"window counts the tokens a token attends to, itself included; got {window}")
        self.config: dict[str, Any] = {"width": width, "cond": cond, **asdict(config), "levels": levels}
        self.causal, self.window = config.causal, window
        self.proj_in = nn.Linear(width + cond, hidden)
        self.level = LevelEmbedding(hidden, levels)
        # One projection serves the modulation of all blocks; each block only adds a bias of its own. A projection a block would
        # cost half as much again as the block itself, since levels differ from token to token.
        self.modulate = nn.Linear(hidden, 6 * hidden)
        nn.init.zeros_(self.modulate.weight)
        nn.init.zeros_(self.modulate.bias)
        self.rotary = Rotary(hidden // heads)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.final = nn.LayerNorm(hidden)
        self.proj_out = zeroed(nn.Linear(hidden, width))

    def forward(self, x: Tensor, k: Tensor, cond: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """x: (b, t, width); k: (b, t); cond: (b, t, c). Returns (b, t, width) and the state after the last token."""
        t = x.shape[1]
        if not self.causal:
            past = Past(x, k, cond) if state is None else Past(*(torch.cat(p, dim=1) for p in zip(state, (x, k, cond), strict=True)))
            hidden, level = self.embed(*past)
            for block in self.blocks:
                hidden, _ = block(hidden, level, self.rotary)
            keep = 0 if self.window is None else -self.window
            return self.predict(hidden[:, -t:]), Past(*(p[:, keep:] for p in past))
        hidden, level = self.embed(x, k, cond)
        before = 0 if state is None else state[0][0].shape[-2]
        mask = self.mask(t, before, x.device)
        caches = []
        for layer, block in enumerate(self.blocks):
            hidden, cache = block(hidden, level, self.rotary, None if state is None else state[layer], mask)
            caches.append(self.recent(cache))
        return self.predict(hidden), tuple(caches)

    def embed(self, x: Tensor, k: Tensor, cond: Tensor) -> tuple[Tensor, Modulation]:
        """Tokens (b, t, hidden) and the six modulations (b, t, hidden) that their levels ask for."""
        level = self.level(k)
        return self.proj_in(torch.cat([x, cond], dim=-1)) + level, self.modulate(F.silu(level)).chunk(6, dim=-1)

    def predict(self, hidden: Tensor) -> Tensor:
        return self.proj_out(self.final(hidden))

    def recent(self, cache: Cache) -> Cache:
        """The part of a cache that a later token may still attend to: the last window-1 tokens."""
        if self.window is None:
            return cache
        old = max(0, cache[0].shape[-2] - self.window + 1)
        return cache[0][..., old:, :], cache[1][..., old:, :]

    def mask(self, t: int, before: int, device: torch.device) -> Tensor | Literal["causal"]:
        """(t, before+t), True where attention is allowed, or the word where plain causal attention says the same."""
        if before == 0 and (self.window is None or t <= self.window):
            return "causal"
        distance = torch.arange(before, before + t, device=device)[:, None] - torch.arange(before + t, device=device)
        return (distance >= 0) & (distance < (self.window or before + t))

    def forced(self, x: Tensor, k: Tensor, cond: Tensor, past_x: Tensor, past_k: Tensor) -> Tensor:
        """Each token x_t at level k_t given a past at other levels: tokens past_x at levels past_k. All t at once.

        Two streams: the past attends to the past as usual; each token attends to the past before it and to itself.
        """
        if not self.causal:
            raise ValueError(
                "a separate past for each token (teacher forcing) needs a causal transformer; set causal=True, or another draw"
            )
        t = x.shape[1]
        past, past_level = self.embed(past_x, past_k, cond)
        hidden, level = self.embed(x, k, cond)
        own = torch.eye(t, dtype=torch.bool, device=x.device)
        distance = torch.arange(t, device=x.device)[:, None] - torch.arange(t, device=x.device)
        mask = torch.cat([(distance > 0) & (distance < (self.window or t)), own], dim=1)
        causal = self.mask(t, 0, x.device)
        for block in self.blocks:
            past, keys_values = block(past, past_level, self.rotary, None, causal)
            hidden = block.cross_stream(  # type: ignore[operator]
                hidden, level, self.rotary, keys_values, mask
            )
        return self.predict(hidden)


class Block(Modulated):
    """Attention and MLP, each shifted, scaled and gated by the level of its token."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__(hidden)
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.norm_q = RMSNorm(hidden // heads)
        self.norm_k = RMSNorm(hidden // heads)
        self.project = zeroed(nn.Linear(hidden, hidden))
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = zeroed(nn.Linear(4 * hidden, hidden))

    def forward(self, x: Tensor, level: Modulation, rotary: Rotary, cache: Cache | None = None, mask: Mask = None) -> tuple[Tensor, Cache]:
        """x: (b, t, hidden); level: six of (b, t, hidden). Returns x and the cache with this call's keys and values at its end."""
        shift, scale, gate, *mlp = self.modulations(level)
        query, key, value = self.heads_of(x, shift, scale)
        if cache is not None:
            key, value = torch.cat([cache[0], key], dim=-2), torch.cat([cache[1], value], dim=-2)
        # Keys are cached without rotary positions: these count from the oldest token kept, and never grow large in an endless roll-out.
        start = key.shape[-2] - query.shape[-2]
        attended = attend(rotary(query, start), rotary(key), value, mask)
        return self.mlp(torch.addcmul(x, gate, self.project(attended)), *mlp), (key, value)

    def cross_stream(self, x: Tensor, level: Modulation, rotary: Rotary, past: Cache, mask: Tensor) -> Tensor:
        """Tokens that attend to another stream's keys and to themselves. mask: (t, 2t) over [past, themselves]."""
        shift, scale, gate, *mlp = self.modulations(level)
        query, key, value = self.heads_of(x, shift, scale)
        keys = torch.cat([rotary(past[0]), rotary(key)], dim=-2)
        attended = attend(rotary(query), keys, torch.cat([past[1], value], dim=-2), mask)
        return self.mlp(torch.addcmul(x, gate, self.project(attended)), *mlp)

    def heads_of(self, x: Tensor, shift: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, (b, heads, t, head_width) each."""
        qkv = self.qkv(torch.addcmul(shift, self.norm(x), scale))
        query, key, value = rearrange(qkv, "b t (three h d) -> three b h t d", three=3, h=self.heads)
        return self.norm_q(query), self.norm_k(key), value

    def mlp(self, x: Tensor, shift: Tensor, scale: Tensor, gate: Tensor) -> Tensor:
        return torch.addcmul(x, gate, self.down(F.gelu(self.up(torch.addcmul(shift, self.norm(x), scale)))))


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
    """Attention of (b, heads, t, head_width) under a mask, back to (b, t, hidden)."""
    causal = mask == "causal" if isinstance(mask, str) else False
    allowed = mask if isinstance(mask, Tensor) else None
    if query.requires_grad and query.dtype == torch.bfloat16 and query.device.type == "cpu":
        # Of torch's fused attention this backward pass is four times slower than in float32, and ten times slower than plain products.
        scores = query @ key.mT * query.shape[-1] ** -0.5
        if causal:
            allowed = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        out = (scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)).softmax(-1) @ value
    else:
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=allowed, is_causal=causal)
    return rearrange(out, "b h t d -> b t (h d)")
