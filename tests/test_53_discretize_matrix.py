"""Stage 53, discretize_matrix."""

import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import GPU
from stage_cases import StageCases
from torch import Tensor

import stages
from stages.families import matrix_discretization as family
from stages.families import unit_roundoff, widened
from stages.toolkit import xray
from stages.toolkit.report import Counts
from stages.toolkit.verify import outputs, relative_error

GOLDEN = sorted((Path(__file__).parent / "golden").glob("disc_mat*.npz"))
EXPONENTIALS = ("zoh", "foh")
methods = pytest.mark.parametrize("method", family.METHODS)
ROUNDINGS = 25  # of the arguments, that an error may be worth: each doubling of z adds one or two


class TestDiscretizeMatrix(StageCases):
    stage = stages.load("53")
    odd = (5, 13, 3)
    small = (2, 3, 2)

    @staticmethod
    def incoming(results: list[Tensor]) -> list[Tensor]:
        """Gradients of results, the same numbers on each device."""
        generator = torch.Generator().manual_seed(1)
        return [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in results]

    def results(self, arguments, method: str, grads: list[Tensor] | None = None, function=None) -> list[Tensor]:
        """The outputs, and the gradients of all arguments."""
        given = [x.detach().requires_grad_() for x in arguments]
        results = outputs((function or self.stage.function)(*given, method=method))
        grads = self.incoming(results) if grads is None else [g.to(x) for g, x in zip(grads, results, strict=True)]
        return [*(x.detach() for x in results), *torch.autograd.grad(results, given, grads)]

    def errors(self, arguments, method: str, function=None) -> list[float]:
        """How far all of that is from the truth."""
        found = self.results(arguments, method, function=function)
        grads = self.incoming(found[:-3])
        truths = self.results([widened(x) for x in arguments], method, grads, family.reference)
        return [relative_error(x, truth) for x, truth in zip(found, truths, strict=True)]

    def felt(self, arguments, method: str, grads: list[Tensor] | None = None) -> np.ndarray:
        """How many times as much results and gradients move as the arguments: a condition number of each, at least 1.

        All entries of an argument move at random, by as much as they are large on average: a mean of four tries.
        """
        generator = torch.Generator().manual_seed(2)
        small = 2.0**-26  # only the first derivative shows, and no rounding
        arguments = [widened(x.cpu()) for x in arguments]
        still = self.results(arguments, method, grads, family.reference)

        def moved(x: Tensor, dims: int) -> Tensor:
            size = x.square().mean([*range(-dims, 0)], keepdim=True).sqrt() if dims else x
            return x + small * size * torch.randn(x.shape, generator=generator, dtype=x.dtype)

        squares = []
        for _ in range(4):
            others = [moved(x, dims) for x, dims in zip(arguments, (2, 2, 0), strict=True)]
            found = self.results(others, method, grads, family.reference)
            squares.append([(relative_error(x, y) / small) ** 2 for x, y in zip(found, still, strict=True)])
        return np.maximum(1, np.mean(squares, axis=0) ** 0.5)

    def check_digits(self, arguments, method: str) -> None:
        """In float64 and in float32 errors are those of some roundings of the arguments, and no more."""
        felt = self.felt(arguments, method)
        for dtype in (torch.float64, torch.float32):
            given = [x.to(dtype) for x in arguments]
            found = self.results(given, method)
            grads = self.incoming(found[:-3])
            each = [in_long_double(*one, method) for one in zip(*given, zip(*grads, strict=True), strict=True)]
            for x, truth, allowed in zip(found, zip(*each, strict=True), felt, strict=True):
                truth, x = np.stack(truth), x.double().cpu().numpy()
                error = np.sqrt(np.square(x - truth).sum() / (np.square(truth).sum() or 1))
                assert error <= ROUNDINGS * unit_roundoff(dtype) * allowed

    # ---- values

    @pytest.mark.parametrize("dtype", family.DTYPES, ids=str)
    @pytest.mark.parametrize("sizes", family.PROBLEMS, ids=str)
    def test_outputs_and_gradients(self, sizes, dtype, device):
        self.check(sizes, dtype, device)

    @pytest.mark.parametrize("n", range(33))
    def test_every_size(self, n, device):
        for batch, m in ((5, 1), (2, n + 1)):
            self.check((batch, n, m), torch.float32, device)
            self.check((batch, n, m), torch.float64, device)

    @pytest.mark.parametrize("m", [2, 7, 8, 9, 15, 16, 17, 32, 33, 70])
    def test_every_number_of_inputs(self, m, device):
        for n in (4, 13, 20):
            self.check((3, n, m), torch.float32, device)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
    @pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
    def test_values_of_another_implementation(self, path, dtype, device):
        """60 digits of the values; gradients in float64 by other means."""
        with np.load(path) as file:
            golden = {name: torch.from_numpy(file[name]).to(device) for name in file}
        arguments = [golden[name].to(dtype) for name in ("A", "B", "dt")]
        assert all(torch.equal(golden[name], golden[name].float().double()) for name in ("A", "B", "dt"))
        for method, short, values, grads in (
            ("bilinear", "bil", ("bil_Abar", "bil_Bbar"), ("gA", "gB")),
            ("zoh", "zoh", ("zoh_Abar", "zoh_Bbar"), ("gA", "gB")),
            ("foh", "foh", ("zoh_Abar", "foh_B0", "foh_B1"), ("gA", "gB0", "gB1")),
        ):
            names = [*values, f"{short}_dA", f"{short}_dB", f"{short}_ddt"]
            grads = [golden[name].to(dtype) for name in grads]
            felt = self.felt(arguments, method, [x.cpu() for x in grads])
            allowed = ROUNDINGS * unit_roundoff(dtype) * felt
            allowed[-3:] += 1e-13  # gradients there are up to 4e-14 off themselves
            for name, x, most in zip(names, self.results(arguments, method, grads), allowed, strict=True):
                assert relative_error(x, golden[name]) <= most, (method, name)

    @pytest.mark.parametrize("scale", [1e-12, 1e-8, 1e-4, 0.01, 0.1, 0.5, 1.0, 3.0, 30.0])
    @methods
    def test_steps_of_all_sizes(self, method, scale, device):
        """Each degree of the series, and many doublings."""
        for sizes in ((3, 16, 2), (2, 23, 1), (2, 32, 3)):
            A, B, delta = self.arguments(sizes, torch.float64, device)
            self.check_digits((A, B, delta * scale), method)

    @methods
    def test_a_matrix_that_is_singular(self, method, device):
        """Zero, nilpotent, of rank 1, a rotation with a fixed axis: nothing is divided by A."""
        n = 5
        shift = torch.diag(torch.ones(n - 1), 1)
        one = torch.ones(n, n) / n
        turn = torch.zeros(n, n)
        turn[0, 1], turn[1, 0] = -1.0, 1.0
        A = torch.stack([torch.zeros(n, n), shift, -one, turn, shift @ shift]).double().to(device)
        B = torch.randn(5, n, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(device)
        delta = torch.tensor([0.5, 1.0, 2.0, 3.0, 0.1], dtype=torch.float64, device=device)
        self.check_digits((A, B, delta), method)
        A_bar, *B_bars = self.stage.function(A, B, delta, method=method)
        torch.testing.assert_close(A_bar[0], torch.eye(n, dtype=A.dtype, device=device), rtol=0, atol=0)
        torch.testing.assert_close(sum(B_bars)[0], delta[0] * B[0], rtol=1e-15, atol=0)
        if method != "bilinear":  # e^(shift) = sum shift^k / k!
            powers = torch.tensor([1 / math.factorial(k) for k in range(n)], dtype=torch.float64)
            torch.testing.assert_close(A_bar[1, 0].cpu(), powers, rtol=1e-15, atol=0)

    @methods
    def test_no_step_at_all(self, method, device):
        """A step of 0: A_bar = 1 and no input, with the gradients that they have."""
        A, B, delta = self.arguments((3, 6, 2), torch.float64, device)
        A_bar, *B_bars = self.stage.function(A, B, 0 * delta, method=method)
        assert torch.equal(A_bar, torch.eye(6, dtype=A.dtype, device=device).expand(3, 6, 6))
        assert not any(x.any() for x in B_bars)
        self.check_digits((A, B, 0 * delta), method)

    @methods
    def test_a_stiff_matrix(self, method, device):
        """Eigenvalues from -1 to -10^4, turned: what decays at once is not what the others feel."""
        generator = torch.Generator().manual_seed(0)
        n = 12
        turn, _ = torch.linalg.qr(torch.randn(2, n, n, generator=generator, dtype=torch.float64))
        A = (turn @ (-torch.logspace(0, 4, n, dtype=torch.float64)).diag() @ turn.mT).to(device)
        B = torch.randn(2, n, 1, generator=generator, dtype=torch.float64).to(device)
        delta = torch.tensor([0.01, 1.0], dtype=torch.float64, device=device)
        self.check_digits((A, B, delta), method)

    @methods
    def test_an_error_is_no_larger_than_the_incumbents(self, method, device):
        """Half as much more at most, where it is not so small that chance decides."""
        for sizes in ((16, 16, 1), (4, 32, 4)):
            for scale in (0.01, 1.0, 20.0):
                A, B, delta = self.arguments(sizes, torch.float32, device)
                arguments = (A, B, delta * scale)
                small = 5 * unit_roundoff(torch.float32) * self.felt(arguments, method)
                allowed = np.maximum(1.5 * np.array(self.errors(arguments, method, family.incumbent)), small)
                assert (self.errors(arguments, method) <= allowed).all()

    def test_pivots(self, device):
        """A matrix M that no elimination without pivots survives: zeros, and small numbers, where it would divide."""
        n = 11
        generator = torch.Generator().manual_seed(3)
        M = torch.stack([torch.eye(n, dtype=torch.float64)[torch.randperm(n, generator=generator)] for _ in range(6)])
        M[1::2] += 1e-9 * torch.randn(3, n, n, generator=generator, dtype=torch.float64)
        A, delta = 2 * (torch.eye(n, dtype=torch.float64) - M).to(device), torch.ones(6, dtype=torch.float64).to(device)
        B = torch.randn(6, n, 2, generator=generator, dtype=torch.float64).to(device)
        self.check_digits((A, B, delta), "bilinear")
        A_bar, _ = self.stage.function(A[::2], B[::2], delta[::2], method="bilinear")
        assert torch.equal(A_bar, 2 * M[::2].mT.to(device) - torch.eye(n, dtype=A.dtype, device=device))

    def test_a_constant_and_a_ramp_come_out_exactly(self, device):
        """zoh is exact for a constant input, foh for one that grows evenly, whatever the step; both reach -A^-1 B u."""
        A, B, delta = self.arguments((4, 7, 1), torch.float64, device)
        inverse = torch.linalg.inv(A)
        steady = -inverse @ B
        for method in ("zoh", "bilinear"):
            A_bar, B_bar = self.stage.function(A, B, delta, method=method)
            torch.testing.assert_close(A_bar @ steady + B_bar, steady)
        A_bar, B_prev, B_bar = self.stage.function(A, B, delta, method="foh")
        torch.testing.assert_close(A_bar @ steady + B_prev + B_bar, steady)
        # u = t: h = -A^-1 B t - A^-2 B solves h' = A h + B t
        dt = delta[:, None, None]
        before, after = (-inverse @ B * t - inverse @ inverse @ B for t in (2 * dt, 3 * dt))
        torch.testing.assert_close(A_bar @ before + B_prev * 2 * dt + B_bar * 3 * dt, after)

    # ---- what has no value

    @pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
    @pytest.mark.parametrize("where", ["A", "delta"])
    @methods
    def test_what_is_not_finite_stays_in_its_matrix(self, method, where, value, device):
        for n in (3, 7, 16, 20):
            arguments = dict(zip(family.ARGUMENTS, self.arguments((6, n, 2), device=device), strict=True))
            expected = self.results(arguments.values(), method)
            broken = arguments[where].clone()
            broken[(2, n - 1, 0) if where == "A" else 2] = value
            found = self.results((arguments | {where: broken}).values(), method)
            others = [0, 1, 3, 4, 5]
            assert all(torch.equal(x[others], y[others]) for x, y in zip(found, expected, strict=True))
            assert all(x[2].isnan().all() for x in found[: 3 if method == "foh" else 2])
            assert found[-3][2].isnan().all() and found[-1][2].isnan()

    def test_a_singular_solve_has_no_finite_entry(self, device):
        """1 - delta A / 2 = 0 in some direction."""
        for n in (1, 2, 8, 9, 16, 17, 32):
            A, B, delta = self.arguments((3, n, 2), torch.float32, device)
            A[1], delta[1] = 0, 0.5
            A[1].diagonal().fill_(1.0)
            A[1, n // 2, n // 2] = 4.0
            A_bar, B_bar = self.stage.function(A, B, delta, method="bilinear")
            assert not A_bar[1].isfinite().any() and not B_bar[1].isfinite().any()
            assert A_bar[[0, 2]].isfinite().all() and B_bar[[0, 2]].isfinite().all()
        A = torch.full((4, 4), 2.0, device=device)  # rank 1, and 1 - A / 2 of rank 3: rows that cancel
        A[:] = 2 * torch.eye(4, device=device) - 2 * torch.ones(4, 4, device=device)
        A_bar, B_bar = self.stage.function(A, B[0, :4], torch.ones((), device=device), method="bilinear")
        assert not A_bar.isfinite().any() and not B_bar.isfinite().any()

    def test_what_is_past_the_range(self, device):
        """e^z overflows where it has to, and is 0 where it has to be."""
        A = torch.diag(torch.tensor([1.0, -1.0], device=device))
        B = torch.ones(2, 1, device=device)
        for scale in (200.0, 1e10, 1e37):
            A_bar, B_bar = self.stage.function(A, B, torch.tensor(scale, device=device), method="zoh")
            assert not A_bar[0, 0].isfinite()
            A_bar, B_bar = self.stage.function(-A.abs(), B, torch.tensor(scale, device=device), method="zoh")
            torch.testing.assert_close(A_bar, torch.zeros_like(A_bar))
            torch.testing.assert_close(B_bar, B)

    # ---- batches and layouts

    @methods
    def test_batches_are_broadcast(self, method, device):
        generator = torch.Generator().manual_seed(0)

        def random(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, dtype=torch.float64).to(device)

        for of_A, of_B, of_delta in (
            ((), (), ()),
            ((), (), (7,)),
            ((3,), (), ()),
            ((2, 1), (1, 3), ()),
            ((4, 1, 2), (3, 1), (2,)),
            ((2, 0), (1, 1), (2, 1)),
        ):
            arguments = (random(*of_A, 5, 5), random(*of_B, 5, 2), random(*of_delta).abs() / 4)
            batch = torch.broadcast_shapes(of_A, of_B, of_delta)
            found = self.results(arguments, method)
            assert found[0].shape == (*batch, 5, 5) and found[1].shape == (*batch, 5, 2)
            truths = self.results(arguments, method, function=family.reference)
            for x, truth in zip(found, truths, strict=True):
                torch.testing.assert_close(x, truth, rtol=1e-11, atol=1e-12)

    @methods
    def test_views(self, method, device):
        """Each argument turned around in memory, every second element of a wider one, and the gradient, too."""
        arguments = list(self.arguments((3, 13, 5), device=device))
        expected = self.results(arguments, method)

        def turned(x: Tensor) -> Tensor:
            order = list(reversed(range(x.dim())))
            return x.permute(order).contiguous().permute(order)

        for view in (turned, lambda x: torch.stack([x, x * torch.nan], -1)[..., 0]):
            for which in range(3):
                given = [view(x) if which == i else x for i, x in enumerate(arguments)]
                assert all(torch.equal(x, y) for x, y in zip(self.results(given, method), expected, strict=True))
        given = [x.detach().requires_grad_() for x in arguments]
        results = self.stage.function(*given, method=method)
        one = torch.autograd.grad([x.sum() for x in results], given, retain_graph=True)  # stride 0
        two = torch.autograd.grad(results, given, [torch.ones_like(x) for x in results])
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))

    @methods
    def test_a_matrix_does_not_feel_its_neighbours(self, method, device):
        """One in a batch of small and large ones, whose series are shorter and whose doublings more, as when alone."""
        for n in (5, 12, 20):
            A, B, delta = self.arguments((24, n, 2), device=device)
            delta = delta * torch.logspace(-6, 2, 24, device=device)
            together = self.results((A, B, delta), method)
            grads = self.incoming(together[:-3])
            for i in (0, 7, 13, 18, 23):
                alone = self.results([x[i] for x in (A, B, delta)], method, [g[i] for g in grads])
                assert all(torch.equal(x[i], y) for x, y in zip(together, alone, strict=True))

    def test_more_blocks_than_a_grid_is_high(self, device):
        batch = 4 * 65536 + 5
        A = torch.linspace(-2, 0, batch, device=device)[:, None, None]
        A_bar, B_bar = self.stage.function(A, A.new_ones(1, 1), A.new_ones(()), method="bilinear")
        torch.testing.assert_close(A_bar, (1 + A / 2) / (1 - A / 2))
        torch.testing.assert_close(B_bar, 1 / (1 - A / 2))

    @GPU
    def test_offsets_of_more_than_32_bits(self):
        if torch.cuda.mem_get_info()[0] < 11 << 30:
            pytest.skip("needs 11 GiB")
        wide = torch.zeros(2, 1 << 31, dtype=torch.float16, device="cuda").view(torch.float16)
        A = wide[:, : 16 * 16].view(2, 16, 16)
        A.copy_(self.arguments((2, 16, 1), torch.float16, "cuda")[0])
        B, delta = self.arguments((2, 16, 1), torch.float16, "cuda")[1:]
        found, expected = (self.stage.function(x, B, delta, method="zoh") for x in (A, A.clone()))
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))

    def test_there_is_one_stage_to_choose(self):
        arguments = self.arguments(self.small)
        choice = family.choose(*arguments, method="zoh")
        assert (choice.stage,) == family.FASTEST == (self.stage.name,)
        with pytest.raises(ValueError, match="method is 'euler'"):
            family.choose(*arguments, method="euler")

    def test_blocks_are_counted_along_x_alone(self):
        for method in family.METHODS:
            with xray.recording() as report:
                self.results(self.arguments(self.odd), method)
            assert report.launches and {launch.grid[1:] for launch in report.launches} == {(1, 1)}

    @methods
    def test_results_repeat_bit_for_bit(self, method, device):
        arguments = self.arguments((9, 13, 5), device=device)
        one, two = self.results(arguments, method), self.results(arguments, method)
        assert all(torch.equal(x, y) for x, y in zip(one, two, strict=True))

    # ---- gradients

    def test_gradients_of_first_and_second_order(self):
        arguments = self.arguments(self.small, torch.float64, requires_grad=True)
        for method in family.METHODS:
            function = partial(self.stage.function, method=method)
            assert torch.autograd.gradcheck(function, arguments)
            for scale in (1e-3, 5.0):
                A, B, delta = arguments
                assert torch.autograd.gradcheck(lambda A, B, d, f=function, s=scale: f(A, B, s * d), arguments)
            A_bar, *_ = function(*arguments)
            (grad,) = torch.autograd.grad(A_bar.sum(), arguments[0], create_graph=True)
            with pytest.raises(NotImplementedError, match="discretize_matrix has no second derivatives"):
                torch.autograd.grad(grad.sum(), arguments[0])

    @methods
    def test_gradients_through_one_result_alone(self, method, device):
        arguments = self.arguments((3, 6, 2), torch.float64, device)
        results = self.stage.function(*arguments, method=method)
        for which in range(len(results)):
            grads = [torch.full_like(x, float(n == which)) for n, x in enumerate(results)]
            truths = self.results(arguments, method, grads, family.reference)[len(results) :]
            given = [x.detach().requires_grad_() for x in arguments]
            out = self.stage.function(*given, method=method)[which]
            # A_bar does not depend on B at all
            found = torch.autograd.grad(out, given, grads[which], allow_unused=True)
            for x, truth in zip(found, truths, strict=True):
                torch.testing.assert_close(x, truth, rtol=1e-11, atol=1e-12)

    @methods
    def test_gradients_of_some_arguments_alone(self, method, device):
        arguments = self.arguments(self.odd, device=device)
        whole = self.results(arguments, method)
        grads = self.incoming(whole[:-3])
        for which in range(3):
            given = [x.detach().requires_grad_(n == which) for n, x in enumerate(arguments)]
            results = self.stage.function(*given, method=method)
            pairs = [(x, g) for x, g in zip(results, grads, strict=True) if x.requires_grad]
            (grad,) = torch.autograd.grad([x for x, _ in pairs], given[which], [g for _, g in pairs])
            assert torch.equal(grad, whole[len(grads) + which])

    @methods
    def test_results_are_the_same_with_and_without_gradients(self, method, device):
        arguments = self.arguments(self.odd, device=device)
        first = self.stage.function(*arguments, method=method)
        second = self.stage.function(*(x.requires_grad_() for x in arguments), method=method)
        with torch.no_grad():
            third = self.stage.function(*arguments, method=method)
        for a, b, c in zip(first, second, third, strict=True):
            assert torch.equal(a, b) and torch.equal(a, c) and not a.requires_grad

    # ---- the x-ray

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
    @methods
    def test_a_backward_reads_and_writes_each_word_once(self, method, dtype):
        """But for A, B and the gradients of the exponentials, which are read again where they are needed again."""
        batch, n, m = 4, 16, 8
        arguments = self.arguments((batch, n, m), dtype, requires_grad=True)
        results = self.stage.function(*arguments, method=method)
        with xray.recording() as report:
            torch.autograd.grad(results, arguments, [torch.ones_like(x).clone() for x in results])
        assert isinstance(report.counts(), Counts) and [str(fault) for fault in report.faults] == []
        of_A, of_B = batch * n * n * dtype.itemsize // 32, batch * n * m * dtype.itemsize // 32
        warps = batch // 2
        assert report.counts().store_sectors == of_A + of_B + warps  # dA, dB and ddelta
        reads = {
            "bilinear": 3 * of_A + 3 * of_B,  # M^-1, dA_bar and A; dB_bar, and B for each of two products
            "zoh": 4 * of_A + 4 * of_B,
            "foh": 4 * of_A + 9 * of_B,  # dB_prev and dB_bar, the former also for the difference, twice; B for each
        }[method]
        assert report.counts().load_sectors == reads + warps

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
    @methods
    def test_the_products_of_a_backward(self, method, dtype):
        """As many wide loads as its products have, and the pieces that are added to them, and not one more."""
        batch, n, m, wide = 4, 16, 8, dtype.itemsize // 4
        blocks = 5 if wide == 2 else 3
        arguments = self.arguments((batch, n, m), dtype, requires_grad=True)
        results = self.stage.function(*arguments, method=method)
        with xray.recording() as report:
            torch.autograd.grad(results, arguments, [torch.ones_like(x) for x in results])
        products, pieces, of_inputs = {
            "bilinear": (3, 0, 1),
            # before the series, its derivative, after it, and two doublings
            "zoh": (1 + 6 + 3 * (blocks - 1) + 4 + 2 * 6, 1 + 6 + 4 * (blocks - 1) + 1 + 2 * 2, 1),
            "foh": (2 + 6 + 3 * (blocks - 1) + 9 + 2 * 9, 2 + 6 + 4 * (blocks - 1) + 2 + 2 * 6, 2),
        }[method]
        expected = batch // 2 * wide * (4 * (products * n + of_inputs * m) + 16 * pieces)
        found = [s for s in report.sites if s.space == "shared" and s.op == "load" and s.size == 16]
        assert sum(s.wavefronts for s in found) == expected
        assert not any(s.conflicts for s in found if s.requests > 4 * batch)

    @pytest.mark.parametrize("method", EXPONENTIALS)
    def test_a_small_step_takes_fewer_products(self, method):
        A, B, delta = self.arguments((4, 16, 8))
        for norm, blocks, doublings in ((1e-6, 1, 0), (0.1, 2, 0), (0.4, 3, 0), (2.0, 3, 2), (8.0, 3, 4)):
            report = self.stage.xray(A, B, 0 * delta + norm / 4, method=method)
            found = sum(s.wavefronts for s in report.sites if (s.space, s.op, s.size) == ("shared", "load", 16))
            if method == "zoh":
                products, pieces = 3 + blocks + 2 * doublings, 1 + 2 * blocks + doublings
            else:
                products, pieces = 5 + blocks + 3 * doublings, 2 + 2 * blocks + 3 * doublings
            assert found == 2 * (64 * products + 16 * pieces)

    def test_what_is_kept_for_the_backward_is_a_matrix_each(self, monkeypatch):
        """No powers, no levels: bilinear keeps M^-1, the exponentials nothing."""
        for method in family.METHODS:
            kept = []
            with torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: kept.append(x) or x, lambda x: x):
                self.stage.function(*self.arguments((4, 16, 8), requires_grad=True), method=method)
            assert sum(x.numel() for x in kept) <= (2 if method == "bilinear" else 1) * 4 * 16 * 16 + 4 * 16 * 8 + 4

    # ---- as an operator

    def test_opcheck(self, device):
        operator = torch.ops.stages.discretize_matrix.default
        for requires_grad in (False, True):
            for method in family.METHODS:
                arguments = self.arguments(self.odd, device=device, requires_grad=requires_grad)
                torch.library.opcheck(operator, (*arguments, method), {"save": requires_grad})

    def test_wrong_arguments(self):
        A, B, delta = self.arguments((2, 3, 4))
        good = {"A": A, "B": B, "delta": delta, "method": "zoh"}
        for name, value, error, words in (
            ("A", [1.0], TypeError, "A must be a torch.Tensor, got list"),
            ("A", A.int(), TypeError, "A has dtype torch.int32; allowed: torch.float64, "),
            ("A", torch.complex(A, A), TypeError, "A has dtype torch.complex64; allowed: torch.float64, "),
            ("A", A.to_sparse(), TypeError, "A has layout torch.sparse_coo"),
            ("B", None, TypeError, "B must be a torch.Tensor, got NoneType"),
            ("B", B.double(), TypeError, "B has dtype torch.float64, but A has torch.float32"),
            ("B", B.to("meta"), ValueError, "B is on meta, but A is on cpu"),
            ("delta", 0.1, TypeError, "delta must be a torch.Tensor, got float"),
            ("delta", delta.half(), TypeError, "delta has dtype torch.float16, but A has torch.float32"),
            ("A", A[0, 0], ValueError, r"A is \(3,\); allowed: \(.., n, n\)"),
            ("B", B[0, 0], ValueError, r"B is \(4,\); allowed: \(.., n, m\)"),
            ("A", A[:, :2], ValueError, r"A is \(2, 2, 3\); allowed: \(.., n, n\) with n at most 32"),
            ("A", torch.ones(2, 33, 33), ValueError, r"A is \(2, 33, 33\); .* with n at most 32"),
            ("B", B[:, :2], ValueError, r"B is \(2, 2, 4\) and A is \(2, 3, 3\); .*, here \(.., 3, m\)"),
            ("delta", torch.ones(3), ValueError, r"delta is \(3,\); allowed: .* can be broadcast to one shape"),
            ("B", torch.ones(3, 3, 4), ValueError, r"B is \(3, 3, 4\) and delta is \(2,\); allowed: "),
            ("method", None, TypeError, "method must be a str, got NoneType"),
            ("method", "euler", ValueError, "method is 'euler'; allowed: 'bilinear', 'zoh' or 'foh'"),
        ):
            with pytest.raises(error, match=words):
                self.stage.function(**(good | {name: value}))
        with pytest.raises(TypeError, match="method"):
            self.stage.function(A, B, delta)

    @GPU
    @methods
    def test_a_gpu_gives_what_the_cpu_device_gives(self, method):
        arguments = self.arguments((70, 16, 3))
        there = self.results([x.cuda() for x in arguments], method)
        for x, y in zip(self.results(arguments, method), there, strict=True):
            assert relative_error(y.cpu(), widened(x)) <= 1e-6


def in_long_double(A: Tensor, B: Tensor, delta: Tensor, grads: tuple[Tensor, ...], method: str) -> list[np.ndarray]:
    """The results for one matrix, and the gradients, with 64 bits to a number, by the plainest formulas."""
    A, B, dt, *grads = (np.asarray(x.double().cpu().numpy(), dtype=np.longdouble) for x in (A, B, delta, *grads))
    (n, m), identity = B.shape, np.eye(len(A), dtype=np.longdouble)
    if method == "bilinear":
        M = identity - dt * A / 2
        inverse = np.linalg.inv(M.astype(float)).astype(np.longdouble)
        for _ in range(3):
            inverse = inverse @ (2 * identity - M @ inverse)  # Newton
        results = [2 * inverse - identity, dt * inverse @ B]
        V = inverse.T @ grads[1]
        S = (inverse.T @ grads[0] + dt / 2 * V @ B.T) @ inverse.T
    else:
        K, G = np.zeros((2, n + 2 * m, n + 2 * m), dtype=np.longdouble)
        K[:n, :n], K[:n, n : n + m], K[n : n + m, n + m :] = dt * A, dt * B, np.eye(m)
        G[:n, :n], G[:n, n : n + m] = grads[:2]
        if method == "foh":
            G[:n, n + m :] = grads[2] - grads[1]
        both = exponential_in_long_double(np.block([[K.T, G], [0 * K, K.T]]))
        e, one, two = np.split(both[: len(K), : len(K)].T[:n], (n, n + m), axis=1)
        results = [e, one] if method == "zoh" else [e, one - two, two]
        S, V, _ = np.split(both[:n, len(K) :], (n, n + m), axis=1)  # what G gives to K
    return [*results, dt * S, dt * V, (S * A).sum() + (V * B).sum()]


def exponential_in_long_double(x: np.ndarray) -> np.ndarray:
    doublings = max(0, math.frexp(np.abs(x).sum(0).max(initial=0))[1] + 4)
    term = result = np.eye(len(x), dtype=np.longdouble)
    for k in range(1, 20):
        term = term @ x / 2**doublings / k
        result = result + term
    for _ in range(doublings):
        result = result @ result
    return result
