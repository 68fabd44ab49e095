"""The compiled modules of a stage: built and loaded at first use, launched on the device of their tensors."""

import importlib.util
import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch

from stages.toolkit import build, symbols
from stages.toolkit.errors import KernelFault

VARIANTS = ("simt", "xray", "cuda")

# Set while `xray.recording` records: takes the launches for the CPU device, as (kernels, function, arguments).
recorder = None

_counter = itertools.count(1)


class Kernels:
    """The modules `_simt`, `_xray` and `_cuda` of one stage."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._modules: dict[str, ModuleType] = {}

    def module(self, variant: str) -> ModuleType:
        """The module of a variant, "simt", "xray" or "cuda"; built if it is missing or older than its sources."""
        if variant not in self._modules:
            path = build.ensure(self.name, variant)
            self._modules[variant] = load(f"stages.{self.name}._{variant}", path)
        return self._modules[variant]

    @contextmanager
    def replaced(self, **paths: Path) -> Iterator[None]:
        """Use other module files for a while, `replaced(simt=path, xray=path)`: how a changed kernel is tried."""
        saved = self._modules
        # pybind11 knows modules by name: each file that is not the stage's own gets one of its own.
        others = {variant: load(f"replaced_{next(_counter)}._{variant}", path) for variant, path in paths.items()}
        self._modules = saved | others
        try:
            yield
        finally:
            self._modules = saved

    def serving(self, device: torch.device) -> ModuleType:
        """The module that a launch on a device goes to now."""
        variant = "cuda" if device.type == "cuda" else "simt" if recorder is None else "xray"
        return self._modules.get(variant) or self.module(variant)

    def launch(self, function: str, device: torch.device, *arguments: object) -> None:
        """Call a launcher of the module that serves `device`, on the current stream if that is a GPU."""
        if device.type == "cuda":
            stream = (device.index, torch._C._cuda_getCurrentRawStream(device.index))
            getattr(self.serving(device), function)(*arguments, stream)
        elif recorder is not None:
            recorder(self, function, arguments)
        else:
            call(self.serving(device), function, arguments)


def load(name: str, path: Path) -> ModuleType:
    """The module in a file, under a name that ends in `_simt`, `_xray` or `_cuda`, as the file does."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def call(module: ModuleType, function: str, arguments: tuple[object, ...]) -> None:
    """Call a launcher of the CPU device. A fault of the kernel becomes KernelFault, its places those of the source."""
    try:
        getattr(module, function)(*arguments, None)
    except RuntimeError as error:
        if type(error).__name__ != "KernelFault":
            raise
        text = symbols.resolve(str(error), Path(module.__file__))
        for index, name in enumerate(tensor_names(module, function)):
            text = text.replace(f"{{tensor:{index}}}", name)
        raise KernelFault(text) from None


def tensor_names(module: ModuleType, function: str) -> list[str]:
    """The names of a launcher's tensors, from the signature that pybind11 writes into its docstring."""
    return re.findall(r"(\w+): torch\.Tensor", (getattr(module, function).__doc__ or "").partition("\n")[0])
