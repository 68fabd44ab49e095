"""Stage 60: an LSTM, two kernels for each step."""

import torch
from torch import Tensor

from stages.families import accumulator, lstm
from stages.toolkit import operator
from stages.toolkit.kernels import Kernels
from stages.toolkit.report import Counts
from stages.toolkit.stage import Stage

TILE, SIDE = 32, 8  # rows, columns and depth of a product's tiles; warps of a block
EACH = TILE // SIDE  # rows of a thread


def launch_forward(kernels: Kernels, products: Tensor, *others: object) -> None:
    """A product's result goes through memory: where z is not kept, one step's, over and over."""
    *tensors, z, cells, activation = others
    z = z if z.shape[0] else operator.empty((1, *products.shape[1:]), like=products)
    kernels.launch("lstm_forward", products.device, products, *tensors, z, cells, activation)


def product(rows: int, cols: int, inner: int, itemsize: int, out: int) -> Counts:
    """A block brings a tile of each operand for TILE terms of its sums; `out` is the bytes of a word of the result."""
    blocks = (rows // TILE) * (cols // TILE)
    tiles, words = blocks * (inner // TILE) * 2, blocks * TILE
    passes = max(1, itemsize // 4)  # wavefronts for 32 neighbours
    return Counts(
        load_requests=tiles * TILE + words,
        load_sectors=tiles * TILE * itemsize + words * out,
        store_requests=words,
        store_sectors=words * out,
        shared_load_wavefronts=tiles // 2 * SIDE * TILE * (EACH + passes),
        shared_store_wavefronts=tiles * TILE * passes,
        barriers=tiles,
    )


def cost(T: int, B: int, I: int, H: int, itemsize: int, *, zoneout: float = 0.0, **options: object) -> Counts:  # noqa: E741
    """The forward without what a backward needs; of the mask of zoneout one word, as where nothing is trained."""
    warps, sums, held = B * H // 32, max(4, itemsize), int(zoneout > 0)
    step = product(B, 4 * H, H, itemsize, itemsize)
    return Counts(
        load_requests=T * (step.load_requests + warps * (5 + 2 * held)),
        load_sectors=T * (step.load_sectors + warps * (4 * itemsize + sums + held * (itemsize + 1))),
        store_requests=T * (step.store_requests + 2 * warps),
        store_sectors=T * (step.store_sectors + warps * (itemsize + sums)),
        shared_load_wavefronts=T * step.shared_load_wavefronts,
        shared_store_wavefronts=T * step.shared_store_wavefronts,
        barriers=T * step.barriers,
    )


def backward_cost(T: int, B: int, I: int, H: int, itemsize: int) -> Counts:  # noqa: E741
    """Without zoneout, for gradients in rows of their own."""
    warps, sums = B * H // 32, max(4, itemsize)
    step = product(B, H, 4 * H, itemsize, sums)
    carried = (T - 1) * warps  # the last step finds nothing
    return Counts(
        load_requests=T * (step.load_requests + 8 * warps) + carried,
        load_sectors=T * (step.load_sectors + warps * (5 * itemsize + 3 * sums)) + carried * sums,
        store_requests=T * (step.store_requests + 6 * warps),
        store_sectors=T * (step.store_sectors + warps * (4 * itemsize + 2 * sums)),
        shared_load_wavefronts=T * step.shared_load_wavefronts,
        shared_store_wavefronts=T * step.shared_store_wavefronts,
        barriers=T * step.barriers,
    )


def driven_from_python(
    x: Tensor, weight_ih: Tensor, weight_hh: Tensor, bias: Tensor, h0: Tensor, c0: Tensor, activation: int = 0
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """`lstm` without gradients, each step launched by a call of its own, to see what that costs."""
    products = torch.nn.functional.linear(x, weight_ih, bias)
    sums = accumulator(x.dtype)
    mask = operator.empty((0, 0), like=x, dtype=sums)
    h = operator.empty((x.shape[0], *h0.shape), like=x)
    cells = operator.empty((2, *h0.shape), like=x, dtype=sums)
    before, c = h0, c0.to(sums)
    z = operator.empty(products.shape[1:], like=x)
    for t, step in enumerate(products.unbind()):
        given, results = (step, weight_hh, before, c, mask), (h[t], cells[t % 2], z)
        stage.kernels.launch("lstm_step", x.device, *given, *results, activation)
        before, c, _ = results
    return h, (before, c)


stage = Stage(
    __file__,
    family=lstm,
    lesson="a product and a fused cell, kernel by kernel, for each step",
    cost=cost,
    aligned=(1, TILE, 1, TILE),
    registers=64,
    options=({}, {"activation": "hard"}, {"zoneout": 0.25, "training": False}),
    define={"launch_forward": launch_forward},
)
