"""Loss weights: uniform, min-SNR, fused SNR, each in three parameterizations."""

import pytest
import torch
from oracles import seeded

from diffusion_forcing import FusedSNR, MinSNR, NoiseSchedule, Uniform, cosine
from diffusion_forcing.parameterization import target, to_prediction
from diffusion_forcing.weighting import EPS_CAP, WEIGHTS

SCHEDULE = NoiseSchedule(cosine(1000))


def snr(level):
    kept = cosine(1000)[level].item()
    return float("inf") if level == 0 else kept / (1 - kept)


def levels(b=3, t=7, seed=0):
    return torch.randint(0, 1001, (b, t), generator=seeded(seed))


def test_uniform_counts_every_token_once_but_not_noise_that_is_not_there():
    k = torch.tensor([[0, 1, 500, 1000]])
    assert Uniform()(SCHEDULE, k, "x0").tolist() == [[1, 1, 1, 1]]
    assert Uniform()(SCHEDULE, k, "eps").tolist() == [[0, 1, 1, 1]]
    assert Uniform()(SCHEDULE, k, "v").tolist() == [[0, 1, 1, 1]]


@pytest.mark.parametrize("clip", [1.0, 5.0])
def test_min_snr_by_hand(clip):
    k = torch.tensor([[0, 1, 300, 500, 700, 1000]])
    ratios = [snr(level) for level in k[0].tolist()]
    on_x0 = [min(r, clip) / clip for r in ratios]
    torch.testing.assert_close(MinSNR(clip)(SCHEDULE, k, "x0"), torch.tensor([on_x0]))
    torch.testing.assert_close(MinSNR(clip)(SCHEDULE, k, "eps"), torch.tensor([[w / r for w, r in zip(on_x0, ratios, strict=True)]]))
    torch.testing.assert_close(MinSNR(clip)(SCHEDULE, k, "v"), torch.tensor([[w / (r + 1) for w, r in zip(on_x0, ratios, strict=True)]]))


@pytest.mark.parametrize(("decay", "stack"), [(0.9, 1), (0.5, 1), (0.9, 4), (0.96, 8)])
def test_fused_snr_follows_the_recursion_of_the_paper(decay, stack):
    """S'_t = 1 - (1 - S_t)(1 - Sbar_{t-1}); Sbar is the running mean of S, 0 before the first token; a token of n frames decays n times."""
    k = levels()
    weight = FusedSNR(clip=5.0, decay=decay, frame_stack=stack)(SCHEDULE, k, "x0")
    for b in range(len(k)):
        running = 0.0
        for t in range(k.shape[1]):
            own = min(snr(k[b, t].item()), 5.0) / 5.0
            assert weight[b, t].item() == pytest.approx(1 - (1 - own) * (1 - running), rel=1e-5, abs=1e-6)
            running = decay**stack * running + (1 - decay**stack) * own


def test_without_a_past_fused_snr_is_min_snr():
    k = levels(b=50, t=1)
    torch.testing.assert_close(FusedSNR()(SCHEDULE, k, "v"), MinSNR()(SCHEDULE, k, "v"))


def test_an_empty_past_adds_nothing_and_a_clean_one_much():
    noise, clean = torch.tensor([[1000] * 30 + [500]]), torch.tensor([[0] * 30 + [500]])
    alone = MinSNR()(SCHEDULE, torch.tensor([[500]]), "x0").item()
    assert FusedSNR()(SCHEDULE, noise, "x0")[0, -1].item() == pytest.approx(alone, abs=1e-3)
    # 30 clean tokens leave (1 - S)(0.9^30) of doubt.
    assert FusedSNR()(SCHEDULE, clean, "x0")[0, -1].item() == pytest.approx(1 - (1 - alone) * 0.9**30, rel=1e-5)


def test_the_frame_stack_enters_the_decay():
    k = torch.tensor([[0, 1000]])
    weights = [FusedSNR(decay=0.9, frame_stack=n)(SCHEDULE, k, "x0")[0, 1].item() for n in (1, 2, 8)]
    assert weights == pytest.approx([1 - 0.9**n for n in (1, 2, 8)], abs=1e-4)


def test_a_past_that_is_seen_at_other_levels_counts_by_these():
    """With a clean past (teacher forcing) all but the first token have been given away, whatever their own levels."""
    k = levels()
    clean = torch.zeros_like(k)
    forced = FusedSNR()(SCHEDULE, k, "x0", clean)
    own = MinSNR().signal(SCHEDULE, k)
    left = 0.9 ** torch.arange(k.shape[1])
    torch.testing.assert_close(forced, 1 - (1 - own) * left)
    torch.testing.assert_close(FusedSNR()(SCHEDULE, k, "x0", k), FusedSNR()(SCHEDULE, k, "x0"))


def test_the_future_does_not_enter():
    k = levels()
    other = k.clone()
    other[:, 4:] = levels(seed=1)[:, 4:]
    assert torch.equal(FusedSNR()(SCHEDULE, k, "v")[:, :4], FusedSNR()(SCHEDULE, other, "v")[:, :4])


@pytest.mark.parametrize("weight", [MinSNR(), MinSNR(1.0), FusedSNR(), FusedSNR(decay=0.5, frame_stack=2)], ids=repr)
def test_the_three_parameterizations_share_one_objective(weight):
    """A wrong belief about x0 costs the same whether the network says it as x0, eps or v (where eps is not capped)."""
    k = levels(b=20, t=6)
    k[k == 0] = 1
    x, noise, belief = torch.randn(3, 20, 6, 2, generator=seeded(1))
    alpha, sigma = SCHEDULE.alpha(k)[..., None].double(), SCHEDULE.sigma(k)[..., None].double()
    noisy = alpha * x + sigma * noise
    held = to_prediction("x0", belief, noisy, alpha, sigma)
    outs = {"x0": held.x0, "eps": held.eps, "v": alpha * held.eps - sigma * held.x0}
    loss = {name: weight(SCHEDULE, k, name) * ((out - target(name, x, noise, alpha, sigma)) ** 2).mean(-1) for name, out in outs.items()}
    torch.testing.assert_close(loss["v"], loss["x0"], rtol=1e-3, atol=1e-5)
    free = weight(SCHEDULE, k, "eps") < EPS_CAP
    assert free.float().mean() > 0.5
    torch.testing.assert_close(loss["eps"][free], loss["x0"][free], rtol=1e-3, atol=1e-5)


def test_eps_is_capped_where_the_past_alone_carries_the_signal():
    k = torch.tensor([[0, 1000]])
    assert FusedSNR()(SCHEDULE, k, "eps")[0, 1] == EPS_CAP
    assert FusedSNR()(SCHEDULE, k, "v")[0, 1] == pytest.approx(0.1, abs=1e-3)


@pytest.mark.parametrize("weight", [Uniform(), MinSNR(), FusedSNR()], ids=repr)
@pytest.mark.parametrize("name", ["x0", "eps", "v"])
def test_level_0_counts_in_x0_only(weight, name):
    """It is recoverable in x0; in eps and v its target is noise that nobody can see."""
    k = torch.tensor([[0, 400, 0, 1000, 0]])
    values = weight(SCHEDULE, k, name)
    assert values.shape == k.shape
    assert values.isfinite().all()
    assert (values[k == 0] == (1.0 if name == "x0" else 0.0)).all()


@pytest.mark.parametrize("decay", [0.0, 1.0, -0.1, 1.5])
def test_a_decay_that_does_not_decay_is_refused(decay):
    with pytest.raises(ValueError, match=f"between 0 and 1; got {decay}"):
        FusedSNR(decay=decay)


def test_every_weight_has_a_name():
    assert {name: kind() for name, kind in WEIGHTS.items()} == {
        "uniform": Uniform(),
        "min_snr": MinSNR(),
        "fused_snr": FusedSNR(),
    }
