"""Stage 11, matmul_coalesced."""

from matmul_cases import MatmulCases

import stages


class TestMatmulCoalesced(MatmulCases):
    stage = stages.load("11")
