"""Discretization of h' = A h + B u with a step dt, where A is a full matrix: h_t = A_bar h_(t-1) + input.

    z = dt A,  phi_1 = (e^z - 1) z^-1 = 1 + z/2 + z^2/6 + ..,  phi_2 = (e^z - 1 - z) z^-2 = 1/2 + z/6 + z^2/24 + ..

    bilinear  A_bar = M^-1 (1 + z/2) = 2 M^-1 - 1, M = 1 - z/2    input  M^-1 dt B u_t
    zoh       A_bar = e^z                                         input  dt phi_1 B u_t: u is constant in a step
    foh       A_bar = e^z                                         input  dt (phi_1 - phi_2) B u_(t-1) + dt phi_2 B u_t:
                                                                         u is linear in a step

The phi functions are series, and nothing is divided by A, which may be singular. Both are blocks of one exponential:

    exp(dt [[A, B, 0], [0, 0, 1/dt], [0, 0, 0]]) = [[e^z, dt phi_1 B, dt phi_2 B], ..]

**The way back.** For bilinear, with V = M^-T dB_bar and S = (M^-T dA_bar + dt/2 V B^T) M^-T,

    dA = dt S        dB = dt V        ddt = <S, A> + <V, B>

For an exponential, what a gradient G of e^z gives to z is the integral of e^(s z^T) G e^((1 - s) z^T) for s from 0 to
1: an upper right block, that of exp [[z^T, G], [0, z^T]].

Moler and Van Loan, Nineteen dubious ways to compute the exponential of a matrix, twenty-five years later, 2003; Higham,
Functions of matrices, 2008; Al-Mohy and Higham, Computing the Frechet derivative of the matrix exponential, 2009.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from stages.families import (
    FLOATING,
    Choice,
    Work,
    accumulator,
    check_alike,
    check_tensor,
    listing,
    random,
    shape,
    unit_roundoff,
    widened,
)
from stages.toolkit import operator
from stages.toolkit.kernels import Kernels

NAME = "discretize_matrix"
LAUNCHER = "bilinear"  # of a stage's module; the other one is called exponential
CALL = "discretize_matrix(A, B, delta, *, method)"
ARGUMENTS = ("A", "B", "delta")
METHODS = ("bilinear", "zoh", "foh")
LARGEST = 32  # n
SIZES = ("batch", "n", "m")
PROBLEMS = (
    (5, 16, 1),
    (3, 13, 2),
    (2, 32, 3),
    (9, 4, 1),
    (2, 31, 35),
    (3, 17, 33),
    (1, 1, 1),
    (7, 7, 9),
    (0, 4, 2),
    (3, 0, 2),
    (3, 4, 0),
)
XRAY = (8, 16, 8)
BENCH = {"cpu": ((64, 16, 16),), "cuda": ((65536, 16, 1), (65536, 16, 16), (16384, 32, 1))}
SWEEP = {
    "cpu": tuple((64, n, 1) for n in (8, 16, 24, 32)),
    "cuda": tuple((65536, n, 1) for n in (4, 8, 12, 16, 24, 32)),
}
DTYPES = FLOATING
INCUMBENT = "torch.linalg.solve, torch.matrix_exp"


def OUTPUTS(*, method: str) -> tuple[str, ...]:  # noqa: N802
    """The names of what a method gives."""
    return ("A_bar", "B_prev", "B_bar") if method == "foh" else ("A_bar", "B_bar")


def define(name: str, kernels: Kernels) -> Callable[..., tuple[Tensor, ...]]:
    """Register the operators of a stage and return its public function.

    The operator takes [batch, n, n], [batch, n, m] and [batch], and gives A_bar, B_prev, B_bar and for the backward
    M^-1; what a method has not, and M^-1 where nobody asks for gradients, is empty.
    """

    def run(A, B, delta, method, save=True) -> tuple[Tensor, ...]:
        A_bar, B_prev, B_bar, inverse = results = fake(A, B, delta, method, save)
        if method == "bilinear":
            kernels.launch("bilinear", A.device, A, B, delta, A_bar, B_bar, inverse)
        else:
            kernels.launch("exponential", A.device, A, B, delta, A_bar, B_prev, B_bar, method == "foh")
        return results

    def fake(A, B, delta, method, save=True) -> tuple[Tensor, ...]:
        absent = (0, 0, 0)
        return (
            operator.empty(A.shape, like=A),
            operator.empty(B.shape if method == "foh" else absent, like=B),
            operator.empty(B.shape, like=B),
            operator.empty(A.shape if save and method == "bilinear" else absent, like=A),
        )

    def setup_context(ctx, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        A, B, delta, ctx.method, _ = inputs
        ctx.save_for_backward(A, B, delta, output[3])
        ctx.mark_non_differentiable(output[3], *(() if ctx.method == "foh" else (output[1],)))
        ctx.set_materialize_grads(False)

    def differentiate(ctx, dA_bar, dB_prev, dB_bar, _inverse) -> tuple[Tensor | None, ...]:
        if dA_bar is None and dB_prev is None and dB_bar is None:
            return (None,) * 5
        A, B, delta, inverse = ctx.saved_tensors
        dA_bar = operator.nothing(A.shape, like=A) if dA_bar is None else dA_bar
        dB_bar = operator.nothing(B.shape, like=B) if dB_bar is None else dB_bar
        if ctx.method != "foh":
            dB_prev = operator.empty((0, 0, 0), like=B)
        elif dB_prev is None:
            dB_prev = operator.nothing(B.shape, like=B)
        return *compute_backward(dA_bar, dB_prev, dB_bar, A, B, delta, inverse, ctx.method), None, None

    def run_backward(dA_bar, dB_prev, dB_bar, A, B, delta, inverse, method) -> tuple[Tensor, ...]:
        grads = fake_backward(dA_bar, dB_prev, dB_bar, A, B, delta, inverse, method)
        if method == "bilinear":
            kernels.launch("bilinear_backward", A.device, dA_bar, dB_bar, A, B, delta, inverse, *grads)
        else:
            given = (dA_bar, dB_prev, dB_bar, A, B, delta)
            kernels.launch("exponential_backward", A.device, *given, *grads, method == "foh")
        return grads

    def fake_backward(dA_bar, dB_prev, dB_bar, A, B, delta, inverse, method) -> tuple[Tensor, ...]:
        return tuple(operator.empty(x.shape, like=x) for x in (A, B, delta))

    def twice(ctx, *grads: Tensor):
        raise NotImplementedError(f"stages::{name} has no second derivatives: its backward is not differentiable")

    compute_backward = operator.register(
        f"{name}_backward",
        "(Tensor dA_bar, Tensor dB_prev, Tensor dB_bar, Tensor A, Tensor B, Tensor delta, Tensor inverse, str method)"
        " -> (Tensor, Tensor, Tensor)",
        run_backward,
        fake=fake_backward,
        backward=twice,
    )
    compute = operator.register(
        name,
        "(Tensor A, Tensor B, Tensor delta, str method, bool save=True)"
        " -> (Tensor A_bar, Tensor B_prev, Tensor B_bar, Tensor inverse)",
        run,
        fake=fake,
        setup_context=setup_context,
        backward=differentiate,
    )

    def discretize_matrix(A: Tensor, B: Tensor, delta: Tensor, *, method: str) -> tuple[Tensor, ...]:
        """A_bar and B_bar of h_t = A_bar h_(t-1) + B_bar u_t, from h' = A h + B u and a step delta.

        16-bit numbers are turned into float32 and back, by torch. The batches of the three are broadcast against each
        other; a tensor is copied only where the common batch is not a single stride of it.

        Args:
            A: [..., n, n], n at most 32; float64, float32, float16 or bfloat16 on a CPU or a CUDA device. Any strides.
                Singular matrices are as good as others.
            B: [..., n, m], of the same dtype and device.
            delta: [...], the steps, of the same dtype and device.
            method: "bilinear" (Tustin), "zoh" (exact for an input that is constant in each step) or "foh" (exact for
                one that is linear in each step).

        Returns:
            A_bar, [..., n, n], and B_bar, [..., n, m]. With "foh" A_bar, B_prev and B_bar: the input is then
            B_prev u_(t-1) + B_bar u_t. All contiguous, and differentiable once, for A, B and delta.

            A matrix with NaN or infinity in delta A has NaN in all entries of its results. Where 1 - delta A / 2 is
            singular to the last digit, no entry of what bilinear gives is finite; where it nearly is, they are large,
            as they have to be. What is past the range of the type is infinite or NaN. Other matrices of the batch do
            not feel any of it.

        Raises:
            TypeError: A tensor is none, is not dense, or has another dtype than those above or than its fellows, or
                method is no string.
            ValueError: A tensor has too few dimensions, the sizes do not fit each other or n is above 32, the devices
                differ, or there is no such method.
            KernelFault: The CPU device caught the kernel doing what it may not.

        Example:
            >>> import stages, torch
            >>> A = torch.tensor([[0.0, 1.0], [0.0, 0.0]])  # a mass that a force pushes: position, speed
            >>> A_bar, B_bar = stages.load("53").discretize_matrix(
            ...     A, torch.tensor([[0.0], [1.0]]), torch.tensor(2.0), method="zoh")
            >>> A_bar.tolist(), B_bar.tolist()
            ([[1.0, 2.0], [0.0, 1.0]], [[2.0], [2.0]])
        """
        check(A, B, delta, method)
        batch, dtype = common_batch(A, B, delta), accumulator(A.dtype)
        tensors = tuple(x if x.dtype is dtype else x.to(dtype) for x in (A, B, delta))
        if not A.dim() == B.dim() == delta.dim() + 2 == 3 or not len(A) == len(B) == len(delta):
            tensors = tuple(flat(x, batch, rest) for x, rest in zip(tensors, (2, 2, 0), strict=True))
        save = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        A_bar, B_prev, B_bar, _ = compute(*tensors, method, save)
        results = (A_bar, B_prev, B_bar) if method == "foh" else (A_bar, B_bar)
        if len(batch) != 1:
            results = tuple(x.reshape(*batch, *x.shape[1:]) for x in results)
        return results if A.dtype is dtype else tuple(x.to(A.dtype) for x in results)

    return discretize_matrix


def common_batch(A: Tensor, B: Tensor, delta: Tensor) -> torch.Size:
    """What the batches of the three are broadcast to."""
    batches = A.shape[:-2], B.shape[:-2], delta.shape
    return batches[0] if batches[0] == batches[1] == batches[2] else torch.broadcast_shapes(*batches)


def flat(x: Tensor, batch: torch.Size, rest: int) -> Tensor:
    """x for each of the batch, with one dimension for all of it before the `rest` last ones."""
    own = x.shape[x.dim() - rest :]
    return x.expand((*batch, *own)).reshape((batch.numel(), *own))


def check(A: Tensor, B: Tensor, delta: Tensor, method: str) -> None:
    """Raise TypeError or ValueError, naming the argument, unless the discretization of these makes sense."""
    for name, value in zip(ARGUMENTS, (A, B, delta), strict=True):
        check_tensor(CALL, name, value)
        check_alike(CALL, name, value, "A", A)
    if not isinstance(method, str):
        raise TypeError(f"{CALL}: method must be a str, got {type(method).__name__}")
    if method not in METHODS:
        raise ValueError(f"{CALL}: method is {method!r}; allowed: {listing([repr(m) for m in METHODS])}")
    for name, value, letters in (("A", A, "(.., n, n)"), ("B", B, "(.., n, m)")):
        if value.dim() < 2:
            raise ValueError(f"{CALL}: {name} is {shape(value)}; allowed: {letters}")
    n = A.shape[-1]
    if A.shape[-2] != n or n > LARGEST:
        raise ValueError(f"{CALL}: A is {shape(A)}; allowed: (.., n, n) with n at most {LARGEST}")
    if B.shape[-2] != n:
        raise ValueError(f"{CALL}: B is {shape(B)} and A is {shape(A)}; allowed: (.., n, m), here (.., {n}, m)")
    try:
        common_batch(A, B, delta)
    except RuntimeError:
        raise ValueError(
            f"{CALL}: A is {shape(A)}, B is {shape(B)} and delta is {shape(delta)}; allowed: (.., n, n), (.., n, m) "
            "and (..), where all .. can be broadcast to one shape"
        ) from None


FASTEST = ("53_discretize_matrix",)


def choose(A: Tensor, B: Tensor, delta: Tensor, *, method: str) -> Choice:
    """There is one."""
    check(A, B, delta, method)
    return Choice("53_discretize_matrix", "the only one")


def make(
    sizes: Mapping[str, int],
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    seed: int = 0,
    *,
    method: str = "bilinear",
) -> tuple[Tensor, Tensor, Tensor]:
    """Stable A with a 1-norm of 4, normal B, and steps from 0.37 to 0.57: |z| is from 1.48 to 2.28.

    So the closed forms have it, for batches of 4; in others every second step is much smaller or larger, and where it
    is larger, A only turns: 1 - z / 2 has its largest entries beside the diagonal.
    """
    generator = torch.Generator(device).manual_seed(seed)
    batch, n, m = (sizes[name] for name in SIZES)
    mixing = random((batch, n, n), torch.float64, generator) / max(n, 1) ** 0.5
    decay = mixing @ mixing.mT
    if batch % 4:
        decay[3::6] = 0
    A = mixing - mixing.mT - decay
    if n:
        A = 4 * A / torch.linalg.matrix_norm(A, 1).clamp(min=1e-9)[:, None, None]  # of 1 x 1 nothing turns
    B = random((batch, n, m), torch.float64, generator)
    delta = 0.37 + 0.2 * torch.rand(batch, generator=generator, dtype=torch.float64, device=generator.device)
    if batch % 4:
        delta *= torch.tensor((1.0, 0.1, 1.0, 8.0, 1.0, 1e-3), dtype=delta.dtype).repeat(batch)[:batch].to(delta)
    return A.to(dtype), B.to(dtype), delta.to(dtype)


def reference(A: Tensor, B: Tensor, delta: Tensor, *, method: str) -> tuple[Tensor, ...]:
    """By torch's solver, and by its exponential of a block matrix, in float64 of the values as they are given."""
    return by_blocks(widened(A), widened(B), widened(delta), method)


def by_blocks(A: Tensor, B: Tensor, delta: Tensor, method: str) -> tuple[Tensor, ...]:
    """The definition, in the type of the arguments."""
    batch, (n, m) = common_batch(A, B, delta), B.shape[-2:]
    z = delta[..., None, None] * A.expand(*batch, n, n)
    input = delta[..., None, None] * B.expand(*batch, n, m)
    if method == "bilinear":
        half, identity = z / 2, torch.eye(n, dtype=z.dtype, device=z.device)
        both = torch.linalg.solve(identity - half, torch.cat((identity + half, input), -1))
        return both[..., :n], both[..., n:]
    top = torch.cat((z, input) if method == "zoh" else (z, input, 0 * input), -1)
    rows, count = top.shape[-1] - n, top.shape[-1]
    below = top.new_zeros(*batch, rows, count)
    if method == "foh":
        below[..., :m, n + m :] = torch.eye(m, dtype=z.dtype, device=z.device)
    result = torch.matrix_exp(torch.cat((top, below), -2))
    A_bar, one = result[..., :n, :n], result[..., :n, n : n + m]
    if method == "zoh":
        return A_bar, one
    two = result[..., :n, n + m :]
    return A_bar, one - two, two


def tolerance(sizes: Mapping[str, int], dtype: torch.dtype, *, method: str = "bilinear") -> dict[str, float]:
    """How far each result may be from the truth, r = |x - ref| / |ref|, for `make`'s matrices."""
    if dtype in (torch.float16, torch.bfloat16):
        allowed = 2 * unit_roundoff(dtype)
    else:
        allowed = 1e-13 if dtype is torch.float64 else 3e-6  # torch's exponential in float64 is 4e-14 off itself
    # The gradient of a step is a sum of so many products, of both signs.
    terms = sizes.get("n", 0) * (sizes.get("n", 0) + sizes.get("m", 0))
    names = (*OUTPUTS(method="foh"), *ARGUMENTS)
    return dict.fromkeys(names, allowed) | {"delta": allowed * max(1.0, terms**0.5 / 8)}


def incumbent(A: Tensor, B: Tensor, delta: Tensor, *, method: str) -> tuple[Tensor, ...]:
    """What there is in torch: a solver, and an exponential of the block matrix."""
    if A.dtype in (torch.float16, torch.bfloat16):
        return tuple(x.to(A.dtype) for x in by_blocks(A.float(), B.float(), delta.float(), method))
    return by_blocks(A, B, delta, method)


def work(sizes: Mapping[str, int], itemsize: int, *, method: str = "bilinear") -> Work:
    """An inverse of 2 n^3 operations, or for `make`'s matrices the products of the header; each word moved once."""
    batch, n, m = (sizes[name] for name in SIZES)
    products = {"bilinear": 1, "zoh": 9 if itemsize < 8 else 11, "foh": 12 if itemsize < 8 else 14}[method]
    inputs = 2 if method == "foh" else 1
    operations = 2 * n**3 * products + 2 * n * n * m * inputs
    return Work(batch * operations, itemsize * batch * (2 * n * n + (1 + inputs) * n * m + 1))
