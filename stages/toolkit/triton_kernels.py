"""Kernels in Triton: compiled for CUDA tensors, run by Triton's interpreter for CPU tensors.

A stage's `kernel.py` is loaded once for each: `triton.jit` makes functions for the compiler, or, while its setting
`interpret` is on, functions for the interpreter, which runs a program after the other with NumPy. It changes
`triton.language` while it does, and puts it back; nothing else may compile or interpret meanwhile.
"""

import functools
import re
import subprocess
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from stages.toolkit import build, kernels
from stages.toolkit.errors import KernelFault, NotAvailable

VARIANTS = ("interpreted", "compiled")
INSTALL = "pip install triton (its wheels are for Linux)"

_one_at_a_time = threading.RLock()
_compiling = False  # while `compiled_for` is on: launches on CPU tensors compile, and run nothing


def triton() -> ModuleType:
    """The package.

    Raises:
        NotAvailable: It is not installed.
    """
    try:
        import triton
        import triton.runtime.errors
        import triton.runtime.interpreter
    except ImportError:
        raise NotAvailable(f"this stage's kernel is written in Triton, which is not installed: {INSTALL}") from None
    return triton


class TritonKernels(kernels.Kernels):
    """The modules `interpreted` and `compiled` of one stage, both from `kernel.py`."""

    def module(self, variant: str) -> ModuleType:
        """The module of a variant; its launchers take tensors and options, and no stream."""
        if variant not in self._modules:
            self._modules[variant] = load(variant, build.PACKAGE / self.name / "kernel.py", f"stages.{self.name}")
        return self._modules[variant]

    @contextmanager
    def replaced(self, **paths: Path) -> Iterator[None]:
        """Use other files in place of `kernel.py` for a while, `replaced(interpreted=path)`."""
        saved = self._modules
        self._modules = saved | {variant: load(variant, path, "replaced") for variant, path in paths.items()}
        try:
            yield
        finally:
            self._modules = saved

    def launch(self, function: str, device: torch.device, *arguments: object) -> None:
        """Call a launcher of the module that serves `device`, on the current stream if that is a GPU.

        Raises:
            NotAvailable: Triton is not installed, the x-ray is recording, or the kernel does not run on such a GPU.
            KernelFault: In the interpreter: the kernel reaches outside every tensor.
        """
        if device.type == "cuda":
            self.check(device)
            with _one_at_a_time, torch.cuda.device(device):
                getattr(self.module("compiled"), function)(*arguments)
            return
        if kernels.recorder is not None:
            raise NotAvailable(no_xray(self.name))
        tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
        with _one_at_a_time:
            if _compiling:
                getattr(self.module("compiled"), function)(*arguments)
                return
            with interpreter_for(tensors), np.errstate(all="ignore"):
                getattr(self.module("interpreted"), function)(*arguments)


def no_xray(name: str) -> str:
    return f"{name} has no x-ray: its kernel is written in Triton, and the CPU device runs and counts CUDA C++ alone"


def load(variant: str, path: Path, package: str) -> ModuleType:
    """The module in a file, its kernels for the interpreter or for the compiler, whatever TRITON_INTERPRET says."""
    settings = triton().knobs.runtime
    with settings.scope():
        settings.interpret = variant == "interpreted"
        return kernels.load(f"{package}.kernel_{variant}", path)


# ---------------------------------------------------------------------------------------------------------------------
# The interpreter calls the function that combines two elements for one pair after the other, some ten thousand a
# second. Such functions take whole tensors as well: a scan is log2(n) calls then, a reduction likewise, grouped as on a
# GPU. It rounds to bfloat16 towards 0, where a GPU rounds to the nearest. And the bound of a loop is an array of one
# element to it, which NumPy since 2.4 does not take for a number.


def scan_whole(self: Any, given: tuple[Any, ...]) -> list[Any]:
    """Every element joined with what has been joined one before it, then two, four, ... before it."""
    data, types = [x.handle.data for x in given], [x.dtype for x in given]
    count = data[0].shape[self.axis]
    place = np.arange(count).reshape([-1 if axis == self.axis else 1 for axis in range(data[0].ndim)])
    distance = 1
    while distance < count:
        older = [self.to_tensor(np.roll(x, distance, self.axis), dtype) for x, dtype in zip(data, types, strict=True)]
        own = map(self.to_tensor, data, types)
        joined = self.combine_fn.fn(*older, *own)
        joined = joined if isinstance(joined, tuple) else (joined,)
        data = [np.where(place < distance, x, new.handle.data) for x, new in zip(data, joined, strict=True)]
        distance *= 2
    return list(map(self.to_tensor, data, types))


def reduce_whole(self: Any, given: tuple[Any, ...]) -> list[Any]:
    """Halves joined with each other, until there is one element."""
    data, types = [x.handle.data for x in given], [x.dtype for x in given]
    while data[0].shape[self.axis] > 1:
        halves = zip(*(np.split(x, 2, self.axis) for x in data), strict=True)
        older, newer = (map(self.to_tensor, half, types) for half in halves)
        joined = self.combine_fn.fn(*older, *newer)
        data = [x.handle.data for x in (joined if isinstance(joined, tuple) else (joined,))]
    if not self.keep_dims:
        data = [x.squeeze(self.axis) for x in data]
    return list(map(self.to_tensor, data, types))


def nearest(cast: Any) -> Any:
    """The interpreter's conversion `cast`, but for float32 to bfloat16."""
    language, handle = triton().language, triton().runtime.interpreter.TensorHandle

    @functools.wraps(cast)
    def convert(self: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar != language.float32 or target.scalar != language.bfloat16:
            return cast(self, source, target)
        rounded = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16().view(torch.uint16).numpy()
        return handle(rounded, language.bfloat16)

    return convert


def with_index(change: Any) -> Any:
    """`change`, which gives tensors of `triton.language` what they need in the interpreter, and an index that works."""

    def changed(tensor: type, scope: Any) -> None:
        change(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return changed


# Nor does it say what a mask should have held back: it reads and writes wherever a pointer leads.


def extent(x: torch.Tensor) -> tuple[int, int]:
    """The addresses of the first and of the last element."""
    size = x.element_size()
    last = sum((count - 1) * stride for count, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else -1
    return x.data_ptr(), x.data_ptr() + last * size


def checked(access: Any, mask_at: int, tensors: list[torch.Tensor]) -> Any:
    """The interpreter's masked load or store, which refuses a place outside all tensors."""
    extents = [extent(x) for x in tensors]

    @functools.wraps(access)
    def check(self: Any, places: Any, *rest: Any) -> Any:
        at, mask = np.broadcast_arrays(places.data, rest[mask_at].data)
        wanted = at[mask.astype(bool)]
        inside = np.zeros(wanted.shape, bool)
        for first, last in extents:
            inside |= (wanted >= first) & (wanted <= last)
        if not inside.all():
            raise KernelFault(f"{(~inside).sum():,} words outside every tensor")
        return access(self, places, *rest)

    return check


def where(error: BaseException) -> str:
    """The line of a kernel that an error of the interpreter comes from: the last that is a file called kernel.py."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((f"kernel.py:{f.lineno}  {f.line}" for f in reversed(frames) if f.filename.endswith("kernel.py")), "?")


@contextmanager
def interpreter_for(tensors: list[torch.Tensor]) -> Iterator[None]:
    """The interpreter with the functions above in place of its own, for a launch on these tensors."""
    own = triton().runtime.interpreter
    builder = own.InterpreterBuilder
    changes = [
        (builder, "create_masked_load", checked(builder.create_masked_load, 0, tensors)),
        (builder, "create_masked_store", checked(builder.create_masked_store, 1, tensors)),
        (own.ScanOps, "generic_scan", scan_whole),
        (own.ReduceOps, "generic_reduce", reduce_whole),
        (builder, "cast_impl", nearest(builder.cast_impl)),
        (own, "_patch_lang_tensor", with_index(own._patch_lang_tensor)),
        # A function that a kernel calls need not change triton.language again.
        (own.InterpretedFunction, "__call__", lambda self, *args, **options: self.rewrite()(*args, **options)),
    ]
    before = [getattr(place, name) for place, name, _ in changes]
    for place, name, new in changes:
        setattr(place, name, new)
    try:
        yield
    except triton().runtime.errors.InterpreterError as error:
        fault = error.__cause__
        if not isinstance(fault, KernelFault):
            raise
        program = tuple(own.interpreter_builder.grid_idx)
        raise KernelFault(f"out of bounds: program {program} reaches {fault}\n  {where(fault)}") from None
    finally:
        for (place, name, _), old in zip(changes, before, strict=True):
            setattr(place, name, old)


# ---------------------------------------------------------------------------------------------------------------------
# What the compiler makes of a kernel, without a GPU.


def compiled_for(architecture: str, call: Callable[[], object]) -> list[Any]:
    """Triton's `CompiledKernel` of every launch on CPU tensors in `call`, for GPUs such as "9.0"; nothing runs.

    What the launches would have written holds whatever it held.
    """
    package, found = triton(), []
    target = package.backends.compiler.GPUTarget("cuda", int(architecture.rstrip("a").replace(".", "")), 32)
    # Who launches asks the driver for what, and where, to compile; without a GPU there is none to ask.
    driver = SimpleNamespace(
        get_current_device=lambda: f"none, but {architecture}",
        get_current_stream=lambda device: 0,
        get_current_target=lambda: target,
    )
    function = package.runtime.jit.JITFunction
    run, active = function.run, package.runtime.driver.__dict__["_active"]

    def compile_only(self: Any, *arguments: object, grid: object, warmup: bool, **options: object) -> None:
        found.append(run(self, *arguments, grid=grid, warmup=True, **options))

    global _compiling
    with _one_at_a_time:
        function.run, _compiling = compile_only, True
        package.runtime.driver.set_active(driver)
        try:
            call()
        finally:
            function.run, _compiling = run, False
            package.runtime.driver._active = active
    return found


def assemble(kernel: Any) -> str:
    """What Triton's own ptxas says of a compiled kernel: its registers, and what it spills."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(kernel.asm["ptx"])
        target = "-arch=" + re.search(r"^\.target (\w+)", kernel.asm["ptx"], re.MULTILINE)[1]
        command = [triton().knobs.nvidia.ptxas.path, "-v", target, str(source), "-o", str(source.with_suffix(".cubin"))]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise build.BuildError(f"ptxas does not take what Triton made: {done.stdout.strip()[:300]}")
    return done.stdout


@dataclass(frozen=True)
class Layout:
    """How the compiler hands a tile out to threads; all by dimension, and `order` is from the innermost outwards."""

    shape: tuple[int, ...]
    thread: tuple[int, ...]  # words of a thread, side by side
    lanes: tuple[int, ...]
    warps: tuple[int, ...]
    order: tuple[int, ...]

    def owners(self) -> np.ndarray:
        """The warp and the lane that hold each word, [*shape, 2]; the first of them where several do."""
        places = np.indices(self.shape)
        found = []
        for count, words in (
            (self.warps, np.multiply(self.thread, self.lanes)),
            (self.lanes, self.thread),
        ):
            owner, below = np.zeros(self.shape, int), 1
            for axis in self.order:
                owner += places[axis] // words[axis] % count[axis] * below
                below *= count[axis]
            found.append(owner)
        return np.stack(found, -1)


def layout(kernel: Any) -> Layout:
    """The layout of the tile that a compiled kernel scans."""
    text = kernel.asm["ttgir"]
    tile = re.search(r'"tt\.scan".*?\(tensor<(\d+)x(\d+)x\w+, (#\w+)>', text, re.DOTALL)
    fields = re.search(rf"^{tile[3]} = #ttg\.blocked<{{(.*)}}>", text, re.MULTILINE)[1]
    numbers = [tuple(map(int, part.split(", "))) for part in re.findall(r"\[([\d, ]+)\]", fields)]
    return Layout((int(tile[1]), int(tile[2])), *numbers)


INSTRUCTIONS = {
    "16 bytes at a time, ahead of time": r"cp\.async\.cg\.shared\.global \[[^]]*\], \[[^]]*\], 0x10",
    "4 bytes at a time, ahead of time": r"cp\.async\.ca\.shared\.global \[[^]]*\], \[[^]]*\], 0x4",
    "shuffles": r"\bshfl\.sync",
    "barriers": r"\bbar\.sync",
}


def instructions(kernel: Any) -> dict[str, int]:
    """How many instructions of some kinds stand in the assembly (PTX) of a compiled kernel."""
    return {name: len(re.findall(pattern, kernel.asm["ptx"])) for name, pattern in INSTRUCTIONS.items()}
