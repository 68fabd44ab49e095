"""Stage 40, scan_sequential."""

import pytest
from scan_cases import ScanCases

import stages


class TestScanSequential(ScanCases):
    stage = stages.load("40")

    @pytest.mark.parametrize("state", [True, False])
    def test_every_word_moves_once(self, state):
        """With channels last. With time last, each in a sector of its own, eight times as much."""
        words = 3 * 2 * 64 * 96 + (2 * 96 if state else 0)
        for time_dim, sectors in ((1, words / 8), (2, words if not state else words - 7 / 8 * 2 * 96)):
            a, b, h0 = self.arguments((2, 64, 96), time_dim=time_dim)
            counts = self.stage.xray(a, b, h0 if state else None, time_dim=time_dim).counts()
            assert counts.load_sectors + counts.store_sectors == sectors
