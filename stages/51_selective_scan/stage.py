"""Stage 51: discretize and scan in one kernel, forward."""

from stages.families import COMPLEX, FLOATING, selective_scan
from stages.toolkit.stage import Stage

NOT_FLOAT = "of double and complex numbers, which mutants are not compiled for; the tests of them fail"
BEFORE = "before the first tile, where there are no steps, t0 is no multiple of CHUNK"
KEPT = "nothing is kept where nobody asks for gradients, as here; the test of what is kept fails"
EQUIVALENT = {
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

stage = Stage(
    __file__,
    family=selective_scan,
    lesson="discretize and scan in one kernel: states that never leave registers",
    cost=selective_scan.cost,
    aligned=(1, 16, 16, 64),
    registers=255,
    spills=True,  # 8 bytes of backward_euler with 4 states a lane; double calls a function, which needs a stack
    dtypes=FLOATING + COMPLEX,
    options=tuple({"discretization_method": method} for method in ("mamba", "foh", "bilinear")),  # one of each kind
    gradients=False,
    define={"backward": False},
)
