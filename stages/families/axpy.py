"""out = alpha x + y, the smallest kernel worth writing."""

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
    random,
    shape,
    unit_roundoff,
)
from stages.toolkit import operator
from stages.toolkit.kernels import Kernels

NAME = "axpy"
CALL = "axpy(alpha, x, y)"
SIZES = ("N",)
PROBLEMS = ((1024,), (1000,), (33,), (1,), (0,))
XRAY = (1024,)
BENCH = {"cpu": ((1 << 20,),), "cuda": ((1 << 20,), (1 << 24,), (1 << 28,))}
DTYPES = FLOATING
INCUMBENT = "torch.add(y, x, alpha=alpha)"


def define(name: str, kernels: Kernels) -> Callable[[float, Tensor, Tensor], Tensor]:
    """Register the operator of a stage and return its public function."""

    def run(alpha: float, x: Tensor, y: Tensor) -> Tensor:
        out = allocate(alpha, x, y)
        kernels.launch(NAME, out.device, alpha, flat(x), flat(y), flat(out))
        return out

    combine = operator.register(
        name, "(float alpha, Tensor x, Tensor y) -> Tensor", run, fake=allocate, setup_context=save, backward=backward
    )

    def axpy(alpha: float, x: Tensor, y: Tensor) -> Tensor:
        """A scaled sum, out = alpha x + y, element by element, computed in float32 (in float64 for float64).

        Args:
            alpha: A real number. It is a constant: no gradient is given for it.
            x: Any shape, float64, float32, float16 or bfloat16, on a CPU or a CUDA device. Any strides; what cannot be
                seen as one dimension is copied first.
            y: Of the same shape, dtype and device. Nothing is broadcast; use `y.expand_as(x)`.

        Returns:
            A new, contiguous tensor. NaN and infinity propagate.
            Differentiable any number of times, for x and y.

        Raises:
            TypeError: alpha is no real number, or a tensor is none, is not dense, or has another dtype than those above
                or than its fellow.
            ValueError: The shapes or the devices differ.
            KernelFault: The CPU device caught the kernel doing what it may not.

        Example:
            >>> import stages, torch
            >>> stages.load("axpy").axpy(2.0, torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0]))
            tensor([12., 24.])
        """
        check(alpha, x, y)
        return combine(alpha, x, y)

    return axpy


def check(alpha: float, x: Tensor, y: Tensor) -> None:
    """Raise TypeError or ValueError, naming the argument, unless alpha x + y makes sense."""
    if not isinstance(alpha, (float, int)) or isinstance(alpha, bool):
        raise TypeError(f"{CALL}: alpha must be a real number (float or int), got {type(alpha).__name__}")
    check_tensor(CALL, "x", x)
    check_tensor(CALL, "y", y)
    check_alike(CALL, "y", y, "x", x)
    if x.shape != y.shape:
        raise ValueError(
            f"{CALL}: x is {shape(x)} and y is {shape(y)}; allowed: the same shape for both (expand_as broadcasts)"
        )


FASTEST = ("00_axpy",)


def choose(alpha: float, x: Tensor, y: Tensor) -> Choice:
    """There is one."""
    check(alpha, x, y)
    return Choice("00_axpy", "the only one")


def allocate(alpha: float, x: Tensor, y: Tensor) -> Tensor:
    """The output, contiguous, its values still to come."""
    return operator.empty(x.shape, like=x)


def flat(x: Tensor) -> Tensor:
    """One dimension, as the kernel wants it: a view where the strides allow it, otherwise a copy."""
    return x if x.dim() == 1 else x.reshape(-1)


def save(ctx, inputs: tuple[float, Tensor, Tensor], output: Tensor) -> None:
    ctx.alpha = inputs[0]


def backward(ctx, grad: Tensor) -> tuple[None, Tensor | None, Tensor | None]:
    return (
        None,
        grad * ctx.alpha if ctx.needs_input_grad[1] else None,
        grad if ctx.needs_input_grad[2] else None,
    )


def make(
    sizes: Mapping[str, int], dtype: torch.dtype, device: str | torch.device = "cpu", seed: int = 0, **options: object
) -> tuple[float, Tensor, Tensor]:
    """alpha = 1.25, exact in every dtype, and normal x and y of the same sign, so that no sum cancels."""
    generator = torch.Generator(device).manual_seed(seed)
    x, y = (random((sizes["N"],), dtype, generator) for _ in range(2))
    return 1.25, x, y.copysign(x)


def reference(alpha: float, x: Tensor, y: Tensor) -> Tensor:
    """alpha x + y in float64, for the alpha that the kernel sees, rounded to what it computes in."""
    return torch.tensor(alpha, dtype=accumulator(x.dtype)).double().item() * x.double() + y.double()


def tolerance(sizes: Mapping[str, int], dtype: torch.dtype) -> dict[str, float]:
    """How far each result may be from the truth, r = |x - ref| / |ref|.

    Two roundings, of the product and of the sum, in what is computed in (|alpha x| <= |alpha x + y|, as x and y have
    the same sign); the result's own where it has 16 bits; and for float64 those two of the reference, which is no
    better. The gradients round once or not at all.
    """
    rounding = unit_roundoff(dtype) if dtype is not accumulator(dtype) else 0.0
    roundings = 4 if dtype is torch.float64 else 2
    return dict.fromkeys(("output", "x", "y"), rounding + roundings * unit_roundoff(accumulator(dtype)))


def incumbent(alpha: float, x: Tensor, y: Tensor) -> Tensor:
    return torch.add(y, x, alpha=alpha)


def work(sizes: Mapping[str, int], itemsize: int) -> Work:
    """A multiplication and an addition an element; two elements read and one written."""
    return Work(2 * sizes["N"], 3 * itemsize * sizes["N"])
