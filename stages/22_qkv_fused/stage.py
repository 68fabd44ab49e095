"""Stage 22: (Q K^T) V in one kernel, S stays on the chip."""

from stages.families import qkv
from stages.toolkit.report import Counts
from stages.toolkit.stage import Stage

TILE = 64


def cost(B: int, N: int, T: int, Dk: int, Dv: int, itemsize: int) -> Counts:
    """A block owns TILE rows and a chunk of the columns, and takes T / TILE steps, one for each tile of keys."""
    wide = itemsize == 8  # float64: tiles for half as many columns, threads with half as many rows and columns
    each, depth, passes = (4, 8, 2) if wide else (8, 16, 1)  # passes: wavefronts for 32 neighbours
    chunk = 128 if Dv > 64 and not wide else 64
    across = chunk // each  # threads side by side
    warps = across * (TILE // each) // 32
    blocks = B * N * (T // TILE) * -(-Dv // chunk)
    steps = blocks * (T // TILE)
    pieces = TILE * Dk * 2 // 32  # requests for a tile of Q and one of K
    values = B * N * (T // TILE) ** 2 * (TILE * Dv // 32)  # those for V: no more than there are columns
    own = B * N * T * Dv // 32  # and those that store O, 32 / across rows each
    return Counts(
        load_requests=steps * pieces + values,
        load_sectors=(steps * pieces + values) * itemsize,
        store_requests=own,
        store_sectors=own * (32 // across) * max(1, across * itemsize // 32),
        shared_load_wavefronts=steps * warps * (Dk * (each + TILE // across * passes) + TILE * each * (1 + passes)),
        shared_store_wavefronts=steps * (pieces + TILE * (TILE + chunk) // 32) * passes,
        barriers=steps * 2 * (Dk + TILE) // depth,
    )


stage = Stage(
    __file__,
    family=qkv,
    lesson="a block owns rows of O; S passes through shared memory",
    cost=cost,
    aligned=(1, 1, TILE, 16, TILE),
    registers=168,  # six blocks of 64 threads on a multiprocessor; with 128 threads, 128, which four blocks have
)
