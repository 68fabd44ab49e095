"""Stage 48: the adaptive unitary operator, a scan whose states turn."""

from stages.families import adaptive_unitary
from stages.toolkit.report import Counts
from stages.toolkit.stage import Stage

LANES, STEPS, INPUTS = 64, 16, 32  # states of a block, steps of a tile, inputs of a tile
WARPS = LANES // 32


def cost(b: int, d: int, n: int, T: int, itemsize: int) -> Counts:
    """The forward without what a backward needs. A block walks through all tiles of time once for LANES states."""
    walks, tiles, parts = n // LANES, T // STEPS, d // INPUTS
    each, wide = itemsize, itemsize // 4  # sectors of 32 words side by side; those of 8, and wavefronts of 32
    blocks = b * d
    # Of x the tile stays where it is while there is but one; u, dt, z and D or w are needed for a tile of time.
    tiles_of_x = walks * (parts * tiles if parts > 1 else 1)
    loads_of_x, loads_of_u = tiles_of_x * INPUTS * WARPS, walks * tiles * parts * STEPS * INPUTS // 32
    gates = walks * tiles * WARPS
    return Counts(
        load_requests=blocks * (walks * WARPS * 4 + loads_of_x + loads_of_u + gates * 4),
        load_sectors=blocks
        * (
            walks * WARPS * 7 * each
            + (loads_of_x + loads_of_u) * each
            + gates * 3 * wide
            + tiles * WARPS * (1 + (walks - 1) * wide)
        ),
        store_requests=blocks * (walks * WARPS * 2 + gates * 2),
        store_sectors=blocks * (walks * WARPS * 3 * each + gates * 2 * wide),
        # For each input: one word of x, and 16 bytes of u at a time, the same for all lanes, in two wavefronts.
        # For each step: v, the same for all, and the sum over the states.
        shared_load_wavefronts=blocks
        * gates
        * (parts * INPUTS * (wide + 2 * STEPS * itemsize // 16) + STEPS * (1 + wide)),
        shared_store_wavefronts=blocks * wide * (loads_of_x + loads_of_u + gates * (1 + STEPS)),
        barriers=blocks * walks * tiles * (2 * parts + 2),
    )


stage = Stage(
    __file__,
    family=adaptive_unitary,
    lesson="states that turn: a sum in a frame that turns along, phases in whole numbers",
    cost=cost,
    aligned=(1, INPUTS, LANES, STEPS),
    registers=255,  # in double; there are no more threads than states, so each may have many
)

AGAIN = "x is loaded again as it was: only counts with d = INPUTS tell, which the tests compare"
EQUIVALENT = {
    "const T radius = (value.re > 0 ? value.re : 0) + std::log1p(std::exp(value.re > 0 ? -value.re : value.re));  "
    "[value.re > 0 -> value.re >= 0]": "at 0 both sides are 0",
    "if (first || inputs > INPUTS) {  [inputs > INPUTS -> inputs >= INPUTS]": AGAIN,
    "if (first || inputs > INPUTS) {  [inputs > INPUTS -> true]": AGAIN,
    "if (own && ends.size[0] && ((t0 + STEPS) % slab == 0 || t0 + STEPS >= seq))  [t0 + STEPS >= seq -> true]": (
        "what is stored too early is stored again at the end of the slab"
    ),
    "__syncthreads();  [__syncthreads() removed]": (
        "the word of the sums that a thread writes here is one that it alone has read"
    ),
    "__shared__ T sums[WARPS<T>][STEPS][INPUTS + 1];  [+ 1 removed from a bound]": (
        "bank conflicts of the backward, which is not counted here"
    ),
    "while (state >= states) state -= states, ++channel;  [state >= states -> state > states]": (
        "a contiguous x has its next channel where the state after the last one would be; the tests have other views"
    ),
    "for (int64_t t0 = t_begin; t0 < t_end; t0 += ROWS) {  [t0 < t_end -> t0 <= t_end]": (
        "a tile of no steps adds nothing"
    ),
}
