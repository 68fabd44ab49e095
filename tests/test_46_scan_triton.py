"""Stage 46, scan_triton. On CPU tensors in Triton's interpreter, which takes some ms for a program."""

import sys
from functools import partial

import pytest

pytest.importorskip("triton", reason="needs Triton: pip install -e '.[triton]'")

import torch  # noqa: E402
from scan_cases import SIZES, WAYS, ScanCases  # noqa: E402

import stages  # noqa: E402
from stages.families import FLOATING  # noqa: E402
from stages.toolkit import check_cuda, kernels, triton_kernels, xray  # noqa: E402
from stages.toolkit.verify import relative_error  # noqa: E402

BROKEN = {  # what is taken out or turned around, and what stands in its place
    "a of the forward without a mask": ("a_places + t * a_strides[1], inside, 1.0", "a_places + t * a_strides[1]"),
    "b of the forward without a mask": ("b_places + t * b_strides[1], inside, 0.0", "b_places + t * b_strides[1]"),
    "h of the forward without a mask": ("h_tile, inside)", "h_tile)"),
    "g without a mask": ("g_places + t * g_strides[1], inside, 0.0", "g_places + t * g_strides[1]"),
    "a of the backward without a mask": ("a_strides[1], has_after, 1.0", "a_strides[1]"),
    "h of the backward without a mask": ("h_strides[1], has_before, 0.0", "h_strides[1]"),
    "da without a mask": ("h_before, inside)", "h_before)"),
    "db without a mask": ("lambda_tile, inside)", "lambda_tile)"),
    "h0 without a mask": ("channel * strides[1], channel < channels, 0.0", "channel * strides[1]"),
    "dh0 without a mask": ("* state, there)", "* state)"),
    "dh0 of no step": ("there & (seq > 0), 0.0", "there, 0.0"),
    "steps that are not there are zeros": ("inside, 1.0).to", "inside, 0.0).to"),
    "later steps that are not there are zeros": ("has_after, 1.0).to", "has_after, 0.0).to"),
    "the newer piece first": ("a_newer * b_older) + b_newer", "a_older * b_newer) + b_older"),
    "infinity times 0": ("tl.where(nowhere, 0.0, a_newer * b_older)", "a_newer * b_older"),
    "every tile from 0": ("b_tile += tl.where(first, a_tile * state[None, :], 0.0)", ""),
    "every tile of the backward from 0": ("g_tile += tl.where(first, a_after * state[None, :], 0.0)", ""),
    "the state into every step": ("tl.where(first, a_tile * state[None, :], 0.0)", "a_tile * state[None, :]"),
    "the state before the last step": ("row(h_tile, STEPS - 1)", "row(h_tile, STEPS - 2)"),
    "lambda after the first step": ("row(lambda_tile, STEPS - 1)", "row(lambda_tile, STEPS - 2)"),
    "one direction for all": ("steps_of_tile(STEPS, REVERSE)", "steps_of_tile(STEPS, False)"),
    "one direction for all gradients": ("steps_of_tile(STEPS, not REVERSE)", "steps_of_tile(STEPS, True)"),
    "a of the step itself": ("a_strides, batch, step + later,", "a_strides, batch, step,"),
    "h of the step itself": ("h_strides, batch, step - later,", "h_strides, batch, step,"),
    "no h0 before the first step": ("tl.where(has_before, h_before, start[None, :])", "h_before"),
}


class TestScanTriton(ScanCases):
    stage = stages.load("46")
    odd = (2, 70, 33)
    small = (1, 3, 2)
    joins = True
    grouped_alike = False

    @pytest.mark.parametrize("dtype", FLOATING, ids=str)
    @pytest.mark.parametrize("sizes", SIZES, ids=str)
    def test_output_and_gradients(self, sizes, dtype, device):
        if device == "cpu" and sizes[0] > 3 and dtype is not torch.float32:
            pytest.skip("many programs")
        super().test_output_and_gradients(sizes, dtype, device)

    @pytest.mark.parametrize("sizes", [(66_000, 2, 1), (1, 2, 66_000), (1, 66_000, 1)], ids=["B", "D", "T"])
    def test_more_than_a_grid_has_in_y_or_z(self, sizes, device):
        if device == "cpu" and sizes[1] == 2:
            pytest.skip("many programs")
        super().test_more_than_a_grid_has_in_y_or_z(sizes, device)

    def test_both_layouts_give_the_same(self, device):
        """But for rounding: tiles differ, and so do the threads that steps are handed to."""
        a, b, h0 = self.arguments(self.odd, device=device, time_dim=1)
        g = self.random_grad([a, b])
        one = self.results([a, b, h0], g, time_dim=1)
        two = self.results([a.mT.contiguous(), b.mT.contiguous(), h0], g.mT.contiguous(), time_dim=2)
        for x, y in zip(one, two, strict=True):
            assert relative_error(x, y.mT if x.dim() == 3 else y) < 2e-6

    def test_a_product_that_overflows_before_there_is_a_state(self, device):
        """Growth from 0: nothing, then an impulse; infinity times 0 may not come of it."""
        a, b = torch.full((1, 400, 1), 3.0, device=device), torch.zeros(1, 400, 1, device=device)
        b[:, 350] = 1
        h = self.stage.scan(a, b)
        assert torch.equal(h[:, :350], b[:, :350])
        expected = 3.0 ** torch.arange(50, device=device).double()
        torch.testing.assert_close(h[0, 350:, 0].double(), expected, rtol=1e-6, atol=0)

    def test_one_result_for_one_problem(self, device):
        arguments = self.arguments((2, 300, 40), device=device)
        one, two = (self.results(list(arguments)) for _ in range(2))
        assert all(torch.equal(x, y) for x, y in zip(one, two, strict=True))

    # ---- broken kernels

    def checks(self) -> None:
        """All sizes that masks are for: of tiles that are whole, and that are not."""
        for sizes in ((1, 5, 3), (2, 70, 33), (1, 1030, 2), (2, 0, 3)):
            for way in WAYS:
                a, b, h0 = self.arguments(sizes, **{"time_dim": 1, **way})
                self.compare([a, b, h0], 1e-5, **way)
        self.test_a_product_that_overflows_before_there_is_a_state("cpu")

    @pytest.mark.parametrize("broken", BROKEN)
    def test_a_broken_kernel_is_found_out(self, broken, tmp_path):
        old, new = BROKEN[broken]
        source = self.stage.source.read_text(encoding="utf-8")
        assert source.count(old) == 1
        (tmp_path / "kernel.py").write_text(source.replace(old, new), encoding="utf-8")
        with self.stage.kernels.replaced(interpreted=tmp_path / "kernel.py"):
            with pytest.raises((AssertionError, stages.KernelFault)):
                self.checks()

    def test_the_kernel_as_it_stands_is_not(self):
        self.checks()

    def test_a_place_outside_every_tensor_is_named(self, tmp_path):
        source = self.stage.source.read_text(encoding="utf-8")
        line = next(i for i, text in enumerate(source.splitlines(), 1) if "tl.store(h_places" in text)
        (tmp_path / "kernel.py").write_text(source.replace("h_tile, inside)", "h_tile)"), encoding="utf-8")
        with self.stage.kernels.replaced(interpreted=tmp_path / "kernel.py"):
            words = rf"program \(2, 0, 0\) reaches [\d,]+ words outside every tensor\n  kernel.py:{line}  tl.store"
            with pytest.raises(stages.KernelFault, match=words):
                self.stage.scan(*self.arguments((2, 70, 35)))


# ---- Triton itself


def test_the_interpreter_leaves_triton_as_it_was():
    import triton.language as tl
    from triton.runtime import interpreter

    def state():
        names = ("load", "associative_scan", "reduce", "range")
        places = [interpreter.ScanOps, interpreter.ReduceOps, interpreter.InterpreterBuilder, tl.tensor]
        return [getattr(tl, name) for name in names] + [dict(vars(place)) for place in places]

    stage, x = stages.load("46"), torch.ones(1, 5, 3)
    before = state()
    stage.scan(x, x)
    assert state() == before
    with pytest.raises(RuntimeError, match="Cannot call @triton.jit'd outside"):
        stage.kernels.module("compiled").combine(1, 1, 1, 1)


@pytest.mark.parametrize("architecture", ["8.0", "9.0"])
def test_it_compiles_beside_the_interpreter_without_a_gpu(architecture):
    """And asks for 16 bytes at a time, ahead of time, where words lie side by side."""
    stage = stages.load("46")
    for time_dim in (1, 2):
        arguments = stage.family.make(stage.sizes((1, 1024, 64)), torch.float32, time_dim=time_dim)
        call = partial(stage.scan, *arguments, time_dim=time_dim)
        call()
        (kernel,) = triton_kernels.compiled_for(architecture, call)
        ptx = kernel.asm["ptx"]
        assert "st.global.v4" in ptx and "cp.async.cg.shared.global" in ptx
        assert "shfl.sync" in ptx and "bar.sync" in ptx
        assert "0 bytes spill stores" in triton_kernels.assemble(kernel)


def test_the_build_check_compiles_it(monkeypatch):
    stage = stages.load("46")
    monkeypatch.setattr(stage, "dtypes", (torch.float16,))
    found = check_cuda.compile_kernels(stage.name, ["9.0a"])
    assert [k.name for k in found[:2]] == ["scan_tiles<float16>", "scan_tiles_backward<float16>"]
    assert len(found) == 2 * len(stage.options())
    assert {(k.architecture, k.spill, k.stack) for k in found} == {("sm_90a", 0, 0)}
    assert all(k.registers > 0 and k.complaints(stage.registers, stage.spills) == [] for k in found)


def test_a_setting_of_the_user_changes_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    path = stages.load("46").source
    kinds = [type(triton_kernels.load(variant, path, "x").combine).__name__ for variant in triton_kernels.VARIANTS]
    assert kinds == ["InterpretedFunction", "JITFunction"]


def test_without_triton_it_is_said_how_to_get_it(monkeypatch):
    stage = stages.load("46")
    monkeypatch.setattr(stage.kernels, "_modules", {})
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(stages.NotAvailable, match="is written in Triton, which is not installed: pip install triton"):
        stage.scan(torch.ones(1, 2, 3), torch.ones(1, 2, 3))


def test_there_is_no_xray():
    stage, x = stages.load("46"), torch.ones(1, 2, 3)
    with pytest.raises(stages.NotAvailable, match="46_scan_triton has no x-ray: its kernel is written in Triton"):
        stage.xray(x, x)
    with xray.recording(), pytest.raises(stages.NotAvailable, match="46_scan_triton has no x-ray"):
        stage.scan(x, x)
    assert kernels.recorder is None
