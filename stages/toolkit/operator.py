"""Registration of PyTorch operators from Python.

`torch.library.Library` and not `torch.library.custom_op`: a call through the latter costs about 6 us more, which a
small problem feels.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

_library = torch.library.Library("stages", "FRAGMENT")


def empty(shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An output or scratch memory on the device of `like`, in its dtype or another, its values left to the kernel.

    Every family allocates here and nowhere else, so that a test can have all outputs filled with NaN before the call.
    """
    # Sizes one by one: a torch.Size takes torch twice as long to read. Of none it asks for a shape.
    sizes = shape or ((),)
    return like.new_empty(*sizes) if dtype is None else like.new_empty(*sizes, dtype=dtype)


def zeros(shape: Sequence[int], like: Tensor, dtype: torch.dtype) -> Tensor:
    """Scratch memory that a kernel finds filled with zeros, on the device of `like`."""
    return like.new_zeros(*(shape or ((),)), dtype=dtype)


def nothing(shape: Sequence[int], like: Tensor) -> Tensor:
    """The gradient of a result that no loss depends on: one 0, expanded."""
    return like.new_zeros(()).expand(shape)


def poisoned(shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """What tests put in place of `empty`: NaN, or the least whole number: what is not written shows."""
    dtype = dtype or like.dtype
    whole = not (dtype.is_floating_point or dtype.is_complex)
    return like.new_full(shape, torch.iinfo(dtype).min if whole else float("nan"), dtype=dtype)


def register(
    name: str,
    signature: str,
    run: Callable,
    *,
    fake: Callable,
    setup_context: Callable | None = None,
    backward: Callable | None = None,
) -> Callable:
    """Register the operator `stages::<name>` for CPU and CUDA tensors and return it.

    Args:
        name: The operator's name, `matmul_shared`.
        signature: Its schema without the name, `(Tensor a, Tensor b) -> Tensor`.
        run: Allocates the outputs and launches the kernel.
        fake: Gives outputs of the right shape, dtype and device without computing them.
        setup_context, backward: As in `torch.library.register_autograd`. `backward` should call operators that are
            differentiable themselves, so that second derivatives exist.
    """
    _library.define(name + signature, tags=(torch.Tag.pt2_compliant_tag,))
    for device in ("CPU", "CUDA"):
        _library.impl(name, run, device)
    torch.library.register_fake(f"stages::{name}", fake, lib=_library)
    registered = getattr(torch.ops.stages, name).default
    if backward is None:
        return registered
    torch.library.register_autograd(f"stages::{name}", backward, setup_context=setup_context, lib=_library)

    def call(*arguments: object) -> object:
        # The autograd layer of an operator from Python costs 4 us a call: past it where there is nothing to record.
        if torch.compiler.is_compiling() or (torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments)):
            return registered(*arguments)
        if forward_ad._current_level >= 0 and any(map(_has_tangent, arguments)):  # torch would drop it in silence
            raise NotImplementedError(f"stages::{name} has no forward-mode derivative (jvp); use backward()")
        with torch._C._AutoDispatchBelowAutograd():
            return registered(*arguments)

    return call


def _has_tangent(argument: object) -> bool:
    return isinstance(argument, Tensor) and forward_ad.unpack_dual(argument).tangent is not None
