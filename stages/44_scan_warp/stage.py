"""Stage 44: the first-order scan, time cut in pieces: threads, then warps, then chunks."""

from stages.families import scan
from stages.toolkit.report import Counts
from stages.toolkit.stage import Stage

def cost(B: int, T: int, D: int, itemsize: int, time_dim: int = 1, reverse: bool = False) -> Counts:
    return Counts()


stage = Stage(
    __file__,
    family=scan,
    lesson="pieces of time: a thread's in registers, a warp's by shuffles, a block's with one barrier, chunks with a carry",
    cost=cost,
    aligned=(1, 64, 16),
    registers=64,
    options=({"time_dim": 2}, {"time_dim": 2, "reverse": True}, {}),
)
