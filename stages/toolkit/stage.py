"""A stage: one kernel, the operator that runs it, and what is declared about it."""

import difflib
import importlib
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from stages.toolkit import build, header, xray
from stages.toolkit.errors import NotAvailable, StageNotFound
from stages.toolkit.kernels import Kernels
from stages.toolkit.report import Counts, Report
from stages.toolkit.triton_kernels import TritonKernels, no_xray

TYPES = {torch.float64: "double", torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat16"}  # in C++


class Stage:
    """What `stages.load` gives. The family's function is an attribute: `stages.load("12").matmul(a, b)`.

    Its kernel is CUDA C++, in kernel.cu beside a binding.cpp, or Triton, in kernel.py. Of the latter there is no x-ray,
    hence no `cost`; which registers it uses is its compiler's business.

    Args:
        file: The `__file__` of the stage's `stage.py`.
        family: The module of `stages.families` whose function the stage computes.
        lesson: What the stage teaches, in one line.
        cost: The closed forms of the kernel's header, as a function of the family's sizes and the bytes of an element.
            They hold for sizes that are multiples of `aligned`. None: there is no x-ray that could tell, or what it
            counts depends on the numbers that are given.
        aligned: See `cost`.
        registers: How many registers a thread may use, for any dtype; the build check refuses more. None: any number.
        spills: Whether the kernel is allowed to keep values in local memory.
        problems: Sizes that `run` checks, where the family's PROBLEMS do not fit.
        xray_sizes: Sizes that `xray` looks at, where the family's XRAY do not fit.
        bench: Sizes for `bench`, where those of the family do not fit: {"cpu": ((256, 256, 256),)}.
        dtypes: What its kernels take, where that is not all that the family knows.
        options: The sets of keyword options that the checks run, the first of which is measured: a tuple of
            dictionaries, or a function that gives one for a dtype. The family's `reference`, `tolerance`, `incumbent`
            and `work`, and `cost`, get them as keywords.
        gradients: Whether the function has a backward; the checks leave gradients out if not.
        waits: Whether blocks wait for what others write, so that no two runs on a GPU count the same.
        define: Keywords for the family's `define`: what it has to know about this stage's kernels.
        instead: Of a kernel whose header says which GPUs it needs, the name of the stage to use on others.
    """

    def __init__(
        self,
        file: str,
        *,
        family: ModuleType,
        lesson: str,
        cost: Callable[..., Counts] | None = None,
        aligned: tuple[int, ...] = (),
        registers: int | None = None,
        spills: bool = False,
        problems: tuple[tuple[int, ...], ...] | None = None,
        xray_sizes: tuple[int, ...] | None = None,
        bench: dict[str, tuple[tuple[int, ...], ...]] | None = None,
        dtypes: tuple[torch.dtype, ...] | None = None,
        options: tuple[dict[str, Any], ...] | Callable[[torch.dtype], tuple[dict[str, Any], ...]] = ({},),
        gradients: bool = True,
        waits: bool = False,
        define: Mapping[str, Any] | None = None,
        instead: str | None = None,
    ) -> None:
        self.folder = Path(file).resolve().parent
        self.name = self.folder.name  # "12_matmul_shared"
        self.number, _, self.operator = self.name.partition("_")  # "12", "matmul_shared"
        self.family = family
        self.lesson = lesson
        self.cost = cost
        self.aligned = aligned
        self.registers = registers
        self.spills = spills
        self.problems = problems or family.PROBLEMS
        self.xray_sizes = xray_sizes or family.XRAY
        self.bench = {**family.BENCH, **(bench or {})}
        self.dtypes = dtypes or family.DTYPES
        self.gradients = gradients
        self.waits = waits
        self._options = options
        self.kernels = (TritonKernels if self.in_triton else Kernels)(self.name, instead)
        self.function = family.define(self.operator, self.kernels, **(define or {}))
        setattr(self, family.NAME, self.function)

    def __repr__(self) -> str:
        return f"<Stage {self.name}>"

    @property
    def source(self) -> Path:
        return build.kernel_of(self.name) or self.folder / "kernel.cu"

    @property
    def in_triton(self) -> bool:
        """Whether the kernel is written in Triton, so that there is nothing to build and no x-ray."""
        return self.source.suffix == ".py"

    @property
    def capability(self) -> str | None:
        """The compute capability of the only GPUs that the kernel runs on, by its header; None: it runs on all."""
        return self.kernels.capability

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of a check or a measurement where none is asked for: float32, or the first that the stage takes."""
        return torch.float32 if torch.float32 in self.dtypes else self.dtypes[0]

    @property
    def type_only(self) -> str:
        """The compiler's flag for a module that takes `dtype` alone and is there in a fraction of the time."""
        return f"-DTYPE_ONLY={TYPES[self.dtype]}"

    @cached_property
    def title(self) -> str:
        """The first line of the kernel's header: "matmul through shared memory"."""
        return re.sub(r"^(//|#) Stage \d+: ", "", self.source.read_text(encoding="utf-8").partition("\n")[0])

    @cached_property
    def header(self) -> dict[str, str]:
        """The sections of the kernel's header: Problem, Before, Idea, Mapping, Cost, Limits, Needs, Run."""
        return header.parse(self.source.read_text(encoding="utf-8"))

    def sizes(self, values: tuple[int, ...]) -> dict[str, int]:
        """Sizes under the family's names: (64, 48, 80) as {"M": 64, "N": 48, "K": 80}."""
        return dict(zip(self.family.SIZES, values, strict=True))

    def fits(self, sizes: Iterable[int]) -> bool:
        """Are the sizes whole multiples of the tiles, so that the closed forms of the header hold?"""
        return self.cost is not None and all(
            size and size % multiple == 0 for size, multiple in zip(sizes, self.aligned, strict=True)
        )

    def options(self, dtype: torch.dtype | None = None) -> tuple[dict[str, Any], ...]:
        """The sets of keyword options that the checks run in a dtype, by default `dtype`."""
        return self._options(dtype or self.dtype) if callable(self._options) else self._options

    def xray(self, *arguments: Any, schedule: str = "forward", seed: int = 0, trace: int = 0, **options: Any) -> Report:
        """Call the function once under the x-ray and return the report; the arguments are CPU tensors.

        Raises:
            NotAvailable: The kernel is written in Triton.
        """
        if self.in_triton:
            raise NotAvailable(no_xray(self.name))
        with xray.recording(schedule, seed, trace) as report:
            self.function(*arguments, **options)
        return report


def names() -> list[str]:
    """The names of all stages, in order."""
    return build.stage_names()


def find(name: str) -> str:
    """The full name of a stage, from its number, its name with or without the number, or an unambiguous beginning.

    Raises:
        StageNotFound: None, or more than one, is called so. The text lists the nearest names.
    """
    known, wanted = names(), str(name).strip().strip("/").lower()
    short = {full: full.partition("_")[2] for full in known}
    exact = [full for full in known if wanted in (full, short[full], full.partition("_")[0])]
    begun = [full for full in known if wanted and (full.startswith(wanted) or short[full].startswith(wanted))]
    found = exact or begun
    if len(found) == 1:
        return found[0]
    if found:
        raise StageNotFound(f"stage {name!r} could be any of: {', '.join(found)}")
    candidates = {word: full for full in known for word in (short[full], full, full.partition("_")[0])}
    near = list(dict.fromkeys(candidates[word] for word in difflib.get_close_matches(wanted, candidates, 6, 0.4)))
    hint = f"nearest: {', '.join(near[:3])}" if near else f"there are: {', '.join(known)}"
    raise StageNotFound(f"no stage is called {name!r}; {hint}")


def load(name: str) -> Stage:
    """A stage, ready to call. Its kernels are built, where that is needed, at the first call.

    Args:
        name: Its number ("12"), its name ("12_matmul_shared" or "matmul_shared"), or an unambiguous beginning.

    Raises:
        StageNotFound: None, or more than one, is called so. The text lists the nearest names.

    Example:
        >>> import stages
        >>> stages.load("12")
        <Stage 12_matmul_shared>
    """
    return importlib.import_module(f"stages.{find(name)}.stage").stage
