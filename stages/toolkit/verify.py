"""Comparison of a stage with its family's float64 reference, forward and backward."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType

import torch
from torch import Tensor

from stages.families import widened
from stages.toolkit.stage import Stage


@dataclass(frozen=True)
class Result:
    """How far one output or gradient is from the truth."""

    what: str  # "output", or a name where there are several, or "gradient of a"
    dtype: torch.dtype
    sizes: dict[str, int]
    error: float
    tolerance: float
    options: dict[str, object] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance  # false for NaN, too


def relative_error(result: Tensor, reference: Tensor) -> float:
    """r = |x - ref| / |ref|, over all elements. NaN if either has one; 0 where both are zero or empty."""
    difference = (widened(result) - reference).norm().item()
    return difference / reference.norm().item() if reference.any() else difference


def outputs(result: Tensor | tuple) -> tuple[Tensor, ...]:
    """What a function gives, as one tuple, also if it is a single tensor or has tuples inside."""
    if isinstance(result, Tensor):
        return (result,)
    return tuple(x for part in result for x in outputs(part))


def output_names(family: ModuleType, options: Mapping[str, object]) -> tuple[str, ...]:
    """What a family's results are called, which may depend on the options."""
    names = getattr(family, "OUTPUTS", ("output",))
    return names(**options) if callable(names) else names


def verify(
    stage: Stage,
    sizes: Mapping[str, int],
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    seed: int = 0,
    options: Mapping[str, object] | None = None,
) -> list[Result]:
    """Run the stage on a random problem and compare its output and its gradients with the float64 reference.

    The reference is evaluated on the rounded inputs, so that only the kernel's own error counts.
    """
    family, options = stage.family, dict(options or {})
    arguments = family.make(sizes, dtype, device, seed, **options)
    names = list(inspect.signature(stage.function).parameters)[: len(arguments)]  # options come after them

    # The same arguments twice: for the kernel, and in float64 for the reference.
    given = [x.detach().requires_grad_() if isinstance(x, Tensor) else x for x in arguments]
    truth = [widened(x.detach()).requires_grad_() if isinstance(x, Tensor) else x for x in arguments]
    results, expected = outputs(stage.function(*given, **options)), outputs(family.reference(*truth, **options))
    tolerance = family.tolerance(sizes, dtype, **options)
    kinds = output_names(family, options)
    pairs = [(kind, kind, x.detach(), ref.detach()) for kind, x, ref in zip(kinds, results, expected, strict=True)]
    if stage.gradients:
        generator = torch.Generator(results[0].device).manual_seed(seed + 1)
        grads = [
            torch.randn(x.shape, generator=generator, dtype=ref.dtype, device=x.device).to(x.dtype)
            for x, ref in zip(results, expected, strict=True)
        ]
        torch.autograd.backward(results, grads)
        torch.autograd.backward(expected, [widened(grad) for grad in grads])
        pairs += [
            (f"gradient of {name}", name, x.grad, ref.grad)
            for name, x, ref in zip(names, given, truth, strict=True)
            if isinstance(x, Tensor)
        ]
    return [
        Result(what, dtype, dict(sizes), relative_error(x, ref), tolerance[key], options) for what, key, x, ref in pairs
    ]
