"""The facts of a GPU, or of the CPU device, that a kernel's author needs."""

import contextlib
import platform

import torch

from stages.toolkit import build
from stages.toolkit.kernels import Kernels

KIB = 1024


def gpu_facts(index: int = 0) -> dict[str, str]:
    """What a kernel on this GPU can count on, each fact in words with its unit."""
    p = torch.cuda.get_device_properties(index)
    facts = {
        "name": p.name,
        "compute capability": f"{p.major}.{p.minor}",
        "multiprocessors (SMs)": f"{p.multi_processor_count}",
        "threads of a warp": f"{p.warp_size}",
        "threads of a block, at most": f"{getattr(p, 'max_threads_per_block', 1024)}",
        "threads of an SM, at most": f"{p.max_threads_per_multi_processor}",
        "registers of an SM": f"{getattr(p, 'regs_per_multiprocessor', 0):,}",
        "registers of a thread, at most": "255",
        "shared memory of a block": f"{p.shared_memory_per_block // KIB} KiB",
        "shared memory of a block, if asked for": f"{getattr(p, 'shared_memory_per_block_optin', 0) // KIB} KiB",
        "shared memory of an SM": f"{p.shared_memory_per_multiprocessor // KIB} KiB",
        "L2 cache": f"{p.L2_cache_size / KIB**2:.0f} MiB",
        "device memory": f"{p.total_memory / KIB**3:.1f} GiB",
        "clock, at most": f"{p.clock_rate / 1e6:.2f} GHz" if hasattr(p, "clock_rate") else "",
        "memory bandwidth, by clock and width": _bandwidth(p),
        "grid x, y, z, at most": "2147483647, 65535, 65535",
        "driver and runtime": f"CUDA {torch.version.cuda} in torch {torch.__version__}",
    }
    return {name: fact for name, fact in facts.items() if fact and not fact.startswith("0")}


def _bandwidth(properties: object) -> str:
    clock, width = (getattr(properties, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))
    return f"{2 * clock * 1e3 * width / 8 / 1e9:,.0f} GB/s" if clock and width else ""


def cpu_facts() -> dict[str, str]:
    """The CPU device: what stands in for a GPU, and what it is built with."""
    facts = {"processor": processor()}
    try:
        facts["compiler"] = build.host_compiler().version
        info = Kernels(build.stage_names()[0]).module("simt").info()
        facts |= {
            "cores used": f"{info['workers']}",
            "threads of a warp": f"{info['warp_size']}",
            "threads of a block, at most": f"{info['max_threads_per_block']}",
            "shared memory of a block, at most": f"{info['max_shared_bytes'] // KIB} KiB",
            "stack of a thread": f"{info['stack_bytes'] // KIB} KiB",
        }
    except build.BuildError as error:
        facts["compiler"] = f"not usable: {error}"
    try:
        facts["nvcc"] = f"{build.nvcc().version}, for {', '.join(build.architectures())}"
    except build.BuildError as error:
        facts["nvcc"] = f"none: {error}"
    return facts


def processor() -> str:
    """The CPU's name and architecture: "AMD EPYC, x86_64"."""
    name = platform.processor() or "unknown processor"
    with contextlib.suppress(OSError, StopIteration), open("/proc/cpuinfo") as file:
        name = next(line.partition(": ")[2].strip() for line in file if line.startswith("model name"))
    return f"{name}, {platform.machine()}"
