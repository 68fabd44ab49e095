"""What the tests of the vLSTM share: other implementations' values, and the tests of every stage that computes it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from qkv_cases import SIZES, VIEWS
from stage_cases import StageCases
from torch import Tensor

from stages.families import FLOATING, vlstm
from stages.toolkit.report import Report

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

    def test_more_batches_and_heads_than_a_grid_has_in_y_or_z(self, device):
        for batch, heads in ((66_000, 1), (3, 22_000)):
            x = torch.ones(1, 1, 1, 1, device=device).expand(batch, heads, 1, 1)
            gate = torch.zeros(1, 1, 1, device=device).expand(batch, heads, 1)
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
