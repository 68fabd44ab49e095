"""O = s (Q K^T) V for each batch and head: attention without its softmax, with or without a causal mask.

**Gradients by the same kernel.** Write op(q, k, v; mask) for s mask(Q K^T) V. With the gradient G of O, the three
gradients are products of the same form:

    dV = s mask(Q K^T)^T G = s mask^T(K Q^T) G = op(k, q, G; mask^T)
    dQ = s mask(G V^T) K                       = op(G, v, k; mask)
    dK = s mask(G V^T)^T Q = s mask^T(V G^T) Q = op(v, G, q; mask^T)

and mask^T of "no key after the row" is "no key before it". So the operator knows three masks, none, causal and its
transpose, its backward is three calls of itself, and second derivatives exist by the same rule. A backward kernel of
its own would compute Q K^T and G V^T once and get by with 5 products; this takes 6. For that one product there is one
kernel instead of two, no atomic addition (a row of dK sums over all rows of Q, but one block owns it), so that
gradients are equal bit for bit on every run, and every operand is read where it lies, whatever its strides.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from stages.families import (
    FLOATING,
    Choice,
    Work,
    accumulator,
    check_fellow,
    check_tensor,
    random,
    shape,
    unit_roundoff,
)
from stages.toolkit import operator
from stages.toolkit.kernels import Kernels

NAME = "qkv"
CALL = "qkv(q, k, v, *, scale=None, causal=False)"
SIZES = ("B", "N", "T", "Dk", "Dv")
PROBLEMS = (
    (1, 2, 128, 64, 64),
    (2, 3, 70, 33, 65),
    (1, 1, 3, 5, 130),
    (1, 1, 1, 1, 1),
    (1, 2, 3, 0, 5),
    (2, 1, 0, 4, 4),
)
XRAY = (1, 2, 128, 64, 64)
BENCH = {"cpu": ((1, 2, 256, 64, 64),), "cuda": ((4, 16, 2048, 64, 64), (4, 16, 2048, 128, 128))}
DTYPES = FLOATING
INCUMBENT = "two torch.matmul"

NONE, CAUSAL, ANTICAUSAL = range(3)  # the masks, as the kernels number them: all keys, j <= t, j >= t
TRANSPOSED = (NONE, ANTICAUSAL, CAUSAL)


def launch(kernels: Kernels, q: Tensor, k: Tensor, v: Tensor, o: Tensor, scale: float, *mask: int) -> None:
    """One launch that needs no other memory: what a stage's kernel is, unless its `stage.py` says otherwise."""
    kernels.launch(NAME, o.device, q, k, v, o, scale, *mask)


def define(
    name: str, kernels: Kernels, *, launch: Callable = launch, masks: bool = False, no_gradients: str = ""
) -> Callable[..., Tensor]:
    """Register the operator of a stage and return its public function.

    Args:
        launch: How the stage's kernels are launched, `launch(kernels, q, k, v, o, scale)`, with the mask's number at
            the end where `masks` is set.
        masks: Whether the kernels know masks.
        no_gradients: For a stage without a backward, where to find one.
    """
    signature = "(Tensor q, Tensor k, Tensor v, float? scale=None" + (", int mask=0" if masks else "") + ") -> Tensor"

    def run(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, *mask: int) -> Tensor:
        o = allocate(q, k, v)
        launch(kernels, q, k, v, o, resolved(scale, q), *(mask or (NONE,) * masks))
        return o

    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        if no_gradients:
            raise NotImplementedError(f"stages::{name} has no backward; {no_gradients}")
        q, k, v = ctx.saved_tensors
        scale, mask, turned = ctx.scale, ctx.mask, tuple(TRANSPOSED[m] for m in ctx.mask)
        grad_q = product(grad, v, k, scale, *mask) if ctx.needs_input_grad[0] else None
        grad_k = product(v, grad, q, scale, *turned) if ctx.needs_input_grad[1] else None
        grad_v = product(k, q, grad, scale, *turned) if ctx.needs_input_grad[2] else None
        return grad_q, grad_k, grad_v, None, *(None for _ in mask)

    product = operator.register(name, signature, run, fake=allocate, setup_context=save, backward=backward)

    def qkv(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, causal: bool = False) -> Tensor:
        """Attention without its softmax, O = scale (Q K^T) V for each batch and head, summed in float32.

        O[b, n, t] is the sum over all j of scale (q[b, n, t] . k[b, n, j]) v[b, n, j]; with `causal`, over j <= t.
        float64 is summed in float64.

        Args:
            q: [B, N, T, Dk], float64, float32, float16 or bfloat16, on a CPU or a CUDA device. Any strides; nothing is
                copied, so heads may come as `x.view(B, T, N, Dk).transpose(1, 2)` of a projection x.
            k: [B, N, T, Dk], of the same dtype and on the same device.
            v: [B, N, T, Dv], likewise.
            scale: A real number, by default 1 / sqrt(Dk). It is a constant: no gradient is given for it.
            causal: Leave out what lies in the future, j > t. Stage 23 knows it.

        Returns:
            O, [B, N, T, Dv], contiguous, of the same dtype; zeros where Dk is 0. NaN and infinity propagate; one in a
            row of v also reaches those earlier rows of O that share its tile (weight 0 times NaN is NaN), one in a
            hidden row of k does not. Differentiable any number of times, for q, k and v, but in stage 21.

        Raises:
            TypeError: An argument is no tensor, is not dense, or has another dtype than those above or than its
                fellows, or scale is no real number.
            ValueError: A tensor is not four-dimensional, the sizes do not fit each other, or the devices differ.
            NotImplementedError: The stage leaves out what is asked for. The text names the stage that has it.
            KernelFault: The CPU device caught the kernel doing what it may not.

        Example:
            >>> import stages, torch
            >>> q, k, v = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]]), torch.tensor([[1.0], [10.0]])
            >>> stages.load("qkv_causal").qkv(*(x[None, None] for x in (q, k, v)), causal=True).flatten()
            tensor([ 3., 86.])
        """
        check(q, k, v, scale)
        if not causal:
            return product(q, k, v, scale)
        if not masks:
            raise NotImplementedError(f"{CALL}: {name} has no causal=True; stage 23 has it: stages.load('23').qkv")
        return product(q, k, v, scale, CAUSAL)

    return qkv


def check(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> None:
    """Raise TypeError or ValueError, naming the argument, unless s (Q K^T) V makes sense."""
    check_tensor(CALL, "q", q, rank=4)
    check_fellow(CALL, "k", k, "q", q, rank=4)
    check_fellow(CALL, "v", v, "q", q, rank=4)
    if k.shape != q.shape:
        raise ValueError(
            f"{CALL}: k is {shape(k)} and q is {shape(q)}; allowed: the same shape for both, (B, N, T, Dk)"
        )
    if v.shape != q.shape and v.shape[:3] != q.shape[:3]:
        raise ValueError(f"{CALL}: v is {shape(v)} and q is {shape(q)}; allowed: the same B, N and T in both")
    if scale is not None and (not isinstance(scale, (float, int, torch.SymFloat)) or isinstance(scale, bool)):
        raise TypeError(f"{CALL}: scale must be a real number (float or int) or None, got {type(scale).__name__}")


FASTEST = ("22_qkv_fused", "23_qkv_causal")


def choose(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, causal: bool = False) -> Choice:
    """By the mask alone.

    Without one stage 20 is as fast or, with heads of 128 in float32 on an H100, 7 % faster than stage 22; but it takes
    B N T^2 words of memory for S.
    """
    check(q, k, v, scale)
    if causal:
        return Choice("23_qkv_causal", "what the mask hides is skipped")
    return Choice("22_qkv_fused", "no mask; S stays on the chip")


def resolved(scale: float | None, q: Tensor) -> float:
    """The scale, or its default, 1 / sqrt(Dk)."""
    return max(q.shape[3], 1) ** -0.5 if scale is None else scale


def allocate(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, mask: int = NONE) -> Tensor:
    """O, [B, N, T, Dv], its values still to come."""
    batch, heads, seq, _ = q.shape
    return operator.empty((batch, heads, seq, v.shape[3]), like=q)


def save(ctx, inputs: tuple, output: Tensor) -> None:
    q, k, v, scale, *mask = inputs
    ctx.save_for_backward(q, k, v)
    ctx.scale, ctx.mask = resolved(scale, q), mask


def make(
    sizes: Mapping[str, int], dtype: torch.dtype, device: str | torch.device = "cpu", seed: int = 0, **options: object
) -> tuple[Tensor, Tensor, Tensor]:
    """Normal q, k and v."""
    generator = torch.Generator(device).manual_seed(seed)
    rows = tuple(sizes[name] for name in ("B", "N", "T"))
    return tuple(random((*rows, sizes[width]), dtype, generator) for width in ("Dk", "Dk", "Dv"))


def reference(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, causal: bool = False) -> Tensor:
    """s (Q K^T) V in float64."""
    weights = resolved(scale, q) * (q.double() @ k.double().mT)
    return (weights.tril() if causal else weights) @ v.double()


def tolerance(
    sizes: Mapping[str, int], dtype: torch.dtype, *, scale: float | None = None, causal: bool = False
) -> dict[str, float]:
    """How far each result may be from the truth, r = |x - ref| / |ref|.

    Two sums in float32, the second over the first one's results, stay within 1e-6 sqrt(K) / 8 with the K terms of both
    (float64: by as much less as its rounding is finer); a result of 16 bits adds its own rounding.
    """
    first, last = sizes["Dk"] + sizes["T"], sizes["Dv"] + sizes["T"]
    finer = unit_roundoff(accumulator(dtype)) / unit_roundoff(torch.float32)
    rounding = unit_roundoff(dtype) if dtype is not accumulator(dtype) else 0.0
    terms = {"output": first, "q": last, "k": last, "v": first}
    return {name: rounding + finer * 1e-6 * max(count, 1) ** 0.5 / 8 for name, count in terms.items()}


def incumbent(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, causal: bool = False) -> Tensor:
    weights = resolved(scale, q) * torch.matmul(q, k.mT)
    return torch.matmul(weights.tril() if causal else weights, v)


def work(sizes: Mapping[str, int], itemsize: int, *, scale: float | None = None, causal: bool = False) -> Work:
    """A multiplication and an addition for Dk + Dv terms of each pair of a row and a key; each tensor moved once."""
    batch, heads, seq, dk, dv = (sizes[name] for name in SIZES)
    pairs = seq * (seq + 1) // 2 if causal else seq * seq
    return Work(2 * batch * heads * pairs * (dk + dv), itemsize * batch * heads * seq * 2 * (dk + dv))
