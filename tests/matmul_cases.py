"""The tests of every stage that multiplies matrices: C[M, N] = A[M, K] B[K, N]."""

import pytest
import torch
from conftest import GPU
from stage_cases import StageCases, free_gpu_memory, same
from torch import Tensor

from stages.families import FLOATING
from stages.toolkit import xray

SIZES = [  # M, N, K
    (0, 5, 7),
    (5, 0, 7),
    (5, 7, 0),
    (0, 0, 0),
    (1, 1, 1),
    (1, 33, 31),
    (33, 1, 31),
    (31, 32, 33),
    (32, 32, 32),
    (33, 31, 127),
    (127, 65, 1),
    (300, 3, 5),
    (3, 300, 5),
    (2, 3, 1000),
]

# Views with the values of a contiguous matrix x, each of which the kernel has to read in its own place.
VIEWS = {
    "transposed": lambda x: x.mT.contiguous().mT,
    "offset": lambda x: torch.nn.functional.pad(x, (3, 2, 1, 2), value=torch.nan)[1:-2, 3:-2],
    "every second": lambda x: x.repeat_interleave(2, 0).repeat_interleave(3, 1)[::2, ::3],
    "rows of a batch": lambda x: torch.stack([torch.full_like(x, torch.nan), x], 1)[:, 1],
}


class MatmulCases(StageCases):
    odd = (33, 31, 35)
    small = (3, 2, 4)

    @pytest.mark.parametrize("dtype", FLOATING, ids=str)
    @pytest.mark.parametrize("sizes", SIZES, ids=str)
    def test_output_and_gradients(self, sizes, dtype, device):
        self.check(sizes, dtype, device)

    @pytest.mark.parametrize("view_a", VIEWS)
    @pytest.mark.parametrize("view_b", VIEWS)
    def test_views(self, view_a, view_b, device):
        a, b = self.arguments(self.odd, device=device)
        assert torch.equal(self.function(VIEWS[view_a](a), VIEWS[view_b](b)), self.function(a, b))

    def test_expanded_inputs(self, device):
        a, b = self.arguments(self.odd, device=device)
        for x, y in ((a[:1].expand(40, -1), b), (a[:, :1].expand(-1, 20), b[:20]), (a, b[:, :1].expand(-1, 50))):
            assert torch.equal(self.function(x, y), self.function(x.contiguous(), y.contiguous()))

    def test_expanded_inputs_are_not_copied(self):
        a, b = (x[:1, :1].expand(32, 32) for x in self.arguments(self.odd))
        with xray.recording() as report:
            self.function(a, b)
        loads = [site for site in report.sites if site.space == "global" and site.op == "load"]
        assert loads
        assert all(site.sectors == site.requests for site in loads)  # all lanes ask for the one element there is

    def test_expanded_gradient(self, device):
        a, b = self.arguments(self.odd, device=device, requires_grad=True)
        grads = torch.autograd.grad(self.function(a, b).sum(), (a, b))  # stride 0 in both dimensions
        ones = torch.ones(a.shape[0], b.shape[1], dtype=a.dtype, device=device)
        assert torch.equal(grads[0], self.function(ones, b.detach().mT))
        assert torch.equal(grads[1], self.function(a.detach().mT, ones))

    @pytest.mark.parametrize("wanted", [(True, False), (False, True), (True, True)], ids=str)
    def test_only_gradients_that_are_asked_for_are_computed(self, wanted):
        a, b = (x.requires_grad_(w) for x, w in zip(self.arguments(self.odd), wanted, strict=True))
        output = self.function(a, b)
        with xray.recording() as report:
            output.backward(torch.ones_like(output))
        assert len(report.launches) == sum(wanted)

    def test_nan_and_infinity_stay_in_their_row_and_column(self, device):
        a, b = self.arguments(self.odd, device=device)
        expected = self.function(a, b)
        a[2, -1], b[-1, 3] = torch.nan, torch.inf
        result = self.function(a, b)
        assert result[2].isnan().all()
        reached = torch.zeros_like(result, dtype=torch.bool)
        reached[2], reached[:, 3] = True, True
        assert (result[:, 3].isinf() | result[:, 3].isnan()).all()
        assert torch.equal(result[~reached], expected[~reached])

    def test_negated_view(self, device):
        z = torch.randn(5, 5, dtype=torch.complex64, device=device)
        view = z.conj().imag
        assert view.is_neg()
        assert same(self.function(view, view), self.function(-z.imag.contiguous(), -z.imag.contiguous()))

    @pytest.mark.parametrize("sizes", [(65536 * 32 + 1, 1), (1, 65536 * 32 + 1)], ids=["tall", "wide"])
    def test_more_blocks_than_a_grid_has_in_y_or_z(self, sizes, device):
        inner = 1 if device == "cuda" else 0  # on the CPU device without the work
        like = torch.empty(0, dtype=self.stage.dtype, device=device)
        a, b = like.new_ones(sizes[0], inner), like.new_ones(inner, sizes[1])
        assert (self.function(a, b) == inner).all()

    @GPU
    @pytest.mark.skipif(free_gpu_memory() < 20e9, reason="needs 20 GB of GPU memory")
    def test_strides_past_two_to_the_31(self):
        # Three rows, 2^31 + 8 elements apart, of a small matrix that lies in a huge one.
        parent = torch.zeros(3, 2**31 + 8, dtype=torch.bfloat16, device="cuda")
        a = parent[:, -5:]
        a.copy_(torch.randn(3, 5))
        b = parent.T[-5:]
        assert torch.equal(self.function(a, b), self.function(a.contiguous(), b.contiguous()))

    @GPU
    @pytest.mark.skipif(free_gpu_memory() < 20e9, reason="needs 20 GB of GPU memory")
    @pytest.mark.parametrize("sizes", [(70000, 8, 32768), (70000, 32768, 8)], ids=["A", "C"])
    def test_more_than_two_to_the_31_elements(self, sizes):
        # The last rows of the large product are those of a small one.
        m, n, k = sizes
        a = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
        b = torch.randn(k, n, dtype=torch.bfloat16, device="cuda")
        result = self.stage.matmul(a, b)
        assert max(a.numel(), result.numel()) > 2**31
        for rows in (slice(0, 3), slice(-3, None)):
            assert torch.equal(result[rows], self.stage.matmul(a[rows], b))

    def test_wrong_arguments(self):
        x = torch.ones(2, 2)
        other = x.to("meta")
        for a, b, error, words in (
            ([[1.0]], x, TypeError, "a must be a torch.Tensor, got list"),
            (x, None, TypeError, "b must be a torch.Tensor, got NoneType"),
            (x.int(), x.int(), TypeError, "a has dtype torch.int32; allowed: torch.float64"),
            (x, x.to(torch.complex64), TypeError, "b has dtype torch.complex64; allowed"),
            (x, x.half(), TypeError, "b has dtype torch.float16, but a has torch.float32"),
            (x.to_sparse(), x, TypeError, "a has layout torch.sparse_coo; allowed: torch.strided"),
            (x, other, ValueError, "b is on meta, but a is on cpu"),
            (x[0], x, ValueError, r"a has 1 dimension \(2,\); allowed: 2"),
            (x, x[None], ValueError, r"b has 3 dimensions \(1, 2, 2\); allowed: 2"),
            (x, torch.ones(3, 2), ValueError, r"a is \(2, 2\) and b is \(3, 2\)"),
        ):
            with pytest.raises(error, match=words):
                self.stage.matmul(a, b)

    def test_inputs_are_not_written(self, device):
        a, b = self.arguments(self.odd, device=device)
        before: list[Tensor] = [a.clone(), b.clone()]
        self.function(a, b)
        assert torch.equal(a, before[0]) and torch.equal(b, before[1])
