"""Stage 60: the LSTM, step by step."""

from torch import Tensor

from stages.families import lstm
from stages.toolkit import operator
from stages.toolkit.kernels import Kernels
from stages.toolkit.report import Counts
from stages.toolkit.stage import Stage

TILE, DEPTH, WARP = 16, 32, 32


def launch_forward(kernels: Kernels, products: Tensor, weight_hh: Tensor, h0: Tensor, c0: Tensor, *others) -> None:
    """With a place for h R^T of a step."""
    of_before = operator.empty((len(h0), weight_hh.shape[0]), like=c0)
    kernels.launch("lstm_forward", products.device, products, weight_hh, h0, c0, *others, of_before)


def launch_backward(kernels: Kernels, dh: Tensor, dc_last: Tensor, weight_hh: Tensor, c0: Tensor, *others) -> None:
    """With a place for dz R of a step, and with zoneout for what h gives to the one before by itself."""
    of_later = operator.empty(c0.shape, like=c0)
    kept = operator.empty(c0.shape if others[0].numel() else (0, 0), like=c0)
    kernels.launch("lstm_backward", dh.device, dh, dc_last, weight_hh, c0, *others, of_later, kept)


def cost(T: int, B: int, I: int, H: int, itemsize: int, *, zoneout: float = 0.0, **options: object) -> Counts:  # noqa: E741
    """The forward, where nobody asks for gradients; the products of the inputs are torch's."""
    sums = max(4, itemsize)  # bytes
    blocks, pieces = B // TILE * (4 * H // TILE), H // DEPTH
    of_tiles = blocks * pieces * 2 * TILE  # requests for a row of DEPTH numbers
    of_sums = blocks * TILE * TILE // WARP
    units = B * H // WARP  # requests for a number of each unit
    masked = bool(zoneout)
    return Counts(
        load_requests=T * (of_tiles + (9 + 2 * masked) * units),
        load_sectors=T * (of_tiles * itemsize + units * (4 * itemsize + 5 * sums + masked * (itemsize + 1))),
        store_requests=T * (of_sums + 2 * units),
        store_sectors=T * (of_sums * sums + units * (itemsize + sums)),
        shared_load_wavefronts=T * blocks * pieces * DEPTH * TILE * TILE // WARP * (1 + sums // 4),
        shared_store_wavefronts=T * of_tiles * sums // 4,
        barriers=T * blocks * pieces * 2,
    )


stage = Stage(
    __file__,
    family=lstm,
    lesson="one large product, then a product and a fused pointwise kernel a step",
    cost=cost,
    aligned=(1, TILE, 1, DEPTH),
    registers=64,
    options=({}, {"activation": "hard"}, {"zoneout": 0.25, "training": False}),
    define={"launch_forward": launch_forward, "launch_backward": launch_backward},
)
