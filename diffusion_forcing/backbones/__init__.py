"""Networks that read a sequence of noisy tokens with their levels.

A backbone is `(x, k, cond, state=None) -> (out, state)`: out has the shape of x, and reading a sequence whole equals reading
a prefix, then the rest with the returned state. What else a network may declare is in `base.Traits`.
"""

from .base import Backbone, BackboneConfig, State, Traits, batch_of, join_states, repeat_state, select_state, traits_of
from .check import BackboneReport, check_backbone
from .conv_rnn import ConvRNN, ConvRNNConfig
from .rnn import RNN, RNNConfig
from .space_time import SpaceTime, SpaceTimeConfig
from .transformer import Transformer, TransformerConfig

AnyBackboneConfig = RNNConfig | TransformerConfig | SpaceTimeConfig | ConvRNNConfig

BACKBONES = {"rnn": RNN, "transformer": Transformer, "conv_rnn": ConvRNN, "space_time": SpaceTime}

__all__ = [
    "BACKBONES",
    "RNN",
    "AnyBackboneConfig",
    "Backbone",
    "BackboneConfig",
    "BackboneReport",
    "ConvRNN",
    "ConvRNNConfig",
    "RNNConfig",
    "SpaceTime",
    "SpaceTimeConfig",
    "State",
    "Traits",
    "Transformer",
    "TransformerConfig",
    "batch_of",
    "check_backbone",
    "join_states",
    "repeat_state",
    "select_state",
    "traits_of",
]
