"""The first-order scan h_t = a_t h_(t-1) + b_t, a linear recurrence of every channel on its own.

    h_t = a_t h_(t-1) + b_t     t = 1 .. T, from h_0, which is 0 unless it is given

What a loss gives to h_t, g_t, and what it gives to all later states, meet in lambda_t, which is a scan, too, from the
end to the beginning; the bar is the complex conjugate, nothing for real numbers:

    lambda_t = g_t + conj(a_(t+1)) lambda_(t+1)
    db_t = lambda_t        da_t = lambda_t conj(h_(t-1))        dh_0 = conj(a_1) lambda_1

So the backward needs a, h and g once, and nothing else: 3 words read, 2 written. The forward reads 2 and writes 1.

**Why it can be parallel.** A step is the map h -> a h + b, and two steps after each other are one map again, the older
first: (a1, b1) then (a2, b2) is (a2 a1, a2 b1 + b2). This is associative, though not commutative, so that maps can be
combined in any grouping: of pieces of the sequence, by lanes, warps or blocks. (1, 0) changes nothing.

**The views that kernels get.** Always [B, T, D] by strides, whichever dimension is the time's; `reverse` is told by a
flag, and the launcher turns the time around with `flipped` of common/view.h. What is not there, h_0 or its gradient, is
an empty tensor. 16-bit types carry h in float32 and round only what is stored.

Blelloch, Prefix sums and their applications, 1990; Martin and Cundy, Parallelizing linear recurrent neural nets over
sequence length, 2018, https://arxiv.org/abs/1709.04057.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from stages.families import (
    COMPLEX,
    FLOATING,
    Choice,
    Work,
    check_fellow,
    check_tensor,
    random,
    shape,
    unit_roundoff,
    widened,
)
from stages.toolkit import operator
from stages.toolkit.kernels import Kernels

NAME = "scan"
CALL = "scan(a, b, h0=None, *, time_dim=1, reverse=False)"
SIZES = ("B", "T", "D")
PROBLEMS = (
    (2, 64, 96),
    (2, 70, 35),
    (2, 37, 40),
    (1, 200, 5),
    (1, 8500, 1),
    (1, 1501, 1),
    (3, 1, 33),
    (1, 1, 1),
    (2, 0, 3),
    (0, 5, 3),
    (2, 5, 0),
)
XRAY = (2, 64, 64)
BENCH = {"cpu": ((2, 128, 128),), "cuda": ((8, 2048, 1536), (32, 2048, 2048), (8, 8192, 1536))}
SWEEP = {
    "cpu": tuple((1, 1 << n, 32) for n in range(5, 12)),
    "cuda": tuple((1, 1 << n, 1024) for n in range(8, 17, 2)),
}
DTYPES = FLOATING
INCUMBENT, COMPILED = "torch.compile(formula)", True  # in torch, a tree of pairs of steps


def launch(kernels: Kernels, a: Tensor, b: Tensor, h0: Tensor, h: Tensor, reverse: bool) -> None:
    """The launcher of a stage's module that has the function's name: `scan`."""
    kernels.launch("scan", a.device, a, b, h0, h, reverse)


def launch_backward(
    kernels: Kernels, g: Tensor, a: Tensor, h: Tensor, h0: Tensor, da: Tensor, db: Tensor, dh0: Tensor, reverse: bool
) -> None:
    """The launcher of a stage's module that is called `scan_backward`."""
    kernels.launch("scan_backward", a.device, g, a, h, h0, da, db, dh0, reverse)


def define(
    name: str,
    kernels: Kernels,
    *,
    dtypes: Sequence[torch.dtype] = FLOATING,
    backward: bool = True,
    launch: Callable = launch,
    launch_backward: Callable = launch_backward,
) -> Callable[..., Tensor]:
    """Register the operators of a stage and return its public function.

    The backward is an operator of its own, `stages::<name>_backward`, which gives da, db and dh0 (empty without h0).

    Args:
        dtypes: What its kernels take.
        backward: Whether the stage has one.
        launch: How the forward is launched, `launch(kernels, a, b, h0, h, reverse)`, with views [B, T, D]; a stage
            whose kernels need scratch memory allocates it here.
        launch_backward: How the backward is launched,
            `launch_backward(kernels, g, a, h, h0, da, db, dh0, reverse)`, likewise.
    """

    def run(a: Tensor, b: Tensor, h0: Tensor | None = None, time_dim: int = 1, reverse: bool = False) -> Tensor:
        h = operator.empty(a.shape, like=a)
        launch(kernels, *in_time(time_dim, a, b), present(h0, a), *in_time(time_dim, h), reverse)
        return h

    def fake(a, b, h0=None, time_dim=1, reverse=False) -> Tensor:
        return operator.empty(a.shape, like=a)

    def setup_context(ctx, inputs: tuple, output: Tensor) -> None:
        a, _, h0, ctx.time_dim, ctx.reverse = inputs
        ctx.save_for_backward(a, output, h0)

    def differentiate(ctx, g: Tensor) -> tuple[Tensor | None, ...]:
        if not backward:
            raise NotImplementedError(f"stages::{name} has no backward; stage 41 has one: stages.load('41').scan")
        a, h, h0 = ctx.saved_tensors
        da, db, dh0 = compute_backward(g, a, h, h0, ctx.time_dim, ctx.reverse)
        return da, db, None if h0 is None else dh0, None, None

    def run_backward(g, a, h, h0, time_dim, reverse) -> tuple[Tensor, Tensor, Tensor]:
        da, db, dh0 = fake_backward(g, a, h, h0, time_dim, reverse)
        g, a, h, *grads = in_time(time_dim, g, a, h, da, db)
        launch_backward(kernels, g, a, h, present(h0, a), *grads, dh0, reverse)
        return da, db, dh0

    def fake_backward(g, a, h, h0, time_dim, reverse) -> tuple[Tensor, Tensor, Tensor]:
        da, db = (operator.empty(a.shape, like=a) for _ in range(2))
        return da, db, operator.empty((0, 0) if h0 is None else h0.shape, like=a)

    def twice(ctx, *grads: Tensor):
        raise NotImplementedError(f"stages::{name} has no second derivatives: its backward is not differentiable")

    if backward:
        compute_backward = operator.register(
            f"{name}_backward",
            "(Tensor g, Tensor a, Tensor h, Tensor? h0, int time_dim, bool reverse) -> (Tensor, Tensor, Tensor)",
            run_backward,
            fake=fake_backward,
            backward=twice,
        )
    compute = operator.register(
        name,
        "(Tensor a, Tensor b, Tensor? h0=None, int time_dim=1, bool reverse=False) -> Tensor",
        run,
        fake=fake,
        setup_context=setup_context,
        backward=differentiate,
    )

    def scan(a: Tensor, b: Tensor, h0: Tensor | None = None, *, time_dim: int = 1, reverse: bool = False) -> Tensor:
        """The first-order scan h[t] = a[t] h[t - 1] + b[t] of each batch and channel, carried in float32.

        float64 is carried in float64. The last state is h.select(time_dim, -1), with reverse h.select(time_dim, 0).

        Args:
            a: [B, T, D], or [B, D, T] with time_dim=2; float64, float32, float16 or bfloat16, complex64 or complex128
                where the stage takes them, on a CPU or a CUDA device. Any strides, 0 included; nothing is copied.
            b: The same shape, dtype and device.
            h0: [B, D], of the same dtype and device: the state before the first step. None: zeros.
            time_dim: Which dimension of a and b is the time, 1 or 2.
            reverse: From the last step to the first, h[t] = a[t] h[t + 1] + b[t]; h0 then comes after the last step.

        Returns:
            h, of a's shape and dtype, contiguous. NaN and infinity propagate to all later steps of their channel.
            Differentiable once, for a, b and h0.

        Raises:
            TypeError: A tensor is none, is not dense, or has another dtype than those above or than its fellows, or an
                option is of the wrong type.
            ValueError: A tensor has another number of dimensions, the sizes do not fit each other, the devices differ,
                or time_dim is neither 1 nor 2.
            NotImplementedError: The stage leaves out what is asked for. The text names the stage that has it.
            KernelFault: The CPU device caught the kernel doing what it may not.

        Example:
            >>> import stages, torch
            >>> a, b = torch.tensor([[[0.5, 0.25, 2.0]]]), torch.tensor([[[1.0, 2.0, 4.0]]])
            >>> stages.load("scan_sequential").scan(a, b, torch.tensor([[6.0]]), time_dim=2)
            tensor([[[ 4.,  3., 10.]]])
        """
        check(a, b, h0, time_dim, reverse)
        if a.dtype not in dtypes:
            other = "47 (scan_complex)" if a.is_complex() else "41 (scan_pipelined)"
            raise NotImplementedError(f"{CALL}: stage {name} does not take {a.dtype}; stage {other} does")
        return compute(a, b, h0, time_dim, reverse)

    return scan


def in_time(time_dim: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors as kernels know them, [B, T, D]: views, nothing is copied."""
    return tensors if time_dim == 1 else tuple(x.mT for x in tensors)


def present(h0: Tensor | None, like: Tensor) -> Tensor:
    """h0, or in its place an empty tensor."""
    return operator.empty((0, 0), like=like) if h0 is None else h0


def check(a: Tensor, b: Tensor, h0: Tensor | None = None, time_dim: int = 1, reverse: bool = False) -> None:
    """Raise TypeError or ValueError, naming the argument, unless the scan of these makes sense."""
    dtypes = FLOATING + COMPLEX
    check_tensor(CALL, "a", a, 3, dtypes)
    check_fellow(CALL, "b", b, "a", a, 3, dtypes)
    if isinstance(time_dim, bool) or not isinstance(time_dim, int):
        raise TypeError(f"{CALL}: time_dim must be an int, got {type(time_dim).__name__}")
    if time_dim not in (1, 2):
        raise ValueError(f"{CALL}: time_dim is {time_dim}; allowed: 1 for (B, T, D), 2 for (B, D, T)")
    if not isinstance(reverse, bool):
        raise TypeError(f"{CALL}: reverse must be True or False, got {type(reverse).__name__}")
    if b.shape != a.shape:
        raise ValueError(f"{CALL}: b is {shape(b)} and a is {shape(a)}; allowed: the same shape for both")
    if h0 is None:
        return
    check_fellow(CALL, "h0", h0, "a", a, 2, dtypes)
    if h0.shape[0] != a.shape[0] or h0.shape[1] != a.shape[3 - time_dim]:
        raise ValueError(
            f"{CALL}: h0 is {shape(h0)} and a is {shape(a)} with time_dim={time_dim}; allowed: (B, D), "
            f"here ({a.shape[0]}, {a.shape[3 - time_dim]})"
        )


FASTEST = ("41_scan_pipelined", "44_scan_warp", "45_scan_lookback", "47_scan_complex")
STRIP = 32  # channels side by side that are one block's in stages 41 and 45
# From here on all 132 multiprocessors of an H100 have enough to do though nobody cuts time. A strip has 12 KB and more
# on their way: with 32 of them stage 41 copies at a quarter of the card's rate, with 384 at nine tenths. A row of stage
# 44 has 8 KB, and two on a multiprocessor are what it takes.
ENOUGH_STRIPS, ENOUGH_ROWS = 128, 264
# Steps from which on it pays to cut time nevertheless. Stage 41 takes 16 ns for a step, stage 44 0.7 ns for one of its
# row, measured on an H100; the second launch and the look back of stage 45 cost about 10 us, estimated.
LONG_STRIP, LONG_ROW = 1024, 8192


def choose(a: Tensor, b: Tensor, h0: Tensor | None = None, *, time_dim: int = 1, reverse: bool = False) -> Choice:
    """By the type, by what lies side by side in h and in the gradients, and by how many channels there are and steps.

    h and the gradients are contiguous as [B, T, D] or, with time_dim=2, as [B, D, T], whatever the strides of a and b.
    """
    check(a, b, h0, time_dim, reverse)
    if a.is_complex():
        return Choice("47_scan_complex", "the numbers are complex")
    batch, seq, channels = a.shape[0], a.shape[time_dim], a.shape[3 - time_dim]
    if time_dim == 1 and channels != 1:
        if batch * -(-channels // STRIP) >= ENOUGH_STRIPS:
            return Choice("41_scan_pipelined", "channels lie side by side, and there are enough of them")
        if seq < LONG_STRIP:
            return Choice("41_scan_pipelined", "channels lie side by side; they are few, but so are the steps")
        return Choice("45_scan_lookback", "channels lie side by side, few, with many steps: time is cut between blocks")
    if batch * channels >= ENOUGH_ROWS:
        return Choice("44_scan_warp", "steps lie side by side, and there are enough channels")
    if seq < LONG_ROW:
        return Choice("44_scan_warp", "steps lie side by side; channels are few, but so are the steps")
    if time_dim == 1:  # [B, T, 1], of which stage 45 would give each channel a lane
        return Choice(
            "44_scan_warp", "a single channel; with time_dim=2, as [B, 1, T], time would be cut between blocks"
        )
    return Choice("45_scan_lookback", "steps lie side by side, many, of few channels: time is cut between blocks")


def make(
    sizes: Mapping[str, int],
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    seed: int = 0,
    *,
    time_dim: int = 1,
    reverse: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normal b and h0. a is anything in (-0.99, 0.99) in every other channel, and near 1 in the ones between.

    Complex a have such a modulus and any angle.
    """
    generator = torch.Generator(device).manual_seed(seed)
    batch, seq, channels = (sizes[name] for name in SIZES)
    of_all = (batch, seq, channels) if time_dim == 1 else (batch, channels, seq)
    uniform = torch.rand(of_all, generator=generator, dtype=torch.float64, device=generator.device)
    near = torch.arange(channels, device=generator.device).remainder(2).bool()
    near = near if time_dim == 1 else near[:, None]
    a = torch.where(near, 1 - uniform / 512, 1.98 * uniform - 0.99)
    parts = []
    for size in (of_all, (batch, channels)):
        parts.append(random(size, torch.float64, generator))
        if dtype.is_complex:
            parts[-1] = torch.complex(parts[-1], random(size, torch.float64, generator))
    if dtype.is_complex:
        a = torch.polar(a.abs(), 6.28 * torch.rand(of_all, generator=generator, dtype=torch.float64, device=a.device))
    b, h0 = parts
    return a.to(dtype), b.to(dtype), h0.to(dtype)


LONG = "B = 1, T = 65,536, D = 8; a = 1 - U / 512 in the first channel, .. 1 - U / 65,536 in the last, U in (0, 1)"


def make_long(
    dtype: torch.dtype, device: str | torch.device = "cpu", *, time_dim: int = 1, reverse: bool = False
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """65536 steps of channels that remember a thousand of them to all; complex a turn by any angle.

    Normal b, h0 and gradients of h; the same numbers in both layouts.
    """
    generator = torch.Generator(device).manual_seed(5)
    channels, size = 8, (1, 65536, 8)

    def uniform() -> Tensor:
        return torch.rand(size, generator=generator, dtype=torch.float64, device=generator.device)

    a = 1 - uniform() / 2 ** torch.linspace(9, 16, channels, dtype=torch.float64, device=generator.device)
    b, g, h0 = (random(shape, torch.float64, generator) for shape in (size, size, (1, channels)))
    if dtype.is_complex:
        a = torch.polar(a, 6.28 * uniform())
    if time_dim == 2:
        a, b, g = (x.mT.contiguous() for x in (a, b, g))
    return (a.to(dtype), b.to(dtype), h0.to(dtype)), (g.to(dtype),)


def reference(a: Tensor, b: Tensor, h0: Tensor | None = None, *, time_dim: int = 1, reverse: bool = False) -> Tensor:
    """h step by step, in float64 or complex128 of the values as they are given."""
    a, b = widened(a), widened(b)
    if not a.shape[time_dim]:
        return a * b if h0 is None else a * b + widened(h0).unsqueeze(time_dim)  # empty, but differentiable
    h = torch.zeros_like(b.select(time_dim, 0)) if h0 is None else widened(h0)
    states = []
    steps = list(zip(a.unbind(time_dim), b.unbind(time_dim), strict=True))
    for a_step, b_step in reversed(steps) if reverse else steps:
        h = a_step * h + b_step
        states.append(h)
    return torch.stack(states[::-1] if reverse else states, time_dim)


def tolerance(sizes: Mapping[str, int], dtype: torch.dtype, **options: object) -> dict[str, float]:
    """How far each result may be from the truth, r = |x - ref| / |ref|.

    For a near 1, which half of `make`'s channels have. A gradient of 16 bits is a product of h, which was rounded, and
    is rounded itself.
    """
    if dtype in (torch.float16, torch.bfloat16):
        allowed = 4e-3 if dtype is torch.bfloat16 else 1e-3
    else:
        allowed = 1e-5 * unit_roundoff(dtype) / unit_roundoff(torch.float32)
    return dict.fromkeys(("output", "a", "b", "h0"), allowed)


def incumbent(a: Tensor, b: Tensor, h0: Tensor | None = None, *, time_dim: int = 1, reverse: bool = False) -> Tensor:
    """Whole tensors at a time: pairs of steps are one, pairs of pairs, ..; then the steps between, level by level.

    Twice the work of a walk, whatever the length. Torch has no public operation for it, and a loop of T steps, which is
    the formula as it stands, takes a launch or two for each.
    """
    if reverse:
        return incumbent(a.flip(time_dim), b.flip(time_dim), h0, time_dim=time_dim).flip(time_dim)
    seq = a.shape[time_dim]
    if h0 is not None and seq:
        first, rest = b.split((1, seq - 1), time_dim)
        b = torch.cat((first + a.narrow(time_dim, 0, 1) * h0.unsqueeze(time_dim), rest), time_dim)
    levels = []  # the older steps of the pairs, and the step that is left over, if there is one
    while b.shape[time_dim] > 1:
        pairs, odd = divmod(b.shape[time_dim], 2)
        both = (x.narrow(time_dim, 0, 2 * pairs).unflatten(time_dim, (pairs, 2)) for x in (a, b))
        (a_older, a_newer), (b_older, b_newer) = (x.unbind(time_dim + 1) for x in both)
        levels.append((a_older, b_older, *(x.narrow(time_dim, 2 * pairs, odd) for x in (a, b))))
        a, b = a_newer * a_older, a_newer * b_older + b_newer
    h = b  # after every last step of a pair
    for a_older, b_older, a_left, b_left in reversed(levels):
        before, last = h.split((h.shape[time_dim] - 1, 1), time_dim)
        first, rest = b_older.split((1, b_older.shape[time_dim] - 1), time_dim)
        between = torch.cat((first, a_older.narrow(time_dim, 1, before.shape[time_dim]) * before + rest), time_dim)
        pairs = torch.stack((between, h), time_dim + 1).flatten(time_dim, time_dim + 1)
        h = torch.cat((pairs, a_left * last + b_left), time_dim)
    return h


def work(sizes: Mapping[str, int], itemsize: int, **options: object) -> Work:
    """A multiplication and an addition for each element; a, b and h moved once, and h0 read."""
    batch, seq, channels = (sizes[name] for name in SIZES)
    return Work(2 * batch * seq * channels, itemsize * batch * channels * (3 * seq + 1))


def backward_work(sizes: Mapping[str, int], itemsize: int, **options: object) -> Work:
    """A multiplication and an addition for lambda, a multiplication for da; g, a and h read, da and db written."""
    batch, seq, channels = (sizes[name] for name in SIZES)
    return Work(3 * batch * seq * channels, itemsize * batch * channels * (5 * seq + 2))
