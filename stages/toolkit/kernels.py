"""The compiled modules of a stage: built and loaded at first use, launched on the device of their tensors."""

import importlib.util
import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import ModuleType

import torch

from stages.toolkit import build, header, symbols
from stages.toolkit.errors import KernelFault, NotAvailable

VARIANTS = ("simt", "xray", "cuda")

# Set while `xray.recording` records: takes the launches for the CPU device, as (kernels, function, arguments).
recorder = None

_counter = itertools.count(1)


class Kernels:
    """The modules `_simt`, `_xray` and `_cuda` of one stage.

    Args:
        name: The stage's.
        instead: The stage to use on GPUs that this one does not run on.
    """

    def __init__(self, name: str, instead: str | None = None) -> None:
        self.name = name
        self.instead = instead
        self._modules: dict[str, ModuleType] = {}
        self._able: set[int] = set()  # the GPUs, by their index, that were found to have what the kernel needs

    @cached_property
    def capability(self) -> str | None:
        """The compute capability of the only GPUs that the kernel runs on; None: it runs on all."""
        kernel = build.kernel_of(self.name)
        return header.capability(kernel) if kernel else None

    def unable(self, device: str | torch.device) -> str:
        """Why the kernel does not run on a device, or ""."""
        device = torch.device(device)
        if device.type != "cuda" or self.capability is None:
            return ""
        found = "{}.{}".format(*torch.cuda.get_device_capability(device))
        if found == self.capability:
            return ""
        card = f"{torch.cuda.get_device_name(device)} ({device})"
        text = f"{self.name} needs a GPU of compute capability {self.capability}, and {card} has {found}"
        return text + (f": use stage {self.instead} there" if self.instead else "")

    def check(self, device: torch.device) -> None:
        """Raise NotAvailable if the kernel does not run on a GPU."""
        if self.capability is not None and device.index not in self._able:
            if why := self.unable(device):
                raise NotAvailable(why)
            self._able.add(device.index)

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
        """The module that a launch on a device goes to now.

        Raises:
            NotAvailable: The kernel does not run on such a GPU.
        """
        variant = "cuda" if device.type == "cuda" else "simt" if recorder is None else "xray"
        if variant == "cuda":
            self.check(device)
        return self._modules.get(variant) or self.module(variant)

    def launch(self, function: str, device: torch.device, *arguments: object) -> None:
        """Call a launcher of the module that serves `device`, on the current stream if that is a GPU."""
        if device.type == "cuda":
            launcher = getattr(self.serving(device), function)
            launcher(*arguments, (device.index, torch._C._cuda_getCurrentRawStream(device.index)))
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
