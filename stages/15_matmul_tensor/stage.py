"""Stage 15: matmul on the tensor cores."""

import torch

from stages.families import matmul
from stages.toolkit.report import Counts
from stages.toolkit.stage import Stage

SIDE, ROWS, COLS, CHUNKS = 64, 256, 128, 8
WARPS = 8


def cost(M: int, N: int, K: int, itemsize: int, tf32: bool = False) -> Counts:
    """A block of 8 warps owns 256 x 128 outputs and takes a step for each 128 bytes along k."""
    blocks, steps = (M // ROWS) * (N // COLS), K * itemsize // 128
    a_copies = ROWS * CHUNKS // 32  # requests of 16 bytes a lane for a tile of A
    fills = steps + 2  # what is started ahead of the last two steps brings only zeros
    rows = SIDE * SIDE * itemsize // 512  # requests that take a warp's patch of C from shared memory to C
    if itemsize == 4:  # B is transposed on the way, word by word: 32 rows of its tile below each other, 8 in new banks
        b_copies, b_sectors, b_passes = COLS * 128 // 4 // 32, 4, 4
    else:
        b_copies, b_sectors, b_passes = COLS * CHUNKS // 32, 16, 4
    return Counts(
        load_requests=blocks * steps * (a_copies + b_copies),
        load_sectors=blocks * steps * (a_copies * 16 + b_copies * b_sectors),
        store_requests=blocks * WARPS * rows,
        store_sectors=blocks * WARPS * rows * 16,
        shared_load_wavefronts=blocks * WARPS * ((4 * steps + 1) * 8 * 4 + rows * 4),  # 8 ldmatrix of 4 matrices
        shared_store_wavefronts=blocks * WARPS * SIDE * itemsize // 2,  # 8 bytes of float32 go by halves of a warp
        shared_copy_wavefronts=blocks * fills * (a_copies * 4 + b_copies * b_passes),
        barriers=blocks * (steps + 2),
    )


stage = Stage(
    __file__,
    family=matmul,
    lesson="tensor cores: mma.sync, ldmatrix, swizzled tiles",
    cost=cost,
    aligned=(ROWS, COLS, 64),
    registers=255,  # one block on a multiprocessor
    dtypes=(torch.float32, torch.float16, torch.bfloat16),
    options=lambda dtype: ({"tf32": True},) if dtype is torch.float32 else ({},),
    define={"tensor_cores": True},
)
