"""Stage 32: the gradients of the vLSTM, by the kernel of its forward."""

from torch import Tensor

from stages.families import vlstm
from stages.toolkit import operator
from stages.toolkit.kernels import Kernels
from stages.toolkit.report import Counts
from stages.toolkit.stage import Stage

TILE, WARP = 64, 32


def chunk_of(width: int, itemsize: int) -> int:
    """The columns of a block: as many as the result has, as far as registers go."""
    return 128 if width > 64 and itemsize < 8 else 64


def launch_backward(kernels: Kernels, dh: Tensor, q: Tensor, k: Tensor, v: Tensor, i: Tensor, *others: object) -> None:
    """The kernels' scratch memory is linear in T: three words of each row, and three of each for each chunk of dq."""
    *tensors, dq, dk, dv, di, df, scale, eps, gate, normalizer_gradient = others
    chunks = max(-(-q.shape[3] // chunk_of(q.shape[3], q.element_size())), 1)
    lines = operator.empty((3, *i.shape), like=tensors[-1])
    parts = operator.empty((3, chunks, *i.shape), like=tensors[-1])
    kernels.launch(
        "vlstm_backward",
        q.device,
        *(dh, q, k, v, i, *tensors, dq, dk, dv, di, df, lines, parts, scale, eps, gate, normalizer_gradient),
    )


def cost(B: int, N: int, T: int, Dk: int, Dv: int, itemsize: int, **options: object) -> Counts:
    return Counts()


stage = Stage(
    __file__,
    family=vlstm,
    lesson="the gradients by the forward's kernel, gates from sums of rows",
    cost=cost,
    aligned=(1, 1, TILE, 16, TILE),
    registers=168,
    options=(
        {},
        {"normalizer_gradient": False},
        {"eps": 0.01},
        {"input_gate": "sigmoid", "eps": 0.01},
        {"input_gate": "sigmoid", "normalize": False},
    ),
    define={"launch_backward": launch_backward},
)
