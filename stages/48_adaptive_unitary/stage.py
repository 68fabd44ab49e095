"""Stage 48: the adaptive unitary operator, a scan whose states turn."""

from stages.families import adaptive_unitary
from stages.toolkit.report import Counts
from stages.toolkit.stage import Stage

STATES, STEPS, INPUTS, WARPS = 64, 32, 32, 4  # states and warps of a block, steps and inputs of a tile


def cost(b: int, d: int, n: int, T: int, itemsize: int) -> Counts:
    """The forward without what a backward needs. A block walks through all tiles of time once for STATES states."""
    walks, tiles, parts = n // STATES, T // STEPS, d // INPUTS
    blocks, wide = b * d, itemsize // 4
    # Of x the tile stays where it is while there is but one; after the last tile of u one of zeros is filled in.
    of_x, of_u = 1 + (tiles * parts if parts > 1 else 0), tiles * parts
    twice = wide - 1  # rows of doubles are twice as long, and meet in the same banks
    return Counts(
        load_requests=blocks * (walks * (WARPS * (10 + 16 * of_x + 8 * of_u) + 4 * tiles) + tiles),
        load_sectors=blocks * (walks * wide * (88 + 1024 * of_x + 128 * of_u + 16 * tiles) + tiles),
        store_requests=blocks * walks * (WARPS + 2 * tiles),
        store_sectors=blocks * walks * wide * (16 + 8 * tiles),
        # A tile: 16 bytes of x a lane for each 8 inputs and part, four times as many of u, and the copies of the next.
        shared_load_wavefronts=blocks * walks * (32 * wide * (1 + 13 * of_u + tiles) + (4 * wide + 64 * twice) * tiles),
        shared_load_conflicts=blocks * walks * twice * (384 * of_u + 64 * tiles),
        shared_store_wavefronts=blocks * walks * wide * (128 * of_x + 64 * (1 + of_u) + 1 + (5 + 4 * twice) * tiles),
        shared_store_conflicts=blocks * walks * twice * (128 * of_x + 64 * (1 + of_u) + 8 * tiles),
        shared_copy_wavefronts=blocks * walks * (32 * wide + 128 * of_u),
        barriers=blocks * walks * (1 + of_u),
    )


stage = Stage(
    __file__,
    family=adaptive_unitary,
    lesson="states that turn: a sum in a frame that turns along",
    cost=cost,
    aligned=(1, INPUTS, STATES, STEPS),
    registers=255,  # in double
    spills=True,  # of the backward, a dozen words a tile
)

AGAIN = "x is loaded again as it was: only counts with d = INPUTS tell, which the tests compare"
EQUIVALENT = {
    "const T radius = (value.re > 0 ? value.re : 0) + std::log1p(std::exp(value.re > 0 ? -value.re : value.re));  "
    "[value.re > 0 -> value.re >= 0]": "at 0 both sides are 0",
    "if (channels > INPUTS) load_weights(shared.weights[warp], x, channel, state0, r0);  "
    "[channels > INPUTS -> channels >= INPUTS]": AGAIN,
    "if (channels > INPUTS) load_weights(shared.weights[warp], x, channel, state0, r0);  "
    "[channels > INPUTS -> true]": AGAIN,
    "for (int i = 0; i < 4; ++i) {  [i < 4 -> i <= 4]": "the fifth is of a column past those that there are",
    "for (int i = 0; i < 2; ++i) {  [i < 2 -> i <= 2]": "the third is of a state past those of a warp",
    "for (int64_t state0 = 0; state0 < states; state0 += ROWS) {  [state0 < states -> state0 <= states]": (
        "a round without states, after all others, adds nothing"
    ),
    "for (int64_t r0 = 0; MANY && r0 < channels; r0 += INPUTS) {  [r0 < channels -> r0 <= channels]": (
        "of no inputs nothing is added, in the backward, which is not counted here"
    ),
}
