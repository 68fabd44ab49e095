"""Stage 41, scan_pipelined."""

import pytest
from scan_cases import WAYS, ScanCases, gradients, same_but_fused

import stages
from stages.families import FLOATING
from stages.toolkit import xray


class TestScanPipelined(ScanCases):
    stage = stages.load("41")

    @pytest.mark.parametrize("dtype", FLOATING, ids=str)
    @pytest.mark.parametrize("sizes", [(2, 70, 40), (2, 70, 35), (3, 64, 64), (1, 1, 1)], ids=str)
    def test_the_walk_is_that_of_stage_40(self, sizes, dtype, device):
        """The same operations in the same order: equal bit for bit."""
        before = stages.load("40")
        for way in WAYS:
            arguments = self.arguments(sizes, dtype, device, **{"time_dim": 1, **way})
            g = self.random_grad(arguments)
            one, two = (gradients(stage.scan, arguments, g, **way) for stage in (before, self.stage))
            assert all(same_but_fused(x, y) for x, y in zip(one, two, strict=True))

    def test_requests_are_on_their_way_while_a_tile_is_walked(self):
        """After the store of a tile's first rows, a and b have been asked for up to four tiles further on."""
        with xray.recording(trace=1 << 16, trace_block=0) as report:
            self.stage.scan(*self.arguments((1, 256, 64)))
        asked, ahead = 0, []
        for access in report.trace:
            if access.space == "global" and access.name in ("a", "b", "h"):
                step = max(access.offsets) // (4 * 64)
                if access.name == "h":
                    ahead.append(asked - step)
                else:
                    asked = max(asked, step)
        assert set(ahead[: 4 * (16 - 4)]) == {64, 68, 72, 76}  # tiles of 16 steps, 4 rows a request
        assert ahead[-1] == 0

    def test_words_that_lie_apart_are_copied_one_by_one(self):
        """Where 16 bytes do not lie together: rows of another length, time last, a gradient of stride 0."""
        for sizes, way, size in (((2, 32, 64), {}, 16), ((2, 32, 63), {}, 4), ((2, 32, 64), {"time_dim": 2}, 4)):
            arguments = self.arguments(sizes, requires_grad=True, **{"time_dim": 1, **way})
            with xray.recording() as report:
                h = self.stage.scan(*arguments, **way)
            assert {site.size for site in report.sites if site.op == "copy"} == {size}
            with xray.recording() as report:
                h.sum().backward()
            assert {site.size for site in report.sites if site.op == "copy"} == {4}
