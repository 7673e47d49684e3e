"""`check_backbone` passes every network of ours, and finds what is wrong with networks that break one rule each."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffusion_forcing import RNN, Transformer, check_backbone
from diffusion_forcing.backbones import BackboneReport, ConvRNN, SpaceTime

EVENT = (3, 4, 6)
OURS = {
    "rnn": lambda: RNN(3, 2, hidden=16),
    "deep rnn": lambda: RNN(3, hidden=16, layers=3, levels=10),
    "transformer": lambda: Transformer(3, 2, hidden=16, heads=2, layers=2),
    "window": lambda: Transformer(3, 2, hidden=16, heads=2, layers=2, window=3),
    "bidirectional": lambda: Transformer(3, 2, hidden=16, heads=2, layers=2, causal=False),
    "conv_rnn": lambda: ConvRNN(EVENT, 2, latent=2, channels=4, scales=(1, 2), blocks=1),
    "space_time": lambda: SpaceTime(EVENT, 2, hidden=8, layers=2, heads=2, window=3, full_attention_every=2),
    "warp": lambda: SpaceTime(EVENT, 2, hidden=8, layers=1, heads=2, window=3, warp=True, patches=(2, 4), input_skip=True),
}


@pytest.mark.parametrize("name", OURS)
def test_our_networks_keep_everything(name):
    net = OURS[name]()
    weights = {key: value.clone() for key, value in net.state_dict().items()}
    state = torch.random.get_rng_state()
    report = check_backbone(net)
    assert isinstance(report, BackboneReport)
    assert report.ok
    assert torch.equal(torch.random.get_rng_state(), state)  # nothing of the caller's is changed
    assert all(torch.equal(net.state_dict()[key], value) for key, value in weights.items())
    (condition,) = (check.result for check in report.checks if check.name == "condition")
    assert condition == ("passed" if net.config["cond"] else "not applicable")


class Leaky(nn.Module):
    """A network on each token, its level and its condition, and a leaky average of the past. It keeps every rule."""

    causal = True
    levels = 50

    def __init__(self, width: int = 3, cond: int = 2, hidden: int = 8) -> None:
        super().__init__()
        self.config = {"width": width, "cond": cond, "hidden": hidden}
        self.proj_in = nn.Linear(width + cond + 1, hidden)
        self.inner = nn.Sequential(nn.Tanh(), nn.Linear(2 * hidden, hidden), nn.Tanh())
        self.proj_out = nn.Linear(hidden, width)

    def feature(self, x: Tensor, k: Tensor, cond: Tensor) -> Tensor:
        return self.proj_in(torch.cat([x, cond, k[..., None] / self.levels], dim=-1))

    def begin(self, feature: Tensor, state: Tensor | None) -> Tensor:
        return feature.new_zeros(len(feature), feature.shape[-1]) if state is None else state

    def predict(self, now: Tensor, average: Tensor) -> Tensor:
        return self.proj_out(self.inner(torch.cat([now, average], dim=-1)))

    def forward(self, x, k, cond, state=None):
        feature = self.feature(x, k, cond)
        average, out = self.begin(feature, state), []
        for now in feature.unbind(1):
            out.append(self.predict(now, average))
            average = 0.8 * average + 0.2 * now
        return torch.stack(out, dim=1), average


class NormOverTime(Leaky):
    def feature(self, x, k, cond):
        feature = super().feature(x, k, cond)
        return feature / feature.std(1, keepdim=True, unbiased=False).clamp(min=0.1)


class BatchNorm(Leaky):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def feature(self, x, k, cond):
        return self.norm(super().feature(x, k, cond).mT).mT


class IgnoresState(Leaky):
    def begin(self, feature, state):
        return super().begin(feature, None)


class NoState(Leaky):
    def forward(self, x, k, cond, state=None):
        return super().forward(x, k, cond, None)[0], None


class BatchSecond(Leaky):
    def forward(self, x, k, cond, state=None):
        out, average = super().forward(x, k, cond, None if state is None else state[0])
        return out, average[None]


class StateAsDict(Leaky):
    def forward(self, x, k, cond, state=None):
        out, average = super().forward(x, k, cond, None if state is None else state["average"])
        return out, {"average": average}


class WritesIntoState(Leaky):
    def forward(self, x, k, cond, state=None):
        out, average = super().forward(x, k, cond, state)
        return out, average if state is None else state.copy_(average)


class BareTensor(Leaky):
    def forward(self, x, k, cond, state=None):
        return super().forward(x, k, cond, state)[0]


class WrongShape(Leaky):
    def forward(self, x, k, cond, state=None):
        out, state = super().forward(x, k, cond, state)
        return torch.cat([out, out[..., :1]], dim=-1), state


class Peeks(Leaky):
    def feature(self, x, k, cond):
        feature = super().feature(x, k, cond)
        return feature + 0.1 * F.pad(feature[:, 1:], (0, 0, 0, 1))


class IgnoresLevels(Leaky):
    def feature(self, x, k, cond):
        return super().feature(x, torch.zeros_like(k), cond)


class OneLevelForAll(Leaky):
    """As networks of full-sequence diffusion read it: of the first token only."""

    def feature(self, x, k, cond):
        return super().feature(x, k[:, :1].expand_as(k), cond)


class IgnoresTokens(Leaky):
    def predict(self, now, average):
        return super().predict(torch.zeros_like(now), average)


class IgnoresCondition(Leaky):
    def feature(self, x, k, cond):
        return super().feature(x, k, torch.zeros_like(cond))


class DropoutLeftOn(Leaky):
    def feature(self, x, k, cond):
        return F.dropout(super().feature(x, k, cond), 0.5)


class NaNAtK(Leaky):
    def feature(self, x, k, cond):
        return super().feature(x, k, cond) + (0.0 * (self.levels - k).float().log())[..., None]


class TooFewLevels(Leaky):
    def __init__(self):
        super().__init__()
        self.config["levels"] = 50
        self.table = nn.Embedding(50, 8)  # 0 to 49; K is 50

    def feature(self, x, k, cond):
        return super().feature(x, k, cond) + self.table(k)


class Unreached(Leaky):
    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(2, 2)


class InfiniteGradient(Leaky):
    def predict(self, now, average):
        return super().predict(now + (now - now.detach()).abs().sqrt(), average)


class ForcedWrongly(Leaky):
    def forced(self, x, k, cond, past_x, past_k):
        return self(past_x, past_k, cond)[0]


class PrefilledWrongly(Leaky):
    def prefill(self, x, state, cond):
        return None


class NoCausalTrait(Leaky):
    causal = "yes"


class UnknownStabilization(Leaky):
    stabilization = "cold"


class ConfigOfTensors(Leaky):
    def __init__(self):
        super().__init__()
        self.config["mean"] = torch.zeros(3)


BROKEN = {
    NormOverTime: {"causal", "state rule"},
    BatchNorm: {"batch"},
    IgnoresState: {"state rule"},
    NoState: {"state rule", "state batch"},
    BatchSecond: {"state batch"},
    StateAsDict: {"state batch"},
    WritesIntoState: {"state kept"},
    BareTensor: {"call"},
    WrongShape: {"call"},
    Peeks: {"causal", "state rule"},
    IgnoresLevels: {"level"},
    OneLevelForAll: {"level", "state rule"},
    IgnoresTokens: {"token", "level", "condition"},
    IgnoresCondition: {"condition"},
    DropoutLeftOn: {"deterministic"},
    NaNAtK: {"every level"},
    TooFewLevels: {"every level"},
    Unreached: {"gradients"},
    InfiniteGradient: {"gradients"},
    ForcedWrongly: {"forced"},
    PrefilledWrongly: {"prefill"},
    NoCausalTrait: {"traits"},
    UnknownStabilization: {"traits"},
    ConfigOfTensors: {"traits"},
}
FOLLOW = (WritesIntoState, DropoutLeftOn, NaNAtK, TooFewLevels)
"""Networks of which other checks fail, too, since what they compare is of no use."""


@pytest.mark.parametrize("kind", BROKEN, ids=lambda kind: kind.__name__)
def test_a_broken_rule_is_found_by_its_check(kind):
    net = kind()
    with pytest.raises(ValueError, match="does not keep") as error:
        check_backbone(net, **({} if "levels" in net.config else {"levels": 50}))
    failed = {name.strip() for name in str(error.value).splitlines()[0].removeprefix("this network does not keep ").split(",")}
    assert failed >= BROKEN[kind] if kind in FOLLOW else failed == BROKEN[kind], str(error.value)


def test_the_network_they_are_made_from_keeps_everything():
    assert check_backbone(Leaky(), levels=50).ok


def test_a_network_that_could_be_declared_causal_is_said_to_be():
    class Undeclared(Leaky):
        causal = False

    (note,) = (check.note for check in check_backbone(Undeclared(), levels=50).checks if check.name == "causal")
    assert "set causal = True" in note


def test_a_network_without_a_past_may_keep_nothing_only_where_it_is_not_causal():
    class Alone(Leaky):
        def forward(self, x, k, cond, state=None):
            feature = self.feature(x, k, cond)
            return self.predict(feature, feature), None

    with pytest.raises(ValueError, match="does not keep state batch"):
        check_backbone(Alone(), levels=50)
    Alone.causal = False
    (result,) = (check.result for check in check_backbone(Alone(), levels=50).checks if check.name == "state batch")
    assert result == "not applicable"


def test_the_report_prints_as_a_table():
    text = str(check_backbone(Leaky(), levels=50))
    assert text.splitlines()[0] == "Leaky: 0 of 17 checks failed"
    assert "forced         not applicable  no method `forced`" in text
    with pytest.raises(ValueError, match=r"changing tokens from 1 on changes the output of earlier ones by up to .* Mask attention"):
        check_backbone(Peeks(), levels=50)


def test_what_the_config_does_not_say_must_be_given():
    class Bare(Leaky):
        def __init__(self):
            super().__init__(width=4, cond=0)
            self.config = {}

    with pytest.raises(ValueError, match=r"give their shape: check_backbone\(network, event=3\)"):
        check_backbone(Bare())
    assert check_backbone(Bare(), event=4).ok
    with pytest.raises(ValueError, match="does not keep call"):
        check_backbone(Bare(), event=3)
    with pytest.raises(ValueError, match=r"event is .* leave out event"):
        check_backbone(Leaky(), event=4)
    with pytest.raises(ValueError, match="takes a network, an instance"):
        check_backbone(Leaky)
