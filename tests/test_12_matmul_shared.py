"""Stage 12, matmul_shared."""

from matmul_cases import MatmulCases

import stages


class TestMatmulShared(MatmulCases):
    stage = stages.load("12")
