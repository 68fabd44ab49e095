"""Stage 44: the first-order scan, time cut in pieces: threads, then warps, then chunks."""

from stages.families import scan
from stages.toolkit.report import Counts
from stages.toolkit.stage import Stage

WARPS = 8  # of a block, at most
SECTOR = 32


def moved(B: int, T: int, D: int, itemsize: int, time_dim: int, reads: int, writes: int, backward: bool) -> Counts:
    """Every channel reads `reads` tensors once and writes `writes` others; every warp reads h0.

    The backward also reads, for the last thread of a warp, the state after its steps, and stores dh0.
    """
    channels, wide = B * D, 16 // itemsize
    pieces = -(-T // (32 * wide))  # warps that have steps to take, in all chunks
    chunks = max(-(-pieces // WARPS), min(pieces, 2))
    warps = -(-pieces // chunks)
    after, ends = (pieces - 1, 1) if backward else (0, 0)
    loads = chunks * warps * 3 * warps  # the maps of all warps, three words each, read by all warps
    stores = chunks * 3 * warps
    if time_dim == 2:  # 16 bytes a lane
        requests, sectors = pieces, T * itemsize // SECTOR
    else:  # a word a lane, in a sector of its own; and every warp exchanges the words of a tensor in shared memory
        requests, sectors = T // 32, T
        singly, whole = wide * (2 if itemsize == 8 else 1), 4  # wavefronts of a lane's words, singly and all at once
        loads += chunks * warps * (reads * whole + writes * singly)
        stores += chunks * warps * (reads * singly + writes * whole)
    return Counts(
        load_requests=channels * (reads * requests + after + warps),
        load_sectors=channels * (reads * sectors + after + warps),
        store_requests=channels * (writes * requests + ends),
        store_sectors=channels * (writes * sectors + ends),
        shared_load_wavefronts=channels * loads,
        shared_store_wavefronts=channels * stores,
        barriers=channels * chunks,
    )


def cost(B: int, T: int, D: int, itemsize: int, time_dim: int = 1, reverse: bool = False) -> Counts:
    """A step needs a and b, and gives h."""
    return moved(B, T, D, itemsize, time_dim, reads=2, writes=1, backward=False)


def backward_cost(B: int, T: int, D: int, itemsize: int, time_dim: int = 1, reverse: bool = False) -> Counts:
    """A step needs g, a and the h before it, which for the first step is h0, and gives da and db."""
    return moved(B, T, D, itemsize, time_dim, reads=3, writes=2, backward=True)


stage = Stage(
    __file__,
    family=scan,
    lesson="lanes by shuffles, warps by a barrier, then a carry",
    cost=cost,
    aligned=(1, 128, 16),
    registers=128,  # of those that load words singly; the others keep to 48 and 64
    options=({"time_dim": 2}, {"time_dim": 2, "reverse": True}, {"time_dim": 1}),
)

NOWHERE = "a word past the last of a vector in registers: nobody reads what is written there"
EQUIVALENT = {
    "for (int i = 0; i < WIDE<T>; ++i) items[i] = outside;  [i < WIDE<T> -> i <= WIDE<T>]": NOWHERE,
    "for (int i = 0; i < WIDE<T>; ++i) result[i] = items[STEP == 1 ? i : WIDE<T> - 1 - i];  "
    "[i < WIDE<T> -> i <= WIDE<T>]": NOWHERE,
    "for (int64_t t0 = 0; t0 < h.size[1]; t0 += chunk) {  [t0 < h.size[1] -> t0 <= h.size[1]]": (
        "a chunk past the end changes and stores nothing: only the counts of the backward tell, which its tests compare"
    ),
}
