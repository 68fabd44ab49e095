"""Stage 45, scan_lookback."""

from importlib import import_module

import pytest
import torch
from scan_cases import WAYS, ScanCases, gradients

import stages
from stages.families import FLOATING
from stages.toolkit import build, operator, xray
from stages.toolkit.errors import KernelFault
from stages.toolkit.verify import relative_error

LONG = [((1, 4500, 70), {}), ((1, 20000, 2), {"time_dim": 2}), ((2, 4999, 3), {"time_dim": 2, "reverse": True})]
ORDER = {  # what may be left out of the order between blocks, and what to write in its place
    "the release": ("store_release(&flags[tile], flag)", "flags[tile] = flag"),
    "the acquire": ("load_acquire(&flags[other])", "*(volatile const unsigned*)&flags[other]"),
    "the barrier before the release": ("__syncwarp();  // all lanes have written", ""),
    "the barrier after the acquire": ("__syncwarp();  // what a lane has seen, all lanes have seen", ""),
    "the wait": ("flag != MAP", "flag == STATE || other < 0"),
}

module = import_module("stages.45_scan_lookback.stage")
cost, backward_cost = module.cost, module.backward_cost


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
            told = sum(site.requests for site in report.sites if site.op == "load" and site.name == "told")
            looked.add(told)
            seen = seen or results
            assert all(torch.equal(x, y) for x, y in zip(results, seen, strict=True))
        assert len(looked) > 1

    def test_counts_of_rows_whose_tiles_have_several_warps(self):
        for seq, dtype in ((16384, torch.float32), (16384, torch.float64), (32768, torch.float16)):
            arguments = self.arguments((2, seq, 3), dtype, time_dim=2, requires_grad=True)
            with xray.recording() as report:
                h = self.stage.scan(*arguments, time_dim=2)
            assert max(launch.block[0] for launch in report.launches) > 32
            sizes = {"B": 2, "T": seq, "D": 3, "itemsize": dtype.itemsize, "time_dim": 2}
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
        a, b, h0 = self.arguments((1, 200, 40))
        h, words = torch.empty_like(a), torch.zeros(1000)
        for told in ((2, 3, 3, 32), (2, 4, 2, 32), (1, 4, 3, 32), (2, 4, 3, 31)):
            with pytest.raises(ValueError, match="scratch memory"):
                self.stage.kernels.launch("scan", a.device, a, b, h0, h, words, torch.empty(told), False)
        with pytest.raises(ValueError, match="scratch memory"):
            self.stage.kernels.launch("scan", a.device, a, b, h0, h, words[:39], torch.empty(2, 4, 3, 32), False)

    @pytest.mark.parametrize("missing", ORDER)
    def test_the_x_ray_tells_when_order_is_missing(self, missing, tmp_path, monkeypatch):
        source = self.stage.source.read_text(encoding="utf-8")
        old, new = ORDER[missing]
        assert source.count(old) == 1
        (tmp_path / "kernel.cu").write_text(source.replace(old, new), encoding="utf-8")
        flags = ("-Og", "-g1", "-DFLOAT_ONLY", f"-I{self.stage.folder}")
        module = build.build_module(tmp_path / "kernel.cu", self.stage.folder / "binding.cpp", "xray", tmp_path, flags)
        monkeypatch.setattr(operator, "empty", operator.poisoned)
        told = []
        with self.stage.kernels.replaced(xray=module):
            for sizes, way in LONG[:2]:
                for schedule in (("forward", 0), ("random", 1), ("random", 2)):
                    arguments = self.arguments(sizes, **{"time_dim": 1, **way})
                    try:
                        with xray.recording(*schedule) as report:
                            self.stage.scan(*arguments, **way)
                        told += [fault.kind for fault in report.faults]
                    except KernelFault as fault:
                        told.append(str(fault))
        assert told

    def test_every_set_of_options_twice_in_a_row(self, device):
        """The ticket begins anew at every call."""
        for way in WAYS:
            arguments = self.arguments(self.odd, device=device, **{"time_dim": 1, **way})
            one, two = (self.results(list(arguments), **way) for _ in range(2))
            assert all(torch.equal(x, y) for x, y in zip(one, two, strict=True))
