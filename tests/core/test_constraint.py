"""Laws between neighbouring tokens: against conditioning a Gaussian by hand, and through a model."""

import pytest
import torch

from diffusion_forcing import Context, DiffusionForcing, NoiseSchedule, Sampler, rolling, rollout
from diffusion_forcing.backbones import RNN, Transformer
from diffusion_forcing.matrix import full_sequence
from diffusion_forcing.preconditioning import LinearConstraint, Preconditioning
from diffusion_forcing.sampling import sample
from diffusion_forcing.schedule import linear


def chain(slack=1e-8, seed=0):
    """Two laws between tokens of three numbers."""
    g = torch.Generator().manual_seed(seed)
    return LinearConstraint(
        torch.randn(2, 3, generator=g), torch.randn(2, 3, generator=g), torch.randn(2, generator=g), torch.full((2,), slack)
    )  # fmt: skip


def test_correction_is_the_gaussian_conditioned_on_the_laws():
    constraint = chain(slack=0.01)
    g = torch.Generator().manual_seed(1)
    x0, posterior_variance = torch.randn(4, 5, 3, generator=g), torch.rand(4, 5, 3, generator=g)
    corrected = x0 - posterior_variance * constraint.correction(x0, posterior_variance)
    for one, variance, got in zip(x0.double(), posterior_variance.double(), corrected, strict=True):
        laws = torch.zeros(8, 15, dtype=torch.float64)
        for joint in range(4):
            laws[2 * joint : 2 * joint + 2, 3 * joint : 3 * joint + 3] = constraint.left
            laws[2 * joint : 2 * joint + 2, 3 * joint + 3 : 3 * joint + 6] = constraint.right
        prior = torch.diag(variance.flatten())
        gain = prior @ laws.T @ torch.linalg.inv(laws @ prior @ laws.T + 0.01 * torch.eye(8, dtype=torch.float64))
        expected = one.flatten() - gain @ (laws @ one.flatten() + constraint.offset.double().repeat(4))
        torch.testing.assert_close(got.flatten().double(), expected, atol=1e-4, rtol=1e-4)


def test_laws_hold_after_the_correction_and_known_tokens_stay():
    constraint = chain()
    x0, posterior_variance = torch.randn(3, 6, 3), torch.ones(3, 6, 3)
    posterior_variance[:, 2] = 0
    corrected = x0 - posterior_variance * constraint.correction(x0, posterior_variance)
    assert constraint.residual(corrected).abs().max() < 1e-3 < constraint.residual(x0).abs().max()
    assert torch.equal(corrected[:, 2], x0[:, 2])


def test_tokens_that_obey_are_left_alone_and_one_token_has_no_joint():
    constraint = LinearConstraint(
        torch.tensor([[1.0]]), torch.tensor([[-1.0]]), torch.tensor([0.5]), torch.tensor([1e-6])
    )  # one more each time
    x0 = 0.5 * torch.arange(7.0)[None, :, None]
    assert constraint.residual(x0).abs().max() == 0
    assert constraint.correction(x0, torch.ones(1, 7, 1)).abs().max() == 0
    assert constraint.correction(x0[:, :1], torch.ones(1, 1, 1)).shape == (1, 1, 1)


def model_with(constraint, width=3, backbone=None, **options):
    backbone = backbone or Transformer(width, hidden=16, layers=1, heads=2, causal=False)
    for parameter in backbone.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return DiffusionForcing(
        backbone,
        NoiseSchedule(linear(1000)),
        preconditioning=Preconditioning(torch.tensor([1.0, 9.0, 4.0]), constraint=constraint),
        **options,
    ).eval()


@pytest.mark.parametrize("parameterization", ["v", "x0"])
def test_whatever_a_model_predicts_and_samples_obeys(parameterization):
    model = model_with(chain(), parameterization=parameterization)
    x, k = torch.randn(4, 6, 3), torch.randint(1, 1001, (4, 6))
    with torch.no_grad():
        assert model.preconditioning.constraint.residual(model.predict(x, k).x0).abs().max() < 5e-3
        y = sample(model.denoiser(), model.schedule, x, full_sequence(6, model.schedule.ladder(5)))
    assert model.preconditioning.constraint.residual(y).abs().max() < 5e-3


def test_mixed_precision_leaves_the_laws_alone():
    constraint = chain()
    x0, posterior_variance = torch.randn(3, 6, 3), torch.ones(3, 6, 3)
    with torch.autocast("cpu", torch.bfloat16):
        pull = constraint.correction(x0, posterior_variance)
    assert torch.equal(pull, constraint.correction(x0, posterior_variance))


CAUSAL = {
    "rnn": lambda: RNN(3, hidden=16),
    "transformer": lambda: Transformer(3, hidden=16, layers=2, heads=2),
}
every_causal = pytest.mark.parametrize("backbone", CAUSAL.values(), ids=CAUSAL)


@every_causal
def test_a_causal_network_obeys_and_takes_the_past_as_a_state(backbone):
    """A known prefix in the window and a state of it are the same to the tokens that follow."""
    model = model_with(chain(), backbone=backbone())
    x, k = torch.randn(3, 7, 3), torch.randint(1, 1001, (3, 7))
    k[:, :4] = 0
    assert not model.causal  # the constraint tells earlier tokens of later ones
    with torch.no_grad():
        whole = model.predict(x, k).x0
        assert model.preconditioning.constraint.residual(whole[:, 3:]).abs().max() < 5e-3
        state = model.absorb(x[:, 2:4], state=model.absorb(x[:, :2]))
        torch.testing.assert_close(model.predict(x[:, 4:], k[:, 4:], state=state).x0, whole[:, 4:], atol=1e-3, rtol=1e-3)
        one = model.denoiser(state=state)(x[:, 4:5], k[:, 4:5]).x0  # a single token, which a backbone may prefill
        joint = torch.cat([x[:, 3:4], one], dim=1)
    assert model.preconditioning.constraint.residual(joint).abs().max() < 5e-3


@every_causal
@pytest.mark.parametrize("matrix", ["full_sequence", "pyramid", "autoregressive"])
def test_every_order_of_sampling_obeys(backbone, matrix):
    """Faster orders of causal models leave the constraint out, so they are not taken: the same numbers as when every row is watched."""
    model, sampler = model_with(chain(), backbone=backbone()), Sampler(4, matrix)
    x = torch.randn(2, 5, 3)
    plain = sample(model.denoiser(), model.schedule, x, sampler, on_step=lambda *row: None)
    assert torch.equal(sample(model.denoiser(), model.schedule, x, sampler), plain)
    if matrix == "full_sequence":
        assert model.preconditioning.constraint.residual(plain).abs().max() < 5e-3


@every_causal
def test_roll_outs_obey_from_window_to_window(backbone):
    model, context = model_with(chain(), backbone=backbone()), torch.randn(2, 3, 3)
    generated = rollout(model, Sampler(4).over(model.schedule, 3), 9, context, generator=torch.Generator().manual_seed(0))
    joined = torch.cat([context[:, -1:], generated], dim=1)
    assert model.preconditioning.constraint.residual(joined).abs().max() < 5e-3
    forgetful = rollout(model, Sampler(4).over(model.schedule, 3), 9, context, past=Context(memory=2))
    assert torch.isfinite(forgetful).all()


def test_rolling_diffusion_needs_tokens_that_do_not_see_later_ones():
    model = model_with(chain(), backbone=RNN(3, hidden=16))
    with pytest.raises(ValueError, match="causal"):
        next(rolling(model, Sampler(4, "pyramid"), 3, torch.randn(1, 2, 3)))


def test_levels_that_are_alike_or_not_are_the_same_to_a_sequence():
    model = model_with(chain())
    x, k = torch.randn(2, 6, 3), torch.full((2, 6), 400)
    other = torch.cat([k[:1], torch.randint(1, 1001, (1, 6))])
    with torch.no_grad():
        torch.testing.assert_close(model.predict(x, k).x0[0], model.predict(x, other).x0[0], atol=1e-4, rtol=1e-4)


def test_a_network_that_breaks_the_laws_pays_only_for_what_they_leave_open():
    """Data on the laws, a network that says nothing: the loss with constraint is lower, and has a gradient."""
    constraint = LinearConstraint(
        torch.tensor([[1.0, 0, 0]]), torch.tensor([[-1.0, 0, 0]]), torch.zeros(1), torch.tensor([1e-6])
    )  # first stays
    x = torch.randn(256, 6, 3) * torch.tensor([1.0, 3.0, 2.0])
    x[..., 0] = x[:, :1, 0]
    k, noise = torch.full((256, 6), 200), torch.randn(256, 6, 3)
    with_laws, without = model_with(constraint), model_with(None)
    for model in (with_laws, without):
        for parameter in model.backbone.proj_out.parameters():
            torch.nn.init.zeros_(parameter)
    loss = with_laws(x, k, noise=noise).mean()
    assert loss < 0.9 * without(x, k, noise=noise).mean()
    loss.backward()
    assert with_laws.backbone.proj_out.weight.grad.abs().sum() > 0


def test_saved_and_loaded(tmp_path):
    model = model_with(chain())
    model.save_pretrained(tmp_path)
    again = DiffusionForcing.from_pretrained(tmp_path)
    x, k = torch.randn(2, 6, 3), torch.randint(0, 1001, (2, 6))
    with torch.no_grad():
        assert torch.equal(again.predict(x, k).x0, model.predict(x, k).x0)


def test_what_cannot_be():
    with pytest.raises(ValueError, match="left and right are"):
        LinearConstraint(torch.zeros(2, 3), torch.zeros(2, 4), torch.zeros(2), torch.ones(2))
    with pytest.raises(ValueError, match="slack is a variance"):
        LinearConstraint(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2), torch.zeros(2))
    with pytest.raises(ValueError, match="needs a variance"):
        DiffusionForcing(Transformer(3, causal=False), NoiseSchedule(linear(1000)), preconditioning=Preconditioning(constraint=chain()))
