"""Stage 30: the vLSTM forward, gates and normaliser fused."""

from stages.families import vlstm
from stages.toolkit.report import Counts
from stages.toolkit.stage import Stage

TILE = 64
LINE = TILE // 32  # requests for a word of each row, or key, of a tile


def cost(B: int, N: int, T: int, Dk: int, Dv: int, itemsize: int, **options: object) -> Counts:
    """A block owns TILE rows and a chunk of the columns, and takes a step for each tile of keys that it sees."""
    wide = itemsize == 8  # float64: tiles for half as many columns, threads with half as many rows and columns
    each, depth, passes = (4, 8, 2) if wide else (8, 16, 1)  # passes: wavefronts for 32 neighbours
    chunk = 128 if Dv > 64 and not wide else 64
    across = chunk // each  # threads side by side
    warps = across * (TILE // each) // 32
    tiles = T // TILE
    blocks = B * N * tiles * -(-Dv // chunk)
    steps = blocks * (tiles + 1) // 2
    pieces = TILE * Dk * 2 // 32  # requests for a tile of Q and one of K
    values = B * N * tiles * (tiles + 1) // 2 * (TILE * Dv // 32)  # those for V: no more than there are columns
    square = TILE * TILE // 32 * passes  # wavefronts for a tile of D, or of weights
    between = blocks * (tiles - 1) * (tiles - 2) // 6  # tiles of gates between two others
    loads = steps * (pieces + 2 * LINE) + values + (blocks + between) * LINE
    own = B * N * T * Dv // 32  # requests that store H, 32 / across rows each
    return Counts(
        load_requests=loads,
        load_sectors=loads * itemsize,
        store_requests=own,
        store_sectors=own * (32 // across) * max(1, across * itemsize // 32),
        shared_load_wavefronts=steps * warps * (Dk * (each + TILE // across * passes) + TILE * each * (1 + passes))
        + steps * (3 * TILE * LINE + 2 * square)  # the gates, for each row; D, for its weight, and the weight, for l
        + (steps + blocks) * warps * 2 * each  # what a row is multiplied by
        + blocks * 32 * LINE * (LINE + 1) // 2,  # the gates of the rows' tile, up to each row
        shared_store_wavefronts=steps * ((pieces + TILE * chunk // 32) * passes + 2 * square)
        + (5 * steps + 3 * blocks) * LINE * passes,
        barriers=steps * (2 * (Dk + TILE) // depth + 1) + blocks * 3,
    )


stage = Stage(
    __file__,
    family=vlstm,
    lesson="gates, running maximum and normaliser, all in one pass",
    cost=cost,
    aligned=(1, 1, TILE, 16, TILE),
    registers=255,  # eight warps on a multiprocessor: 64 sums of the walk and 64 of a step
    options=(
        {},
        {"eps": 0.01},
        {"input_gate": "sigmoid", "eps": 0.01},
        {"input_gate": "sigmoid", "normalize": False},
    ),
    gradients=False,
)
