"""Stage 43: the first-order scan, up a tree of parts and down again (Blelloch)."""

from stages.families import scan
from stages.toolkit.report import Counts
from stages.toolkit.stage import Stage

CHUNK, WARP = 128, 32
LEVELS = [1 << k for k in range(CHUNK.bit_length() - 1)]  # distances


def wavefronts(threads: int, itemsize: int) -> int:
    """For a word of each of these neighbours, without bank conflicts. 16-bit types are scanned in float32."""
    return -(-threads * max(4, itemsize) // 128)


def scanned(rows: int, T: int, itemsize: int) -> dict[str, int]:
    """Up, a thread loads two maps and stores one; down, it loads a map and a state, and stores two states.

    Before that all store their maps, after it they load a state. The state at the root is the chunk's; it is stored
    when the chunk is done, and when a row begins.
    """
    chunks = rows * T // CHUNK
    down = [wavefronts(CHUNK // 2 // distance, itemsize) for distance in LEVELS]
    up = down[:-1]  # but for the whole chunk
    return dict(
        shared_load_wavefronts=chunks * (4 * sum(up) + 3 * sum(down) + wavefronts(CHUNK, itemsize)),
        shared_store_wavefronts=chunks * (2 * sum(up) + 2 * sum(down) + 2 * wavefronts(CHUNK, itemsize) + 1) + rows,
        barriers=chunks * (len(up) + len(down) + 2),
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
    lesson="a tree of parts, up and down; padding against bank conflicts",
    cost=cost,
    aligned=(1, CHUNK, 16),  # with time_dim=1 neighbours in time are D words apart: in sectors of their own
    registers=48,
    options=({"time_dim": 2}, {"time_dim": 2, "reverse": True}, {"time_dim": 1}),
)

EQUIVALENT = {
    "for (int64_t t0 = 0; t0 < seq; t0 += CHUNK) {  [t0 < seq -> t0 <= seq]": (
        "in the backward, a chunk more of maps that change nothing: only its counts tell, which its tests compare"
    ),
}
