"""Stage 32: the gradients of the vLSTM, by the kernel of its forward."""

from dataclasses import astuple

from torch import Tensor

from stages.families import vlstm
from stages.toolkit import operator
from stages.toolkit.kernels import Kernels
from stages.toolkit.report import Counts
from stages.toolkit.stage import Stage

TILE = 64
LINE = TILE // 32  # requests for a word of each row, or key, of a tile


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


def product(of: str, B: int, N: int, T: int, Dk: int, Dv: int, itemsize: int) -> Counts:
    """A block owns TILE rows and a chunk of the columns, and takes a step for each tile of keys on its side.

    Args:
        of: What it computes: "h", "dq", "dk" or "dv".
        Dk, Dv: The columns of what stands in the places of Q and V.
    """
    causal, b, dots = of in ("h", "dq"), of in ("dq", "dk"), of in ("dq", "dk")
    wide = itemsize == 8  # float64: tiles for half as many columns, threads with half as many rows and columns
    each, depth, passes = (4, 8, 2) if wide else (8, 16, 1)  # passes: wavefronts for 32 neighbours
    chunk = chunk_of(Dv, itemsize)
    across = chunk // each  # threads side by side
    warps = across * (TILE // each) // 32
    tiles = T // TILE
    blocks = B * N * tiles * -(-Dv // chunk)
    steps = blocks * (tiles + 1) // 2
    sums = max(4, itemsize)  # bytes of a word of l, m, b, M and the dots
    pieces = TILE * Dk * 2 // 32  # requests for a tile of Q and one of K
    values = B * N * tiles * (tiles + 1) // 2 * (TILE * Dv // 32)  # those for V: no more than there are columns
    square = TILE * TILE // 32  # requests for a tile of D, or of weights
    squares = passes + (1 if causal else passes) + (passes if of == "h" else 0)  # that are read: D, b, weights for l
    gates = LINE * (2 * steps if causal else steps + blocks)  # words of i and f
    words = LINE * ((blocks if causal else steps) * (1 + b))  # and of M or m, and b
    result = B * N * T * Dv // 32  # requests that store the result, 32 / across rows each
    pieces_of_rows = (32 // across) * max(1, across * itemsize // 32)  # sectors of each
    left = LINE * {"h": B * N * tiles, "dq": blocks, "dk": 2 * blocks, "dv": 0}[of]  # requests that store l, or dots
    factors = {"h": 2, "dv": 0}.get(of, 1)  # words of each row that its elements take at the end
    return Counts(
        load_requests=steps * pieces + values + gates + words + 2 * dots * result,
        load_sectors=(steps * pieces + values + gates) * itemsize + words * sums + 2 * dots * result * pieces_of_rows,
        store_requests=result + left,
        store_sectors=result * pieces_of_rows + left * sums,
        shared_load_wavefronts=steps * warps * (Dk * (each + TILE // across * passes) + TILE * each * (1 + passes))
        + steps * (2 * TILE * LINE + square * squares)
        + blocks * (factors * warps * each + 2 * dots * across * LINE * passes),
        shared_store_wavefronts=steps * (pieces + TILE * chunk // 32 + 2 * square) * passes
        + ((3 if of == "dk" else 2) * steps + (3 if of == "h" else 1) * blocks) * LINE * passes
        + dots * blocks * warps * each * 3 * passes,
        barriers=steps * (2 * (Dk + TILE) // depth + 1) + blocks * (1 + dots),
    )


def added(*counts: Counts) -> Counts:
    return Counts(*map(sum, zip(*map(astuple, counts), strict=True)))


def cost(B: int, N: int, T: int, Dk: int, Dv: int, itemsize: int, **options: object) -> Counts:
    """The forward: m of each row, and a product."""
    words, sums = B * N * T // 32, max(4, itemsize)
    maxima = Counts(
        load_requests=2 * words, load_sectors=2 * words * itemsize, store_requests=words, store_sectors=words * sums
    )
    return added(maxima, product("h", B, N, T, Dk, Dv, itemsize))


def backward_cost(B: int, N: int, T: int, Dk: int, Dv: int, itemsize: int) -> Counts:
    """A warp for each row, three products, and a warp for each head. Dk, too, is a multiple of TILE."""
    rows, words, sums = B * N * T, B * N * T // 32, max(4, itemsize)
    chunks = -(-Dk // chunk_of(Dk, itemsize))
    ends = Counts(
        load_requests=rows * (2 * Dv // 32 + 2) + words * (5 * chunks + 4),
        load_sectors=rows * (2 * Dv // 32 * itemsize + 2) + words * ((5 * chunks + 2) * sums + 2 * itemsize),
        store_requests=3 * rows + 2 * words,
        store_sectors=3 * rows + 2 * words * itemsize,
    )
    dq = product("dq", B, N, T, Dv, Dk, itemsize)
    dk = product("dk", B, N, T, Dv, Dk, itemsize)
    dv = product("dv", B, N, T, Dk, Dv, itemsize)
    return added(ends, dq, dk, dv)


stage = Stage(
    __file__,
    family=vlstm,
    lesson="the gradients by the forward's kernel, gates from sums of rows",
    cost=cost,
    aligned=(1, 1, TILE, 16, TILE),
    registers=255,  # eight warps on a multiprocessor: 64 sums of the walk and 64 of a step
    options=(
        {},
        {"normalizer_gradient": False},
        {"eps": 0.01},
        {"input_gate": "sigmoid", "eps": 0.01},
        {"input_gate": "sigmoid", "normalize": False},
    ),
    define={"launch_backward": launch_backward},
)

EQUIVALENT = {
    "for (int64_t t0 = 0; t0 < seq; t0 += WARP) {  [t0 < seq -> t0 <= seq]": (
        "past the last position a warp reads and stores nothing"
    ),
    "const bool inside = at < seq;  [at < seq -> at <= seq]": (
        "the words of a key past the end, which lie before those of the line after, go into no product"
    ),
}
