"""Stage 15, matmul_tensor."""

from matmul_cases import MatmulCases

import stages


class TestMatmulTensor(MatmulCases):
    stage = stages.load("15")
