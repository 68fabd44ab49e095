"""Stage 48, adaptive_unitary."""

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import GPU
from stage_cases import StageCases
from torch import Tensor

import stages
from stages.families import adaptive_unitary as family
from stages.families import widened
from stages.toolkit import xray
from stages.toolkit.report import Counts
from stages.toolkit.verify import relative_error

GOLDEN = sorted((Path(__file__).parent / "golden").glob("aussm_unitary_b*.npz"))
STATE = family.ARGUMENTS.index("state")


class TestAdaptiveUnitary(StageCases):
    stage = stages.load("48")
    odd = (2, 5, 7, 37)
    small = (2, 3, 2, 5)

    def results(self, arguments: list[Tensor | None], grads: list[Tensor] | None = None, function=None) -> list[Tensor]:
        """Both outputs, and the gradients of the arguments that there are."""
        given = [None if x is None else x.detach().requires_grad_() for x in arguments]
        outputs = (function or self.stage.function)(*given)
        if grads is None:
            generator = torch.Generator().manual_seed(1)  # the same numbers on each device
            grads = [torch.randn(x.shape, generator=generator, dtype=widened(x).dtype) for x in outputs]
        grads = [grad.to(x) for grad, x in zip(grads, outputs, strict=True)]
        present = [x for x in given if x is not None]
        found = torch.autograd.grad(outputs, present, grads, allow_unused=function is not None)
        found = [torch.zeros_like(x) if grad is None else grad for grad, x in zip(found, present, strict=True)]
        return [*(x.detach() for x in outputs), *found]

    def compare(self, arguments: list[Tensor | None], allowed: float) -> None:
        wide = [None if x is None else widened(x) for x in arguments]
        names = [*family.OUTPUTS, *(n for n, x in zip(family.ARGUMENTS, arguments, strict=True) if x is not None)]
        truths = self.results(wide, function=family.reference)
        for name, x, truth in zip(names, self.results(arguments), truths, strict=True):
            error = relative_error(x, truth)
            assert error <= allowed, f"{name}: {error:.1e}"

    # ---- values

    @pytest.mark.parametrize("dtype", family.DTYPES, ids=str)
    @pytest.mark.parametrize("sizes", family.PROBLEMS, ids=str)
    def test_outputs_and_gradients(self, sizes, dtype, device):
        self.check(sizes, dtype, device)
        *arguments, _ = self.arguments(sizes, dtype, device)
        self.compare([*arguments, None], family.tolerance(self.stage.sizes(sizes), dtype)["y"])

    @pytest.mark.parametrize("seq", [1, 2, 15, 16, 17, 31, 32, 33, 127, 128, 129, 255, 256, 257, 1000])
    def test_every_length(self, seq, device):
        self.check((1, 2, 3, seq), torch.float32, device)

    @pytest.mark.parametrize("dtype", family.DTYPES, ids=str)
    @pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
    def test_values_of_another_implementation(self, path, dtype, device):
        with np.load(path) as file:
            golden = {name: torch.from_numpy(file[name]).to(device) for name in file}

        def rounded(x: Tensor) -> Tensor:
            return x.to(family.COMPLEX_OF[dtype] if x.is_complex() else dtype)

        arguments = [rounded(golden[name]).requires_grad_() for name in family.ARGUMENTS[:-1]]
        y, last = self.stage.function(*arguments)
        grads = torch.autograd.grad(y, arguments, rounded(golden["g"]))
        allowed = 1e-14 if dtype is torch.float64 else 3e-6
        found = {"y": y, "h_last": last} | {
            f"d{name}": grad for name, grad in zip(family.ARGUMENTS, grads, strict=False)
        }
        assert found.keys() == golden.keys() - {*family.ARGUMENTS, "g"}
        for name, x in found.items():
            assert relative_error(x.detach(), golden[name]) <= allowed, name

    def test_phases_do_not_drift(self, device):
        """The same angle 8192 times: a phase is off by what that angle is off, and not by what a long sum loses."""
        seq = 8192
        arguments = (t.to(device) for t in self.arguments((1, 1, 5, seq)))  # the same numbers on each device
        u, dt, _, x_bias, B, C, D, z, state = arguments
        x = torch.zeros(1, 5, 1, device=device)
        self.compare([u, dt, x, x_bias, B, C, D, z, state], 5e-6)
        incumbent = family.incumbent(u, dt, x, x_bias, B, C, D, z, state)[1]
        truth = family.reference(u, dt, x, x_bias, B, C, D, z, state)[1]
        assert relative_error(incumbent, truth) > 1e-4

    @pytest.mark.parametrize("seq", [2048, 4096])
    def test_long_sequences(self, seq, device):
        """Angles are rounded to float32 at each step, and the gradient of u feels that; sums of them feel it more."""
        arguments = list(self.arguments((1, 2, 8, seq), device=device))
        truths = self.results([widened(x) for x in arguments], function=family.reference)
        theirs = self.results(arguments, function=family.incumbent)
        for x, other, truth in zip(self.results(arguments), theirs, truths, strict=True):
            assert relative_error(x, truth) <= max(0.5 * relative_error(other, truth), 1e-6)

    def test_states_that_are_kept_keep_early_gradients_right(self, device):
        """All the way back from the last state, early ones would be differences of large ones, and lose digits."""
        *arguments, _ = self.arguments((1, 2, 4, 16384), device=device)
        arguments.append(None)
        grads = [torch.zeros(1, 2, 16384, device=device), torch.zeros(1, 2, 4, device=device)]
        grads[0][..., :64] = 1  # a loss of the first steps alone
        wide = [None if x is None else widened(x) for x in arguments]
        truths = self.results(wide, [widened(x) for x in grads], function=family.reference)
        found = self.results(arguments, grads)
        assert max(relative_error(x, truth) for x, truth in zip(found[2:], truths[2:], strict=True)) <= 1e-6

    def test_a_state_far_away_comes_back(self, device):
        """Without an input the states only turn, and are as long as before; y sees them turn."""
        b, d, n, seq = 1, 2, 3, 300
        u, dt, x, x_bias, B, C, D, z, state = self.arguments((b, d, n, seq), torch.float64, device)
        _, last = self.stage.function(0 * u, dt, x, x_bias, B, C, D, z, state)
        torch.testing.assert_close(last, state * torch.polar(torch.ones_like(x_bias), seq * x_bias))

    @pytest.mark.parametrize("value", [torch.nan, torch.inf])
    def test_what_is_not_finite_shows(self, value, device):
        """In u it is in all angles: all states are NaN from there on, and none before."""
        arguments = list(self.arguments((2, 3, 4, 40), device=device))
        expected, _ = self.stage.function(*arguments)
        arguments[0][1, 2, 20] = value
        y, last = self.stage.function(*arguments)
        assert torch.equal(y[0], expected[0]) and torch.equal(y[1, :, :20], expected[1, :, :20])
        assert y[1, :, 20:].isnan().all() and last[1].isnan().all() and last[0].isfinite().all()

    def test_large_and_small_inputs(self, device):
        for scale in (1e-6, 30.0):
            u, *rest = self.arguments((1, 3, 4, 40), torch.float64, device)
            self.compare([u * scale, *rest], 1e-12)

    # ---- what the operator is

    def test_a_split_sequence_is_the_whole(self, device):
        """Wherever it is split: the state is handed on, and its gradient comes back."""
        arguments = self.arguments((2, 3, 4, 150), torch.float64, device)
        whole = self.results(list(arguments))
        for at in (0, 1, 16, 100, 128, 149, 150):

            def split(u, dt, x, x_bias, B, C, D, z, state, at=at):
                pieces = [v.split((at, 150 - at), 2) for v in (u, dt, z)]
                ys = []
                for u, dt, z in zip(*pieces, strict=True):
                    y, state = self.stage.function(u, dt, x, x_bias, B, C, D, z, state)
                    ys.append(y)
                return torch.cat(ys, 2), state

            for x, y in zip(self.results(list(arguments), function=split), whole, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)

    def test_no_state_is_a_state_of_zeros(self, device):
        *arguments, state = self.arguments(self.odd, device=device)
        one, two = (self.results([*arguments, s]) for s in (None, torch.zeros_like(state)))
        assert all(torch.equal(x, y) for x, y in zip(one, two, strict=False))

    def test_results_are_the_same_with_and_without_gradients(self, device):
        arguments = self.arguments(self.odd, device=device)
        first = self.stage.function(*arguments)
        second = self.stage.function(*(x.requires_grad_() for x in arguments))
        with torch.no_grad():
            third = self.stage.function(*arguments)
        for a, b, c in zip(first, second, third, strict=True):
            assert torch.equal(a, b) and torch.equal(a, c) and not a.requires_grad

    def test_sums_in_other_groups_give_the_same(self, device, monkeypatch):
        """Over batches in fewer places than there are batches, over channels in parts of all kinds."""
        arguments = list(self.arguments((5, 3, 4, 150), torch.float64, device))
        whole = self.results(arguments)
        for places, parts in ((1, 1), (2, 2), (5, 3)):
            monkeypatch.setattr(family, "PLACES", dict.fromkeys(family.PLACES, places * 3))
            monkeypatch.setattr(family, "WALKS", dict.fromkeys(family.WALKS, parts * 5 * 5))
            for x, y in zip(self.results(arguments), whole, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)

    def test_more_channels_than_a_tile_has(self, device, monkeypatch):
        """Then the sums go by memory, from where another batch, channel or tile takes them up."""
        monkeypatch.setattr(family, "PLACES", dict.fromkeys(family.PLACES, 1))
        monkeypatch.setattr(family, "WALKS", dict.fromkeys(family.WALKS, 1))
        for states in (18, 0):
            self.check((2, 37, states, 70), torch.float32, device)

    def test_results_repeat_bit_for_bit(self, device):
        arguments = list(self.arguments((3, 5, 70, 150), device=device))
        one, two = self.results(arguments), self.results(arguments)
        assert all(torch.equal(x, y) for x, y in zip(one, two, strict=True))

    # ---- gradients

    def test_gradients_of_first_and_second_order(self):
        for with_state in (True, False):
            arguments = self.arguments(self.small, torch.float64, requires_grad=True)
            given = arguments if with_state else arguments[:-1]
            assert torch.autograd.gradcheck(self.stage.function, given)
        y, _ = self.stage.function(*arguments)
        (grad,) = torch.autograd.grad(y.sum(), arguments[0], create_graph=True)
        with pytest.raises(NotImplementedError, match="adaptive_unitary has no second derivatives"):
            torch.autograd.grad(grad.sum(), arguments[0])

    def test_gradients_through_one_result_alone(self, device):
        for seq in (0, 1, 40):
            arguments = list(self.arguments((2, 3, 4, seq), torch.float64, device))
            shapes = [x.shape for x in self.stage.function(*arguments)]
            for which in range(2):
                grads = [
                    torch.full(s, float(n == which), dtype=torch.float64, device=device) for n, s in enumerate(shapes)
                ]
                truths = self.results(arguments, grads, function=family.reference)[2:]
                given = [x.detach().requires_grad_() for x in arguments]
                out = self.stage.function(*given)[which]
                found = torch.autograd.grad(out, given, grads[which].to(out.dtype))  # the other one has none at all
                for x, truth in zip(found, truths, strict=True):
                    torch.testing.assert_close(x, truth, rtol=1e-10, atol=1e-10)

    def test_gradients_of_some_arguments_alone(self, device):
        arguments = self.arguments(self.odd, device=device)
        whole = self.results(list(arguments))
        generator = torch.Generator().manual_seed(1)
        grads = [torch.randn(x.shape, generator=generator, dtype=widened(x).dtype).to(device) for x in whole[:2]]
        for which in range(len(arguments)):
            given = [x.detach().requires_grad_(n == which) for n, x in enumerate(arguments)]
            outputs = self.stage.function(*given)
            pairs = [(x, g.to(x.dtype)) for x, g in zip(outputs, grads, strict=True)]
            (grad,) = torch.autograd.grad([x for x, _ in pairs], given[which], [g for _, g in pairs])
            assert torch.equal(grad, whole[2 + which])

    # ---- layouts

    def test_views(self, device):
        """Each argument turned around in memory, every second element of a wider one, and the gradient, too."""
        arguments = list(self.arguments((3, 4, 6, 40), device=device))
        expected = self.results(arguments)

        def turned(x: Tensor) -> Tensor:
            order = list(reversed(range(x.dim())))
            return x.permute(order).contiguous().permute(order)

        for view in (turned, lambda x: torch.stack([x, x * torch.nan], -1)[..., 0]):
            for n in range(len(arguments)):
                given = [view(x) if n == m else x for m, x in enumerate(arguments)]
                assert all(torch.equal(x, y) for x, y in zip(self.results(given), expected, strict=True))
        given = [x.detach().requires_grad_() for x in arguments]
        y, last = self.stage.function(*given)
        one = torch.autograd.grad((y.sum(), last.real.sum()), given, retain_graph=True)  # stride 0
        two = torch.autograd.grad((y, last), given, (torch.ones_like(y), torch.ones_like(last)))
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))

    def test_expanded_and_conjugated_inputs(self, device):
        u, dt, x, x_bias, B, C, D, z, state = self.arguments((3, 4, 6, 40), device=device)
        given = [
            u,
            dt[:1, :1, :1].expand(3, 4, 40),
            x,
            x_bias[:, :1].expand(4, 6),
            B.conj(),
            C.conj(),
            D,
            z,
            state.conj(),
        ]
        plain = [v.contiguous().resolve_conj() for v in given]
        assert all(torch.equal(a, b) for a, b in zip(self.results(given), self.results(plain), strict=True))

    def test_blocks_are_counted_along_x_alone(self):
        with xray.recording() as report:
            self.results(list(self.arguments(self.odd)))
        assert report.launches and {launch.grid[1:] for launch in report.launches} == {(1, 1)}

    # ---- the x-ray

    @pytest.mark.parametrize("dtype", family.DTYPES, ids=str)
    def test_a_backward_stores_no_angles(self, dtype, monkeypatch):
        """dtheta is as large as all states of all steps; what is stored is none of it, and together much less."""
        monkeypatch.setattr(family, "WALKS", dict.fromkeys(family.WALKS, 1))
        arguments = self.arguments((1, 32, 64, 256), dtype, requires_grad=True)
        y, _ = self.stage.function(*arguments)
        with xray.recording() as report:
            y.sum().backward()
        assert isinstance(report.counts(), Counts) and [str(fault) for fault in report.faults] == []
        stored = {t.name: t.bytes_asked for t in report.traffic("global") if t.op == "store"}
        assert stored["pulls"] == 2 * stored["leans"] == 2 * 32 * 64 * 256 // family.TILE * dtype.itemsize
        assert sum(stored.values()) < 32 * 64 * 256 * dtype.itemsize / 3

    def test_scratch_memory_does_not_grow_with_the_sequence(self, monkeypatch):
        """But for what is kept of each state for each tile: two complex numbers, a phase and another number."""
        sizes = {}
        for seq in (512, 1024):
            seen, empty = [], family.operator.empty

            def counting(shape, like, dtype=None, seen=seen, empty=empty):
                result = empty(shape, like, dtype)
                seen.append((tuple(shape), result.numel() * result.element_size()))
                return result

            with monkeypatch.context() as patch:
                patch.setattr(family.operator, "empty", counting)
                arguments = self.arguments((1, 2, 64, seq), requires_grad=True)
                self.stage.function(*arguments)[0].sum().backward()
            sizes[seq] = sum(size for shape, size in seen if shape[-3:] != (1, 2, seq))
        assert sizes[1024] - sizes[512] == 512 // family.TILE * 2 * 64 * 24

    # ---- as an operator

    def test_opcheck(self, device):
        operator = torch.ops.stages.adaptive_unitary.default
        for requires_grad in (False, True):
            arguments = self.arguments(self.odd, device=device, requires_grad=requires_grad)
            torch.library.opcheck(operator, arguments)
            torch.library.opcheck(operator, arguments[:-1], {"save": requires_grad})

    def test_wrong_arguments(self):
        good = dict(zip(family.ARGUMENTS, family.make(dict(b=2, d=3, n=4, T=5), torch.float32), strict=True))
        for name, value, error, words in (
            ("u", [1.0], TypeError, "u must be a torch.Tensor, got list"),
            ("u", good["u"].half(), TypeError, "u has dtype torch.float16; allowed: torch.float64 or torch.float32"),
            ("dt", good["dt"].double(), TypeError, "dt has dtype torch.float64, but u has torch.float32"),
            ("x", good["x"][0], ValueError, r"x has 2 dimensions \(4, 3\); allowed: 3"),
            ("B", good["B"].real, TypeError, "B has dtype torch.float32; allowed: torch.complex64"),
            ("C", good["C"].to(torch.complex128), TypeError, "C has dtype torch.complex128; allowed: torch.complex64"),
            ("C", good["C"].to("meta"), ValueError, "C is on meta, but u is on cpu"),
            ("D", good["D"].to_sparse(), TypeError, "D has layout torch.sparse_coo"),
            ("dt", good["dt"][:1], ValueError, r"dt is \(1, 3, 5\) and u is \(2, 3, 5\); allowed: the same shape"),
            ("z", good["z"][..., :2], ValueError, r"z is \(2, 3, 2\) and u is \(2, 3, 5\); allowed: the same shape"),
            ("x", good["x"][..., :2], ValueError, r"x is \(3, 4, 2\) .*allowed: \(d, n, d\), here \(3, n, 3\)"),
            ("x_bias", good["x_bias"].T, ValueError, r"x_bias is \(4, 3\), .*allowed: \(d, n\), here \(3, 4\)"),
            ("B", good["B"][:2], ValueError, r"B is \(2,\), .*allowed: \(n,\), here \(4,\)"),
            ("D", good["D"][:2], ValueError, r"D is \(2,\), .*allowed: \(d,\), here \(3,\)"),
            ("state", good["state"][:1], ValueError, r"state is \(1, 3, 4\), .*\(b, d, n\), here \(2, 3, 4\)"),
            ("state", good["state"].real, TypeError, "state has dtype torch.float32; allowed: torch.complex64"),
        ):
            with pytest.raises(error, match=words):
                self.stage.function(**(good | {name: value}))

    @GPU
    def test_a_gpu_gives_what_the_cpu_device_gives(self):
        arguments = list(self.arguments((2, 5, 70, 300)))
        there = self.results([x.cuda() for x in arguments])
        for x, y in zip(self.results(arguments), there, strict=True):
            assert relative_error(y.cpu(), widened(x)) <= 2e-5
