"""Stage 16: matmul by Hopper's own instructions."""

import torch

from stages.families import matmul
from stages.toolkit.report import Counts
from stages.toolkit.stage import Stage

ROWS, COLS, DEPTH, CLUSTER = 128, 256, 64, 2
BLOCKS = 4  # of the CPU device, at most: they take one tile after the other


# Mutants that change nothing, by the name that `python -m stages mutate 16` gives them, and why.
EQUIVALENT = {
    "take_registers<232>();  [take_registers<232>() removed]": "with fewer registers the compiler keeps sums elsewhere",
}


def cost(M: int, N: int, K: int, itemsize: int) -> Counts:
    """A block takes a step for each 64 along k: a box of A, two of the four of B, four products of 8 warps."""
    tiles, steps = (M // ROWS) * (N // COLS), K // DEPTH
    return Counts(
        bulk_load_requests=tiles * steps * 3,
        bulk_load_sectors=tiles * steps * (ROWS + COLS // CLUSTER) * DEPTH * itemsize // 32,
        bulk_store_requests=tiles * 8,
        bulk_store_sectors=tiles * ROWS * COLS * itemsize // 32,
        products=tiles * steps * 4 * 8,
        shared_store_wavefronts=tiles * ROWS * COLS * itemsize // 128,
        barriers=min(tiles, BLOCKS) * 2 + tiles * 2 * 8,  # two groups of warps meet twice for each box of C
    )


stage = Stage(
    __file__,
    family=matmul,
    lesson="who multiplies does nothing else: TMA, wgmma, warps with roles",
    cost=cost,
    aligned=(CLUSTER * ROWS, COLS, DEPTH),
    registers=168,  # at the start; the consumers take more
    problems=((256, 256, 128), (130, 264, 712), (33, 1000, 72), (1, 8, 8), (5, 16, 0)),
    xray_sizes=(256, 256, 128),
    bench={
        "cpu": ((512, 512, 512),),
        "cuda": (*((n, n, n) for n in (2048, 4096, 8192)), (16384, 4096, 11008), (16384, 11008, 4096)),
    },
    dtypes=(torch.bfloat16, torch.float16),
    define={"tensor_cores": True, "copy_engine": True},
    instead="15_matmul_tensor",
)
