"""Stage 43, scan_blelloch."""

import torch
from scan_cases import WAYS, ScanCases, gradients

import stages
from stages.toolkit import diff, lab


class TestScanBlelloch(ScanCases):
    stage = stages.load("43")
    joins = True

    def test_combines_are_those_of_the_header(self):
        """Each reads the a of its older map from a_chunk, at a line of its own."""
        for rows, chunks in ((1, 1), (3, 2)):
            report = self.stage.xray(*self.arguments((1, 128 * chunks, rows)), **self.options()[0])
            assert lab.lanes(report, "a_chunk", "older{") == rows * chunks * (126 + 127)
            assert report.counts().barriers == rows * chunks * 15

    def test_it_differs_from_stage_42_in_the_scan_alone(self):
        codes = [diff.code(stage) for stage in (stages.load("42"), self.stage)]
        outside = []
        for code in codes:
            end = next(i for i, line in enumerate(code) if line.startswith("// grid"))
            start = next(i for i, line in enumerate(code) if line.startswith("constexpr int CHUNK"))
            outside.append(code[: start + 1] + code[end:])
        assert outside[0] == outside[1]

    def test_it_gives_what_stage_42_gives(self, device):
        """But for rounding: neighbours are joined in another grouping."""
        before = stages.load("42")
        for way in WAYS:
            arguments = self.arguments((2, 300, 5), torch.float64, device, **{"time_dim": 1, **way})
            g = self.random_grad(arguments)
            one, two = (gradients(stage.scan, arguments, g, **way) for stage in (before, self.stage))
            for x, y in zip(one, two, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
