"""GPU kernels as a course: each stage is one kernel that teaches one thing, and a PyTorch operator.

>>> import stages, torch
>>> stage = stages.load("matmul_shared")  # or "12", or "12_matmul_shared"
>>> stage.matmul(torch.ones(2, 3), torch.ones(3, 4))
tensor([[3., 3., 3., 3.],
        [3., 3., 3., 3.]])

Without a choice of your own, each function is that of the stage that is the fastest for its arguments:

>>> stages.matmul(torch.ones(2, 3), torch.ones(3, 4)).shape
torch.Size([2, 4])
>>> stages.matmul.choose(torch.ones(2, 3), torch.ones(3, 4))
Choice(stage='14_matmul_pipelined', reason='tensor cores would not keep all bits')
"""

import importlib
from typing import Any

from stages.toolkit.build import BuildError
from stages.toolkit.errors import KernelFault, NotAvailable, StageNotFound
from stages.toolkit.stage import Stage, load, names

FUNCTIONS = {  # and the modules of stages.families that they come from
    "axpy": "axpy",
    "discretize": "discretization",
    "discretize_matrix": "discretize_matrix",
    "lstm": "lstm",
    "matmul": "matmul",
    "qkv": "qkv",
    "scan": "scan",
    "selective_scan": "selective_scan",
    "ssm_adaptive_unitary": "adaptive_unitary",
    "vlstm": "vlstm",
}
MODULES = ("LSTM",)  # of stages.modules
ALIASES = {"selective_scan_fn": "selective_scan"}  # what Mamba calls it

__all__ = ["BuildError", "KernelFault", "NotAvailable", "Stage", "StageNotFound", "load", "names"]
__all__ += [*FUNCTIONS, *MODULES, *ALIASES]


def __getattr__(name: str) -> Any:
    """A family's function or a module, made when it is first asked for: the import costs nothing that is not used."""
    if name in ALIASES:
        return globals().get(ALIASES[name]) or __getattr__(ALIASES[name])
    if name in MODULES:
        globals()[name] = getattr(importlib.import_module("stages.modules"), name)
        return globals()[name]
    if name not in FUNCTIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    fastest = importlib.import_module("stages.toolkit.fastest").fastest
    globals()[name] = fastest(importlib.import_module(f"stages.families.{FUNCTIONS[name]}"))
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *FUNCTIONS, *MODULES, *ALIASES})
