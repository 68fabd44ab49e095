"""Stage 48: the adaptive unitary operator, a scan whose states turn."""

from stages.families import adaptive_unitary
from stages.toolkit.report import Counts
from stages.toolkit.stage import Stage


def cost(b: int, d: int, n: int, T: int, itemsize: int) -> Counts:
    return Counts()


stage = Stage(
    __file__,
    family=adaptive_unitary,
    lesson="states that turn: a sum in a frame that turns along, phases in whole numbers",
    cost=cost,
    aligned=(1, 32, 64, 128),
    registers=255,  # in double; there are no more threads than states, so each may have many
)
