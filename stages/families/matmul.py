"""C = A B, the product of two matrices."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from stages.families import (
    FLOATING,
    Choice,
    Work,
    accumulator,
    block_memory,
    check_alike,
    check_tensor,
    random,
    shape,
    unit_roundoff,
)
from stages.toolkit import operator
from stages.toolkit.kernels import Kernels

NAME = "matmul"
CALL = "matmul(a, b, *, tf32=False)"
SIZES = ("M", "N", "K")
PROBLEMS = ((64, 48, 80), (33, 31, 127), (1, 1, 1), (5, 7, 0))
XRAY = (64, 64, 64)
BENCH = {"cpu": ((256, 256, 256),), "cuda": tuple((n, n, n) for n in (1024, 4096, 8192))}
DTYPES = FLOATING
INCUMBENT = "torch.matmul"


def define(
    name: str, kernels: Kernels, *, tensor_cores: bool = False, copy_engine: bool = False
) -> Callable[..., Tensor]:
    """Register the operator of a stage and return its public function.

    Args:
        tensor_cores: Whether the kernels multiply on tensor cores: 16-bit types, and float32 as TF32.
        copy_engine: Whether they have operands copied in boxes: 16-bit types alone, whose rows are aligned.
    """

    output = allocate_aligned if copy_engine else allocate

    def run(a: Tensor, b: Tensor) -> Tensor:
        c = output(a, b)
        kernels.launch(NAME, c.device, a, b, c)
        return c

    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        # dA = dC B^T and dB = A^T dC, by the same kernel: it takes any strides, so a transpose is a view.
        a, b = ctx.saved_tensors
        if copy_engine and not has_aligned_rows(grad):
            grad = grad.contiguous()  # the gradient of a sum, say, which is one number
        grad_a = product(grad, b.mT) if ctx.needs_input_grad[0] else None
        grad_b = product(a.mT, grad) if ctx.needs_input_grad[1] else None
        return grad_a, grad_b

    product = operator.register(
        name, "(Tensor a, Tensor b) -> Tensor", run, fake=output, setup_context=save, backward=backward
    )

    def matmul(a: Tensor, b: Tensor, *, tf32: bool = False) -> Tensor:
        """The matrix product C[m, n] = sum over k of A[m, k] B[k, n], summed in float32 (in float64 for float64).

        Args:
            a: [M, K], float64, float32, float16 or bfloat16, on a CPU or a CUDA device. Any strides; nothing is copied.
                Stage 16 takes float16 and bfloat16 whose rows, or columns, are contiguous and begin at multiples of 16
                bytes, and K and N that are multiples of 8; C's gradient it copies where that has other strides.
            b: [K, N], of the same dtype and on the same device.
            tf32: Round float32 to TF32 first, to 10 bits of mantissa instead of 23, and multiply on the tensor cores.
                Stage 15 does, and takes float32 in no other way; the stages before it multiply what they are given.

        Returns:
            C, [M, N], contiguous, of the same dtype; zeros where K is 0. NaN and infinity propagate.
            Differentiable any number of times, for both arguments.

        Raises:
            TypeError: An argument is no tensor, is not dense, or has another dtype than those above or than its fellow.
            ValueError: An argument is not two-dimensional, the inner sizes differ, the devices differ, or tf32 is asked
                for another dtype than float32.
            NotImplementedError: The stage leaves out the dtype, the option, or the layout. The text names the stage
                that has it.
            KernelFault: The CPU device caught the kernel doing what it may not.

        Example:
            >>> import stages, torch
            >>> stages.load("matmul_naive").matmul(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0], [4.0]]))
            tensor([[11.]])
        """
        check(a, b, tf32)
        if copy_engine:
            check_boxes(name, a, b, tf32)
        else:
            check_precision(name, tensor_cores, a.dtype, tf32)
        return product(a, b)

    return matmul


def check(a: Tensor, b: Tensor, tf32: bool = False) -> None:
    """Raise TypeError or ValueError, naming the argument, unless a and b can be multiplied."""
    check_tensor(CALL, "a", a, rank=2)
    check_tensor(CALL, "b", b, rank=2)
    check_alike(CALL, "b", b, "a", a)
    if a.shape[1] != b.shape[0]:
        raise ValueError(
            f"{CALL}: a is {shape(a)} and b is {shape(b)}; allowed: as many columns in a as rows in b "
            f"(got {a.shape[1]} and {b.shape[0]})"
        )
    if tf32 and a.dtype is not torch.float32:
        raise ValueError(f"{CALL}: tf32=True rounds float32, but a has {a.dtype}; allowed: tf32=False")


def check_precision(name: str, tensor_cores: bool, dtype: torch.dtype, tf32: bool) -> None:
    """Raise NotImplementedError unless a stage multiplies this dtype in this way."""
    if tf32 and not tensor_cores:
        raise NotImplementedError(f"{CALL}: stage {name} has no tf32=True; stage 15 (matmul_tensor) has it")
    if tensor_cores and dtype is torch.float32 and not tf32:
        raise NotImplementedError(
            f"{CALL}: stage {name} multiplies float32 only with tf32=True; "
            "stage 14 (matmul_pipelined) keeps all its bits"
        )
    if tensor_cores and dtype is torch.float64:
        raise NotImplementedError(
            f"{CALL}: stage {name} takes float16, bfloat16, and float32 with tf32=True, but a has {dtype}; "
            "stage 14 (matmul_pipelined) takes it"
        )


def check_boxes(name: str, a: Tensor, b: Tensor, tf32: bool) -> None:
    """Raise NotImplementedError unless the copy engine takes a and b in boxes, as they lie, and C and the gradients."""
    if a.dtype not in (torch.float16, torch.bfloat16):
        other = "stage 15 (matmul_tensor) takes it" if tf32 else "stage 14 (matmul_pipelined) takes it"
        raise NotImplementedError(f"{CALL}: stage {name} takes float16 and bfloat16, but a has {a.dtype}; {other}")
    for what, size in (("K", a.shape[1]), ("N", b.shape[1])):
        if size % 8:
            raise NotImplementedError(
                f"{CALL}: stage {name} takes {what} that are multiples of 8, so that all rows begin at multiples of 16 "
                f"bytes, but {what} is {size}; stage 15 (matmul_tensor) takes any"
            )
    for argument, x in (("a", a), ("b", b)):
        if not has_aligned_rows(x):
            raise NotImplementedError(
                f"{CALL}: stage {name} takes rows or columns that are contiguous and begin at multiples of 16 bytes, "
                f"but {argument} is {shape(x)} with strides {tuple(x.stride())} and offset {x.storage_offset()}; "
                "stage 15 (matmul_tensor) takes any"
            )


def has_aligned_rows(x: Tensor) -> bool:
    """Are the rows or the columns of a matrix contiguous, and does each begin at a multiple of 16 bytes?"""
    if not x.numel():
        return True
    wide = 16 // x.itemsize
    if not torch.compiler.is_compiling() and x.storage_offset() % wide:  # the launcher looks at addresses themselves
        return False
    return any(
        (x.stride(along) == 1 or x.shape[along] == 1)
        and (x.shape[1 - along] == 1 or (x.stride(1 - along) % wide == 0 and x.stride(1 - along) > 0))
        for along in (1, 0)
    )


FASTEST = ("14_matmul_pipelined", "15_matmul_tensor", "16_matmul_hopper")
TENSOR_MEMORY = 144 << 10  # bytes of shared memory of a block of stage 15


def choose(a: Tensor, b: Tensor, *, tf32: bool = False) -> Choice:
    """Tensor cores where they take the type; on a Hopper its own instructions where rows are aligned for them.

    How much faster each is, the chapter's table in the README tells. Of what was tried stage 16 is slower than stage 15
    only where N is much smaller than its tiles of 256 columns and M is large.
    """
    check(a, b, tf32)
    if tf32:
        return Choice("15_matmul_tensor", "tensor cores take float32 as TF32")
    if a.dtype is torch.float32 or a.dtype is torch.float64:
        return Choice("14_matmul_pipelined", "tensor cores would not keep all bits")
    if is_hopper(a.device) and go_in_boxes(a, b):
        return Choice("16_matmul_hopper", "a Hopper's copy engine takes the rows as they lie")
    if block_memory(a.device) < TENSOR_MEMORY:
        return Choice("14_matmul_pipelined", "a block has too little shared memory on this card for stage 15")
    return Choice("15_matmul_tensor", "tensor cores take the type")


def is_hopper(device: torch.device) -> bool:
    """Is it a GPU that stage 16 is compiled for?"""
    if device.type != "cuda":
        return False
    card = torch.cuda.get_device_properties(device)
    return (card.major, card.minor) == (9, 0)


def go_in_boxes(a: Tensor, b: Tensor) -> bool:
    """Is it certain that stage 16 takes them? Not while torch compiles: it does not say where memory begins."""
    whole = a.shape[1] % 8 == 0 and b.shape[1] % 8 == 0
    return not torch.compiler.is_compiling() and whole and has_aligned_rows(a) and has_aligned_rows(b)


def allocate(a: Tensor, b: Tensor) -> Tensor:
    """C, [M, N], its values still to come."""
    return operator.empty((a.shape[0], b.shape[1]), like=a)


def allocate_aligned(a: Tensor, b: Tensor) -> Tensor:
    """The same in rows that begin at multiples of 16 bytes. N is no multiple of 8 in gradients of gradients alone."""
    m, n = a.shape[0], b.shape[1]
    return operator.empty((m, n + -n % 8), like=a)[:, :n]


def save(ctx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def make(
    sizes: Mapping[str, int], dtype: torch.dtype, device: str | torch.device = "cpu", seed: int = 0, **options: object
) -> tuple[Tensor, Tensor]:
    """Normal A and B."""
    generator = torch.Generator(device).manual_seed(seed)
    a = random((sizes["M"], sizes["K"]), dtype, generator)
    b = random((sizes["K"], sizes["N"]), dtype, generator)
    return a, b


def reference(a: Tensor, b: Tensor, tf32: bool = False) -> Tensor:
    """A B in float64, of the values as they are given."""
    return a.double() @ b.double()


def tolerance(sizes: Mapping[str, int], dtype: torch.dtype, tf32: bool = False) -> dict[str, float]:
    """How far each result may be from the truth, r = |x - ref| / |ref|.

    A sum of K terms in float32 stays within 1e-6 sqrt(K) / 8 (float64: by as much less as its rounding is finer); a
    result of 16 bits adds its own rounding, TF32 that of both factors. The gradients are sums over N and M.
    """
    sums = {"output": sizes["K"], "a": sizes["N"], "b": sizes["M"]}
    finer = unit_roundoff(accumulator(dtype)) / unit_roundoff(torch.float32)
    rounding = unit_roundoff(dtype) if dtype is not accumulator(dtype) else 2 * 2.0**-11 if tf32 else 0.0
    return {name: rounding + finer * 1e-6 * max(terms, 1) ** 0.5 / 8 for name, terms in sums.items()}


def incumbent(a: Tensor, b: Tensor, tf32: bool = False) -> Tensor:
    return torch.matmul(a, b)


def work(sizes: Mapping[str, int], itemsize: int, tf32: bool = False) -> Work:
    """A multiplication and an addition for each of M N K terms; each matrix moved once."""
    m, n, k = (sizes[name] for name in SIZES)
    return Work(2 * m * n * k, itemsize * (m * k + k * n + m * n))
