"""Stage 20, qkv_two_pass."""

import pytest
import torch
from qkv_cases import QkvCases

import stages
from stages.toolkit import operator


class TestQkvTwoPass(QkvCases):
    stage = stages.load("20")

    def test_s_goes_out_and_comes_back(self):
        """S is written once and read once for each 64 columns of V, in the type of the sums."""
        for dtype, size in ((torch.float32, 4), (torch.bfloat16, 4), (torch.float64, 8)):
            report = self.stage.xray(*self.arguments((1, 2, 128, 16, 128), dtype))
            moved = {t.op: t.bytes_moved for t in report.traffic("global") if t.name == "s"}
            assert moved == {"store": 2 * 128 * 128 * size, "load": 2 * 2 * 128 * 128 * size}
            assert [launch.kernel.partition("<")[0] for launch in report.launches] == ["qkv_scores", "qkv_values"]

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
    def test_s_is_kept_in_the_type_of_the_sums(self, dtype, monkeypatch):
        asked = []
        empty = operator.empty
        monkeypatch.setattr(operator, "empty", lambda *a, **k: asked.append(empty(*a, **k)) or asked[-1])
        self.stage.qkv(*self.arguments((1, 2, 5, 3, 4), dtype))
        o, s = asked
        assert (o.shape, o.dtype) == ((1, 2, 5, 4), dtype)
        assert (s.shape, s.dtype) == ((1, 2, 5, 5), torch.float64 if dtype is torch.float64 else torch.float32)
