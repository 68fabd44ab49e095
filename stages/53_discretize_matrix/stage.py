"""Stage 53: discretization with a full matrix A, solves and exponentials of many small matrices."""

from stages.families import matrix_discretization
from stages.toolkit.report import Counts
from stages.toolkit.stage import Stage


def cost(batch: int, n: int, m: int, itemsize: int, *, method: str) -> Counts:
    """The forward without what a backward needs, of `make`'s matrices: all blocks of the series, and two doublings.

    A warp has 32 / N matrices, padded to N x N. Wavefronts: of a product, of a piece that all lanes move 16 bytes at a
    time, of a row of a matrix whose lanes move a word each.
    """
    size = 8 if n <= 8 else 16 if n <= 16 else 32
    wide = max(itemsize, 4) // 4  # 16-bit numbers are in float32
    warps, foh = batch * size // 32, method == "foh"
    product, piece = n * wide * (size + 16) // 8, size * wide
    halves = wide  # of a warp that move doubles one after the other
    doubled = 2 if size == 8 else 1  # four matrices side by side meet in the same banks
    row = halves * doubled
    widths = [min(size, m - col) for col in range(0, m, size)]  # columns of B at a time
    outputs = 2 if foh else 1
    last_rows = n * outputs * sum(doubled * (1 if size == 32 and c <= 16 else halves) for c in widths)
    last_floors = n * outputs * sum(1 if size == 32 and c <= 16 else halves for c in widths)
    if method == "bilinear":
        chunks = n * (n * wide // 4 + 1) // 2 + n * n * wide // 4  # of 16 bytes: what is left of M, and all of X
        products, pieces_put, pieces_read = len(widths), len(widths), 0
        # The 1 of each pivot row: a word of each matrix of the warp.
        extra_loads = 2 * chunks + 2 * piece + n
        extra_stores = chunks * 32 // size + 2 * piece + n * (1 if size == 32 else wide)
        extra_conflicts = piece
    else:
        blocks = 5 if wide == 2 else 3
        products = blocks + (9 if foh else 6) + outputs * len(widths)
        pieces_put = blocks + (10 if foh else 7) + outputs * len(widths)
        pieces_read = 1 + 2 * blocks + (6 if foh else 2) + (len(widths) if foh else 0)
        extra_loads = extra_stores = extra_conflicts = 0
    put_rows = size * (1 + len(widths))  # A, and B piece by piece
    return Counts(
        load_requests=warps * (1 + n * (1 + len(widths))),
        load_sectors=warps + batch * n * (n + m) * wide // 8,
        store_requests=warps * n * (1 + outputs * len(widths)),
        store_sectors=batch * n * (n + outputs * m) * wide // 8,
        shared_load_wavefronts=warps * (products * product + pieces_read * piece + n * row + last_rows + extra_loads),
        shared_load_conflicts=warps * (n * (row - halves) + last_rows - last_floors + extra_conflicts),
        shared_store_wavefronts=warps * (pieces_put * piece + put_rows * row + extra_stores),
        shared_store_conflicts=warps * (put_rows * (row - halves) + extra_conflicts),
    )


stage = Stage(
    __file__,
    family=matrix_discretization,
    lesson="many small matrices: each in the hands of a few lanes, from the first word to the last",
    cost=cost,
    aligned=(4, 8, 8),
    registers=255,  # in double, of 32 x 32
    spills=True,  # of 32 x 32 on sm_90, of the backward: a few words outside of the products
    options=tuple({"method": method} for method in matrix_discretization.METHODS),
)
