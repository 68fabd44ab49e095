"""Stage 52: the selective scan, forward and backward."""

import torch
from torch import Tensor

from stages.families import COMPLEX, FLOATING, selective_scan
from stages.toolkit.stage import Stage

ENOUGH_WARPS = 2112  # 16 for each multiprocessor of an H100: then a lane of a walk has 8 states, before that 4


def states_of_a_lane(u: Tensor, A: Tensor) -> int:
    """8 where there are enough channels, as what is not done for each state is then done for fewer; else 4."""
    wide = A.dtype is torch.float32 and A.shape[1] > 4
    return 8 if wide and u.shape[0] * u.shape[1] * -(-A.shape[1] // 8) >= 32 * ENOUGH_WARPS else 4


def options(dtype: torch.dtype) -> tuple[dict[str, str], ...]:
    """All methods."""
    return tuple({"discretization_method": method} for method in selective_scan.METHODS)


stage = Stage(
    __file__,
    family=selective_scan,
    lesson="the way back: states made anew, gradients summed in a fixed order",
    cost=None,
    aligned=(1, 16, 16, 32),
    registers=255,
    dtypes=FLOATING + COMPLEX,
    options=options,
    define={"states_of_a_lane": states_of_a_lane},
)
