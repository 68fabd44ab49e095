"""Stage 45: the first-order scan in one pass, tiles of time handing on their state."""

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


def scratch(h: Tensor) -> tuple[Tensor, bool, int]:
    """What tiles tell each other, zeros at every call, whether chains are rows, and of how many tiles."""
    rows = h.stride(1) < h.stride(2)  # steps lie closer than channels
    chains, tiles, _, width, _ = cut(*h.shape, h.element_size(), rows)
    parts = accumulator(h.dtype).itemsize // 4
    words = operator.empty((LINE + chains * tiles * 2 * width * parts,), like=h, dtype=torch.float64)
    return words.zero_(), rows, tiles


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
    chains, tiles, width, steps = cut(B, T, D, itemsize, time_dim == 2)
    twice = 2 if itemsize == 8 else 1  # wavefronts of a row of words in shared memory
    maps, states = max(0, tiles - 2), tiles - 1  # told by all tiles but the last, and no map by the first
    flags = sum(sectors(LINE + chain * tiles, tile) for chain in range(chains) for tile in range(1, tiles))
    if time_dim == 1:
        warps, each = 1, max(itemsize, 4)  # sectors of what all lanes tell
        vectors = T * itemsize // 16  # requests for a tensor, of 16 bytes a lane
        lines = max(1, itemsize // 4)  # of 128 bytes in a row, which the lanes of a copy take one after the other
        copies = (reads * T - backward) * lines
        starts, start, after, ends = 1, itemsize, 0, itemsize  # h0 where it is needed, and dh0
        barriers = 1
        loads = (5 if backward else 4) * T * twice + writes * 4 * vectors
        stores = (writes * T + backward) * twice
    else:
        warps, each = steps * itemsize // (GROUPS * 512), 1
        vectors = T * itemsize // 512
        copies = reads * vectors * 4
        starts, after, ends = (tiles * warps, tiles * warps - 1, 1) if backward else (warps, 0, 0)
        start = starts
        barriers = 3
        # Lanes read their own groups twice, but h once; a warp the maps of those before it, the first one all.
        loads = (5 if backward else 4) * 4 * vectors + tiles * warps * (warps + 1)
        loads += tiles * warps * (2 if backward else 1)  # the states around the tile
        stores = tiles * (2 * warps + 2)
    whole = T * itemsize * width // SECTOR  # sectors of a tensor
    missing = (itemsize if time_dim == 1 else 0) * backward  # sectors of the h that is not there
    return Counts(
        load_requests=chains * (reads * vectors + starts + after + 2 * states),
        load_sectors=chains * (reads * whole - missing + start + after + states * each) + flags,
        store_requests=chains * (writes * vectors + (1 if backward else 0) + 3 * maps + 2 * states),
        store_sectors=chains
        * (writes * whole + (ends if backward else 0) + maps * (2 * each + 1) + states * (each + 1)),
        atomic_requests=chains * tiles,
        atomic_sectors=chains * tiles,
        shared_copy_wavefronts=chains * copies,
        shared_load_wavefronts=chains * (loads + tiles * warps),
        shared_store_wavefronts=chains * (stores + tiles),
        barriers=barriers * chains * tiles,
    )


def sectors(first: int, tile: int) -> int:
    """Of the flags of up to 32 tiles before a tile, where the flags of its chain begin at the word `first`."""
    return (first + tile - 1) * 4 // SECTOR - (first + max(0, tile - 32)) * 4 // SECTOR + 1


def cost(B: int, T: int, D: int, itemsize: int, time_dim: int = 1, reverse: bool = False) -> Counts:
    """A step needs a and b, and gives h."""
    return moved(B, T, D, itemsize, time_dim, reads=2, writes=1)


def backward_cost(B: int, T: int, D: int, itemsize: int, time_dim: int = 1, reverse: bool = False) -> Counts:
    """A step needs g, a and the h before it, and gives da and db."""
    return moved(B, T, D, itemsize, time_dim, reads=3, writes=2)


stage = Stage(
    __file__,
    family=scan,
    lesson="one pass, tiles look back for the state: tickets, release and acquire",
    cost=cost,
    aligned=(1, 1024, 64),
    registers=240,  # of 16-bit numbers that a lane takes singly; vectors of them and strips are done with 105
    bench={"cpu": ((1, 4096, 64),), "cuda": ((1, 65536, 1024), (8, 8192, 1536))},
    options=({}, {"time_dim": 2}, {"time_dim": 2, "reverse": True}),
    define={"launch": launch, "launch_backward": launch_backward},
)

NO_MAP = "a round that has no map to apply"
NOWHERE = "a word past an array of registers, of which no use is made"
HELD = "what was not read is a map that changes nothing"
EQUIVALENT = {
    "for (int64_t next = known + 1; next < place.tile; next += AT_ONCE) {  "
    "[next < place.tile -> next <= place.tile]": NO_MAP,
    "for (int64_t next = known + 1; next < place.tile; next += 32) {  "
    "[next < place.tile -> next <= place.tile]": NO_MAP,
    "for (int k = 0; k < AT_ONCE; ++k) {  [k < AT_ONCE -> k <= AT_ONCE]": "there are never more maps: k < count",
    "if (k < count) state = maps[k](state);  [k < count -> k <= count]": HELD,
    "if (k < count) state = maps[k](state);  [k < count -> true]": HELD,
    "for (int k = 0; k < count; ++k) state = shuffle(map, k)(state);  [k < count -> k <= count]": HELD,
    "for (int i = 0; i < WIDE<T>; ++i) items[i] = outside;  [i < WIDE<T> -> i <= WIDE<T>]": NOWHERE,
    "for (int i = 0; i < WIDE<T>; ++i) result[i] = items[STEP == -1 ? WIDE<T> - 1 - i : i];  "
    "[i < WIDE<T> -> i <= WIDE<T>]": NOWHERE,
    "for (int i = 0; i < WIDE<T>; ++i) {  [i < WIDE<T> -> i <= WIDE<T>]": NOWHERE,
}
