"""Stage 42: the first-order scan, every step joins the ones before it (Hillis and Steele)."""

from stages.families import scan
from stages.toolkit.report import Counts
from stages.toolkit.stage import Stage

CHUNK, WARP = 128, 32
LEVELS = [1 << k for k in range(CHUNK.bit_length() - 1)]  # distances


def wavefronts(threads: int, itemsize: int) -> int:
    """For a word of each of these neighbours, without bank conflicts. 16-bit types are scanned in float32."""
    return -(-threads * max(4, itemsize) // 128)


def scanned(rows: int, T: int, itemsize: int) -> dict[str, int]:
    """Before each step of a scan a thread stores its map, a and b; then those that have one so far away load another.

    A chunk begins with a read of the state, and ends with a store of it; so does h0 begin a row.
    """
    chunks = rows * T // CHUNK
    loads = sum(wavefronts(CHUNK - distance, itemsize) for distance in LEVELS)
    return dict(
        shared_load_wavefronts=chunks * (2 * loads + 1),
        shared_store_wavefronts=chunks * (2 * len(LEVELS) * wavefronts(CHUNK, itemsize) + 1) + rows,
        barriers=chunks * (len(LEVELS) + 1),
    )


def cost(B: int, T: int, D: int, itemsize: int, time_dim: int = 1, reverse: bool = False) -> Counts:
    """A thread loads a and b of its step and stores h; thread 0 reads h0."""
    rows, requests = B * D, B * D * T // WARP
    each = itemsize if time_dim == 2 else WARP  # sectors of a request: neighbours in time side by side, or apart
    return Counts(
        load_requests=2 * requests + rows,
        load_sectors=2 * requests * each + rows,
        store_requests=requests,
        store_sectors=requests * each,
        **scanned(rows, T, itemsize),
    )


def backward_cost(B: int, T: int, D: int, itemsize: int, time_dim: int = 1, reverse: bool = False) -> Counts:
    """A thread loads g of its step, a and h of its neighbours, and stores da and db; all of them read h0.

    Thread 0 reads the state and the a that make dh0.
    """
    rows, requests = B * D, B * D * T // WARP
    each = itemsize if time_dim == 2 else WARP
    off = requests * (each + (time_dim == 2)) - rows  # they begin in the sector before; one step has no neighbour
    shared = scanned(rows, T, itemsize)
    shared["shared_load_wavefronts"] += rows
    return Counts(
        load_requests=3 * requests + rows * (CHUNK // WARP + 1),
        load_sectors=requests * each + 2 * off + rows * (CHUNK // WARP + 1),
        store_requests=2 * requests + rows,
        store_sectors=2 * requests * each + rows,
        **shared,
    )


stage = Stage(
    __file__,
    family=scan,
    lesson="each step joins those before it: few rounds, but more work",
    cost=cost,
    aligned=(1, CHUNK, 16),  # with time_dim=1 neighbours in time are D words apart: in sectors of their own
    registers=40,
    options=({"time_dim": 2}, {"time_dim": 2, "reverse": True}, {"time_dim": 1}),
)

EQUIVALENT = {
    "for (int64_t t0 = 0; t0 < seq; t0 += CHUNK) {  [t0 < seq -> t0 <= seq]": (
        "in the backward, a chunk more of maps that change nothing: only its counts tell, which its tests compare"
    ),
}
