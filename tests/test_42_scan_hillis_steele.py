"""Stage 42, scan_hillis_steele."""

from scan_cases import ScanCases

import stages


class TestScanHillisSteele(ScanCases):
    stage = stages.load("42")
    joins = True
