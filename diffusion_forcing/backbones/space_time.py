"""A transformer over tokens that are grids: causal in time, full attention within a token, with a cache of keys and values.

A place of a token attends to all places of its own token and of those before it, within a window: most blocks see one token back, every
third as far as the window goes. Nothing is normalised over time or over the batch, so no earlier output depends on a later frame.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ..checks import check_counts, check_divides
from ..codecs import codec_traits
from .base import BackboneConfig
from .flow_warp import FlowWarp
from .layers import LevelEmbedding, Modulated, RMSNorm, zeroed

Cache = tuple[Tensor, Tensor]  # keys and values of the last tokens, (b, window-1, places, hidden) each: zeros before the first token


class SpaceTimeState(NamedTuple):
    """x (b, 1, c, h, w) and k (b, 1): the last token as it was read, for the convolution at the entry. caches: of each block."""

    x: Tensor
    k: Tensor
    caches: tuple[Cache, ...]


class PastFeatures(NamedTuple):
    """Input features of tokens that depend on earlier tokens only.

    embedding: (b, t, hidden), of the earlier tokens' levels and the condition. channels: (b, t, ..., h, w), what the entry convolution
    reads beside the noisy tokens: the tokens before, and with `warp` the warped prediction and its mask. warped: (b, t, c, h, w), that
    prediction alone; None without `warp`.
    """

    embedding: Tensor
    channels: Tensor
    warped: Tensor | None


class Prefilled(NamedTuple):
    """Prefilled context: everything that depends on past tokens only, computed once and reused in every denoising step of the next token.

    entry: (b, n, hidden), what `PastFeatures.channels` add to the entry convolution, with its bias and the position embedding.
    embedding: (b, 1, hidden). caches: of each block, keys and values (b, heads, (window-1) n, hidden / heads). modulation: (blocks, 6,
    hidden), each block's own. warped: (b, 1, c, h, w), or None.
    """

    entry: Tensor
    embedding: Tensor
    caches: tuple[Cache, ...]
    modulation: Tensor
    warped: Tensor | None = None


@dataclass(frozen=True)
class SpaceTimeConfig(BackboneConfig):
    """Causal transformer over space and time, for tokens that are grids."""

    hidden: int = 128
    """Width of a place inside the network."""
    layers: int = 8
    """Attention blocks."""
    heads: int = 4
    """Attention heads; must divide hidden."""
    window: int = 8
    """Tokens a token attends to, itself included."""
    full_attention_every: int = 3
    """Each so many blocks one attends over the whole window, the others over two tokens."""
    warp: bool = False
    """The network also reads a prediction of each token by warping the last frame before it; for tokens of patches of pixels."""
    input_skip: bool = False
    """Noisy tokens are also added to the output, each channel with a gain that depends on the level: learns faster."""

    def build(
        self, event: tuple[int, ...], cond: int, levels: int, codec: nn.Module | None = None, variance: Tensor | None = None
    ) -> SpaceTime:
        patches = codec_traits(codec).patches
        if not self.warp:
            return SpaceTime(event, cond, levels=levels, **asdict(self))
        if patches is None:
            raise ValueError(f"the flow warp needs tokens that are patches of frames; these are of {type(codec).__name__}: set "
                             "--model.backbone.no-warp")  # fmt: skip
        backbone = SpaceTime(event, cond, levels=levels, patches=(patches.stack, patches.patch), **asdict(self))
        assert backbone.warp is not None
        backbone.warp.fit(patches, variance)
        return backbone


class SpaceTime(nn.Module):
    """Tokens (c, h, w) through blocks of attention over space and time. Causal. State: `SpaceTimeState`.

    event: shape of a token; cond: width of the per-token condition; levels: K; patches: with `warp`, frames of a token and side of a patch
    in pixels; options: of `SpaceTimeConfig`.
    """

    causal = True
    stabilization = "noise"  # the context is noised to, and labelled with, the small level

    def __init__(
        self, event: Sequence[int], cond: int = 0, *, levels: int = 1000, patches: Sequence[int] | None = None, **options: Any
    ) -> None:
        super().__init__()
        config = SpaceTimeConfig(**options)
        hidden, layers, heads, window, every = config.hidden, config.layers, config.heads, config.window, config.full_attention_every
        check_counts(hidden=hidden, layers=layers, heads=heads, window=window, full_attention_every=every)
        check_divides(heads, hidden, "heads of a transformer must divide its hidden width")
        if len(event) != 3 or min(event) < 1:
            raise ValueError(f"SpaceTime reads tokens of (channels, height, width); got tokens of shape {tuple(event)}")
        if config.warp and patches is None:
            raise ValueError("a flow warp needs the size of patches: give patches=(frames of a token, pixels of a patch's side)")
        patches = patches if config.warp else None
        self.config: dict[str, Any] = {
            "event": list(event), "cond": cond, **asdict(config), "levels": levels, "patches": None if patches is None else list(patches),
        }  # fmt: skip
        c, self.height, self.width = event
        self.levels = levels
        self.warp = FlowWarp((c, self.height, self.width), hidden, *patches) if patches is not None else None
        # Each place reads its neighbours and the token before at the entry already: small motions need no attention.
        self.proj_in = nn.Conv2d(2 * c if self.warp is None else 3 * c + self.warp.stack, hidden, 3, padding=1)
        self.position = nn.Parameter(0.02 * torch.randn(self.height * self.width, hidden))
        self.level = LevelEmbedding(hidden, levels)
        self.past_level = nn.Linear(hidden, hidden)
        self.cond_proj = nn.Linear(cond, hidden) if cond else None
        # One projection serves the modulation of all blocks; each adds a bias of its own.
        self.modulate = zeroed(nn.Linear(hidden, 6 * hidden))
        windows = [window if block % every == every - 1 else min(2, window) for block in range(layers)]
        self.blocks = nn.ModuleList(Block(hidden, heads, one, (self.height, self.width)) for one in windows)
        self.final = nn.LayerNorm(hidden)
        self.proj_out = zeroed(nn.Conv2d(hidden, c, 3, padding=1))
        self.skip_warp = None if self.warp is None else zeroed(nn.Linear(hidden, c))  # gains of the warped prediction, by channel
        self.skip_input = zeroed(nn.Linear(hidden, c)) if config.input_skip else None  # and of the noisy token itself
        self._compiled_step: Callable[[Tensor, Tensor, Prefilled], tuple[Tensor, tuple[Cache, ...]]] | None = None

    def forward(self, x: Tensor, k: Tensor, cond: Tensor, state: SpaceTimeState | Prefilled | None = None) -> tuple[Tensor, Any]:
        """x: (b, t, c, h, w); k: (b, t); cond: (b, t, a). Returns out, shaped as x, and the state after the last token.

        With a `Prefilled` state one token is read; its condition is in the state already, and no new state is returned.
        """
        if isinstance(state, Prefilled):
            return (self.decode_step if self._compiled_step is None else self._compiled_step)(x, k, state)[0], None
        state = self.initial_state(x) if state is None else SpaceTimeState(*state)
        if self._compiled_step is not None and x.shape[1] == 1 and not torch.is_grad_enabled():
            out, own = self._compiled_step(x, k, self.prefill(x, state, cond))
            return out, SpaceTimeState(x, k, tuple(_shifted(cache, new) for cache, new in zip(state.caches, own, strict=True)))
        past_x, past_k = torch.cat([state.x, x], dim=1)[:, :-1], torch.cat([state.k, k], dim=1)[:, :-1]
        past = self._past_features(past_x, past_k, cond)
        hidden, modulation, embedding = self.embed(x, k, past)
        caches = []
        for block, cache in zip(self.blocks, state.caches, strict=True):
            hidden, kept = block(hidden, modulation, cache)
            caches.append(kept)
        return self.predict(hidden, embedding, x, past.warped), SpaceTimeState(x[:, -1:], k[:, -1:], tuple(caches))

    def compile_decode_step(self) -> None:
        """Compile the pass over a single next token with torch.compile, at its first call, for as many sequences as it has.

        The compiled pass holds the weights of that time; loading others or `train()` drops it.
        """
        if self._compiled_step is None:
            self._compiled_step = torch.compile(self.decode_step, dynamic=False, options={"freezing": True, "cpp_wrapper": True})

    def grow(self, weights: dict[str, Tensor], config: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Weights and config of a network without `warp` or `input_skip`, completed for this one: the output stays the same."""
        new = {option for option in ("warp", "input_skip") if self.config[option] and not config[option]}
        names = {"warp": ("warp", "skip_warp"), "input_skip": ("skip_input",)}
        added = {name for option in new for name in names[option]}
        grown = {**weights, **{name: value for name, value in self.state_dict().items() if name.split(".")[0] in added}}
        if "warp" in new:  # it adds channels to the entry, which have no weight yet
            more = self.proj_in.weight.shape[1] - grown["proj_in.weight"].shape[1]
            grown["proj_in.weight"] = F.pad(grown["proj_in.weight"], (0, 0, 0, 0, 0, more))
        changes = {**dict.fromkeys(new, True), **({"patches": self.config["patches"]} if "warp" in new else {})}
        return grown, {**config, **changes}

    def train(self, mode: bool = True) -> SpaceTime:
        if mode:
            self._drop_compiled()
        return super().train(mode)

    def _load_from_state_dict(self, *arguments: Any, **options: Any) -> None:
        self._drop_compiled()
        super()._load_from_state_dict(*arguments, **options)

    def _drop_compiled(self) -> None:
        """Forget the compiled pass, which holds the weights of the time it was compiled."""
        if self._compiled_step is not None:
            self._compiled_step = None
            torch.compiler.reset()

    def __getstate__(self) -> dict[str, Any]:
        """A copy has weights of its own, so it does not take over the compiled pass."""
        return {**self.__dict__, "_compiled_step": None}

    def initial_state(self, x: Tensor) -> SpaceTimeState:
        """The state before the first token: empty caches, and a token before it that is pure noise of amplitude 0."""
        b, places = len(x), self.height * self.width
        hidden = self.final.weight.shape[0]
        caches = tuple((x.new_zeros(b, block.window - 1, places, hidden),) * 2 for block in self._blocks())
        return SpaceTimeState(torch.zeros_like(x[:, :1]), torch.full((b, 1), self.levels, device=x.device), caches)

    def prefill(self, x: Tensor, state: SpaceTimeState | None, cond: Tensor | None = None) -> Prefilled:
        """Prefill the context of the next token, shaped as x (b, 1, c, h, w) and not denoised yet. cond: (b, 1, a), of that token."""
        state = self.initial_state(x) if state is None else SpaceTimeState(*state)
        c, blocks = x.shape[2], self._blocks()
        embedding, channels, warped = self._past_features(state.x, state.k, cond)
        bias = self.proj_in.bias
        assert bias is not None
        entry = _convolved(channels[:, 0], self.proj_in.weight[:, c:]) + (self.position + bias)
        caches = tuple(block.cached_heads(*cache) for block, cache in zip(blocks, state.caches, strict=True))
        modulation = torch.stack([block.modulation for block in blocks]).unflatten(1, (6, -1)) + blocks[0].base
        return Prefilled(entry, embedding, caches, modulation, warped)

    def decode_step(self, x: Tensor, k: Tensor, context: Prefilled) -> tuple[Tensor, tuple[Cache, ...]]:
        """As forward, for one token: the same sums by fewer and larger operations, since these are many and small.

        Returns out, and keys and values (b, n, hidden) of each block.
        """
        embedding = self.level(k) + context.embedding
        modulations = self.modulate(F.silu(embedding[:, 0])).unflatten(-1, (6, -1)) + context.modulation[:, None]  # (blocks, b, 6, hidden)
        hidden = _convolved(x[:, 0], self.proj_in.weight[:, : x.shape[2]]) + context.entry + embedding
        own = []
        for block, cache, modulation in zip(self._blocks(), context.caches, modulations, strict=True):
            hidden, key, value = block.decode_step(hidden, modulation[:, :, None].unbind(1), *cache)
            own.append((key, value))
        grid = self.final(hidden).transpose(1, 2).unflatten(2, (self.height, self.width))
        bias = self.proj_out.bias
        assert bias is not None
        out = (_convolved(grid, self.proj_out.weight) + bias).transpose(1, 2).reshape(x.shape)
        return self._add_skips(out, embedding, x, context.warped), tuple(own)

    def embed(self, x: Tensor, k: Tensor, past: PastFeatures) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
        """Tokens x at levels k as places (b, t, n, hidden), six modulations (b, t, 1, hidden), and the embedding (b, t, hidden) of both."""
        embedding = self.level(k) + past.embedding
        grid = self.proj_in(torch.cat([x, past.channels], dim=2).flatten(0, 1))
        hidden = rearrange(grid, "(b t) d h w -> b t (h w) d", b=len(x)) + self.position
        return hidden + embedding[:, :, None], self.modulate(F.silu(embedding))[:, :, None].chunk(6, dim=-1), embedding

    def _past_features(self, past_x: Tensor, past_k: Tensor, cond: Tensor | None) -> PastFeatures:
        """Features of the tokens that follow past_x (b, t, c, h, w) at levels past_k (b, t) under conditions cond (b, t, a)."""
        embedding = self._embed_past(past_k, cond)
        if self.warp is None:
            return PastFeatures(embedding, past_x, None)
        warped, mask = (part.unflatten(0, past_x.shape[:2]) for part in self.warp(past_x.flatten(0, 1), embedding.flatten(0, 1)))
        return PastFeatures(embedding, torch.cat([past_x, warped, mask], dim=2), warped)

    def _embed_past(self, past_k: Tensor, cond: Tensor | None) -> Tensor:
        """(b, t, hidden), of the levels past_k (b, t) of the tokens before, and of the conditions."""
        embedding = self.past_level(self.level(past_k))
        if self.cond_proj is None:
            return embedding
        if cond is None:
            raise ValueError("this network is conditional: give the condition of the next token too, prefill(x, state, cond)")
        return embedding + self.cond_proj(cond)

    def warp_tokens(self, past_x: Tensor, past_k: Tensor, cond: Tensor | None = None) -> Tensor:
        """Warped prediction of the tokens that follow past_x (b, t, c, h, w) at levels past_k (b, t) under conditions cond (b, t, a)."""
        warped = self._past_features(past_x, past_k, cond).warped
        if warped is None:
            raise ValueError("this network has no flow warp; build it with warp=True")
        return warped

    def warp_frames(self, frames: Tensor, past_x: Tensor, cond: Tensor | None = None) -> Tensor:
        """Frames (b, t, h, w, 3), each the last of a clean token past_x (b, t, c, gh, gw), warped to the frames of the token after it.

        cond: (b, t, a), of those tokens. Returns (b, t, stack, h, w, 4): colours, and how much of each pixel was in sight.
        """
        if self.warp is None:
            raise ValueError("this network has no flow warp; build it with warp=True")
        embedding = self._embed_past(torch.zeros(past_x.shape[:2], dtype=torch.long, device=past_x.device), cond)
        flat = rearrange(frames, "b t h w a -> (b t) a h w")
        warped = self.warp.warp(flat, past_x.flatten(0, 1), embedding.flatten(0, 1))
        return rearrange(warped, "(b t) a (s h) w -> b t s h w a", b=len(frames), s=self.warp.stack)

    def _add_skips(self, out: Tensor, embedding: Tensor, x: Tensor, warped: Tensor | None) -> Tensor:
        """Add the warped prediction and the noisy tokens x to the output, each channel with a gain that the embedding (b, t, hidden)
        decides: neither would pass through the narrow blocks whole.
        """
        for gain, part in ((self.skip_warp, warped), (self.skip_input, x)):
            if gain is not None and part is not None:
                out = torch.addcmul(out, gain(F.silu(embedding))[..., None, None], part)
        return out

    def predict(self, hidden: Tensor, embedding: Tensor, x: Tensor, warped: Tensor | None) -> Tensor:
        """The network's output for tokens x, whose places are hidden (b, t, n, hidden) after the last block."""
        grid = rearrange(self.final(hidden), "b t (h w) d -> (b t) d h w", h=self.height)
        out = rearrange(self.proj_out(grid), "(b t) c h w -> b t c h w", b=len(hidden))
        return self._add_skips(out, embedding, x, warped)

    def forced(self, x: Tensor, k: Tensor, cond: Tensor, past_x: Tensor, past_k: Tensor) -> Tensor:
        """Each token x_t at level k_t given a past at other levels: tokens past_x at levels past_k. All t at once."""
        empty = self.initial_state(past_x)
        shifted = torch.cat([empty.x, past_x], dim=1)[:, :-1], torch.cat([empty.k, past_k], dim=1)[:, :-1]
        features = self._past_features(*shifted, cond)
        past, past_modulation, _ = self.embed(past_x, past_k, features)
        hidden, modulation, embedding = self.embed(x, k, features)
        blocks = self._blocks()
        for block, cache in zip(blocks, empty.caches, strict=True):
            heads = block.heads_of(past, past_modulation)
            hidden = block.cross_stream(hidden, modulation, heads, cache)
            if block is not blocks[-1]:  # after the last block nothing reads the past
                past = block.attend(past, past_modulation, heads, cache)[0]
        return self.predict(hidden, embedding, x, features.warped)

    def _blocks(self) -> list[Block]:
        return list(self.blocks)  # type: ignore[arg-type]


class Block(Modulated):
    """Attention over own and earlier places, then an MLP with a depthwise convolution; both modulated by the token's level."""

    def __init__(self, hidden: int, heads: int, window: int, grid: tuple[int, int]) -> None:
        super().__init__(hidden)
        self.heads, self.window, self.grid = heads, window, grid
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.norm_q = RMSNorm(hidden // heads)
        self.norm_k = RMSNorm(hidden // heads)
        self.age = nn.Parameter(0.02 * torch.randn(window, hidden))  # added to keys by the age of their token, own token last
        self.project = zeroed(nn.Linear(hidden, hidden))
        self.up = nn.Linear(hidden, 4 * hidden)
        self.local = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden)
        nn.init.dirac_(self.local.weight, groups=hidden)  # the identity at first
        assert self.local.bias is not None
        nn.init.zeros_(self.local.bias)
        self.down = zeroed(nn.Linear(4 * hidden, hidden))

    def forward(self, x: Tensor, modulation: tuple[Tensor, ...], cache: Cache) -> tuple[Tensor, Cache]:
        """x: (b, t, n, hidden); modulation: six of (b, t, 1, hidden). Returns x and the cache after the last token."""
        return self.attend(x, modulation, self.heads_of(x, modulation), cache)

    def attend(self, x: Tensor, modulation: tuple[Tensor, ...], own: tuple[Tensor, Tensor, Tensor], cache: Cache) -> tuple[Tensor, Cache]:
        """As forward, given the tokens' queries, keys and values."""
        _, key, value = own
        whole = torch.cat([cache[0], key], dim=1), torch.cat([cache[1], value], dim=1)
        last = whole[0].shape[1] - self.window + 1
        return self._attention_and_mlp(x, modulation, own, whole), (whole[0][:, last:], whole[1][:, last:])

    def cross_stream(self, x: Tensor, modulation: tuple[Tensor, ...], past: tuple[Tensor, Tensor, Tensor], cache: Cache) -> Tensor:
        """Tokens that attend to themselves and to the past of another stream, by its queries, keys and values."""
        key, value = (torch.cat([empty, heads], dim=1) for empty, heads in zip(cache, past[1:], strict=True))
        return self._attention_and_mlp(x, modulation, self.heads_of(x, modulation), (key, value))

    def heads_of(self, x: Tensor, modulation: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, (b, t, n, hidden) each."""
        shift, scale = self.modulations(modulation)[:2]
        query, key, value = self.qkv(torch.addcmul(shift, self.norm(x), scale)).chunk(3, dim=-1)
        split = (self.heads, x.shape[-1] // self.heads)
        query, key = self.norm_q(query.unflatten(-1, split)), self.norm_k(key.unflatten(-1, split))
        return query.flatten(-2), key.flatten(-2), value

    def cached_heads(self, keys: Tensor, values: Tensor) -> Cache:
        """A cache as the next token attends to it: (b, heads, (window-1) n, hidden / heads) each."""
        aged = keys + self.age[:-1, None]
        split = "b t n (a e) -> b a (t n) e"
        return rearrange(aged, split, a=self.heads).contiguous(), rearrange(values, split, a=self.heads).contiguous()

    def decode_step(self, x: Tensor, modulation: tuple[Tensor, ...], keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As forward, for one token x (b, n, hidden), six modulations (b, 1, hidden), and keys and values of `cached_heads`.

        Returns x, and the token's own keys and values, (b, n, hidden) each.
        """
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = modulation
        b, n, width = x.shape
        each = width // self.heads
        qkv = self.qkv(torch.addcmul(shift, self.norm(x), scale)).view(b, n, 3, self.heads, each)
        query, key, value = self.norm_q(qkv[:, :, 0]), self.norm_k(qkv[:, :, 1]), qkv[:, :, 2]
        aged = key + self.age[-1:].unflatten(-1, (self.heads, each))
        keys = torch.cat([keys, aged.transpose(1, 2)], dim=2)
        values = torch.cat([values, value.transpose(1, 2)], dim=2)
        attended = F.scaled_dot_product_attention(query.transpose(1, 2), keys, values)
        x = torch.addcmul(x, gate, self.project(attended.transpose(1, 2).reshape(b, n, width)))
        grid = torch.addcmul(shift_mlp, self.norm(x), scale_mlp).transpose(1, 2).unflatten(2, self.grid)
        local = self.local(grid).flatten(2).transpose(1, 2)
        return torch.addcmul(x, gate_mlp, self.down(F.relu(self.up(local)))), key.flatten(-2), value.flatten(-2)

    def _attention_and_mlp(self, x: Tensor, modulation: tuple[Tensor, ...], own: tuple[Tensor, Tensor, Tensor], past: Cache) -> Tensor:
        """x (b, t, n, hidden) after attention to own keys and values and those of the tokens before, past (b, window-1 + t, n, hidden)."""
        query, key, value = own
        _, _, gate, shift, scale, gate_mlp = self.modulations(modulation)
        t = x.shape[1]
        keys, values = SlidingWindows.apply(past[0], key, self.age[:, None]), SlidingWindows.apply(past[1], value, None)
        q, keys, values = (rearrange(part, "b t n (a e) -> (b t) a n e", a=self.heads) for part in (query, keys, values))
        attended = rearrange(F.scaled_dot_product_attention(q, keys, values), "(b t) a n e -> b t n (a e)", t=t)
        x = torch.addcmul(x, gate, self.project(attended))
        grid = rearrange(torch.addcmul(shift, self.norm(x), scale), "b t (h w) d -> (b t) d h w", h=self.grid[0])
        local = rearrange(self.local(grid), "(b t) d h w -> b t (h w) d", t=t)
        return torch.addcmul(x, gate_mlp, self.down(F.relu(self.up(local))))


class SlidingWindows(torch.autograd.Function):
    """What each of t tokens attends to: the tokens before it, by their age, and itself. (b, t, window n, hidden).

    past: (b, window-1 + t, n, hidden), whose first window-1 come before the first token; own: (b, t, n, hidden); age: (window, 1,
    hidden), added by how long ago a token was, own last, or None. With a backward of its own, since overlapping slices would each fill
    a gradient with zeros.
    """

    @staticmethod
    def forward(ctx: Any, past: Tensor, own: Tensor, age: Tensor | None) -> Tensor:
        b, t, n, hidden = own.shape
        ctx.window = window = past.shape[1] - t + 1
        ctx.aged = age is not None
        out = own.new_empty(b, t, window, n, hidden)
        for i in range(window):
            tokens = past[:, i : i + t] if i < window - 1 else own
            if age is None:
                out[:, :, i] = tokens
            else:
                torch.add(tokens, age[i], out=out[:, :, i])
        return out.flatten(2, 3)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        t, window = grad.shape[1], ctx.window
        each = grad.unflatten(2, (window, -1))
        past = grad.new_zeros(len(grad), window - 1 + t, *each.shape[3:])
        for i in range(window - 1):
            past[:, i : i + t] += each[:, :, i]
        return past, each[:, :, -1], each.sum((0, 1)).sum(1, keepdim=True) if ctx.aged else None


def _shifted(cache: Cache, new: Cache) -> Cache:
    """A cache after one more token, whose keys and values are (b, n, hidden): the oldest token drops out."""
    keys, values = (torch.cat([kept, one[:, None]], dim=1)[:, 1:] for kept, one in zip(cache, new, strict=True))
    return keys, values


def _convolved(grid: Tensor, weight: Tensor) -> Tensor:
    """(b, c, h, w) by a 3 x 3 kernel (d, c, 3, 3), as one product of matrices: (b, h w, d). For few and small grids."""
    return F.unfold(grid, 3, padding=1).transpose(1, 2) @ weight.flatten(1).T
