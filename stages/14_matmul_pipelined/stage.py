"""Stage 14: matmul, the next patches on their way while this one is computed."""

from stages.families import matmul
from stages.toolkit.report import Counts
from stages.toolkit.stage import Stage

ROWS, DEPTH = 256, 8
WARPS = 8


def cost(M: int, N: int, K: int, itemsize: int) -> Counts:
    return Counts(0, 0, 0, 0, 0, 0, 0)


stage = Stage(
    __file__,
    family=matmul,
    lesson="copies that nobody waits for (cp.async), three patches deep, 16 bytes at a time",
    cost=cost,
    aligned=(256, 128, 16),
    registers=255,
)
