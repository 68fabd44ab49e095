# Stage 46: the first-order scan in Triton: a program for a tile, threads are the compiler's
#
# Problem   h[t] = a[t] h[t - 1] + b[t] for each batch and channel, from h0 or 0: a, b, h [B, T, D], h0 [B, D]; any
#           strides, any direction. Backward: lambda[t] = g[t] + a[t + 1] lambda[t + 1];  db = lambda,
#           da[t] = lambda[t] h[t - 1],  dh0 = a[0] lambda[0].
# Before    Stage 44 says which thread holds which step, and moves every word: shuffles, shared memory, barriers.
# Idea      Say what happens to a tile of [steps, channels] and how two maps become one, and no more. associative_scan
#           combines along time, in whatever grouping; the compiler hands out the words to threads, and puts in what
#           shuffles and barriers that takes. A tile starts in the state in which the one before it has ended.
# Mapping   program: some channels of one batch, a tile of their time after the other.  tile: by where the words lie,
#           rows of 128 bytes of channels (time_dim=1), or a long piece of time (time_dim=2), see `shape_of`.
# Cost      Forward: a and b read once, h written once. Backward: g, a and h read once, da and db written; a and h are
#           those of neighbouring steps, which threads cannot hand on here: loaded where they lie, with time_dim=2 at
#           odd places, a word at a time. Not counted: the CPU device with its x-ray runs CUDA C++.
# Limits    Products of a are rounded, nothing keeps the rest (`low` of stage 44): near 1 that costs a digit. How steps
#           are grouped, hence how a result is rounded, is the compiler's choice, by dtype and alignment. A program is
#           some channels': few of them leave multiprocessors idle (stage 45).
# Run       python -m stages run 46

import triton
import triton.language as tl


# ----------------------------------------------------------------------------------------------------------------------
# Two pieces of time, state -> a state + b, the older one first: not the same as the other way round. From 0 a piece
# leads to b, also if its a, a product, has overflowed: infinity times 0 would be NaN.
@triton.jit
def combine(a_older, b_older, a_newer, b_newer):
    nowhere = (b_older == 0) & (tl.abs(a_newer) == float("inf"))
    return a_newer * a_older, tl.where(nowhere, 0.0, a_newer * b_older) + b_newer


@triton.jit
def add(x, y):
    return x + y


# The batch of a program, and its channels. All offsets from here on have 64 bits.
@triton.jit
def mine(channels, CHANNELS: tl.constexpr):
    groups = (channels + CHANNELS - 1) // CHANNELS
    group = (tl.program_id(0) % groups).to(tl.int64)
    return (tl.program_id(0) // groups).to(tl.int64), group * CHANNELS + tl.arange(0, CHANNELS)


# The steps of a tile in the order in which the scan takes them. To turn the numbers around is free; with `reverse=True`
# associative_scan turns the words around, by shuffles of all of them.
@triton.jit
def steps_of_tile(STEPS: tl.constexpr, REVERSE: tl.constexpr):
    step = tl.arange(0, STEPS).to(tl.int64)
    return STEPS - 1 - step if REVERSE else step


# One row of a tile, as there is no index: the sum of all rows, of which the others are zeros.
@triton.jit
def row(tile, ROW: tl.constexpr):
    here = tl.arange(0, tile.shape[0]) == ROW
    return tl.reduce(tl.where(here[:, None], tile, 0.0), 0, add)


# Where a tile [steps, channels] of a tensor [batch, seq, channels] lies: a pointer and offsets are a tile of pointers.
@triton.jit
def places(x, strides, batch, step, channel):
    return x + batch * strides[0] + step[:, None] * strides[1] + channel[None, :] * strides[2]


# Of h0, or zeros.
@triton.jit
def load_start(h0, strides, batch, channel, channels, START: tl.constexpr, Sum: tl.constexpr):
    start = tl.full([channel.shape[0]], 0, Sum)
    if START:
        start = tl.load(h0 + batch * strides[0] + channel * strides[1], channel < channels, 0.0).to(Sum)
    return start


# ----------------------------------------------------------------------------------------------------------------------
# grid (B ceil(D / CHANNELS))
@triton.jit
def scan_tiles(
    a,  # [batch, seq, channels]
    a_strides,
    b,  # [batch, seq, channels]
    b_strides,
    h0,  # [batch, channels], or empty
    h0_strides,
    h,  # [batch, seq, channels]
    h_strides,
    seq,
    channels,
    START: tl.constexpr,  # whether there is an h0
    REVERSE: tl.constexpr,  # from the last step to the first
    Sum: tl.constexpr,  # what a state is kept in
    STEPS: tl.constexpr,  # of a tile: a power of two, as its
    CHANNELS: tl.constexpr,
    STAGES: tl.constexpr,  # tiles of which one is worked at and the others are on their way
):
    batch, channel = mine(channels, CHANNELS)
    step = steps_of_tile(STEPS, REVERSE)
    first = (tl.arange(0, STEPS) == 0)[:, None]

    a_places = places(a, a_strides, batch, step, channel)
    b_places = places(b, b_strides, batch, step, channel)
    h_places = places(h, h_strides, batch, step, channel)
    state = load_start(h0, h0_strides, batch, channel, channels, START, Sum)

    tiles = (seq + STEPS - 1) // STEPS
    for i in tl.range(0, tiles, num_stages=STAGES):
        t = tl.cast(tiles - 1 - i if REVERSE else i, tl.int64) * STEPS
        inside = (t + step < seq)[:, None] & (channel < channels)[None, :]
        a_tile = tl.load(a_places + t * a_strides[1], inside, 1.0).to(Sum)  # (1, 0) changes nothing
        b_tile = tl.load(b_places + t * b_strides[1], inside, 0.0).to(Sum)

        b_tile += tl.where(first, a_tile * state[None, :], 0.0)
        _, h_tile = tl.associative_scan((a_tile, b_tile), 0, combine)
        tl.store(h_places + t * h_strides[1], h_tile, inside)
        state = row(h_tile, STEPS - 1)


# Against the direction of the forward, whose `later` steps come first here: what is carried is lambda.
# grid (B ceil(D / CHANNELS))
@triton.jit
def scan_tiles_backward(
    g,  # [batch, seq, channels]
    g_strides,
    a,  # [batch, seq, channels]
    a_strides,
    h,  # [batch, seq, channels]
    h_strides,
    h0,  # [batch, channels], or empty
    h0_strides,
    da,  # [batch, seq, channels]
    da_strides,
    db,  # [batch, seq, channels]
    db_strides,
    dh0,  # [batch, channels], or empty
    dh0_strides,
    seq,
    channels,
    START: tl.constexpr,
    REVERSE: tl.constexpr,
    Sum: tl.constexpr,
    STEPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    STAGES: tl.constexpr,
):
    batch, channel = mine(channels, CHANNELS)
    step = steps_of_tile(STEPS, not REVERSE)
    first = (tl.arange(0, STEPS) == 0)[:, None]
    later: tl.constexpr = -1 if REVERSE else 1

    g_places = places(g, g_strides, batch, step, channel)
    a_places = places(a, a_strides, batch, step + later, channel)
    h_places = places(h, h_strides, batch, step - later, channel)
    da_places = places(da, da_strides, batch, step, channel)
    db_places = places(db, db_strides, batch, step, channel)
    start = load_start(h0, h0_strides, batch, channel, channels, START, Sum)

    state = tl.full([CHANNELS], 0, Sum)
    tiles = (seq + STEPS - 1) // STEPS
    for i in tl.range(0, tiles, num_stages=STAGES):
        t = tl.cast(i if REVERSE else tiles - 1 - i, tl.int64) * STEPS
        inside = (t + step < seq)[:, None] & (channel < channels)[None, :]
        after, before = t + step + later, t + step - later
        has_after = inside & ((after >= 0) & (after < seq))[:, None]
        has_before = inside & ((before >= 0) & (before < seq))[:, None]
        g_tile = tl.load(g_places + t * g_strides[1], inside, 0.0).to(Sum)
        a_after = tl.load(a_places + t * a_strides[1], has_after, 1.0).to(Sum)
        h_before = tl.load(h_places + t * h_strides[1], has_before, 0.0).to(Sum)
        h_before = tl.where(has_before, h_before, start[None, :])

        g_tile += tl.where(first, a_after * state[None, :], 0.0)
        _, lambda_tile = tl.associative_scan((a_after, g_tile), 0, combine)
        tl.store(da_places + t * da_strides[1], lambda_tile * h_before, inside)
        tl.store(db_places + t * db_strides[1], lambda_tile, inside)
        state = row(lambda_tile, STEPS - 1)

    if START:
        t = tl.cast(seq - 1 if REVERSE else 0, tl.int64)  # the forward's first step, to which h0 came
        there = channel < channels
        a_first = a + batch * a_strides[0] + t * a_strides[1] + channel * a_strides[2]
        dh0_places = dh0 + batch * dh0_strides[0] + channel * dh0_strides[1]
        tl.store(dh0_places, tl.load(a_first, there & (seq > 0), 0.0).to(Sum) * state, there)


# ----------------------------------------------------------------------------------------------------------------------
# The grid, and the tile, by where the words of [B, T, D] lie. Channels side by side: 128 bytes of them, so that a row
# is whole sectors, and 64 steps (32 in 16 bits). Steps side by side: 1024. With fewer of them, more of the other.
def shape_of(x):
    batch, seq, channels = x.shape
    size = x.element_size()
    most_steps, most_channels = (triton.next_power_of_2(max(count, 1)) for count in (seq, channels))
    if x.stride(1) == 1:
        words = 4096 // max(size, 4)  # 8 of a thread
        steps = min(words, most_steps)
        wide = min(words // steps, most_channels)
    else:
        words = 8192 // max(size, 4)  # 16 of a thread
        wide = min(128 // size, most_channels)
        steps = min(words // wide, most_steps)
    return (batch * triton.cdiv(channels, wide),), {"STEPS": steps, "CHANNELS": wide, "STAGES": 3, "num_warps": 4}


# A pointer and strides for each tensor.
def with_strides(*tensors):
    return [part for x in tensors for part in (x, x.stride())]


def scan(a, b, h0, h, reverse):
    grid, options = shape_of(h)
    if grid[0]:
        tensors = with_strides(a, b, h0, h)
        Sum = tl.float64 if h.element_size() == 8 else tl.float32
        scan_tiles[grid](*tensors, *h.shape[1:], h0.shape[0] > 0, reverse, Sum, **options)


def scan_backward(g, a, h, h0, da, db, dh0, reverse):
    grid, options = shape_of(h)
    if grid[0]:
        tensors = with_strides(g, a, h, h0, da, db, dh0)
        Sum = tl.float64 if h.element_size() == 8 else tl.float32
        scan_tiles_backward[grid](*tensors, *h.shape[1:], h0.shape[0] > 0, reverse, Sum, **options)
