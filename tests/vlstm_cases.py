"""What the tests of the vLSTM share: other implementations' values, and the tests of every stage that computes it."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

GOLDEN = sorted((Path(__file__).parent / "golden").glob("mlstm_*.npz"))


def load_golden(path: Path, device: str = "cpu") -> dict[str, Tensor]:
    """The arrays of a file, in float64."""
    with np.load(path) as file:
        return {name: torch.from_numpy(file[name]).to(device) for name in file}


def golden_arguments(golden: dict[str, Tensor]) -> tuple[list[Tensor], dict[str, str]]:
    """q, k, v, i and f of a file, and the options that make its formula."""
    return [golden[name] for name in "qkvif"], {} if "m" in golden else {"input_gate": "sigmoid"}
