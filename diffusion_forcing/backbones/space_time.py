"""A transformer over tokens that are grids: causal in time, seeing all of the picture, with a cache of keys and values.

A place of a token attends to all places of its own token and of those before it, within a window: most blocks look back one token, every
third as far as the window goes. Nothing is normalised over time or over the batch, so no earlier output depends on a later frame.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ..checks import check_counts, check_divides
from .flow_warp import Moved
from .layers import LevelEmbedding, Modulated, zeroed

Cache = tuple[Tensor, Tensor]  # keys and values of the last tokens, (b, window-1, places, hidden) each: zeros where there were none yet


class Memory(NamedTuple):
    """x (b, 1, c, h, w) and k (b, 1): the last token as it was given, for the convolution at the entry. caches: of each block."""

    x: Tensor
    k: Tensor
    caches: tuple[Cache, ...]


class Before(NamedTuple):
    """What is known of tokens before they are seen themselves.

    known: (b, t, hidden), by the levels of the tokens before them, and what they are told. seen: (b, t, ..., h, w), what the entry reads
    beside them: the tokens before, and the guess by these with its mask. guess: (b, t, c, h, w) alone, where there is one.
    """

    known: Tensor
    seen: Tensor
    guess: Tensor | None

    def copied(self, copies: int) -> Before:
        """Each sequence so many times, beside one another."""
        known, seen = (part.repeat_interleave(copies, dim=0) for part in (self.known, self.seen))
        return Before(known, seen, None if self.guess is None else self.guess.repeat_interleave(copies, dim=0))


class Ready(NamedTuple):
    """All of a past that a single next token needs, worked out once for the many steps in which that token is denoised.

    entered: (b, n, hidden), what of `Before.seen` is in the convolution at the entry, with its bias and the places. known: (b, 1, hidden).
    pasts: of each block, keys and values (b, heads, (window-1) n, hidden / heads). own: (blocks, 6, hidden), the modulation of each.
    guess: (b, 1, c, h, w), where there is one.
    """

    entered: Tensor
    known: Tensor
    pasts: tuple[Cache, ...]
    own: Tensor
    guess: Tensor | None = None


class SpaceTime(nn.Module):
    """Tokens (c, h, w) through blocks of attention over space and time. Causal. State: `Memory`.

    hidden: width of a place; layers: blocks; heads: must divide hidden; window: tokens a token sees, itself included; every: each so
    many blocks one sees the whole window, the others see two tokens. turned: queries and keys are turned by where they are (`Turned`).
    moved: frames a token and pixels a patch's side, for a guess by moving pixels of the last frame (`Moved`); None: without one.
    straight: noisy tokens also go straight to the output, as much of each number as their level asks for.
    """

    causal = True
    shares_past = True  # `forced` reads the past of several versions of a sequence once
    stabilization = "noise"  # the context is noised to, and labelled with, the small level

    def __init__(
        self, event: tuple[int, int, int], cond: int = 0, *, hidden: int = 128, layers: int = 8, heads: int = 4, window: int = 8,
        every: int = 3, levels: int = 1000, turned: bool = False, moved: tuple[int, int] | None = None, straight: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        check_counts(hidden=hidden, layers=layers, heads=heads, window=window, every=every)
        check_divides(heads, hidden, "heads of a transformer must divide its hidden width")
        if len(event) != 3 or min(event) < 1:
            raise ValueError(f"this backbone reads tokens of (channels, height, width); got tokens of shape {tuple(event)}")
        self.config: dict[str, Any] = {
            "event": list(event), "cond": cond, "hidden": hidden, "layers": layers, "heads": heads, "window": window, "every": every,
            "levels": levels, "turned": turned, "moved": None if moved is None else list(moved), "straight": straight,
        }  # fmt: skip
        c, self.height, self.width = event
        self.levels = levels
        self.moved = None if moved is None else Moved(event, hidden, *moved)
        # Each place sees its neighbours and the token before from the start: what moved a little is there already.
        self.enter = nn.Conv2d(2 * c if moved is None else 3 * c + moved[0], hidden, 3, padding=1)
        self.place = nn.Parameter(0.02 * torch.randn(self.height * self.width, hidden))
        self.level = LevelEmbedding(hidden, levels)
        self.before = nn.Linear(hidden, hidden)
        self.told = nn.Linear(cond, hidden) if cond else None
        # One projection serves the modulation of all blocks; each adds a bias of its own.
        self.modulate = zeroed(nn.Linear(hidden, 6 * hidden))
        windows = [window if block % every == every - 1 else min(2, window) for block in range(layers)]
        self.blocks = nn.ModuleList(Block(hidden, heads, one, (self.height, self.width), turned) for one in windows)
        self.final = nn.LayerNorm(hidden)
        self.leave = zeroed(nn.Conv2d(hidden, c, 3, padding=1))
        self.leave_guess = None if moved is None else zeroed(nn.Linear(hidden, c))  # what of the guess goes straight to the output
        self.leave_own = zeroed(nn.Linear(hidden, c)) if straight else None  # and what of the noisy token itself
        self._quick: Callable[[Tensor, Tensor, Ready], tuple[Tensor, tuple[Cache, ...]]] | None = None

    def forward(self, x: Tensor, k: Tensor, cond: Tensor, state: Memory | Ready | None = None) -> tuple[Tensor, Memory | None]:
        """x: (b, t, c, h, w); k: (b, t); cond: (b, t, a). Returns out like x, and the state after the last token.

        After a state that is `Ready` one token is read, which was told its condition there, and no state is returned.
        """
        if isinstance(state, Ready):
            return (self._next if self._quick is None else self._quick)(x, k, state)[0], None
        state = self.start(x) if state is None else Memory(*state)
        if self._quick is not None and x.shape[1] == 1 and not torch.is_grad_enabled():
            out, own = self._quick(x, k, self.ready(x, state, cond))
            return out, Memory(x, k, tuple(_rolled(cache, seen) for cache, seen in zip(state.caches, own, strict=True)))
        past_x, past_k = torch.cat([state.x, x], dim=1)[:, :-1], torch.cat([state.k, k], dim=1)[:, :-1]
        before = self._before(past_x, past_k, cond)
        hidden, level, said = self.embed(x, k, before)
        caches = []
        for block, cache in zip(self.blocks, state.caches, strict=True):
            hidden, kept = block(hidden, level, cache)
            caches.append(kept)
        return self.predict(hidden, said, x, before.guess), Memory(x[:, -1:], k[:, -1:], tuple(caches))

    def compile_next(self) -> None:
        """Have torch.compile make the pass over a single next token (`ready`) from the first call on, for as many sequences as it has.

        Weights are then as they were, until others are loaded or the network is put into training (`train`).
        """
        if self._quick is None:
            self._quick = torch.compile(self._next, dynamic=False, options={"freezing": True, "cpp_wrapper": True})

    def grown(self, entry: Tensor) -> Tensor:
        """The entry's weights from before a network moved pixels, such that it says the same with them: what is new counts nothing yet."""
        weight = torch.zeros_like(self.enter.weight)
        weight[:, : entry.shape[1]] = entry
        return weight

    def train(self, mode: bool = True) -> SpaceTime:
        if mode:
            self._forget_compiled()
        return super().train(mode)

    def _load_from_state_dict(self, *arguments: Any, **options: Any) -> None:
        self._forget_compiled()
        super()._load_from_state_dict(*arguments, **options)

    def _forget_compiled(self) -> None:
        """What was compiled holds the weights of that time."""
        if self._quick is not None:
            self._quick = None
            torch.compiler.reset()

    def __getstate__(self) -> dict[str, Any]:
        """A copy has weights of its own, which what was compiled for this one does not know of."""
        return {**self.__dict__, "_quick": None}

    def start(self, x: Tensor) -> Memory:
        """Before the first token: nothing, written as noise that was never drawn."""
        b, places = len(x), self.height * self.width
        hidden = self.final.weight.shape[0]
        caches = tuple((x.new_zeros(b, block.window - 1, places, hidden),) * 2 for block in self._blocks())
        return Memory(torch.zeros_like(x[:, :1]), torch.full((b, 1), self.levels, device=x.device), caches)

    def ready(self, x: Tensor, state: Memory | None, cond: Tensor | None = None) -> Ready:
        """The past of the next token x (b, 1, c, h, w), which comes alone and is yet to be denoised; cond (b, 1, a): what it is told."""
        state = self.start(x) if state is None else Memory(*state)
        c, blocks = x.shape[2], self._blocks()
        known, seen, guess = self._before(state.x, state.k, cond)
        entered = _convolved(seen[:, 0], self.enter.weight[:, c:]) + (self.place + self.enter.bias)  # type: ignore[operator]
        pasts = tuple(block.past(*cache) for block, cache in zip(blocks, state.caches, strict=True))
        own = torch.stack([block.modulation for block in blocks]).unflatten(1, (6, -1)) + blocks[0].base
        return Ready(entered, known, pasts, own, guess)

    def _next(self, x: Tensor, k: Tensor, ready: Ready) -> tuple[Tensor, tuple[Cache, ...]]:
        """As forward, for one token: the same sums by fewer and larger operations, since these are many and small.

        Returns out, and keys and values (b, n, hidden) of each block.
        """
        said = self.level(k) + ready.known
        asked = self.modulate(F.silu(said[:, 0])).unflatten(-1, (6, -1)) + ready.own[:, None]  # (blocks, b, 6, hidden)
        hidden = _convolved(x[:, 0], self.enter.weight[:, : x.shape[2]]) + ready.entered + said
        own = []
        for block, past, modulations in zip(self._blocks(), ready.pasts, asked, strict=True):
            hidden, key, value = block.next(hidden, modulations[:, :, None].unbind(1), *past)
            own.append((key, value))
        grid = self.final(hidden).transpose(1, 2).unflatten(2, (self.height, self.width))
        out = (_convolved(grid, self.leave.weight) + self.leave.bias).transpose(1, 2).reshape(x.shape)  # type: ignore[operator]
        return self._straight(out, said, x, ready.guess), tuple(own)

    def embed(self, x: Tensor, k: Tensor, before: Before) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
        """Places (b, t, n, hidden) of tokens x at levels k, six modulations (b, t, 1, hidden), and what both say (b, t, hidden)."""
        said = self.level(k) + before.known
        grid = self.enter(torch.cat([x, before.seen], dim=2).flatten(0, 1))
        hidden = rearrange(grid, "(b t) d h w -> b t (h w) d", b=len(x)) + self.place
        return hidden + said[:, :, None], self.modulate(F.silu(said))[:, :, None].chunk(6, dim=-1), said

    def _before(self, past_x: Tensor, past_k: Tensor, cond: Tensor | None) -> Before:
        """For tokens that follow past_x (b, t, c, h, w) at levels past_k (b, t), and are told cond (b, t, a)."""
        known = self._known(past_k, cond)
        if self.moved is None:
            return Before(known, past_x, None)
        guess, mask = (part.unflatten(0, past_x.shape[:2]) for part in self.moved(past_x.flatten(0, 1), known.flatten(0, 1)))
        return Before(known, torch.cat([past_x, guess, mask], dim=2), guess)

    def _known(self, past_k: Tensor, cond: Tensor | None) -> Tensor:
        """(b, t, hidden), what is known of tokens by the levels past_k (b, t) of those before them, and by what they are told."""
        known = self.before(self.level(past_k))
        if self.told is None:
            return known
        if cond is None:
            raise ValueError("this network is told conditions: give those of the next token too, ready(x, state, cond)")
        return known + self.told(cond)

    def guess(self, past_x: Tensor, past_k: Tensor, cond: Tensor | None = None) -> Tensor:
        """What moving pixels says of the tokens that follow past_x (b, t, c, h, w) at levels past_k (b, t), told cond (b, t, a)."""
        guess = self._before(past_x, past_k, cond).guess
        if guess is None:
            raise ValueError("this network moves no pixels; build it with moved=(frames a token, pixels a patch's side)")
        return guess

    def carry(self, frames: Tensor, past_x: Tensor, cond: Tensor | None = None) -> Tensor:
        """What of frames (b, t, h, w, 3), each the last of a clean token past_x (b, t, c, gh, gw), will be seen in the token after it.

        cond: (b, t, a), what those are told. Returns (b, t, stack, h, w, 4), colours and how much of each pixel was in sight.
        """
        if self.moved is None:
            raise ValueError("this network moves no pixels; build it with moved=(frames a token, pixels a patch's side)")
        known = self._known(torch.zeros(past_x.shape[:2], dtype=torch.long, device=past_x.device), cond)
        flat = rearrange(frames, "b t h w a -> (b t) a h w")
        found = self.moved.carry(flat, past_x.flatten(0, 1), known.flatten(0, 1))
        return rearrange(found, "(b t) a (s h) w -> b t s h w a", b=len(frames), s=self.moved.stack)

    def _straight(self, out: Tensor, said: Tensor, x: Tensor, guess: Tensor | None) -> Tensor:
        """The output with what goes there straight, number by number and by what is said (b, t, hidden) of levels: of the guess, and of the
        noisy tokens x. Through the blocks, which are narrow, neither would come whole.
        """
        for gain, part in ((self.leave_guess, guess), (self.leave_own, x)):
            if gain is not None and part is not None:
                out = torch.addcmul(out, gain(F.silu(said))[..., None, None], part)
        return out

    def predict(self, hidden: Tensor, said: Tensor, x: Tensor, guess: Tensor | None) -> Tensor:
        """What the network says of tokens x, whose places are hidden (b, t, n, hidden) after the last block."""
        grid = rearrange(self.final(hidden), "b t (h w) d -> (b t) d h w", h=self.height)
        out = rearrange(self.leave(grid), "(b t) c h w -> b t c h w", b=len(hidden))
        return self._straight(out, said, x, guess)

    def forced(self, x: Tensor, k: Tensor, cond: Tensor, past_x: Tensor, past_k: Tensor) -> Tensor:
        """Each token x_t at level k_t given a past that reads differently: tokens past_x at levels past_k. All t at once.

        x may be several noisy copies of each sequence beside one another, (n b, t, ...): then the past, which they share, is read once.
        """
        none, copies = self.start(past_x), len(x) // len(past_x)
        shifted = torch.cat([none.x, past_x], dim=1)[:, :-1], torch.cat([none.k, past_k], dim=1)[:, :-1]
        before = self._before(*shifted, cond[::copies])
        past, past_level, _ = self.embed(past_x, past_k, before)
        copied = before.copied(copies)
        hidden, level, said = self.embed(x, k, copied)
        blocks = self._blocks()
        for block, cache in zip(blocks, none.caches, strict=True):
            seen = block.heads_of(past, past_level)
            hidden = block.beside(hidden, level, seen, cache)
            if block is not blocks[-1]:  # of which the past is asked no more
                past = block.among(past, past_level, seen, cache)[0]
        return self.predict(hidden, said, x, copied.guess)

    def _blocks(self) -> list[Block]:
        return list(self.blocks)  # type: ignore[arg-type]


class Block(Modulated):
    """Attention over own and earlier places, then an MLP with a look at the neighbours; both modulated by the token's level."""

    def __init__(self, hidden: int, heads: int, window: int, grid: tuple[int, int], turned: bool = False) -> None:
        super().__init__(hidden)
        self.heads, self.window, self.grid = heads, window, grid
        self.turned = Turned(hidden // heads, grid) if turned else None
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.norm_q = nn.RMSNorm(hidden // heads)
        self.norm_k = nn.RMSNorm(hidden // heads)
        self.ago = nn.Parameter(0.02 * torch.randn(window, hidden))  # added to keys: how long ago their token was, own last
        self.project = zeroed(nn.Linear(hidden, hidden))
        self.up = nn.Linear(hidden, 4 * hidden)
        self.near = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden)
        nn.init.dirac_(self.near.weight, groups=hidden)  # as if it were not there, until it has learned otherwise
        nn.init.zeros_(self.near.bias)  # type: ignore[arg-type]
        self.down = zeroed(nn.Linear(4 * hidden, hidden))

    def forward(self, x: Tensor, level: tuple[Tensor, ...], cache: Cache) -> tuple[Tensor, Cache]:
        """x: (b, t, n, hidden); level: six of (b, t, 1, hidden). Returns x and the cache after the last token."""
        return self.among(x, level, self.heads_of(x, level), cache)

    def among(self, x: Tensor, level: tuple[Tensor, ...], own: tuple[Tensor, Tensor, Tensor], cache: Cache) -> tuple[Tensor, Cache]:
        """As forward, where the tokens' queries, keys and values are known."""
        query, key, value = own
        whole = torch.cat([cache[0], key], dim=1), torch.cat([cache[1], value], dim=1)
        last = whole[0].shape[1] - self.window + 1
        return self._after(x, level, query, key, value, whole), (whole[0][:, last:], whole[1][:, last:])

    def beside(self, x: Tensor, level: tuple[Tensor, ...], past: tuple[Tensor, Tensor, Tensor], cache: Cache) -> Tensor:
        """Tokens that attend to themselves and to the past of another stream, by its queries, keys and values.

        x: (n b, t, places, hidden), n copies of each sequence of the past beside one another.
        """
        query, key, value = self.heads_of(x, level)
        whole = [torch.cat([none, seen], dim=1) for none, seen in zip(cache, past[1:], strict=True)]
        if len(x) > len(whole[0]):
            whole = [seen.repeat_interleave(len(x) // len(seen), dim=0) for seen in whole]
        return self._after(x, level, query, key, value, (whole[0], whole[1]))

    def heads_of(self, x: Tensor, level: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, (b, t, n, hidden) each."""
        shift, scale = self.modulations(level)[:2]
        query, key, value = self.qkv(torch.addcmul(shift, self.norm(x), scale)).chunk(3, dim=-1)
        split = (self.heads, x.shape[-1] // self.heads)
        query, key = self.norm_q(query.unflatten(-1, split)), self.norm_k(key.unflatten(-1, split))
        if self.turned is not None:
            query, key = self.turned(query), self.turned(key)
        return query.flatten(-2), key.flatten(-2), value

    def dates(self) -> Tensor:
        """(window, places or 1, hidden), what is added to keys for their token's age, own last."""
        if self.turned is None:
            return self.ago[:, None]
        ago = self.ago.unflatten(-1, (self.heads, -1))[:, None].expand(-1, self.grid[0] * self.grid[1], -1, -1)
        return self.turned(ago).flatten(-2)

    def past(self, keys: Tensor, values: Tensor) -> Cache:
        """A cache as the next token attends to it: (b, heads, (window-1) n, hidden / heads) each."""
        dated = keys + self.dates()[:-1]
        split = "b t n (a e) -> b a (t n) e"
        return rearrange(dated, split, a=self.heads).contiguous(), rearrange(values, split, a=self.heads).contiguous()

    def next(self, x: Tensor, modulations: tuple[Tensor, ...], keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As forward, for one token x (b, n, hidden), six modulations (b, 1, hidden), and keys and values of `past`.

        Returns x, and the token's own keys and values, (b, n, hidden) each.
        """
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = modulations
        b, n, width = x.shape
        each = width // self.heads
        qkv = self.qkv(torch.addcmul(shift, self.norm(x), scale)).view(b, n, 3, self.heads, each)
        query, key, value = self.norm_q(qkv[:, :, 0]), self.norm_k(qkv[:, :, 1]), qkv[:, :, 2]
        if self.turned is not None:
            query, key = self.turned(query), self.turned(key)
        dated = key + self.dates()[-1].unflatten(-1, (self.heads, each))
        keys = torch.cat([keys, dated.transpose(1, 2)], dim=2)
        values = torch.cat([values, value.transpose(1, 2)], dim=2)
        attended = F.scaled_dot_product_attention(query.transpose(1, 2), keys, values)
        x = torch.addcmul(x, gate, self.project(attended.transpose(1, 2).reshape(b, n, width)))
        grid = torch.addcmul(shift_mlp, self.norm(x), scale_mlp).transpose(1, 2).unflatten(2, self.grid)
        near = self.near(grid).flatten(2).transpose(1, 2)
        return torch.addcmul(x, gate_mlp, self.down(F.relu(self.up(near)))), key.flatten(-2), value.flatten(-2)

    def _after(self, x: Tensor, level: tuple[Tensor, ...], query: Tensor, key: Tensor, value: Tensor, past: Cache) -> Tensor:
        """x (b, t, n, hidden) after attention to own keys and values and those of the tokens before, past (b, window-1 + t, n, hidden)."""
        _, _, gate, shift, scale, gate_mlp = self.modulations(level)
        t = x.shape[1]
        keys, values = Windows.apply(past[0], key, self.dates()), Windows.apply(past[1], value, None)
        q, keys, values = (rearrange(part, "b t n (a e) -> (b t) a n e", a=self.heads) for part in (query, keys, values))
        attended = rearrange(F.scaled_dot_product_attention(q, keys, values), "(b t) a n e -> b t n (a e)", t=t)
        x = torch.addcmul(x, gate, self.project(attended))
        grid = rearrange(torch.addcmul(shift, self.norm(x), scale), "b t (h w) d -> (b t) d h w", h=self.grid[0])
        near = rearrange(self.near(grid), "(b t) d h w -> b t (h w) d", t=t)
        return torch.addcmul(x, gate_mlp, self.down(F.relu(self.up(near))))


class Windows(torch.autograd.Function):
    """What each of t tokens looks at: the tokens before it, by their dates, and itself. (b, t, window n, hidden).

    past: (b, window-1 + t, n, hidden), whose first window-1 come before the first token; own: (b, t, n, hidden); dates: (window, n or 1,
    hidden), added by how long ago a token was, own last, or None. Written by hand since slices that overlap would each fill a gradient
    of their own with zeros.
    """

    @staticmethod
    def forward(ctx: Any, past: Tensor, own: Tensor, dates: Tensor | None) -> Tensor:
        b, t, n, hidden = own.shape
        ctx.window = window = past.shape[1] - t + 1
        ctx.dates = None if dates is None else dates.shape
        out = own.new_empty(b, t, window, n, hidden)
        for i in range(window):
            seen = past[:, i : i + t] if i < window - 1 else own
            if dates is None:
                out[:, :, i] = seen
            else:
                torch.add(seen, dates[i], out=out[:, :, i])
        return out.flatten(2, 3)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        t, window = grad.shape[1], ctx.window
        each = grad.unflatten(2, (window, -1))
        past = grad.new_zeros(len(grad), window - 1 + t, *each.shape[3:])
        for i in range(window - 1):
            past[:, i : i + t] += each[:, :, i]
        if ctx.dates is None:
            return past, each[:, :, -1], None
        by_date = each.sum((0, 1))
        return past, each[:, :, -1], by_date if ctx.dates[1] > 1 else by_date.sum(1, keepdim=True)


class Turned(nn.Module):
    """Queries and keys turned by angles that grow with row and column, so that their product sees how far apart two places are.

    What moves through the picture then moves alike everywhere: one rule to learn, not one for each place.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, width: int, grid: tuple[int, int]) -> None:
        super().__init__()
        check_divides(4, width, "turned by rows and columns, a head's width must be a multiple of")
        each = width // 4
        rates = 2.0 * 16.0 ** (-torch.arange(each) / each)  # from about two thirds of a turn in two places to a turn in about forty
        rows, columns = torch.meshgrid(*(torch.arange(side) for side in grid), indexing="ij")
        angle = torch.cat([rows.reshape(-1, 1) * rates, columns.reshape(-1, 1) * rates], dim=-1)[:, None]  # (places, 1, width / 2)
        self.register_buffer("cos", torch.cat([angle.cos()] * 2, dim=-1), persistent=False)
        self.register_buffer("sin", torch.cat([-angle.sin(), angle.sin()], dim=-1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., places, heads, width)."""
        return torch.addcmul(x * self.cos, x.roll(x.shape[-1] // 2, dims=-1), self.sin)


def _rolled(cache: Cache, seen: Cache) -> Cache:
    """A cache after one more token, whose keys and values are (b, n, hidden): the oldest is forgotten."""
    keys, values = (torch.cat([kept, new[:, None]], dim=1)[:, 1:] for kept, new in zip(cache, seen, strict=True))
    return keys, values


def _convolved(grid: Tensor, weight: Tensor) -> Tensor:
    """(b, c, h, w) by a 3 x 3 kernel (d, c, 3, 3), as one product of matrices: (b, h w, d). For few and small grids."""
    return F.unfold(grid, 3, padding=1).transpose(1, 2) @ weight.flatten(1).T
