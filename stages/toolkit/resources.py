"""What the kernels of a call take of a GPU: how many blocks and threads, registers, shared memory, spilled registers.

What ran, and with what, comes from the card, by torch's profiler; what was spilled only the compiler tells.
"""

import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from stages.toolkit import check_cuda
from stages.toolkit.compilers import gpu_architectures
from stages.toolkit.errors import NotAvailable
from stages.toolkit.stage import Stage


def launched(call: Callable, arguments: Sequence[object]) -> list[dict[str, Any]]:
    """The kernels that a call runs on the GPU, as `parse` gives them.

    Raises:
        NotAvailable: The profiler saw none, or tells of them otherwise than expected.
    """
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=kinds) as profile:
        call(*arguments)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        text = path.read_text(encoding="utf-8", errors="replace")
    try:
        found = parse(json.loads(text))
    except (KeyError, TypeError, ValueError) as error:
        raise NotAvailable(f"the trace of torch's profiler cannot be read: {error!r}") from None
    if not found:
        raise NotAvailable("torch's profiler saw no kernel on the GPU; does CUPTI work here?")
    return found


def parse(trace: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The kernels in a trace of torch's profiler, in order, each once.

    A record has the kernel's name, its blocks, the threads of a block, the registers of a thread, and the bytes of
    shared memory of a block, static and dynamic together.
    """
    events = [event for event in trace["traceEvents"] if event.get("cat") == "kernel"]
    found = []
    for event in sorted(events, key=lambda event: float(event["ts"])):
        facts = event["args"]
        record = {
            "kernel": check_cuda.short_name(event["name"]),
            "blocks": math.prod(facts["grid"]),
            "threads": math.prod(facts["block"]),
            "registers": facts["registers per thread"],
            "shared": facts["shared memory"],
        }
        if record not in found:
            found.append(record)
    return found


def spilled(name: str, architectures: Sequence[str]) -> dict[str, int]:
    """The bytes of registers that each kernel of a stage keeps in local memory, stores and loads, by the compiler."""
    return {kernel.name: kernel.spill for kernel in check_cuda.compile_kernels(name, architectures, extra=())}


def of_card() -> list[str]:
    """The architectures to compile for, to see what this card runs: of this machine's those of the current GPU."""
    number = "{}.{}".format(*torch.cuda.get_device_capability())
    return [found for found in gpu_architectures() if found.rstrip("a") == number] or [number]


def kernels(stage: Stage, sizes: Mapping[str, int], dtype: torch.dtype) -> list[dict[str, Any]]:
    """The kernels of one call of the stage on the GPU, as `parse` gives them."""
    options = stage.options(dtype)[0]
    return launched(partial(stage.function, **options), stage.family.make(sizes, dtype, "cuda", **options))
