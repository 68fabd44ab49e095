"""The discretizations of h' = A h + B u, of a diagonal A: one step of dt as a multiplication and an addition.

    h_t = A_bar h_(t-1) + gain B u_t          for `foh`: h_t = A_bar h_(t-1) + gain_prev B u_(t-1) + gain B u_t

With z = dt A, phi_1(z) = (e^z - 1) / z and phi_2(z) = (phi_1(z) - 1) / z:

| method | A_bar | gain | |
| --- | --- | --- | --- |
| `zoh` | e^z | dt phi_1 | exact for an input that is held from sample to sample |
| `foh` | e^z | dt phi_2, gain_prev = dt (phi_1 - phi_2) | exact for one that is linear between samples; u_0 = 0 |
| `bilinear` | (1 + z/2) / (1 - z/2) | dt / (1 - z/2) | the trapezoidal rule, Tustin's method |
| `backward_euler` | 1 / (1 - z) | dt / (1 - z) | the implicit Euler method |
| `mamba` | e^z | dt | Mamba's: the input is taken up as if nothing decayed within a step |
| `highorder` | e^z | dt (1 + z/2) | the series of phi_1 up to degree 1 |
| `poly` | e^z | dt (1 + z/2 + z^2/6) | up to degree 2 |
| `rk4` | e^z | dt (1 + z/2 + z^2/6 + z^3/24) | up to degree 3, the gain of a Runge-Kutta step of order 4 |
| `dirac` | e^z | 1 | the input comes in impulses, one a sample |

A stable A has a negative real part, and |A_bar| < 1 for each of these methods, whatever the step. The series that are
cut off are good for |z| < 1. Further out their gains are wrong: `highorder` has the wrong sign from z = -2 on, `rk4`
from z = -2.8 on, `poly` has the right sign and grows as z^2. With a constant input only `zoh`, `foh`, `bilinear` and
`backward_euler` come to rest at -(B / A) u, as the differential equation does.

**Names elsewhere.** Some descriptions give (1 - z/2) / (1 + z/2) as the bilinear A_bar: that is its inverse, and grows
for every stable A. Mamba's paper writes down `zoh`, its kernel computes `mamba`. And "foh" is at times the name of the
gain with phi_1, or of one of the two weights alone.

**Gradients.** A_bar and the gains are analytic functions F of z: dA = conj(dF/dA) g, ddt = Re conj(dF/ddt) g, with

    zoh     dgain/dA = dt^2 (phi_1 - phi_2)         dgain/ddt = e^z
    foh     dgain/dA = dt^2 phi_2'                  dgain/ddt = phi_1 - phi_2
            dgain_prev/dA = dt^2 (phi_1 - phi_2)'   dgain_prev/ddt = e^z - phi_1 + phi_2

Franklin, Powell and Workman, Digital control of dynamic systems, 1998; Gu and Dao, Mamba, 2023,
https://arxiv.org/abs/2312.00752; Hochbruck and Ostermann, Exponential integrators, 2010 (the phi functions).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from stages.families import (
    COMPLEX,
    FLOATING,
    Choice,
    Work,
    check_tensor,
    listing,
    random,
    shape,
    unit_roundoff,
    widened,
)
from stages.toolkit import operator
from stages.toolkit.kernels import Kernels

NAME = "discretize"
CALL = "discretize(A, delta, *, method)"
METHODS = ("zoh", "foh", "bilinear", "backward_euler", "mamba", "highorder", "poly", "rk4", "dirac")
SIZES = ("B", "T", "D", "N")  # A is [D, N], delta [B, T, D, 1], so that all results are [B, T, D, N]
PROBLEMS = (
    (2, 5, 3, 32),
    (2, 3, 5, 7),
    (1, 1, 1, 1),
    (1, 43, 3, 1),
    (1, 1, 129, 1),
    (0, 4, 3, 2),
    (2, 4, 0, 2),
    (2, 4, 3, 0),
)
XRAY = (2, 4, 8, 32)
BENCH = {"cpu": ((2, 16, 32, 32),), "cuda": ((2, 1024, 2048, 16),)}
DTYPES = FLOATING + COMPLEX
ONES = (1, 1, 1, 1)
REAL_OF = {torch.complex128: torch.float64, torch.complex64: torch.float32}
INCUMBENT, COMPILED = "torch.compile(formula)", True


def OUTPUTS(*, method: str) -> tuple[str, ...]:  # noqa: N802
    """The names of a method's results: `foh` has two gains."""
    return ("A_bar", "gain_prev", "gain") if method == "foh" else ("A_bar", "gain")


def define(name: str, kernels: Kernels) -> Callable[..., tuple[Tensor, ...]]:
    """Register the operators of a stage and return its public function.

    Kernels get all as four dimensions, A and delta with a size of 1 where they are broadcast.
    """

    def run(A: Tensor, delta: Tensor, method: str) -> list[Tensor]:
        results = fake(A, delta, method)
        size = results[0].shape
        factors = results if len(size) == 4 else [four(x, size) for x in results]
        previous = factors[1] if method == "foh" else absent(A.dtype, A.device)
        given = four(A, size), four(delta, size)
        kernels.launch(NAME, A.device, method, *given, factors[0], previous, factors[-1])
        return results

    def fake(A: Tensor, delta: Tensor, method: str) -> list[Tensor]:
        size = together(A.shape, delta.shape)
        return [operator.empty(size, like=A) for _ in range(3 if method == "foh" else 2)]

    def setup_context(ctx, inputs: tuple, output: list[Tensor]) -> None:
        A, delta, ctx.method = inputs
        ctx.save_for_backward(A, delta)
        ctx.shape = output[0].shape

    def differentiate(ctx, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
        A, delta = ctx.saved_tensors
        given = [operator.nothing(ctx.shape, like=A) if g is None else g for g in grads]
        return *compute_backward(given, A, delta, ctx.method), None

    def run_backward(grads: list[Tensor], A: Tensor, delta: Tensor, method: str) -> tuple[Tensor, Tensor]:
        size = grads[0].shape
        wide = {torch.float16: torch.float32, torch.bfloat16: torch.float32}.get(A.dtype, A.dtype)
        dA, ddelta = (operator.empty(size, like=A, dtype=t) for t in (wide, REAL_OF.get(wide, wide)))
        factors = [four(x, size) for x in grads]
        previous = factors[1] if method == "foh" else absent(A.dtype, A.device)
        given = four(A, size), four(delta, size), factors[0], previous, factors[-1]
        kernels.launch("discretize_backward", A.device, method, *given, four(dA, size), four(ddelta, size))
        return tuple(g.sum_to_size(x.shape).to(x.dtype) for g, x in ((dA, A), (ddelta, delta)))

    def fake_backward(grads: list[Tensor], A: Tensor, delta: Tensor, method: str) -> tuple[Tensor, Tensor]:
        return operator.empty(A.shape, like=A), operator.empty(delta.shape, like=delta)

    def twice(ctx, *grads: Tensor):
        raise NotImplementedError(f"stages::{name} has no second derivatives: its backward is not differentiable")

    compute_backward = operator.register(
        f"{name}_backward",
        "(Tensor[] grads, Tensor A, Tensor delta, str method) -> (Tensor, Tensor)",
        run_backward,
        fake=fake_backward,
        backward=twice,
    )
    compute = operator.register(
        name,
        "(Tensor A, Tensor delta, str method) -> Tensor[]",
        run,
        fake=fake,
        setup_context=setup_context,
        backward=differentiate,
    )

    def discretize(A: Tensor, delta: Tensor, *, method: str) -> tuple[Tensor, ...]:
        """The factors of h_t = A_bar h_(t-1) + gain B u_t, for h' = A h + B u and steps of delta; one of nine methods.

        They are computed to the last digits for any z = delta A, also where it is 0, tiny or large. `zoh`, `foh`,
        `bilinear` and `backward_euler` suit every step and stable A. `highorder`, `poly` and `rk4` are series that are
        cut off, for |z| < 1: further out their gain is wrong, of `highorder` from z = -2 on even in sign. `mamba` is
        what Mamba's kernel computes, and `dirac` takes the input for impulses.

        Args:
            A: What the state's derivative depends on, each number for itself, as in a diagonal matrix; complex128,
                complex64, float64, float32, float16 or bfloat16, on a CPU or a CUDA device. Any shape and strides, 0
                included; of more than four dimensions some may have to be copied.
            delta: The steps, real, of A's precision (float32 for complex64), on the same device; A and delta are
                broadcast against each other, [D, N] and [B, T, D, 1] to [B, T, D, N].
            method: "zoh", "foh", "bilinear", "backward_euler", "mamba", "highorder", "poly", "rk4" or "dirac".

        Returns:
            A_bar and gain; with "foh" A_bar, gain_prev, the factor of B u_(t-1), and gain. Of the shape that A and
            delta have together and of A's dtype, contiguous; 16 bits are computed in float32 and rounded once. NaN
            propagates. Differentiable once, for A and delta.

        Raises:
            TypeError: A tensor is none, is not dense, or has another dtype than those above, or method is no str.
            ValueError: There is no such method, the shapes cannot be broadcast against each other, or the devices
                differ.
            KernelFault: The CPU device caught the kernel doing what it may not.

        Example:
            >>> import stages, torch
            >>> A, delta = torch.tensor([-1.0, -1e-8, 0.0]), torch.tensor([[0.5], [1.0]])
            >>> A_bar, gain = stages.load("discretize").discretize(A, delta, method="zoh")
            >>> gain
            tensor([[0.3935, 0.5000, 0.5000],
                    [0.6321, 1.0000, 1.0000]])
        """
        check(A, delta, method=method)
        return tuple(compute(A, delta, method))

    return discretize


def together(a: Sequence[int], b: Sequence[int]) -> list[int]:
    """The shape that two shapes are broadcast to. All that torch has for it takes several times as long."""
    long, short = (a, b) if len(a) >= len(b) else (b, a)
    size = list(long)
    for d, n in enumerate(short, len(long) - len(short)):
        if size[d] == 1:
            size[d] = n
    return size


def four(x: Tensor, size: torch.Size) -> Tensor:
    """A tensor that is broadcast to a shape, as four dimensions: a view, unless more do not join, expanded then."""
    if len(size) > 4:
        return x.expand(size).reshape(math.prod(size[:-3]), *size[-3:])
    return x if x.dim() == 4 else x.view(*ONES[x.dim() :], *x.shape)


@cache
def absent(dtype: torch.dtype, device: torch.device) -> Tensor:
    """What the kernel gets for the gain that `foh` alone has."""
    return torch.zeros((0, 0, 0, 0), dtype=dtype, device=device)


def check(A: Tensor, delta: Tensor, *, method: str) -> None:
    """Raise TypeError or ValueError, naming the argument, unless the discretization of these makes sense."""
    check_tensor(CALL, "A", A, dtypes=DTYPES)
    check_tensor(CALL, "delta", delta)
    if not isinstance(method, str):
        raise TypeError(f"{CALL}: method must be a str, got {type(method).__name__}")
    if method not in METHODS:
        raise ValueError(f"{CALL}: method is {method!r}; allowed: {listing([repr(m) for m in METHODS])}")
    if delta.dtype is not A.dtype and delta.dtype is not REAL_OF.get(A.dtype):
        raise TypeError(
            f"{CALL}: delta has dtype {delta.dtype}, but A has {A.dtype}; allowed: {REAL_OF.get(A.dtype, A.dtype)}"
        )
    if delta.device != A.device:
        raise ValueError(
            f"{CALL}: delta is on {delta.device}, but A is on {A.device}; allowed: the same device for both"
        )
    for a, d in zip(reversed(A.shape), reversed(delta.shape)):  # noqa: B905
        if a != d and a != 1 != d:
            raise ValueError(
                f"{CALL}: A is {shape(A)} and delta is {shape(delta)}; allowed: shapes that can be broadcast against "
                "each other, from the last dimension on equal or 1"
            )


FASTEST = ("50_discretize",)


def choose(A: Tensor, delta: Tensor, *, method: str) -> Choice:
    """There is one."""
    check(A, delta, method=method)
    return Choice("50_discretize", "the only one")


def make(
    sizes: Mapping[str, int],
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    seed: int = 0,
    *,
    method: str = "zoh",
) -> tuple[Tensor, Tensor]:
    """A stable A, from slow to fast, and steps from short to long: |z| is anything from 1e-5 to 12.

    Complex ones turn besides, by up to a few radians a step. Nothing overflows in float16, whatever the method.
    """
    generator = torch.Generator(device).manual_seed(seed)
    b, seq, d, n = (sizes[name] for name in SIZES)
    A = -random((d, n), torch.float64, generator).clamp(-2.5, 2.5).exp()
    if dtype.is_complex:
        A = torch.complex(A, 2 * random((d, n), torch.float64, generator))
    delta = (1.5 * random((b, seq, d, 1), torch.float64, generator) - 3).clamp(-7, 0).exp()
    return A.to(dtype), delta.to(REAL_OF.get(dtype, dtype))


def phi(n: int, z: Tensor, e: Tensor) -> Tensor:
    """phi_n from its series, where |z| < 1, or from e^z; in float64, and differentiable on either side."""
    near = z.abs() < 1
    small, large = torch.where(near, z, 0), torch.where(near, 1, z)
    series = torch.zeros_like(z)
    for k in range(22, -1, -1):
        series = series * small + 1 / math.factorial(k + n)
    far = torch.where(near, 1, e)
    for k in range(n):
        far = (far - 1 / math.factorial(k)) / large
    return torch.where(near, series, far)


def reference(A: Tensor, delta: Tensor, *, method: str) -> tuple[Tensor, ...]:
    """The table at the top, in float64 or complex128 of the values as they are given."""
    A, dt = torch.broadcast_tensors(widened(A), widened(delta))
    z = dt * A
    if method == "bilinear":
        return (1 + z / 2) / (1 - z / 2), dt / (1 - z / 2)
    if method == "backward_euler":
        return 1 / (1 - z), dt / (1 - z)
    e = torch.exp(z)
    if method == "foh":
        newer = phi(2, z, e)
        return e, dt * (phi(1, z, e) - newer), dt * newer
    gains = {
        "zoh": lambda: dt * phi(1, z, e),
        "mamba": lambda: dt + 0 * z,
        "highorder": lambda: dt * (1 + z / 2),
        "poly": lambda: dt * (1 + z / 2 + z**2 / 6),
        "rk4": lambda: dt * (1 + z / 2 + z**2 / 6 + z**3 / 24),
        "dirac": lambda: 1 + 0 * z,
    }
    return e, gains[method]()


def tolerance(sizes: Mapping[str, int], dtype: torch.dtype, *, method: str = "zoh") -> dict[str, float]:
    """How far each result may be from the truth, r = |x - ref| / |ref|.

    A few roundings of what it is computed in, and one more of 16 bits where they are stored. A gradient is a sum of
    terms of both signs; in float64 the reference is no better than the kernel.
    """
    short = dtype in (torch.float16, torch.bfloat16)
    unit = unit_roundoff(torch.float32 if short else REAL_OF.get(dtype, dtype))
    stored = unit_roundoff(dtype) if short else 0.0
    few = 3e-7 * unit / unit_roundoff(torch.float32) * (5 if unit < 1e-12 else 1)
    return dict.fromkeys(("A_bar", "gain_prev", "gain"), stored + few) | dict.fromkeys(("A", "delta"), stored + 3 * few)


def incumbent(A: Tensor, delta: Tensor, *, method: str) -> tuple[Tensor, ...]:
    """As a model has it that calls torch: exact where A is not 0, with digits lost where z is small and squared."""
    z = delta * A
    if method == "bilinear":
        return (1 + z / 2) / (1 - z / 2), delta / (1 - z / 2)
    if method == "backward_euler":
        return 1 / (1 - z), delta / (1 - z)
    e = torch.exp(z)
    if method == "zoh":
        return e, torch.expm1(z) / A
    if method == "foh":
        held = torch.expm1(z) / A
        gain = (held - delta) / z
        return e, held - gain, gain
    if method == "dirac":
        return e, torch.ones_like(e)
    degree = ("mamba", "highorder", "poly", "rk4").index(method)
    return e, delta * sum(z**k / math.factorial(k + 1) for k in range(degree + 1)) + 0 * e


def work(sizes: Mapping[str, int], itemsize: int, *, method: str = "zoh") -> Work:
    """Some 20 operations an element; A and delta read, A_bar and the gains written, all once."""
    b, seq, d, n = (sizes[name] for name in SIZES)
    results = len(OUTPUTS(method=method))
    return Work(20 * b * seq * d * n, itemsize * (d * n + b * seq * d + results * b * seq * d * n))
