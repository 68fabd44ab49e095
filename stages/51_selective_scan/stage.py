"""Stage 51: discretize and scan in one kernel, forward."""

import torch
from torch import Tensor

from stages.families import COMPLEX, FLOATING, selective_scan
from stages.toolkit.report import Counts
from stages.toolkit.stage import Stage

FOUR = 4  # steps that lie together

SAME = "the same either way where they are equal"
LANES_ORDER = "which lane copies what: for the speed of it"
NOT_FLOAT = "of double and complex numbers, which mutants are not compiled for; the tests of them fail"
BEFORE = "before the first tile, where there are no steps, t0 is no multiple of CHUNK"
KEPT = "nothing is kept where nobody asks for gradients, as here; the test of what is kept fails"
EQUIVALENT = {
    "return e < 0.125f ? e * sum : whole;  [e < 0.125f -> e <= 0.125f]": "either formula is right there",
    "return (x > 0 ? x : T(0)) + log_of_one_plus(power((x > 0 ? -x : x) * PER_E<T>));  [x > 0 -> x >= 0]": SAME,
    "const bool down = stride_r < stride_t;  [stride_r < stride_t -> stride_r <= stride_t]": LANES_ORDER,
    "const bool down = stride_r < stride_t;  [stride_r < stride_t -> true]": LANES_ORDER,
    "if (bytes == 16) async_copy<16>(to, word, inside);  [async_copy<16>(to, word, inside) removed]": NOT_FLOAT,
    "else if (bytes == 8) async_copy<8>(to, word, inside);  [async_copy<8>(to, word, inside) removed]": NOT_FLOAT,
    "for (int k = 0; k < COUNT; ++k) values[k] = Complex<T>(parts[2 * k], parts[2 * k + 1]);  "
    "[k < COUNT -> k <= COUNT]": NOT_FLOAT,
    "for (int i = 0; i < FOUR; ++i) tile[c * pitch_held + part * RECORD<S> + i * S + j - state0] = number * factor;  "
    "[i < FOUR -> i <= FOUR]": "the fifth is the gap",
    "if (steps < TILE) {  [steps < TILE -> steps <= TILE]": "no step of a full tile is past its end",
    "if (steps < TILE) {  [steps < TILE -> true]": "no step of a full tile is past its end",
    "if (kept.size[0] && steps > 0 && t0 % CHUNK == 0) keep(&kept(t0 / CHUNK, batch, channel, 0));  "
    "[steps > 0 -> steps >= 0]": BEFORE,
    "if (kept.size[0] && steps > 0 && t0 % CHUNK == 0) keep(&kept(t0 / CHUNK, batch, channel, 0));  "
    "[steps > 0 -> false]": KEPT,
    "if (kept.size[0] && steps > 0 && t0 % CHUNK == 0) keep(&kept(t0 / CHUNK, batch, channel, 0));  "
    "[steps > 0 -> true]": BEFORE,
    "if (y.wide && k + FOUR <= steps) {  [k + FOUR <= steps -> true]": NOT_FLOAT,
}

LANES = 32
ENOUGH_WARPS = 1056  # 8 for each multiprocessor of an H100: then a lane has 4 states, before that 2


def states_of_a_lane(u: Tensor, A: Tensor) -> int:
    """4 where there are enough channels, as what is not done for each state is then done for fewer; else 2."""
    (batch, channels, _), states = u.shape, A.shape[1]
    enough = batch * channels * -(-states // 4) >= LANES * ENOUGH_WARPS
    return 4 if enough and states > 2 and A.dtype is torch.float32 else 2


def cost(B: int, d: int, n: int, T: int, itemsize: int, discretization_method: str = "mamba") -> Counts:
    """For arguments as the family's `make` gives them, of so few channels that a lane has 2 states."""
    gates = discretization_method != "mamba"  # whether there is a z
    double = itemsize == 8
    size, of_a_lane, parts = (8, 2, 2) if double else (4, 2, 1)  # of a number; parts of 16 bytes of FOUR of them
    steps, lanes = 128 // size, n // of_a_lane
    channels = max(128 // lanes, min(8, 256 // lanes))
    warps, blocks, tiles, fours = lanes * channels // 32, B * d // channels, T // steps, steps // FOUR
    of_states = warps * of_a_lane  # requests for A, and for the last states
    each = 16 if double else min(16, channels)  # sectors
    copied = (2 * channels + 2 * n + gates * channels) * steps * itemsize  # bytes a tile, of u, delta, B, C and z
    of_u, of_b = 2 * channels * fours // 32, 2 * n * fours // 32  # requests to turn that, for FOUR steps each
    sums = of_u // 2 * lanes
    if itemsize == 2:  # 8 bytes a lane: of rows that lie 80 bytes apart the ninth meets the first, and of z's the next
        twice = 2 * (of_b + (of_u if channels == 16 else 0)) + gates * of_u
        turned = 2 * (of_u + of_b) + gates * of_u + twice
    else:
        turned, twice = 4 * parts * (of_u + of_b + gates * of_u // 2), 0
    if double:  # lanes that lie 32 bytes apart meet in the banks twice
        twice += warps * fours * 16 + sums * 8
    walked = warps * fours * (8 * parts * parts + 8 * parts)  # dt and u, and for each step B and C
    return Counts(
        load_requests=blocks * (warps + of_states + 1 + tiles * copied // 512),
        load_sectors=blocks * ((warps + 1) * channels * size // 32 + each * of_states + tiles * copied // 32),
        store_requests=blocks * (of_states + tiles * parts * of_u // 2),
        store_sectors=blocks * (each * of_states + tiles * parts * channels * steps * itemsize // 32),
        shared_load_wavefronts=blocks * tiles * (turned + walked + sums * 4 * parts * parts),
        shared_load_conflicts=blocks * tiles * twice,
        shared_store_wavefronts=blocks * tiles * 4 * parts * (parts * (of_u + warps * fours) + of_b),
        shared_store_conflicts=blocks * tiles * 8 * (parts - 1) * (of_u + warps * fours),
        shared_copy_wavefronts=blocks * tiles * copied // 512 * (8 if itemsize == 2 else 4),
        barriers=blocks * 2 * (tiles + 1),
    )


stage = Stage(
    __file__,
    family=selective_scan,
    lesson="discretize and scan in one kernel: states that never leave registers",
    cost=cost,
    aligned=(1, 16, 16, 64),
    registers=255,
    spills=True,  # 8 bytes of backward_euler with 4 states a lane; double calls a function, which needs a stack
    dtypes=FLOATING + COMPLEX,
    options=tuple({"discretization_method": method} for method in ("mamba", "foh", "bilinear")),  # one of each kind
    gradients=False,
    define={"backward": False, "states_of_a_lane": states_of_a_lane},
)
