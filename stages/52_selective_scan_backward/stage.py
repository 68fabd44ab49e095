"""Stage 52: the gradients of the selective scan."""

from stages.families import COMPLEX, FLOATING, selective_scan
from stages.families.selective_scan import CHUNK
from stages.toolkit.stage import Stage

NOT_FLOAT = "of double and complex numbers, which mutants are not compiled for; the tests of them fail"
BEFORE = "before the first tile, where there are no steps, t0 is no multiple of CHUNK"
SAME = "the same either way where they are equal"
TOGETHER = 4  # channels of a block of `carry`, where there are few
EQUIVALENT = {
    "for (int i = 0; i < FOUR; ++i) tile[c * pitch_held + part * RECORD<S> + i * S + j - state0] = number * factor;  "
    "[i < FOUR -> i <= FOUR]": "the fifth is the gap",
    "if (steps < TILE) {  [steps < TILE -> steps <= TILE]": "no step of a full tile is past its end",
    "if (steps < TILE) {  [steps < TILE -> true]": "no step of a full tile is past its end",
    "if (kept.size[0] && steps > 0 && t0 % CHUNK == 0) keep(&kept(t0 / CHUNK, batch, channel, 0));  "
    "[steps > 0 -> steps >= 0]": BEFORE,
    "if (kept.size[0] && steps > 0 && t0 % CHUNK == 0) keep(&kept(t0 / CHUNK, batch, channel, 0));  "
    "[steps > 0 -> true]": BEFORE,
    "if (y.wide && k + FOUR <= steps) {  [k + FOUR <= steps -> true]": NOT_FLOAT,
    "const T e = power((x > 0 ? -x : x) * PER_E<T>);  [x > 0 -> x >= 0]": SAME,
    "dt = (x > 0 ? x : T(0)) + log_of_one_plus(e), slope = (x > 0 ? T(1) : e) * reciprocal(T(1) + e);  "
    "[x > 0 -> x >= 0]": SAME,
    "for (int offset = 1; offset < PIECES; offset *= 2) {  [offset < PIECES -> offset <= PIECES]": (
        "no piece is so far away from another one"
    ),
}


def backward_sectors(B: int, d: int, T: int, discretization_method: str = "mamba") -> tuple[int, int]:
    """Sectors that the backward loads and stores, float32, arguments as the family's `make` gives them.

    For 16 states, d a multiple of TOGETHER and T of CHUNK, on the CPU device, which has one or two parts.
    """
    chunks, gates, foh = T // CHUNK, discretization_method != "mamba", discretization_method == "foh"
    parts = 2 if B * chunks == 1 else 1
    cells, rows = B * d * chunks, B * chunks * parts  # a channel's chunks; blocks of `gradients`
    tile, row = 16 * CHUNK // 8, CHUNK // 8  # of B or C; of u, delta, dy, z, ...
    # The states of a channel are two sectors, or eight requests for one, where a lane has four of them, one at a time.
    carry_loads = 2 * 2 * B * d + cells * (tile // TOGETHER + (2 + gates) * row + 2)
    carry_stores = 2 * B * d + cells * 8 + foh * (2 * B * d + 8 * (cells - B * d))
    loads = rows * 2 * tile + cells * ((3 + 3 * gates) * row + 2 + 2 + 3 * 2 + 2 * foh)
    before = foh * (B * parts * 16 + B * d) * (chunks - 1)  # B and u of the step before a chunk
    stores = cells * ((2 + gates) * row + 2 + 4) + rows * 2 * 2 * tile
    return carry_loads + loads + before, carry_stores + stores


stage = Stage(
    __file__,
    family=selective_scan,
    lesson="gradients: states made anew, lanes as pieces of time",
    cost=selective_scan.cost,
    aligned=(1, 16, 16, 128),
    registers=255,
    spills=True,
    dtypes=FLOATING + COMPLEX,
    options=tuple({"discretization_method": method} for method in ("mamba", "foh", "bilinear")),  # one of each kind
)
