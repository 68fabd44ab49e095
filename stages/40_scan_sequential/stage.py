"""Stage 40: the first-order scan, one thread for each channel."""

from stages.families import scan
from stages.toolkit.report import Counts
from stages.toolkit.stage import Stage

WARP = 32


def moved(B: int, D: int, itemsize: int, time_dim: int, loads: int, stores: int, ends: int) -> Counts:
    """What walks move that load and store so many words of a channel, read h0 and write `ends` words at their end."""
    warps = B * D // WARP
    each = itemsize if time_dim == 1 else WARP  # sectors of a request: neighbours side by side, or each in its own
    return Counts(
        load_requests=warps * (loads + 1),
        load_sectors=warps * (loads * each + itemsize),
        store_requests=warps * (stores + ends),
        store_sectors=warps * (stores * each + ends * itemsize),
    )


def cost(B: int, T: int, D: int, itemsize: int, time_dim: int = 1, reverse: bool = False) -> Counts:
    """A warp has 32 channels: a step loads a and b and stores h."""
    return moved(B, D, itemsize, time_dim, loads=2 * T, stores=T, ends=0)


def backward_cost(B: int, T: int, D: int, itemsize: int, time_dim: int = 1, reverse: bool = False) -> Counts:
    """A step loads g, a and the h before it, which for the first one is h0, and stores da and db."""
    return moved(B, D, itemsize, time_dim, loads=3 * T - 1, stores=2 * T, ends=1)


stage = Stage(
    __file__,
    family=scan,
    lesson="a thread for each channel, which walks through time",
    cost=cost,
    aligned=(1, 16, WARP),  # with time_dim=2 the neighbours of a warp are T words apart: in sectors of their own
    registers=40,
    options=({}, {"reverse": True}, {"time_dim": 2}),
)
