"""Stage 50: the discretizations of a state space model."""

from stages.families import COMPLEX, FLOATING, discretization
from stages.toolkit.report import Counts
from stages.toolkit.stage import Stage

WARP, SECTOR = 32, 32


def cost(B: int, T: int, D: int, N: int, itemsize: int, method: str) -> Counts:
    """A warp reads 32 neighbours of A, of one delta, and writes 32 neighbours of each output."""
    warps, outputs = B * T * D * N // WARP, len(discretization.OUTPUTS(method=method))
    return Counts(
        load_requests=2 * warps,
        load_sectors=warps * (itemsize + 1),
        store_requests=outputs * warps,
        store_sectors=outputs * warps * itemsize,
    )


def backward_cost(B: int, T: int, D: int, N: int, itemsize: int, method: str) -> Counts:
    """It also reads the gradient of each output, and writes dA and ddelta in 4 bytes or more."""
    warps, outputs = B * T * D * N // WARP, len(discretization.OUTPUTS(method=method))
    return Counts(
        load_requests=(2 + outputs) * warps,
        load_sectors=warps * (itemsize + 1 + outputs * itemsize),
        store_requests=2 * warps,
        store_sectors=2 * warps * max(4, itemsize),
    )


stage = Stage(
    __file__,
    family=discretization,
    lesson="functions that are 0 / 0 where they are needed, and their derivatives",
    cost=cost,
    aligned=(1, 1, 1, WARP),  # the states of a channel, which have one delta, are a multiple of a warp
    registers=64,
    dtypes=FLOATING + COMPLEX,
    options=tuple({"method": method} for method in discretization.METHODS),
)
