"""What the tests of the LSTM share: other implementations' values, and the tests of every stage that computes it."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import GPU
from stage_cases import SCHEDULES, StageCases
from torch import Tensor

from stages.families import FLOATING, accumulator, unit_roundoff, widened
from stages.families import lstm as family
from stages.toolkit import xray
from stages.toolkit.verify import outputs, relative_error

FOLDER = Path(__file__).parent / "golden"
TORCH_ORDER = sorted([*FOLDER.glob("lstm_torch_*.npz"), *FOLDER.glob("lstm_caiman_hard*.npz")])
HASTE = sorted(FOLDER.glob("haste_lstm_*.npz"))
HALF = (torch.float16, torch.bfloat16)
SHAPES = [  # every size is at an edge of a tile, in the middle and far out
    *((t, 3, 5, 7) for t in (1, 2, 31, 33)),
    *((3, b, 5, 7) for b in (1, 31, 32, 33)),
    *((3, 2, i, 7) for i in (1, 31, 33)),
    *((3, 6, 5, h) for h in (1, 31, 32, 33)),
]


def load_golden(path: Path, device: str = "cpu", dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """The arrays of a file."""
    with np.load(path) as file:
        return {name: torch.from_numpy(file[name]).to(device, dtype) for name in file}


def in_torch_order(x: Tensor) -> Tensor:
    """Rows of gates i, g, f, o, haste's order, as i, f, g, o."""
    i, g, f, o = x.chunk(4)
    return torch.cat((i, f, g, o))


def layers(golden: dict[str, Tensor], function, activation: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A golden file's layers, one after the other: the results, and the gradients under the names of the file."""
    count = golden["h0"].shape[0]
    given = {name: golden[name].detach().requires_grad_() for name in ("x", "h0", "c0")}
    given |= {name: golden[name].detach().requires_grad_() for name in golden if name.startswith(("weight", "bias"))}
    h, last = given["x"], []
    for n in range(count):
        weights = (given[f"{name}_l{n}"] for name in ("weight_ih", "weight_hh"))
        bias = given[f"bias_ih_l{n}"] + given[f"bias_hh_l{n}"]
        h, states = function(h, *weights, bias, given["h0"][n], given["c0"][n], activation=activation)
        last.append(states)
    hn, cn = (torch.stack(states) for states in zip(*last, strict=True))
    grads = torch.autograd.grad((h, hn, cn), list(given.values()), (golden["gy"], golden["ghn"], golden["gcn"]))
    named = {("d_" if "_l" in name else "d") + name: grad for name, grad in zip(given, grads, strict=True)}
    return {"y": h, "hn": hn, "cn": cn}, named


def gradients(function, arguments: list[Tensor | None], grads: list[Tensor] | None = None, **options) -> list[Tensor]:
    """The three results, and the gradients of the arguments that there are."""
    given = [None if x is None else x.detach().requires_grad_() for x in arguments]
    results = outputs(function(*given, **options))
    if grads is None:
        generator = torch.Generator().manual_seed(1)  # the same numbers on each device
        grads = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in results]
    some = [(x, grad.to(x)) for x, grad in zip(results, grads, strict=True) if x.requires_grad]
    present = [x for x in given if x is not None]
    found = torch.autograd.grad([x for x, _ in some], present, [grad for _, grad in some])
    return [*(x.detach() for x in results), *found]


class LstmCases(StageCases):
    odd = (3, 5, 6, 35)
    small = (3, 2, 3, 2)

    def compare(self, arguments: list[Tensor | None], allowed: float, **options) -> None:
        """Results and gradients against the reference on the same numbers."""
        truths = gradients(family.reference, [None if x is None else widened(x) for x in arguments], **options)
        for n, (x, truth) in enumerate(zip(gradients(self.stage.lstm, arguments, **options), truths, strict=True)):
            error = relative_error(x, truth)
            assert error <= allowed, f"{n}: {error:.1e}"

    def same(self, one: list[Tensor], two: list[Tensor]) -> None:
        assert all(torch.equal(x, y) for x, y in zip(one, two, strict=True))

    # ---- values

    @pytest.mark.parametrize("dtype", FLOATING, ids=str)
    @pytest.mark.parametrize("sizes", [*family.PROBLEMS, *SHAPES], ids=str)
    def test_output_and_gradients(self, sizes, dtype, device):
        self.check(sizes, dtype, device)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
    def test_a_single_number(self, dtype, device):
        """In 16 bits its gradients are what rounding leaves of four products that cancel."""
        self.check((1, 1, 1, 1), dtype, device)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
    @pytest.mark.parametrize("path", TORCH_ORDER, ids=lambda path: path.stem)
    def test_values_of_other_implementations(self, path, dtype, device):
        golden = load_golden(path, device, dtype)
        results, grads = layers(golden, self.stage.lstm, "hard" if "hard" in path.stem else "soft")
        truth = load_golden(path, device)
        assert len(grads) == 3 + 4 * golden["h0"].shape[0]
        for name, x in (results | grads).items():
            assert relative_error(x.detach(), truth[name]) <= (1e-13 if dtype is torch.float64 else 3e-6), name

    @pytest.mark.parametrize("path", HASTE, ids=lambda path: path.stem)
    def test_values_with_zoneout(self, path, device, monkeypatch):
        golden = load_golden(path, device)
        names = ("x", "kernel", "recurrent_kernel", "bias", "h0", "c0")
        given = [golden[name].detach().requires_grad_() for name in names]
        x, kernel, recurrent, bias, h0, c0 = given
        monkeypatch.setattr(family, "drawn", lambda *_: golden["zoneout_mask"])  # theirs, instead of one of our own
        options = {"zoneout": golden["zoneout_prob"].item(), "training": bool(golden["training"])}
        weights = [in_torch_order(w.mT) for w in (kernel, recurrent)]
        h, (_, c) = self.stage.lstm(x, *weights, in_torch_order(bias), h0, c0, **options)
        assert relative_error(h.detach(), golden["h"][1:]) <= 1e-14
        assert relative_error(c.detach(), golden["c"][-1]) <= 1e-14
        state, parts = (h0, c0), [(h0, c0)]  # step by step, for their loss is made of all c, too
        for t in range(x.shape[0]):
            monkeypatch.setattr(family, "drawn", lambda *_, t=t: golden["zoneout_mask"][t : t + 1])
            _, state = self.stage.lstm(x[t : t + 1], *weights, in_torch_order(bias), *state, **options)
            parts.append(state)
        all_h, all_c = (torch.stack(steps) for steps in zip(*parts, strict=True))
        loss = (all_h * golden["gh"]).sum() + (all_c * golden["gc"]).sum()
        for name, grad in zip(names, torch.autograd.grad(loss, given), strict=True):
            assert relative_error(grad, golden[f"d_{name}"]) <= 1e-13, name

    def test_it_is_torch_nn_lstm(self, device):
        arguments = self.arguments((7, 3, 5, 6), torch.float64, device)
        self.same_as(arguments, family.incumbent)
        self.same_as(arguments[:3], family.incumbent)

    def same_as(self, arguments: tuple[Tensor, ...], other) -> None:
        for x, y in zip(gradients(self.stage.lstm, arguments), gradients(other, arguments), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("dtype", HALF, ids=str)
    def test_errors_in_16_bits_are_not_larger_than_torchs(self, dtype, device):
        arguments = self.arguments((64, 4, 32, 48), dtype, device)
        truth = outputs(family.reference(*arguments))
        own, theirs = (outputs(f(*arguments)) for f in (self.stage.lstm, family.incumbent))
        for x, other, true in zip(own, theirs, truth, strict=True):
            assert relative_error(x, true) <= 1.5 * relative_error(other, true)

    def test_a_long_sequence(self, device):
        """c takes in a little at each of 1000 steps and forgets nothing: in 16 bits it would stop at 256 of them."""
        for dtype in FLOATING:
            one = torch.zeros(1000, 1, 1, device=device, dtype=dtype)
            bias = torch.tensor([9.0, 9.0, 0.001, 9.0], device=device).to(dtype)
            weight = torch.zeros(4, 1, device=device, dtype=dtype)
            _, (_, c) = self.stage.lstm(one, weight, weight, bias, activation="hard")
            assert c.dtype is accumulator(dtype)
            torch.testing.assert_close(c.item(), 1000 * bias[2].item(), rtol=1e-5, atol=0)

    @pytest.mark.parametrize("dtype", FLOATING, ids=str)
    def test_past_the_kinks_nothing_moves(self, dtype, device):
        """ "hard": gates at 0 and 1 exactly, and no gradient through any of them."""
        x = torch.zeros(2, 1, 1, dtype=dtype, device=device)
        weight = torch.zeros(4, 1, dtype=dtype, device=device)
        for values, expected in (
            ((5, 5, 2, 5), (1, 1)),
            ((-5, 5, 2, 5), (0, 0)),
            ((5, -5, -2, 5), (-1, -1)),
            ((5, 5, 2, -5), (0, 0)),
        ):
            bias = torch.tensor(values, dtype=dtype, device=device)
            h, _, _, *grads = gradients(self.stage.lstm, [x, weight, weight, bias], activation="hard")
            assert h.flatten().tolist() == list(expected)
            assert not grads[3].any()

    @pytest.mark.parametrize("dtype", FLOATING, ids=str)
    def test_at_the_kinks_the_slope_is_that_of_the_line(self, dtype, device):
        x, weight = (torch.zeros(*size, dtype=dtype, device=device) for size in ((1, 1, 1), (4, 1)))
        for values in ((4, 4, 1, 4), (-4, -4, -1, -4), (4, -4, 0.5, -4)):
            bias = torch.tensor(values, dtype=dtype, device=device)
            c0 = torch.full((1, 1), 0.5, dtype=dtype, device=device)
            self.compare([x, weight, weight, bias, None, c0], 2 * unit_roundoff(x.dtype), activation="hard")

    def test_at_the_kinks_of_c(self, device):
        x, weight = torch.zeros(1, 1, 1, device=device), torch.zeros(4, 1, device=device)
        for value in (1.0, -1.0):
            c0 = torch.full((1, 1), value, device=device)
            bias = torch.tensor([0.0, 9.0, 0.0, 0.0], device=device)
            self.compare([x, weight, weight, bias, None, c0], 2 * unit_roundoff(x.dtype), activation="hard")

    def test_large_inputs_saturate(self, device):
        for dtype, activation in product(FLOATING, family.ACTIVATIONS):
            x, *rest = self.arguments((3, 2, 5, 7), dtype, device)
            results = gradients(self.stage.lstm, [1000 * x, *rest], activation=activation)
            assert all(result.isfinite().all() for result in results)

    @pytest.mark.parametrize("activation", family.ACTIVATIONS)
    @pytest.mark.parametrize("value", [torch.nan, torch.inf])
    def test_nan_shows_from_its_step_on_in_its_batch_alone(self, value, activation, device):
        arguments = list(self.arguments((6, 3, 5, 7), device=device))
        expected, (_, c_expected) = self.stage.lstm(*arguments, activation=activation)
        arguments[0][2, 1] = value
        arguments[1][:] = arguments[1].abs()
        h, (_, c) = self.stage.lstm(*arguments, activation=activation)
        if value != value:
            assert h[2:, 1].isnan().all() and c[1].isnan().all()
            assert h[:2].isfinite().all() and h[:, ::2].isfinite().all()
        else:
            assert h.isfinite().all()  # gates are open
        arguments = list(self.arguments((6, 3, 5, 7), device=device))
        arguments[0][2, 1] = value
        h, (_, c) = self.stage.lstm(*arguments, activation=activation)
        assert torch.equal(h[:2], expected[:2]) and torch.equal(h[:, ::2], expected[:, ::2])
        assert torch.equal(c[::2], c_expected[::2])

    # ---- what the operator is

    def test_a_split_sequence_is_the_whole(self, device):
        """Wherever it is split: the states are handed on, and their gradients come back."""
        for dtype, allowed in ((torch.float64, 1e-13), (torch.bfloat16, 2e-2)):
            arguments = list(self.arguments((9, 3, 4, 6), dtype, device))
            whole = gradients(self.stage.lstm, arguments)
            for at in (0, 1, 4, 8, 9):

                def split(x, w, r, bias, h, c, at=at):
                    pieces = []
                    for part in x.split((at, 9 - at)):
                        piece, (h, c) = self.stage.lstm(part, w, r, bias, h, c)
                        pieces.append(piece)
                    return torch.cat(pieces), (h, c)

                for n, (x, y) in enumerate(zip(gradients(split, arguments), whole, strict=True)):
                    assert relative_error(x, widened(y)) <= allowed, n

    def test_batches_do_not_know_each_other(self, device):
        x, w, r, bias, h0, c0 = self.arguments((4, 35, 5, 7), device=device)
        h, (_, c) = self.stage.lstm(x, w, r, bias, h0, c0)
        part, (_, c_part) = self.stage.lstm(x[:, 33:], w, r, bias, h0[33:], c0[33:])
        torch.testing.assert_close(part, h[:, 33:], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(c_part, c[33:], rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("dtype", FLOATING, ids=str)
    def test_what_is_not_there_is_zeros(self, dtype, device):
        arguments = self.arguments(self.odd, dtype, device)
        for absent in product((False, True), repeat=3):
            with_zeros = [*arguments[:3], *(x * 0 if a else x for x, a in zip(arguments[3:], absent, strict=True))]
            without = [*arguments[:3], *(None if a else x for x, a in zip(arguments[3:], absent, strict=True))]
            one = gradients(self.stage.lstm, without)
            two = gradients(self.stage.lstm, with_zeros)
            kept = [n for n in range(9) if n < 6 or not absent[n - 6]]
            allowed = 4 * unit_roundoff(dtype)
            assert all(relative_error(x, widened(two[n])) <= allowed for x, n in zip(one, kept, strict=True))

    @pytest.mark.parametrize("dtype", HALF, ids=str)
    def test_c0_in_16_bits(self, dtype, device):
        *rest, c0 = self.arguments(self.odd, dtype, device)
        narrow = gradients(self.stage.lstm, [*rest, c0.to(dtype)])
        wide = gradients(self.stage.lstm, [*rest, c0.to(dtype).float()])
        assert (narrow[-1].dtype, wide[-1].dtype) == (dtype, torch.float32)
        self.same(narrow, [*wide[:-1], wide[-1].to(dtype)])

    def test_results_are_the_same_with_and_without_gradients(self, device):
        for options in self.options():
            arguments = self.arguments(self.odd, device=device)
            first = outputs(self.stage.lstm(*arguments, **options))
            second = outputs(self.stage.lstm(*(x.detach().requires_grad_() for x in arguments), **options))
            assert all(torch.equal(a, b) and not a.requires_grad for a, b in zip(first, second, strict=True))

    def test_results_repeat_bit_for_bit(self, device):
        arguments = self.arguments((6, 33, 20, 35), device=device)
        for options in self.options():
            self.same(*(gradients(self.stage.lstm, arguments, **options) for _ in range(2)))

    def test_inputs_are_not_written(self, device):
        arguments = self.arguments(self.odd, device=device)
        before = [x.clone() for x in arguments]
        gradients(self.stage.lstm, arguments)
        self.same(list(arguments), before)

    # ---- what is drawn

    @pytest.mark.parametrize("activation", family.ACTIVATIONS)
    @pytest.mark.parametrize("options", [{"zoneout": 0.3}, {"recurrent_dropout": 0.4}, {"zoneout": 1.0}, {}], ids=str)
    def test_the_reference_draws_the_same(self, options, activation, device):
        both = {"activation": activation, "zoneout": 0.2, "recurrent_dropout": 0.1} | options
        arguments = self.arguments((5, 3, 4, 6), torch.float64, device)
        for chosen in (both, both | {"training": False}):
            one, two = (
                gradients(f, arguments, generator=torch.Generator(device).manual_seed(5), **chosen)
                for f in (self.stage.lstm, family.reference)
            )
            for x, y in zip(one, two, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-7, atol=1e-12)  # a mean's weight is rounded to float32

    def test_zoneout_holds_h_and_not_c(self, device):
        arguments = self.arguments((4, 3, 5, 7), device=device)
        h, (h_last, c) = self.stage.lstm(*arguments, zoneout=1.0)
        assert torch.equal(h, arguments[4].expand_as(h)) and torch.equal(h_last, arguments[4])
        assert not torch.equal(c, arguments[5])
        drawn, _ = self.stage.lstm(*arguments, zoneout=0.5)
        steps = torch.cat((arguments[4][None], drawn))
        held = (steps[1:] == steps[:-1]).float().mean().item()
        assert 0.2 < held < 0.8

    def test_dropped_weights_are_the_same_in_all_steps(self, device):
        x, w, r, bias, h0, c0 = self.arguments((4, 3, 5, 7), torch.float64, device)
        generator = torch.Generator(device)
        options = {"recurrent_dropout": 0.5, "generator": generator.manual_seed(3)}
        whole, _ = self.stage.lstm(x, w, r, bias, h0, c0, **options)
        kept = family.drawn(r.shape, r, 0.5, generator.manual_seed(3))
        assert 0 < kept.sum() < kept.numel()
        by_hand, _ = self.stage.lstm(x, w, r * kept / 0.5, bias, h0, c0)
        torch.testing.assert_close(whole, by_hand)
        in_use, _ = self.stage.lstm(x, w, r, bias, h0, c0, recurrent_dropout=0.5, training=False)
        assert torch.equal(in_use, self.stage.lstm(x, w, r, bias, h0, c0)[0])

    def test_draws_follow_the_generator(self, device):
        arguments = self.arguments((4, 3, 5, 7), device=device)
        for options in ({"zoneout": 0.5}, {"recurrent_dropout": 0.5}):
            torch.manual_seed(0)
            one, _ = self.stage.lstm(*arguments, **options)
            two, _ = self.stage.lstm(*arguments, **options)
            torch.manual_seed(0)
            three, _ = self.stage.lstm(*arguments, **options)
            assert torch.equal(one, three) and not torch.equal(one, two)

    # ---- gradients

    @pytest.mark.parametrize("activation", family.ACTIVATIONS)
    def test_gradients_of_first_and_second_order(self, activation):
        arguments = self.arguments(self.small, torch.float64, requires_grad=True)
        choices = product((0.0, 0.3), (0.0, 0.3), (False, True), (False, True), (False, True))
        for zoneout, dropout, with_bias, with_h0, with_c0 in choices:
            present = (True, True, True, with_bias, with_h0, with_c0)
            given = [x if here else None for x, here in zip(arguments, present, strict=True)]

            def function(*tensors, zoneout=zoneout, dropout=dropout):
                generator = torch.Generator().manual_seed(2)
                options = {"zoneout": zoneout, "recurrent_dropout": dropout, "generator": generator}
                return outputs(self.stage.lstm(*tensors, activation=activation, **options))

            assert torch.autograd.gradcheck(function, given, fast_mode=True)
        assert torch.autograd.gradcheck(lambda *x: outputs(self.stage.lstm(*x, activation=activation)), arguments)
        h, _ = self.stage.lstm(*arguments)
        (grad,) = torch.autograd.grad(h.sum(), arguments[2], create_graph=True)
        with pytest.raises(NotImplementedError, match=f"{self.stage.operator} has no second derivatives"):
            torch.autograd.grad(grad.sum(), arguments[2])

    @pytest.mark.parametrize("seq", [0, 1, 4])
    def test_gradients_through_one_result_alone(self, seq, device):
        arguments = self.arguments((seq, 2, 3, 5), torch.float64, device)
        shapes = [x.shape for x in outputs(self.stage.lstm(*arguments))]
        for which in range(3):
            if seq == 0 and which:
                continue  # the states are what they were, below
            grads = [torch.full(s, float(n == which), dtype=torch.float64, device=device) for n, s in enumerate(shapes)]
            truths = gradients(family.reference, arguments, grads)[3:]
            given = [x.detach().requires_grad_() for x in arguments]
            out = outputs(self.stage.lstm(*given))[which]
            found = torch.autograd.grad(out, given, grads[which], allow_unused=True, materialize_grads=True)
            for x, truth in zip(found, truths, strict=True):
                torch.testing.assert_close(x, truth, rtol=1e-10, atol=1e-12)

    def test_gradients_of_some_arguments_alone(self, device):
        arguments = self.arguments(self.odd, device=device)
        whole = gradients(self.stage.lstm, arguments)
        generator = torch.Generator().manual_seed(1)
        grads = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in whole[:3]]
        for which in range(6):
            given = [x.detach().requires_grad_(n == which) for n, x in enumerate(arguments)]
            results = outputs(self.stage.lstm(*given))
            pairs = [grad.to(x) for x, grad in zip(results, grads, strict=True)]
            assert torch.equal(torch.autograd.grad(results, given[which], pairs)[0], whole[3 + which])

    def test_without_steps_states_stay(self, device):
        for dtype in FLOATING:
            arguments = self.arguments((0, 2, 3, 5), dtype, device)
            h, h_last, c_last, *grads = gradients(self.stage.lstm, arguments)
            assert h.shape == (0, 2, 5) and torch.equal(h_last, arguments[4]) and torch.equal(c_last, arguments[5])
            assert not any(grad.any() for grad in grads[:4]) and all(grad.any() for grad in grads[4:])

    # ---- layouts

    def test_views(self, device):
        """Each argument turned around in memory, or every second element of a wider one, and the gradients, too."""
        arguments = list(self.arguments((4, 3, 6, 34), device=device))
        options = {"zoneout": 0.25, "training": False}
        expected = gradients(self.stage.lstm, arguments, **options)

        def turned(x: Tensor) -> Tensor:
            order = list(reversed(range(x.dim())))
            return x.permute(order).contiguous().permute(order)

        for view in (turned, lambda x: torch.stack([x, x * torch.nan], -1)[..., 0]):
            for n in range(len(arguments)):
                given = [view(x) if n == m else x for m, x in enumerate(arguments)]
                for x, y in zip(gradients(self.stage.lstm, given, **options), expected, strict=True):
                    torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)  # torch's product may sum in another order
        for n in (2, 4, 5):  # those that the kernels read
            given = [turned(x) if n == m else x for m, x in enumerate(arguments)]
            self.same(gradients(self.stage.lstm, given, **options)[:3], expected[:3])

    def test_expanded_arguments_and_gradients(self, device):
        x, w, r, bias, h0, c0 = self.arguments((4, 3, 6, 34), device=device)
        given = [
            x[:, :1].expand(4, 3, 6),
            w,
            r[:, :1].expand(136, 34),
            bias[:1].expand(136),
            h0[:1].expand(3, 34),
            c0[:, :1].expand(3, 34),
        ]
        plain = [t.contiguous() for t in given]
        self.same(gradients(self.stage.lstm, given)[:3], gradients(self.stage.lstm, plain)[:3])
        given = [t.detach().requires_grad_() for t in (x, w, r, bias, h0, c0)]
        results = outputs(self.stage.lstm(*given))
        one = torch.autograd.grad([t.sum() for t in results], given, retain_graph=True)  # stride 0
        self.same(list(one), list(torch.autograd.grad(results, given, [torch.ones_like(t) for t in results])))

    def test_blocks_are_counted_along_x_alone(self):
        with xray.recording() as report:
            gradients(self.stage.lstm, self.arguments(self.odd))
        assert report.launches and {launch.grid[1:] for launch in report.launches} == {(1, 1)}

    @pytest.mark.parametrize("dtype", FLOATING, ids=str)
    def test_no_faults_with_all_that_is_kept(self, dtype):
        """Forward and backward of each dtype, in schedules of its own, with a mask that is drawn."""
        seen = []
        for schedule, seed in SCHEDULES[:3]:
            with xray.recording(schedule, seed) as report:
                generator = torch.Generator().manual_seed(0)
                options = {"zoneout": 0.5, "recurrent_dropout": 0.5, "generator": generator}
                seen.append(gradients(self.stage.lstm, self.arguments((3, 33, 4, 9), dtype), **options))
            assert [str(fault) for fault in report.faults] == []
        for results in seen[1:]:
            self.same(results, seen[0])

    # ---- as an operator

    def test_opcheck(self, device):
        operator = getattr(torch.ops.stages, self.stage.operator).default
        for dtype, activation in ((torch.float32, 0), (torch.bfloat16, 1)):
            x, w, r, bias, h0, c0 = self.arguments(self.odd, dtype, device)
            products = torch.nn.functional.linear(x, w, bias)
            mask = torch.full((*x.shape[:2], r.shape[1]), 0.5, device=device)
            for requires_grad in (False, True):
                given = [t.detach().requires_grad_(requires_grad) for t in (products, r, h0, c0)]
                for m in (mask, mask.new_empty(0, 0, 0)):
                    torch.library.opcheck(operator, (*given, m, activation, requires_grad))

    def test_wrong_arguments(self):
        sizes = dict(T=5, B=2, I=3, H=4)
        good = dict(zip(family.ARGUMENTS, family.make(sizes, torch.float32), strict=True))
        for name, value, error, words in (
            ("x", [1.0], TypeError, "x must be a torch.Tensor, got list"),
            ("x", good["x"].int(), TypeError, "x has dtype torch.int32; allowed: torch.float64"),
            ("x", good["x"][0], ValueError, r"x has 2 dimensions \(2, 3\); allowed: 3"),
            ("weight_ih", good["weight_ih"].double(), TypeError, "weight_ih has dtype torch.float64, but x has"),
            (
                "weight_ih",
                good["weight_ih"].T,
                ValueError,
                r"weight_ih is \(3, 16\), x .*\(4 H, I\), here \(16, 3\)",
            ),
            ("weight_hh", good["weight_hh"].to_sparse(), TypeError, "weight_hh has layout torch.sparse_coo"),
            (
                "weight_hh",
                good["weight_hh"][:12],
                ValueError,
                r"weight_hh is \(12, 4\); allowed: \(4 H, H\), here",
            ),
            ("bias", good["bias"][:4], ValueError, r"bias is \(4,\) and .*allowed: \(4 H,\), here \(16,\)"),
            ("bias", 1.0, TypeError, "bias must be a torch.Tensor, got float"),
            ("h0", good["h0"].to("meta"), ValueError, "h0 is on meta, but x is on cpu"),
            ("h0", good["h0"][None], ValueError, r"h0 has 3 dimensions \(1, 2, 4\); allowed: 2"),
            ("h0", good["h0"][:1], ValueError, r"h0 is \(1, 4\), .*allowed: \(B, H\), here \(2, 4\)"),
            ("c0", good["c0"].T, ValueError, r"c0 is \(4, 2\), .*allowed: \(B, H\), here \(2, 4\)"),
            ("c0", good["c0"].half(), TypeError, "c0 has dtype torch.float16; allowed: torch.float32"),
            ("c0", good["c0"].to("meta"), ValueError, "c0 is on meta, but x is on cpu"),
            ("activation", 1, TypeError, "activation must be a str, got int"),
            ("activation", "relu", ValueError, "activation is 'relu'; allowed: 'soft' or 'hard'"),
            ("recurrent_dropout", 1.0, ValueError, r"recurrent_dropout is 1.0; allowed: from 0 to below 1"),
            ("recurrent_dropout", "0", TypeError, "recurrent_dropout must be a real number .* got str"),
            ("zoneout", -0.1, ValueError, "zoneout is -0.1; allowed: from 0 to 1"),
            ("zoneout", torch.nan, ValueError, "zoneout is nan; allowed: from 0 to 1"),
            ("zoneout", True, TypeError, "zoneout must be a real number .* got bool"),
            ("training", 1, TypeError, "training must be True or False, got int"),
            ("generator", 1, TypeError, "generator must be a torch.Generator or None, got int"),
        ):
            with pytest.raises(error, match=words):
                self.stage.lstm(**(good | {name: value}))
        with pytest.raises(TypeError, match=r"c0 has dtype torch.float64; allowed: torch.float32 or torch.float16"):
            self.stage.lstm(**{name: x.half() for name, x in good.items() if name != "c0"}, c0=good["c0"].double())

    # ---- on a GPU

    @GPU
    @pytest.mark.parametrize("dtype", FLOATING, ids=str)
    def test_a_gpu_gives_what_the_cpu_device_gives(self, dtype):
        arguments = self.arguments((20, 33, 35, 70), dtype)
        here, there = (gradients(self.stage.lstm, a) for a in (arguments, [x.cuda() for x in arguments]))
        allowed = 2 * family.tolerance({}, dtype)["h"]
        assert all(relative_error(y.cpu(), widened(x)) <= allowed for x, y in zip(here, there, strict=True))

    @GPU
    def test_backward_in_a_cuda_graph(self):
        arguments = [x.requires_grad_() for x in self.arguments(self.odd, device="cuda")]
        grads = [torch.ones_like(x) for x in outputs(self.stage.lstm(*arguments))]

        def both():
            return torch.autograd.grad(outputs(self.stage.lstm(*arguments)), arguments, grads)

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            expected = both()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = both()
        graph.replay()
        torch.cuda.synchronize()
        self.same(list(found), list(expected))
