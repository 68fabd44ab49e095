"""What the tests of the selective scan share: other implementations' values, and the tests of its stages.

A stage with a backward has its gradients compared, too, wherever results are.
"""

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import GPU
from stage_cases import StageCases
from torch import Tensor

import stages
from stages.families import COMPLEX, FLOATING, accumulator, widened
from stages.families import selective_scan as family
from stages.toolkit import xray
from stages.toolkit.verify import relative_error

GOLDEN = Path(__file__).parent / "golden"
MAMBA = sorted(GOLDEN.glob("selscan_*.npz"))
RIGHT = sorted(GOLDEN.glob("ssm_right_*.npz"))
OTHERS = sorted(GOLDEN.glob("lrnnx_selscan_*.npz"))
RIGHT_METHODS = {"mamba": "mamba", "zoh": "zoh", "foh": "foh", "bilinear": "bilinear", "rk4": "taylor3"}
NAMES = (*family.ARGUMENTS, "initial_state")
LENGTHS = [0, 1, 2, 3, 31, 32, 33, 63, 64, 65, 1000, 2047, 2048, 2049, 4097]
STATES = [1, 2, 3, 5, 8, 16, 17, 33, 64, 256]
KINDS = ("constant", "variable", "grouped")
DTYPES = FLOATING + COMPLEX
REAL_OF = {torch.complex64: torch.float32, torch.complex128: torch.float64}

# Views with the values of a contiguous x.
VIEWS = {
    "turned": lambda x: x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim()))),
    "rows and columns": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2) if x.dim() > 1 else x,
    "every second": lambda x: torch.stack([x, x * torch.nan], -1)[..., 0],
    "one element off": lambda x: torch.cat([x.new_full((1,), torch.nan), x.flatten()])[1:].view(x.shape),
    "a part of a wider one": lambda x: torch.cat([x * torch.nan, x, x * torch.nan], -1).chunk(3, -1)[1],
}


def problem(
    sizes: tuple[int, int, int, int],
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    *,
    b: str = "variable",
    c: str = "variable",
    groups: int = 2,
    without: tuple[str, ...] = (),
    seed: int = 0,
) -> dict[str, Tensor | None]:
    """Arguments by their names, all there but those named. A complex dtype is that of A, B and C."""
    generator = torch.Generator().manual_seed(seed)
    batch, channels, states, seq = sizes
    real = REAL_OF.get(dtype, dtype)
    sums = accumulator(real)
    numbers = dtype if dtype.is_complex else sums

    def normal(*size: int, dtype: torch.dtype) -> Tensor:
        x = torch.randn(*size, generator=generator, dtype=torch.float64)
        if dtype.is_complex:
            x = torch.complex(x, torch.randn(*size, generator=generator, dtype=torch.float64))
        return x.to(dtype).to(device)

    of_kind = {
        "constant": (channels, states),
        "variable": (batch, states, seq),
        "grouped": (batch, groups, states, seq),
    }
    a = -normal(channels, states, dtype=torch.float64).exp()
    if dtype.is_complex:
        a = torch.complex(0.3 * a, 3 * normal(channels, states, dtype=torch.float64))
    arguments = {
        "u": normal(batch, channels, seq, dtype=real),
        "delta": normal(batch, channels, seq, dtype=real),
        "A": a.to(numbers),
        "B": normal(*of_kind[b], dtype=numbers if b == "constant" or dtype.is_complex else real),
        "C": normal(*of_kind[c], dtype=numbers if c == "constant" or dtype.is_complex else real),
        "D": normal(channels, dtype=sums),
        "z": normal(batch, channels, seq, dtype=real),
        "delta_bias": normal(channels, dtype=sums) - 1,
        "initial_state": normal(batch, channels, states, dtype=numbers),
    }
    return {name: None if name in without else x for name, x in arguments.items()}


def allowed(dtype: torch.dtype) -> dict[str, float]:
    """How far off a result may be; of float64 it is asked whether the formula is right."""
    found = family.tolerance({}, dtype)
    if dtype in (torch.float64, torch.complex128):
        return dict.fromkeys((*found, "initial_state"), 1e-12)
    return {**found, "initial_state": found["u"]}


class SelectiveScanCases(StageCases):
    """Of every stage that computes the selective scan."""

    def results(
        self,
        arguments: dict[str, Tensor | None],
        function: Callable | None = None,
        softplus: bool = True,
        method: str = "mamba",
        like: dict[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """y, the last state, and where the stage has them the gradients of what there is, by their names.

        `like`: results whose dtypes the gradients of y and of the last state are rounded to.
        """
        given = {
            n: None if x is None else x.detach().requires_grad_(self.stage.gradients) for n, x in arguments.items()
        }
        outputs = (function or self.stage.function)(
            **given, delta_softplus=softplus, return_last_state=True, discretization_method=method
        )
        found = {name: x.detach() for name, x in zip(family.OUTPUTS, outputs, strict=True)}
        if self.stage.gradients:
            generator = torch.Generator().manual_seed(1)
            grads = [torch.randn(x.shape, generator=generator, dtype=widened(x).dtype) for x in outputs]
            grads = [
                grad.to((like or found)[name].dtype).to(found[name])
                for name, grad in zip(family.OUTPUTS, grads, strict=True)
            ]
            there = {name: x for name, x in given.items() if x is not None}
            gradients = torch.autograd.grad(outputs, list(there.values()), grads)
            found |= zip(there, gradients, strict=True)
        return found

    def compare(
        self,
        arguments: dict[str, Tensor | None],
        tolerance: dict[str, float],
        softplus: bool = True,
        method: str = "mamba",
        long: bool = False,
    ) -> None:
        """With the reference on the same, rounded arguments.

        The gradient of delta_bias is the sum of those of delta, in which much cancels: its error is measured by their
        magnitudes. Another gradient that is a sum of many of both signs may be as far off as the same formula in torch,
        and half as much. So may results that are `long` in coming about: thousands of steps, each with an exponential.
        """
        wide = {name: None if x is None else widened(x) for name, x in arguments.items()}
        found = self.results(arguments, None, softplus, method)
        truths = self.results(wide, family.reference, softplus, method, found)
        theirs = {}
        for name, truth in truths.items():
            error = relative_error(found[name], truth)
            if name == "delta_bias" and truth.norm() > 0:
                error *= float(truth.norm() / truths["delta"].abs().sum((0, 2)).norm())
            if not error <= tolerance[name] and (long or name not in family.OUTPUTS):
                theirs = theirs or self.results(arguments, family.incumbent, softplus, method, found)
                assert error <= 1.5 * relative_error(theirs[name], truth), f"{method}, {name}: {error:.1e}"
            else:
                assert error <= tolerance[name], f"{method}, {name}: {error:.1e}"

    # ---- values

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("sizes", family.PROBLEMS, ids=str)
    def test_outputs(self, sizes, dtype, device):
        self.check(sizes, dtype, device)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("method", family.METHODS)
    @pytest.mark.parametrize(("b", "c"), list(itertools.product(KINDS, KINDS)))
    def test_every_method_and_kind_of_b_and_c(self, b, c, method, dtype, device):
        self.compare(problem((2, 6, 5, 41), dtype, device, b=b, c=c), allowed(dtype), method=method)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.complex128, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("softplus", [True, False])
    def test_every_option(self, softplus, dtype, device):
        optional = ("D", "z", "delta_bias", "initial_state")
        for there in itertools.product((False, True), repeat=4):
            without = tuple(name for name, is_there in zip(optional, there, strict=True) if not is_there)
            arguments = problem((2, 3, 4, 37), dtype, device, without=without)
            if not softplus:  # a step that is negative is one back in time, in which states grow
                arguments["delta"] = arguments["delta"].sigmoid()
                arguments["delta_bias"] = (
                    arguments["delta_bias"]
                    if "delta_bias" in without
                    else torch.full_like(arguments["delta_bias"], 0.25)
                )
            self.compare(arguments, allowed(dtype), softplus)

    @pytest.mark.parametrize("seq", LENGTHS)
    def test_lengths(self, seq, device):
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            for method in ("mamba", "foh"):
                self.compare(problem((1, 2, 3, seq), dtype, device), allowed(dtype), method=method)

    def test_every_short_length(self, device):
        """Padding is neutral after bias and softplus, wherever a tile ends."""
        for seq in range(1, 71):
            self.compare(problem((1, 3, 2, seq), torch.float64, device), allowed(torch.float64), method="foh")
            self.compare(problem((1, 3, 2, seq), torch.float32, device), allowed(torch.float32))

    @pytest.mark.parametrize("states", STATES)
    def test_numbers_of_states(self, states, device):
        for dtype in (torch.float64, torch.float32, torch.complex64):
            for b in ("variable", "constant"):
                self.compare(problem((2, 3, states, 35), dtype, device, b=b, c=b), allowed(dtype))

    @pytest.mark.parametrize("channels", [1, 2, 7, 15, 16, 17, 33, 70])
    def test_numbers_of_channels(self, channels, device):
        for dtype in (torch.float64, torch.bfloat16):
            self.compare(problem((2, channels, 4, 33), dtype, device), allowed(dtype), method="bilinear")

    @pytest.mark.parametrize("groups", [1, 2, 3, 4, 6, 12])
    def test_groups(self, groups, device):
        """B in `groups` groups, C in as many, in two, or the same for all time."""
        for c in ("grouped", "constant", "variable"):
            arguments = problem((2, 12, 3, 35), torch.float64, device, b="grouped", c=c, groups=groups)
            self.compare(arguments, allowed(torch.float64))
            two = problem((2, 12, 3, 35), torch.float64, device, b="grouped", c="grouped", groups=2)
            self.compare({**arguments, "C": two["C"]}, allowed(torch.float64))

    @pytest.mark.parametrize("sizes", [(0, 3, 4, 5), (2, 0, 4, 5), (2, 3, 0, 5), (2, 3, 4, 0), (0, 0, 0, 0)], ids=str)
    def test_empties(self, sizes, device):
        for dtype, b in itertools.product((torch.float64, torch.bfloat16, torch.complex64), KINDS):
            arguments = problem(sizes, dtype, device, b=b, c="variable", groups=3 if sizes[1] else 1)
            self.compare(arguments, allowed(dtype))

    def test_memory_that_lasts_and_steps_of_all_lengths(self, device):
        """States that forget nothing for thousands of steps, and such that forget all at once."""
        arguments = problem((1, 4, 4, 4097), torch.float32, device, without=("z", "D"))
        for scale in (1e-3, 1.0, 100.0):
            scaled = {**arguments, "A": arguments["A"] * scale}
            for method in ("mamba", "zoh", "foh", "bilinear", "backward_euler"):
                self.compare(scaled, allowed(torch.float32), method=method, long=True)

    @pytest.mark.parametrize("method", ["zoh", "foh"])
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
    def test_a_that_is_zero(self, method, dtype, device):
        """(e^z - 1) / z is 1 there; a state is then a sum."""
        arguments = problem((1, 3, 4, 50), dtype, device)
        self.compare({**arguments, "A": torch.zeros_like(arguments["A"])}, allowed(dtype), method=method)
        tiny = {**arguments, "A": arguments["A"] * 1e-7}
        self.compare(tiny, allowed(dtype), method=method)

    # ---- values of other implementations

    def golden(self, path: Path, dtype: torch.dtype, device: str) -> tuple[dict[str, Tensor], dict[str, Tensor | None]]:
        """The file's arrays, and the arguments among them, rounded."""
        with np.load(path) as file:
            found = {name: torch.from_numpy(file[name]).to(device) for name in file}
        numbers = family.COMPLEX_OF[dtype]
        given = {
            name: found[name].to(numbers if found[name].is_complex() else dtype) for name in NAMES if name in found
        }
        return found, {name: given.get(name) for name in NAMES}

    def agree(self, found: dict[str, Tensor], golden: dict[str, Tensor], dtype: torch.dtype) -> None:
        for name, x in golden.items():
            error = relative_error(found[name], x)
            assert error <= (1e-12 if dtype is torch.float64 else 1e-5), f"{name}: {error:.1e}"

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
    @pytest.mark.parametrize("path", MAMBA, ids=lambda path: path.stem)
    def test_values_of_mamba(self, path, dtype, device):
        golden, given = self.golden(path, dtype, device)
        softplus = bool(golden["delta_softplus"])
        found = self.results(given, softplus=softplus)
        self.agree(found, {name: golden[name] for name in family.OUTPUTS}, dtype)
        if self.stage.gradients:
            given = {name: None if x is None else x.requires_grad_() for name, x in given.items()}
            y = self.stage.function(**given, delta_softplus=softplus)
            there = [name for name, x in given.items() if x is not None]
            grads = torch.autograd.grad(y, [given[name] for name in there], golden["g"].to(y))
            self.agree(dict(zip(there, grads, strict=True)), {name: golden[f"d{name}"] for name in there}, dtype)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
    @pytest.mark.parametrize("method", RIGHT_METHODS)
    @pytest.mark.parametrize("path", RIGHT, ids=lambda path: path.stem)
    def test_values_of_right_coefficients(self, path, method, dtype, device):
        golden, given = self.golden(path, dtype, device)
        given["delta"] = golden["dt"].to(dtype)
        key = RIGHT_METHODS[method]
        found = self.results(given, softplus=False, method=method)
        self.agree(found, {"y": golden[f"{key}_y"], "last_state": golden[f"{key}_h"]}, dtype)
        if self.stage.gradients:
            there = {name: given[name].requires_grad_() for name in ("u", "delta", "A", "B", "C")}
            y = self.stage.function(**there, discretization_method=method)
            grads = torch.autograd.grad(y, list(there.values()), golden["g"].to(y))
            truths = {name: golden[f"{key}_d{'dt' if name == 'delta' else name}"] for name in there}
            self.agree(dict(zip(there, grads, strict=True)), truths, dtype)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
    @pytest.mark.parametrize("path", OTHERS, ids=lambda path: path.stem)
    def test_values_of_a_third_one(self, path, dtype, device):
        golden, given = self.golden(path, dtype, device)
        method = path.stem.split("_")[2]
        self.agree(self.results(given, method=method), {name: golden[name] for name in family.OUTPUTS}, dtype)
        if self.stage.gradients:
            there = {name: x.requires_grad_() for name, x in given.items() if x is not None}
            y = self.stage.function(**there, delta_softplus=True, discretization_method=method)
            grads = torch.autograd.grad(y, list(there.values()), golden["g"].to(y))
            self.agree(dict(zip(there, grads, strict=True)), {name: golden[f"d{name}"] for name in there}, dtype)

    # ---- what the function is

    def test_pairs_of_real_numbers_are_complex_ones(self, device):
        for b, c in itertools.product(("variable", "grouped"), repeat=2):
            arguments = problem((2, 6, 3, 21), torch.complex64, device, b=b, c=c)
            pairs = {name: torch.view_as_real(arguments[name]).flatten(-2) for name in "BC"}
            for given in (pairs, {"B": pairs["B"]}, {"C": pairs["C"]}):
                one, two = self.results(arguments), self.results({**arguments, **given})
                assert all(torch.equal(one[name], two[name]) for name in family.OUTPUTS)

    def test_sixteen_bits_beside_complex_numbers(self, device):
        """u, delta and z have 16 bits, A, B and C are complex64, or B and C pairs of 16 bits."""
        arguments = problem((2, 6, 3, 41), torch.complex64, device)
        for dtype in (torch.float16, torch.bfloat16):
            given = {name: x.to(dtype) if name in ("u", "delta", "z") else x for name, x in arguments.items()}
            self.compare(given, {name: allowed(dtype)["u"] for name in allowed(dtype)})
            pairs = {name: torch.view_as_real(given[name]).flatten(-2).to(dtype) for name in "BC"}
            self.compare({**given, **pairs}, {name: allowed(dtype)["u"] for name in allowed(dtype)})

    def test_types_beside_each_other(self, device):
        """With 16-bit u the others have 16 bits or 32, each by itself."""
        for dtype in (torch.float16, torch.bfloat16):
            for kind in KINDS:
                arguments = problem((2, 6, 3, 41), dtype, device, b=kind, c=kind)
                for name in ("A", "B", "C", "D", "delta_bias", "initial_state"):
                    for other in (dtype, torch.float32):
                        given = {**arguments, name: arguments[name].to(other)}
                        self.compare(given, {name: allowed(dtype)["u"] for name in allowed(dtype)})
                        y, last = self.stage.function(**given, return_last_state=True)
                        assert y.dtype is dtype and last.dtype is torch.float32

    def test_a_split_sequence_is_the_whole(self, device):
        """Wherever it is split, if the state is handed on; but `foh` also looks at the input before."""
        for dtype, method in itertools.product((torch.float64, torch.complex128), family.METHODS):
            if method == "foh":
                continue
            arguments = problem((2, 3, 4, 150), dtype, device)
            whole = self.results(arguments, method=method)
            for at in (0, 1, 16, 100, 128, 149, 150):

                def split(initial_state, at=at, **given):
                    options = {name: given.pop(name) for name in ("delta_softplus", "discretization_method")}
                    given.pop("return_last_state")
                    ys = []
                    for part in range(2):
                        pieces = {
                            name: x.split((at, 150 - at), -1)[part] if name in ("u", "delta", "z", "B", "C") else x
                            for name, x in given.items()
                        }
                        y, initial_state = self.stage.function(
                            **pieces, **options, initial_state=initial_state, return_last_state=True
                        )
                        ys.append(y)
                    return torch.cat(ys, 2), initial_state

                for name, x in self.results(arguments, split, method=method).items():
                    torch.testing.assert_close(x, whole[name], rtol=1e-9, atol=1e-9)

    def test_steps_of_no_length_change_nothing(self, device):
        arguments = problem((2, 3, 4, 40), torch.float32, device, without=("delta_bias",))
        for method in set(family.METHODS) - {"dirac"}:
            given = {**arguments, "delta": torch.zeros_like(arguments["delta"])}
            last = self.results(given, softplus=False, method=method)["last_state"]
            assert torch.equal(last, arguments["initial_state"])

    def test_a_constant_input_reaches_what_the_equation_says(self, device):
        """-(B / A) u, for every method that is one of the differential equation."""
        arguments = problem((1, 3, 4, 400), torch.float64, device, without=("D", "z", "delta_bias", "initial_state"))
        arguments["u"] = torch.ones_like(arguments["u"])
        arguments["delta"] = torch.full_like(arguments["delta"], 0.5)
        arguments["A"] = arguments["A"] - 0.2
        arguments["B"] = arguments["B"][..., :1].expand_as(arguments["B"])
        expected = -arguments["B"][:, None, :, 0] / arguments["A"]
        for method in ("zoh", "foh", "bilinear", "backward_euler"):
            last = self.results(arguments, softplus=False, method=method)["last_state"]
            torch.testing.assert_close(last, expected, rtol=1e-10, atol=1e-10)

    def test_softplus_of_any_number(self, device):
        """It is 0 far down, its argument far up, and not infinite in between."""
        steps = torch.tensor([-80.0, -20.0, -5.0, -2.1, -2.0, -0.1, 0.0, 0.1, 5.0, 20.0, 88.0, 200.0])
        for dtype in (torch.float32, torch.float64):
            arguments = problem((1, 1, 1, 1), dtype, device, without=("D", "z", "delta_bias", "initial_state"))
            for delta in steps.to(device, dtype):
                given = {**arguments, "delta": delta.view(1, 1, 1), "A": torch.zeros(1, 1, dtype=dtype, device=device)}
                self.compare(given, allowed(dtype))
            given["delta"] = torch.full_like(given["delta"], -1000)
            assert self.results(given)["last_state"].item() == 0

    @pytest.mark.parametrize("value", [torch.nan, torch.inf])
    def test_what_is_not_finite_shows(self, value, device):
        """In its channel alone, and from there on."""
        arguments = problem((2, 20, 4, 70), torch.float32, device, without=("z",))
        expected = self.results(arguments)["y"]
        arguments["u"][1, 2, 40] = value
        y = self.results(arguments)["y"]
        assert torch.equal(y[0], expected[0]) and torch.equal(y[1, :, :40], expected[1, :, :40])
        others = [channel for channel in range(20) if channel != 2]
        assert torch.equal(y[1, others], expected[1, others]) and not y[1, 2, 40].isfinite()

    def test_nothing_but_y_and_states_is_allocated(self, monkeypatch):
        """No matter how long the sequence is: no state but the last, and those before every CHUNK of steps."""
        seen, empty = [], family.operator.empty

        def counting(shape, like, dtype=None):
            seen.append(tuple(shape))
            return empty(shape, like, dtype)

        monkeypatch.setattr(family.operator, "empty", counting)
        arguments = problem((2, 3, 5, 300), torch.float32)
        self.stage.function(**{name: x.requires_grad_(self.stage.gradients) for name, x in arguments.items()})
        chunks = 3 if self.stage.gradients else 0
        assert sorted(seen) == sorted([(2, 3, 300), (2, 3, 5), (chunks, 2, 3, 5)])

    def test_the_states_that_are_kept(self, device):
        """Before every CHUNK of steps: what a sequence ends with that is as long."""
        operator = getattr(torch.ops.stages, self.stage.operator).default
        for dtype in (torch.float64, torch.float32, torch.complex64):
            given = problem((2, 3, 5, 300), dtype, device)
            numbers = (given[name] for name in (*family.ARGUMENTS, "initial_state"))
            *_, kept = operator(*numbers, True, 0, True)
            assert kept.shape == (3, 2, 3, 5)
            for chunk, states in enumerate(kept):
                short = {
                    n: x[..., : 128 * chunk] if n in ("u", "delta", "z", "B", "C") else x for n, x in given.items()
                }
                options = dict(delta_softplus=True, return_last_state=True)
                assert torch.equal(self.stage.function(**short, **options)[1], states)

    def test_results_are_the_same_with_and_without_gradients(self, device):
        arguments = problem((2, 5, 7, 37), torch.float32, device)
        first = self.stage.function(**arguments, delta_softplus=True)
        given = {name: x.detach().requires_grad_() for name, x in arguments.items()}
        second = self.stage.function(**given, delta_softplus=True)
        assert torch.equal(first, second) and not first.requires_grad and second.requires_grad

    def test_results_repeat_bit_for_bit(self, device):
        arguments = problem((3, 35, 7, 150), torch.float32, device)
        one, two = self.results(arguments), self.results(arguments)
        assert all(torch.equal(one[name], two[name]) for name in one)

    def test_mambas_own_name_and_order_of_arguments(self):
        given = problem((1, 2, 3, 20), torch.float32)
        inputs = [given[name] for name in family.ARGUMENTS]
        y, last = stages.selective_scan_fn(*inputs, True, True)
        assert stages.selective_scan_fn is stages.selective_scan
        expected = self.stage.function(**{n: given[n] for n in family.ARGUMENTS}, delta_softplus=True)
        assert torch.equal(y, expected) and last.shape == (1, 2, 3)

    # ---- layouts

    @pytest.mark.parametrize("view", VIEWS)
    def test_views(self, view, device):
        """Each argument alone, and all together."""
        for dtype, kind in itertools.product((torch.float32, torch.bfloat16, torch.complex64), KINDS):
            arguments = problem((3, 4, 6, 40), dtype, device, b=kind, c=kind)
            expected = self.results(arguments)
            for names in (*((name,) for name in NAMES), NAMES):
                given = {n: VIEWS[view](x) if n in names else x for n, x in arguments.items()}
                found = self.results(given)
                assert all(torch.equal(found[name], expected[name]) for name in family.OUTPUTS)

    def test_expanded_and_conjugated_inputs(self, device):
        arguments = problem((3, 4, 6, 40), torch.complex64, device)
        expanded = {
            "u": arguments["u"][:1, :1].expand(3, 4, 40),
            "delta": arguments["delta"][:, :, :1].expand(3, 4, 40),
            "A": arguments["A"].conj(),
            "B": arguments["B"][:1, :, :1].expand(3, 6, 40).conj(),
            "C": arguments["C"][:, None, :1].expand(3, 2, 6, 40),
            "D": arguments["D"][:1].expand(4),
            "initial_state": arguments["initial_state"].conj(),
        }
        given = {**arguments, **expanded}
        plain = {name: x.contiguous().resolve_conj() for name, x in given.items()}
        found, expected = self.results(given), self.results(plain)
        assert all(torch.equal(found[name], expected[name]) for name in family.OUTPUTS)

    def test_more_rows_than_a_grid_has_in_y(self, device):
        arguments = problem((65537, 1, 1, 2), torch.float32, device, without=("z", "D"))
        self.compare(arguments, allowed(torch.float32))

    def test_blocks_are_counted_along_x_alone(self):
        with xray.recording() as report:
            self.results(problem((3, 35, 17, 40), torch.float32, b="grouped", groups=5))
        assert report.launches and {launch.grid[1:] for launch in report.launches} == {(1, 1)}
        assert [str(fault) for fault in report.faults] == []

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64], ids=str)
    def test_no_faults_in_any_layout(self, dtype):
        for kind, view in itertools.product(KINDS, VIEWS):
            arguments = problem((2, 6, 9, 45), dtype, b=kind, c="grouped")
            with xray.recording("random", 1) as report:
                self.results({name: VIEWS[view](x) for name, x in arguments.items()}, method="foh")
            assert [str(fault) for fault in report.faults] == []

    # ---- as an operator

    def test_opcheck(self, device):
        operator = getattr(torch.ops.stages, self.stage.operator).default
        given = problem((2, 5, 7, 37), torch.float32, device)
        arguments = [given[name] for name in (*family.ARGUMENTS, "initial_state")]
        torch.library.opcheck(operator, (*arguments, True, 0, False))
        torch.library.opcheck(operator, (*arguments[:5], None, None, None, None, False, 3, True))

    def test_wrong_arguments(self):
        good = problem((2, 4, 3, 5), torch.float32)
        half = {n: x.half() if n in ("u", "delta", "z") else x for n, x in good.items()}
        numbers = problem((2, 4, 3, 5), torch.complex64)
        cases = [
            (good, "u", [1.0], TypeError, "u must be a torch.Tensor, got list"),
            (good, "u", good["u"].int(), TypeError, "u has dtype torch.int32; allowed: "),
            (good, "u", good["u"][0], ValueError, r"u has 2 dimensions \(4, 5\); allowed: 3"),
            (
                good,
                "delta",
                good["delta"].double(),
                TypeError,
                "delta has dtype torch.float64; allowed: torch.float32",
            ),
            (good, "delta", good["delta"][..., :2], ValueError, r"delta is \(2, 4, 2\) and u is \(2, 4, 5\)"),
            (good, "delta", good["delta"].to("meta"), ValueError, "delta is on meta, but u is on cpu"),
            (
                good,
                "A",
                good["A"].double(),
                TypeError,
                "A has dtype torch.float64; allowed: torch.float32 or torch.comp",
            ),
            (
                good,
                "A",
                good["A"].T,
                ValueError,
                r"A is \(3, 4\) and u is \(2, 4, 5\); allowed: \(d, n\), here \(4, n\)",
            ),
            (good, "A", good["A"].new_zeros(4, 257), ValueError, r"allowed: \(d, n\) with n <= 256"),
            (half, "A", good["A"].double(), TypeError, "allowed: torch.float32, torch.float16 or torch.complex64"),
            (good, "B", None, TypeError, "B must be a torch.Tensor, got NoneType"),
            (good, "B", good["B"][0, 0], ValueError, r"B has 1 dimension \(5,\); allowed: 2, 3 or 4"),
            (good, "B", good["B"][:, :2], ValueError, r"B is \(2, 2, 5\), .*\(B, n, T\), here \(2, 3, 5\)"),
            (good, "B", numbers["B"], TypeError, "B has dtype torch.complex64; allowed: torch.float32"),
            (good, "C", good["C"][0].T, ValueError, r"C is \(5, 3\), .*\(d, n\), here \(4, 3\)"),
            (good, "C", good["C"][:, None].expand(2, 3, 3, 5), ValueError, "a number of groups that divides d, here 4"),
            (good, "C", good["C"].to("meta"), ValueError, "C is on meta, but u is on cpu"),
            (
                numbers,
                "B",
                good["B"][0].T[:4],
                TypeError,
                "holds for all time and A is complex; allowed: torch.complex64",
            ),
            (numbers, "B", good["B"], ValueError, r"B is \(2, 3, 5\), .*\(B, n, 2 T\), here \(2, 3, 10\)"),
            (numbers, "initial_state", good["initial_state"], TypeError, "allowed: torch.complex64"),
            (good, "D", good["D"][:2], ValueError, r"D is \(2,\), .*allowed: \(d,\), here \(4,\)"),
            (good, "D", good["D"].to_sparse(), TypeError, "D has layout torch.sparse_coo"),
            (half, "z", good["z"], TypeError, "z has dtype torch.float32; allowed: torch.float16"),
            (good, "z", good["z"][:1], ValueError, r"z is \(1, 4, 5\) and u is \(2, 4, 5\); allowed: the same shape"),
            (good, "delta_bias", good["delta_bias"][:2], ValueError, r"delta_bias is \(2,\)"),
            (good, "delta_softplus", 1, TypeError, "delta_softplus must be True or False, got int"),
            (good, "return_last_state", None, TypeError, "return_last_state must be True or False, got NoneType"),
            (good, "discretization_method", 1, TypeError, "discretization_method must be a str, got int"),
            (good, "discretization_method", "tustin", ValueError, "is 'tustin'; allowed: 'mamba', 'zoh', .* or 'backw"),
            (good, "initial_state", good["initial_state"][:1], ValueError, r"\(B, d, n\), here \(2, 4, 3\)"),
        ]
        for given, name, value, error, words in cases:
            for function in (self.stage.function, family.choose):
                with pytest.raises(error, match=words):
                    function(**(given | {name: value}))

    @GPU
    def test_a_gpu_gives_what_the_cpu_device_gives(self):
        for dtype, method in itertools.product(DTYPES, family.METHODS):
            arguments = problem((2, 35, 17, 300), dtype)
            there = self.results({name: x.cuda() for name, x in arguments.items()}, method=method)
            here = self.results(arguments, method=method)
            for name, x in here.items():
                error = relative_error(there[name].cpu(), widened(x))
                if name == "delta_bias":  # a sum, in which much cancels
                    error *= float(x.norm() / widened(here["delta"]).abs().sum((0, 2)).norm())
                assert error <= 2 * allowed(dtype)[name], f"{method}, {name}: {error:.1e}"
