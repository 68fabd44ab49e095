"""Stage 13: matmul, a tile of C in each thread's registers."""

from stages.families import matmul
from stages.toolkit.report import Counts
from stages.toolkit.stage import Stage

SIDE, EACH, DEPTH = 16, 8, 8
TILE = SIDE * EACH
WARPS = SIDE * SIDE // 32


def cost(M: int, N: int, K: int, itemsize: int) -> Counts:
    """A block of 8 warps owns 128 x 128 outputs and takes K / 8 steps; a warp holds two rows of 16 threads."""
    blocks = (M // TILE) * (N // TILE)
    steps = blocks * (K // DEPTH)
    copies = TILE * DEPTH // 32  # requests that bring a patch of A, or one of B
    row = max(1, DEPTH * itemsize // 32)  # sectors of a row of A's patch: a request of A has four such rows
    passes = max(1, itemsize // 4)  # wavefronts for 32 neighbours, and of 8 bytes for 16 of them, asked for twice
    return Counts(
        load_requests=steps * copies * 2,
        load_sectors=steps * copies * (4 * row + itemsize),
        store_requests=blocks * WARPS * EACH * EACH,
        store_sectors=blocks * WARPS * EACH * EACH * itemsize,  # two rows of 16 neighbours
        shared_load_wavefronts=steps * DEPTH * WARPS * EACH * (1 + passes),  # two words of A, 16 of B
        shared_store_wavefronts=steps * copies * 2 * passes,
        barriers=steps * 2,
    )


stage = Stage(
    __file__,
    family=matmul,
    lesson="a thread computes 8 x 8 outputs in registers; no bank conflicts",
    cost=cost,
    aligned=(TILE, TILE, 2 * DEPTH),  # rows of 16-bit elements, too, begin in a sector of their own
    registers=255,  # float64: one block on a multiprocessor; the others take 128, which two blocks have
)
