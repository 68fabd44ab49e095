"""What the tests of the LSTM share: other implementations' values, and the tests of every stage that computes it."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import GPU
from stage_cases import StageCases
from torch import Tensor
from torch.autograd import forward_ad

from stages.families import FLOATING, accumulator, lstm
from stages.toolkit.verify import outputs, relative_error, verify

NAMES = lstm.ARGUMENTS
GOLDEN = Path(__file__).parent / "golden"
LAYERS = sorted(GOLDEN.glob("lstm_*.npz"))
HASTE = sorted(GOLDEN.glob("haste_lstm_*.npz"))


def load_golden(path: Path, device: str = "cpu") -> dict[str, Tensor]:
    """The arrays of a file, in float64."""
    with np.load(path) as file:
        return {name: torch.from_numpy(np.asarray(file[name])).to(device) for name in file}


def layers_of(function, golden: dict[str, Tensor], **options) -> dict[str, Tensor]:
    """y, hn, cn and all gradients of a file's layers, under the names that the file has for them."""
    weights = [name for name in golden if name.startswith(("weight_", "bias_"))]
    given = {name: golden[name].clone().requires_grad_() for name in ("x", "h0", "c0", *weights)}
    y, last = given["x"], []
    for layer in range(len(given["h0"])):
        of = {name: given[f"{name}_l{layer}"] for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}
        bias = of["bias_ih"] + of["bias_hh"]
        y, states = function(
            y, of["weight_ih"], of["weight_hh"], bias, given["h0"][layer], given["c0"][layer], **options
        )
        last.append(states)
    hn, cn = (torch.stack(states) for states in zip(*last, strict=True))
    grads = torch.autograd.grad([y, hn, cn], list(given.values()), [golden[key] for key in ("gy", "ghn", "gcn")])
    named = {f"d{'' if len(name) < 3 else '_'}{name}": grad for name, grad in zip(given, grads, strict=True)}
    return {"y": y.detach(), "hn": hn.detach(), "cn": cn.detach(), **named}


def check_layers(function, path: Path, allowed: float, device: str = "cpu") -> None:
    """All that is in a file; where an activation is at its end the gradients are those of a slope of 0 there."""
    golden = load_golden(path, device)
    found = layers_of(function, golden, activation="hard" if "hard" in path.stem else "soft")
    seen = set()
    for name, result in found.items():
        assert relative_error(result, golden[name]) <= allowed, name
        seen.add(name)
    assert {"y", "hn", "cn", "dx", "dh0", "dc0"} < seen


def in_torch_order(x: Tensor) -> Tensor:
    """[.., 4 H] in the order i, g, f, o as [4 H, ..] in the order i, f, g, o."""
    return x.movedim(-1, 0).unflatten(0, (4, -1))[[0, 2, 1, 3]].flatten(0, 1)


def check_haste(step, path: Path, allowed: float, device: str = "cpu") -> None:
    """All that is in a file: h and c of every step, and what a loss of all of them gives back.

    Args:
        step: `step(x, weight_ih, weight_hh, bias, h, c, mask)` for one step, mask [1, B, H]: gives h and c.
    """
    golden = load_golden(path, device)
    names = ("x", "kernel", "recurrent_kernel", "bias", "h0", "c0")
    given = [golden[name].clone().requires_grad_() for name in names]
    x, kernel, recurrent, bias, h, c = given
    weights = (in_torch_order(kernel), in_torch_order(recurrent), in_torch_order(bias))
    mask, probability = golden["zoneout_mask"], golden["zoneout_prob"].item()
    if not probability:
        mask = torch.ones_like(mask)
    elif not golden["training"].item():
        mask = torch.full_like(mask, 1 - probability)
    states = [(h, c)]
    for t in range(len(x)):
        states.append(step(x[t : t + 1], *weights, *states[-1], mask[t : t + 1]))
    hs, cs = (torch.stack(all_of) for all_of in zip(*states, strict=True))
    assert relative_error(hs.detach(), golden["h"]) <= allowed
    assert relative_error(cs.detach(), golden["c"]) <= allowed
    grads = torch.autograd.grad([hs, cs], given, [golden["gh"], golden["gc"]])
    for name, grad in zip(names, grads, strict=True):
        assert relative_error(grad, golden[f"d_{name}"]) <= allowed, name


class LstmCases(StageCases):
    odd = (3, 5, 7, 9)
    small = (3, 2, 2, 3)

    def compare(self, arguments: list[Tensor | None], allowed: dict[str, float], **options) -> None:
        """Results and gradients of what is given with float64; `generator` is seeded anew for both."""
        seed = options.pop("seed", None)
        found = []
        for function, wide in ((self.stage.lstm, False), (lstm.reference, True)):
            given = [x if x is None else (x.double() if wide else x).detach().requires_grad_() for x in arguments]
            if seed is not None:
                options["generator"] = torch.Generator(arguments[0].device).manual_seed(seed)
            results = outputs(function(*given, **options))
            generator = torch.Generator().manual_seed(1)
            shapes = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in results]
            grads = [g.to(arguments[0].dtype).to(x) for g, x in zip(shapes, results, strict=True)]
            tensors = [x for x in given if x is not None]
            found.append([*results, *torch.autograd.grad(results, tensors, grads)])
        names = [*lstm.OUTPUTS, *(name for name, x in zip(NAMES, arguments, strict=False) if x is not None)]
        for name, result, truth in zip(names, *found, strict=True):
            assert relative_error(result.detach(), truth.detach()) <= allowed[name], name

    # ---- values

    @pytest.mark.parametrize("dtype", FLOATING, ids=str)
    @pytest.mark.parametrize("sizes", lstm.PROBLEMS, ids=str)
    def test_output_and_gradients(self, sizes, dtype, device):
        self.check(sizes, dtype, device)

    def test_a_little_more_than_two_tiles(self, device):
        for dtype in FLOATING:
            self.check((2, 33, 3, 65), dtype, device)

    @pytest.mark.parametrize("path", LAYERS, ids=lambda path: path.stem)
    def test_values_and_gradients_of_other_implementations(self, path, device):
        check_layers(self.stage.lstm, path, 1e-13, device)

    @pytest.mark.parametrize("path", HASTE, ids=lambda path: path.stem)
    def test_zoneout_of_another_implementation(self, path, device, monkeypatch):
        def step(x, weight_ih, weight_hh, bias, h, c, mask):
            monkeypatch.setattr(lstm, "zoneout_mask", lambda *_: mask)
            return self.stage.lstm(x, weight_ih, weight_hh, bias, h, c, zoneout=0.5)[1]

        check_haste(step, path, 1e-13, device)

    @pytest.mark.parametrize("dtype", FLOATING, ids=str)
    def test_what_is_drawn_can_be_drawn_again(self, dtype, device):
        arguments = self.arguments((4, 3, 5, 20), dtype, device)
        allowed = lstm.tolerance({}, dtype)
        for options in ({"zoneout": 0.3}, {"recurrent_dropout": 0.3}, {"zoneout": 0.5, "recurrent_dropout": 0.2}):
            self.compare(list(arguments), allowed, seed=3, **options)
            first, again, other = (
                self.stage.lstm(*arguments, **options, generator=torch.Generator(device).manual_seed(seed))[0]
                for seed in (3, 3, 4)
            )
            assert torch.equal(first, again) and not torch.equal(first, other)
            means = self.stage.lstm(*arguments, **options, training=False)[0]
            assert torch.equal(means, self.stage.lstm(*arguments, **options, training=False)[0])

    def test_a_unit_may_always_keep_what_it_has(self, device):
        arguments = self.arguments((4, 3, 5, 20), device=device)
        h, (last, _) = self.stage.lstm(*arguments, zoneout=1.0)
        assert torch.equal(h, arguments[4].expand(4, -1, -1)) and torch.equal(last, arguments[4])

    @pytest.mark.parametrize("absent", [("bias",), ("h0",), ("c0",), ("bias", "h0", "c0")], ids=str)
    def test_what_is_absent_is_zero(self, absent, device):
        arguments = self.arguments((3, 2, 4, 6), torch.float64, device)
        given = [None if name in absent else x for name, x in zip(NAMES, arguments, strict=True)]
        zeros = [torch.zeros_like(x) if name in absent else x for name, x in zip(NAMES, arguments, strict=True)]
        for options in self.options():
            for x, y in zip(*(outputs(self.stage.lstm(*a, **options)) for a in (given, zeros)), strict=True):
                assert torch.equal(x, y)
            self.compare(given, lstm.tolerance({}, torch.float64), **options)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    def test_cells_have_32_bits(self, dtype, device):
        """Also between calls: what a long sequence gives, two halves of it give, bit for bit."""
        arguments = self.arguments((6, 2, 4, 20), dtype, device)
        whole, (_, c_T) = self.stage.lstm(*arguments)
        half, states = self.stage.lstm(arguments[0][:3], *arguments[1:])
        rest, (_, c_again) = self.stage.lstm(arguments[0][3:], *arguments[1:4], *states)
        assert c_T.dtype is torch.float32 and states[0].dtype is dtype
        assert torch.equal(torch.cat((half, rest)), whole) and torch.equal(c_again, c_T)
        assert not torch.equal(c_T.to(dtype).float(), c_T)

    def test_without_a_step_the_states_are_those_before(self, device):
        for dtype in FLOATING:
            arguments = self.arguments((0, 2, 3, 4), dtype, device, requires_grad=True)
            h, (h_T, c_T) = self.stage.lstm(*arguments)
            assert h.shape == (0, 2, 4) and torch.equal(h_T, arguments[4])
            assert torch.equal(c_T, arguments[5].to(accumulator(dtype)))
            grads = torch.autograd.grad([h_T, c_T], arguments[4:], [torch.full_like(x, 2) for x in (h_T, c_T)])
            assert all((grad == 2).all() for grad in grads)

    def test_large_gates_saturate(self, device):
        """Forget gates that are open: a cell stays for ever; closed: it is gone at once."""
        x, weight_ih, weight_hh, bias, h0, c0 = self.arguments((5, 2, 3, 10), torch.float64, device)
        for value, expected in ((1e4, 1.0), (-1e4, 0.0)):
            bias[:] = -1e4
            bias[10:20] = value
            for activation in lstm.ACTIVATIONS:
                _, (_, c_T) = self.stage.lstm(x, weight_ih, weight_hh, bias, h0, c0, activation=activation)
                assert torch.equal(c_T, c0 * expected)

    def test_nan_reaches_what_depends_on_it(self, device):
        x, *others = self.arguments((4, 3, 5, 20), device=device)
        x[2, 1] = torch.nan
        h, (h_T, c_T) = self.stage.lstm(x, *others)
        assert h[:2].isfinite().all() and h[:, [0, 2]].isfinite().all()
        assert h[2:, 1].isnan().all() and h_T[1].isnan().all() and c_T[1].isnan().all()

    # ---- any layout

    @pytest.mark.parametrize("requires_grad", [False, True])
    def test_any_strides(self, requires_grad, device):
        arguments = self.arguments((3, 5, 6, 32), device=device)
        expected = outputs(self.stage.lstm(*arguments))

        def turned(x: Tensor) -> Tensor:
            return x.T.contiguous().T if x.dim() == 2 else x.repeat_interleave(2, -1)[..., ::2]

        views = [turned(x).requires_grad_(requires_grad) for x in arguments]
        found = outputs(self.stage.lstm(*views))
        assert all(relative_error(x.detach(), y.double()) <= 1e-6 for x, y in zip(found, expected, strict=True))

    def test_gradients_of_any_strides(self, device):
        arguments = self.arguments((3, 5, 6, 9), torch.float64, device, requires_grad=True)
        h, (_, c_T) = self.stage.lstm(*arguments)
        one = torch.ones((), dtype=torch.float64, device=device)
        expanded = torch.autograd.grad([h, c_T], arguments, [one.expand(h.shape), one.expand(c_T.shape)], True)
        whole = torch.autograd.grad([h, c_T], arguments, [torch.ones_like(h), torch.ones_like(c_T)])
        assert all(torch.equal(x, y) for x, y in zip(expanded, whole, strict=True))

    def test_each_result_alone_has_gradients(self, device):
        arguments = self.arguments((3, 2, 4, 6), torch.float64, device, requires_grad=True)
        wide = [x.detach().requires_grad_() for x in arguments]
        for which in range(3):
            result, truth = (outputs(f(*a))[which] for f, a in ((self.stage.lstm, arguments), (lstm.reference, wide)))
            grads = [torch.autograd.grad(x.sum(), a) for x, a in ((result, arguments), (truth, wide))]
            assert all(relative_error(x, y) <= 1e-13 for x, y in zip(*grads, strict=True))

    # ---- as a PyTorch operator

    def test_gradients_of_first_and_second_order(self):
        """Of every option; there is no second order, and it says so."""
        arguments = self.arguments(self.small, torch.float64, requires_grad=True)
        for activation, zoneout, dropout, few in itertools.product(lstm.ACTIVATIONS, (0, 0.4), (0, 0.4), (3, 6)):

            def function(*given, activation=activation, zoneout=zoneout, dropout=dropout):
                options = dict(activation=activation, zoneout=zoneout, recurrent_dropout=dropout)
                return outputs(self.stage.lstm(*given, **options, generator=torch.Generator().manual_seed(0)))

            assert torch.autograd.gradcheck(function, arguments[:few])
        h = self.stage.lstm(*arguments)[0]
        grad = torch.autograd.grad(h.sum(), arguments[1], create_graph=True)[0]
        with pytest.raises(NotImplementedError, match="no second derivatives"):
            torch.autograd.grad(grad.sum(), arguments[2])

    def test_there_is_no_forward_mode(self):
        arguments = self.arguments(self.small)
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            self.stage.lstm(forward_ad.make_dual(arguments[0], torch.ones_like(arguments[0])), *arguments[1:])

    def test_opcheck(self, device):
        operator = getattr(torch.ops.stages, self.stage.operator).default
        x, weight_ih, weight_hh, bias, h0, c0 = self.arguments(self.odd, device=device)
        products = torch.nn.functional.linear(x, weight_ih, bias)
        for mask in (x.new_empty(0, 0, 0), torch.rand(*x.shape[:2], h0.shape[1], device=device)):
            for requires_grad in (False, True):
                given = [t.clone().requires_grad_(requires_grad) for t in (products, weight_hh, h0, c0)]
                torch.library.opcheck(operator, (*given, mask, 0, True))

    def test_two_calls_are_equal_bit_for_bit(self, device):
        arguments = self.arguments((4, 17, 5, 33), device=device, requires_grad=True)
        seen = []
        for _ in range(2):
            results = outputs(self.stage.lstm(*arguments))
            seen.append([*results, *torch.autograd.grad(results, arguments, [x.detach() for x in results])])
        assert all(torch.equal(x, y) for x, y in zip(*seen, strict=True))

    # ---- what it is not given

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"x": 1.0}, "x must be a torch.Tensor, got float"),
            ({"x": torch.ones(2, 3)}, "x has 2 dimensions"),
            ({"x": torch.ones(2, 3, 4, dtype=torch.int64)}, "x has dtype torch.int64; allowed"),
            ({"weight_ih": torch.ones(8, 4)}, r"weight_ih is \(8, 4\).*here \(24, 4\)"),
            ({"weight_ih": torch.ones(24, 4).double()}, "weight_ih has dtype torch.float64, but x has torch.float32"),
            ({"weight_hh": torch.ones(25, 6)}, r"weight_hh is \(25, 6\).*\(4 H, H\), here \(24, 6\)"),
            ({"bias": torch.ones(6)}, r"bias is \(6,\).*here \(24,\)"),
            ({"h0": torch.ones(1, 6)}, r"h0 is \(1, 6\).*here \(3, 6\)"),
            ({"h0": torch.ones(3, 6, device="meta")}, "h0 is on meta, but x is on cpu"),
            ({"c0": torch.ones(3, 7)}, r"c0 is \(3, 7\).*here \(3, 6\)"),
            ({"c0": torch.ones(3, 6).half()}, "c0 has dtype torch.float16; allowed: torch.float32"),
            ({"activation": "relu"}, "activation is 'relu'; allowed: 'soft' or 'hard'"),
            ({"zoneout": 1.5}, "zoneout is 1.5; allowed: 0 or more, and at most 1"),
            ({"recurrent_dropout": 1.0}, "recurrent_dropout is 1.0; allowed: 0 or more, and below 1"),
            ({"zoneout": "no"}, "zoneout must be a real number"),
            ({"training": 1}, "training must be True or False, got int"),
            ({"generator": 3}, "generator must be a torch.Generator or None, got int"),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
    )
    def test_errors_name_the_argument(self, change, words):
        given = dict(zip(NAMES, self.arguments((2, 3, 4, 6)), strict=True)) | change
        with pytest.raises((TypeError, ValueError), match=words):
            self.stage.lstm(**given)

    # ---- on a GPU

    @GPU
    @pytest.mark.parametrize("dtype", FLOATING, ids=str)
    @pytest.mark.parametrize("sizes", [(7, 16, 30, 512), (3, 1, 8, 500), (3, 70, 12, 384)], ids=str)
    def test_sizes_of_models_cuda(self, sizes, dtype):
        results = verify(self.stage, self.stage.sizes(sizes), dtype, "cuda")
        assert [r for r in results if not r.ok] == []
