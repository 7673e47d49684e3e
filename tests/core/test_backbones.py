"""What every backbone promises: state, causality, a past of its own for each token."""

import pytest
import torch
from oracles import randomised, seeded

from diffusion_forcing import RNN, Transformer
from diffusion_forcing.backbones import BACKBONES
from diffusion_forcing.backbones.layers import LevelEmbedding, Rotary
from diffusion_forcing.backbones.transformer import attend

K = 50
T = 9
BUILD = {
    "rnn": lambda: RNN(3, 2, hidden=16, levels=K),
    "deep rnn": lambda: RNN(3, 2, hidden=16, layers=3, blocks=1, levels=K),
    "transformer": lambda: Transformer(3, 2, hidden=16, heads=2, layers=3, levels=K),
    "window 1": lambda: Transformer(3, 2, hidden=16, heads=2, layers=3, window=1, levels=K),
    "window 3": lambda: Transformer(3, 2, hidden=16, heads=4, layers=3, window=3, levels=K),
    "wide window": lambda: Transformer(3, 2, hidden=16, heads=2, layers=2, window=100, levels=K),
    "seeing": lambda: Transformer(3, 2, hidden=16, heads=2, layers=3, causal=False, levels=K),
}
NETS = {name: randomised(build(), seed=1) for name, build in BUILD.items()}
CAUSAL = [name for name in NETS if name != "seeing"]
WINDOWED = {"window 1": 1, "window 3": 3}
every_net = pytest.mark.parametrize("name", NETS)
every_causal_net = pytest.mark.parametrize("name", CAUSAL)


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def sequence(t=T, b=4, seed=0):
    """Tokens, levels, conditions."""
    generator = seeded(seed)
    x, cond = torch.randn(b, t, 3, generator=generator), torch.randn(b, t, 2, generator=generator)
    return x, torch.randint(0, K + 1, (b, t), generator=generator), cond


def cut(parts, *where):
    return tuple(part[:, slice(*where)] for part in parts)


def close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@every_net
def test_the_output_has_the_shape_of_the_tokens_and_says_something(name):
    x, k, cond = sequence()
    out, _ = NETS[name](x, k, cond)
    assert out.shape == x.shape
    assert out.isfinite().all()
    assert out.std() > 0.05
    assert NETS[name].causal == (name != "seeing")


@pytest.mark.parametrize("name", BUILD)
def test_a_fresh_network_outputs_zeros(name):
    out, _ = BUILD[name]()(*sequence())
    assert torch.equal(out, torch.zeros_like(out))


@every_net
def test_every_input_matters(name):
    """Tokens, levels and conditions all reach the output, each token by itself."""
    x, k, cond = sequence()
    out, _ = NETS[name](x, k, cond)
    for changed in ((x + 1, k, cond), (x, (k + 7) % (K + 1), cond), (x, k, cond + 1)):
        other, _ = NETS[name](*changed)
        assert ((other - out).abs().amax(-1) > 1e-4).all()


# Prefix plus state equals whole.


@every_causal_net
@pytest.mark.parametrize("split", [1, 2, 4, T - 1])
def test_prefix_and_state_equal_the_whole(name, split):
    parts = sequence()
    whole, last = NETS[name](*parts)
    first, state = NETS[name](*cut(parts, split))
    rest, end = NETS[name](*cut(parts, split, None), state)
    close(torch.cat([first, rest], 1), whole)
    compare_states(end, last)


def compare_states(one, other):
    if isinstance(one, torch.Tensor):
        close(one, other)
        return
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        compare_states(a, b)


@pytest.mark.parametrize("split", [1, 2, 4, T - 1])
def test_a_model_that_sees_everything_reads_its_past_again(split):
    """Of the whole the rest is the same; the prefix was read without the rest, and is not."""
    parts = sequence()
    whole, _ = NETS["seeing"](*parts)
    first, state = NETS["seeing"](*cut(parts, split))
    rest, _ = NETS["seeing"](*cut(parts, split, None), state)
    close(rest, whole[:, split:])
    assert not torch.allclose(first, whole[:, :split], atol=1e-3)


@every_causal_net
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
def test_reading_in_three_pieces_equals_reading_in_two(name):
    parts = sequence()
    _, state = NETS[name](*cut(parts, 5))
    two, _ = NETS[name](*cut(parts, 5, None), state)
    _, state = NETS[name](*cut(parts, 2))
    _, state = NETS[name](*cut(parts, 2, 5), state)
    three, _ = NETS[name](*cut(parts, 5, None), state)
    close(three, two)


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
def test_the_past_matters_where_it_can_be_seen(name):
    parts, other = sequence(), sequence(seed=1)
    (one, _), (two, _) = (NETS[name](*cut(parts, 4, None), NETS[name](*cut(p, 4))[1]) for p in (parts, other))
    differs = (one - two).abs().amax((0, 2)) > 1e-5
    if name in WINDOWED:
        # Three layers look back three times as far as one.
        reach = 3 * (WINDOWED[name] - 1)
        assert differs.tolist() == [t < reach for t in range(T - 4)]
    else:
        assert differs.all()


# Causality, bit for bit.


@every_causal_net
@pytest.mark.parametrize("token", [1, 4, T - 1])
def test_later_tokens_change_no_earlier_output(name, token):
    x, k, cond = sequence()
    out, _ = NETS[name](x, k, cond)
    late = sequence(seed=1)
    changed = tuple(torch.cat([a[:, :token], b[:, token:]], 1) for a, b in zip((x, k, cond), late, strict=True))
    other, _ = NETS[name](*changed)
    assert torch.equal(out[:, :token], other[:, :token])
    assert not torch.allclose(out[:, token:], other[:, token:], atol=1e-3)


@every_causal_net
def test_later_tokens_change_no_earlier_output_given_a_state(name):
    _, state = NETS[name](*sequence(t=3, seed=2))
    x, k, cond = sequence()
    out, _ = NETS[name](x, k, cond, state)
    x, k = x.clone(), k.clone()
    x[:, 5:] += 100
    k[:, 5:] = 0
    other, _ = NETS[name](x, k, cond, state)
    assert torch.equal(out[:, :5], other[:, :5])


@every_causal_net
def test_no_gradient_flows_from_an_output_to_later_tokens(name):
    with torch.enable_grad():
        x, k, cond = sequence()
        x.requires_grad_()
        out, _ = NETS[name](x, k, cond)
        (grad,) = torch.autograd.grad(out[:, 4].sum(), x)
    assert torch.equal(grad[:, 5:], torch.zeros_like(grad[:, 5:]))
    reach = WINDOWED[name] - 1 if name in WINDOWED else T
    assert (grad[:, max(0, 4 - reach) : 5].abs().amax((0, 2)) > 0).all()


def test_seeing_everything_later_tokens_do_matter():
    x, k, cond = sequence()
    out, _ = NETS["seeing"](x, k, cond)
    x = x.clone()
    x[:, -1] += 1
    other, _ = NETS["seeing"](x, k, cond)
    assert ((out - other).abs().amax((0, 2)) > 1e-4).all()


@every_net
def test_sequences_of_a_batch_do_not_see_each_other(name):
    parts = sequence()
    out, _ = NETS[name](*parts)
    for b in range(4):
        alone, _ = NETS[name](*(part[b : b + 1] for part in parts))
        close(alone, out[b : b + 1])
    x, k, cond = parts
    x = x.clone()
    x[1:] += 100
    other, _ = NETS[name](x, k, cond)
    assert torch.equal(other[0], out[0])


@every_net
def test_one_token_is_a_sequence(name):
    parts = sequence(t=1)
    out, state = NETS[name](*parts)
    assert out.shape == (4, 1, 3)
    more, _ = NETS[name](*sequence(t=1, seed=1), state)
    assert more.shape == (4, 1, 3)
    assert more.isfinite().all()


# A past of its own for each token.


@every_causal_net
def test_forced_by_its_own_stream_is_forward(name):
    x, k, cond = sequence()
    out, _ = NETS[name](x, k, cond)
    close(NETS[name].forced(x, k, cond, x, k), out)


@every_causal_net
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
    if name != "window 1":
        assert not torch.allclose(forced, own, atol=1e-3)


@every_causal_net
def test_forced_is_causal_bit_for_bit(name):
    x, k, cond = sequence()
    past_x, past_k, _ = sequence(seed=1)
    out = NETS[name].forced(x, k, cond, past_x, past_k)
    late, late_past = x.clone(), past_x.clone()
    late[:, 5:] += 100
    late_past[:, 4:] += 100  # token 4 sees itself as x, not as past
    other = NETS[name].forced(late, k, cond, late_past, past_k)
    assert torch.equal(out[:, :5], other[:, :5])
    # and a token's own x is seen by no other token
    alone = x.clone()
    alone[:, 3] += 100
    other = NETS[name].forced(alone, k, cond, past_x, past_k)
    assert torch.equal(out[:, :3], other[:, :3])
    close(out[:, 4:], other[:, 4:])


def test_seeing_everything_cannot_be_forced():
    x, k, cond = sequence()
    with pytest.raises(ValueError, match="needs a causal transformer; set causal=True"):
        NETS["seeing"].forced(x, k, cond, x, k)


# What the state holds.


def test_the_state_of_an_rnn_is_its_latents():
    for name, layers in (("rnn", 1), ("deep rnn", 3)):
        _, state = NETS[name](*sequence())
        assert state.shape == (4, layers, 16)
        _, state = NETS[name](*sequence(t=30), state)
        assert state.shape == (4, layers, 16)


def test_the_latent_starts_at_zero():
    for name in ("rnn", "deep rnn"):
        parts = sequence()
        out, last = NETS[name](*parts)
        other, end = NETS[name](*parts, NETS[name].initial_state(4))
        close(out, other)
        close(last, end)


def test_one_step_of_the_rnn_is_one_token():
    for name in ("rnn", "deep rnn"):
        net = NETS[name]
        x, k, cond = sequence()
        out, last = net(x, k, cond)
        z, outs = net.initial_state(4), []
        feature = net.encode(x, net.level(k), cond)
        for t in range(T):
            new, z = net.step(feature[:, t], z)
            outs.append(net.predict(new))
        close(torch.stack(outs, 1), out)
        close(z, last)


def test_the_cache_of_a_transformer_holds_each_token_once():
    parts = sequence()
    _, state = NETS["transformer"](*cut(parts, 4))
    assert [key.shape for key, _ in state] == [(4, 2, 4, 8)] * 3
    _, state = NETS["transformer"](*cut(parts, 4, None), state)
    assert [key.shape for key, _ in state] == [(4, 2, T, 8)] * 3
    _, whole = NETS["transformer"](*parts)
    compare_states(state, whole)


@pytest.mark.parametrize("name", WINDOWED)
def test_the_cache_of_a_windowed_transformer_stays_bounded(name):
    window, state = WINDOWED[name], None
    for step in range(40):
        _, state = NETS[name](*sequence(t=1 + step % 3, seed=step), state)
        assert all(key.shape[-2] == value.shape[-2] <= window - 1 for key, value in state)


def test_a_window_bounds_what_a_layer_sees():
    """A token attends to itself and the window-1 before it: one layer of window 3 forgets the fourth token back."""
    net = randomised(Transformer(3, 2, hidden=16, heads=2, layers=1, window=3, levels=K))
    x, k, cond = sequence()
    out, _ = net(x, k, cond)
    for back in range(5):
        changed = x.clone()
        changed[:, T - 1 - back] += 1
        other, _ = net(changed, k, cond)
        assert torch.equal(other[:, -1], out[:, -1]) == (back > 2)


def test_a_window_longer_than_the_sequence_is_none():
    wide = NETS["wide window"]
    plain = Transformer(3, 2, hidden=16, heads=2, layers=2, levels=K).eval()
    plain.load_state_dict(wide.state_dict())
    assert torch.equal(wide(*sequence())[0], plain(*sequence())[0])
    close(wide.forced(*sequence(), *sequence(seed=1)[:2]), plain.forced(*sequence(), *sequence(seed=1)[:2]))


def test_a_window_lets_the_seeing_keep_that_many_past_tokens():
    net = randomised(Transformer(3, 2, hidden=16, heads=2, layers=2, causal=False, window=4, levels=K))
    state = None
    for step in range(10):
        parts = sequence(t=3, seed=step)
        _, state = net(*parts, state)
        assert state.x.shape[1] == min(4, 3 * (step + 1))
        assert torch.equal(state.x[:, -3:], parts[0])
        assert torch.equal(state.k[:, -3:], parts[1])


def test_what_is_out_of_sight_does_not_shift_the_present():
    """Three layers of window 3 look back six tokens: beyond those it makes no difference where the sequence began."""
    parts = sequence(t=40)
    whole, _ = NETS["window 3"](*parts)
    late, _ = NETS["window 3"](*cut(parts, 20, None))
    close(late[:, 6:], whole[:, 26:])
    assert not torch.allclose(late[:, :6], whole[:, 20:26], atol=1e-3)


# Parts.


def test_rotary_scores_see_distances_only():
    rotary = Rotary(8)
    query, key = torch.randn(2, 1, 1, 6, 8, generator=seeded(0))
    scores = [rotary(query, start) @ rotary(key, start).mT for start in (0, 17)]
    close(scores[0], scores[1])
    assert not torch.allclose(scores[0], query @ key.mT, atol=1e-3)


def test_levels_are_told_apart():
    embedding = randomised(LevelEmbedding(16, K))
    vectors = embedding(torch.arange(K + 1))
    assert vectors.shape == (K + 1, 16)
    assert torch.pdist(vectors).min() > 1e-3


def test_the_same_share_of_noise_embeds_alike_at_any_number_of_levels():
    few, many = randomised(LevelEmbedding(16, 10)), randomised(LevelEmbedding(16, 1000))
    close(few(torch.tensor([0, 3, 10])), many(torch.tensor([0, 300, 1000])))


def test_every_backbone_has_a_name():
    assert BACKBONES["rnn"] is RNN
    assert BACKBONES["transformer"] is Transformer


@pytest.mark.parametrize("name", BUILD)
def test_the_config_builds_the_same_network(name):
    net = NETS[name]
    twin = type(net)(**net.config).eval()
    twin.load_state_dict(net.state_dict())
    assert torch.equal(twin(*sequence())[0], net(*sequence())[0])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hidden": 16, "heads": 3}, "heads.*3 must divide 16"),
        ({"hidden": 6, "heads": 2}, "even head width.*2 must divide 3"),
        ({"hidden": 16, "heads": 2, "window": 0}, "window counts the tokens.*got 0"),
    ],
)
def test_a_transformer_that_cannot_be_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        Transformer(3, **options)


@pytest.mark.parametrize("mask", [None, "causal", (torch.rand(7, 7, generator=seeded(1)) < 0.6) | torch.eye(7, dtype=torch.bool)])
def test_attention_trained_in_bfloat16_on_a_cpu_is_attention(mask):
    query, key, value = (torch.randn(2, 3, 7, 8, generator=seeded(i)).bfloat16() for i in range(3))
    expected = attend(query.float(), key.float(), value.float(), mask)
    torch.testing.assert_close(attend(query.requires_grad_(), key, value, mask).float(), expected, atol=0.03, rtol=0.03)
