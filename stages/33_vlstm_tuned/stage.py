"""Stage 33: the vLSTM tuned."""

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
    sums = [operator.empty((chunks, *i.shape), like=i, dtype=accumulator(q.dtype)) for _ in "qk"]
    memory = scratch(i, q.dtype, 5)
    kernels.launch(
        "vlstm_backward", q.device, dh, q, k, v, i, *tensors, *memory, *sums, scale, eps, gate, normalizer_gradient
    )


def cost(B: int, N: int, T: int, Dk: int, Dv: int, itemsize: int, **options: object) -> Counts:
    return Counts()


stage = Stage(
    __file__,
    family=vlstm,
    lesson="every product at the rate of a matmul",
    cost=cost,
    aligned=(1, 1, 128, 64, 64),
    registers=255,
    options=(
        {},
        {"eps": 0.5},
        {"normalizer_gradient": False},
        {"input_gate": "sigmoid"},
        {"input_gate": "sigmoid", "normalize": False},
    ),
    define={"launch": launch, "launch_backward": launch_backward},
)
