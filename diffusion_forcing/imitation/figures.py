"""Figures: what encoding preserves of images, and imagined episodes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from ..engine.media import contact_sheet, to_bytes
from ..engine.plotting import COLOURS, figure
from .agent import ImitationAgent
from .demonstrations import Demonstrations
from .tokens import ACTIONS, STATE
from .windows import Timesteps, as_batch, timesteps_of

CODEC_CAPTION = "Images of a demonstration, and below each camera's what encoding and decoding preserve."


def draw_codec(agent: ImitationAgent, demonstrations: Demonstrations, file: Path) -> None:
    """A sheet of each camera's images of the first demonstration, above the same images encoded and decoded."""
    episode = timesteps_of(demonstrations, 0, agent.codec.shapes[ACTIONS][0], 0, STATE in agent.sensors)
    decoded = {name: values[0] for name, values in agent.codec.decode(agent.codec.encode(as_batch(episode))).items()}
    rows, names = [], []
    for name in agent.cameras:
        rows += [episode[name], to_bytes(decoded[name])]
        names += [name, "decoded"]
    contact_sheet(np.stack(rows), file, names=names, every=max(1, len(rows[0]) // 12))


def draw_imagined(episodes: Timesteps, folder: Path) -> list[Path]:
    """A file for each modality (n, t, *shape): a camera's images, a row per episode; curves of states and actions, of the first episode."""
    files = []
    for name, values in episodes.items():
        file = folder / f"{name}.png"
        if values.ndim == 5 and values.shape[-1] == 3 and name not in (ACTIONS, STATE):
            contact_sheet(to_bytes(torch.as_tensor(values[:8])), file, every=max(1, values.shape[1] // 14), mark=1)
        else:
            curves = values.reshape(len(values), -1, values.shape[-1])
            with figure(file, 9, 3) as fig:
                ax = fig.subplots()
                for i in range(min(4, curves.shape[-1])):
                    ax.plot(curves[0, :, i], color=COLOURS[i], label=f"{name} {i}")
                ax.set(xlabel="step")
                ax.legend(frameon=False)
        files.append(file)
    return files
