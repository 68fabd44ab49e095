"""Stage 53: discretization with a full matrix A, solves and exponentials of many small matrices."""

from stages.families import matrix_discretization
from stages.toolkit.stage import Stage

stage = Stage(
    __file__,
    family=matrix_discretization,
    lesson="many small matrices: each in the hands of a few lanes, from the first word to the last",
    registers=255,
    options=tuple({"method": method} for method in matrix_discretization.METHODS),
)
