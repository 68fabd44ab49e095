"""Stage 31: the gate sums carried along instead of recomputed."""

from stages.families import vlstm
from stages.toolkit.report import Counts
from stages.toolkit.stage import Stage

TILE = 64


def cost(B: int, N: int, T: int, Dk: int, Dv: int, itemsize: int, **options: object) -> Counts:
    """A block owns TILE rows and a chunk of the columns, and takes a step for each tile of keys that it sees."""
    wide = itemsize == 8  # float64: tiles for half as many columns, threads with half as many rows and columns
    each, depth, passes = (4, 8, 2) if wide else (8, 16, 1)  # passes: wavefronts for 32 neighbours
    chunk = 128 if Dv > 64 and not wide else 64
    across, down = chunk // each, TILE // each  # threads side by side, and below each other
    warps = across * down // 32
    tiles, chunks = T // TILE, -(-Dv // chunk)
    squares = B * N * tiles * (tiles + 1) // 2  # of S
    blocks, steps = B * N * tiles * chunks, squares * chunks
    cut = blocks  # steps on the diagonal
    pieces = TILE * Dk * 2 // 32  # requests for a tile of Q and one of K
    values = squares * (TILE * Dv // 32)  # those for V: no more than there are columns
    square = TILE * TILE // 32 * passes  # wavefronts for a tile of S, or of D
    line = TILE // 32  # for a word of each key of a tile
    between = B * N * chunks * tiles * (tiles - 1) * (tiles - 2) // 6  # tiles of gates between two others
    loads = steps * pieces + values + line * (blocks + 2 * steps + between)
    own = B * N * T * Dv // 32  # requests that store H, 32 / across rows each
    normalisers = 3 * B * N * T * across // 32  # those for n, l and m: a word for each row of a warp
    return Counts(
        load_requests=loads,
        load_sectors=loads * itemsize,
        store_requests=own + normalisers,
        store_sectors=own * (32 // across) * max(1, across * itemsize // 32) + normalisers,
        shared_load_wavefronts=steps * warps * (Dk * (each + TILE // across * passes) + TILE * each * (1 + passes))
        + steps * square
        + line * TILE * (blocks + 2 * (steps - cut))
        + warps * (steps * TILE // across * passes + (steps - cut) * each + cut * TILE),
        shared_store_wavefronts=steps * (pieces + TILE * chunk // 32) * passes
        + 2 * steps * square
        + line * passes * (2 * blocks + 3 * steps)
        + blocks,
        barriers=steps * 2 * (Dk + TILE) // depth + 2 * (blocks + steps),
    )


stage = Stage(
    __file__,
    family=vlstm,
    lesson="walk away from the diagonal, and a running sum carries the gates",
    cost=cost,
    aligned=(1, 1, TILE, 16, TILE),
    registers=255,  # eight warps on a multiprocessor: 64 sums for H and up to 64 for S, m and l of eight rows
    options=(
        {},
        {"eps": 0.01},
        {"input_gate": "sigmoid", "eps": 0.01},
        {"input_gate": "sigmoid", "normalize": False},
    ),
    gradients=False,
)
