"""Stage 12: matmul through shared memory."""

from stages.families import matmul
from stages.toolkit.report import Counts
from stages.toolkit.stage import Stage

TILE = 32


def cost(M: int, N: int, K: int, itemsize: int) -> Counts:
    """A block has TILE warps, a row of its patch each, and takes K / TILE steps."""
    blocks = (M // TILE) * (N // TILE)
    steps = blocks * (K // TILE)
    copies = steps * TILE * 2  # requests that bring a row of A's or of B's patch
    passes = max(1, itemsize // 4)  # wavefronts a request: 32 lanes of 8 bytes are more than the 128 of one
    return Counts(
        load_requests=copies,
        load_sectors=copies * itemsize,  # TILE neighbours
        store_requests=blocks * TILE,
        store_sectors=blocks * TILE * itemsize,
        shared_load_wavefronts=steps * TILE * TILE * (1 + passes),  # a warp and k: one word of A for all, a row of B
        shared_store_wavefronts=copies * passes,
        barriers=steps * 2,
    )


stage = Stage(
    __file__,
    family=matmul,
    lesson="a block fetches its operands once, into shared memory",
    cost=cost,
    aligned=(TILE, TILE, TILE),
    registers=32,  # 2048 threads, as many as a multiprocessor holds, share 65536
)
