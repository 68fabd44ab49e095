"""Stage 11: matmul, neighbouring threads read neighbouring addresses."""

from stages.families import matmul
from stages.toolkit.report import Counts
from stages.toolkit.stage import Stage


def cost(M: int, N: int, K: int, itemsize: int) -> Counts:
    """A warp has 32 columns of one row of C: 32 elements side by side, in `itemsize` sectors of 32 bytes."""
    warps = M * N // 32
    return Counts(
        load_requests=warps * K * 2,  # for each k one of A and one of B
        load_sectors=warps * K * (1 + itemsize),  # A: one element for all; B: 32 neighbours
        store_requests=warps,
        store_sectors=warps * itemsize,
    )


stage = Stage(
    __file__,
    family=matmul,
    lesson="columns on threadIdx.x: a warp reads whole sectors",
    cost=cost,
    aligned=(8, 32, 8),
    registers=32,  # 2048 threads, as many as a multiprocessor holds, share 65536
)
