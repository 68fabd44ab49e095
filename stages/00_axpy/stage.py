"""Stage 00: axpy, the first kernel."""

from stages.families import axpy
from stages.toolkit.report import Counts
from stages.toolkit.stage import Stage


def cost(N: int, itemsize: int) -> Counts:
    """A warp has 32 neighbours, so its request is one run of bytes that begins on a sector: no byte is read in vain."""
    warps = -(-N // 32)
    sectors = -(-N * itemsize // 32)  # of one tensor
    return Counts(
        load_requests=2 * warps,  # x and y
        load_sectors=2 * sectors,
        store_requests=warps,
        store_sectors=sectors,
    )


stage = Stage(
    __file__,
    family=axpy,
    lesson="a thread for each element: grid, block, bounds",
    cost=cost,
    aligned=(1,),
    registers=32,  # 2048 threads, as many as a multiprocessor holds, share 65536
)
