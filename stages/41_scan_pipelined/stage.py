"""Stage 41: the first-order scan, later steps on their way while a thread walks."""

from stages.families import scan
from stages.toolkit.report import Counts
from stages.toolkit.stage import Stage

LANES = 32  # of a block


def moved(B: int, T: int, D: int, itemsize: int, time_dim: int, reads: int, writes: int, missing: int) -> Counts:
    """A block walks through `reads` tensors, of which `missing` lack the last row, and writes `writes` others.

    A row is a step of a block's channels, of which a lane has `pair`. Of [B, T, D] a lane copies 16 bytes, of
    [B, D, T] a word.
    """
    pair, passes = (2, 1) if itemsize == 2 else (1, itemsize // 4)  # passes: wavefronts for a row in shared memory
    strip = LANES * pair
    blocks = B * D // strip
    rows, results = reads * T * blocks, writes * T * blocks
    lost = missing * blocks  # rows that are zeros instead
    ends = blocks if missing else 0  # the backward stores dh0, and puts h0 in the place of the zeros
    if time_dim == 1:
        lanes = strip * itemsize // 16  # that copy a row
        lines = lanes // 8  # of 128 bytes in it: each a wavefront, and zeros take four for a request
        each = strip * itemsize // 32  # sectors of a row
        moves = dict(
            load_requests=rows * lanes // 32 + blocks * pair,
            store_requests=results * lanes // 32 + ends * pair,
            shared_copy_wavefronts=(rows - lost) * lines + lost * 4,
            shared_load_wavefronts=rows * passes + results * lines,
            shared_store_wavefronts=(results + ends) * passes,
        )
    else:
        each = strip
        singly = rows * pair if itemsize == 2 else 0  # cp.async takes no less than 4 bytes
        # T words lie between two lanes: all come from the same bank of the first-level cache.
        copies = 0 if singly else (rows - lost) * 32 + lost * passes
        moves = dict(
            load_requests=(rows - lost + blocks) * pair,
            store_requests=(results + ends) * pair,
            shared_copy_wavefronts=copies,
            shared_load_wavefronts=(rows + results * pair) * passes,
            shared_store_wavefronts=(results + ends) * passes + singly,
        )
    return Counts(  # of h0 and dh0 every lane moves its words one after the other
        **moves,
        load_sectors=(rows - lost) * each + blocks * itemsize * pair**2,
        store_sectors=results * each + ends * itemsize * pair**2,
    )


def cost(B: int, T: int, D: int, itemsize: int, time_dim: int = 1, reverse: bool = False) -> Counts:
    """A step needs a and b, and gives h."""
    return moved(B, T, D, itemsize, time_dim, reads=2, writes=1, missing=0)


def backward_cost(B: int, T: int, D: int, itemsize: int, time_dim: int = 1, reverse: bool = False) -> Counts:
    """A step needs g, a and the h before it, which for the first step is h0, and gives da and db."""
    return moved(B, T, D, itemsize, time_dim, reads=3, writes=2, missing=1)


stage = Stage(
    __file__,
    family=scan,
    lesson="later steps on their way: a ring of tiles in shared memory",
    cost=cost,
    aligned=(1, 32, 2 * LANES),
    registers=168,  # a block is one warp: it may have many
    options=({}, {"reverse": True}, {"time_dim": 2}),
)

NOTHING = "a tile of zeros is copied that nobody reads: only the counts of the backward tell, which its tests compare"
EQUIVALENT = {
    "for (int r = 0; r < ROWS<T>; r += STEP, to += STEP * stride_t) {  [r < ROWS<T> -> r <= ROWS<T>]": (
        "past a whole tile the check of the row, which is there for the last tile, stores nothing"
    ),
    "if (g_strip.steps > 0) g_strip.fetch(g_ring[slot]), a_strip.fetch(a_ring[slot]), h_strip.fetch(h_ring[slot]);  "
    "[g_strip.steps > 0 -> g_strip.steps >= 0]": NOTHING,
    "if (g_strip.steps > 0) g_strip.fetch(g_ring[slot]), a_strip.fetch(a_ring[slot]), h_strip.fetch(h_ring[slot]);  "
    "[g_strip.steps > 0 -> true]": NOTHING,
}
