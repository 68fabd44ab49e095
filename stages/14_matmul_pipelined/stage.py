"""Stage 14: matmul, the next patches on their way while this one is computed."""

from stages.families import matmul
from stages.toolkit.report import Counts
from stages.toolkit.stage import Stage

ROWS, DEPTH, DOWN = 256, 8, 8
WARPS = 8


def cost(M: int, N: int, K: int, itemsize: int) -> Counts:
    """A block of 8 warps owns 256 x 128 outputs (float64: x 64) and takes K / 8 steps."""
    each = 8 if itemsize == 8 else 16  # columns of a lane
    wide, cols = 16 // itemsize, 8 * each
    blocks, steps = (M // ROWS) * (N // cols), K // DEPTH
    fills = steps + (1 if itemsize == 8 else 2)  # what is started ahead of the last steps brings only zeros
    parts = DOWN // wide + each // wide  # reads of a warp for a step of k, two wavefronts each
    counts = dict(
        store_requests=blocks * WARPS * DOWN * each // wide,
        store_sectors=blocks * WARPS * DOWN * each // wide * 16,  # 8 rows of 64 bytes
        shared_load_wavefronts=blocks * WARPS * (steps * DEPTH + 1) * parts * 2,
        barriers=blocks * (steps + 1),
    )
    rows = ROWS * DEPTH // 32  # requests for a patch of A
    if itemsize == 2:  # by elements: A down its columns, where no two lanes share a sector
        groups = cols * DEPTH // 32
        return Counts(
            **counts,
            load_requests=blocks * steps * (rows + groups),
            load_sectors=blocks * steps * (rows * 32 + groups * 2),
            shared_store_wavefronts=blocks * fills * (rows + groups),
        )
    groups = cols * DEPTH // wide // 32
    zeros = (fills - steps) * rows * itemsize // 4  # of A: whole warps, no line of memory
    return Counts(
        **counts,
        load_requests=blocks * steps * (rows + groups),
        load_sectors=blocks * steps * (rows * itemsize + groups * 16),  # four rows of A; 512 bytes of B
        shared_copy_wavefronts=blocks * (steps * rows * 4 + zeros + fills * groups * 4),
    )


stage = Stage(
    __file__,
    family=matmul,
    lesson="copies that nobody waits for: cp.async, patches on their way",
    cost=cost,
    aligned=(ROWS, 128, 4 * DEPTH),  # every row of A in cache lines of its own
    registers=255,  # one block on a multiprocessor
)
