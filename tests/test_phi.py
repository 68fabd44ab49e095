"""The phi functions of common/phi.h and the methods of common/discretize.h against 50 digits, from 0 to far out."""

from pathlib import Path

import mpmath
import pytest
import torch

from stages.toolkit import build
from stages.toolkit.kernels import load

HERE = Path(__file__).parent / "simt"
DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)
METHODS = ("mamba", "zoh", "foh", "bilinear", "highorder", "poly", "rk4", "dirac", "backward_euler")
# Relative to a value or to what it is the difference of: nobody can know a difference better than that. A product of
# complex numbers is rounded six times where one of real ones is once: the worst of all here, of thousands, is 3.8e-7.
ALLOWED = {torch.float32: 3e-7, torch.float64: 1e-15, torch.complex64: 4e-7, torch.complex128: 1e-15}
SMALL = (0.0, 1e-30, 1e-12, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.2, 0.3, 0.4)
OF_STEPS = 3e-6  # of the many steps of a scan, in float32
RADII = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0)  # where series give way to formulas

mpmath.mp.dps = 50


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    folder = tmp_path_factory.mktemp("phi")
    path = build.build_module(HERE / "phi.cu", HERE / "phi.cpp", "simt", folder)
    return load(f"{folder.name}._simt", path)


def real(dtype: torch.dtype) -> torch.dtype:
    return torch.empty((), dtype=dtype).real.dtype


def places(dtype: torch.dtype) -> torch.Tensor:
    """Numbers from 0 over both sides of every threshold to 100, to the left, the right, and for complex ones around."""
    base = real(dtype)
    edges = torch.tensor(RADII, dtype=base)
    inner, outer = torch.nextafter(edges, torch.zeros_like(edges)), torch.nextafter(edges, edges + 1)
    between = torch.linspace(0.01, 8, 50 if dtype.is_complex else 800, dtype=base)
    sizes = torch.cat([torch.tensor(SMALL, dtype=base), edges, inner, outer, between])
    if not dtype.is_complex:
        return torch.cat([-sizes, sizes, torch.linspace(-100, -8, 93), torch.linspace(8, 50, 43)]).to(dtype)
    angles = torch.linspace(-3.14, 3.14, 17, dtype=base)
    around = torch.polar(*(x.contiguous() for x in torch.broadcast_tensors(sizes[:, None], angles)))
    far = [complex(x, y) for x in (-100, -30, -9, -1, 0, 20, 50) for y in (-100, -62.8, -31, -3, 0, 1, 7, 44, 100)]
    return torch.cat([around.flatten(), torch.tensor(far, dtype=dtype)])


def exact(x: complex) -> mpmath.mpc:
    return mpmath.mpc(x.real, x.imag) if x.imag else mpmath.mpf(x.real)


def phi_exactly(n: int, z: mpmath.mpc) -> mpmath.mpc:
    if z == 0:
        return 1 / mpmath.factorial(n)
    with mpmath.workdps(150):  # for |z| = 1e-30, by the third power of which it is divided
        return (mpmath.exp(z) - sum(z**k / mpmath.factorial(k) for k in range(n))) / z**n


def worst(found: torch.Tensor, terms: list[list]) -> tuple[float, int]:
    """The largest error, relative to the value or to the largest of its terms, and where; NaN is infinite."""
    assert len(found) == len(terms)
    errors = [0.0]
    for x, parts in zip(found.tolist(), terms, strict=True):
        value = sum(parts)
        error = abs(exact(x) - value) if x == x else mpmath.inf
        # What is less than the least normal number has fewer digits, and a constant may be 0.
        errors.append(float(error / max(1e-30, *(abs(part) for part in (value, *parts)))))
    return max(errors), errors.index(max(errors)) - 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_phi_functions_from_0_to_far_out(module, dtype):
    z = places(dtype)
    out = z.new_full((5, len(z)), float("nan"))
    module.functions(z, out)
    at = [exact(x) for x in z.tolist()]
    assert worst(out[0], [[mpmath.exp(x)] for x in at])[0] <= ALLOWED[dtype]
    there = [i for i, x in enumerate(at) if 1e-18 < abs(x)]
    assert worst(out[1, there], [[1 / at[i]] for i in there])[0] <= ALLOWED[dtype]
    for n in (1, 2, 3):
        # Real ones are never near 0. Complex ones have zeros, phi_1 at 2 pi i, where they are differences.
        terms = [[phi_exactly(n, x)] for x in at]
        if dtype.is_complex:
            terms = [
                [phi_exactly(n - 1, x) / x, -1 / mpmath.factorial(n - 1) / x] if abs(x) > 3 else parts
                for x, parts in zip(at, terms, strict=True)
            ]
        error, i = worst(out[1 + n], terms)
        assert error <= ALLOWED[dtype], (n, z[i])


def test_values_that_are_no_numbers(module):
    z = torch.tensor([float("nan"), float("-inf")])
    out = z.new_empty(5, 2)
    module.functions(z, out)
    assert out[:, 0].isnan().all()
    assert out[:3, 1].tolist() == [0, 0, 0]


def terms_of(method: str, a, dt) -> list[tuple[list, list, list]]:
    """What A_bar, gain and the factor of the input before are sums of: the value, its derivatives by A and by dt."""
    z = a * dt
    e, nothing = mpmath.exp(z), ([0], [0], [0])
    if method in ("bilinear", "backward_euler"):
        part = mpmath.mpf(1) / (2 if method == "bilinear" else 1)
        q = 1 / (1 - part * z)
        a_bar = [q, q * z / 2] if method == "bilinear" else [q]
        return [(a_bar, [dt * q**2], [a * q**2]), ([dt * q], [dt**2 * part * q**2], [q**2]), nothing]
    of_e = ([e], [dt * e], [a * e])
    if method == "mamba":
        return [of_e, ([dt], [0], [1]), nothing]
    if method == "dirac":
        return [of_e, ([1], [0], [0]), nothing]
    if method in ("zoh", "foh"):
        near = abs(z) < 1.5  # there a derivative is a difference of numbers of the size of 1
        one, two, three = (phi_exactly(n, z) for n in (1, 2, 3))
        older = [one - two] if near else [e / z, -e / z**2, 1 / z**2]
        newer = [two] if near else [e / z**2, -1 / z**2, -1 / z]
        d_older = [one - 2 * two + 2 * three - 1, 1] if near else [e / z, *(-2 * x / z for x in older)]
        d_newer = [two - 2 * three - 0.5, 0.5] if near else [x / z for x in older] + [-x / z for x in newer]
        if method == "zoh":
            value = [one] if abs(z) < 0.5 else [e / z, -1 / z]
            return [of_e, ([dt * x for x in value], [dt**2 * x for x in older], [e]), nothing]
        return [
            of_e,
            ([dt * x for x in newer], [dt**2 * x for x in d_newer], older),
            ([dt * x for x in older], [dt**2 * x for x in d_older], [e, *(-x for x in older)]),
        ]
    powers = range(1 + {"highorder": 1, "poly": 2, "rk4": 3}[method])
    terms = [z**k / mpmath.factorial(k + 1) for k in powers]
    derivative = [k * z ** (k - 1) / mpmath.factorial(k + 1) for k in powers if k]
    by_dt = [*terms, *(z * x for x in derivative)]
    return [of_e, ([dt * x for x in terms], [dt**2 * x for x in derivative], by_dt), nothing]


@pytest.mark.parametrize("of_steps", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_coefficients_and_their_derivatives(module, method, dtype, of_steps):
    allowed = OF_STEPS if of_steps and dtype is torch.float32 else ALLOWED[dtype]
    z = places(dtype)
    z = z[z != (2 if method == "bilinear" else 1)]  # the poles
    dt = torch.tensor([0.25, 1, 2], dtype=real(dtype)).repeat(len(z) // 3 + 1)[: len(z)]  # powers of 2: z is exact
    a = z / dt
    out = z.new_full((12, len(z)), float("nan"))
    module.coefficients_of(method, of_steps, a, dt, out)
    terms = [terms_of(method, exact(x), mpmath.mpf(y)) for x, y in zip(a.tolist(), dt.tolist(), strict=True)]
    for n, kind in enumerate(("A_bar", "gain", "previous")):
        for row, derivative in enumerate((0, 0, 1, 2)):
            error, i = worst(out[3 * row + n], [x[n][derivative] for x in terms])
            assert error <= allowed, (kind, row, z[i], dt[i])
