"""Stage 50, discretize."""

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import GPU
from scan_cases import VIEWS
from stage_cases import StageCases, free_gpu_memory
from torch import Tensor
from torch.autograd import forward_ad

import stages
from stages.families import COMPLEX, FLOATING, discretization, unit_roundoff, widened
from stages.families.discretization import METHODS, OUTPUTS, REAL_OF
from stages.toolkit import xray
from stages.toolkit.report import Counts
from stages.toolkit.verify import relative_error

DTYPES = FLOATING + COMPLEX
GOLDEN = Path(__file__).parent / "golden"
COEFFICIENTS = sorted(GOLDEN.glob("disc_diag_*.npz"))
IN_FILES = {  # what the coefficients are called there, times B: A_bar, gain and for foh both gains
    "zoh": ("zoh_{}Abar{}", "zoh_{}Bbar{}"),
    "foh": ("zoh_{}Abar{}", "foh_{}B0{}", "foh_{}B1{}"),
    "bilinear": ("bil_{}Abar{}", "bil_{}Bbar{}"),
    "mamba": ("zoh_{}Abar{}",),
    "highorder": ("zoh_{}Abar{}", "taylor1_{}Bbar{}"),
    "poly": ("zoh_{}Abar{}", "taylor2_{}Bbar{}"),
    "rk4": ("zoh_{}Abar{}", "taylor3_{}Bbar{}"),
}
DEGREE = {"bilinear": 0, "mamba": 0, "highorder": 1, "poly": 2, "rk4": 3}  # of the gain in z
SHAPES = [  # of A and delta
    ((), ()),
    ((5,), ()),
    ((), (5,)),
    ((5,), (5,)),
    ((3, 1), (4,)),
    ((1, 4), (3, 1)),
    ((3, 4), (2, 5, 3, 1)),
    ((3, 4, 1), (2, 3, 1, 5)),
    ((2, 3, 4, 5), (4, 1)),
    ((2, 1, 3, 1, 4), (5, 1, 2, 1)),
    ((2, 3, 1, 2, 1, 3), (1, 3, 2, 1, 4, 1)),
    ((1, 0, 3), (2, 1, 1)),
    ((0, 2, 1, 1, 3), (1, 2, 4, 1, 1)),
    ((129,), (130, 1)),
]


def load_golden(path: Path, device: str = "cpu") -> dict[str, Tensor]:
    with np.load(path) as file:
        return {name: torch.from_numpy(file[name]).to(device) for name in file}


def of(dtype: torch.dtype, x: Tensor) -> Tensor:
    """A tensor of a file in a dtype, or its real part's."""
    return x.to(dtype if x.is_complex() or not dtype.is_complex else REAL_OF[dtype])


def random_like(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The same numbers on each device."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(x.shape, generator=generator, dtype=widened(x).dtype).to(x) for x in tensors]


class TestDiscretize(StageCases):
    stage = stages.load("50")
    odd = (2, 5, 3, 7)
    small = (2, 2, 2, 3)

    def results(self, A: Tensor, delta: Tensor, grads: list[Tensor] | None = None, function=None, **options):
        """The factors and the gradients of A and delta."""
        A, delta = (x.detach().requires_grad_() for x in (A, delta))
        factors = (function or self.stage.discretize)(A, delta, **options)
        grads = random_like(factors) if grads is None else grads
        return [*(x.detach() for x in factors), *torch.autograd.grad(factors, (A, delta), grads)]

    def compare(self, A: Tensor, delta: Tensor, grads: list[Tensor] | None = None, **options) -> None:
        """The factors and the gradients with float64."""
        allowed = discretization.tolerance({}, A.dtype, **options)
        grads = random_like(self.stage.discretize(A, delta, **options)) if grads is None else grads
        found, wide = self.results(A, delta, grads, **options), [widened(g) for g in grads]
        truths = self.results(widened(A), widened(delta), wide, discretization.reference, **options)
        # A sum of terms of both signs is as exact as they are: those of each element, before they are added up.
        full = torch.broadcast_tensors(widened(A), widened(delta))
        *sizes, of_a, of_delta = self.results(*full, wide, discretization.reference, **options)
        sizes += [of_a.abs().sum_to_size(A.shape), of_delta.abs().sum_to_size(delta.shape)]
        for name, x, truth, size in zip((*OUTPUTS(**options), "A", "delta"), found, truths, sizes, strict=True):
            assert x.dtype is (delta if name == "delta" else A).dtype and x.shape == truth.shape, name
            assert (widened(x) - truth).norm() <= allowed[name] * size.norm(), name

    # ---- values

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("sizes", discretization.PROBLEMS, ids=str)
    def test_outputs_and_gradients(self, sizes, dtype, device):
        self.check(sizes, dtype, device)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("shapes", SHAPES, ids=str)
    def test_shapes_that_are_broadcast(self, shapes, dtype, device):
        generator = torch.Generator().manual_seed(2)
        numbers = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        A, delta = -numbers[0].exp(), (numbers[1] - 1).exp()
        A = torch.complex(A, torch.randn(A.shape, generator=generator, dtype=torch.float64)) if dtype.is_complex else A
        for method in METHODS:
            given = A.to(dtype).to(device), of(dtype, delta).to(device)
            self.compare(*given, method=method)
            factors = self.stage.discretize(*given, method=method)
            assert {x.shape for x in factors} == {torch.broadcast_shapes(*shapes)}
            assert all(x.is_contiguous() for x in factors)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
    @pytest.mark.parametrize("method", IN_FILES)
    @pytest.mark.parametrize("path", COEFFICIENTS, ids=lambda path: path.stem)
    def test_values_with_120_digits(self, path, method, dtype, device):
        """Each number for itself, from |z| = 1e-12 to 50: factors, and their derivatives by A and delta."""
        golden = load_golden(path, device)
        dtype = (
            {torch.float64: torch.complex128, torch.float32: torch.complex64}[dtype] if "cplx" in path.stem else dtype
        )
        A, delta = of(dtype, golden["A"]).requires_grad_(), of(dtype, golden["dt"]).requires_grad_()
        factors = self.stage.discretize(A, delta, method=method)
        z, dt = (golden["A"] * golden["dt"]).abs(), golden["dt"]
        # e^z is off by what the rounding of z is, |z| times that of 1; a few more are made on the way.
        unit = unit_roundoff(REAL_OF.get(dtype, dtype)) * (1 + z)
        if method == "bilinear":  # near its pole at 2
            unit = unit * (1 + 1 / (1 - golden["A"] * golden["dt"] / 2).abs())
        for n, name in enumerate(IN_FILES[method]):
            B = 1 if n == 0 else golden["B"]
            truth = golden[name.format("", "")] / B
            one = torch.ones_like(factors[n])
            by_a, by_dt = torch.autograd.grad(factors[n], (A, delta), one, retain_graph=True)
            derivatives = [golden[name.format("d", f"_{by}")] / B for by in ("dA", "ddt")]
            # Differences are as exact as what they are the difference of: of 1 near 0, of powers of 1 / z far out.
            size = 1 if n == 0 else dt
            of_e = golden["zoh_Abar"].abs()
            terms = torch.maximum(of_e, 1 / (1 + z)) if method in ("zoh", "foh") else 1 + z ** DEGREE[method]
            # In float32 3e-7 of a factor; a derivative is a product of two or three such.
            for x, y, scale, allowed in (
                (factors[n].detach(), truth, size * terms if n else 0 * dt, 5 * unit),
                (by_a, derivatives[0].conj(), size * dt * terms if n else 0 * dt, 8 * unit),
                (by_dt, derivatives[1].real, (terms if n else 0 * dt) + derivatives[1].abs(), 8 * unit),
            ):
                error = (widened(x) - y).abs() / torch.maximum(y.abs(), scale).clamp(min=1e-37)
                assert (error <= allowed).all(), (name, (error / allowed).max())

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
    @pytest.mark.parametrize("kind", ["real", "cplx"])
    @pytest.mark.parametrize("method", ["zoh", "foh", "bilinear", "mamba", "rk4"])
    def test_a_state_space_model_of_another_implementation(self, method, kind, dtype, device):
        """y, the last state and gradients of a scan with these factors, whose foh an ODE solver agreed with."""
        golden = load_golden(GOLDEN / f"ssm_right_{kind}.npz", device)
        dtype = {torch.float64: torch.complex128, torch.float32: torch.complex64}[dtype] if kind == "cplx" else dtype
        u, dt, A, B, C = (of(dtype, golden[name]).requires_grad_() for name in ("u", "dt", "A", "B", "C"))
        y, h = self.scanned(u, dt, A, B, C, method)
        grads = torch.autograd.grad(y, (u, dt, A, B, C), of(dtype, golden["g"]))
        allowed = 1e-12 if dtype.itemsize // (1 + dtype.is_complex) == 8 else 2e-6
        prefix = "taylor3" if method == "rk4" else method
        for name, x in zip(("y", "h", "du", "ddt", "dA", "dB", "dC"), (y, h, *grads), strict=True):
            assert relative_error(x.detach(), golden[f"{prefix}_{name}"]) <= allowed, name

    def scanned(self, u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, method: str) -> tuple[Tensor, Tensor]:
        """y and the last state of a selective scan, step by step, with the stage's factors."""
        *a_bar, gain = self.stage.discretize(A[:, :, None], dt[:, :, None], method=method)  # [batch, d, n, seq]
        taken = B[:, None] * u[:, :, None]
        entering = gain * taken
        if method == "foh":
            entering = entering + a_bar[1] * F.pad(taken, (1, 0))[..., :-1]
        h, states = torch.zeros_like(entering[..., 0]), []
        for t in range(u.shape[2]):
            h = a_bar[0][..., t] * h + entering[..., t]
            states.append(h)
        y = (C[:, None] * torch.stack(states, 3)).sum(2)
        return (2 * y.real if y.is_complex() else y), h

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
    @pytest.mark.parametrize("method", ["zoh", "bilinear", "dirac"])
    def test_a_selective_scan_of_another_implementation(self, method, dtype, device):
        golden = load_golden(GOLDEN / f"lrnnx_selscan_{method}_l20.npz", device)
        names = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")
        given = [golden[name].to(dtype).requires_grad_() for name in names]
        u, delta, A, B, C, D, z, bias = given
        y, h = self.scanned(u, F.softplus(delta + bias[:, None]), A, B, C, method)
        y = (y + D[:, None] * u) * F.silu(z)
        grads = torch.autograd.grad(y, given, golden["g"].to(dtype))
        allowed = 1e-12 if dtype is torch.float64 else 2e-6
        for name, x in zip(("y", "last_state", *(f"d{name}" for name in names)), (y, h, *grads), strict=True):
            assert relative_error(x.detach(), golden[name]) <= allowed, name

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("method", METHODS)
    def test_16_bits_are_rounded_once(self, method, dtype, device):
        A, delta = self.arguments((2, 50, 5, 7), dtype, device)
        for x, y in zip(
            *(self.stage.discretize(A.to(t), delta.to(t), method=method) for t in (dtype, torch.float32)), strict=True
        ):
            assert torch.equal(x, y.to(dtype))

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("method", METHODS)
    def test_no_step_and_no_decay(self, method, dtype, device):
        """At z = 0 the limits, and nothing is 0 / 0, in the gradients neither."""
        A = torch.tensor([0, -1, 0, -1e-30, -3], dtype=dtype, device=device)
        delta = of(dtype, torch.tensor([0, 0, 0.5, 0.5, 1e-30], device=device))
        a_bar, *gains = (x.detach() for x in self.stage.discretize(A, delta, method=method))
        whole = delta if method != "dirac" else torch.ones_like(delta)
        assert torch.equal(a_bar, torch.ones_like(a_bar))
        assert torch.equal(sum(gains), whole.to(dtype))
        if method == "foh":
            assert torch.equal(gains[0], gains[1])
        assert all(x.isfinite().all() for x in self.results(A, delta, method=method))

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("method", METHODS)
    def test_far_to_the_left(self, method, dtype, device):
        """A state that is forgotten within a step: factors as in the limit, finite, and none of them NaN."""
        A = torch.tensor([-1e3, -1e4], dtype=dtype, device=device)
        delta = of(dtype, torch.ones(2, device=device))
        a_bar, *gains = (x.detach() for x in self.stage.discretize(A, delta, method=method))
        limit = {"bilinear": -1, "backward_euler": 0}.get(method, 0)
        torch.testing.assert_close(a_bar, torch.full_like(a_bar, limit), atol=5e-3, rtol=0)
        if method in ("zoh", "foh", "backward_euler"):  # all of the input, and of the last one
            torch.testing.assert_close(gains[-1] * -A, torch.ones_like(A), atol=8e-3, rtol=0)

    def test_nan_stays_where_it_is(self, device):
        for dtype in (torch.float32, torch.complex64):
            A, delta = self.arguments((2, 5, 3, 4), dtype, device)
            for method in METHODS:
                expected = self.stage.discretize(A, delta, method=method)
                for broken, where in ((A, (1, 2)), (delta, (1, 3, 2, 0))):
                    given = [x.clone() for x in (A, delta)]
                    given[0 if broken is A else 1][where] = torch.nan
                    found = self.stage.discretize(*given, method=method)
                    for n, (x, y) in enumerate(zip(found, expected, strict=True)):
                        nan = torch.zeros_like(x, dtype=torch.bool)
                        nan[(..., *where) if broken is A else where[:3]] = True
                        if n and (method == "dirac" or (method == "mamba" and broken is A)):
                            nan[:] = False  # gains that do not depend on it
                        assert torch.equal(x.isnan(), nan)
                        assert torch.equal(x[~nan], y[~nan])

    def test_conjugates_and_negatives_that_torch_only_notes_down(self, device):
        A, delta = self.arguments(self.odd, torch.complex64, device)
        for method in METHODS:
            one = self.stage.discretize(A.conj(), delta, method=method)
            two = self.stage.discretize(A.conj().resolve_conj(), delta, method=method)
            assert A.conj().is_conj() and all(torch.equal(x, y) for x, y in zip(one, two, strict=True))
            real = A.conj().imag
            assert real.is_neg()
            one = self.stage.discretize(real, delta, method=method)
            two = self.stage.discretize(-A.imag.contiguous(), delta, method=method)
            assert all(torch.equal(x, y) for x, y in zip(one, two, strict=True))

    @pytest.mark.parametrize("method", METHODS)
    def test_a_complex_number_without_imaginary_part_is_a_real_one(self, method, device):
        A, delta = self.arguments(self.odd, torch.float64, device)
        whole = self.results(A.to(torch.complex128), delta, method=method)
        for x, y in zip(
            whole[: len(OUTPUTS(method=method))], self.stage.discretize(A, delta, method=method), strict=True
        ):
            assert relative_error(x.real, y) <= 1e-15 and not x.imag.any()

    # ---- what a discretization is

    @pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
    @pytest.mark.parametrize("method", METHODS)
    def test_a_constant_input_comes_to_rest_where_the_equation_does(self, method, dtype, device):
        """h = -(B / A) u, by every method but those that are not meant to."""
        A, delta = self.arguments((1, 1, 5, 4), dtype, device)
        delta = 4 * delta[0, 0].clamp(0.1, 1)
        *a_bar, gain = self.stage.discretize(A, delta, method=method)
        entering = gain + (a_bar[1] if method == "foh" else 0)
        h = torch.zeros_like(A)
        for _ in range(5000):
            h = a_bar[0] * h + entering
        assert (a_bar[0].abs() < 1).all()
        error = (h * A + 1).abs().max()
        assert error <= 1e-12 if method in ("zoh", "foh", "bilinear", "backward_euler") else error > 0.1

    @pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
    def test_inputs_that_methods_are_exact_for(self, dtype, device):
        """By steps of any length: a ramp for foh, a held input for zoh, impulses for dirac."""
        generator = torch.Generator().manual_seed(4)
        A = torch.tensor([-0.3, -2.0, 0.0, -30.0], dtype=torch.float64, device=device)
        A = torch.complex(A, A.new_tensor([1.0, 0.0, 3.0, 7.0])) if dtype.is_complex else A
        steps = (torch.rand(30, generator=generator, dtype=torch.float64) * 0.3).to(device)
        times = steps.cumsum(0)
        at = [torch.nan_to_num(A * t) for t in times]

        def walk(method, u):
            h, before, states = torch.zeros_like(A), 0, []
            for dt, now in zip(steps, u, strict=True):
                *a_bar, gain = self.stage.discretize(A, dt, method=method)
                h = a_bar[0] * h + gain * now + (a_bar[1] * before if method == "foh" else 0)
                states.append(h)
                before = now
            return states

        def phi(n, z):
            return discretization.phi(n, z, torch.exp(z))

        for n, h in enumerate(walk("foh", times)):  # h' = A h + t from h(0) = 0 is t^2 phi_2(A t)
            assert relative_error(h, times[n] ** 2 * phi(2, at[n])) <= 1e-13
        for n, h in enumerate(walk("zoh", torch.ones_like(times))):  # h' = A h + 1: t phi_1(A t)
            assert relative_error(h, times[n] * phi(1, at[n])) <= 1e-13
        for n, h in enumerate(walk("dirac", torch.eye(30, dtype=torch.float64, device=device)[3])):
            assert relative_error(h, torch.exp(A * (times[n] - times[3])) if n >= 3 else 0 * A) <= 1e-13

    @pytest.mark.parametrize("method", METHODS)
    def test_two_half_steps_are_a_step(self, method, device):
        """Of an exact state; of bilinear and backward Euler up to the second and the first order."""
        A, delta = self.arguments((1, 3, 5, 4), torch.float64, device)
        one, half = (self.stage.discretize(A, x, method=method)[0] for x in (delta, delta / 2))
        if method not in ("bilinear", "backward_euler"):
            assert relative_error(half * half, one) <= 1e-14
        else:
            order = 3 if method == "bilinear" else 2
            assert ((half * half - one).abs() <= (A * delta).abs() ** order).all()

    # ---- gradients

    def test_gradients_of_first_and_second_order(self):
        """First order true; second order refused, and forward mode, too."""
        for dtype in (torch.float64, torch.complex128):
            arguments = self.arguments(self.small, dtype, requires_grad=True)
            for function in self.functions(dtype):
                assert torch.autograd.gradcheck(function, arguments)
        A, delta = self.arguments(self.small, torch.float64, requires_grad=True)
        gain = self.stage.discretize(A, delta, method="zoh")[1]
        gradient = torch.autograd.grad(gain.sum(), (A, delta), create_graph=True)
        with pytest.raises(NotImplementedError, match="discretize has no second derivatives"):
            torch.autograd.grad(gradient[0].sum(), A)
        with forward_ad.dual_level(), torch.no_grad():
            dual = forward_ad.make_dual(A.detach(), torch.ones_like(A))
            with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
                self.stage.discretize(dual, delta, method="zoh")

    @pytest.mark.parametrize("method", METHODS)
    def test_gradients_of_some_alone(self, method, device):
        """Through one factor, and of one argument."""
        for dtype in (torch.float32, torch.complex64):
            A, delta = self.arguments(self.odd, dtype, device)
            factors = self.stage.discretize(A, delta, method=method)
            for n in range(len(factors)):
                grads = [torch.randn_like(x) if m == n else torch.zeros_like(x) for m, x in enumerate(factors)]
                whole = self.results(A, delta, grads, method=method)[-2:]
                for which in range(2):
                    given = [x.detach().requires_grad_(m == which) for m, x in enumerate((A, delta))]
                    factor = self.stage.discretize(*given, method=method)[n]
                    (grad,) = torch.autograd.grad(factor, given[which], grads[n])
                    assert torch.equal(grad, whole[which])

    def test_the_same_bits_every_time(self, device):
        """With sums over 4000 steps."""
        A, delta = self.arguments((2, 2000, 2, 5), torch.float32, device)
        for method in METHODS:
            one, two = (self.results(A, delta, method=method) for _ in range(2))
            assert all(torch.equal(x, y) for x, y in zip(one, two, strict=True))

    # ---- layouts

    @pytest.mark.parametrize("view", VIEWS)
    def test_views(self, view, device):
        A, delta = self.arguments((2, 5, 3, 4), torch.float32, device)
        A, delta = A.expand(5, 3, 4).contiguous(), delta[0].expand(5, 3, 4).contiguous()
        for method in ("zoh", "foh"):
            grads = [torch.randn(5, 3, 4, device=device) for _ in OUTPUTS(method=method)]
            expected = self.results(A, delta, grads, method=method)
            for given in ((VIEWS[view](A), delta), (A, VIEWS[view](delta)), (VIEWS[view](A), VIEWS[view](delta))):
                found = self.results(*given, [VIEWS[view](g) for g in grads], method=method)
                assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
                assert all(x.is_contiguous() for x in found)

    def test_expanded_tensors(self, device):
        A, delta = self.arguments((2, 5, 3, 4), torch.float32, device)
        wide = A.expand(2, 5, 3, 4), delta.expand(2, 5, 3, 4)
        for method in METHODS:
            expected = self.results(*(x.contiguous() for x in wide), method=method)
            assert all(torch.equal(x, y) for x, y in zip(self.results(*wide, method=method), expected, strict=True))
            factors = self.results(A, delta, method=method)[:-2]
            assert all(torch.equal(x, y) for x, y in zip(factors, expected[:-2], strict=True))
            given = [x.detach().requires_grad_() for x in (A, delta)]
            factors = self.stage.discretize(*given, method=method)
            one = torch.autograd.grad(sum(x.sum() for x in factors), given, retain_graph=True)  # strides of 0
            two = torch.autograd.grad(factors, given, [torch.ones_like(x) for x in factors])
            assert all(torch.equal(x, y) for x, y in zip(one, two, strict=True))

    def test_nothing_is_copied(self, device):
        """A and delta as models have them, broadcast to four dimensions; nothing is overwritten either."""
        A, delta = self.arguments((2, 5, 3, 4), torch.float32, device)
        before = A.clone(), delta.clone()
        taken, launch = [], self.stage.kernels.launch
        try:
            self.stage.kernels.launch = lambda name, device, *a: (taken.extend(a), launch(name, device, *a))
            self.results(A, delta, method="foh")
        finally:
            del self.stage.kernels.launch
        assert {x.data_ptr() for x in (A, delta)} <= {x.data_ptr() for x in taken if isinstance(x, Tensor)}
        assert torch.equal(A, before[0]) and torch.equal(delta, before[1])

    # ---- large ones

    def test_more_blocks_than_a_grid_has_in_y_or_z(self, device):
        A = torch.tensor(-1.0, device=device)
        delta = torch.tensor(0.5, device=device).expand(66_000 * 128)
        for x, y in zip(
            self.stage.discretize(A, delta, method="foh"),
            self.stage.discretize(A, delta[:1], method="foh"),
            strict=True,
        ):
            assert torch.equal(x, y.expand_as(x))

    def test_blocks_are_counted_along_x_alone(self):
        A, delta = self.arguments(self.odd)
        with xray.recording() as report:
            self.results(A, delta, method="foh")
        assert report.launches and {launch.grid[1:] for launch in report.launches} == {(1, 1)}

    @GPU
    @pytest.mark.skipif(free_gpu_memory() < 40e9, reason="needs 40 GB of GPU memory")
    def test_more_than_two_to_the_31_elements(self):
        A = -torch.rand(32_768, 16, device="cuda").bfloat16()
        delta = torch.rand(4, 1100, 32_768, 1, device="cuda").bfloat16()
        assert A.numel() * 4 * 1100 > 2**31
        for x, y in zip(
            self.stage.discretize(A, delta, method="zoh"),
            self.stage.discretize(A[-5:], delta[-1:, -3:, -5:], method="zoh"),
            strict=True,
        ):
            assert torch.equal(x[-1:, -3:, -5:], y)

    @GPU
    @pytest.mark.skipif(free_gpu_memory() < 20e9, reason="needs 20 GB of GPU memory")
    def test_strides_past_two_to_the_31(self):
        parent = torch.zeros(3, 2**31 + 8, dtype=torch.bfloat16, device="cuda")
        A = parent[:, -7:]
        A.copy_(-torch.rand(3, 7))
        delta = -A
        for method in METHODS:
            expected = self.results(A.contiguous(), delta.contiguous(), method=method)
            assert all(torch.equal(x, y) for x, y in zip(self.results(A, delta, method=method), expected, strict=True))

    # ---- the x-ray

    @pytest.mark.parametrize("dtype", FLOATING, ids=str)
    @pytest.mark.parametrize("factors", [1, 2, 3])
    def test_counts_of_the_backward_equal_their_closed_forms(self, factors, dtype):
        sizes = tuple(aligned * (1 + (i + factors) % 3) for i, aligned in enumerate(self.stage.aligned))
        for options in self.options(dtype):
            arguments = self.arguments(sizes, dtype, requires_grad=True, **options)
            results = self.stage.discretize(*arguments, **options)
            grads = [torch.randn_like(x) for x in results]
            with xray.recording() as report:
                torch.autograd.grad(results, arguments, grads)
            expected = import_module("stages.50_discretize.stage").backward_cost(
                **self.stage.sizes(sizes), itemsize=dtype.itemsize, **options
            )
            assert isinstance(expected, Counts)
            assert report.counts() == expected
            assert [str(fault) for fault in report.faults] == []

    @pytest.mark.parametrize("dtype", COMPLEX, ids=str)
    def test_counts_of_complex_numbers(self, dtype):
        """They are as wide as they are; delta's one sector is one."""
        sizes = (2, 3, 2, 64)
        for options in self.options(dtype):
            report = self.stage.xray(*self.arguments(sizes, dtype, **options), **options)
            assert report.counts() == self.stage.cost(**self.stage.sizes(sizes), itemsize=dtype.itemsize, **options)

    # ---- as an operator

    def test_opcheck(self, device):
        forward, backward = (getattr(torch.ops.stages, f"discretize{end}").default for end in ("", "_backward"))
        for dtype in (torch.float32, torch.complex64, torch.bfloat16):
            for method in METHODS:
                for requires_grad in (False, True):
                    arguments = self.arguments(self.odd, dtype, device, requires_grad=requires_grad)
                    torch.library.opcheck(forward, (*arguments, method))
                A, delta = (x.detach() for x in arguments)
                grads = [torch.randn_like(x) for x in forward(A, delta, method)]
                torch.library.opcheck(backward, (grads, A, delta, method))

    def test_meta_tensors_give_the_shape(self):
        A, delta = (x.to("meta").requires_grad_() for x in self.arguments(self.odd, torch.complex64))
        for method in METHODS:
            factors = self.stage.discretize(A, delta, method=method)
            assert {x.shape for x in factors} == {self.odd} and len(factors) == len(OUTPUTS(method=method))
            grads = torch.autograd.grad(factors, (A, delta), [torch.empty_like(x) for x in factors])
            assert [(x.shape, x.dtype) for x in grads] == [(x.shape, x.dtype) for x in (A, delta)]

    def test_wrong_arguments(self):
        x = torch.ones(2, 3)
        for given, method, error, words in (
            (([[1.0]], x), "zoh", TypeError, "A must be a torch.Tensor, got list"),
            ((x, 0.1), "zoh", TypeError, "delta must be a torch.Tensor, got float"),
            ((x.int(), x), "zoh", TypeError, "A has dtype torch.int32; allowed: torch.float64"),
            ((x, x.to(torch.complex64)), "zoh", TypeError, "delta has dtype torch.complex64; allowed: torch.float64"),
            (
                (x, x.half()),
                "zoh",
                TypeError,
                "delta has dtype torch.float16, but A has torch.float32; allowed: torch.f",
            ),
            (
                (x.to(torch.complex64), x.double()),
                "zoh",
                TypeError,
                "but A has torch.complex64; allowed: torch.float32",
            ),
            ((x.to_sparse(), x), "zoh", TypeError, "A has layout torch.sparse_coo; allowed: torch.strided"),
            ((x, x.to("meta")), "zoh", ValueError, "delta is on meta, but A is on cpu"),
            (
                (x, x[:, :2]),
                "zoh",
                ValueError,
                r"A is \(2, 3\) and delta is \(2, 2\); allowed: shapes that can be broad",
            ),
            ((x, x.new_ones(2, 0)), "zoh", ValueError, r"A is \(2, 3\) and delta is \(2, 0\)"),
            ((x, x), "tustin", ValueError, "method is 'tustin'; allowed: 'zoh', 'foh', .* or 'dirac'"),
            ((x, x), None, TypeError, "method must be a str, got NoneType"),
        ):
            with pytest.raises(error, match=words):
                self.stage.discretize(*given, method=method)
        with pytest.raises(TypeError, match="method"):
            self.stage.discretize(x, x)
