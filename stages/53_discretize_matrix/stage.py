"""Stage 53: discretizations of a full matrix."""

from stages.families import discretize_matrix
from stages.toolkit.report import Counts
from stages.toolkit.stage import Stage

EQUIVALENT = {}


def cost(M: int, n: int, m: int, itemsize: int, method: str = "zoh") -> Counts:
    return Counts()


stage = Stage(
    __file__,
    family=discretize_matrix,
    lesson="solves and exponentials of small matrices, a few lanes for each",
    cost=cost,
    aligned=(8, 16, 4),
    registers=128,
    dtypes=discretize_matrix.DTYPES,
    options=tuple({"method": method} for method in discretize_matrix.METHODS),
)
