"""What the backbones for pictures promise: state, causality, a past of its own for each token, and roll-outs of grids."""

import pytest
import torch
from oracles import randomised, seeded

from diffusion_forcing import (
    Context,
    DiffusionForcing,
    NoiseSchedule,
    Preconditioning,
    autoregressive,
    cosine,
    history_guidance,
    pyramid,
    rollout,
)
from diffusion_forcing.backbones import BACKBONES, ConvRNN, SpaceTime, repeat_state
from diffusion_forcing.backbones.space_time import SlidingWindows, SpaceTimeState
from diffusion_forcing.sampling import stream
from diffusion_forcing.video.codec import Patches

K = 50
T = 6
EVENT = (3, 4, 6)  # wider than high, so that the two cannot be mixed up unnoticed
BUILD = {
    "conv_rnn": lambda: ConvRNN(EVENT, 2, latent=4, channels=8, scales=(1, 2), blocks=1, levels=K),
    "one size": lambda: ConvRNN(EVENT, 2, latent=3, channels=6, scales=(1,), blocks=1, levels=K),
    "space_time": lambda: SpaceTime(EVENT, 2, hidden=8, layers=3, heads=2, window=3, levels=K),
    "window 1": lambda: SpaceTime(EVENT, 2, hidden=8, layers=2, heads=2, window=1, full_attention_every=1, levels=K),
    "wide window": lambda: SpaceTime(EVENT, 2, hidden=8, layers=2, heads=1, window=12, full_attention_every=1, levels=K),
    "warp": lambda: SpaceTime(EVENT, 2, hidden=8, layers=3, heads=2, window=3, levels=K, warp=True, patches=(2, 4)),
    "input skip": lambda: SpaceTime(EVENT, 2, hidden=8, layers=3, heads=2, window=3, levels=K, input_skip=True),
    "warp and input skip": lambda: SpaceTime(
        EVENT, 2, hidden=8, layers=2, heads=2, window=3, levels=K, warp=True, patches=(2, 4), input_skip=True
    ),
}


def shaken(name, seed):
    """A network with random weights, in which pixels come from within the picture."""
    net = randomised(BUILD[name](), seed=seed)
    if getattr(net, "warp", None) is not None:
        with torch.no_grad():
            net.warp.std.abs_().add_(0.5)
            for parameter in net.warp.flow_out.parameters():
                parameter.mul_(0.1)
    return net


NETS = {name: shaken(name, seed=1) for name in BUILD}
every_net = pytest.mark.parametrize("name", NETS)
GRIDS = ["conv_rnn", "space_time"]
both = pytest.mark.parametrize("name", GRIDS)


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def sequence(t=T, b=3, seed=0):
    """Tokens, levels, conditions."""
    generator = seeded(seed)
    x, cond = torch.randn(b, t, *EVENT, generator=generator), torch.randn(b, t, 2, generator=generator)
    return x, torch.randint(0, K + 1, (b, t), generator=generator), cond


def cut(parts, *where):
    return tuple(part[:, slice(*where)] for part in parts)


def close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def compare_states(one, other):
    if isinstance(one, torch.Tensor):
        close(one, other)
        return
    assert type(one) is type(other)
    for a, b in zip(one, other, strict=True):
        compare_states(a, b)


def numbers(state):
    """How many numbers a state holds."""
    return state.numel() if isinstance(state, torch.Tensor) else sum(map(numbers, state))


def changed(parts, which, where, by):
    """Tokens, levels and conditions of which one is another at some tokens."""
    copies = [part.clone() for part in parts]
    copies[which][:, where] = (copies[which][:, where] + by) % (K + 1) if which == 1 else copies[which][:, where] + by
    return tuple(copies)


@every_net
def test_the_output_has_the_shape_of_the_tokens_and_says_something(name):
    x, k, cond = sequence()
    out, _ = NETS[name](x, k, cond)
    assert out.shape == x.shape
    assert out.isfinite().all()
    assert out.std() > 0.05
    assert NETS[name].causal


@pytest.mark.parametrize("past", [0, 1, T])
@pytest.mark.parametrize("name", ["space_time", "window 1", "wide window", "warp"])
def test_a_past_that_was_made_ready_says_the_same(name, past):
    net, parts = NETS[name], sequence(T + 1, b=len(NETS[name].blocks))  # as many sequences as blocks: neither may pass for the other
    state = net(*cut(parts, 0, past))[1] if past else None
    token = cut(parts, past, past + 1)
    out, after = net(*token, net.prefill(token[0], state, token[2]))
    close(out, net(*token, state)[0])
    assert after is None


@pytest.mark.parametrize("past", [0, 1, T])
@pytest.mark.parametrize("name", ["space_time", "window 1", "wide window", "warp"])
def test_a_token_that_is_remembered_by_the_compiled_pass_leaves_the_same_state(name, past, monkeypatch):
    """Compiled without a compiler: the same sums. With gradients, and for several tokens, it is not asked."""
    net, parts = NETS[name], sequence(T + 2, b=len(NETS[name].blocks))
    state = net(*cut(parts, 0, past))[1] if past else None
    token, more = cut(parts, past, past + 1), cut(parts, past, past + 2)
    plain, plain_more = net(*token, state), net(*more, state)
    asked = []

    def quick(*arguments):
        asked.append(arguments)
        return net.decode_step(*arguments)

    monkeypatch.setattr(net, "_compiled_step", quick)
    compare_states(net(*token, state), plain)
    assert len(asked) == 1
    compare_states(net(*more, state), plain_more)
    with torch.enable_grad():
        compare_states(net(*token, state), plain)
    assert len(asked) == 1


@pytest.mark.parametrize("name", BUILD)
def test_a_fresh_network_outputs_zeros(name):
    out, _ = BUILD[name]()(*sequence())
    assert torch.equal(out, torch.zeros_like(out))


@every_net
def test_every_input_matters_to_each_token(name):
    parts = sequence()
    out, _ = NETS[name](*parts)
    for which in range(3):
        other, _ = NETS[name](*changed(parts, which, slice(None), 7))
        assert ((other - out).abs().amax((2, 3, 4)) > 1e-4).all()


@every_net
def test_a_place_sees_the_whole_of_its_token(name):
    x, k, cond = sequence(t=1)
    out, _ = NETS[name](x, k, cond)
    corner = x.clone()
    corner[..., 0, 0] += 3
    other, _ = NETS[name](corner, k, cond)
    assert ((other - out).abs().amax((0, 1, 2)) > 1e-6).all()


@every_net
def test_places_are_told_apart(name):
    """A picture turned around is not merely its output turned around."""
    x, k, cond = sequence()
    out, _ = NETS[name](x, k, cond)
    for axis in (-1, -2):
        other, _ = NETS[name](x.flip(axis), k, cond)
        assert not torch.allclose(other.flip(axis), out, atol=1e-3)


@every_net
def test_every_parameter_learns(name):
    with torch.enable_grad():
        net = shaken(name, seed=2)
        net(*sequence())[0].pow(2).sum().backward()
    silent = [n for n, p in net.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert not silent


@pytest.mark.parametrize("dated", ["alike", "not"])
@pytest.mark.parametrize("window", [1, 2, 5])
def test_windows_are_slices_side_by_side_and_so_are_their_gradients(window, dated):
    t, n, generator = 4, 3, seeded(0)
    parts = [torch.randn(2, window - 1 + t, n, 5), torch.randn(2, t, n, 5), torch.randn(window, 1, 5)]
    past, own, dates = (part.double().normal_(generator=generator).requires_grad_() for part in parts)
    given = (past, own) if dated == "not" else (past, own, dates)
    added = torch.zeros(window, 1, 5) if dated == "not" else dates
    with torch.enable_grad():
        found = SlidingWindows.apply(past, own, None if dated == "not" else dates)
        wanted = torch.cat([*(past[:, i : i + t] + added[i] for i in range(window - 1)), own + added[-1]], dim=2)
    torch.testing.assert_close(found, wanted)
    weight = torch.randn(wanted.shape, generator=generator, dtype=torch.double)
    grads = [torch.autograd.grad(out, given, weight, allow_unused=True) for out in (found, wanted)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, torch.zeros_like(one) if other is None else other)


def test_a_noisy_token_goes_straight_to_the_output_as_its_level_asks():
    """With all else silent, what is said of a token is a share of each of its own numbers, by its level."""
    net = randomised(BUILD["input skip"](), seed=3)
    torch.nn.init.zeros_(net.proj_out.weight), torch.nn.init.zeros_(net.proj_out.bias)
    x, k, cond = sequence()
    out, _ = net(x, k, cond)
    torch.testing.assert_close(net(2 * x, k, cond)[0], 2 * out)
    share = (out / x).flatten(3)
    torch.testing.assert_close(share, share[..., :1].expand_as(share), rtol=1e-3, atol=1e-4)
    assert (net(x, (k + 20) % K, cond)[0] - out).abs().max() > 0.01


# Prefix plus state equals whole.


@every_net
@pytest.mark.parametrize("split", [1, T - 2])
def test_prefix_and_state_equal_the_whole(name, split):
    parts = sequence()
    whole, last = NETS[name](*parts)
    first, state = NETS[name](*cut(parts, split))
    rest, end = NETS[name](*cut(parts, split, None), state)
    close(torch.cat([first, rest], 1), whole)
    compare_states(end, last)


@every_net
def test_token_by_token_equals_the_whole(name):
    parts = sequence()
    whole, last = NETS[name](*parts)
    state, outs = None, []
    for t in range(T):
        out, state = NETS[name](*cut(parts, t, t + 1), state)
        outs.append(out)
    close(torch.cat(outs, 1), whole)
    compare_states(state, last)


@every_net
def test_a_state_can_be_used_again(name):
    """Sampling reads the same past at every step: reading does not change it."""
    parts = sequence()
    _, state = NETS[name](*cut(parts, 4))
    first, _ = NETS[name](*cut(parts, 4, None), state)
    NETS[name](*cut(sequence(seed=1), 4, None), state)
    again, _ = NETS[name](*cut(parts, 4, None), state)
    assert torch.equal(first, again)


@every_net
def test_the_past_matters_through_the_state(name):
    parts = sequence()
    (one, _), (two, _) = (NETS[name](*cut(parts, 4, None), NETS[name](*cut(p, 4))[1]) for p in (parts, sequence(seed=1)))
    assert not torch.allclose(one[:, 0], two[:, 0], atol=1e-3)


@every_net
def test_a_state_is_repeated_sequence_by_sequence(name):
    parts = sequence()
    _, state = NETS[name](*cut(parts, 4))
    rest, _ = NETS[name](*cut(parts, 4, None), state)
    many = repeat_state(state, 2)
    assert type(many) is type(state)
    out, _ = NETS[name](*(part.repeat_interleave(2, dim=0) for part in cut(parts, 4, None)), many)
    close(out, rest.repeat_interleave(2, dim=0))


@both
def test_the_state_stays_as_large_as_it_was(name):
    _, state = NETS[name](*sequence(t=1))
    size = numbers(state)
    for step in range(12):
        _, state = NETS[name](*sequence(t=1 + step % 3, seed=step), state)
        assert numbers(state) == size


def test_the_state_of_a_conv_rnn_is_its_latent():
    _, state = NETS["conv_rnn"](*sequence())
    assert state.shape == (3, 4, *EVENT[1:])
    parts = sequence()
    out, last = NETS["conv_rnn"](*parts)
    other, end = NETS["conv_rnn"](*parts, torch.zeros(3, 4, *EVENT[1:]))
    assert torch.equal(out, other)
    assert torch.equal(last, end)


def test_the_state_of_space_time_is_the_last_token_and_a_window_of_each_block():
    x, k, cond = sequence()
    _, state = NETS["space_time"](x, k, cond)
    assert isinstance(state, SpaceTimeState)
    assert torch.equal(state.x, x[:, -1:])
    assert torch.equal(state.k, k[:, -1:])
    places = EVENT[1] * EVENT[2]
    assert [key.shape for key, _ in state.caches] == [(3, window - 1, places, 8) for window in (2, 2, 3)]
    plain, _ = NETS["space_time"](x, k, cond, tuple(NETS["space_time"](x, k, cond)[1]))
    named, _ = NETS["space_time"](x, k, cond, state)
    assert torch.equal(plain, named)


# Causality, bit for bit.


@every_net
@pytest.mark.parametrize("which", [0, 1, 2], ids=["tokens", "levels", "conditions"])
@pytest.mark.parametrize("token", [1, 4])
def test_later_tokens_change_no_earlier_output(name, which, token):
    parts = sequence()
    out, _ = NETS[name](*parts)
    other, _ = NETS[name](*changed(parts, which, slice(token, None), 20))
    assert torch.equal(out[:, :token], other[:, :token])
    assert not torch.allclose(out[:, token], other[:, token], atol=1e-3)


@every_net
@pytest.mark.parametrize("which", [0, 1, 2], ids=["tokens", "levels", "conditions"])
def test_later_tokens_change_no_earlier_output_given_a_state(name, which):
    _, state = NETS[name](*sequence(t=3, seed=2))
    parts = sequence()
    out, _ = NETS[name](*parts, state)
    other, _ = NETS[name](*changed(parts, which, slice(4, None), 20), state)
    assert torch.equal(out[:, :4], other[:, :4])


@every_net
def test_no_gradient_flows_from_an_output_to_later_tokens(name):
    with torch.enable_grad():
        x, k, cond = sequence()
        x.requires_grad_()
        cond.requires_grad_()
        out, _ = NETS[name](x, k, cond)
        grads = torch.autograd.grad(out[:, 4].sum(), [x, cond])
    for grad in grads:
        assert torch.equal(grad[:, 5:], torch.zeros_like(grad[:, 5:]))
        assert (grad[:, 4].abs().flatten(1).amax(1) > 0).all()


@every_net
def test_clips_of_a_batch_do_not_see_each_other(name):
    parts = sequence()
    out, _ = NETS[name](*parts)
    for b in range(3):
        alone, _ = NETS[name](*(part[b : b + 1] for part in parts))
        close(alone, out[b : b + 1])
    for which in range(3):
        others = [part.clone() for part in parts]
        others[which][1:] = changed(parts, which, slice(None), 20)[which][1:]
        other, _ = NETS[name](*others)
        assert torch.equal(other[0], out[0])
        assert not torch.allclose(other[1:], out[1:], atol=1e-3)


@pytest.mark.parametrize("mode", ["train", "eval"])
@both
def test_training_and_judging_see_the_same_network(name, mode):
    """Nothing is dropped at random, and no statistics of a batch are kept."""
    net = randomised(BUILD[name](), seed=1)
    before = {n: b.clone() for n, b in net.named_buffers()}
    out, _ = getattr(net, mode)()(*sequence())
    assert torch.equal(out, NETS[name](*sequence())[0])
    assert all(torch.equal(b, before[n]) for n, b in net.named_buffers())


# How far back a transformer over space and time sees.


@pytest.mark.parametrize(
    ("layers", "window", "every", "reach"),
    [(1, 3, 3, 2), (3, 4, 3, 6), (2, 4, 1, 7), (4, 3, 2, 7), (2, 2, 3, 3), (3, 1, 2, 1)],
)
def test_blocks_look_back_by_their_windows_and_the_entry_by_one(layers, window, every, reach):
    """Every so many blocks one looks back window-1 tokens, the others one; the convolution at the entry another one."""
    assert reach == 1 + sum((window if i % every == every - 1 else min(2, window)) - 1 for i in range(layers))
    net = randomised(SpaceTime(EVENT, 2, hidden=8, layers=layers, heads=2, window=window, full_attention_every=every, levels=K))
    t = reach + 3
    parts = sequence(t=t)
    out, _ = net(*parts)
    for which, far in ((0, reach), (1, reach), (2, reach - 1)):  # conditions do not pass the entry
        seen = []
        for back in range(t):
            other, _ = net(*changed(parts, which, t - 1 - back, 20))
            seen.append(not torch.equal(other[:, -1], out[:, -1]))
        assert seen == [back <= far for back in range(t)]


def test_what_is_out_of_sight_does_not_shift_the_present():
    """Blocks of windows 2, 2, 3 and the entry look back five tokens: before those it does not matter where the sequence began."""
    parts = sequence(t=20)
    whole, _ = NETS["space_time"](*parts)
    late, _ = NETS["space_time"](*cut(parts, 10, None))
    close(late[:, 5:], whole[:, 15:])
    assert not torch.allclose(late[:, :5], whole[:, 10:15], atol=1e-3)


@pytest.mark.parametrize("name", ["conv_rnn", "one size"])
def test_a_conv_rnn_remembers_its_first_token(name):
    parts = sequence()
    out, _ = NETS[name](*parts)
    other, _ = NETS[name](*changed(parts, 0, 0, 3))
    assert ((other - out).abs().amax((2, 3, 4)) > 1e-7).all()


# A past of its own for each token.


@every_net
def test_forced_by_its_own_stream_is_forward(name):
    x, k, cond = sequence()
    out, _ = NETS[name](x, k, cond)
    close(NETS[name].forced(x, k, cond, x, k), out)


@every_net
@pytest.mark.parametrize("clean", [False, True])
def test_forced_is_each_token_after_another_past(name, clean):
    """By hand: read the past up to the token, then the token itself."""
    x, k, cond = sequence()
    past_x, past_k, _ = sequence(seed=1)
    if clean:
        past_k = torch.zeros_like(past_k)
    forced = NETS[name].forced(x, k, cond, past_x, past_k)
    slow = []
    for t in range(T):
        state = NETS[name](*cut((past_x, past_k, cond), t))[1] if t else None
        slow.append(NETS[name](*cut((x, k, cond), t, t + 1), state)[0])
    close(forced, torch.cat(slow, 1))
    own, _ = NETS[name](x, k, cond)
    close(forced[:, 0], own[:, 0])
    assert not torch.allclose(forced[:, 1:], own[:, 1:], atol=1e-3)


@every_net
def test_forced_does_not_see_its_own_token_as_past(name):
    x, k, cond = sequence()
    past_x, past_k, _ = sequence(seed=1)
    out = NETS[name].forced(x, k, cond, past_x, past_k)
    for late_x, late_k in ((3.0, 0), (0.0, 20)):  # of token 4 and later ones
        other_x, other_k = past_x.clone(), past_k.clone()
        other_x[:, 4:] += late_x
        other_k[:, 4:] = (other_k[:, 4:] + late_k) % (K + 1)
        other = NETS[name].forced(x, k, cond, other_x, other_k)
        assert torch.equal(out[:, :5], other[:, :5])
        assert not torch.allclose(out[:, 5], other[:, 5], atol=1e-4)


@every_net
def test_what_a_token_is_itself_no_other_sees_when_forced(name):
    x, k, cond = sequence()
    past_x, past_k, _ = sequence(seed=1)
    out = NETS[name].forced(x, k, cond, past_x, past_k)
    alone_x, alone_k = x.clone(), k.clone()
    alone_x[:, 3] += 3
    alone_k[:, 3] = (alone_k[:, 3] + 20) % (K + 1)
    other = NETS[name].forced(alone_x, alone_k, cond, past_x, past_k)
    assert torch.equal(out[:, :3], other[:, :3])
    close(out[:, 4:], other[:, 4:])
    assert not torch.allclose(out[:, 3], other[:, 3], atol=1e-3)


# As the backbone of a model.


def model_of(name, **options):
    return DiffusionForcing(NETS[name], NoiseSchedule(cosine(K)), **options)


@both
def test_a_loss_whose_past_is_its_own_is_the_plain_one(name):
    model = model_of(name)
    x, k, cond = sequence()
    noise = torch.randn(x.shape, generator=seeded(1))
    plain = model(x, k, cond, noise=noise)
    assert plain.shape == (3, T)
    close(model(x, k, cond, noise=noise, past=k), plain)
    assert not torch.allclose(model(x, k, cond, noise=noise, past=torch.zeros_like(k))[:, 1:], plain[:, 1:], atol=1e-3)


MATRICES = {
    "token after token": lambda ladder: autoregressive(1, ladder),
    "pyramid": lambda ladder: pyramid(3, ladder, 1.0),
    "all at once": lambda ladder: pyramid(2, ladder, 0.0),
}


@both
@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize("context", [0, 3])
def test_roll_outs_have_the_event_of_the_tokens(name, matrix, context):
    """With a context and without, and by the plain loop as by the faster one."""
    model = model_of(name)
    x, _, cond = sequence(t=context + 4)
    given = x[:, :context]
    matrix = MATRICES[matrix](model.schedule.ladder(2))
    options = {"past": Context(stabilization=4)}
    made, again, plain, other = (
        rollout(model, matrix, 4, given, cond, **options, **more)
        for more in (
            {"generator": seeded(0)},
            {"generator": seeded(0)},
            {"generator": seeded(0), "wrap": lambda denoise: lambda x, k: denoise(x, k)},
            {"generator": seeded(1)},
        )
    )
    assert made.shape == (3, 4, *EVENT)
    assert made.isfinite().all()
    assert torch.equal(made, again)
    torch.testing.assert_close(plain, made, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(made, other, atol=1e-2)


@both
def test_a_roll_out_goes_on_from_its_context_and_its_conditions(name):
    model = model_of(name)
    x, _, cond = sequence(t=5)
    matrix = autoregressive(1, model.schedule.ladder(3))

    def made(x, cond):
        return rollout(model, matrix, 3, x[:, :2], cond, generator=seeded(0))

    plain = made(x, cond)
    assert not torch.allclose(made(x + 1, cond), plain, atol=1e-3)
    late = cond.clone()
    late[:, 4] += 1
    other = made(x, late)
    assert torch.equal(other[:, :2], plain[:, :2])
    assert not torch.allclose(other[:, 2], plain[:, 2], atol=1e-3)


@both
@pytest.mark.parametrize("context", [0, 2])
def test_a_roll_out_takes_no_more_room_the_longer_it_is(name, context, monkeypatch):
    model = model_of(name)
    absorb, sizes = model.absorb, []

    def spy(*arguments, **options):
        state = absorb(*arguments, **options)
        sizes.append(numbers(state))
        return state

    monkeypatch.setattr(model, "absorb", spy)
    x, _, cond = sequence(t=context + 12)
    given = x[:, :context] if context else None
    chunks = list(
        stream(model, pyramid(2, model.schedule.ladder(2), 1.0), 12, given, cond, generator=seeded(0), past=Context(stabilization=3))
    )
    assert [chunk.shape for chunk in chunks] == [(3, 2, *EVENT)] * 6
    assert len(sizes) >= 6
    assert len(set(sizes)) == 1


@both
def test_a_denoiser_serves_copies_of_its_clips(name):
    model = model_of(name)
    x, k, cond = sequence()
    state = model.absorb(x[:, :3], cond[:, :3], level=k[:, :3])
    denoise = model.denoiser(cond[:, 3:], state)
    plain = denoise(x[:, 3:], k[:, 3:])
    twice = denoise(x[:, 3:].repeat_interleave(2, dim=0), k[:, 3:].repeat_interleave(2, dim=0))
    close(twice.x0, plain.x0.repeat_interleave(2, dim=0))


@every_net
def test_history_guidance_leads_away_from_what_is_said_without(name):
    model, (x, _, cond) = model_of(name), sequence()
    state = model.absorb(x[:, :4], cond[:, :4])
    token, k, told = x[:, 4:5], torch.full((3, 1), 30), cond[:, 4:5]
    with_it, without = model.predict(token, k, told, state), model.predict(token, k, told)
    assert (with_it.x0 - without.x0).abs().max() > 1e-3
    denoise = model.denoiser(told, state)
    for scale in (0.0, 1.0, 2.5):
        said = history_guidance(denoise, scale)(token, k)
        close(said.x0, without.x0 + scale * (with_it.x0 - without.x0))
        close(said.eps, without.eps + scale * (with_it.eps - without.eps))
    assert history_guidance(denoise, 1.0) is denoise
    nothing = model.denoiser(told)
    assert history_guidance(nothing, 3.0) is nothing
    # asked again, of other tokens and of copies, a denoiser says what the model says
    close(denoise(2 * token, k).x0, model.predict(2 * token, k, told, state).x0)
    other = model.absorb(-x[:, :4], cond[:, :4])
    denoise.state = other
    close(denoise(token, k).x0, model.predict(token, k, told, other).x0)
    denoise.state = state
    copies = [part.repeat_interleave(2, dim=0) for part in (token, k, told)]
    close(denoise(copies[0], copies[1]).x0, model.predict(*copies, repeat_state(state, 2)).x0)


@pytest.mark.parametrize("name", GRIDS)
def test_a_model_of_frames_is_saved_with_its_codec(name, tmp_path):
    frames = torch.rand(4, 6, 8, 12, 3, generator=seeded(0))
    codec = Patches.fit(frames, stack=2, patch=2, components=3)
    model = model_of(name, codec=codec, preconditioning=Preconditioning(codec.variance), weight="min_snr")
    model.save_pretrained(tmp_path)
    loaded = DiffusionForcing.from_pretrained(tmp_path)
    assert type(loaded.backbone) is BACKBONES[name]
    assert loaded.backbone.config == model.backbone.config
    tokens = model.codec.encode(frames)
    assert tokens.shape == (4, 3, 3, 4, 6)
    assert torch.equal(loaded.codec.encode(frames), tokens)
    assert torch.equal(loaded.codec.decode(tokens), model.codec.decode(tokens))
    k, cond = torch.tensor([[0, 10, K]]).expand(4, -1), torch.ones(4, 3, 2)
    assert torch.equal(loaded.variance, codec.variance)
    assert torch.equal(loaded.predict(tokens, k, cond).x0, model.predict(tokens, k, cond).x0)


@every_net
def test_the_config_builds_the_same_network(name):
    net = NETS[name]
    twin = type(net)(**net.config).eval()
    twin.load_state_dict(net.state_dict())
    assert torch.equal(twin(*sequence())[0], net(*sequence())[0])


@pytest.mark.parametrize("name", GRIDS)
def test_a_network_without_conditions_is_told_none(name):
    net = randomised(BACKBONES[name](**{**NETS[name].config, "cond": 0}))
    x, k, _ = sequence()
    assert net(x, k, x.new_zeros(3, T, 0))[0].shape == x.shape
    assert DiffusionForcing(net, NoiseSchedule(cosine(K)))(x, k).shape == (3, T)


# What cannot be.


@pytest.mark.parametrize("kind", [ConvRNN, SpaceTime])
@pytest.mark.parametrize("event", [(3,), (4, 4), (1, 3, 4, 4), (3, 0, 4)])
def test_tokens_that_are_no_pictures_are_refused(kind, event):
    with pytest.raises(ValueError, match=r"reads tokens of \(channels, height, width\); got tokens of shape"):
        kind(event)


@pytest.mark.parametrize(
    ("kind", "event", "options", "words"),
    [
        (ConvRNN, (3, 6, 8), {"scales": (1, 2, 4)}, "3 scales halve a picture 2 times.*multiples of 4; got 6 x 8: give fewer scales"),
        (ConvRNN, (3, 8, 6), {"scales": (1, 2, 4)}, "multiples of 4; got 8 x 6"),
        (ConvRNN, (3, 4, 4), {}, "4 scales halve a picture 3 times.*multiples of 8; got 4 x 4"),
        (ConvRNN, (3, 8, 8), {"scales": ()}, "scales"),
        (ConvRNN, (3, 8, 8), {"latent": 0}, "latent counts from 1; got 0"),
        (ConvRNN, (3, 8, 8), {"channels": 0}, "channels counts from 1; got 0"),
        (ConvRNN, (3, 8, 8), {"blocks": 0}, "blocks counts from 1; got 0"),
        (SpaceTime, EVENT, {"hidden": 16, "heads": 3}, "heads.*3 must divide 16"),
        (SpaceTime, EVENT, {"heads": 0}, "heads counts from 1; got 0"),
        (SpaceTime, EVENT, {"layers": 0}, "layers counts from 1; got 0"),
        (SpaceTime, EVENT, {"window": 0}, "window counts from 1; got 0"),
        (SpaceTime, EVENT, {"full_attention_every": 0}, "full_attention_every counts from 1; got 0"),
    ],
    ids=str,
)
def test_a_network_that_cannot_be_is_refused(kind, event, options, words):
    with pytest.raises(ValueError, match=words):
        kind(event, **options)


@both
@pytest.mark.parametrize("event", [(3,), (3, 6, 4), (4, 4, 6), (3, 4, 6, 1)])
def test_tokens_of_another_shape_are_refused_by_the_model(name, event):
    model = model_of(name)
    with pytest.raises(ValueError, match=r"the backbone reads tokens of shape \(3, 4, 6\); got tokens of shape"):
        model.predict(torch.zeros(2, 3, *event), torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 3, 2))


@both
def test_conditions_of_another_width_are_refused_by_the_model(name):
    x, k, _ = sequence()
    with pytest.raises(ValueError, match="reads conditions of 2 numbers a token; got 0"):
        model_of(name).predict(x, k)


@pytest.mark.parametrize(
    "channels",
    [
        16,
        32,
        56,
    ],
)
def test_any_number_of_channels_makes_a_network(channels):
    net = ConvRNN((3, 2, 2), channels=channels, scales=(1, 2), blocks=1, levels=K)
    assert net(torch.zeros(1, 1, 3, 2, 2), torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, 1, 0))[0].shape == (1, 1, 3, 2, 2)


def test_a_latent_goes_on_in_its_own_precision_whatever_the_network_computes_in():
    """As in mixed precision, where convolutions answer in half precision."""
    network = ConvRNN((3, 8, 8), latent=4, channels=4, scales=(1, 2), blocks=1)
    for layer in (network.gates, network.candidate):
        layer.register_forward_hook(lambda _layer, _inputs, out: out.bfloat16())
    said = network.embed(torch.zeros(2, 1).long(), torch.zeros(2, 1, 0))[:, 0]
    z = network.step(torch.randn(2, 3, 8, 8), said, torch.zeros(2, 4, 8, 8))
    assert z.dtype == torch.float32
