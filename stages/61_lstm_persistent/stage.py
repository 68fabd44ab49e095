"""Stage 61: the whole sequence of an LSTM in one kernel."""

from torch import Tensor

from stages.families import lstm, shape
from stages.toolkit import operator
from stages.toolkit.kernels import Kernels
from stages.toolkit.stage import Stage


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
    lesson="the whole sequence in one kernel: weights stay in registers, blocks meet at each step",
    aligned=(1, 16, 1, 16),  # a chunk of batches, the units of a group of blocks
    registers=255,
    options=({}, {"activation": "hard"}, {"zoneout": 0.25, "training": False}),
    waits=True,
    define={"launch_forward": launch_forward, "launch_backward": launch_backward, "check_size": check_size},
)
