"""Stage 10, matmul_naive."""

from matmul_cases import MatmulCases

import stages


class TestMatmulNaive(MatmulCases):
    stage = stages.load("10")
