"""Stage 10: matmul, one thread for each output."""

from stages.families import matmul
from stages.toolkit.report import Counts
from stages.toolkit.stage import Stage


def cost(M: int, N: int, K: int, itemsize: int) -> Counts:
    """A warp has 32 rows of one column of C. The same for every dtype: a sector holds one element that is of use."""
    warps = M * N // 32
    return Counts(
        load_requests=warps * K * 2,  # for each k one of A and one of B
        load_sectors=warps * K * (32 + 1),  # A: 32 rows, in 32 sectors; B: one element for all
        store_requests=warps,
        store_sectors=warps * 32,
    )


stage = Stage(
    __file__,
    family=matmul,
    lesson="a thread for each output, the formula as it stands",
    cost=cost,
    aligned=(32, 16, 16),  # whole warps, and rows of A and C of a sector or more, in 16 bits too
    registers=32,  # 2048 threads, as many as a multiprocessor holds, share 65536
    bench={"cuda": ((1024, 1024, 1024), (4096, 4096, 4096))},  # one call at 8192 takes seconds
)
