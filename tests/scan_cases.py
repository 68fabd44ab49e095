"""What the tests of the scan share: other implementations' values, and the tests of every stage that computes it."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import GPU
from stage_cases import StageCases, free_gpu_memory, same
from torch import Tensor
from torch.autograd import forward_ad

from stages.families import COMPLEX, FLOATING, scan, widened
from stages.toolkit import xray
from stages.toolkit.report import Counts
from stages.toolkit.verify import relative_error

NAMES = ("a", "b", "h0")
GOLDEN = Path(__file__).parent / "golden"
REAL = sorted(path for path in GOLDEN.glob("scan_*.npz") if "complex" not in path.stem)
LENGTHS = [0, 1, 2, 3, 31, 32, 33, 63, 64, 65, 1000, 2047, 2048, 2049, 4097]
WAYS = [{}, {"reverse": True}, {"time_dim": 2}, {"time_dim": 2, "reverse": True}]
SIZES = [  # B, T, D
    (0, 5, 3),
    (2, 0, 3),
    (2, 5, 0),
    (0, 0, 0),
    (1, 1, 1),
    (1, 31, 33),
    (3, 32, 31),
    (2, 33, 32),
    (1, 65, 1),
    (5, 3, 127),
    (1, 2, 300),
    (33, 7, 2),
]

# Views with the values of a contiguous x of three dimensions, each of which the kernels have to read in its own place.
VIEWS = {
    "transposed": lambda x: x.mT.contiguous().mT,
    "batch inside": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "every order": lambda x: x.permute(2, 1, 0).contiguous().permute(2, 1, 0),
    "a third of a wider one": lambda x: torch.cat([x * torch.nan, x, x * torch.nan], 2).chunk(3, 2)[1],
    "every second": lambda x: x.repeat_interleave(2, 1).repeat_interleave(3, 2)[:, ::2, ::3],
    "one element off": lambda x: torch.cat([x.new_full((1,), torch.nan), x.flatten()])[1:].view(x.shape),
}


def load_golden(path: Path, device: str = "cpu") -> dict[str, Tensor]:
    """The arrays of a file, in float64, those of all steps as [B, D, T]."""
    with np.load(path) as file:
        return {name: torch.from_numpy(file[name]).to(device) for name in file}


def viewed(view: str, x: Tensor) -> Tensor:
    """One of the views; a state is one step of it."""
    return VIEWS[view](x) if x.dim() == 3 else VIEWS[view](torch.stack([x, x * torch.nan], 1))[:, 0]


def gradients(function: Callable, arguments: list[Tensor | None], g: Tensor, **options) -> list[Tensor]:
    """h, and the gradients of the arguments that there are."""
    given = [None if x is None else x.detach().requires_grad_() for x in arguments]
    h = function(*given, **options)
    return [h.detach(), *torch.autograd.grad(h, [x for x in given if x is not None], g)]


def truth_of(arguments: list[Tensor | None], g: Tensor, **options) -> list[Tensor]:
    """The same in float64, of the values as they are rounded."""
    return gradients(scan.reference, [None if x is None else widened(x) for x in arguments], widened(g), **options)


def same_but_rounded(x: Tensor, y: Tensor) -> bool:
    """Up to what another grouping of the steps makes of them; in 16 bits, of which way they are rounded."""
    allowed = scan.tolerance({}, x.dtype)["output"] / (10 if x.element_size() > 2 else 1)
    return x.shape == y.shape and relative_error(x, widened(y)) <= allowed


def same_but_fused(x: Tensor, y: Tensor) -> bool:
    """Equal, bit for bit on the CPU device; on a GPU each kernel's compiler fuses products with sums as it likes."""
    return torch.equal(x, y) if x.is_cpu else same_but_rounded(x, y)


def error_of_a_walk(a: Tensor, b: Tensor, h0: Tensor, g: Tensor) -> float:
    """What the recurrence and its backward are off by, done step by step in float32: with a product and a sum rounded
    as one, and each for itself, whichever is worse.
    """
    truths = truth_of([a, b, h0], g)
    a, b, h0, g = (x.cpu().numpy() for x in (a, b, h0, g))
    errors = []
    for between in (np.float32, np.float64):  # what holds a product before it is added

        def add(x, y, z, between=between):
            return (x.astype(between) * y.astype(between) + z).astype(np.float32)

        h, da, db = np.empty_like(b), np.empty_like(b), np.empty_like(b)
        state, gate, later = h0, np.zeros_like(h0), np.zeros_like(h0)
        for t in range(b.shape[1]):
            h[:, t] = state = add(a[:, t], state, b[:, t])
        for t in reversed(range(b.shape[1])):
            db[:, t] = later = add(gate, later, g[:, t])
            da[:, t] = later * (h[:, t - 1] if t else h0)
            gate = a[:, t]
        results = (h, da, db, gate * later)
        errors += [relative_error(torch.from_numpy(x), y.cpu()) for x, y in zip(results, truths, strict=True)]
    return max(errors)


class ScanCases(StageCases):
    odd = (3, 70, 35)
    small = (2, 5, 3)
    # Whether the stage multiplies a by a, as scan.incumbent does. Of (1 - x) (1 - y) = 1 - x - y + x y float32 loses
    # the last term where it is small, always to the same side. A walk, which multiplies a by h alone, is closer.
    joins = False
    # Whether steps are grouped alike however tensors lie and how long they are: then results are, bit for bit.
    grouped_alike = True

    def agree(self, x: Tensor, y: Tensor) -> bool:
        """Equal, bit for bit unless the stage groups the steps otherwise."""
        return torch.equal(x, y) if self.grouped_alike else same_but_rounded(x, y)

    def random_grad(self, arguments: list[Tensor], seed: int = 1) -> Tensor:
        """The same numbers on each device."""
        b = arguments[1]
        return torch.randn(b.shape, generator=torch.Generator().manual_seed(seed), dtype=widened(b).dtype).to(b)

    def results(self, arguments: list[Tensor | None], g: Tensor | None = None, **options) -> list[Tensor]:
        """h and the gradients, or h alone where the stage has no backward."""
        if not self.stage.gradients:
            return [self.stage.scan(*arguments, **options)]
        return gradients(self.stage.scan, arguments, self.random_grad(arguments) if g is None else g, **options)

    def compare(self, arguments: list[Tensor | None], allowed: float, g: Tensor | None = None, **options) -> None:
        """h and the gradients with float64."""
        g = self.random_grad(arguments) if g is None else g
        results, truths = self.results(arguments, g, **options), truth_of(arguments, g, **options)
        for name, result, truth in zip(("h", *NAMES), results, truths, strict=False):
            assert result.dtype is arguments[0].dtype and result.shape == truth.shape, name
            error = relative_error(result, truth)
            assert error <= allowed, f"{name}: {error:.1e}"

    # ---- values

    @pytest.mark.parametrize("dtype", FLOATING + COMPLEX, ids=str)
    @pytest.mark.parametrize("sizes", SIZES, ids=str)
    def test_output_and_gradients(self, sizes, dtype, device):
        self.check(sizes, dtype, device)
        allowed = scan.tolerance({}, dtype)["output"]
        for options in WAYS:
            a, b, h0 = self.arguments(sizes, dtype, device, **{"time_dim": 1, **options})
            self.compare([a, b, h0], allowed, **options)
            self.compare([a, b, None], allowed, **options)

    @pytest.mark.parametrize("seq", LENGTHS)
    def test_every_length(self, seq, device):
        self.check((2, seq, 5), torch.float32, device)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
    @pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
    def test_values_of_another_implementation(self, path, dtype, device):
        # With a near 1, where terms that are summed up cancel, dh0, a single step's, has fewer digits than they.
        allowed = scan.tolerance({}, dtype)["output"] if "slow" in path.stem else 1e-6
        self.compare_with(load_golden(path, device), dtype, 1e-14 if dtype is torch.float64 else allowed)

    def compare_with(self, golden: dict[str, Tensor], dtype: torch.dtype, allowed: float) -> None:
        """Values of a file, without h0, with it, and turned around, and in both layouts."""
        given = {name: x.to(dtype) for name, x in golden.items()}
        seen = set()
        for ending, h0, reverse in (("", None, False), ("_init", given["h0"], False), ("_rev", None, True)):
            if f"h{ending}" not in golden:
                continue
            keys = [f"h{ending}", f"da{ending}", f"db{ending}", *(["dh0"] if h0 is not None else [])]
            seen.update(keys)
            for time_dim in (1, 2):
                a, b, g = (x.mT if time_dim == 1 else x for x in (given["a"], given["b"], given["g"]))
                results = self.results([a, b, h0], g, time_dim=time_dim, reverse=reverse)
                for key, result in zip(keys, results, strict=False):
                    truth = golden[key].mT if result.dim() == 3 and time_dim == 1 else golden[key]
                    assert relative_error(result, truth) <= allowed, key
        assert set(golden) - {"a", "b", "g", "h0"} == seen

    def test_no_digits_are_lost_where_a_is_below_one(self, device):
        for seq in (100, 2048, 2049):
            a, b, h0 = self.arguments((2, seq, 6), device=device, time_dim=1)
            a.clamp_(-0.99, 0.99)
            self.compare([a, b, h0], 1e-6, time_dim=1)

    @pytest.mark.parametrize("kind", ["resets", "sums", "minus one", "negative", "tiny", "long memory"])
    def test_other_gates(self, kind, device):
        a, b, h0 = self.arguments((2, 700, 7), device=device, time_dim=1)
        if kind == "resets":
            a[:, ::3], a[:, 100:140] = 0, 0
        elif kind == "sums":
            a[:] = 1
        elif kind == "minus one":
            a[:] = -1
        elif kind == "negative":
            a = -a.abs()
        elif kind == "tiny":
            a = a * 1e-30
        else:
            a = torch.sigmoid(3 + a)
        for options in WAYS[:2]:
            self.compare([a, b, h0], 1e-5, time_dim=1, **options)

    def test_a_zero_forgets_all_that_was_before(self, device):
        a, b, h0 = self.arguments((2, 90, 5), device=device, time_dim=1)
        a[:, 40], other = 0, b.clone()
        other[:, :40] = 7
        one, two = (self.stage.scan(a, x, h0, time_dim=1) for x in (b, other))
        assert torch.equal(one[:, 40:], two[:, 40:]) and torch.equal(one[:, 40], b[:, 40])

    def test_growth_that_overflows_is_infinite_and_not_nan(self, device):
        a = torch.full((1, 300, 2), 3.0, device=device)
        h = self.stage.scan(a, torch.ones_like(a), time_dim=1)
        truth = scan.reference(a, torch.ones_like(a))
        finite = truth < 1e38
        torch.testing.assert_close(h[finite], truth[finite].float(), rtol=1e-5, atol=0)
        assert h[truth > 1e39].isinf().all()

    @pytest.mark.parametrize("which", range(3), ids=NAMES)
    def test_nan_stays_in_its_channel_and_after_its_step(self, which, device):
        for options in WAYS:
            arguments = list(self.arguments((2, 90, 5), device=device, **{"time_dim": 1, **options}))
            expected = self.stage.scan(*arguments, **options)
            in_time = 3 - options.get("time_dim", 1)  # where the channels are
            place = (1, 2) if which == 2 else (1, 40, 2) if in_time == 2 else (1, 2, 40)
            arguments[which][place] = torch.nan
            result = self.stage.scan(*arguments, **options)
            result, expected = (x.transpose(1, 2) if in_time == 1 else x for x in (result, expected))
            if options.get("reverse"):
                result, expected = result.flip(1), expected.flip(1)
            first = 0 if which == 2 else 49 if options.get("reverse") else 40
            assert result[1, first:, 2].isnan().all()
            result[1, first:, 2] = expected[1, first:, 2]
            assert torch.equal(result, expected)

    # ---- what a scan is

    @pytest.mark.parametrize("way", WAYS, ids=str)
    def test_a_split_sequence_is_the_whole(self, way, device):
        """Wherever it is split: the state is handed on, and its gradient comes back."""
        time_dim, reverse = way.get("time_dim", 1), way.get("reverse", False)
        a, b, h0 = self.arguments((2, 100, 5), device=device, **{"time_dim": 1, **way})
        g = self.random_grad([a, b])
        whole = self.results([a, b, h0], g, **way)
        for at in (0, 1, 31, 32, 50, 64, 99, 100):
            given = [x.detach().requires_grad_(self.stage.gradients) for x in (a, b, h0)]
            parts = [x.split((at, 100 - at), time_dim) for x in given[:2]]
            state, done = given[2], {}
            for part in (1, 0) if reverse else (0, 1):
                done[part] = self.stage.scan(parts[0][part], parts[1][part], state, **way)
                if done[part].shape[time_dim]:
                    state = done[part].select(time_dim, 0 if reverse else -1)
            h = torch.cat([done[0], done[1]], time_dim)
            found = [h.detach()]
            if self.stage.gradients:
                found += torch.autograd.grad(h, given, g)
            assert all(same_but_rounded(x, y) for x, y in zip(found, whole, strict=True))

    def test_reverse_is_the_scan_of_the_flipped(self, device):
        for time_dim in (1, 2):
            a, b, h0 = self.arguments(self.odd, device=device, time_dim=time_dim)
            g = self.random_grad([a, b])
            there = self.results([x.flip(time_dim) for x in (a, b)] + [h0], g.flip(time_dim), time_dim=time_dim)
            back = self.results([a, b, h0], g, time_dim=time_dim, reverse=True)
            for x, y in zip(there, back, strict=True):
                assert self.agree(x.flip(time_dim) if x.dim() == 3 else x, y)

    def test_both_layouts_give_the_same(self, device):
        a, b, h0 = self.arguments(self.odd, device=device, time_dim=1)
        g = self.random_grad([a, b])
        one = self.results([a, b, h0], g, time_dim=1)
        two = self.results([a.mT.contiguous(), b.mT.contiguous(), h0], g.mT.contiguous(), time_dim=2)
        for x, y in zip(one, two, strict=True):
            torch.testing.assert_close(x, y.mT if x.dim() == 3 else y)

    def test_no_state_is_a_state_of_zeros(self, device):
        a, b, h0 = self.arguments(self.odd, device=device, time_dim=1)
        one, two = (self.results([a, b, x], time_dim=1) for x in (None, torch.zeros_like(h0)))
        assert all(same(x, y) for x, y in zip(one, two, strict=False))

    def test_channels_do_not_know_each_other(self, device):
        a, b, h0 = self.arguments((4, 66, 40), device=device, time_dim=1)
        g = self.random_grad([a, b])
        whole = self.results([a, b, h0], g, time_dim=1)
        for rows, cols in ((slice(1, 3), slice(7, 39)), (slice(3, 4), slice(0, 1))):
            part = self.results([a[rows, :, cols], b[rows, :, cols], h0[rows, cols]], g[rows, :, cols], time_dim=1)
            for x, y in zip(whole, part, strict=True):
                assert self.agree(x[rows, ..., cols], y)

    # ---- gradients

    def test_gradients_of_first_and_second_order(self):
        """First order true, with a state and without; second order refused, and forward mode, too."""
        if not self.stage.gradients:
            pytest.skip("this stage has no backward")
        dtypes = [dtype for dtype in (torch.float64, torch.complex128) if dtype in self.stage.dtypes]
        for dtype in dtypes:
            for options in WAYS:
                options = {"time_dim": 1, **options}
                arguments = self.arguments(self.small, dtype, requires_grad=True, **options)
                for given in (arguments, arguments[:2]):
                    assert torch.autograd.gradcheck(lambda *x, o=options: self.stage.scan(*x, **o), given)
        arguments = self.arguments(self.small, dtypes[0], requires_grad=True)
        gradient = torch.autograd.grad(self.function(*arguments).sum(), arguments, create_graph=True)
        with pytest.raises(NotImplementedError, match=f"{self.stage.operator} has no second derivatives"):
            torch.autograd.grad(gradient[0].sum(), arguments)
        with forward_ad.dual_level(), torch.no_grad():
            a = forward_ad.make_dual(arguments[0].detach(), torch.ones_like(arguments[0]))
            with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
                self.function(a, *arguments[1:])

    @pytest.mark.parametrize("way", WAYS, ids=str)
    def test_gradients_through_the_last_state_alone(self, way, device):
        if not self.stage.gradients:
            pytest.skip("this stage has no backward")
        time_dim, last = way.get("time_dim", 1), 0 if way.get("reverse") else -1
        for seq in (1, 2, 33, 100):
            arguments = self.arguments((2, seq, 5), device=device, **{"time_dim": 1, **way})
            g = torch.zeros_like(arguments[1])
            g.select(time_dim, last)[:] = 1
            truths = truth_of(arguments, g, **way)[1:]
            given = [x.detach().requires_grad_() for x in arguments]
            loss = self.stage.scan(*given, **way).select(time_dim, last).sum()
            for x, truth in zip(torch.autograd.grad(loss, given), truths, strict=True):
                assert relative_error(x, truth) <= 1e-5

    def test_gradients_of_some_arguments_alone(self, device):
        if not self.stage.gradients:
            pytest.skip("this stage has no backward")
        arguments = self.arguments(self.odd, device=device)
        g = self.random_grad(arguments)
        expected = gradients(self.function, arguments, g)[1:]
        for which in range(3):
            given = [x.detach().requires_grad_(n == which) for n, x in enumerate(arguments)]
            (grad,) = torch.autograd.grad(self.function(*given), given[which], g)
            assert torch.equal(grad, expected[which])

    def test_expanded_gradient(self, device):
        if not self.stage.gradients:
            pytest.skip("this stage has no backward")
        for options in self.options():
            arguments = self.arguments(self.odd, device=device, requires_grad=True, **options)
            h = self.stage.scan(*arguments, **options)
            one = torch.autograd.grad(h.sum(), arguments, retain_graph=True)  # stride 0 in all dimensions
            two = torch.autograd.grad(h, arguments, torch.ones_like(h))
            assert all(self.agree(x, y) for x, y in zip(one, two, strict=True))

    def test_nothing_is_overwritten(self, device):
        """Neither the inputs nor, by the backward, the output."""
        for options in WAYS:
            arguments = self.arguments(self.odd, device=device, **{"time_dim": 1, **options})
            before = [x.clone() for x in arguments]
            given = [x.detach().requires_grad_(self.stage.gradients) for x in arguments]
            h = self.stage.scan(*given, **options)
            kept = h.detach().clone()
            if self.stage.gradients:
                h.backward(self.random_grad(arguments))
            assert torch.equal(h, kept)
            assert all(torch.equal(x, y) for x, y in zip(arguments, before, strict=True))

    # ---- layouts

    @pytest.mark.parametrize("view", VIEWS)
    def test_views(self, view, device):
        """All inputs and the gradient that comes in, in both layouts; what goes out is contiguous and the same."""
        for time_dim in (1, 2):
            arguments = [*self.arguments((3, 40, 24), device=device, time_dim=time_dim)]
            arguments.append(self.random_grad(arguments))
            expected = self.results(arguments[:3], arguments[3], time_dim=time_dim)
            for n in range(4):
                given = [viewed(view, x) if n == m else x for m, x in enumerate(arguments)]
                found = self.results(given[:3], given[3], time_dim=time_dim)
                assert all(self.agree(x, y) for x, y in zip(found, expected, strict=True))
                assert all(x.is_contiguous() for x in found)

    def test_expanded_inputs(self, device):
        a, b, h0 = self.arguments((3, 40, 24), device=device, time_dim=1)
        for given in (
            (a[:1].expand(3, -1, -1), b, h0[:1].expand(3, -1)),
            (a[:, :1].expand(-1, 40, -1), b, h0),
            (a[..., :1].expand(-1, -1, 24), b[:, :, :1].expand(-1, -1, 24), h0[:, :1].expand(-1, 24)),
            (a[:1, :1, :1].expand(3, 40, 24), b, h0),
            (a, b[:1, :1, :1].expand(3, 40, 24), h0[:1, :1].expand(3, 24)),
        ):
            found = self.results(list(given), time_dim=1)
            expected = self.results([x.contiguous() for x in given], time_dim=1)
            assert all(self.agree(x, y) for x, y in zip(found, expected, strict=True))

    def test_views_are_not_copied(self, device):
        """Of the kinds that models have: three projections side by side, and [T, B, D]."""
        x = torch.randn(2, 40, 3 * 16, device=device)
        a, b, _ = x.sigmoid().chunk(3, 2)
        g = torch.randn(40, 2, 16, device=device).transpose(0, 1)
        taken, launch = [], self.stage.kernels.launch
        try:
            self.stage.kernels.launch = lambda name, device, *a: (taken.extend(a), launch(name, device, *a))
            self.results([a, b, None], g, time_dim=1)
        finally:
            del self.stage.kernels.launch
        seen = {x.data_ptr() for x in taken if isinstance(x, Tensor)}
        assert {x.data_ptr() for x in ((a, b, g) if self.stage.gradients else (a, b))} <= seen

    def test_negated_view(self, device):
        z = torch.randn(2, 40, 8, dtype=torch.complex64, device=device)
        view = z.conj().imag
        assert view.is_neg()
        plain = -z.imag.contiguous()
        assert same(self.stage.scan(view, view), self.stage.scan(plain, plain))

    # ---- large ones

    def test_blocks_are_counted_along_x_alone(self):
        """y and z of a grid end at 65535, which batch x channels may pass."""
        self.needs_xray()
        arguments = self.arguments(self.odd, requires_grad=True)
        for options in WAYS:
            with xray.recording() as report:
                h = self.stage.scan(*self.arguments(self.odd, **{"time_dim": 1, **options}), **options)
                if self.stage.gradients:
                    self.function(*arguments).sum().backward()
            assert h.isfinite().all()
            assert report.launches and {launch.grid[1:] for launch in report.launches} == {(1, 1)}

    @pytest.mark.parametrize("sizes", [(66_000, 2, 1), (1, 2, 66_000), (1, 66_000, 1)], ids=["B", "D", "T"])
    def test_more_than_a_grid_has_in_y_or_z(self, sizes, device):
        a = torch.full((1, 1, 1), 0.5, device=device).expand(sizes)
        h = self.stage.scan(a, a)
        expected = 1 - 0.5 ** torch.arange(1, sizes[1] + 1, device=device).clamp(max=60).double()
        assert torch.equal(h, expected.float()[None, :, None].expand(sizes))

    def test_a_long_sequence_with_long_memory(self, device):
        """65536 steps, a near 1: what is off after all of them is compared with float64."""
        seq = 65536
        generator = torch.Generator().manual_seed(3)  # the same numbers on each device
        a, b, h0 = (
            torch.randn(size, generator=generator, dtype=torch.float64).to(device)
            for size in ((1, seq, 2), (1, seq, 2), (1, 2))
        )
        a = 1 - a.abs() * torch.tensor([1e-3, 1e-5], dtype=torch.float64, device=device)
        for dtype, allowed in ((torch.float32, 1e-5), (torch.bfloat16, 4e-3)):
            if dtype in self.stage.dtypes:
                arguments = [x.to(dtype) for x in (a, b, h0)]
                if dtype is torch.float32:
                    allowed = max(allowed, 1.5 * error_of_a_walk(*arguments, self.random_grad(arguments)))
                    assert allowed < 2e-5
                    if self.joins:
                        error = relative_error(scan.incumbent(*arguments), scan.reference(*arguments))
                        allowed = 1.5 * error
                        assert allowed < 5e-5
                self.compare(arguments, allowed)

    @GPU
    @pytest.mark.skipif(free_gpu_memory() < 40e9, reason="needs 40 GB of GPU memory")
    def test_more_than_two_to_the_31_elements(self):
        # The last channels of a large problem are those of a small one.
        a = torch.rand(1, 70_000, 32_768, dtype=torch.bfloat16, device="cuda")
        b = a.flip(1)
        assert a.numel() > 2**31
        assert self.agree(self.stage.scan(a, b)[..., -5:], self.stage.scan(a[..., -5:], b[..., -5:]))

    @GPU
    @pytest.mark.skipif(free_gpu_memory() < 20e9, reason="needs 20 GB of GPU memory")
    def test_strides_past_two_to_the_31(self):
        # Three steps, 2^31 + 8 elements apart, or three channels.
        parent = torch.zeros(3, 2**31 + 8, dtype=torch.bfloat16, device="cuda")
        a = parent[None, :, -7:]
        a.copy_(torch.rand(1, 3, 7))
        for time_dim in (1, 2):
            expected = self.results([a.contiguous(), a.contiguous(), None], time_dim=time_dim)
            results = self.results([a, a, None], time_dim=time_dim)
            assert all(self.agree(x, y) for x, y in zip(results, expected, strict=True))

    # ---- the x-ray

    @pytest.mark.parametrize("dtype", FLOATING + COMPLEX, ids=str)
    @pytest.mark.parametrize("factors", [1, 2, 3])
    def test_counts_of_the_backward_equal_their_closed_forms(self, factors, dtype):
        self.needs_xray()
        if not self.stage.gradients:
            pytest.skip("this stage has no backward")
        backward_cost = import_module(f"stages.{self.stage.name}.stage").backward_cost
        sizes = tuple(aligned * (1 + (i + factors) % 3) for i, aligned in enumerate(self.stage.aligned))
        for options in self.options(dtype):
            arguments = self.arguments(sizes, dtype, requires_grad=True, **options)
            h = self.stage.scan(*arguments, **options)
            with xray.recording() as report:
                torch.autograd.grad(h, arguments, self.random_grad(arguments))
            expected = backward_cost(**self.stage.sizes(sizes), itemsize=dtype.itemsize, **options)
            assert isinstance(expected, Counts)
            assert report.counts() == expected
            assert [str(fault) for fault in report.faults] == []

    @pytest.mark.parametrize("sizes", [(2, 130, 70), (3, 1, 1), (1, 65, 33), (2, 257, 3), (1, 40, 128)], ids=str)
    def test_the_x_ray_finds_no_fault(self, sizes):
        self.needs_xray()
        for way in WAYS:
            for state in (True, False):
                a, b, h0 = self.arguments(sizes, **{"time_dim": 1, **way})
                with xray.recording("random", 4) as report:
                    self.results([a, b, h0 if state else None], **way)
                assert [str(fault) for fault in report.faults] == []

    # ---- as an operator

    def test_opcheck(self, device):
        operator = getattr(torch.ops.stages, self.stage.operator).default
        for way in WAYS:
            way = {"time_dim": 1, **way}
            for requires_grad in (False, True)[: 1 + self.stage.gradients]:
                arguments = self.arguments(self.odd, device=device, requires_grad=requires_grad, **way)
                torch.library.opcheck(operator, arguments, way)
                torch.library.opcheck(operator, arguments[:2], way)

    def test_the_backward_is_an_operator(self, device):
        if not self.stage.gradients:
            pytest.skip("this stage has no backward")
        backward = getattr(torch.ops.stages, f"{self.stage.operator}_backward").default
        arguments = self.arguments(self.odd, device=device, time_dim=1)
        a, b, h0 = arguments
        h, g = self.stage.scan(a, b, h0), self.random_grad(arguments)
        for state in (h0, None):
            torch.library.opcheck(backward, (g, a, h, state, 1, False))
            torch.library.opcheck(backward, (g.mT, a.mT, h.mT, state, 2, True))
        meta = [x.to("meta").requires_grad_() for x in arguments]
        results = torch.autograd.grad(self.stage.scan(*meta).sum(), meta)
        assert [x.shape for x in results] == [x.shape for x in arguments]

    def test_compiles_with_a_state_that_is_handed_on(self, device):
        a, b, h0 = self.arguments(self.odd, device=device, time_dim=1)

        def twice(a, b, h0):
            first = self.stage.scan(a, b, h0)
            return self.stage.scan(a, first, first[:, -1], reverse=True).sin(), self.stage.scan(a, b)

        torch.compiler.reset()
        compiled = torch.compile(twice, fullgraph=True, backend="aot_eager")
        assert all(torch.equal(x, y) for x, y in zip(compiled(a, b, h0), twice(a, b, h0), strict=True))

    def test_types_that_a_stage_leaves_out(self):
        for dtype in FLOATING + COMPLEX:
            if dtype not in self.stage.dtypes:
                x = torch.ones(1, 2, 3, dtype=dtype)
                other = "47" if dtype.is_complex else "41"
                with pytest.raises(NotImplementedError, match=f"does not take {dtype}; stage {other} "):
                    self.stage.scan(x, x)

    def test_a_stage_without_a_backward_says_who_has_one(self):
        if self.stage.gradients:
            pytest.skip("this stage has a backward")
        with pytest.raises(NotImplementedError, match=f"{self.stage.operator} has no backward; stage 41 has one"):
            self.function(*self.arguments(self.small, requires_grad=True)).sum().backward()

    def test_wrong_arguments(self):
        x, s = torch.ones(2, 3, 4), torch.ones(2, 4)
        for given, options, error, words in (
            (([[1.0]], x), {}, TypeError, "a must be a torch.Tensor, got list"),
            ((x, None), {}, TypeError, "b must be a torch.Tensor, got NoneType"),
            ((x, x, 1.0), {}, TypeError, "h0 must be a torch.Tensor, got float"),
            ((x.int(), x), {}, TypeError, "a has dtype torch.int32; allowed: torch.float64"),
            ((x, x.half()), {}, TypeError, "b has dtype torch.float16, but a has torch.float32"),
            ((x, x, s.double()), {}, TypeError, "h0 has dtype torch.float64, but a has torch.float32"),
            ((x.to_sparse(), x), {}, TypeError, "a has layout torch.sparse_coo; allowed: torch.strided"),
            ((x, x.to("meta")), {}, ValueError, "b is on meta, but a is on cpu"),
            ((x[0], x), {}, ValueError, r"a has 2 dimensions \(3, 4\); allowed: 3"),
            ((x, x[None]), {}, ValueError, r"b has 4 dimensions \(1, 2, 3, 4\); allowed: 3"),
            ((x, x[:, :2]), {}, ValueError, r"b is \(2, 2, 4\) and a is \(2, 3, 4\); allowed: the same shape"),
            ((x, x, x), {}, ValueError, r"h0 has 3 dimensions \(2, 3, 4\); allowed: 2"),
            ((x, x, s[:, :3]), {}, ValueError, r"h0 is \(2, 3\) .*time_dim=1; allowed: \(B, D\), here \(2, 4\)"),
            ((x, x, s[:1]), {}, ValueError, r"h0 is \(1, 4\) .*allowed: \(B, D\), here \(2, 4\)"),
            ((x, x, s), {"time_dim": 2}, ValueError, r"h0 is \(2, 4\) .*time_dim=2; allowed: \(B, D\), here \(2, 3\)"),
            ((x, x), {"time_dim": 0}, ValueError, r"time_dim is 0; allowed: 1 for \(B, T, D\), 2 for \(B, D, T\)"),
            ((x, x), {"time_dim": -1}, ValueError, "time_dim is -1; allowed"),
            ((x, x), {"time_dim": 1.0}, TypeError, "time_dim must be an int, got float"),
            ((x, x), {"time_dim": True}, TypeError, "time_dim must be an int, got bool"),
            ((x, x), {"reverse": 1}, TypeError, "reverse must be True or False, got int"),
        ):
            with pytest.raises(error, match=words):
                self.stage.scan(*given, **options)
