"""Stage 61: the whole sequence of an LSTM in one kernel."""

from torch import Tensor

from stages.families import lstm, shape
from stages.toolkit import operator
from stages.toolkit.kernels import Kernels
from stages.toolkit.stage import Stage

HALVES = "of half and bfloat16, which mutants are not compiled for; the x-ray of them reports it"
NOTHING = "past the end there is nothing that is a thread's"
UNMET = "number 0 is what the words are at first: nobody waits for it"
PAIR = "for (int e = 0; e < 2; ++e) pair[e] = k + e < length ? weight(tile * 8 + lane / 4, k + e) : T(0);"
MEET, MEET_FOUR = (
    "if (t > 0) meet(arrived, 0, gridDim.x, unsigned(t));",
    "meet(arrived + gridDim.x, first, FOUR, number);",
)
EQUIVALENT = {
    "for (int i = 0; i < Shape::DEPTH; i += FOUR) {  [i < Shape::DEPTH -> i <= Shape::DEPTH]": (
        "past the last piece there is nothing, but where H is the largest; the test of that size fails"
    ),
    "for (int i = 0; i < STEPS * TILES * 2; ++i) {  [i < STEPS * TILES * 2 -> i <= STEPS * TILES * 2]": HALVES,
    f"{PAIR}  [e < 2 -> e <= 2]": HALVES,
    f"{PAIR}  [k + e < length -> k + e <= length]": HALVES,
    f"{PAIR}  [k + e < length -> true]": HALVES,
    "for (int i = 0; i < STEPS; ++i) {  [i < STEPS -> i <= STEPS]": "no H has more pieces than STEPS",
    "if (first_of(i) >= length) continue;  [first_of(i) >= length -> first_of(i) > length]": HALVES,
    "if (first_of(i) >= length) continue;  [first_of(i) >= length -> false]": HALVES,
    "for (int tile = 0; tile < TILES; ++tile) mma<T>(sums[tile], numbers, weights[i][tile]);  "
    "[tile < TILES -> tile <= TILES]": HALVES,
    "for (int tile = 0; tile < TILES; ++tile) {  [tile < TILES -> tile <= TILES]": HALVES,
    "for (int i = 0; i < FOUR; i += 2) {  [i < FOUR -> i <= FOUR]": HALVES,
    "if (chunk + 1 < chunks) fetch(x, chunk + 1, batches, WARPS / 2);  [chunk + 1 < chunks -> chunk + 1 <= chunks]": (
        "of no batches nothing is fetched"
    ),
    "if (chunk + 1 < chunks) fetch(x, chunk + 1, batches, WARPS / 2);  [chunk + 1 < chunks -> true]": (
        "of no batches nothing is fetched"
    ),
    "for (int chunk = 0; int64_t(chunk) * ROWS < batches; ++chunk) {  "
    "[int64_t(chunk) * ROWS < batches -> int64_t(chunk) * ROWS <= batches]": NOTHING,
    f"{MEET}  [t > 0 -> t >= 0]": UNMET,
    f"{MEET}  [t > 0 -> true]": UNMET,
    f"if (number > 0) {MEET_FOUR}  [number > 0 -> number >= 0]": UNMET,
    f"if (number > 0) {MEET_FOUR}  [number > 0 -> true]": UNMET,
    "for (int64_t i = threadIdx.x; i < batches * UNITS; i += THREADS) {  "
    "[i < batches * UNITS -> i <= batches * UNITS]": NOTHING,
    "for (int64_t i = threadIdx.x + 2 * THREADS; i < batches * UNITS; i += THREADS) give(t, ask(t, i));  "
    "[i < batches * UNITS -> i <= batches * UNITS]": NOTHING,
}


def check_size(weight_hh: Tensor) -> None:
    """Raise ValueError if there is no cut of weight_hh that fits into the registers of the device."""
    hidden, dtype, device = weight_hh.shape[1], weight_hh.dtype, weight_hh.device
    if hidden and not lstm.cut(hidden, dtype, device):
        most = next(n for n in range(hidden, 0, -1) if lstm.cut(n, dtype, device))
        raise ValueError(
            f"{lstm.CALL}: weight_hh is {shape(weight_hh)}, in {dtype} on {device}; allowed: H up to {most}, as "
            "far as the registers of all multiprocessors go, which keep it; stage 60 takes any: stages.load('60').lstm"
        )


def launch_forward(kernels: Kernels, products: Tensor, weight_hh: Tensor, *others: object) -> None:
    """With words by which blocks tell how far they are, and how R is cut."""
    units, blocks = lstm.cut(weight_hh.shape[1], weight_hh.dtype, weight_hh.device)
    arrived = operator.zeros((2 * blocks,), like=products, dtype=lstm.WORDS)
    kernels.launch("lstm_forward", products.device, products, weight_hh, *others, arrived, units)


def launch_backward(kernels: Kernels, dh: Tensor, dc_last: Tensor, weight_hh: Tensor, *others: object) -> None:
    """Likewise, and with a place for what blocks hand to each other: B H sums, and B H more with zoneout."""
    units, blocks = lstm.cut(weight_hh.shape[1], weight_hh.dtype, weight_hh.device)
    arrived = operator.zeros((2 * blocks,), like=dh, dtype=lstm.WORDS)
    c0, mask = others[:2]
    handed = operator.empty((blocks, dh.shape[1], lstm.GATES * units), like=c0)
    kept = operator.empty(c0.shape if mask.numel() else (0, 0), like=c0)
    kernels.launch("lstm_backward", dh.device, dh, dc_last, weight_hh, *others, handed, kept, arrived, units)


stage = Stage(
    __file__,
    family=lstm,
    lesson="a whole sequence in one launch: weights in registers, blocks meet",
    aligned=(1, 16, 1, 16),  # a chunk of batches, the units of a group of blocks
    registers=255,
    options=({}, {"activation": "hard"}, {"zoneout": 0.25, "training": False}),
    waits=True,
    define={"launch_forward": launch_forward, "launch_backward": launch_backward, "check_size": check_size},
)
