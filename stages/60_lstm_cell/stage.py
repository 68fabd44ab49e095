"""Stage 60: the LSTM, step by step."""

from torch import Tensor

from stages.families import lstm
from stages.toolkit import operator
from stages.toolkit.kernels import Kernels
from stages.toolkit.stage import Stage


def launch_forward(kernels: Kernels, products: Tensor, weight_hh: Tensor, h0: Tensor, c0: Tensor, *others) -> None:
    """With a place for h R^T of a step."""
    of_before = operator.empty((len(h0), weight_hh.shape[0]), like=c0)
    kernels.launch("lstm_forward", products.device, products, weight_hh, h0, c0, *others, of_before)


def launch_backward(kernels: Kernels, dh: Tensor, dc_last: Tensor, weight_hh: Tensor, c0: Tensor, *others) -> None:
    """With a place for dz R of a step, and with zoneout for what h gives to the one before by itself."""
    of_later = operator.empty(c0.shape, like=c0)
    kept = operator.empty(c0.shape if others[0].numel() else (0, 0), like=c0)
    kernels.launch("lstm_backward", dh.device, dh, dc_last, weight_hh, c0, *others, of_later, kept)


stage = Stage(
    __file__,
    family=lstm,
    lesson="one large product, then a product and a fused pointwise kernel a step",
    registers=64,
    options=({}, {"activation": "hard"}, {"zoneout": 0.25, "training": False}),
    define={"launch_forward": launch_forward, "launch_backward": launch_backward},
)
