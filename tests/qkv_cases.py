"""The tests of every stage that computes O = s (Q K^T) V."""

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import GPU
from stage_cases import StageCases, free_gpu_memory, same
from torch import Tensor

from stages.families import FLOATING, qkv
from stages.toolkit import xray
from stages.toolkit.verify import relative_error

SIZES = [  # B, N, T, Dk, Dv
    (0, 2, 5, 4, 4),
    (2, 0, 5, 4, 4),
    (2, 3, 0, 4, 4),
    (2, 3, 5, 0, 4),
    (2, 3, 5, 4, 0),
    (0, 0, 0, 0, 0),
    (1, 1, 1, 1, 1),
    (1, 2, 31, 33, 32),
    (2, 1, 32, 31, 1),
    (1, 1, 33, 1, 31),
    (1, 2, 63, 64, 65),
    (1, 1, 65, 16, 127),
    (1, 1, 130, 17, 128),
    (1, 1, 5, 256, 256),
    (1, 1, 3, 512, 520),
    (3, 2, 1, 5, 3),
]

# Views with the values of a contiguous x, each of which the kernels have to read in its own place.
VIEWS = {
    "heads of a projection": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "transposed": lambda x: x.mT.contiguous().mT,
    "every order": lambda x: x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
    "a third of a wider one": lambda x: torch.cat([x * torch.nan, x, x * torch.nan], 3).chunk(3, 3)[1],
    "every second": lambda x: x.repeat_interleave(2, 2).repeat_interleave(3, 3)[:, :, ::2, ::3],
}


class QkvCases(StageCases):
    odd = (2, 3, 70, 17, 35)
    small = (1, 2, 3, 2, 2)

    def results(self, arguments: tuple[Tensor, ...]) -> list[Tensor]:
        """The outputs with every set of options."""
        return [function(*arguments) for function in self.functions(arguments[0].dtype)]

    @pytest.mark.parametrize("dtype", FLOATING, ids=str)
    @pytest.mark.parametrize("sizes", SIZES, ids=str)
    def test_output_and_gradients(self, sizes, dtype, device):
        self.check(sizes, dtype, device)

    def test_scale(self, device):
        q, k, v = self.arguments((1, 2, 40, 16, 8), device=device)
        expected = self.stage.qkv(q, k, v)
        assert torch.equal(self.stage.qkv(q, k, v, scale=0.25), expected)
        assert torch.equal(self.stage.qkv(q, k, v, scale=-0.5), -2 * expected)
        assert torch.equal(self.stage.qkv(q, k, v, scale=2), 8 * expected)
        assert not self.stage.qkv(q, k, v, scale=0).any()

    def test_gradients_take_the_scale(self, device):
        if not self.stage.gradients:
            pytest.skip("this stage has no backward")
        arguments = self.arguments((1, 2, 40, 16, 8), device=device, requires_grad=True)
        for function in self.functions():
            one, two = (torch.autograd.grad(function(*arguments, scale=s).sum(), arguments) for s in (0.25, 0.5))
            assert all(torch.equal(2 * x, y) and x.any() for x, y in zip(one, two, strict=True))

    @pytest.mark.parametrize("view", VIEWS)
    @pytest.mark.parametrize("which", range(3), ids=["q", "k", "v"])
    def test_views(self, view, which, device):
        arguments = list(self.arguments((2, 3, 40, 17, 20), device=device))
        expected = self.results(arguments)
        arguments[which] = VIEWS[view](arguments[which])
        assert all(torch.equal(x, y) for x, y in zip(self.results(arguments), expected, strict=True))

    def test_expanded_inputs(self, device):
        q, k, v = self.arguments((2, 3, 40, 17, 20), device=device)
        for given in (
            (q[:1].expand(2, -1, -1, -1), k, v),
            (q, k[:, :1].expand(-1, 3, -1, -1), v[:, :1].expand(-1, 3, -1, -1)),  # one head of keys for all
            (q[..., :1].expand(-1, -1, -1, 17), k, v[:, :, :1].expand(-1, -1, 40, -1)),
        ):
            copies = [x.contiguous() for x in given]
            assert all(torch.equal(x, y) for x, y in zip(self.results(given), self.results(copies), strict=True))

    def test_heads_of_a_projection_are_not_copied(self):
        x = torch.randn(2, 40, 3 * 2 * 16)
        q, k, v = x.view(2, 40, 3, 2, 16).permute(2, 0, 3, 1, 4)
        with xray.recording() as report:
            self.stage.qkv(q, k, v)
        names = {site.name for site in report.sites if site.space == "global"}
        assert {"q", "k", "v", "o"} <= names
        assert {launch.stage for launch in report.launches} == {self.stage.name}
        assert torch.equal(self.stage.qkv(q, k, v), self.stage.qkv(*(x.contiguous() for x in (q, k, v))))

    def test_expanded_gradient(self, device):
        if not self.stage.gradients:
            pytest.skip("this stage has no backward")
        arguments = self.arguments(self.odd, device=device, requires_grad=True)
        for function in self.functions():
            output = function(*arguments)
            one = torch.autograd.grad(output.sum(), arguments, retain_graph=True)  # stride 0 in all dimensions
            two = torch.autograd.grad(output, arguments, torch.ones_like(output))
            assert all(torch.equal(x, y) for x, y in zip(one, two, strict=True))

    @pytest.mark.parametrize("which", range(3), ids=["q", "k", "v"])
    def test_only_gradients_that_are_asked_for_are_computed(self, which):
        if not self.stage.gradients:
            pytest.skip("this stage has no backward")
        arguments = list(self.arguments((1, 1, 5, 3, 2)))
        arguments[which].requires_grad_()
        with xray.recording() as forward:
            output = self.stage.qkv(*arguments)
        with xray.recording() as backward:
            output.backward(torch.ones_like(output))
        assert len(backward.launches) == len(forward.launches)

    def test_rows_do_not_know_each_other(self, device):
        """A part of the rows gives, bit for bit, what the whole gives there."""
        q, k, v = self.arguments((1, 2, 150, 20, 9), device=device)
        some = torch.zeros_like(q)
        some[:, :, 100:140] = q[:, :, 100:140]
        for whole, part in zip(self.results((q, k, v)), self.results((some, k, v)), strict=True):
            assert torch.equal(whole[:, :, 100:140], part[:, :, 100:140])
            assert not part[:, :, :100].any() and not part[:, :, 140:].any()

    def test_heads_do_not_know_each_other(self, device):
        arguments = self.arguments((2, 3, 66, 5, 7), device=device)
        one = [x[1:, 2:] for x in arguments]
        for whole, part in zip(self.results(arguments), self.results(one), strict=True):
            assert torch.equal(whole[1:, 2:], part)

    def test_nan_and_infinity_stay_where_they_belong(self, device):
        q, k, v = self.arguments((1, 1, 70, 5, 7), device=device)
        expected = self.stage.qkv(q, k, v)
        q[0, 0, 3, 2], q[0, 0, 66, 0] = torch.nan, torch.inf
        result, truth = self.stage.qkv(q, k, v), qkv.reference(q, k, v)
        assert result[0, 0, 3].isnan().all()
        assert same(result[0, 0, 66].double(), truth[0, 0, 66])  # the padding of the last tile adds no 0 * infinity
        rest = [row for row in range(70) if row not in (3, 66)]
        assert torch.equal(result[:, :, rest], expected[:, :, rest])

    def test_blocks_are_counted_along_x_alone(self):
        """y and z of a grid end at 65535, which batch x heads and T may pass."""
        for function in self.functions():
            with xray.recording() as report:
                function(*self.arguments(self.odd))
            assert {launch.grid[1:] for launch in report.launches} == {(1, 1)}

    @GPU
    def test_more_batches_and_heads_than_a_grid_has_in_y_or_z(self):
        for batch, heads in ((66_000, 1), (3, 22_000)):
            x = torch.ones(1, 1, 1, 1, device="cuda").expand(batch, heads, 1, 1)
            assert (self.stage.qkv(x, x, x) == 1).all()

    @GPU
    @pytest.mark.skipif(free_gpu_memory() < 25e9, reason="needs 25 GB of GPU memory")
    def test_more_rows_than_a_grid_has_in_y_or_z(self):
        x = torch.ones(1, 1, 70_001, 1, device="cuda")
        for function, options in zip(self.functions(), self.options(), strict=True):
            counts = torch.arange(1.0, 70_002, device="cuda") if options.get("causal") else torch.full_like(x, 70_001)
            assert torch.equal(function(x, x, x).flatten(), counts.flatten())

    def test_negated_view(self, device):
        z = torch.randn(1, 1, 5, 5, dtype=torch.complex64, device=device)
        view = z.conj().imag
        assert view.is_neg()
        negated = -z.imag.contiguous()
        assert same(self.stage.qkv(view, view, view), self.stage.qkv(negated, negated, negated))

    @GPU
    @pytest.mark.skipif(free_gpu_memory() < 40e9, reason="needs 40 GB of GPU memory")
    def test_strides_past_two_to_the_31(self):
        parent = torch.zeros(3, 2**31 + 8, dtype=torch.bfloat16, device="cuda")  # rows of a small x, far apart
        x = parent[:, -5:]
        x.copy_(torch.randn(3, 5))
        x = x[None, None]
        assert torch.equal(self.stage.qkv(x, x, x), self.stage.qkv(*[x.contiguous()] * 3))

    def test_wrong_arguments(self):
        x = torch.ones(1, 2, 3, 4)
        for q, k, v, scale, error, words in (
            ([[1.0]], x, x, None, TypeError, "q must be a torch.Tensor, got list"),
            (x, None, x, None, TypeError, "k must be a torch.Tensor, got NoneType"),
            (x, x, x.int(), None, TypeError, "v has dtype torch.int32; allowed: torch.float64"),
            (x, x.half(), x, None, TypeError, "k has dtype torch.float16, but q has torch.float32"),
            (x, x, x.double(), None, TypeError, "v has dtype torch.float64, but q has torch.float32"),
            (x.to_sparse(), x, x, None, TypeError, "q has layout torch.sparse_coo; allowed: torch.strided"),
            (x, x, x.to("meta"), None, ValueError, "v is on meta, but q is on cpu"),
            (x[0], x, x, None, ValueError, r"q has 3 dimensions \(2, 3, 4\); allowed: 4"),
            (x, x[..., 1:], x, None, ValueError, r"k is \(1, 2, 3, 3\) and q is \(1, 2, 3, 4\); allowed: the same"),
            (x, x[:, :, 1:], x, None, ValueError, r"k is \(1, 2, 2, 4\) and q is"),
            (x, x, x[:, :, 1:], None, ValueError, r"v is \(1, 2, 2, 4\) and q is .*the same B, N and T"),
            (x, x, x, "1", TypeError, "scale must be a real number .* got str"),
            (x, x, x, True, TypeError, "scale must be a real number .* got bool"),
            (x, x, x, torch.ones(()), TypeError, "scale must be a real number .* got Tensor"),
        ):
            with pytest.raises(error, match=words):
                self.stage.qkv(q, k, v, scale=scale)

    def test_inputs_are_not_written(self, device):
        arguments = self.arguments(self.odd, device=device)
        before = [x.clone() for x in arguments]
        self.results(arguments)
        assert all(torch.equal(x, y) for x, y in zip(arguments, before, strict=True))

    def test_without_the_mask_it_says_who_has_it(self):
        if {"causal": True} in self.stage.options():
            pytest.skip("this stage has the mask")
        x = torch.ones(1, 1, 2, 2)
        with pytest.raises(NotImplementedError, match=f"{self.stage.operator} has no causal=True; stage 23 has it"):
            self.stage.qkv(x, x, x, causal=True)


GOLDEN = sorted((Path(__file__).parent / "golden").glob("causal_qkv_*.npz"))


def check_golden(function, path: Path, dtype: torch.dtype, device: str) -> None:
    """Output and gradients of the causal product against those of another implementation, in float64."""
    with np.load(path) as file:
        golden = {name: torch.from_numpy(file[name]).to(device) for name in file}
    q, k, v = (golden[name].to(dtype).requires_grad_() for name in "qkv")
    output = function(q, k, v, scale=golden["scale"].item(), causal=True)
    output.backward(golden["g"].to(dtype))
    batch, heads, seq, width = q.shape
    sizes = {"B": batch, "N": heads, "T": seq, "Dk": width, "Dv": v.shape[3]}
    allowed = qkv.tolerance(sizes, dtype, causal=True)
    for name, result, key in (("output", output, "y"), ("q", q.grad, "dq"), ("k", k.grad, "dk"), ("v", v.grad, "dv")):
        assert relative_error(result.detach(), golden[key]) <= allowed[name]
