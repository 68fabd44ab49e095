"""Stage 42, scan_hillis_steele."""

from scan_cases import ScanCases

import stages
from stages.toolkit import lab


class TestScanHillisSteele(ScanCases):
    stage = stages.load("42")
    joins = True

    def test_combines_are_those_of_the_header(self):
        """Each reads the a of its older map from a_chunk, and nothing else does."""
        for rows, chunks in ((1, 1), (3, 2)):
            report = self.stage.xray(*self.arguments((1, 128 * chunks, rows)), **self.options()[0])
            assert lab.lanes(report, "a_chunk", "older{") == rows * chunks * (128 * 7 - 127)
            assert report.counts().barriers == rows * chunks * 8
