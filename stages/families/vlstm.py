"""The vLSTM, which is the mLSTM of xLSTM in its parallel form: attention whose weights are products of gates.

    D[t, j] = log sigmoid(f_{j+1}) + .. + log sigmoid(f_t) + i_j     for j <= t, -infinity for j > t
    u = s (Q K^T) exp(D)
    H = u V / max(|sum_j u|, 1)

**Exponents that do not overflow.** With any c_t, u = exp(c) C for C = s (Q K^T) exp(D - c), and H = C V / max(|l|,
exp(-c)) for l = sum_j C: c leaves the result as it is. The kernels take c = m, the maximum of the row; the reference
takes max(m, 0), so that exp(-c) is at most 1. `eps` is added to the normaliser of C with c = m, H = C V / (n + eps),
and so, in terms of u, H = u V / (max(|sum_j u|, 1) + eps exp(m)): with it, and only with it, H depends on m.

**Sums, not differences.** D is often computed as a difference of two long cumulative sums of log sigmoid(f). That
loses digits as T grows, and a gate that resets, f = -infinity, gives infinity - infinity. Here, and in the kernels, D
is a sum of the gates that it is made of.

**Gradients by the same kernel.** Write N for the divisor of a row, max(|sum_j u|, 1) + eps exp(m), and M = log N. With
the gradient G of H and b_t = -(G_t . H_t) sign(sum_j u) where |sum_j u| > 1, else 0,

    H  =    (Q K^T * exp(D - M)) V  s
    dQ = s ((G V^T + b) * exp(D - M)) K
    dK = s ((V G^T + b^T) * exp(D - M)^T) Q
    dV = s  (K Q^T * exp(D - M)^T) G

are products of one form, a causal one and, for dK and dV, its transpose: no step needs Q K^T and G V^T at once, no two
blocks add to the same number, and results are equal bit for bit on every run. `normalizer_gradient=False` is b = 0.

The gates get their gradients from E = dD = (Q K^T) * (G V^T + b) * exp(D - M) s, and of E only the sums of its rows and
columns: those are q_t . dq_t and k_j . dk_j, which are there already. di_j = k_j . dk_j, and df_k = sigmoid(-f_k) times
the sum over t >= k of q_t . dq_t - k_t . dk_t. E[t, t] is in both, and left out of both: where gates are closed it is
larger than all others by far, and would take their digits with it. With eps > 0 the maximum adds x_t = -(G_t . H_t) eps
exp(m_t - M_t) to the sum of row t and to that of the column in which the maximum is; at a tie one of them gets all.

xLSTM: Beck et al., 2024, https://arxiv.org/abs/2405.04517. The parallel form is its appendix A.3.
"""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from stages.families import (
    FLOATING,
    Choice,
    Work,
    accumulator,
    block_memory,
    check_fellow,
    check_tensor,
    listing,
    random,
    shape,
    unit_roundoff,
)
from stages.toolkit import operator
from stages.toolkit.kernels import Kernels

NAME = "vlstm"
CALL = "vlstm(q, k, v, i, f, *, eps=0.0, normalizer_gradient=True, input_gate='exp', normalize=True)"
SIZES = ("B", "N", "T", "Dk", "Dv")
PROBLEMS = (
    (1, 2, 128, 64, 64),
    (2, 3, 70, 33, 65),
    (1, 1, 200, 5, 130),
    (1, 1, 100, 12, 20),  # rows of 16-byte groups, and no whole tile
    (1, 1, 1, 1, 1),
    (1, 2, 3, 0, 5),
    (2, 1, 0, 4, 4),
)
XRAY = (1, 2, 128, 64, 64)
BENCH = {"cpu": ((1, 2, 256, 64, 64),), "cuda": ((4, 16, 2048, 64, 64), (4, 16, 2048, 128, 128))}
SWEEP = {
    "cpu": tuple((1, 1, 1 << n, 64, 64) for n in range(5, 10)),
    "cuda": tuple((4, 16, 1 << n, 64, 64) for n in range(8, 14)),
}
DTYPES = FLOATING
INCUMBENT, COMPILED = "torch.compile(formula)", True  # in torch, T x T matrices and all

INPUT_GATES = ("exp", "sigmoid")
EXP, SIGMOID, BARE = range(3)  # the input gates, as the kernels number them; BARE: a sigmoid, and no normaliser


def launch(kernels: Kernels, *arguments: object) -> None:
    """The launcher of a stage's module that has the function's name: `vlstm`."""
    kernels.launch(NAME, arguments[0].device, *arguments)


def define(
    name: str, kernels: Kernels, *, launch: Callable = launch, launch_backward: Callable | None = None
) -> Callable[..., Tensor]:
    """Register the operator of a stage and return its public function.

    Without a backward the operator gives H. With one it gives the rows too, [2, B, N, T] in the type of the sums: l and
    m of each row, which the backward takes back; and `stages::<name>_backward` is an operator as well.

    Args:
        launch: How the forward is launched, `launch(kernels, q, k, v, i, f, h, scale, eps, gate)`, with `rows` after
            h where there is a backward.
        launch_backward: How the backward is launched, `launch_backward(kernels, dh, q, k, v, i, f, h, rows, dq, dk, dv,
            di, df, scale, eps, gate, normalizer_gradient)`.
    """
    if launch_backward:
        compute = with_backward(name, kernels, launch, launch_backward)
    else:
        compute = forward_only(name, kernels, launch)

    def vlstm(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        i: Tensor,
        f: Tensor,
        *,
        eps: float = 0.0,
        normalizer_gradient: bool = True,
        input_gate: str = "exp",
        normalize: bool = True,
        initial_state: object = None,
        return_last_state: bool = False,
    ) -> Tensor:
        """The vLSTM (the mLSTM of xLSTM in its parallel form) of each batch and head, summed in float32.

        H[t] is the sum over j <= t of u[t, j] v[j], over max(|sum of u[t, j] over j|, 1), with u[t, j] = q[t] . k[j]
        / sqrt(Dk) times sigmoid(f[j + 1]) .. sigmoid(f[t]) times exp(i[j]). float64 is summed in float64.

        Args:
            q: [B, N, T, Dk], float64, float32, float16 or bfloat16, on a CPU or a CUDA device. Any strides; nothing is
                copied.
            k: [B, N, T, Dk], of the same dtype and on the same device.
            v: [B, N, T, Dv], likewise.
            i: [B, N, T], likewise: the input gate before its exponential. -infinity hides the position.
            f: [B, N, T], likewise: the forget gate before its sigmoid. -infinity forgets all that came before.
            eps: Added to the normaliser of the weights as they are once the largest gate product of a row is 1:
                H = u V / (max(|sum u|, 1) + eps exp(m)), m the largest D of the row; with a sigmoid m is 0. At least 0.
            normalizer_gradient: The true gradient. False: the normaliser counts as a constant in the backward, which is
                what some public kernels compute; right only where a norm over the head follows.
            input_gate: "exp", or "sigmoid", which has sigmoid(i) in place of exp(i).
            normalize: False with a sigmoid: H = u V, not divided by anything; eps then has no effect.
            initial_state, return_last_state: Stage 36 knows them.

        Returns:
            H, [B, N, T, Dv], contiguous, of the same dtype; zeros where Dk is 0 or no gate lets anything through. NaN
            propagates, to earlier rows of the same tile, too, if it is in v.

        Raises:
            TypeError: A tensor is none, is not dense, or has another dtype than those above or than its fellows, or an
                option is of the wrong type.
            ValueError: A tensor has another number of dimensions, the sizes do not fit each other, the devices differ,
                eps is negative or not finite, or input_gate is unknown, or is "exp" with normalize=False.
            NotImplementedError: The stage leaves out what is asked for. The text names the stage that has it.
            KernelFault: The CPU device caught the kernel doing what it may not.

        Example:
            >>> import stages, torch
            >>> q, k, v = (torch.tensor(x)[None, None, :, None] for x in ([1.0, 1.0], [1.0, 4.0], [8.0, 16.0]))
            >>> gate = torch.tensor([[[0.0, 0.0]]])
            >>> stages.load("vlstm_forward").vlstm(q, k, v, gate, gate).flatten()  # then (8 / 2 + 4 * 16) / (1 / 2 + 4)
            tensor([ 8.0000, 15.1111])
        """
        check(q, k, v, i, f, eps, normalizer_gradient, input_gate, normalize)
        if initial_state is not None or return_last_state:
            option = "return_last_state=True" if initial_state is None else "initial_state"
            raise NotImplementedError(f"{CALL}: {name} has no {option}; stage 36 has it: stages.load('36').vlstm")
        return compute(q, k, v, i, f, eps, gate_number(input_gate, normalize), normalizer_gradient)

    return vlstm


TENSORS = "Tensor q, Tensor k, Tensor v, Tensor i, Tensor f"
OPTIONS = "float eps=0.0, int gate=0, bool normalizer_gradient=True"


def forward_only(name: str, kernels: Kernels, launch: Callable) -> Callable[..., Tensor]:
    """Register an operator that gives H, and whose backward says where there is one."""

    def run(q, k, v, i, f, eps=0.0, gate=EXP, normalizer_gradient=True) -> Tensor:
        h = operator.empty(v.shape, like=q)
        launch(kernels, q, k, v, i, f, h, scale(q), eps, gate)
        return h

    def fake(q, k, v, i, f, eps=0.0, gate=EXP, normalizer_gradient=True) -> Tensor:
        return operator.empty(v.shape, like=q)

    def backward(ctx, grad: Tensor):
        raise NotImplementedError(f"stages::{name} has no backward; stage 32 has one: stages.load('32').vlstm")

    return operator.register(name, f"({TENSORS}, {OPTIONS}) -> Tensor", run, fake=fake, backward=backward)


def with_backward(name: str, kernels: Kernels, launch: Callable, launch_backward: Callable) -> Callable[..., Tensor]:
    """Register an operator that gives H and the rows, and its backward as another operator."""

    def run(q, k, v, i, f, eps=0.0, gate=EXP, normalizer_gradient=True) -> tuple[Tensor, Tensor]:
        h, rows = fake(q, k, v, i, f)
        launch(kernels, q, k, v, i, f, h, rows, scale(q), eps, gate)
        return h, rows

    def fake(q, k, v, i, f, eps=0.0, gate=EXP, normalizer_gradient=True) -> tuple[Tensor, Tensor]:
        sums = accumulator(q.dtype)
        dtype = None if sums is q.dtype else sums  # to name it costs time
        return operator.empty(v.shape, like=q), operator.empty((2, *i.shape), like=q, dtype=dtype)

    def setup_context(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        h, rows = output
        *tensors, ctx.eps, ctx.gate, ctx.normalizer_gradient = inputs
        ctx.save_for_backward(*tensors, h, rows)
        ctx.mark_non_differentiable(rows)
        ctx.set_materialize_grads(False)

    def backward(ctx, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 8
        grads = compute_backward(grad, *ctx.saved_tensors, ctx.eps, ctx.gate, ctx.normalizer_gradient)
        return *grads, None, None, None

    def run_backward(grad, q, k, v, i, f, h, rows, eps, gate, normalizer_gradient) -> tuple[Tensor, ...]:
        grads = fake_backward(grad, q, k, v, i, f)
        launch_backward(
            kernels, grad, q, k, v, i, f, h, rows, *grads, scale(q), eps, gate, normalizer_gradient and gate != BARE
        )
        return grads

    def fake_backward(grad, q, k, v, i, f, *_) -> tuple[Tensor, ...]:
        return tuple(operator.empty(x.shape, like=x) for x in (q, k, v, i, f))

    def twice(ctx, *grads: Tensor):
        raise NotImplementedError(f"stages::{name} has no second derivatives: its backward is not differentiable")

    compute_backward = operator.register(
        f"{name}_backward",
        f"(Tensor grad, {TENSORS}, Tensor h, Tensor rows, float eps, int gate, bool normalizer_gradient)"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        run_backward,
        fake=fake_backward,
        backward=twice,
    )
    compute = operator.register(
        name,
        f"({TENSORS}, {OPTIONS}) -> (Tensor h, Tensor rows)",
        run,
        fake=fake,
        setup_context=setup_context,
        backward=backward,
    )
    return lambda *arguments: compute(*arguments)[0]


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    eps: float = 0.0,
    normalizer_gradient: bool = True,
    input_gate: str = "exp",
    normalize: bool = True,
) -> None:
    """Raise TypeError or ValueError, naming the argument, unless the vLSTM of these makes sense."""
    check_tensor(CALL, "q", q, rank=4)
    check_fellow(CALL, "k", k, "q", q, 4)
    check_fellow(CALL, "v", v, "q", q, 4)
    check_fellow(CALL, "i", i, "q", q, 3)
    check_fellow(CALL, "f", f, "q", q, 3)
    whole = q.shape
    rows = whole[:3]
    if k.shape != whole:
        raise ValueError(
            f"{CALL}: k is {shape(k)} and q is {shape(q)}; allowed: the same shape for both, (B, N, T, Dk)"
        )
    if v.shape[:3] != rows:
        raise ValueError(f"{CALL}: v is {shape(v)} and q is {shape(q)}; allowed: the same B, N and T in both")
    for name, value in (("i", i), ("f", f)):
        if value.shape != rows:
            raise ValueError(f"{CALL}: {name} is {shape(value)} and q is {shape(q)}; allowed: (B, N, T), as q has them")
    if not isinstance(eps, (float, int, torch.SymFloat)) or isinstance(eps, bool):
        raise TypeError(f"{CALL}: eps must be a real number (float or int), got {type(eps).__name__}")
    if not 0 <= eps < float("inf"):
        raise ValueError(f"{CALL}: eps is {eps}; allowed: 0 or more, and finite")
    for name, value in (("normalizer_gradient", normalizer_gradient), ("normalize", normalize)):
        if not isinstance(value, bool):
            raise TypeError(f"{CALL}: {name} must be True or False, got {type(value).__name__}")
    if input_gate not in INPUT_GATES:
        raise ValueError(f"{CALL}: input_gate is {input_gate!r}; allowed: {listing([repr(g) for g in INPUT_GATES])}")
    if input_gate == "exp" and not normalize:
        raise ValueError(
            f"{CALL}: normalize is False with input_gate='exp', whose weights have no bound; allowed: True, or False "
            "with input_gate='sigmoid'"
        )


FASTEST = ("31_vlstm_gate_sums", "32_vlstm_backward", "33_vlstm_tuned")
TUNED_MEMORY = 110 << 10  # bytes of shared memory of a block of stage 33, at most


def choose(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    *,
    eps: float = 0.0,
    normalizer_gradient: bool = True,
    input_gate: str = "exp",
    normalize: bool = True,
    initial_state: object = None,
    return_last_state: bool = False,
) -> Choice:
    """By the card: stage 33 is twice as fast as the others, but its blocks are large."""
    check(q, k, v, i, f, eps, normalizer_gradient, input_gate, normalize)
    if block_memory(q.device) >= TUNED_MEMORY:
        return Choice("33_vlstm_tuned", "products at the rate of a matmul")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, i, f)):
        return Choice("32_vlstm_backward", "a block has too little shared memory on this card for stage 33")
    return Choice("31_vlstm_gate_sums", "as for stage 32, on this card, and no gradients are asked for")


def gate_number(input_gate: str, normalize: bool) -> int:
    """EXP, SIGMOID or BARE."""
    return EXP if input_gate == "exp" else SIGMOID if normalize else BARE


def scale(q: Tensor) -> float:
    """1 / sqrt(Dk)."""
    return max(q.shape[3], 1) ** -0.5


def make(
    sizes: Mapping[str, int], dtype: torch.dtype, device: str | torch.device = "cpu", seed: int = 0, **options: object
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Normal q, k, v and i, and f around 3: a position is half forgotten after some 14 others."""
    generator = torch.Generator(device).manual_seed(seed)
    rows = tuple(sizes[name] for name in ("B", "N", "T"))
    q, k, v = (random((*rows, sizes[width]), dtype, generator) for width in ("Dk", "Dk", "Dv"))
    i, f = (random(rows, dtype, generator) for _ in "if")
    return q, k, v, i, f + 3


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    *,
    eps: float = 0.0,
    normalizer_gradient: bool = True,
    input_gate: str = "exp",
    normalize: bool = True,
) -> Tensor:
    """H in float64. Autograd through it gives the gradients, those through the maximum of a row included."""
    q, k, v, i, f = (x.double() for x in (q, k, v, i, f))
    return formula(q, k, v, i, f, eps, normalizer_gradient, gate_number(input_gate, normalize))


def formula(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, eps: float, normalizer_gradient: bool, gate: int
) -> Tensor:
    """The formula in torch: gates and sums over weights in float32 at least, products in the tensors' own type."""
    i, f = (x.to(accumulator(x.dtype)) for x in (i, f))
    exponents = log_weights(i if gate == EXP else F.logsigmoid(i), f)
    if gate == EXP and q.shape[2]:
        m = exponents.amax(3)
        c = m.detach().clamp(min=0)
    else:
        m = c = torch.zeros_like(i)
    weights = scale(q) * (q @ k.mT) * (exponents - c[..., None]).exp()
    output = weights.to(v.dtype) @ v
    if gate == BARE:
        return output
    total, one = weights.sum(3).abs(), (-c).exp().clamp(min=torch.finfo(c.dtype).tiny)  # 0 / 0 would be NaN
    n = torch.where(total > one, total, one)
    if eps:
        n = n + eps * (m - c).exp()
    if not normalizer_gradient:
        n = n.detach()
    return output / n[..., None].to(output.dtype)


def log_weights(i: Tensor, f: Tensor) -> Tensor:
    """D, [B, N, T, T]: i_j plus the sum of log sigmoid(f_r) over j < r <= t; -infinity for j > t."""
    seq = f.shape[2]
    ones = torch.ones(seq, seq, dtype=torch.bool, device=f.device)
    steps = F.logsigmoid(f)[..., None].where(ones.tril(-1), 0)  # [r, j]: what the step to r does to position j
    return (steps.cumsum(2) + i[..., None, :]).masked_fill(ones.triu(1), -torch.inf)


def tolerance(sizes: Mapping[str, int], dtype: torch.dtype, **options: object) -> dict[str, float]:
    """How far each result may be from the truth, r = |x - ref| / |ref|."""
    finer = unit_roundoff(torch.float64) / unit_roundoff(torch.float32)
    allowed = {
        torch.float64: 1e-5 * finer,
        torch.float32: 1e-5,
        torch.float16: 1.5e-3,
        torch.bfloat16: 1e-2,
    }[dtype]
    return dict.fromkeys(("output", "q", "k", "v", "i", "f"), allowed)


def incumbent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    *,
    eps: float = 0.0,
    normalizer_gradient: bool = True,
    input_gate: str = "exp",
    normalize: bool = True,
) -> Tensor:
    return formula(q, k, v, i, f, eps, normalizer_gradient, gate_number(input_gate, normalize))


def work(sizes: Mapping[str, int], itemsize: int, **options: object) -> Work:
    """A multiplication and an addition for Dk + Dv terms of each pair of a row and a key; each tensor moved once."""
    batch, heads, seq, dk, dv = (sizes[name] for name in SIZES)
    pairs = seq * (seq + 1) // 2
    return Work(2 * batch * heads * pairs * (dk + dv), itemsize * batch * heads * seq * 2 * (dk + dv + 1))
