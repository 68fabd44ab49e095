"""Stage 15: matmul on the tensor cores."""

import torch

from stages.families import matmul
from stages.toolkit.report import Counts
from stages.toolkit.stage import Stage

ROWS, COLS = 256, 128
WARPS = 8


def cost(M: int, N: int, K: int, itemsize: int, tf32: bool = False) -> Counts:
    return Counts(0, 0, 0, 0, 0, 0, 0)


stage = Stage(
    __file__,
    family=matmul,
    lesson="tensor cores: mma.sync, ldmatrix, swizzled tiles",
    cost=cost,
    aligned=(ROWS, COLS, 64),
    registers=255,
    dtypes=(torch.float32, torch.float16, torch.bfloat16),
    options=lambda dtype: ({"tf32": True},) if dtype is torch.float32 else ({},),
    define={"tensor_cores": True},
)
