"""Stage 20: (Q K^T) V in two passes, S in device memory."""

from torch import Tensor

from stages.families import accumulator, qkv
from stages.toolkit import operator
from stages.toolkit.kernels import Kernels
from stages.toolkit.report import Counts
from stages.toolkit.stage import Stage

TILE = 64


def launch(kernels: Kernels, q: Tensor, k: Tensor, v: Tensor, o: Tensor, scale: float) -> None:
    """Both kernels, with memory for S between them."""
    batch, heads, seq, _ = q.shape
    s = operator.empty((batch, heads, seq, seq), like=q, dtype=accumulator(q.dtype))
    kernels.launch("qkv", o.device, q, k, v, s, o, scale)


def cost(B: int, N: int, T: int, Dk: int, Dv: int, itemsize: int) -> Counts:
    """The blocks of either kernel own TILE x TILE outputs; for each they take Dk terms, or T."""
    wide = itemsize == 8  # float64: threads with half as many rows and columns
    each, depth, passes = (4, 8, 2) if wide else (8, 16, 1)  # passes: wavefronts for 32 neighbours
    side, sum_size = TILE // each, max(4, itemsize)  # threads along a patch's side; bytes of an element of S
    warps = side * side // 32
    first, second = (B * N * (T // TILE) * (size // TILE) for size in (T, Dv))  # blocks
    terms = first * Dk + second * T
    inputs = (first * Dk * 2 + second * T) * TILE // 32  # requests for Q, K and V
    scores = second * T * TILE // 32  # for S
    written, own = (blocks * TILE * TILE // 32 for blocks in (first, second))  # requests that store S, and O
    rows = 32 // side  # of each such request
    return Counts(
        load_requests=inputs + scores,
        load_sectors=inputs * itemsize + scores * sum_size,
        store_requests=written + own,
        store_sectors=written * sum_size + own * rows * max(1, side * itemsize // 32),
        shared_load_wavefronts=terms * warps * each * (1 + passes),
        shared_store_wavefronts=(inputs + scores) * passes,
        barriers=2 * terms // depth,
    )


stage = Stage(
    __file__,
    family=qkv,
    lesson="two products, one after the other; S goes to memory and back",
    cost=cost,
    aligned=(1, 1, TILE, 16, TILE),
    registers=168,  # six blocks of 64 threads on a multiprocessor; float64: two of 256, 128
    define={"launch": launch},
)
