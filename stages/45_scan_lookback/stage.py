"""Stage 45: the first-order scan in one pass, tiles of time handing on their state."""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from stages.families import accumulator, scan
from stages.toolkit import operator
from stages.toolkit.kernels import Kernels
from stages.toolkit.report import Counts
from stages.toolkit.stage import Stage

SECTOR = 32
LANES = 32
LINE = 16  # words of 8 bytes before what is told: the ticket and what fills its line
STRIP_WARPS, STRIP_BYTES = 4, 8192  # of a tile of a strip, at most; of a tensor that each has
WINDOW = 8  # tiles that a lane of a strip looks back at
ROW_WARPS, GROUPS = 8, 8  # of a tile of a row, at most; of 16 bytes that a lane takes of a tensor
FEWEST = 8  # tiles of a row, if it is so long that they can have a warp each


class Cut(NamedTuple):
    """How a problem is cut: in chains that know nothing of each other, their time in tiles, those in pieces."""

    chains: int
    tiles: int
    warps: int  # of a tile, each with a piece
    width: int  # channels of a chain
    steps: int  # of a piece


def cut(B: int, T: int, D: int, itemsize: int, rows: bool) -> Cut:
    """Strips of channels, or rows, each a channel."""
    width = 1 if rows else LANES * (2 if itemsize == 2 else 1)
    steps = (GROUPS * LANES * 16 if rows else STRIP_BYTES // width) // itemsize
    pieces = -(-T // steps)
    tiles = -(-pieces // max(1, min(ROW_WARPS, pieces // FEWEST) if rows else STRIP_WARPS))
    return Cut(B * -(-D // width), tiles, -(-pieces // max(1, tiles)), width, steps)


@lru_cache(maxsize=256)
def words_of(shape: tuple[int, ...], dtype: torch.dtype, rows: bool) -> tuple[int, int]:
    """How many words of 8 bytes the blocks need to take tickets and to tell each other, and the tiles of a chain."""
    chains, tiles, _, width, _ = cut(*shape, dtype.itemsize, rows)
    return LINE + chains * tiles * 2 * width * (accumulator(dtype).itemsize // 4), tiles


def scratch(h: Tensor) -> tuple[Tensor, bool, int]:
    """What tiles tell each other, zeros at every call, whether chains are rows, and of how many tiles."""
    _, step, channel = h.stride()
    rows = step < channel  # steps lie closer than channels
    size, tiles = words_of(h.shape, h.dtype, rows)
    return operator.zeros((size,), h, torch.float64), rows, tiles


def launch(kernels: Kernels, a: Tensor, b: Tensor, h0: Tensor, h: Tensor, reverse: bool) -> None:
    """The forward; in a CUDA graph the zeros are written at every replay, too."""
    kernels.launch("scan", a.device, a, b, h0, h, *scratch(h), reverse)


def launch_backward(
    kernels: Kernels, g: Tensor, a: Tensor, h: Tensor, h0: Tensor, da: Tensor, db: Tensor, dh0: Tensor, reverse: bool
) -> None:
    """The backward, with a ticket of its own."""
    if not a.shape[1]:
        dh0.zero_()  # no step, and no block that could write it
        return
    kernels.launch("scan_backward", a.device, g, a, h, h0, da, db, dh0, *scratch(da), reverse)


def moved(B: int, T: int, D: int, itemsize: int, time_dim: int, reads: int, writes: int) -> Counts:
    """What blocks move that run one after another: each finds the state of the tile before it.

    The backward, of three reads, has no h before the first step, and h0 instead.
    """
    backward = reads == 3
    chains, tiles, warps, width, steps = cut(B, T, D, itemsize, time_dim == 2)
    parts = 2 if itemsize == 8 else 1  # words that tell a number; wavefronts of 32 numbers in shared memory
    pair = width // LANES  # channels of a lane, in a strip
    maps, states = max(0, tiles - 2), tiles - 1  # told by all tiles but the last, and no map by the first
    others = warps * (warps - 1) // 2  # maps of earlier warps that all warps of a tile apply
    if time_dim == 1:
        lines = width * itemsize // 128  # in a row of the strip, which the lanes of a copy take one after the other
        vectors = T * lines // 4  # requests for a tensor, of 16 bytes a lane
        copies = (reads * T - backward) * lines
        numbers, each = parts * pair, 8 * parts  # requests for a number of each channel, and sectors of one of them
        looks = sum(min(tile, WINDOW) for tile in range(tiles)) * numbers * 2
        looked = chains * looks * each
        starts, ends = (pair, pair) if backward else (warps * pair, 0)  # h0 where it is needed, and dh0
        sides, after = pair * itemsize, 0  # sectors of one of those
        loads = (5 if backward else 4) * T * parts + writes * 4 * vectors
        loads += tiles * pair * parts * (3 * warps + warps + 3 * others)
        stores = (writes * T + backward) * parts + tiles * pair * parts * (3 * warps + 1)
    else:
        vectors = T * itemsize // 512
        copies = reads * vectors * 4
        numbers, each = parts, 1
        looks = states * numbers * 2
        looked = sum(sectors(chain * tiles + tile, tile, parts) for chain in range(chains) for tile in range(1, tiles))
        starts, after, ends = (tiles * warps, tiles * warps - 1, 1) if backward else (warps, 0, 0)
        sides = 1
        loads = ((5 if backward else 4) + writes) * 4 * vectors
        loads += tiles * (3 * warps + warps * (1 + backward) + 3 * others)
        stores = writes * 4 * vectors + tiles * (3 * warps + 2)
    whole = T * itemsize * width // SECTOR  # sectors of a tensor
    missing = width * itemsize // SECTOR if backward and time_dim == 1 else 0  # of the h that is not there
    return Counts(
        load_requests=chains * (reads * vectors + starts + after + looks),
        load_sectors=chains * (reads * whole - missing + starts * sides + after) + looked,
        store_requests=chains * (writes * vectors + ends + (2 * maps + states) * numbers),
        store_sectors=chains * (writes * whole + ends * sides + (2 * maps + states) * numbers * each),
        atomic_requests=chains * tiles,
        atomic_sectors=chains * tiles,
        shared_copy_wavefronts=chains * copies,
        shared_load_wavefronts=chains * (loads + tiles * warps),
        shared_store_wavefronts=chains * (stores + tiles),
        barriers=3 * chains * tiles,
    )


def sectors(end: int, tile: int, parts: int) -> int:
    """That a warp looks at which looks at up to 32 tiles before a tile, in 2 or 4 requests; `end`: told before it."""
    begin = end - min(tile, LANES)
    return 2 * parts * ((end * parts - 1) // 2 - begin * parts // 2 + 1) if parts == 1 else 4 * (end - begin)


def cost(B: int, T: int, D: int, itemsize: int, time_dim: int = 1, reverse: bool = False) -> Counts:
    """A step needs a and b, and gives h."""
    return moved(B, T, D, itemsize, time_dim, reads=2, writes=1)


def backward_cost(B: int, T: int, D: int, itemsize: int, time_dim: int = 1, reverse: bool = False) -> Counts:
    """A step needs g, a and the h before it, and gives da and db."""
    return moved(B, T, D, itemsize, time_dim, reads=3, writes=2)


stage = Stage(
    __file__,
    family=scan,
    lesson="one pass: tiles of many blocks look back",
    cost=cost,
    aligned=(1, 2048, 64),
    registers=240,  # of 16-bit numbers that a lane takes singly; vectors of them and strips are done with 105
    bench={"cpu": ((1, 4096, 64),), "cuda": ((1, 65536, 1024), (8, 8192, 1536))},
    options=({}, {"time_dim": 2}, {"time_dim": 2, "reverse": True}),
    waits=True,
    define={"launch": launch, "launch_backward": launch_backward},
)

NOWHERE = "a word past an array of registers, of which no use is made"
NO_STEPS = "a piece past the end writes where only pieces past the end have their steps"
EQUIVALENT = {
    "for (int k = state_at + 1; k < LANES; ++k) state = shuffle(map, k)(state);  [k < LANES -> k <= LANES]": (
        "tells only in rows of more than 32 tiles, which are too long to be tried here; the tests have one"
    ),
    "if (state_at > nothing_at) {  [state_at > nothing_at -> state_at >= nothing_at]": (
        "equal only where 32 tiles have told maps and none its state, which no order of blocks here brings about"
    ),
    "const bool first = rows > 0 && t0 + rows == da.size[1];  [rows > 0 -> rows >= 0]": NO_STEPS,
    "const bool first = rows > 0 && t0 + rows == da.size[1];  [rows > 0 -> true]": NO_STEPS,
    "for (int i = 0; i < WIDE<T>; ++i) none[i] = outside;  [i < WIDE<T> -> i <= WIDE<T>]": NOWHERE,
    "for (int i = 0; i < WIDE<T>; ++i) result[i] = items[STEP == -1 ? WIDE<T> - 1 - i : i];  "
    "[i < WIDE<T> -> i <= WIDE<T>]": NOWHERE,
    "for (int i = 0; i < PAIR<T>; ++i) {  [i < PAIR<T> -> i <= PAIR<T>]": NOWHERE,
}
