"""Stage 45: the first-order scan in one pass, tiles of time handing on their state."""

from typing import NamedTuple

import torch
from torch import Tensor

from stages.families import accumulator, scan
from stages.toolkit import operator
from stages.toolkit.kernels import Kernels
from stages.toolkit.report import Counts
from stages.toolkit.stage import Stage

SECTOR = 32
LINE = 32  # words before the flags: the ticket and what fills its line
STRIP = 32  # channels of a strip
WARPS = 8  # of a tile of a row, at most
GROUPS = 4  # of 16 bytes that a lane takes of a tensor in it
FEWEST = 4  # tiles of a row, if it is so long that they can have a warp each


class Cut(NamedTuple):
    """How a problem is cut: in chains that know nothing of each other, their time in tiles."""

    chains: int
    tiles: int
    width: int  # channels of a chain
    steps: int  # of a tile


def cut(B: int, T: int, D: int, itemsize: int, rows: bool) -> Cut:
    """Strips of channels, or rows, each a channel."""
    if rows:
        piece = GROUPS * 32 * 16 // itemsize  # steps of a warp
        pieces = max(1, -(-T // piece))
        tiles = -(-pieces // min(WARPS, -(-pieces // FEWEST)))
        return Cut(B * D, tiles, 1, -(-pieces // tiles) * piece)
    steps = 256 // itemsize
    return Cut(B * -(-D // STRIP), max(1, -(-T // steps)), STRIP, steps)


def scratch(h: Tensor) -> tuple[Tensor, Tensor]:
    """The ticket and the flags, which are zeros at every call, and the memory for what tiles tell each other."""
    rows = h.stride(1) < h.stride(2)  # steps lie closer than channels
    chains, tiles, width, _ = cut(*h.shape, h.element_size(), rows)
    words = operator.empty((LINE + chains * tiles,), like=h, dtype=torch.float32)
    return words.zero_(), operator.empty((chains, tiles, 3, width), like=h, dtype=accumulator(h.dtype))


def launch(kernels: Kernels, a: Tensor, b: Tensor, h0: Tensor, h: Tensor, reverse: bool) -> None:
    """The forward; in a CUDA graph the zeros are written at every replay, too."""
    kernels.launch("scan", a.device, a, b, h0, h, *scratch(h), reverse)


def launch_backward(
    kernels: Kernels, g: Tensor, a: Tensor, h: Tensor, h0: Tensor, da: Tensor, db: Tensor, dh0: Tensor, reverse: bool
) -> None:
    """The backward, with a ticket of its own."""
    kernels.launch("scan_backward", a.device, g, a, h, h0, da, db, dh0, *scratch(da), reverse)


def cost(B: int, T: int, D: int, itemsize: int, time_dim: int = 1, reverse: bool = False) -> Counts:
    return Counts()


def backward_cost(B: int, T: int, D: int, itemsize: int, time_dim: int = 1, reverse: bool = False) -> Counts:
    return Counts()


stage = Stage(
    __file__,
    family=scan,
    lesson="one pass, tiles look back for the state: tickets, release and acquire",
    cost=cost,
    aligned=(1, 1024, 32),
    registers=255,
    options=({}, {"time_dim": 2}, {"time_dim": 2, "reverse": True}),
    define={"launch": launch, "launch_backward": launch_backward},
)
