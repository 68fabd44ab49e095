"""What all tests share: the stages and the devices to run on, and outputs that hold NaN until a kernel writes them."""

import pytest
import torch

import stages
from stages.toolkit import operator

pytest.register_assert_rewrite("stage_cases", "matmul_cases", "qkv_cases", "vlstm_cases", "scan_cases")
pytest.register_assert_rewrite("selective_scan_cases", "lstm_cases")

torch.set_num_threads(1)  # for tensors as small as those of the tests more of them take several times as long

XRAYED = [name for name in stages.names() if not stages.load(name).in_triton]  # the stages that the CPU device runs

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(params=["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
def device(request) -> str:
    """The CPU device, and a GPU where there is one."""
    return request.param


@pytest.fixture
def poisoned(monkeypatch) -> None:
    """Fill every output with NaN before the kernel runs: one that writes nothing, or not everything, is found out."""
    monkeypatch.setattr(operator, "empty", operator.poisoned)
