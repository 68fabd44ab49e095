"""Stage 45, scan_lookback."""

from importlib import import_module

import pytest
import torch
from scan_cases import WAYS, ScanCases, gradients, same_but_rounded

import stages
from stages.families import FLOATING
from stages.toolkit import build, operator, xray
from stages.toolkit.errors import KernelFault
from stages.toolkit.verify import relative_error

LONG = [((1, 4500, 70), {}), ((1, 20000, 2), {"time_dim": 2}), ((2, 4999, 3), {"time_dim": 2, "reverse": True})]
MANY = ((1, 17000, 33), {})  # more tiles than the CPU device keeps at once
# What may be left out of the order between blocks and warps: the text, another in its place, and where it shows.
MISSING = {
    "the store": (
        "store_relaxed(&words[i], Word{parts.part[i], what})",
        "words[i] = Word{parts.part[i], what}",
        LONG[0],
    ),
    "the load": ("load_relaxed(&words[i])", "words[i]", LONG[0]),
    "the ticket": ("atomicAdd(reinterpret_cast<unsigned*>(words.data), 1u)", "blockIdx.x", MANY),
    "the ticket's barrier": ("__syncthreads();  // the ticket is there", "", LONG[0]),
    "a strip's wait": ("if (known) return;", "return;", LONG[0]),
    "a strip's a": ("what[k] = of_b.what == MAP && of_a.what != MAP ? NOTHING :", "what[k] =", LONG[0]),
    "a strip's barrier": ("__syncthreads();  // the states before the tile are there", "", LONG[0]),
    "a row's wait": ("if (state_at > nothing_at) {", "{", LONG[1]),
    "a row's a": (" what = of_b.what == MAP && of_a.what != MAP ? NOTHING :", " what =", LONG[1]),
    "a row's barrier": ("__syncthreads();  // the state before the tile is there", "", LONG[1]),
}

module = import_module("stages.45_scan_lookback.stage")
cost, backward_cost, cut = module.cost, module.backward_cost, module.cut


class TestScanLookback(ScanCases):
    stage = stages.load("45")

    def test_both_layouts_give_the_same(self, device):
        """But for rounding: a strip is walked by a lane, a row is joined by the lanes of warps."""
        a, b, h0 = self.arguments((3, 700, 35), device=device, time_dim=1)
        g = self.random_grad([a, b])
        one = self.results([a, b, h0], g, time_dim=1)
        two = self.results([a.mT.contiguous(), b.mT.contiguous(), h0], g.mT.contiguous(), time_dim=2)
        for x, y in zip(one, two, strict=True):
            assert relative_error(x, y.mT if x.dim() == 3 else y) < 2e-6

    @pytest.mark.parametrize("dtype", FLOATING, ids=str)
    @pytest.mark.parametrize("sizes, way", LONG, ids=str)
    def test_chains_of_many_tiles(self, sizes, way, dtype, device):
        arguments = self.arguments(sizes, dtype, device, **{"time_dim": 1, **way})
        self.compare(list(arguments), self.stage.family.tolerance({}, dtype)["output"], **way)
        self.compare([*arguments[:2], None], self.stage.family.tolerance({}, dtype)["output"], **way)

    @pytest.mark.parametrize("sizes, way", LONG, ids=str)
    def test_how_far_a_block_looks_back_changes_no_bit(self, sizes, way):
        """In random orders blocks find now the state of the tile before, now maps of many; nothing else is seen."""
        arguments = self.arguments(sizes, **{"time_dim": 1, **way})
        g, seen, looked = self.random_grad(arguments), None, set()
        for schedule, seed in [("forward", 0), ("reverse", 0), *(("random", seed) for seed in range(6))]:
            with xray.recording(schedule, seed) as report:
                results = gradients(self.stage.scan, arguments, g, **way)
            assert [str(fault) for fault in report.faults] == []
            told = sum(site.requests for site in report.sites if site.op == "load" and site.name == "words")
            looked.add(told)
            seen = seen or results
            assert all(torch.equal(x, y) for x, y in zip(results, seen, strict=True))
        assert len(looked) > 1

    def test_counts_of_rows_whose_tiles_have_several_warps(self):
        for size, dtype, warps in (
            ((2, 16384, 3), torch.float32, 2),
            ((2, 16384, 3), torch.float64, 4),
            ((2, 32768, 3), torch.float16, 2),
            ((1, 32768, 1), torch.float64, 8),
        ):
            arguments = self.arguments(size, dtype, time_dim=2, requires_grad=True)
            with xray.recording() as report:
                h = self.stage.scan(*arguments, time_dim=2)
            assert [launch.block[0] for launch in report.launches] == [32 * warps]
            sizes = {**self.stage.sizes(size), "itemsize": dtype.itemsize, "time_dim": 2}
            assert report.counts() == cost(**sizes)
            with xray.recording() as report:
                torch.autograd.grad(h, arguments, self.random_grad(arguments))
            assert report.counts() == backward_cost(**sizes)

    def test_the_same_on_several_cores(self):
        arguments = self.arguments((1, 9000, 2), time_dim=2)
        expected = self.stage.scan(*arguments, time_dim=2)
        for _ in range(5):
            with xray.recording(workers=0) as report:
                h = self.stage.scan(*arguments, time_dim=2)
            assert torch.equal(h, expected) and report.faults == []
            assert torch.equal(self.stage.scan(*arguments, time_dim=2), expected)

    def test_scratch_memory_that_does_not_fit_is_refused(self):
        a, b, h0 = self.arguments((1, 600, 40), time_dim=1)
        h, truth = torch.empty_like(a), self.stage.scan(a, b, h0, time_dim=1)
        strips, rows = 16 + 2 * 3 * 2 * 32, 16 + 40 * 1 * 2
        for words, *how in ((strips, False, 3), (rows, True, 1)):
            scratch = torch.zeros(words, dtype=torch.float64)
            self.stage.kernels.launch("scan", a.device, a, b, h0, h, scratch, *how, False)
            assert relative_error(h, truth) < 1e-6
        refused = (strips - 1, False, 3), (strips, False, 2), (strips, False, 0), (rows - 1, True, 1), (rows, True, 0)
        for words, *how in refused:
            scratch = torch.zeros(words, dtype=torch.float64)
            with pytest.raises(ValueError, match="scratch memory"):
                self.stage.kernels.launch("scan", a.device, a, b, h0, h, scratch, *how, False)

    @pytest.mark.parametrize("missing", MISSING)
    def test_it_shows_when_order_is_missing(self, missing, tmp_path, monkeypatch):
        """As a fault, or as a result that is wrong."""
        source = self.stage.source.read_text(encoding="utf-8")
        old, new, (sizes, way) = MISSING[missing]
        assert source.count(old) == 1
        (tmp_path / "kernel.cu").write_text(source.replace(old, new), encoding="utf-8")
        flags = ("-Og", "-g1", self.stage.type_only, f"-I{self.stage.folder}")
        module = build.build_module(tmp_path / "kernel.cu", self.stage.folder / "binding.cpp", "xray", tmp_path, flags)
        arguments = self.arguments(sizes, **{"time_dim": 1, **way})
        truth = self.stage.scan(*arguments, **way)
        monkeypatch.setattr(operator, "empty", operator.poisoned)
        with self.stage.kernels.replaced(xray=module):
            assert any(
                self.shows(arguments, truth, schedule, way)
                for schedule in (("forward", 0), ("reverse", 0), *(("random", seed) for seed in range(1, 40)))
            )

    def shows(self, arguments, truth, schedule, way) -> bool:
        try:
            with xray.recording(*schedule) as report:
                h = self.stage.scan(*arguments, **way)
        except KernelFault:
            return True
        return bool(report.faults) or not torch.equal(h, truth)

    def test_rows_of_more_tiles_than_a_warp_looks_at(self, device):
        arguments = self.arguments((1, 300_000, 1), device=device, time_dim=2)
        assert cut(1, 300_000, 1, 4, rows=True).tiles > 32
        one, two = (
            gradients(s.scan, arguments, self.random_grad(arguments), time_dim=2)
            for s in (self.stage, stages.load("44"))
        )
        assert all(same_but_rounded(x, y) for x, y in zip(one, two, strict=True))

    def test_every_set_of_options_twice_in_a_row(self, device):
        """The ticket begins anew at every call."""
        for way in WAYS:
            arguments = self.arguments(self.odd, device=device, **{"time_dim": 1, **way})
            one, two = (self.results(list(arguments), **way) for _ in range(2))
            assert all(torch.equal(x, y) for x, y in zip(one, two, strict=True))
