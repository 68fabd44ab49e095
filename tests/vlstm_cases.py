"""What the tests of the vLSTM share: other implementations' values, and the tests of every stage that computes it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import GPU
from qkv_cases import SIZES, VIEWS
from stage_cases import StageCases
from torch import Tensor
from torch.autograd import forward_ad

from stages.families import FLOATING, unit_roundoff, vlstm
from stages.toolkit import operator, xray
from stages.toolkit.report import Report
from stages.toolkit.verify import relative_error, verify

NAMES = ("q", "k", "v", "i", "f")
GOLDEN = sorted((Path(__file__).parent / "golden").glob("mlstm_*.npz"))


def load_golden(path: Path, device: str = "cpu") -> dict[str, Tensor]:
    """The arrays of a file, in float64."""
    with np.load(path) as file:
        return {name: torch.from_numpy(file[name]).to(device) for name in file}


def golden_arguments(golden: dict[str, Tensor]) -> tuple[list[Tensor], dict[str, str]]:
    """q, k, v, i and f of a file, and the options that make its formula."""
    return [golden[name] for name in "qkvif"], {} if "m" in golden else {"input_gate": "sigmoid"}


def viewed(view: str, x: Tensor) -> Tensor:
    """One of the views of qkv's tests; a gate is the first of two columns."""
    return VIEWS[view](x) if x.dim() == 4 else VIEWS[view](torch.stack([x, x * torch.nan], 3))[..., 0]


def error_of_rows(output: Tensor, truth: Tensor, arguments: list[Tensor], **options) -> float:
    """The largest error of an element, in units of what rounding alone may do to its row.

    The weights of a row may cancel in its sum, by which everything is divided: nothing keeps it above 0 where the input
    gates are large. A relative error of 1 in each weight changes H by no more than (largest v + largest H) times the
    sum of |weights| over the normaliser.
    """
    q, k, v, i, f = (x.double() for x in arguments)
    gate = vlstm.gate_number(options.get("input_gate", "exp"), options.get("normalize", True))
    exponents = vlstm.log_weights(i if gate == vlstm.EXP else torch.nn.functional.logsigmoid(i), f)
    c = exponents.amax(3).clamp(min=0)
    weights = vlstm.scale(q) * (q @ k.mT) * (exponents - c[..., None]).exp()
    n = torch.ones_like(c) if gate == vlstm.BARE else torch.maximum(weights.sum(3).abs(), (-c).exp())
    amplified = weights.abs().sum(3) / n
    unit = amplified[..., None] * (v.abs().max() + truth.abs().amax(3, keepdim=True))
    return ((output.double() - truth).abs() / (unit + 1e-32)).max().item()  # below 1e-37 float32 has no digits


def counted(seq: int) -> Tensor:
    """1, 2, .., seq in float64: how many keys a row has."""
    return torch.arange(1, seq + 1, dtype=torch.float64)


def error_of_elements(output: Tensor, truth: Tensor) -> float:
    """The largest relative error of an element."""
    return (output.double().flatten().cpu() / truth - 1).abs().max().item()


def requests(report: Report, name: str) -> int:
    """The requests of a report that load from or store to a tensor."""
    return sum(site.requests for site in report.sites if site.name == name and site.space == "global")


class VlstmCases(StageCases):
    odd = (2, 3, 70, 17, 35)
    small = (1, 2, 3, 2, 2)

    def results(self, arguments: list[Tensor]) -> list[Tensor]:
        """The outputs with every set of options."""
        return [function(*arguments) for function in self.functions(arguments[0].dtype)]

    def compare(self, arguments: list[Tensor], **options) -> None:
        output, truth = self.stage.vlstm(*arguments, **options), vlstm.reference(*arguments, **options)
        assert error_of_rows(output, truth, arguments, **options) <= 3e-5

    @pytest.mark.parametrize("dtype", FLOATING, ids=str)
    @pytest.mark.parametrize("sizes", SIZES, ids=str)
    def test_output_and_gradients(self, sizes, dtype, device):
        self.check(sizes, dtype, device)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
    @pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
    def test_values_of_another_implementation(self, path, dtype, device):
        golden = load_golden(path, device)
        given, options = golden_arguments(golden)
        given = [x.to(dtype) for x in given]
        eps, allowed = golden["eps"].item(), 3e-5 if dtype is torch.float32 else 1e-13
        for name, extra in (("h", {"eps": eps}), ("h_eps0", {}), ("h_unnorm", {"normalize": False})):
            if name in golden:
                output = self.stage.vlstm(*given, **options, **extra)
                assert error_of_rows(output, golden[name], given, **options, **extra) <= allowed

    @pytest.mark.parametrize("value", [40.0, -40.0, 100.0, -100.0, 200.0, -200.0, -torch.inf])
    @pytest.mark.parametrize("which", ["i", "f", "both"])
    @pytest.mark.parametrize("where", [slice(None), 0, 70, slice(60, 68), slice(0, None, 7)], ids=str)
    def test_extreme_gates(self, where, which, value, device):
        given = self.arguments((1, 1, 140, 4, 5), device=device)
        for x in {"i": given[3:4], "f": given[4:], "both": given[3:]}[which]:
            x[:, :, where] = value
        for options in self.options():
            self.compare(given, **options)

    @pytest.mark.parametrize("value", [40.0, -40.0, 100.0, -100.0, 200.0, -200.0, -torch.inf])
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
    def test_extreme_gates_in_other_types(self, dtype, value, device):
        allowed = 1e-13 if dtype is torch.float64 else unit_roundoff(dtype) + 3e-5
        for gates in (slice(3, 4), slice(4, 5), slice(3, 5)):  # i, f, both
            for where in (slice(None), slice(0, None, 7)):
                given = self.arguments((1, 1, 140, 4, 5), dtype, device)
                for x in given[gates]:
                    x[:, :, where] = value
                for options in self.options(dtype):
                    output, truth = self.stage.vlstm(*given, **options), vlstm.reference(*given, **options)
                    lost = (output - truth).abs() < torch.finfo(dtype).tiny  # below it a type has few digits or none
                    assert error_of_rows(torch.where(lost, truth, output), truth, given, **options) <= allowed

    @pytest.mark.parametrize("value", [50.0, 100.0, 200.0])
    def test_a_row_of_zeros_is_zero(self, value, device):
        q, k, v, i, f = self.arguments((1, 1, 70, 4, 5), device=device)
        q[:, :, 3], i[:] = 0, value
        assert all(not x[:, :, 3].any() for x in self.results([q, k, v, i, f]))

    @pytest.mark.parametrize("at", [1, 20, 63, 64, 65, 100, 128, 149])
    def test_a_forget_gate_of_minus_infinity_is_a_reset(self, at, device):
        """Nothing of what came before is left, and what came before does not know."""
        given = self.arguments((1, 2, 150, 5, 6), device=device)
        other = self.arguments((1, 2, 150, 5, 6), device=device, seed=5)
        reset = [x.clone() for x in given]
        reset[4][:, :, at] = -torch.inf
        changed = [torch.cat([x[:, :, :at], y[:, :, at:]], 2) for x, y in zip(other, reset, strict=True)]
        for before, after, third in zip(*map(self.results, (given, reset, changed)), strict=True):
            assert torch.equal(before[:, :, :at], after[:, :, :at])
            torch.testing.assert_close(after[:, :, at:], third[:, :, at:])
        self.compare(reset)

    @pytest.mark.parametrize("gates", ["long memory", "inputs of 10", "spikes"])
    @pytest.mark.parametrize("seq", [31, 65, 257, 600])
    def test_sequences(self, seq, gates, device):
        q, k, v, i, f = self.arguments((1, 1, seq, 4, 5), device=device)
        if gates == "long memory":
            f += 4
        elif gates == "inputs of 10":
            i += 10 * torch.sign(i)
        else:
            f[:, :, ::9], i[:, :, ::11] = -80, 40
        self.compare([q, k, v, i, f])

    def test_a_sum_of_equal_terms_costs_no_digits(self, device):
        """Each element: where all weights are 0.1, each addition to a sum one by one rounds to the same side."""
        q, one = torch.full((1, 1, 4097, 1), 0.1, device=device), torch.ones(1, 1, 4097, 1, device=device)
        weight, n, wide_open = q.double()[0, 0, 0, 0].item(), counted(4097), torch.full_like(q[..., 0], torch.inf)
        h = self.stage.vlstm(q, one, one, wide_open, wide_open, input_gate="sigmoid", normalize=False)
        assert error_of_elements(h, weight * n) <= 1e-5
        first = (n == 1).float().to(device)[None, None, :, None]  # v, so that only the sum of the weights is long
        h = self.stage.vlstm(q, one, first, torch.zeros_like(wide_open), wide_open)
        assert error_of_elements(h, weight / (weight * n).clamp(min=1)) <= 1e-5

    @pytest.mark.parametrize("view", VIEWS)
    @pytest.mark.parametrize("which", range(5), ids=["q", "k", "v", "i", "f"])
    def test_views(self, view, which, device):
        arguments = list(self.arguments((2, 3, 40, 17, 20), device=device))
        expected = self.results(arguments)
        arguments[which] = viewed(view, arguments[which])
        assert all(torch.equal(x, y) for x, y in zip(self.results(arguments), expected, strict=True))

    def test_expanded_inputs(self, device):
        q, k, v, i, f = self.arguments((2, 3, 40, 17, 20), device=device)
        for given in (
            (q[:1].expand(2, -1, -1, -1), k, v, i[:1].expand(2, -1, -1), f),
            (q, k[:, :1].expand(-1, 3, -1, -1), v[:, :1].expand(-1, 3, -1, -1), i, f[:, :1].expand(-1, 3, -1)),
            (q[..., :1].expand(-1, -1, -1, 17), k, v[:, :, :1].expand(-1, -1, 40, -1), i, f[..., :1].expand(2, 3, 40)),
        ):
            copies = [x.contiguous() for x in given]
            assert all(torch.equal(x, y) for x, y in zip(self.results(given), self.results(copies), strict=True))

    def test_heads_do_not_know_each_other(self, device):
        arguments = self.arguments((2, 3, 66, 5, 7), device=device)
        one = [x[1:, 2:] for x in arguments]
        for whole, part in zip(self.results(arguments), self.results(one), strict=True):
            assert torch.equal(whole[1:, 2:], part)

    @pytest.mark.parametrize("now", [1, 64, 65, 100, 128])
    def test_the_beginning_alone_is_the_beginning_of_the_whole(self, now, device):
        arguments = self.arguments((1, 2, 150, 20, 9), device=device)
        for whole, part in zip(self.results(arguments), self.results([x[:, :, :now] for x in arguments]), strict=True):
            assert torch.equal(part, whole[:, :, :now])

    @pytest.mark.parametrize("which", range(5), ids=["q", "k", "v", "i", "f"])
    def test_nan_stays_where_it_belongs(self, which, device):
        arguments = list(self.arguments((1, 1, 140, 5, 7), device=device))
        expected = self.results(arguments)
        arguments[which][0, 0, 80] = torch.nan
        for before, after in zip(expected, self.results(arguments), strict=True):
            first = 64 if which == 2 else 80  # a NaN of v reaches its tile: 0 times NaN
            assert torch.equal(after[:, :, :first], before[:, :, :first])
            assert after[:, :, 80:81].isnan().all() or which == 4 and after[:, :, 80:81].isnan().any()
            assert after[:, :, 81:].isnan().all() or which == 0 and torch.equal(after[:, :, 81:], before[:, :, 81:])

    @pytest.mark.parametrize("which", [0, 1], ids=["q", "k"])
    def test_what_closed_gates_hide_may_be_nan(self, which, device):
        given = list(self.arguments((1, 1, 140, 5, 7), device=device))
        given[3][0, 0, 30], given[4][0, 0, 90] = -torch.inf, -torch.inf  # 30 is hidden from all, 0 to 89 from 90 on
        expected = self.results(given)
        given[which][0, 0, 30] = given[which][0, 0, 70] = torch.nan
        for before, after in zip(expected, self.results(given), strict=True):
            rows = [row for row in range(140) if not (row in (30, 70) if which == 0 else 70 <= row < 90)]
            assert torch.equal(after[:, :, rows], before[:, :, rows])

    def test_blocks_are_counted_along_x_alone(self):
        """y and z of a grid end at 65535, which batch x heads and T may pass."""
        arguments = self.arguments(self.odd, requires_grad=True)
        for function in self.functions():
            with xray.recording() as report:
                output = function(*arguments)
                if self.stage.gradients:
                    output.sum().backward()
            assert {launch.grid[1:] for launch in report.launches} == {(1, 1)}

    @GPU
    def test_more_batches_and_heads_than_a_grid_has_in_y_or_z(self):
        for batch, heads in ((66_000, 1), (3, 22_000)):
            x = torch.ones(1, 1, 1, 1, device="cuda").expand(batch, heads, 1, 1)
            gate = torch.zeros(1, 1, 1, device="cuda").expand(batch, heads, 1)
            assert (self.stage.vlstm(x, x, x, gate, gate) == 1).all()

    def test_inputs_are_not_written(self, device):
        arguments = self.arguments(self.odd, device=device)
        before = [x.clone() for x in arguments]
        self.results(arguments)
        assert all(torch.equal(x, y) for x, y in zip(arguments, before, strict=True))

    def test_nothing_but_the_gradient_knows_of_its_normaliser(self, device):
        arguments = self.arguments(self.odd, device=device)
        assert torch.equal(self.stage.vlstm(*arguments), self.stage.vlstm(*arguments, normalizer_gradient=False))

    def test_wrong_arguments(self):
        x, g = torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3)
        for given, options, error, words in (
            (([[1.0]], x, x, g, g), {}, TypeError, "q must be a torch.Tensor, got list"),
            ((x, None, x, g, g), {}, TypeError, "k must be a torch.Tensor, got NoneType"),
            ((x, x, x.int(), g, g), {}, TypeError, "v has dtype torch.int32; allowed: torch.float64"),
            ((x, x, x, g.half(), g), {}, TypeError, "i has dtype torch.float16, but q has torch.float32"),
            ((x.to_sparse(), x, x, g, g), {}, TypeError, "q has layout torch.sparse_coo; allowed: torch.strided"),
            ((x, x, x, g, g.to("meta")), {}, ValueError, "f is on meta, but q is on cpu"),
            ((x[0], x, x, g, g), {}, ValueError, r"q has 3 dimensions \(2, 3, 4\); allowed: 4"),
            ((x, x, x, x, g), {}, ValueError, r"i has 4 dimensions \(1, 2, 3, 4\); allowed: 3"),
            ((x, x[..., 1:], x, g, g), {}, ValueError, r"k is \(1, 2, 3, 3\) and q is \(1, 2, 3, 4\); allowed: the"),
            ((x, x, x[:, :, 1:], g, g), {}, ValueError, r"v is \(1, 2, 2, 4\) and q is .*the same B, N and T"),
            ((x, x, x, g[:, :1], g), {}, ValueError, r"i is \(1, 1, 3\) and q is .*\(B, N, T\), as q has them"),
            ((x, x, x, g, g[..., 1:]), {}, ValueError, r"f is \(1, 2, 2\) and q is"),
            ((x, x, x, g, g), {"eps": "1"}, TypeError, "eps must be a real number .* got str"),
            ((x, x, x, g, g), {"eps": True}, TypeError, "eps must be a real number .* got bool"),
            ((x, x, x, g, g), {"eps": -1e-6}, ValueError, "eps is -1e-06; allowed: 0 or more"),
            ((x, x, x, g, g), {"eps": torch.nan}, ValueError, "eps is nan; allowed: 0 or more, and finite"),
            ((x, x, x, g, g), {"normalizer_gradient": 1}, TypeError, "normalizer_gradient must be True or False"),
            ((x, x, x, g, g), {"normalize": None}, TypeError, "normalize must be True or False, got NoneType"),
            ((x, x, x, g, g), {"input_gate": "tanh"}, ValueError, "input_gate is 'tanh'; allowed: 'exp' or 'sigmoid'"),
            ((x, x, x, g, g), {"normalize": False}, ValueError, "normalize is False with input_gate='exp'"),
        ):
            with pytest.raises(error, match=words):
                self.stage.vlstm(*given, **options)


class ForwardCases(VlstmCases):
    """Of a stage that has no backward."""

    def test_there_is_no_backward_and_it_says_who_has_one(self):
        arguments = self.arguments(self.small, requires_grad=True)
        with pytest.raises(NotImplementedError, match=f"{self.stage.operator} has no backward; stage 32 has one"):
            self.stage.vlstm(*arguments).sum().backward()

    def test_there_are_no_states_and_it_says_who_has_them(self):
        arguments = self.arguments(self.small)
        for options in ({"initial_state": ()}, {"return_last_state": True}):
            with pytest.raises(NotImplementedError, match=f"no {next(iter(options))}.*; stage 36 has it"):
                self.stage.vlstm(*arguments, **options)


def gradients(function, arguments: list[Tensor], grad: Tensor, **options) -> list[Tensor]:
    """The output of a function of q, k, v, i and f, and the gradients of all five."""
    given = [x.detach().requires_grad_() for x in arguments]
    output = function(*given, **options)
    return [output.detach(), *torch.autograd.grad(output, given, grad)]


def truth_of(arguments: list[Tensor], grad: Tensor, **options) -> list[Tensor]:
    """The same in float64, of the values as they are rounded."""
    return gradients(vlstm.reference, [x.double() for x in arguments], grad.double(), **options)


def units_of_gradients(arguments: list[Tensor], grad: Tensor, **options) -> list[Tensor]:
    """What the terms of each gradient add up to without their signs: rounding may cost that much, in relative terms.

    Where one key outweighs all others by far, the terms of its gradient cancel but for some exp(-100), and where the
    weights of a row cancel in their sum, by which they are divided, each of their errors counts as often as that many.
    """
    q, k, v, i, f = (x.double() for x in arguments)
    gate = vlstm.gate_number(options.get("input_gate", "exp"), options.get("normalize", True))
    exponents = vlstm.log_weights(i if gate == vlstm.EXP else torch.nn.functional.logsigmoid(i), f)
    m = exponents.amax(3) if gate == vlstm.EXP else torch.zeros_like(i)
    c = m.clamp(min=0)
    scaled = (exponents - c[..., None]).exp()
    weights = vlstm.scale(q) * (q @ k.mT) * scaled
    n = torch.ones_like(c) if gate == vlstm.BARE else torch.maximum(weights.sum(3).abs(), (-c).exp())
    n = n + options.get("eps", 0) * (m - c).exp() * (gate != vlstm.BARE)
    amplified = (weights.abs().sum(3) / n).clamp(min=1)[..., None]
    g, h = grad.double().abs(), (weights / n[..., None]).abs() @ v.abs()
    q, k, v = (x.abs() for x in (q, k, v))
    shares = vlstm.scale(q) * scaled / n[..., None] * amplified
    terms = (g @ v.mT + (g * h).sum(3, keepdim=True)) * shares
    sums = terms * (q @ k.mT)
    earlier = torch.ones(sums.shape[2:], dtype=torch.bool, device=q.device).tril(-1)
    of_f = torch.sigmoid(-f) * (sums * earlier).sum(3).flip(2).cumsum(2).flip(2)
    return [terms @ k, terms.mT @ q, (q @ k.mT * shares).mT @ g, sums.sum(2), of_f]


class VlstmGradientCases(VlstmCases):
    """The tests of the gradients, for stages that have them."""

    def random_grad(self, arguments: list[Tensor], seed: int = 1) -> Tensor:
        """The same numbers on each device."""
        v = arguments[2]
        return torch.randn(v.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(v)

    def all_gradients(self, arguments: list[Tensor], grad: Tensor | None = None) -> list[list[Tensor]]:
        """Output and gradients with every set of options."""
        grad = self.random_grad(arguments) if grad is None else grad
        return [gradients(function, arguments, grad) for function in self.functions(arguments[0].dtype)]

    def compare_gradients(self, arguments: list[Tensor], grad: Tensor | None = None, **options) -> None:
        """With float64, within the tolerance of the gradients or of what their terms add up to."""
        grad = self.random_grad(arguments) if grad is None else grad
        allowed = vlstm.tolerance({}, arguments[0].dtype)
        results = gradients(self.stage.vlstm, arguments, grad, **options)[1:]
        truths, units = truth_of(arguments, grad, **options)[1:], units_of_gradients(arguments, grad, **options)
        for name, result, truth, unit in zip(NAMES, results, truths, units, strict=True):
            assert result.isfinite().all(), name
            error = (result.double() - truth).norm() / (unit.norm() + 1e-32)
            assert error <= allowed[name], f"{name}: {error:.1e}"

    def check(self, sizes: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
        """Within the tolerance, or else 1.5 times what the formula in torch is off: of a few numbers of 16 bits, and of
        differences of H, which is rounded to 16 bits, no more is left.

        The terms of a gate's gradient may cancel wholly: of a single key, as H does not change with its i. Where less
        is left than the tolerance allows of the terms, that is what a result may be off, and not a part of nothing.
        """
        for options in self.options(dtype):
            results = verify(self.stage, self.stage.sizes(sizes), dtype, device, options=options)
            if all(result.ok for result in results):
                continue
            arguments = self.arguments(sizes, dtype, device)
            grad = self.random_grad(arguments)
            others = gradients(vlstm.incumbent, arguments, grad, **options)
            truths = truth_of(arguments, grad, **options)
            units = [None, *units_of_gradients(arguments, grad, **options)]
            for name, result, other, truth, unit in zip(("h", *NAMES), results, others, truths, units, strict=True):
                bound = max(result.tolerance, 1.5 * relative_error(other, truth))
                size = truth.norm().item()
                if name in ("i", "f") and size <= (lost := result.tolerance * unit.norm().item()):
                    bound = max(bound, lost / size if size else lost)
                assert result.error <= bound, result

    def test_gradients_of_first_and_second_order(self):
        """First order true, but where the normaliser is held constant; second order refused, and forward mode, too."""
        arguments = self.arguments((1, 2, 5, 3, 2), torch.float64, requires_grad=True)
        for options in (
            *self.options(torch.float64),
            {"eps": 0.7},
            {"input_gate": "sigmoid"},
            {"input_gate": "sigmoid", "normalize": False, "eps": 0.3},
        ):
            if options.get("normalizer_gradient", True):
                assert torch.autograd.gradcheck(lambda *x, o=options: self.stage.vlstm(*x, **o), arguments)
        gradient = torch.autograd.grad(self.stage.vlstm(*arguments).sum(), arguments, create_graph=True)
        with pytest.raises(NotImplementedError, match=f"{self.stage.operator} has no second derivatives"):
            torch.autograd.grad(gradient[0].sum(), arguments)
        with forward_ad.dual_level(), torch.no_grad():
            q = forward_ad.make_dual(arguments[0].detach(), torch.ones_like(arguments[0]))
            with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
                self.stage.vlstm(q, *arguments[1:])

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
    @pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
    def test_gradients_of_another_implementation(self, path, dtype, device):
        """All of them: with its eps and without, true, with the normaliser held constant, without a normaliser.

        float32 is compared with float64 of the rounded values, which the reference has right, and may be off by no more
        than its tolerance or, where a sum of weights cancels, 1.5 times what the formula in torch is off.
        """
        golden = load_golden(path, device)
        given, options = golden_arguments(golden)
        eps, allowed, seen = golden["eps"].item(), vlstm.tolerance({}, dtype), set()
        given, grad = [x.to(dtype) for x in given], golden["gh"].to(dtype)
        for ending, extra in (
            ("", {"eps": eps}),
            ("_nconst", {"eps": eps, "normalizer_gradient": False}),
            ("_eps0", {}),
            ("_unnorm", {"normalize": False}),
        ):
            keys = {name: f"d{name}{ending}" for name in NAMES if f"d{name}{ending}" in golden}
            if not keys:
                continue
            seen.update(keys.values())
            results, truths, others = (
                dict(zip(NAMES, gradients(function, tensors, g, **options, **extra)[1:], strict=True))
                for function, tensors, g in (
                    (self.stage.vlstm, given, grad),
                    (vlstm.reference, [x.double() for x in given], grad.double()),
                    (vlstm.incumbent, given, grad),
                )
            )
            for name, key in keys.items():
                if dtype is torch.float64:
                    assert relative_error(results[name], golden[key]) <= 2e-13, key
                else:
                    bound = max(allowed[name], 1.5 * relative_error(others[name], truths[name]))
                    assert relative_error(results[name], truths[name]) <= bound, key
        assert {key for key in golden if key.startswith("d")} <= seen | {"d"}

    @pytest.mark.parametrize("seq", [0, 1, 2, 3, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200])
    def test_gradients_at_every_length(self, seq, device):
        self.check((1, 2, seq, 7, 5), torch.float32, device)

    @pytest.mark.parametrize("which", ["i", "f", "both"])
    @pytest.mark.parametrize("value", [40.0, -40.0, 100.0, -100.0, -200.0, -torch.inf])
    @pytest.mark.parametrize("where", [slice(None), 0, 70, slice(60, 68), slice(0, None, 7)], ids=str)
    def test_gradients_at_extreme_gates(self, where, value, which, device):
        for dtype in (torch.float32, torch.bfloat16):
            given = self.arguments((1, 1, 140, 4, 5), dtype, device)
            for x in {"i": given[3:4], "f": given[4:], "both": given[3:]}[which]:
                x[:, :, where] = value
            for options in self.options(dtype):
                self.compare_gradients(given, **options)

    @pytest.mark.parametrize("gates", ["long memory", "inputs of 10", "spikes"])
    @pytest.mark.parametrize("seq", [31, 65, 257, 600])
    def test_gradients_of_long_memory_and_spikes(self, seq, gates, device):
        q, k, v, i, f = self.arguments((1, 1, seq, 8, 8), device=device)
        if gates == "long memory":
            f += 5
        elif gates == "inputs of 10":
            i *= 10
        else:
            f[:, :, ::9], i[:, :, ::11] = -80, 40
        for options in self.options():
            self.compare_gradients([q, k, v, i, f], **options)

    @pytest.mark.parametrize("seq", [1000, 2047, 2048, 2049, 4097])
    def test_a_long_sequence_costs_no_digits(self, seq, device):
        arguments = self.arguments((1, 1, seq, 8, 8), device=device)
        grad, allowed = self.random_grad(arguments), vlstm.tolerance({}, torch.float32)
        results = gradients(self.stage.vlstm, arguments, grad)
        for name, x, truth in zip(("output", *NAMES), results, truth_of(arguments, grad), strict=True):
            assert relative_error(x, truth) <= allowed[name], name

    def test_the_input_gate_of_a_single_key_changes_nothing(self, device):
        """Where |sum u| > 1, H is v q . k / (|q . k| + eps sqrt(Dk)): the gradient is all rounding."""
        q, k, v, i, f = self.arguments((2, 3, 1, 4, 5), device=device)
        given = [1 + q.abs(), 1 + k.abs(), v, i.abs(), f]
        for eps in (0, 0.01, 0.5):
            assert truth_of(given, self.random_grad(given), eps=eps)[4].abs().max() < 1e-14
            self.compare_gradients(given, eps=eps)

    def test_gradients_that_are_sums_of_equal_terms_cost_no_digits(self, device):
        """Each element: all weights are 0.1 / 2, and each addition to a sum one by one rounds to the same side."""
        x, one = torch.full((1, 1, 4097, 1), 0.1, device=device), torch.ones(1, 1, 4097, 1, device=device)
        i, forever = torch.zeros(1, 1, 4097, device=device), torch.full((1, 1, 4097), torch.inf, device=device)
        h, dq, dk, dv, di, df = gradients(
            self.stage.vlstm, [x, one, x, i, forever], one, input_gate="sigmoid", normalize=False
        )
        n, half = counted(4097), x.double()[0, 0, 0, 0].item() / 2
        of_keys = n.flip(0)  # the rows that see a key
        for name, result, truth in (
            ("h", h, 2 * half * half * n),
            ("q", dq, half * n),
            ("k", dk, 2 * half * half * of_keys),
            ("v", dv, half * of_keys),
            ("i", di, half * half * of_keys),
        ):
            assert error_of_elements(result, truth) <= 1e-5, name
        assert not df.any()

    def test_what_the_gates_get_is_along_q_and_k(self, device):
        """k . dk is what i gets; q . dq is 0 where |sum u| > 1, for then H does not change with the length of q."""
        arguments = self.arguments((1, 2, 150, 5, 6), torch.float64, device)
        grad = self.random_grad(arguments)
        q, k, _, i, f = arguments
        _, dq, dk, _, di, _ = gradients(self.stage.vlstm, arguments, grad)
        torch.testing.assert_close((k * dk).sum(3), di)
        sums = (vlstm.scale(q) * (q @ k.mT) * vlstm.log_weights(i, f).exp()).sum(3).abs()
        along = (q * dq).sum(3).abs()
        assert (sums > 1).any() and along[sums > 1].max() < 1e-11 < 1e-3 < along[sums < 1].max()

    def test_the_normaliser_may_count_as_constant_before_a_norm(self, device):
        """Where the gradient of each row is at a right angle to it; elsewhere it is off by its own size."""
        arguments = self.arguments((1, 2, 150, 5, 6), torch.float64, device)
        grad, h = self.random_grad(arguments), self.stage.vlstm(*arguments)
        upright = grad - (grad * h).sum(3, keepdim=True) / (h * h).sum(3, keepdim=True) * h
        true, constant = (gradients(self.stage.vlstm, arguments, upright, normalizer_gradient=n) for n in (True, False))
        for x, y in zip(true, constant, strict=True):
            torch.testing.assert_close(x, y)
        true, constant = (gradients(self.stage.vlstm, arguments, grad, normalizer_gradient=n) for n in (True, False))
        assert torch.equal(true[0], constant[0]) and torch.equal(true[3], constant[3])
        assert all(relative_error(constant[n], true[n]) > 0.3 for n in (1, 2, 4, 5))

    @pytest.mark.parametrize("options", [{"eps": 0.5}, {"eps": 0.5, "input_gate": "sigmoid"}], ids=str)
    def test_the_maximum_of_a_row_that_stays_far_behind(self, options, device):
        """Its key is some tiles before the rows, and gets what they all send; a few later ones beat it for a while."""
        given = self.arguments((1, 2, 300, 5, 6), device=device)
        given[3][:], given[4][:] = -3, 9
        given[3][:, 0, 5] = given[3][:, 1, 0] = 2
        given[3][:, 0, 130:150:3] = 1.99
        given[3][:, 1, 200], given[4][:, 1, 199:202] = 4, -1
        self.compare_gradients(given, **options)
        self.compare_gradients([x.abs() if n < 2 else x for n, x in enumerate(given)], **options)

    def test_at_a_tie_one_key_gets_the_gradient_of_the_maximum(self, device):
        given = self.arguments((1, 1, 100, 5, 6), torch.float64, device)
        given[3][:], given[4][:] = 1, torch.inf  # nothing is forgotten: all D are 1
        grad = self.random_grad(given)
        results, truths = gradients(self.stage.vlstm, given, grad, eps=0.5), truth_of(given, grad, eps=0.5)
        for result, truth, name in zip(results, truths, ("h", *NAMES), strict=True):
            if name == "i":  # a tie is where torch gives each an equal share
                result, truth = result.sum(), truth.sum()
            torch.testing.assert_close(result, truth)

    @pytest.mark.parametrize("now", [1, 63, 64, 65, 100])
    def test_the_future_changes_nothing(self, now, device):
        """Bit for bit, neither in the output nor in the gradients of what comes before."""
        arguments = self.arguments((1, 2, 150, 20, 9), device=device)
        other = self.arguments((1, 2, 150, 20, 9), device=device, seed=5)
        changed = [torch.cat([x[:, :, :now], y[:, :, now:]], 2) for x, y in zip(arguments, other, strict=True)]
        alone = [x[:, :, :now] for x in arguments]
        grad = self.random_grad(arguments)
        grad[:, :, now:] = 0
        for one, two, three in zip(
            self.all_gradients(arguments, grad),
            self.all_gradients(changed, grad),
            self.all_gradients(alone, grad[:, :, :now]),
            strict=True,
        ):
            assert not any(x[:, :, now:].any() for x in one[1:])  # nothing before it depends on the future
            for x, y, z in zip(one, two, three, strict=True):
                assert torch.equal(x[:, :, :now], y[:, :, :now]) and torch.equal(x[:, :, :now], z)

    @pytest.mark.parametrize("at", [1, 63, 64, 65, 100])
    def test_no_gradient_passes_a_reset(self, at, device):
        """A loss on what comes after a forget gate of -infinity gives nothing to what comes before."""
        given = self.arguments((1, 2, 150, 5, 6), device=device)
        given[4][:, :, at] = -torch.inf
        grad = self.random_grad(given)
        grad[:, :, :at] = 0
        for results in self.all_gradients(given, grad):
            assert not any(x[:, :, :at].any() for x in results[1:])
            assert all(x.isfinite().all() for x in results)

    def test_heads_do_not_share_their_gradients(self, device):
        arguments = self.arguments((2, 3, 66, 5, 7), device=device)
        grad = self.random_grad(arguments)
        one = self.all_gradients([x[1:, 2:] for x in arguments], grad[1:, 2:])
        for whole, part in zip(self.all_gradients(arguments, grad), one, strict=True):
            assert all(torch.equal(x[1:, 2:], y) for x, y in zip(whole, part, strict=True))

    @pytest.mark.parametrize("view", VIEWS)
    def test_gradients_of_views(self, view, device):
        """All inputs and the gradient that comes in; what goes out is contiguous and has the same bits."""
        arguments = list(self.arguments((2, 3, 40, 17, 20), device=device))
        grad = self.random_grad(arguments)
        expected = self.all_gradients(arguments, grad)
        for n in range(6):
            given = [viewed(view, x) if n == m else x for m, x in enumerate((*arguments, grad))]
            for results, others in zip(self.all_gradients(given[:5], given[5]), expected, strict=True):
                assert all(torch.equal(x, y) for x, y in zip(results, others, strict=True))

    def test_heads_of_a_projection_are_not_copied(self, device):
        x = torch.randn(2, 40, 3 * 2 * 16, device=device)
        q, k, v = x.view(2, 40, 3, 2, 16).permute(2, 0, 3, 1, 4)
        i, f = torch.randn(2, 40, 2, 2, device=device).permute(2, 0, 3, 1)
        given, taken = [q, k, v, i, f], []
        grad = torch.randn(2, 40, 2, 16, device=device).transpose(1, 2)
        launch = self.stage.kernels.launch
        try:
            self.stage.kernels.launch = lambda name, device, *a: (taken.append((name, a)), launch(name, device, *a))
            results = gradients(self.stage.vlstm, given, grad)
        finally:
            del self.stage.kernels.launch
        seen = {x.data_ptr() for _, arguments in taken for x in arguments if isinstance(x, Tensor)}
        assert {x.data_ptr() for x in (*given, grad)} <= seen
        expected = gradients(self.stage.vlstm, [x.contiguous() for x in given], grad.contiguous())
        assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))

    def test_expanded_gradient(self, device):
        arguments = self.arguments(self.odd, device=device, requires_grad=True)
        for function in self.functions():
            output = function(*arguments)
            one = torch.autograd.grad(output.sum(), arguments, retain_graph=True)  # stride 0 in all dimensions
            two = torch.autograd.grad(output, arguments, torch.ones_like(output))
            assert all(torch.equal(x, y) for x, y in zip(one, two, strict=True))

    @GPU
    def test_gradients_of_more_batches_and_heads_than_a_grid_has_in_y_or_z(self):
        x = torch.full((1, 1, 1, 1), 0.5, device="cuda").expand(3, 22_000, 1, 1)
        gate = torch.zeros(1, 1, 1, device="cuda").expand(3, 22_000, 1)
        results = gradients(self.stage.vlstm, [x, x, x, gate, gate], x)  # H = q k v
        for result, value in zip(results, (0.125, 0.125, 0.125, 0.125, 0.0625, 0), strict=True):
            assert (result == value).all()

    @GPU
    def test_memory_grows_with_the_sequence_and_not_with_its_square(self):
        """Of forward and backward together, beside the inputs: a few times what results and gradients are."""
        for seq in (1024, 4096):
            arguments = self.arguments((1, 4, seq, 64, 64), torch.float32, "cuda", requires_grad=True)
            grad = self.random_grad(arguments)
            torch.autograd.grad(self.stage.vlstm(*arguments), arguments, grad)  # what is made once is there
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            results = [self.stage.vlstm(*arguments)]
            results += torch.autograd.grad(results[0], arguments, grad)
            taken = torch.cuda.max_memory_allocated() - before
            assert taken <= 3 * sum(x.nbytes for x in results)

    @GPU
    def test_gradients_of_more_rows_than_a_grid_has_in_y_or_z(self):
        x = torch.ones(1, 1, 70_001, 1, device="cuda")
        gate = torch.zeros(1, 1, 70_001, device="cuda")
        forever = gate + torch.inf
        results = gradients(self.stage.vlstm, [x, x, x, gate, forever], x, normalizer_gradient=False)
        shares = 1 / torch.arange(1.0, 70_002, dtype=torch.float64, device="cuda")  # of each key in a row
        assert relative_error(results[1].flatten(), torch.ones(70_001, device="cuda").double()) <= 1e-5
        assert relative_error(results[4].flatten(), shares.flip(0).cumsum(0).flip(0)) <= 1e-5
        assert not results[5].any()

    def test_the_backward_is_an_operator(self, device):
        arguments = self.arguments(self.odd, device=device)
        forward, backward = (getattr(torch.ops.stages, self.stage.operator + end) for end in ("", "_backward"))
        h, rows = forward(*arguments)
        grad = self.random_grad(arguments)
        for gate in (vlstm.EXP, vlstm.SIGMOID, vlstm.BARE):
            torch.library.opcheck(backward.default, (grad, *arguments, h, rows, 0.5, gate, True))
        meta = [x.to("meta").requires_grad_() for x in arguments]
        results = torch.autograd.grad(self.stage.vlstm(*meta).sum(), meta)
        assert [x.shape for x in results] == [x.shape for x in arguments]

    def test_the_rows_have_no_gradient(self, device):
        arguments = self.arguments(self.odd, device=device, requires_grad=True)
        h, rows = getattr(torch.ops.stages, self.stage.operator)(*arguments)
        assert h.requires_grad and not rows.requires_grad
        assert rows.shape == (2, *h.shape[:3]) and rows.dtype is torch.float32

    def test_inputs_are_not_written_by_the_backward(self, device):
        arguments = self.arguments(self.odd, device=device)
        grad = self.random_grad(arguments)
        before = [x.clone() for x in (*arguments, grad)]
        for function in self.functions():
            given = [x.detach().requires_grad_() for x in arguments]
            output = function(*given)
            kept = output.detach().clone()
            output.backward(grad)
            assert torch.equal(output, kept)
        assert all(torch.equal(x, y) for x, y in zip((*arguments, grad), before, strict=True))

    def test_memory_is_linear_in_the_sequence(self, monkeypatch):
        """All that is allocated, outputs and gradients included: T x T is nowhere."""
        taken = []
        empty = operator.empty
        monkeypatch.setattr(operator, "empty", lambda *a, **b: (taken.append(empty(*a, **b)), taken[-1])[1])
        words = []
        for seq in (64, 128, 256):
            taken.clear()
            arguments = self.arguments((1, 1, seq, 4, 3))
            gradients(self.stage.vlstm, arguments, self.random_grad(arguments))
            words.append(sum(x.numel() for x in taken))
        assert words == [words[0], 2 * words[0], 4 * words[0]] and words[0] <= 64 * (4 * 3 + 3 * 2 + 20)

    def test_the_x_ray_finds_no_fault_in_the_backward_of_several_tiles(self):
        for sizes in ((1, 2, 130, 5, 70), (2, 1, 65, 130, 3), (1, 1, 1, 1, 1), (1, 1, 3, 0, 2), (1, 1, 3, 2, 0)):
            arguments = self.arguments(sizes)
            for function in self.functions():
                with xray.recording("random", 4) as report:
                    gradients(function, arguments, self.random_grad(arguments))
                assert [str(fault) for fault in report.faults] == []
