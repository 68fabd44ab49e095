"""Compile every kernel for the GPUs that the project is written for, and refuse what a reader could not see.

`python -m stages.toolkit.check_cuda [STAGE ...]` needs nvcc, and Triton for kernels in Triton, no GPU. For sm_80 and
sm_90a it refuses warnings, spills and stack frames that a stage does not announce (`spills = True` in its stage.py),
more registers than the stage's budget (`registers`, 64 if it says nothing), and more static shared memory than every
GPU gives a block. A kernel that runs on some GPUs only is compiled for these alone. A kernel in Triton has no budget,
for its author does not hand out registers; it has a row for each way that it is compiled.
"""

import re
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from stages.toolkit import build, header
from stages.toolkit.compilers import (
    DEFAULT_ARCHITECTURES,
    BuildError,
    capture,
    gencode,
    nvcc,
    nvcc_host,
    own_architecture,
)
from stages.toolkit.errors import NotAvailable

SHARED_LIMIT = 48 * 1024  # more than this has to be asked for at run time, and static shared memory cannot
STRICT = ("-Werror=all-warnings", "-Xcompiler=-Werror")


@dataclass(frozen=True)
class Kernel:
    """What ptxas says of one kernel on one architecture."""

    name: str
    architecture: str
    registers: int
    shared: int
    stack: int
    spill: int  # bytes stored and loaded

    def complaints(self, registers: int | None, spills: bool) -> list[str]:
        """What is wrong with it, for a stage with this budget; None: any number of registers is well."""
        found = []
        if registers is not None and self.registers > registers:
            found.append(f"{self.registers} registers, the stage's budget is {registers}")
        if self.spill and not spills:
            found.append(f"{self.spill} bytes of registers spilled, which the stage does not announce")
        if self.stack and not spills:
            found.append(f"a stack frame of {self.stack} bytes, which the stage does not announce")
        if self.shared > SHARED_LIMIT:
            found.append(f"{self.shared} bytes of static shared memory, the limit is {SHARED_LIMIT}")
        return [f"{self.name} on {self.architecture}: {text}" for text in found]


def parse_ptxas(text: str) -> list[Kernel]:
    """The kernels in what `ptxas -v` prints."""
    kernels = []
    for part in text.split("Compiling entry function '")[1:]:
        head = re.match(r"(\w+)' for '(\w+)'", part)
        used = re.search(r"Used (\d+) registers", part)
        frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part)
        if not (head and used and frame):
            raise BuildError(f"cannot read what ptxas printed: {part[:300]}")
        shared = re.search(r"(\d+) bytes smem", part)
        stack, stores, loads = map(int, frame.groups())
        shared_bytes = int(shared[1]) if shared else 0
        kernels.append(Kernel(short_name(head[1]), head[2], int(used[1]), shared_bytes, stack, stores + loads))
    return kernels


def short_name(mangled: str) -> str:
    """matmul_shared<float> for _Z13matmul_sharedIfEvPKT_S2_PS0_lll, where c++filt is there to say so."""
    return bare_name((capture("c++filt", mangled) or mangled).strip())


def bare_name(name: str) -> str:
    """matmul_shared<float> for void matmul_shared<float>(float const*, float const*, float*, long, long, long)."""
    name, depth = name.removeprefix("void "), 0
    for position, character in enumerate(name):
        depth += (character == "<") - (character == ">")
        if character == "(" and depth == 0 and not name[position:].startswith("(anonymous"):
            return name[:position]
    return name


def compile_kernels(name: str, architectures: Iterable[str] = DEFAULT_ARCHITECTURES, extra=STRICT) -> list[Kernel]:
    """Compiles the kernel of a stage, with warnings refused, and gives what ptxas says of it.

    A kernel that runs on some GPUs only is compiled for these alone.

    Raises:
        BuildError: It does not compile.
        NotAvailable: It is written in Triton, which is not installed.
    """
    if needed := header.capability(build.kernel_of(name)):
        architectures = [own_architecture(needed)]
    if not build.has_modules(name):
        return compile_triton(name, architectures)
    flags = [flag for architecture in architectures for flag in gencode(architecture)]
    source, folder = build.PACKAGE / name / "kernel.cu", build.OBJECTS / name / "check"
    unit = build.compile_unit("cuda", name, source, folder, nvcc(), (*flags, *nvcc_host(), *extra, "-Xptxas=-v"))
    unit.stamp.unlink(missing_ok=True)  # what ptxas says is wanted, whether or not the object is up to date
    output = build.make(unit, build.Runner())
    kernels = parse_ptxas(output)
    if not kernels:
        raise BuildError(f"{name}: kernel.cu holds no kernel that nvcc compiles; its launcher has to launch one")
    return kernels


def compile_triton(name: str, architectures: Iterable[str]) -> list[Kernel]:
    """The kernels of a stage in Triton, forward and backward, for the first of its sizes for a CPU, in every dtype."""
    import torch

    from stages import load
    from stages.toolkit import triton_kernels

    stage, kernels = load(name), {}
    for architecture in architectures:
        for dtype in stage.dtypes:
            for options in stage.options(dtype):
                arguments = stage.family.make(stage.sizes(stage.bench["cpu"][0]), dtype, **options)
                given = [x.requires_grad_() for x in arguments]

                def both(given=given, options=options) -> None:
                    result = stage.function(*given, **options)
                    torch.autograd.grad(result, given, result.detach())

                words = ", ".join([str(dtype).removeprefix("torch."), *map(str, options.values())])
                for found in triton_kernels.compiled_for(architecture, both):
                    (kernel,) = parse_ptxas(triton_kernels.assemble(found))
                    kernel = replace(kernel, name=f"{kernel.name}<{words}>")
                    kernels[kernel.name, kernel.architecture] = kernel
    return list(kernels.values())


def main(arguments: list[str]) -> int:
    import stages

    names = build.select(",".join(arguments) or "all")
    failed = []
    print(f"{'stage':24} {'kernel':32} {'for':7} registers  shared  spills  stack")
    longest_first = sorted(names, key=lambda name: -build.kernel_of(name).stat().st_size)  # no core idles at the end
    with ThreadPoolExecutor(build.Runner().jobs) as pool:
        compiled = {name: pool.submit(compile_kernels, name) for name in longest_first}
        for name in names:
            stage = stages.load(name)
            registers, spills = getattr(stage, "registers", 64), getattr(stage, "spills", False)
            budget = "-" if registers is None else registers
            try:
                kernels = compiled[name].result()
            except BuildError as error:
                failed.append(str(error))
                print(f"{name:24} does not compile")
                continue
            except NotAvailable as error:
                print(f"{name:24} not checked: {error}")
                continue
            for kernel in kernels:
                complaints = kernel.complaints(registers, spills)
                failed += [f"{name}: {text}" for text in complaints]
                row = f"{name:24} {kernel.name:32} {kernel.architecture:7}"
                row += f" {kernel.registers:4}/{budget:<4} {kernel.shared:7} {kernel.spill:7} {kernel.stack:6}"
                print(row + ("  <-- refused" if complaints else ""))
    for text in failed:
        print(f"\nrefused: {text}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except BuildError as error:
        sys.exit(f"error: {error}")
