"""Stage 44, scan_warp."""

import pytest
import torch
from scan_cases import WAYS, ScanCases, truth_of

import stages
from stages.families import FLOATING
from stages.toolkit import xray
from stages.toolkit.verify import relative_error


class TestScanWarp(ScanCases):
    stage = stages.load("44")

    @pytest.mark.parametrize("dtype", FLOATING, ids=str)
    @pytest.mark.parametrize("seq", [255, 256, 1000, 2000, 4104, 5000])
    def test_chunks(self, seq, dtype, device):
        """Some and several, whole and not; rows of whole groups of 16 bytes and others.

        With a below 1: near it, thousands of terms may cancel in dh0, which then has fewer digits than they.
        """
        allowed = self.stage.family.tolerance({}, dtype)["output"]
        for way in WAYS:
            arguments = self.arguments((1, seq, 3), dtype, device, **{"time_dim": 1, **way})
            arguments[0].clamp_(-0.99, 0.99)
            self.compare(list(arguments), allowed, **way)

    @pytest.mark.parametrize("way", WAYS, ids=str)
    def test_a_row_is_the_same_from_wherever_it_is_loaded(self, way, device):
        """Words that lie apart take another way into the registers, to the same threads: equal bit for bit."""
        time_dim = way.get("time_dim", 1)
        arguments = self.arguments((2, 2064, 3), device=device, **{"time_dim": 1, **way})
        other = [x.mT.contiguous() if x.dim() == 3 else x for x in arguments]
        g = self.random_grad(arguments)
        one = self.results(list(arguments), g, **way)
        two = self.results(other, g.mT.contiguous(), **{**way, "time_dim": 3 - time_dim})
        assert all(torch.equal(x, y.mT if x.dim() == 3 else y) for x, y in zip(one, two, strict=True))

    def test_steps_side_by_side_are_moved_16_bytes_at_a_time(self):
        """Whichever way time runs; and singly if a row is no whole number of groups, or one tensor lies otherwise."""
        for reverse in (False, True):
            for seq, size in ((2000, 16), (2001, 4)):
                arguments = self.arguments((1, seq, 2), requires_grad=True, time_dim=2)
                with xray.recording() as report:
                    h = self.stage.scan(*arguments, time_dim=2, reverse=reverse)
                    torch.autograd.grad(h, arguments, self.random_grad(arguments))
                tensors = ("a", "b", "g", "h", "da", "db")
                sites = [site for site in report.sites if site.space == "global" and site.name in tensors]
                widths = {site.size for site in sites if site.requests > 2 * 15}  # but for words after a warp's
                assert widths == {size}
        a, b, h0 = self.arguments((1, 2000, 2), time_dim=2)
        apart = b.mT.contiguous().mT
        assert torch.equal(self.stage.scan(a, apart, h0, time_dim=2), self.stage.scan(a, b, h0, time_dim=2))

    def test_the_next_chunk_is_on_its_way(self):
        """Before the first store of a chunk the words of the next one have been asked for."""
        with xray.recording(trace=1 << 12, trace_block=0) as report:
            self.stage.scan(*self.arguments((1, 8192, 1), time_dim=2), time_dim=2)
        asked, ahead = 0, set()
        for access in report.trace:
            if access.space == "global" and access.name in ("a", "b", "h"):
                step = max(access.offsets) // 4 // 1024
                if access.name == "h":
                    ahead.add(asked - step)
                else:
                    asked = max(asked, step)
        assert ahead == {1, 0} or ahead == {1, 2, 0}

    def test_products_near_one_lose_nothing(self, device):
        """1 - x, x tiny and always of the same sign: what rounding takes from a product is of the same sign, too."""
        seq = 1 << 15
        a = 1 - 2e-5 * torch.rand(1, seq, 1, generator=torch.Generator().manual_seed(0))
        b, g = (torch.randn(a.shape, generator=torch.Generator().manual_seed(n)) for n in (1, 2))
        a, b, g = (x.to(device) for x in (a, b, g))  # the same numbers on each device
        arguments = [a, b, None]
        for result, truth in zip(self.results(arguments, g), truth_of(arguments, g), strict=True):
            assert relative_error(result, truth) <= 3e-6

    def test_a_product_that_overflows_before_there_is_a_state(self, device):
        """Growth from 0: nothing, then an impulse; infinity times 0 may not come of it."""
        a, b = torch.full((1, 400, 1), 3.0, device=device), torch.zeros(1, 400, 1, device=device)
        b[:, 350] = 1
        h = self.stage.scan(a, b)
        assert torch.equal(h[:, :350], b[:, :350])
        torch.testing.assert_close(
            h[0, 350:, 0].double(), 3.0 ** torch.arange(50, device=device).double(), rtol=1e-6, atol=0
        )
