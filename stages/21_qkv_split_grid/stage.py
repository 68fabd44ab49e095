"""Stage 21: S on the chip, split over the grid: a failure and its repair."""

from torch import Tensor

from stages.families import accumulator, qkv
from stages.toolkit import operator
from stages.toolkit.kernels import Kernels
from stages.toolkit.report import Counts
from stages.toolkit.stage import Stage

TILE, DOWN, SUM_THREADS = 32, 8, 256


def launch(kernels: Kernels, q: Tensor, k: Tensor, v: Tensor, o: Tensor, scale: float) -> None:
    """The repaired version: memory for the part of each slice, and the launch that adds them up."""
    slices = -(-o.shape[2] // TILE)
    parts = operator.empty((slices, *o.shape), like=o, dtype=accumulator(o.dtype))
    kernels.launch("qkv", o.device, q, k, v, parts, o, scale)


def as_it_failed(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
    """The version that failed, for the x-ray: its blocks add to one another's words of O. Without checks."""
    o = qkv.allocate(q, k, v)
    stage.kernels.launch("qkv_as_it_failed", o.device, q, k, v, o, qkv.resolved(scale, q))
    return o


def cost(B: int, N: int, T: int, Dk: int, Dv: int, itemsize: int) -> Counts:
    """A block has 8 warps and a tile of S; each of its parts is a row of 32 words."""
    passes = max(1, itemsize // 4)  # wavefronts for 32 neighbours
    sum_size = max(4, itemsize)  # bytes of a word of a part
    slices = T // TILE
    blocks = B * N * slices**2
    inputs = blocks * (2 * Dk + Dv)  # requests for Q, K and V: TILE rows for each TILE columns
    parts = blocks * Dv  # requests that store parts, and those that load them
    own = B * N * T * Dv // 32  # requests that store O
    return Counts(
        load_requests=inputs + parts,
        load_sectors=inputs * itemsize + parts * sum_size,
        store_requests=parts + own,
        store_sectors=parts * sum_size + own * itemsize,
        shared_load_wavefronts=blocks * DOWN * (Dk + Dv) * (TILE // DOWN + passes),
        shared_store_wavefronts=(inputs + blocks * TILE) * passes,
        barriers=blocks * 2 * (Dk + Dv) // TILE,
    )


stage = Stage(
    __file__,
    family=qkv,
    lesson="parts of a row in many blocks race; the repair costs as S did",
    cost=cost,
    aligned=(1, 1, TILE, TILE, TILE),
    registers=80,  # three blocks of 256 threads on a multiprocessor
    gradients=False,
    define={"launch": launch, "no_gradients": "stage 22 has one: stages.load('22').qkv"},
)
