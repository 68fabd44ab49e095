"""GPU kernels as a course: each stage is one kernel that teaches one thing, and a PyTorch operator.

>>> import stages, torch
>>> stage = stages.load("matmul_shared")  # or "12", or "12_matmul_shared"
>>> stage.matmul(torch.ones(2, 3), torch.ones(3, 4))
tensor([[3., 3., 3., 3.],
        [3., 3., 3., 3.]])
"""

from stages.toolkit.build import BuildError
from stages.toolkit.errors import KernelFault, NotAvailable, StageNotFound
from stages.toolkit.stage import Stage, load, names

__all__ = ["BuildError", "KernelFault", "NotAvailable", "Stage", "StageNotFound", "load", "names"]
