"""Stage 15: matmul on the tensor cores."""

from stages.families import matmul
from stages.toolkit.report import Counts
from stages.toolkit.stage import Stage

ROWS, DEPTH = 256, 8
WARPS = 8


def cost(M: int, N: int, K: int, itemsize: int) -> Counts:
    return Counts(0,0,0,0,0,0,0)


stage = Stage(
    __file__,
    family=matmul,
    lesson="tensor cores: mma.sync, ldmatrix, swizzled tiles",
    cost=cost,
    aligned=(256, 128, 64),
    registers=255,
)
