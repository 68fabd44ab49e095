"""Stage 53, discretize_matrix."""

import importlib
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import GPU
from stage_cases import StageCases
from torch import Tensor

import stages
from stages.families import discretize_matrix as family
from stages.families import widened
from stages.toolkit import xray
from stages.toolkit.verify import relative_error

METHODS = family.METHODS
GOLDEN = sorted((Path(__file__).parent / "golden").glob("disc_mat*.npz"))
sectors = importlib.import_module("stages.53_discretize_matrix.stage").sectors
VIEWS = {
    "transposed": lambda x: x.mT.contiguous().mT if x.dim() > 1 else x,
    "every second": lambda x: torch.stack([x, x * torch.nan], -1)[..., 0],
    "one element off": lambda x: torch.cat([x.new_full((1,), torch.nan), x.flatten()])[1:].view(x.shape),
    "turned": lambda x: x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim()))),
}


def problem(n: int, m: int = 2, count: int = 3, dtype: torch.dtype = torch.float64, device: str = "cpu", seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(count, n, n, generator=generator, dtype=torch.float64) / max(1, n) ** 0.5
    B = torch.randn(count, n, m, generator=generator, dtype=torch.float64)
    delta = torch.rand(count, generator=generator, dtype=torch.float64) + 0.1
    return tuple(x.to(device, dtype) for x in (A, B, delta))


class TestDiscretizeMatrix(StageCases):
    stage = stages.load("53")
    odd = (5, 7, 3)
    small = (2, 3, 2)

    def results(self, arguments, method: str, function=None) -> list[Tensor]:
        """The factors, and the gradients of A, B and delta for gradients that do not depend on the dtype."""
        given = [x.detach().requires_grad_() for x in arguments]
        outputs = (function or self.stage.function)(*given, method=method)
        generator = torch.Generator().manual_seed(1)
        grads = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in outputs]
        return [*(x.detach() for x in outputs), *torch.autograd.grad(outputs, given, grads)]

    def compare(self, arguments, method: str, allowed: float) -> None:
        found = self.results(arguments, method)
        truth = self.results([widened(x) for x in arguments], method, family.reference)
        for x, y in zip(found, truth, strict=True):
            assert relative_error(x, y) <= allowed, f"{method}: {relative_error(x, y):.1e}"

    # ---- counts: how often a step is halved depends on its numbers, so that there are no closed forms of them

    def test_counts_equal_the_closed_forms(self):
        """Of what goes through global memory there are."""
        for method, m, count in itertools.product(METHODS, (8, 16), (8, 24)):
            report = self.stage.xray(*self.arguments((count, 16, m), method=method), method=method)
            counts = report.counts()
            assert (counts.load_sectors, counts.store_sectors) == sectors(count, m, method)
            assert counts.barriers == 0 and [str(fault) for fault in report.faults] == []

    def test_the_closed_forms_hold_where_the_readme_uses_them(self):
        """It uses none."""
        assert self.stage.cost is None

    # ---- values

    def test_squarings_cost_few_digits(self):
        """Of steps that are halved often: whatever the numbers are, the results are within the tolerance."""
        for seed in range(20):
            arguments = family.make({"M": 5, "n": 7, "m": 3}, torch.float32, seed=seed, method="zoh")
            self.compare(list(arguments), "zoh", family.tolerance({}, torch.float32)["A_bar"])

    @pytest.mark.parametrize("dtype", family.DTYPES, ids=str)
    @pytest.mark.parametrize("sizes", family.PROBLEMS, ids=str)
    def test_outputs(self, sizes, dtype, device):
        self.check(sizes, dtype, device)

    @pytest.mark.parametrize("method", METHODS)
    def test_every_n(self, method, device):
        for n in range(1, 33):
            for dtype, allowed in ((torch.float64, 1e-12), (torch.float32, 5e-6)):
                self.compare(problem(n, 1 + n % 3, dtype=dtype, device=device), method, allowed)

    @pytest.mark.parametrize("m", [0, 1, 2, 4, 5, 8, 9, 16, 17, 31, 32, 33, 64, 70])
    def test_every_number_of_inputs(self, m, device):
        for method, n in itertools.product(METHODS, (3, 8, 11, 32)):
            self.compare(problem(n, m, device=device), method, 1e-12)

    @pytest.mark.parametrize("sizes", [(0, 3, 2), (2, 0, 3), (2, 0, 0), (0, 0, 0)], ids=str)
    def test_empties(self, sizes, device):
        count, n, m = sizes
        for method in METHODS:
            found = self.results(problem(n, m, count, device=device), method)
            shapes = [(count, n, n), *[(count, n, m)] * (2 if method == "foh" else 1)]
            assert [x.shape for x in found] == [*shapes, (count, n, n), (count, n, m), (count,)]
            assert all((x == 0).all() for x in found)

    @pytest.mark.parametrize("dtype", family.DTYPES, ids=str)
    @pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
    def test_golden_values(self, path, dtype, device):
        with np.load(path) as file:
            golden = {name: torch.from_numpy(file[name]).to(device) for name in file}
        A, B, delta = (golden[name].to(dtype) for name in ("A", "B", "dt"))
        condition = max(1.0, float((golden["A"] * golden["dt"]).norm()))
        allowed = (1e-12 if dtype is torch.float64 else 1e-5) * condition
        names = {
            "bilinear": (("bil_Abar", "bil_Bbar"), ("gA", "gB"), ("bil_dA", "bil_dB", "bil_ddt")),
            "zoh": (("zoh_Abar", "zoh_Bbar"), ("gA", "gB"), ("zoh_dA", "zoh_dB", "zoh_ddt")),
            "foh": (("zoh_Abar", "foh_B0", "foh_B1"), ("gA", "gB0", "gB1"), ("foh_dA", "foh_dB", "foh_ddt")),
        }
        given = [x.requires_grad_() for x in (A, B, delta)]
        for method, (keys, grads, gradients) in names.items():
            outputs = self.stage.function(*given, method=method)
            found = torch.autograd.grad(outputs, given, [golden[key].to(dtype) for key in grads])
            for x, key in zip((*outputs, *found), (*keys, *gradients), strict=True):
                assert relative_error(x.detach(), golden[key]) <= allowed, (method, key)

    def test_a_diagonal_matrix_is_stage_50(self, device):
        a, B, delta = (
            -torch.rand(4, 9, device=device).double(),
            torch.rand(4, 9, 3, device=device).double(),
            torch.rand(4, device=device).double(),
        )
        for method in METHODS:
            *factors, gain = stages.discretize(a, delta[:, None], method=method)
            found = self.stage.function(torch.diag_embed(a), B, delta, method=method)
            expected = [torch.diag_embed(factors[0]), *(g[..., None] * B for g in (*factors[1:], gain))]
            for x, y in zip(found, expected, strict=True):
                assert relative_error(x, y) <= 1e-14

    def test_a_constant_input_and_a_ramp(self, device):
        """What the differential equation says after many steps, and for `foh` at each of them."""
        A, B, delta = problem(6, 1, 4, device=device)
        A = A - 2 * torch.eye(6, device=device)
        rest = torch.linalg.solve(-A, B)
        for method in METHODS:
            A_bar, *of_inputs = self.stage.function(A, B, delta, method=method)
            h = torch.linalg.solve(torch.eye(6, device=device) - A_bar, sum(of_inputs))
            assert relative_error(h, rest) <= 1e-12
        A_bar, B_prev, B_bar = self.stage.function(A, B, delta, method="foh")
        slope = torch.linalg.solve(A, B)  # h = -A^-1 (t B + A^-1 B) follows u = t
        exact = [-(t * slope + torch.linalg.solve(A, slope)) for t in (delta[:, None, None], 2 * delta[:, None, None])]
        u = delta[:, None, None]
        assert relative_error(A_bar @ exact[0] + B_prev * u + B_bar * 2 * u, exact[1]) <= 1e-12

    def test_singular_nilpotent_and_skew(self, device):
        shift = torch.diag(torch.ones(4, dtype=torch.float64, device=device), 1)
        B, half = (
            torch.ones(5, 1, dtype=torch.float64, device=device),
            torch.tensor(0.5, dtype=torch.float64, device=device),
        )
        powers = [torch.linalg.matrix_power(shift * half, k) for k in range(5)]
        A_bar, B_bar = self.stage.function(shift, B, half, method="zoh")
        factorial = [1, 1, 2, 6, 24, 120]
        assert relative_error(A_bar, sum(p / factorial[k] for k, p in enumerate(powers))) <= 1e-15
        assert relative_error(B_bar, sum(p / factorial[k + 1] for k, p in enumerate(powers)) @ B * half) <= 1e-15
        nothing = torch.zeros(5, 5, dtype=torch.float64, device=device)
        for method in METHODS:
            A_bar, *of_inputs = self.stage.function(nothing, B, half, method=method)
            assert torch.equal(A_bar, torch.eye(5, dtype=torch.float64, device=device))
            assert all(torch.allclose(x, B * half / len(of_inputs), rtol=1e-15) for x in of_inputs)
        x = torch.randn(3, 12, 12, dtype=torch.float64, device=device)
        for method in METHODS:
            A_bar = self.stage.function(x - x.mT, x[..., :1], half, method=method)[0]
            assert relative_error(A_bar.mT @ A_bar, torch.eye(12, device=device).double().expand(3, 12, 12)) <= 1e-13

    def test_short_steps_keep_their_digits(self, device):
        """B_bar is dt B to the last digits, and A_bar - I is dt A where float32 can still tell it from 0."""
        A, B, _ = problem(8, 2, dtype=torch.float32, device=device)
        for step in (1e-4, 1e-8, 1e-30):
            for method in METHODS:
                A_bar, *of_inputs = self.stage.function(A, B, torch.full((3,), step, device=device), method=method)
                assert relative_error(sum(of_inputs), step * B.double()) <= 3 * step + 2e-7
                assert (A_bar - torch.eye(8, device=device) - step * A).abs().max() <= 6e-8 + step**2 * 10

    def test_stiff_systems(self, device):
        """Norms of a thousand and more; nothing overflows."""
        A, B, _ = problem(8, 2, dtype=torch.float64, device=device)
        A = -(A @ A.mT) - 0.1 * torch.eye(8, device=device)
        for step in (1e2, 1e4):
            for method in METHODS:
                found = self.stage.function(A, B, torch.full((3,), step, device=device).double(), method=method)
                truth = family.reference(A, B, torch.full((3,), step, device=device).double(), method=method)
                for x, y in zip(found, truth, strict=True):
                    torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9 * float(truth[-1].abs().max()))

    def test_no_worse_than_torch(self, device):
        """Error no more than 1.5 times that of torch's own in float32, or some roundings."""
        for n, method in itertools.product((4, 16, 32), METHODS):
            arguments = problem(n, 2, 40, torch.float32, device)
            truth = self.results([x.double() for x in arguments], method, family.reference)
            own, theirs = self.results(arguments, method), self.results(arguments, method, family.incumbent)
            for x, y, z in zip(own, theirs, truth, strict=True):
                assert relative_error(x, z) <= max(1.5 * relative_error(y, z), 3e-7), (n, method)

    def test_rows_that_have_to_be_exchanged(self, device):
        """Zeros where the first pivots would be, in every place; a tie, too."""
        for n in (2, 3, 8, 9, 16, 17, 32):
            generator = torch.Generator().manual_seed(n)
            M = torch.eye(n, dtype=torch.float64)[
                torch.stack([torch.randperm(n, generator=generator) for _ in range(6)])
            ]
            M = M + 0.01 * torch.rand(6, n, n, generator=generator, dtype=torch.float64) * (M > 0)
            A = 2 * (torch.eye(n) - M)  # I - A / 2 is M, a step of 1
            B = torch.randn(6, n, 2, generator=generator, dtype=torch.float64)
            one = torch.ones(6, dtype=torch.float64)
            self.compare([x.to(device) for x in (A, B, one)], "bilinear", 1e-12)

    @pytest.mark.parametrize("value", [torch.nan, torch.inf])
    def test_what_is_no_number_shows_in_its_system_alone(self, value, device):
        for n, method in itertools.product((3, 8, 16, 32), METHODS):
            A, B, delta = problem(n, 2, 5, torch.float32, device)
            expected = self.stage.function(A, B, delta, method=method)
            A[2, n // 2, 1] = value
            found = self.stage.function(A, B, delta, method=method)
            others = [0, 1, 3, 4]
            assert all(torch.equal(x[others], y[others]) for x, y in zip(found, expected, strict=True))
            assert not found[0][2].isfinite().all()

    def test_a_system_without_a_solution(self, device):
        """I - dt/2 A = 0: what is divided by 0 is not finite, and nothing else happens."""
        A = 2 * torch.eye(4, device=device).expand(2, 4, 4)
        found = self.stage.function(A, torch.ones(4, 1, device=device), torch.ones(2, device=device), method="bilinear")
        assert all(not x.isfinite().any(-1).all() for x in found)

    def test_results_repeat_bit_for_bit(self, device):
        for method in METHODS:
            arguments = problem(13, 3, 50, torch.float32, device)
            one, two = self.results(arguments, method), self.results(arguments, method)
            assert all(torch.equal(x, y) for x, y in zip(one, two, strict=True))

    def test_many_systems(self, device):
        A, B, delta = problem(2, 1, 65537 + 3, torch.float32, device)
        arguments = A - 2 * torch.eye(2, device=device), B, delta
        for method in METHODS:
            found = self.stage.function(*arguments, method=method)
            for x, y in zip(found, family.reference(*arguments, method=method), strict=True):
                assert relative_error(x, y) <= 3e-6

    # ---- layouts

    @pytest.mark.parametrize("view", VIEWS)
    def test_views(self, view, device):
        for method, n in itertools.product(METHODS, (5, 16)):
            arguments = problem(n, 3, 4, torch.float32, device)
            expected = self.results(arguments, method)
            found = self.results([VIEWS[view](x) for x in arguments], method)
            assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))

    def test_shapes_that_are_broadcast(self, device):
        A, B, delta = problem(4, 2, 6, device=device)
        for method in METHODS:
            for a, b, d in (
                (A, B[0], delta),
                (A[0], B, delta[0]),
                (A[0], B[0], delta.view(2, 3)),
                (A.view(2, 3, 4, 4), B[:3], delta[0]),
                (A[:2, None], B[:3], delta[:1]),
            ):
                self.compare((a, b, d), method, 1e-12)

    def test_no_faults_in_any_layout(self):
        for method, n, view in itertools.product(METHODS, (3, 16, 19), VIEWS):
            with xray.recording("random", 1) as report:
                self.results([VIEWS[view](x) for x in problem(n, 5, 3, torch.float32)], method)
            assert [str(fault) for fault in report.faults] == []

    # ---- gradients

    @pytest.mark.parametrize("method", METHODS)
    def test_gradients_of_first_and_second_order(self, method):
        """First order true, of systems of which one is singular; second order refused."""
        A, B, delta = problem(4, 2, 3)
        A[1] = torch.diag(torch.ones(3), 1)
        given = [x.requires_grad_() for x in (A, B, delta)]
        assert torch.autograd.gradcheck(lambda *x: self.stage.function(*x, method=method), given)
        (grad,) = torch.autograd.grad(self.stage.function(*given, method=method)[0].sum(), given[0], create_graph=True)
        with pytest.raises(NotImplementedError, match="discretize_matrix has no second derivatives"):
            grad.sum().backward()

    @pytest.mark.parametrize("method", METHODS)
    def test_gradients_through_one_factor(self, method, device):
        given = [x.requires_grad_() for x in problem(5, 3, 2, device=device)]
        for i, y in enumerate(self.stage.function(*given, method=method)):
            found = torch.autograd.grad(y.square().sum(), given, retain_graph=True)
            truth = torch.autograd.grad(
                family.reference(*given, method=method)[i].square().sum(), given, materialize_grads=True
            )
            for x, z in zip(found, truth, strict=True):
                torch.testing.assert_close(x, z, rtol=1e-11, atol=1e-11)

    # ---- as an operator

    def test_opcheck(self, device):
        operator = torch.ops.stages.discretize_matrix.default
        for method, requires_grad in itertools.product(METHODS, (False, True)):
            arguments = [x.requires_grad_(requires_grad) for x in problem(5, 3, 2, torch.float32, device)]
            torch.library.opcheck(operator, (*arguments, method))

    def test_wrong_arguments(self):
        A, B, delta = problem(4, 2, 3, torch.float32)
        cases = [
            ("A", [1.0], TypeError, "A must be a torch.Tensor, got list"),
            ("A", A.half(), TypeError, "A has dtype torch.float16; allowed: torch.float64 or torch.float32"),
            ("A", A[..., :3], ValueError, r"A is \(3, 4, 3\); allowed: \(..., n, n\) with n <= 32"),
            ("A", A[0, 0], ValueError, r"A is \(4,\); allowed"),
            ("A", torch.zeros(33, 33), ValueError, r"A is \(33, 33\); allowed: .* n <= 32"),
            ("B", None, TypeError, "B must be a torch.Tensor, got NoneType"),
            ("B", B.double(), TypeError, "B has dtype torch.float64; allowed: torch.float32"),
            ("B", B[:, :3], ValueError, r"B is \(3, 3, 2\) and A is \(3, 4, 4\); allowed: \(..., n, m\), here n = 4"),
            ("B", B.to("meta"), ValueError, "B is on meta, but A is on cpu"),
            ("B", B[:2], ValueError, r"A is \(3, 4, 4\), B is \(2, 4, 2\) and delta is \(3,\); allowed: .*broadcast"),
            ("delta", 0.1, TypeError, "delta must be a torch.Tensor, got float"),
            ("delta", delta.double(), TypeError, "delta has dtype torch.float64; allowed: torch.float32"),
            ("delta", delta.to("meta"), ValueError, "delta is on meta, but A is on cpu"),
            ("method", "mamba", ValueError, "method is 'mamba'; allowed: 'bilinear', 'zoh' or 'foh'"),
            ("method", 1, TypeError, "method must be a str, got int"),
        ]
        good = {"A": A, "B": B, "delta": delta, "method": "zoh"}
        for name, value, error, words in cases:
            for function in (self.stage.function, family.choose):
                with pytest.raises(error, match=words):
                    function(**(good | {name: value}))

    @GPU
    def test_a_gpu_gives_what_the_cpu_device_gives(self):
        for dtype, method, n in itertools.product(family.DTYPES, METHODS, (5, 16, 31)):
            arguments = problem(n, 3, 9, dtype)
            here, there = self.results(arguments, method), self.results([x.cuda() for x in arguments], method)
            for x, y in zip(here, there, strict=True):
                assert relative_error(y.cpu(), widened(x)) <= (5e-6 if dtype is torch.float32 else 1e-13)
