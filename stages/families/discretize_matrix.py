"""The discretizations of h' = A h + B u, of a full A: one step of dt as a product and a sum.

    h_t = A_bar h_(t-1) + B_bar u_t            for `foh`: h_t = A_bar h_(t-1) + B_prev u_(t-1) + B_bar u_t

With Z = dt A, phi_1(Z) = sum Z^k / (k + 1)! and phi_2(Z) = sum Z^k / (k + 2)!:

| method | A_bar | B_bar | |
| --- | --- | --- | --- |
| `bilinear` | (I - Z/2)^-1 (I + Z/2) | (I - Z/2)^-1 dt B | the trapezoidal rule, Tustin's method |
| `zoh` | e^Z | phi_1(Z) dt B | exact for an input that is held from sample to sample |
| `foh` | e^Z | phi_2(Z) dt B, B_prev = (phi_1(Z) - phi_2(Z)) dt B | exact for one that is linear between samples |

Where A has an inverse, phi_1(Z) dt B = A^-1 (e^Z - I) B. Nothing here divides by A, so that a singular one, of an
integrator say, is as good as any.

**Gradients.** With M = I - Z/2, W = M^-T g_A_bar, V = M^-T g_B_bar and S = W (I + A_bar)^T + V B_bar^T those of
`bilinear` are dA = dt/2 S, dB = dt V and ddt = <S, A> / 2 + <V, B>. The others are derivatives of one exponential: e^Z,
phi_1(Z) dt B and phi_2(Z) dt B are the upper row of that of [[Z, dt B, 0], [0, 0, I], [0, 0, 0]], and the adjoint of
X -> e^X in a direction G is the derivative of e^(X^T) in that direction.

Higham, Functions of matrices, 2008 (scaling and squaring, derivatives); Van Loan, Computing integrals involving the
matrix exponential, 1978 (the block matrix).
"""

import math
from collections.abc import Callable, Mapping
from functools import cache

import torch
from torch import Tensor

from stages.families import Choice, Work, check_tensor, listing, random, shape, unit_roundoff, widened
from stages.toolkit import operator
from stages.toolkit.kernels import Kernels

NAME = "discretize_matrix"
CALL = "discretize_matrix(A, B, delta, *, method)"
METHODS = ("bilinear", "zoh", "foh")
SIZES = ("M", "n", "m")  # A is [M, n, n], B [M, n, m], delta [M]
PROBLEMS = (
    (8, 16, 1),
    (5, 7, 3),
    (3, 8, 8),
    (2, 24, 5),
    (2, 32, 2),
    (3, 17, 33),
    (9, 1, 1),
    (4, 3, 0),
    (0, 4, 2),
)
XRAY = (4, 16, 4)
BENCH = {"cpu": ((16, 16, 4),), "cuda": ((65536, 16, 1),)}
DTYPES = (torch.float64, torch.float32)
MOST = 32  # the largest n, and how many columns of B a launch takes
INCUMBENT, COMPILED = "torch.linalg.solve, torch.matrix_exp", False


def OUTPUTS(*, method: str) -> tuple[str, ...]:  # noqa: N802
    """The names of a method's results: `foh` has two factors of inputs."""
    return ("A_bar", "B_prev", "B_bar") if method == "foh" else ("A_bar", "B_bar")


def define(name: str, kernels: Kernels) -> Callable[..., tuple[Tensor, ...]]:
    """Register the operators of a stage and return its public function.

    Kernels get A, B and delta as [systems, ..], by views where that can be, and at most MOST columns of B at a time.
    """

    def run(A: Tensor, B: Tensor, delta: Tensor, method: str) -> list[Tensor]:
        results = fake(A, B, delta, method)
        batch, count, n, m = sizes_of(A, B, delta)
        if count * n == 0:
            return results
        given = flat(A, batch, 2), flat(B, batch, 2), flat(delta, batch, 0)
        A_bar, *of_b = (x.view(count, *x.shape[-2:]) for x in results)
        for columns in pieces(m):
            # A_bar is the same each time.
            parts = [x[..., columns] for x in of_b]
            previous = parts[0] if method == "foh" else absent(A.dtype, A.device)
            B_part = given[1][..., columns]
            kernels.launch(NAME, A.device, method, given[0], B_part, given[2], A_bar, previous, parts[-1])
        return results

    def fake(A: Tensor, B: Tensor, delta: Tensor, method: str) -> list[Tensor]:
        batch, _, n, m = sizes_of(A, B, delta)
        columns = (n, m, m) if method == "foh" else (n, m)
        return [operator.empty((*batch, n, count), like=A) for count in columns]

    def setup_context(ctx, inputs: tuple, output: list[Tensor]) -> None:
        A, B, delta, ctx.method = inputs
        ctx.save_for_backward(A, B, delta, output[0], output[-1])

    def differentiate(ctx, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
        *inputs, A_bar, B_bar = ctx.saved_tensors
        shapes = [A_bar.shape] + [B_bar.shape] * (len(grads) - 1)
        given = [operator.nothing(s, like=A_bar) if g is None else g for s, g in zip(shapes, grads, strict=True)]
        return *compute_backward(given, *inputs, A_bar, B_bar, ctx.method), None

    def run_backward(
        grads: list[Tensor], A: Tensor, B: Tensor, delta: Tensor, A_bar: Tensor, B_bar: Tensor, method: str
    ) -> tuple[Tensor, ...]:
        batch, count, n, m = sizes_of(A, B, delta)
        if count * n == 0:
            return tuple(torch.zeros_like(x) for x in (A, B, delta))
        given = flat(A, batch, 2), flat(B, batch, 2), flat(delta, batch, 0)
        A_bar, B_bar, g_A_bar, *of_b = (flat(x, batch, 2) for x in (A_bar, B_bar, *grads))
        dB = operator.empty((count, n, m), like=A)
        totals: list[Tensor] = []
        for columns in pieces(m):
            parts = [x[..., columns] for x in of_b]
            previous = parts[0] if method == "foh" else absent(A.dtype, A.device)
            dA, ddelta = operator.empty((count, n, n), like=A), operator.empty((count,), like=A)
            inputs = given[0], given[1][..., columns], given[2], A_bar, B_bar[..., columns]
            outputs = dA, dB[..., columns], ddelta
            kernels.launch(f"{NAME}_backward", A.device, method, *inputs, g_A_bar, previous, parts[-1], *outputs)
            totals = [x + y for x, y in zip(totals, (dA, ddelta), strict=True)] if totals else [dA, ddelta]
            g_A_bar = operator.nothing((count, n, n), like=A)  # has been taken
        found = zip((A, B, delta), (totals[0], dB, totals[1]), strict=True)
        return tuple(g if g.shape == x.shape else g.view((*batch, *g.shape[1:])).sum_to_size(x.shape) for x, g in found)

    def fake_backward(grads, A, B, delta, A_bar, B_bar, method) -> tuple[Tensor, ...]:
        return tuple(operator.empty(x.shape, like=x) for x in (A, B, delta))

    def twice(ctx, *grads: Tensor):
        raise NotImplementedError(f"stages::{name} has no second derivatives: its backward is not differentiable")

    compute_backward = operator.register(
        f"{name}_backward",
        "(Tensor[] grads, Tensor A, Tensor B, Tensor delta, Tensor A_bar, Tensor B_bar, str method)"
        " -> (Tensor, Tensor, Tensor)",
        run_backward,
        fake=fake_backward,
        backward=twice,
    )
    compute = operator.register(
        name,
        "(Tensor A, Tensor B, Tensor delta, str method) -> Tensor[]",
        run,
        fake=fake,
        setup_context=setup_context,
        backward=differentiate,
    )

    def discretize_matrix(A: Tensor, B: Tensor, delta: Tensor, *, method: str) -> tuple[Tensor, ...]:
        """The factors of h_t = A_bar h_(t-1) + B_bar u_t, for h' = A h + B u with a full A and steps of delta.

        With Z = dt A, `bilinear` is (I - Z/2)^-1 (I + Z/2) and (I - Z/2)^-1 dt B; `zoh` is e^Z and phi_1(Z) dt B; `foh`
        has phi_2(Z) dt B, and for the input before (phi_1(Z) - phi_2(Z)) dt B. A may be singular.

        Args:
            A: [..., n, n], n <= 32: a system each; float64 or float32, on a CPU or a CUDA device. Any strides, 0
                included, here and in all that follow.
            B: [..., n, m], how m inputs act on it, of A's dtype and device.
            delta: [...], a step each, likewise. The dimensions before the last two of A and B, and all of delta, are
                broadcast against each other.
            method: "bilinear", "zoh" or "foh".

        Returns:
            A_bar [..., n, n] and B_bar [..., n, m]; with "foh" A_bar, B_prev, the factor of u_(t-1), and B_bar. Of A's
            dtype and contiguous. NaN propagates; where I - Z/2 has no inverse, `bilinear` gives infinities or NaN.
            Differentiable once.

        Raises:
            TypeError: A tensor is none, is not dense, or has another dtype than those above, or method is no str.
            ValueError: There is no such method, A is not square or larger than 32, the sizes do not fit each other, or
                the devices differ.
            KernelFault: The CPU device caught the kernel doing what it may not.

        Example:
            >>> import stages, torch
            >>> A, B = torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.tensor([[0.0], [1.0]])  # a mass that is pushed
            >>> A_bar, B_bar = stages.load("discretize_matrix").discretize_matrix(A, B, torch.tensor(2.0), method="zoh")
            >>> A_bar
            tensor([[1., 2.],
                    [0., 1.]])
            >>> B_bar
            tensor([[2.],
                    [2.]])
        """
        check(A, B, delta, method=method)
        return tuple(compute(A, B, delta, method))

    return discretize_matrix


def sizes_of(A: Tensor, B: Tensor, delta: Tensor) -> tuple[tuple[int, ...], int, int, int]:
    """The dimensions that the systems have together, how many that are, n and m."""
    batch = A.shape[:-2]
    if not (batch == B.shape[:-2] and batch == delta.shape):  # of equal ones torch thinks for long
        batch = torch.broadcast_shapes(batch, B.shape[:-2], delta.shape)
    return batch, math.prod(batch), A.shape[-1], B.shape[-1]


def flat(x: Tensor, batch: tuple[int, ...], rank: int) -> Tensor:
    """As [systems, ..], the last `rank` dimensions as they are; a view where there are no more dimensions than one."""
    if len(batch) == 1 and x.dim() == rank + 1 and x.shape[0] == batch[0]:
        return x
    own = x.shape[x.dim() - rank :]
    return x.expand((*batch, *own)).reshape(math.prod(batch), *own)


def pieces(m: int) -> list[slice]:
    """The columns of B of each launch: one is needed for A_bar, too."""
    return [slice(at, at + MOST) for at in range(0, max(m, 1), MOST)]


@cache
def absent(dtype: torch.dtype, device: torch.device) -> Tensor:
    """What the kernel gets for the factor that `foh` alone has."""
    return torch.zeros((0, 0, 0), dtype=dtype, device=device)


def check(A: Tensor, B: Tensor, delta: Tensor, *, method: str) -> None:
    """Raise TypeError or ValueError, naming the argument, unless the discretization of these makes sense."""
    check_tensor(CALL, "A", A, dtypes=DTYPES)
    check_tensor(CALL, "B", B, dtypes=(A.dtype,))
    check_tensor(CALL, "delta", delta, dtypes=(A.dtype,))
    if not isinstance(method, str):
        raise TypeError(f"{CALL}: method must be a str, got {type(method).__name__}")
    if method not in METHODS:
        raise ValueError(f"{CALL}: method is {method!r}; allowed: {listing([repr(m) for m in METHODS])}")
    for name, x in (("B", B), ("delta", delta)):
        if x.device != A.device:
            raise ValueError(f"{CALL}: {name} is on {x.device}, but A is on {A.device}; allowed: the same for all")
    if A.dim() < 2 or A.shape[-1] != A.shape[-2] or A.shape[-1] > MOST:
        raise ValueError(f"{CALL}: A is {shape(A)}; allowed: (..., n, n) with n <= {MOST}")
    if B.dim() < 2 or B.shape[-2] != A.shape[-1]:
        raise ValueError(f"{CALL}: B is {shape(B)} and A is {shape(A)}; allowed: (..., n, m), here n = {A.shape[-1]}")
    try:
        sizes_of(A, B, delta)
    except RuntimeError:
        raise ValueError(
            f"{CALL}: A is {shape(A)}, B is {shape(B)} and delta is {shape(delta)}; allowed: dimensions before the "
            "last two of A and B, and all of delta, that can be broadcast against each other"
        ) from None


FASTEST = ("53_discretize_matrix",)


def choose(A: Tensor, B: Tensor, delta: Tensor, *, method: str) -> Choice:
    """There is one."""
    check(A, B, delta, method=method)
    return Choice("53_discretize_matrix", "the only one")


def make(
    sizes: Mapping[str, int],
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    seed: int = 0,
    *,
    method: str = "zoh",
) -> tuple[Tensor, Tensor, Tensor]:
    """Stable systems, each faster than the one before until they begin anew: norms of dt A from 0.01 to about 10.

    With n = 7 the rows of A are such that no elimination gets along without exchanging them, and two begin alike.
    """
    generator = torch.Generator(device).manual_seed(seed)
    count, n, m = (sizes[name] for name in SIZES)
    A = random((count, n, n), torch.float64, generator) / math.sqrt(max(n, 1)) - torch.eye(n, device=generator.device)
    delta = 10 ** (torch.arange(count, device=generator.device, dtype=torch.float64) % 7 / 3 - 2)
    if n == 7 and count:  # I - dt/2 A has zeros where the first pivots would be
        A, delta = A.roll(1, 1), torch.ones_like(delta)
        A[:, range(3), range(3)] = 2.0
        A[:, 5:, 0] = 8.0
    B = random((count, n, m), torch.float64, generator)
    return A.to(dtype), B.to(dtype), delta.to(dtype)


def reference(A: Tensor, B: Tensor, delta: Tensor, *, method: str) -> tuple[Tensor, ...]:
    """In float64: by torch's solver, and its exponential of the block matrix."""
    return incumbent(widened(A), widened(B), widened(delta), method=method)


def tolerance(sizes: Mapping[str, int], dtype: torch.dtype, *, method: str = "zoh") -> dict[str, float]:
    """How far each result may be from the truth, r = |x - ref| / |ref|: some tens of roundings.

    In float64 the reference is no better than the kernel, and where it takes an exponential, worse.
    """
    allowed = (50 if dtype is torch.float32 else 1000) * unit_roundoff(dtype)
    return dict.fromkeys(("A_bar", "B_prev", "B_bar", "A", "B", "delta"), allowed)


def incumbent(A: Tensor, B: Tensor, delta: Tensor, *, method: str) -> tuple[Tensor, ...]:
    """By torch: its solver, or the exponential of [[Z, dt B, 0], [0, 0, I], [0, 0, 0]]."""
    batch, _, n, m = sizes_of(A, B, delta)
    dt = delta[..., None, None]
    Z, input_of_step = (dt * A).expand(*batch, n, n), (dt * B).expand(*batch, n, m)
    if method == "bilinear":
        one = torch.eye(n, dtype=A.dtype, device=A.device)
        found = torch.linalg.solve(one - Z / 2, torch.cat((one + Z / 2, input_of_step), -1))
        return found[..., :n], found[..., n:]
    blocks = 2 if method == "foh" else 1
    size = n + blocks * m
    block = torch.zeros((*batch, size, size), dtype=A.dtype, device=A.device)
    block = torch.cat((torch.cat((Z, input_of_step), -1), block[..., n:, : n + m]), -2)
    block = torch.nn.functional.pad(block, (0, size - n - m))
    if method == "foh":
        shift = torch.zeros((size, size), dtype=A.dtype, device=A.device)
        shift[n : n + m, n + m :] = torch.eye(m, dtype=A.dtype, device=A.device)
        block = block + shift
    row = torch.matrix_exp(block)[..., :n, :]
    if method == "zoh":
        return row[..., :n], row[..., n:]
    return row[..., :n], row[..., n : n + m] - row[..., n + m :], row[..., n + m :]


def work(sizes: Mapping[str, int], itemsize: int, *, method: str = "zoh") -> Work:
    """An elimination, or eight products and some more for squares; A, B, delta and the results moved once."""
    count, n, m = (sizes[name] for name in SIZES)
    operations = 2 * n * n * (n + m) if method == "bilinear" else 2 * 11 * n * n * (n + m)
    results = len(OUTPUTS(method=method))
    return Work(count * operations, itemsize * count * (2 * n * n + results * n * m + n * m + 1))
