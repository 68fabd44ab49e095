"""Stage 23: the causal mask, and skipping what it hides."""

from stages.families import qkv
from stages.toolkit.report import Counts
from stages.toolkit.stage import Stage

TILE = 64


def cost(B: int, N: int, T: int, Dk: int, Dv: int, itemsize: int, causal: bool = False) -> Counts:
    """A block owns TILE rows and a chunk of the columns, and takes a step for each tile of keys that it sees."""
    wide = itemsize == 8  # float64: tiles for half as many columns, threads with half as many rows and columns
    each, depth, passes = (4, 8, 2) if wide else (8, 16, 1)  # passes: wavefronts for 32 neighbours
    chunk = 128 if Dv > 64 and not wide else 64
    across = chunk // each  # threads side by side
    warps = across * (TILE // each) // 32
    tiles = T // TILE
    squares = B * N * (tiles * (tiles + 1) // 2 if causal else tiles**2)  # of S
    steps = squares * -(-Dv // chunk)
    pieces = TILE * Dk * 2 // 32  # requests for a tile of Q and one of K
    values = squares * (TILE * Dv // 32)  # those for V: no more than there are columns
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
    lesson="tiles that the mask hides are skipped, the diagonal is cut",
    cost=cost,
    aligned=(1, 1, TILE, 16, TILE),
    registers=168,  # six blocks of 64 threads on a multiprocessor; with 128 threads, 128, which four blocks have
    options=({"causal": True}, {"causal": False}),
    define={"masks": True},
)
