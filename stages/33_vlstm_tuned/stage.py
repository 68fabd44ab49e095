"""Stage 33: the vLSTM tuned."""

from dataclasses import astuple

import torch
from torch import Tensor

from stages.families import accumulator, vlstm
from stages.toolkit import operator
from stages.toolkit.kernels import Kernels
from stages.toolkit.report import Counts
from stages.toolkit.stage import Stage


def scratch(i: Tensor, dtype: torch.dtype, count: int) -> tuple[Tensor, Tensor]:
    """Memory for what the gates bring: `count` numbers for each position, two for each tile."""
    batch, heads, seq = i.shape
    tiles = -(-seq // tile(dtype))
    return (
        operator.empty((count, batch, heads, seq), like=i, dtype=accumulator(dtype)),
        operator.empty((2, batch, heads, tiles), like=i, dtype=accumulator(dtype)),
    )


def tile(dtype: torch.dtype) -> int:
    """Positions whose gates are summed together."""
    return 32 if dtype is torch.float64 else 64


def launch(kernels: Kernels, q: Tensor, k: Tensor, v: Tensor, i: Tensor, *rest: object) -> None:
    *tensors, scale, eps, gate = rest
    kernels.launch("vlstm", q.device, q, k, v, i, *tensors, *scratch(i, q.dtype, 2), scale, eps, gate)


def launch_backward(kernels: Kernels, dh: Tensor, q: Tensor, k: Tensor, v: Tensor, i: Tensor, *rest: object) -> None:
    *tensors, scale, eps, gate, normalizer_gradient = rest
    widest = 64 if q.dtype is torch.float64 or q.shape[3] <= 64 else 128
    chunks = max(-(-q.shape[3] // widest), 1)
    parts = operator.empty((3, chunks, *i.shape), like=i, dtype=accumulator(q.dtype))
    memory = scratch(i, q.dtype, 5)
    kernels.launch(
        "vlstm_backward", q.device, dh, q, k, v, i, *tensors, *memory, parts, scale, eps, gate, normalizer_gradient
    )


def cost(B: int, N: int, T: int, Dk: int, Dv: int, itemsize: int, **options: object) -> Counts:
    """Those of a forward: the gates of each tile, the maximum, and the product."""
    wide = itemsize == 8
    size, each, tile = (8, 4, 32) if wide else (4, 8, 64)  # bytes of a sum; of a thread; of a warp
    cols = 64 if wide or Dv <= 64 else 128
    across = cols // (4 * each)  # warps side by side, of four
    down, keys = 4 // across, tile // (4 * across)
    rows, vector, passes = down * tile, 16 // size, size // 4  # passes: wavefronts for 32 neighbours
    terms = min(vector, 16 // keys)  # of Y, read at once
    groups = 128 // tile  # of threads on the diagonal, each of which
    queries = tile // groups  # takes so many queries of every key, after those of the groups before
    heads, tiles, chunks = B * N, T // tile, -(-Dv // cols)

    # The gates and the maximum: a block for each tile, of so many warps.
    blocks, warps = heads * tiles, tile // 32
    before = blocks * (tiles - 1) // 2 * warps  # tiles before each, as a warp sees them
    gates = Counts(
        load_requests=blocks * warps * 4 + before * 2,
        load_sectors=blocks * warps * 2 * (itemsize + size) + before * 2,
        store_requests=blocks * (warps * 5 + 2),
        store_sectors=blocks * (warps * 5 * size + 2),
        shared_load_wavefronts=blocks * warps * (3 * tile + passes),
        shared_store_wavefronts=blocks * warps * 3 * passes,
        barriers=blocks * 2,
    )

    # The product: a block for each `rows` rows, with `down` steps more than the one before.
    blocks = heads * chunks * (T // rows)
    steps = blocks * (T // rows + 1) // 2 * down
    diagonal = blocks * down  # tiles
    seen = 4 * steps - blocks * (down - 1) * across  # steps of a warp, without those that are hidden
    stays = rows * Dk * size <= 32 * 1024  # X does, in shared memory
    turned = (blocks if stays else steps) * rows * Dk // 32  # requests for X
    copied = steps * tile * Dk * itemsize // 512  # for Y
    filled = steps * tile * cols * itemsize // 512  # for Z, zeros included
    values = steps // chunks * tile * Dv * itemsize // 512  # without
    mixed = steps // chunks * tile * cols * itemsize // 512 if Dv % cols else 0  # some of both
    owners = rows // 32  # warps that have the threads of the rows
    product = Counts(
        load_requests=turned + copied + filled + (steps * 8 + blocks) * owners + diagonal * warps * 3,
        load_sectors=turned * 4 * max(1, itemsize // 4)  # eight elements each of four rows
        + (copied + values) * 16
        + steps * owners * 4 * (size + 1)
        + blocks * owners * size
        + diagonal * warps * (2 * itemsize + size),
        store_requests=blocks // chunks * owners + heads * T * Dv // (32 * vector),
        store_sectors=blocks // chunks * owners * size + heads * T * Dv * itemsize // 32,
        shared_load_wavefronts=seen * Dk * each // vector * 2
        + seen * Dk * keys // terms * max(1, terms * itemsize // 8)
        + seen * tile * each // vector * (2 + vector * itemsize // 8)
        + (4 * steps + seen - diagonal * across) * (each + keys)
        + diagonal * (across * each * keys + 4) * passes
        + diagonal * queries * (4 * 2 + warps * groups * (groups - 1) // 2)
        + blocks * 2 * (owners * across * passes + 4 * each),
        shared_store_wavefronts=(diagonal * warps * (3 + tile) + steps * (2 * owners + warps) + blocks * 3 * owners)
        * passes
        + seen * keys * each // vector * 4
        + (turned if itemsize == 2 else 0)
        + blocks * 8 * each,
        shared_copy_wavefronts=(0 if itemsize == 2 else turned * 4)  # four rows, all of them in the same banks
        + copied * (8 if itemsize == 2 else 4)
        + filled * 4
        + mixed * 2,
        barriers=steps * (Dk * size // 128 + 2) + diagonal + blocks * 2,
    )
    return Counts(*(x + y for x, y in zip(astuple(gates), astuple(product), strict=True)))


stage = Stage(
    __file__,
    family=vlstm,
    lesson="a weight is a product of two factors; products as in stage 14",
    cost=cost,
    aligned=(1, 1, 128, 64, 64),
    registers=255,  # two blocks on a multiprocessor
    spills=True,  # a dozen words, of 16 bits on sm_80 alone, and outside the loops that multiply
    options=(
        {},
        {"eps": 0.01},
        {"normalizer_gradient": False},
        {"input_gate": "sigmoid"},
        {"input_gate": "sigmoid", "normalize": False},
    ),
    define={"launch": launch, "launch_backward": launch_backward},
)
