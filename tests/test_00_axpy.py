"""Stage 00, axpy."""

import pytest
import torch
from conftest import GPU
from stage_cases import StageCases, free_gpu_memory, same

import stages
from stages.families import FLOATING

SIZES = [0, 1, 31, 32, 33, 127, 255, 256, 257, 1000, 10_000]


class TestAxpy(StageCases):
    stage = stages.load("00")
    odd = (1000,)
    small = (5,)

    @pytest.mark.parametrize("dtype", FLOATING, ids=str)
    @pytest.mark.parametrize("size", SIZES)
    def test_output_and_gradients(self, size, dtype, device):
        self.check((size,), dtype, device)

    @pytest.mark.parametrize("dtype", FLOATING, ids=str)
    def test_counts_equal_the_closed_forms_for_any_size(self, dtype):
        for size in SIZES:
            report = self.stage.xray(*self.arguments((size,), dtype))
            assert report.counts() == self.stage.cost(N=size, itemsize=dtype.itemsize)

    @pytest.mark.parametrize("shape", [(), (1,), (3, 4), (2, 0, 3), (5, 1, 7), (2, 3, 4, 5)], ids=str)
    def test_any_shape(self, shape, device):
        x, y = torch.randn(2, *shape, device=device)
        result = self.stage.axpy(2.0, x, y)
        assert result.shape == shape and result.is_contiguous()
        torch.testing.assert_close(result, 2.0 * x + y)

    def test_views(self, device):
        x, y = torch.randn(2, 12, 10, device=device)
        expected = self.stage.axpy(0.5, x, y)
        for view in (
            x.mT.contiguous().mT,  # needs a copy
            torch.stack([x, x], 2)[..., 1],  # a stride of 2
            torch.nn.functional.pad(x, (1, 2, 3, 4))[3:-4, 1:-2],
        ):
            assert not view.is_contiguous()
            assert torch.equal(self.stage.axpy(0.5, view, y), expected)
            assert torch.equal(self.stage.axpy(0.5, y, view), self.stage.axpy(0.5, y, x))

    def test_expanded(self, device):
        one, y = torch.randn(1, device=device), torch.randn(4, 300, device=device)
        assert torch.equal(self.stage.axpy(3, one.expand(4, 300), y), self.stage.axpy(3, one.repeat(4, 300), y))

    def test_expanded_gradient(self, device):
        x, y = torch.randn(2, 300, device=device)
        x.requires_grad_(), y.requires_grad_()
        grads = torch.autograd.grad(self.stage.axpy(3.0, x, y).sum(), (x, y))
        assert (grads[0] == 3).all() and (grads[1] == 1).all()

    def test_nan_and_infinity_propagate(self, device):
        x, y = torch.zeros(2, 300, device=device)
        x[7], x[8], y[9] = torch.nan, torch.inf, -torch.inf
        assert same(self.stage.axpy(2.0, x, y), 2.0 * x + y)
        assert self.stage.axpy(float("nan"), y.nan_to_num(), y.nan_to_num()).isnan().all()

    def test_x_and_y_may_be_one_tensor(self, device):
        x = torch.randn(100, device=device)
        torch.testing.assert_close(self.stage.axpy(2.0, x, x), 3 * x)

    @GPU
    @pytest.mark.skipif(free_gpu_memory() < 20e9, reason="needs 20 GB of GPU memory")
    def test_more_than_two_to_the_31_elements(self):
        size = 2**31 + 300
        x = torch.ones(size, dtype=torch.bfloat16, device="cuda")
        y = torch.full_like(x, 2.0)
        x[-1] = 5.0
        result = self.stage.axpy(3.0, x, y)
        assert result[-1] == 17.0
        assert (result[:-1] == 5.0).all()

    def test_compiled_with_several_alphas(self, device):
        x, y = torch.randn(2, 40, device=device)
        compiled = torch.compile(self.stage.axpy, fullgraph=True, backend="aot_eager")
        for alpha in (2.5, -1.0, 3, 0.1):
            assert torch.equal(compiled(alpha, x, y), self.stage.axpy(alpha, x, y))

    def test_wrong_arguments(self):
        x = torch.ones(3)
        for alpha, a, b, error, words in (
            ("2", x, x, TypeError, "alpha must be a real number .*, got str"),
            (2j, x, x, TypeError, "alpha must be a real number .*, got complex"),
            (x[0], x, x, TypeError, "alpha must be a real number .*, got Tensor"),
            (1.0, [1.0], x, TypeError, "x must be a torch.Tensor, got list"),
            (1.0, x, x.long(), TypeError, "y has dtype torch.int64; allowed: torch.float64"),
            (1.0, x, x.double(), TypeError, "y has dtype torch.float64, but x has torch.float32"),
            (1.0, x.to_sparse(), x, TypeError, "x has layout torch.sparse_coo; allowed: torch.strided"),
            (1.0, x, x.to("meta"), ValueError, "y is on meta, but x is on cpu"),
            (1.0, x, x[:1], ValueError, r"x is \(3,\) and y is \(1,\); allowed: the same shape"),
        ):
            with pytest.raises(error, match=words):
                self.stage.axpy(alpha, a, b)
