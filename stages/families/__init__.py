"""Families: one function each, which all stages of the family compute in their own way and by one signature.

A family is a module of this package with these names:

    NAME, CALL      the function's name, and how its signature reads in an error: "matmul", "matmul(a, b)"
    SIZES           names of the sizes that make a problem: ("M", "N", "K")
    PROBLEMS        sizes that `run` checks, an odd one among them;  XRAY and BENCH: what `xray` and `bench` look at
    DTYPES          what its kernels take
    define(name, kernels)                   registers the operator of a stage, returns the public function; takes by
                                            keyword what stages of the family declare of their kernels
    make(sizes, dtype, device, seed)        random arguments for a problem
    reference(*arguments)                   the truth, in float64 on the given (rounded) arguments
    tolerance(sizes, dtype)                 how far from it a result may be: r = |x - ref| / |ref|, and gradients alike
    incumbent(*arguments), INCUMBENT        what a user would call instead, and its name
    OUTPUTS         if the function gives several tensors: their names, as keys of the tolerances ("output", if one); a
                    function of the options where they depend on these
    COMPILED        true of a family whose incumbent `bench` compiles; it then measures the backward, too
    BACKWARD        true of a family of which it does so without compiling anything
    work(sizes, itemsize)                   floating-point operations and bytes that no kernel can avoid
    SWEEP, backward_work                    if they are there: like BENCH, what stages are compared at, with one size
                                            growing; like `work`, of the backward alone
    make_long(dtype, device), LONG          if they are there: arguments on which rounding errors add up, and gradients
                                            of the results; what they are, in words. For the README's table of errors
    choose(*arguments), FASTEST             the stage that is the fastest for the arguments, and why, as a Choice; the
                                            names of all stages that it may give. It checks the arguments first.

All but `define` get the function's keyword options, those of `Stage.options`, as keywords.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
COMPLEX = (torch.complex128, torch.complex64)


class Work(NamedTuple):
    """What a problem costs at the least: floating-point operations, and bytes from and to memory."""

    operations: int
    bytes: int


class Choice(NamedTuple):
    """The stage that is the fastest for the arguments of a call, and why."""

    stage: str  # "41_scan_pipelined"
    reason: str


def check_tensor(
    call: str, name: str, value: object, rank: int | None = None, dtypes: Sequence[torch.dtype] = FLOATING
) -> None:
    """Raise TypeError or ValueError unless `value` is a dense tensor of that rank and dtype on a known device."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{call}: {name} must be a torch.Tensor, got {type(value).__name__}")
    if value.layout is not torch.strided:
        raise TypeError(f"{call}: {name} has layout {value.layout}; allowed: torch.strided (call .to_dense() first)")
    if value.dtype not in dtypes:
        raise TypeError(f"{call}: {name} has dtype {value.dtype}; allowed: {listing(dtypes)}")
    if not (value.is_cpu or value.is_cuda or value.is_meta):
        raise ValueError(f"{call}: {name} is on device {value.device}; allowed: cpu, cuda")
    if rank is not None and value.dim() != rank:
        plural = "" if value.dim() == 1 else "s"
        raise ValueError(f"{call}: {name} has {value.dim()} dimension{plural} {shape(value)}; allowed: {rank}")


def check_alike(call: str, name: str, value: Tensor, other_name: str, other: Tensor) -> None:
    """Raise TypeError or ValueError unless two tensors share dtype and device."""
    if value.dtype is not other.dtype:
        raise TypeError(
            f"{call}: {name} has dtype {value.dtype}, but {other_name} has {other.dtype}; allowed: the same for both"
        )
    if value.device != other.device:
        raise ValueError(
            f"{call}: {name} is on {value.device}, but {other_name} is on {other.device}; allowed: the same for both"
        )


def check_fellow(
    call: str,
    name: str,
    value: object,
    other_name: str,
    other: Tensor,
    rank: int,
    dtypes: Sequence[torch.dtype] = FLOATING,
) -> None:
    """`check_tensor` and `check_alike` in one, for a tensor beside one that was checked; quick where all is well."""
    if (
        isinstance(value, Tensor)
        and value.dtype is other.dtype
        and value.device == other.device
        and value.layout is torch.strided
        and value.dim() == rank
    ):
        return
    check_tensor(call, name, value, rank, dtypes)
    check_alike(call, name, value, other_name, other)


def listing(items: Sequence[object]) -> str:
    """The items as a phrase, "a, b or c"."""
    words = [str(item) for item in items]
    return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]


def shape(tensor: Tensor) -> str:
    """The shape as an error shows it, "(2, 3)"."""
    return str(tuple(tensor.shape))


def random(size: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Normal values on the generator's device, the same but for rounding in every dtype."""
    return torch.randn(*size, generator=generator, dtype=torch.float64, device=generator.device).to(dtype)


def widened(x: Tensor) -> Tensor:
    """The same values in float64, or in complex128 if they are complex."""
    return x.to(torch.complex128) if x.is_complex() else x.double()


def unit_roundoff(dtype: torch.dtype) -> float:
    """The largest relative error of rounding a value to the dtype, half the distance to its neighbour."""
    return torch.finfo(dtype).eps / 2


def block_memory(device: torch.device) -> int:
    """Bytes of shared memory that a block may have on a GPU; on the CPU device as many as on an H100."""
    if device.type != "cuda":
        return 227 << 10
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """What sums are kept in: float64 for float64, float32 for all others."""
    return torch.float64 if dtype is torch.float64 else torch.float32
