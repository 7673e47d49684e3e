"""Pictures and films: frames fitted to a size, bytes and numbers, films written to .mp4, .gif or .webp, and sheets of clips.

Frames are uint8 (t, h, w, 3) everywhere. An .mp4 is written by PyAV as frames come, .gif and .webp by Pillow when the film is closed.
.webp keeps each pixel as it is, .gif 256 colours a frame, .mp4 (H.264) is the smallest and nearly lossless.
"""

from __future__ import annotations

import functools
import io
import math
import os
import re
import tempfile
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from ..checks import check_counts
from ..files import write_atomically
from .plotting import COLOURS, STYLE

Frames = NDArray[np.uint8]
ENDINGS = (".mp4", ".gif", ".webp")
LARGEST = {".mp4": 16384, ".gif": 65535, ".webp": 16383}
"""Largest height and width of each format, or of its encoder."""
FASTEST = {".mp4": 1000, ".gif": 50, ".webp": 1000}
"""Frames a second. A gif that asks for more than 50 is shown at 10 by browsers."""
BAND = 14
"""Height of the names above films, in pixels."""
GAP = 2
PAGE = 30_000
"""The longest side of a sheet, in pixels."""


class Unreadable(ValueError):
    """A file that cannot be read as what it should be; others in its folder may be fine."""


# Frames.

SIGNATURES = {
    "PNG": rb"\x89PNG\r\n\x1a\n",
    "JPEG": rb"\xff\xd8\xff",
    "WEBP": rb"RIFF....WEBP",
    "GIF": rb"GIF8[79]a",
}
"""How the data of pictures begin, of the formats that are read."""


def decode_picture(data: bytes) -> NDArray[np.uint8]:
    """The (first) picture (h, w, 3) that a PNG, JPEG, WebP or GIF holds. Raises Unreadable for anything else."""
    from PIL import Image

    kind = next((kind for kind, begin in SIGNATURES.items() if re.match(begin, data, re.DOTALL)), None)
    if kind is None:
        raise Unreadable(f"is no picture, or damaged: it begins with {data[:8]!r}; {', '.join(SIGNATURES)} are read")
    try:
        with Image.open(io.BytesIO(data), formats=[kind]) as image:
            return np.asarray(image.convert("RGB"))
    except (OSError, EOFError, ValueError, SyntaxError, IndexError, Image.DecompressionBombError) as error:
        raise Unreadable(f"is no {kind}, or damaged ({str(error).split(' <')[0]})") from error


def to_floats(frames: ArrayLike) -> Tensor:
    """Bytes to numbers from 0 to 1, of the same shape."""
    return torch.tensor(np.ascontiguousarray(frames)).float() / 255


def to_bytes(frames: Tensor) -> Frames:
    """Numbers from 0 to 1 to bytes; what lies outside is clipped."""
    return (frames.clamp(0, 1) * 255).round().to(torch.uint8).cpu().numpy()


def fit_square(frames: NDArray[Any], px: int) -> Frames:
    """Frames (..., h, w, 3), bytes or numbers from 0 to 1, to (..., px, px, 3): the central square, each pixel the mean of its area."""
    height, width = frames.shape[-3:-1]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    square = frames[..., top : top + side, left : left + side, :]
    whole = frames.dtype == np.uint8
    if side == px and whole:
        return np.ascontiguousarray(square)
    mean = square.astype(np.float32)
    if side != px:
        area = _areas(side, px)
        rows = (area @ mean.reshape(*mean.shape[:-2], side * 3)).reshape(*mean.shape[:-3], px, side, 3)
        mean = area @ rows
    return ((mean if whole else 255 * mean) + 0.5).clip(0, 255).astype(np.uint8)


@functools.lru_cache(maxsize=16)
def _areas(side: int, px: int) -> NDArray[np.float32]:
    """(px, side): the share of each new pixel that lies on each old one. Rows sum to 1."""
    edges = np.arange(px + 1) * (side / px)
    old = np.arange(side)
    overlap = np.minimum(edges[1:, None], old + 1) - np.maximum(edges[:-1, None], old)
    return (overlap.clip(0) * (px / side)).astype(np.float32)


def as_frames(frames: ArrayLike) -> Frames:
    """(t, h, w, 3) from that or from one frame (h, w, 3); anything but bytes of three colours is refused."""
    array = np.asarray(frames)
    if array.dtype != np.uint8:
        raise ValueError(f"frames are uint8, 0 to 255; got {array.dtype}, convert them: (255 * x).round().clip(0, 255) of numbers 0 to 1")
    if array.ndim not in (3, 4) or array.shape[-1] != 3 or 0 in array.shape[-3:]:
        raise ValueError(f"frames have the shape (t, h, w, 3), one (h, w, 3); got {array.shape}")
    return array if array.ndim == 4 else array[None]


def grid(clips: Frames, columns: int = 6) -> Frames:
    """Clips (n, t, h, w, 3) as one film (t, rows * h, columns * w, 3), at most so many columns."""
    columns = min(len(clips), columns)
    whole = np.concatenate([clips, np.zeros((-len(clips) % columns, *clips.shape[1:]), np.uint8)])
    return np.concatenate([np.concatenate(list(whole[i : i + columns]), axis=2) for i in range(0, len(whole), columns)], axis=1)


# Films.


class Film:
    """A file to which frames are added: `with Film("walk.mp4", fps=15, scale=4) as film: film.add(frames)`.

    The file has its name once it is whole: after an error, or while it is written, what was there before is there still. scale: each
    pixel becomes a square of scale x scale. Memory does not grow with the frames of an .mp4; it has even sides, so that a last odd row or
    column is repeated. In .gif and .webp a frame that equals the one before prolongs it.
    """

    def __init__(self, path: str | Path, fps: float = 15, scale: int = 1) -> None:
        self.path = Path(path)
        self.frames = 0
        ending = self.path.suffix.lower()
        if ending not in ENDINGS:
            raise ValueError(f"films are written as {', '.join(ENDINGS)}; got {self.path.name}, choose one of these")
        if not (math.isfinite(fps) and 0.01 <= fps <= FASTEST[ending]):
            raise ValueError(f"fps of {ending} is from 0.01 to {FASTEST[ending]} frames a second; got {fps}")
        if int(scale) != scale:
            raise ValueError(f"scale repeats pixels a whole number of times; got {scale}")
        check_counts(scale=scale)
        if ending == ".mp4":
            import_av()  # now, rather than after the first frame has been computed
        self._ending, self._fps, self._scale = ending, Fraction(fps).limit_denominator(100_000), int(scale)
        self._shape: tuple[int, ...] | None = None
        self._temporary: Path | None = None
        self._encoder: _Mp4 | _Stills | None = None
        self._closed = False

    def __enter__(self) -> Film:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    def add(self, frames: ArrayLike) -> None:
        """Write frames (t, h, w, 3), or one (h, w, 3). The first decides the size of all."""
        if self._closed:
            raise ValueError(f"{self.path.name} is closed; add frames before, or begin another film")
        array = as_frames(frames)
        if self._shape is None and len(array):
            self._open(array.shape[1:])
        if len(array) and array.shape[1:] != self._shape:
            raise ValueError(f"the frames of a film have one size; {self.path.name} began with {self._shape}, now came {array.shape[1:]}")
        try:
            for frame in array:
                assert self._encoder is not None
                self._encoder.add(_enlarge(frame, self._scale))
                self.frames += 1
        except BaseException:
            self.discard()  # a frame may be half written: nothing can follow it
            raise

    def close(self) -> None:
        """Finish the file and give it its name."""
        if self._closed:
            return
        if self._encoder is None or self._temporary is None:
            self._closed = True
            raise ValueError(f"{self.path.name} has no frames; add one at least")
        try:
            self._encoder.close()
            with open(self._temporary, "rb") as file:
                os.fsync(file.fileno())
            umask = os.umask(0)
            os.umask(umask)
            self._temporary.chmod(0o666 & ~umask)  # a temporary file is for its owner alone
            os.replace(self._temporary, self.path)
            self._closed = True
        finally:
            self.discard()

    def discard(self) -> None:
        """Forget what was written. A film that was closed stays."""
        if self._closed:
            return
        self._closed = True
        if isinstance(self._encoder, _Mp4):
            self._encoder.abandon()
        if self._temporary is not None:
            self._temporary.unlink(missing_ok=True)

    def _open(self, shape: tuple[int, ...]) -> None:
        height, width = shape[0] * self._scale, shape[1] * self._scale
        if max(height, width) > LARGEST[self._ending]:
            raise ValueError(f"a {self._ending} has at most {LARGEST[self._ending]} pixels a side; got {height} x {width}, make it smaller")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # A name of its own: two writers of one film would else write into one another.
        number, name = tempfile.mkstemp(prefix=f".{self.path.name}.", suffix=".tmp", dir=self.path.parent)
        os.close(number)
        self._temporary, self._shape = Path(name), shape
        try:
            if self._ending == ".mp4":
                self._encoder = _Mp4(self._temporary, height, width, self._fps)
            else:
                self._encoder = _Stills(self._temporary, self._ending, self._fps)
        except BaseException:
            self.discard()
            raise


class _Mp4:
    """H.264 by PyAV, with the table of contents in front, so that it plays while it loads."""

    def __init__(self, file: Path, height: int, width: int, fps: Fraction) -> None:
        self._av = import_av()
        self._odd = ((0, height % 2), (0, width % 2), (0, 0))
        self._container = self._av.open(str(file), "w", format="mp4", options={"movflags": "faststart"})
        # One thread: the bytes do not depend on the machine, and small frames gain nothing from more.
        self._stream = self._container.add_stream("libx264", rate=fps, options={"crf": "16", "preset": "medium", "threads": "1"})
        self._stream.width, self._stream.height, self._stream.pix_fmt = width + width % 2, height + height % 2, "yuv420p"

    def add(self, frame: Frames) -> None:
        pixels = np.pad(frame, self._odd, mode="edge")
        self._container.mux(self._stream.encode(self._av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")))

    def close(self) -> None:
        self._container.mux(self._stream.encode())
        self._container.close()

    def abandon(self) -> None:
        try:
            self._container.close()  # it writes to the file, which is about to be removed
        except Exception:
            return  # the error on the way here is the one to report


class _Stills:
    """.gif or .webp by Pillow: frames are kept, those of a gif in 256 colours, until the film is closed."""

    def __init__(self, file: Path, ending: str, fps: Fraction) -> None:
        from PIL import features

        if ending == ".webp" and not features.check("webp"):
            raise ImportError("this Pillow was built without webp; write .gif or .mp4, or install Pillow's own wheel")
        self._file, self._ending, self._fps = file, ending, fps
        self._stills: list[Any] = []

    def add(self, frame: Frames) -> None:
        from PIL import Image

        still = Image.fromarray(frame)
        self._stills.append(still.quantize(256, dither=Image.Dither.NONE) if self._ending == ".gif" else still)

    def close(self) -> None:
        tick = 10 if self._ending == ".gif" else 1  # milliseconds
        ends = [round(i * 1000 / (tick * self._fps)) * tick for i in range(len(self._stills) + 1)]  # so that the whole film keeps time
        options: dict[str, Any] = {} if self._ending == ".gif" else {"lossless": True, "quality": 50, "method": 2}
        durations = [end - begin for begin, end in pairwise(ends)]
        first, *rest = self._stills
        first.save(self._file, self._ending[1:].upper(), save_all=True, append_images=rest, duration=durations, loop=0, **options)


def import_av() -> Any:
    """PyAV, which reads and writes mp4."""
    try:
        import av
    except ImportError as error:
        raise ImportError("mp4 needs PyAV: pip install 'diffusion_forcing[video]', or use .webp or .gif, which do not") from error
    return av


def film_name(stem: str) -> str:
    """stem.mp4, or stem.gif where PyAV is missing."""
    try:
        import_av()
    except ImportError:
        return f"{stem}.gif"
    return f"{stem}.mp4"


def write_film(folder: Path, stem: str, frames: ArrayLike, fps: float = 15, scale: int = 1) -> str:
    """Write frames (t, h, w, 3) as a film into a folder. Returns the name of its file."""
    name = film_name(stem)
    with Film(folder / name, fps=fps, scale=scale) as film:
        film.add(frames)
    return name


def _enlarge(frame: NDArray[Any], scale: int) -> NDArray[Any]:
    return frame if scale == 1 else frame.repeat(scale, axis=0).repeat(scale, axis=1)


# Pages.


def side_by_side(films: Sequence[tuple[str, ArrayLike]], scale: int = 1) -> Frames:
    """Frames (t, BAND + h, w, 3) of films next to one another, their names above. One that ends before the others stands still."""
    if not films:
        raise ValueError("side by side stand one film or more; got none")
    check_counts(scale=scale)
    arrays = [as_frames(frames) for _, frames in films]
    empty = next((name for (name, _), array in zip(films, arrays, strict=True) if not len(array)), None)
    if empty is not None:
        raise ValueError(f"{empty!r} has no frames; give one at least, or leave it out")
    length, height = max(map(len, arrays)), scale * max(array.shape[1] for array in arrays)
    widths = [scale * array.shape[2] for array in arrays]
    page = np.full((length, BAND + height, sum(widths) + GAP * (len(films) - 1), 3), 255, dtype=np.uint8)
    left = 0
    for (name, _), array, width in zip(films, arrays, widths, strict=True):
        right = left + width
        page[:, :BAND, left:right] = _band(name, width)
        shown = array.repeat(scale, axis=1).repeat(scale, axis=2)
        page[: len(array), BAND : BAND + shown.shape[1], left:right] = shown
        page[len(array) :, BAND : BAND + shown.shape[1], left:right] = shown[-1]
        left = right + GAP
    return page


def _band(name: str, width: int) -> Frames:
    """A name in black on white, (BAND, width, 3); what does not fit is cut off."""
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (width, BAND), "white")
    ImageDraw.Draw(image).text((1, 1), name, fill="black", font=ImageFont.load_default())
    return np.asarray(image)


def contact_sheet(clips: ArrayLike, path: str | Path, names: Sequence[str] | None = None, every: int = 1, mark: int | None = None) -> None:
    """Draw clips (n, t, h, w, 3) as a PNG: a row a clip, a column each `every` frames, the frame's number above.

    mark: how many frames at the start are context: these are framed in blue, those that follow in red.
    """
    file, array = Path(path), np.asarray(clips)
    if file.suffix.lower() != ".png":
        raise ValueError(f"sheets are written as .png; got {file.name}")
    if array.ndim != 5 or 0 in array.shape:
        raise ValueError(f"clips have the shape (n, t, h, w, 3), none of them 0; got {array.shape}")
    n, t = array.shape[:2]
    as_frames(array[0])
    check_counts(every=every)
    if names is not None and len(names) != n:
        raise ValueError(f"a sheet of {n} clips has as many names; got {len(names)}")
    if mark is not None and not 0 <= mark <= t:
        raise ValueError(f"mark counts the frames that are context, from 0 to {t}; got {mark}")
    times = range(0, t, every)
    zoom = max(1, round(96 / max(array.shape[2:4])))  # small frames are enlarged until they can be seen
    gap = 6
    high, wide = array.shape[2] * zoom + gap, array.shape[3] * zoom + gap
    if max(n * high, len(times) * wide) > PAGE:
        raise ValueError(f"a sheet has at most {PAGE} pixels a side; {n} clips of {len(times)} frames have {n * high} x "
                         f"{len(times) * wide}, draw fewer clips, or fewer frames with `every`")  # fmt: skip
    page = np.full((n * high, len(times) * wide, 3), 255, dtype=np.uint8)
    for row in range(n):
        for column, time in enumerate(times):
            if mark is not None:
                colour = COLOURS[0] if time < mark else COLOURS[1]
                page[row * high + 1 : (row + 1) * high - 1, column * wide + 1 : (column + 1) * wide - 1] = _rgb(colour)
            top, left = row * high + gap // 2, column * wide + gap // 2
            page[top : top + high - gap, left : left + wide - gap] = _enlarge(array[row, time], zoom)

    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    dpi = 100
    margin = 0 if names is None else 10 + 7 * max(map(len, names))
    height, width = page.shape[0] + 24, page.shape[1] + margin
    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(width / dpi, height / dpi), dpi=dpi)
        FigureCanvasAgg(fig)
        fig.figimage(page, xo=margin, yo=0, origin="upper")  # a pixel is a pixel
        for column, time in enumerate(times):
            colour = "black" if mark is None else COLOURS[0] if time < mark else COLOURS[1]
            across = (margin + (column + 0.5) * wide) / width
            fig.text(across, 1 - 12 / height, str(time), ha="center", va="center", fontsize=8, color=colour)
        for row, name in enumerate(names or ()):
            down = (24 + (row + 0.5) * high) / height
            fig.text((margin - 6) / width, 1 - down, name, ha="right", va="center", fontsize=8, parse_math=False)
        file.parent.mkdir(parents=True, exist_ok=True)
        # "savefig.bbox" of a user's own settings would cut the page.
        write_atomically(file, lambda temporary: fig.savefig(temporary, format="png", dpi=dpi, bbox_inches=None))


def _rgb(colour: str) -> list[int]:
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
