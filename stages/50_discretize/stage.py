"""Stage 50: the discretizations of a state space model."""

import math

from stages.families import COMPLEX, FLOATING, discretization
from stages.toolkit.report import Counts
from stages.toolkit.stage import Stage

WARP, SECTOR, WIDE = 32, 32, 16  # lanes; bytes of a sector, and of a store of one thread


def warps_of(elements: int, itemsize: int) -> int:
    """A thread has as many elements as its widest store holds of the type that it computes in, four bytes or more."""
    return math.ceil(elements * max(4, itemsize) / (WIDE * WARP))


def cost(B: int, T: int, D: int, N: int, itemsize: int, method: str) -> Counts:
    """A warp reads neighbours of A by one request, one sector of delta by another, and writes each output."""
    elements, outputs = B * T * D * N, len(discretization.OUTPUTS(method=method))
    warps = warps_of(elements, itemsize)
    return Counts(
        load_requests=2 * warps,
        load_sectors=elements * itemsize // SECTOR + warps,
        store_requests=outputs * warps,
        store_sectors=outputs * elements * itemsize // SECTOR,
    )


def backward_cost(B: int, T: int, D: int, N: int, itemsize: int, method: str) -> Counts:
    """It also reads the gradient of each output, and writes dA and ddelta in 4 bytes or more."""
    elements, outputs = B * T * D * N, len(discretization.OUTPUTS(method=method))
    warps = warps_of(elements, itemsize)
    return Counts(
        load_requests=(2 + outputs) * warps,
        load_sectors=(1 + outputs) * elements * itemsize // SECTOR + warps,
        store_requests=2 * warps,
        store_sectors=2 * elements * max(4, itemsize) // SECTOR,
    )


EQUIVALENT = {
    "for (int n = 0; n < COUNT; ++n) {  [n < COUNT -> n <= COUNT]": "where all are left they are stored at once",
}
stage = Stage(
    __file__,
    family=discretization,
    lesson="functions that are 0 / 0 where they are needed, and their derivatives",
    cost=cost,
    aligned=(1, 1, 4, WARP),  # a warp's neighbours have A of their own, and deltas of one sector
    registers=64,
    dtypes=FLOATING + COMPLEX,
    options=tuple({"method": method} for method in discretization.METHODS),
)
