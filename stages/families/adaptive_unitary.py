"""The adaptive unitary operator of a state space model: states that turn by angles which the input makes.

    theta_t[i, j] = sum_r x[i, j, r] u_t[r] + x_bias[i, j]
    h_t[i, j] = exp(i theta_t[i, j]) h_(t-1)[i, j] + dt_t[i] silu(u_t[i]) B_j
    y_t[i] = silu(z_t[i]) (Re sum_j C_j h_t[i, j] + D[i] silu(u_t[i]))

B and C are given by what their polar form is made of: B_j = softplus(Re B[j]) exp(i Im B[j]), C_j likewise. No state
grows or fades, |exp(i theta)| = 1: the model remembers all, and what it reads out depends on the angles between.

**A sum instead of a product.** With E_t = exp(i (theta_1 + .. + theta_t)), the states seen from a frame that turns
along, s = conj(E) h, take up conj(E_t) B_j v_t at each step and are otherwise left alone; v = dt silu(u). Rounding
errors add up as in any sum, and no more, provided the phase of E is exact: as a whole number of 2^-32 turns, it is.

**The way back.** For G_t = dy_t silu(z_t), with m = conj(E) lambda, the same holds of lambda_t = conj(C) G_t +
conj(exp(i theta_(t+1))) lambda_(t+1), from the end to the beginning:

    m_t = m_(t+1) + conj(E_t C_j) G_t                   m after the last step: conj(E_T) times the last state's gradient
    dtheta_t = Im(m_t conj(s_(t-1)))                    dh_0 = m_1
    dB_j = sum v_t E_t m_t                              dC_j = sum G_t conj(E_t s_t)
    dv_t = Re sum_j conj(E_t m_t) B_j

of all i, t and batches where there is a sum; then du, dx and dx_bias are products of dtheta. B and C need not be in the
sums over time: with p_t = sum v conj(E) up to t, q_t = sum G conj(E) from t on, and r = sum p_t G E_t,

    s_t = h_0 + B_j p_t                                 m_t = m_T + conj(C_j) q_t
    dB_j = sum conj(p_T) m_T + conj(C_j r)              dC_j = sum q_1 conj(h_0) + conj(B_j r)

p before each TILE of steps is kept by the forward, with the phases; what m is after it, by the backward.

Karuvally et al., Bridging expressivity and scalability with adaptive unitary SSMs, 2025,
https://arxiv.org/abs/2507.05238.
"""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from stages.families import Choice, Work, check_fellow, check_tensor, random, shape, unit_roundoff, widened
from stages.toolkit import operator
from stages.toolkit.kernels import Kernels

NAME = "ssm_adaptive_unitary"
LAUNCHER = "adaptive_unitary"  # of a stage's module
CALL = "ssm_adaptive_unitary(u, dt, x, x_bias, B, C, D, z, state=None)"
ARGUMENTS = ("u", "dt", "x", "x_bias", "B", "C", "D", "z", "state")
OUTPUTS = ("y", "last_state")
SIZES = ("b", "d", "n", "T")
PROBLEMS = (
    (2, 32, 64, 16),
    (2, 5, 7, 37),
    (1, 35, 3, 20),
    (1, 2, 70, 150),
    (1, 3, 33, 1),
    (1, 1, 1, 3),
    (2, 3, 4, 0),
    (2, 3, 0, 5),
    (0, 3, 4, 5),
    (2, 0, 4, 5),
)
XRAY = (1, 4, 64, 128)
BENCH = {"cpu": ((1, 32, 64, 128),), "cuda": ((16, 32, 64, 2048), (16, 32, 64, 16384))}
SWEEP = {
    "cpu": tuple((1, 8, 64, 1 << n) for n in range(5, 10)),
    "cuda": tuple((16, 32, 64, 1 << n) for n in range(7, 15)),
}
DTYPES = (torch.float64, torch.float32)
COMPLEX_OF = {torch.float64: torch.complex128, torch.float32: torch.complex64}
WHOLE = {torch.float64: torch.int64, torch.float32: torch.int32}  # of phases
INCUMBENT, COMPILED = "torch.compile(formula)", True  # in torch, cumulative sums of all states

TILE = 32  # steps of a kernel's tile: what a state is before each of them is kept for the backward
# Sums over time, one for each channel, that the backward has under way if there are so many, and likewise of tiles of
# time: to fill a GPU. The CPU device works on few blocks at a time.
PLACES = {"cpu": 4, "cuda": 1024}
WALKS = {"cpu": 4, "cuda": 2048}


def define(name: str, kernels: Kernels) -> Callable[..., tuple[Tensor, Tensor]]:
    """Register the operators of a stage and return its public function.

    The operator gives y and the last state, and for its backward w, which is y before silu(z), and the sums p and the
    phases before every TILE of steps and at the end (none where nobody asks for gradients). A phase is a whole number
    of 2^-32 turns, for float64 of 2^-64.
    """

    def run(u, dt, x, x_bias, B, C, D, z, state=None, save=True) -> tuple[Tensor, ...]:
        results = fake(u, dt, x, x_bias, B, C, D, z, state, save)
        initial = operator.empty((0, 0, 0), like=B) if state is None else state
        kernels.launch("adaptive_unitary", u.device, u, dt, x, x_bias, B, C, D, z, initial, *results)
        return results

    def fake(u, dt, x, x_bias, B, C, D, z, state=None, save=True) -> tuple[Tensor, ...]:
        of_states = (u.shape[0], *x_bias.shape)
        y, w = (operator.empty(u.shape, like=u) for _ in range(2))
        kept = (-(-u.shape[2] // TILE) + 1 if save else 0, *of_states)
        last, sums = operator.empty(of_states, like=B), operator.empty(kept, like=B)
        return y, w, last, sums, operator.empty(kept, like=u, dtype=WHOLE[u.dtype])

    def setup_context(ctx, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        *tensors, state, _ = inputs
        _, w, _, sums, phases = output
        ctx.save_for_backward(*tensors, state, w, sums, phases)
        ctx.mark_non_differentiable(w, sums, phases)
        ctx.set_materialize_grads(False)

    def differentiate(ctx, dy: Tensor | None, _w, dlast: Tensor | None, _sums, _phases) -> tuple[Tensor | None, ...]:
        if dy is None and dlast is None:
            return (None,) * 10
        u, B, x_bias, state = (ctx.saved_tensors[i] for i in (0, 4, 3, 8))
        dy = operator.nothing(u.shape, like=u) if dy is None else dy
        dlast = operator.nothing((u.shape[0], *x_bias.shape), like=B) if dlast is None else dlast
        *grads, dstate = compute_backward(dy, dlast, *ctx.saved_tensors)
        return *grads, None if state is None else dstate, None

    def run_backward(dy, dlast, u, dt, x, x_bias, B, C, D, z, state, w, sums, phases) -> tuple[Tensor, ...]:
        if not u.numel():
            *grads, dstate = fake_backward(dy, dlast, u, dt, x, x_bias, B, C, D, z)
            return *(x.zero_() for x in grads), dstate.copy_(dlast)
        (batches, channels, _), states, tiles = u.shape, x.shape[1], -(-u.shape[2] // TILE)
        ddt, dz, dstate = (operator.empty(t.shape, like=t) for t in (dt, z, dlast))
        pulls = operator.empty((tiles, *dstate.shape), like=B)
        leans = operator.empty(pulls.shape, like=u)
        # What is added up over batches, and over channels, in places of its own; the order is always the same.
        places = min(batches, -(-PLACES[u.device.type] // channels))
        parts = min(channels, -(-WALKS[u.device.type] // (batches * tiles))) if states else 0
        of_u = operator.empty((1 + parts, *u.shape), like=u)
        of_x = operator.empty((places, *x.shape), like=u)
        of_bias = operator.empty((places, channels, states), like=u)
        of_bc = operator.empty((2, places, channels, states), like=B)
        of_d = operator.empty((places, channels), like=u)
        bc = torch.stack((B, C))
        bc_polar = polar(bc)
        initial = operator.empty((0, 0, 0), like=B) if state is None else state
        start = initial if state is None else bc_polar[1] * state.contiguous()
        given = (dy, dlast, u, dt, x, x_bias, B, C, D, z, initial, w, sums, phases, bc_polar[0] * bc_polar[1], start)
        scratch = (of_u[0], ddt, dz, dstate, pulls, leans, of_x, of_bias, *of_bc, of_d, of_u[1:])
        kernels.launch("adaptive_unitary_backward", u.device, *given, *scratch)
        db, dc = through_polar(bc, of_bc.sum((1, 2)))
        return of_u.sum(0), ddt, of_x.sum(0), of_bias.sum(0), db.clone(), dc.clone(), of_d.sum(0), dz, dstate

    def fake_backward(dy, dlast, u, dt, x, x_bias, B, C, D, z, *_) -> tuple[Tensor, ...]:
        return tuple(operator.empty(t.shape, like=t) for t in (u, dt, x, x_bias, B, C, D, z, dlast))

    def twice(ctx, *grads: Tensor):
        raise NotImplementedError(f"stages::{name} has no second derivatives: its backward is not differentiable")

    tensors = "Tensor u, Tensor dt, Tensor x, Tensor x_bias, Tensor B, Tensor C, Tensor D, Tensor z"
    compute_backward = operator.register(
        f"{name}_backward",
        f"(Tensor dy, Tensor dlast, {tensors}, Tensor? state, Tensor w, Tensor sums, Tensor phases)"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
        run_backward,
        fake=fake_backward,
        backward=twice,
    )
    compute = operator.register(
        name,
        f"({tensors}, Tensor? state=None, bool save=True)"
        " -> (Tensor y, Tensor w, Tensor last, Tensor sums, Tensor phases)",
        run,
        fake=fake,
        setup_context=setup_context,
        backward=differentiate,
    )

    def ssm_adaptive_unitary(
        u: Tensor,
        dt: Tensor,
        x: Tensor,
        x_bias: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor,
        z: Tensor,
        state: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The adaptive unitary operator: n states a channel, which turn by angles that all channels' inputs make.

        theta[t, i, j] = sum_r x[i, j, r] u[r, t] + x_bias[i, j]; h[t] = exp(i theta[t]) h[t - 1] + dt silu(u) B;
        y = silu(z) (Re sum_j C[j] h[t] + D silu(u)), where B stands for softplus(Re B) exp(i Im B), and C likewise.

        Args:
            u: [b, d, T], the input; float64 or float32, on a CPU or a CUDA device. Any strides, 0 included, here and in
                all that follow; nothing is copied.
            dt: [b, d, T], of the same dtype and device, as all that follow: how much of the input is taken up.
            x: [d, n, d]: how far each input turns each state.
            x_bias: [d, n]: how far a state turns by itself.
            B: [n], complex64 or complex128 as u is float32 or float64: softplus of the real part is the length of what
                an input adds to a state, the imaginary part its angle.
            C: [n], likewise: what is read of a state.
            D: [d]: what goes past the states.
            z: [b, d, T]: the gate of the output before its silu.
            state: [b, d, n], complex: the states before the first step. None: zeros.

        Returns:
            y, [b, d, T], and the last states, [b, d, n], complex, both contiguous. The last states go in as `state` of
            the steps that follow. NaN and infinity in the input of one channel turn all states to NaN from there on.
            Differentiable once, for all arguments, through both results.

        Raises:
            TypeError: A tensor is none, is not dense, or has another dtype than those above.
            ValueError: A tensor has another number of dimensions, the sizes do not fit each other, or the devices
                differ.
            KernelFault: The CPU device caught the kernel doing what it may not.

        Example:
            >>> import math, stages, torch
            >>> one = torch.ones(1, 1, 4)
            >>> quarter = torch.full((1, 1), math.pi / 2)  # a quarter of a turn at each step
            >>> y, last = stages.load("adaptive_unitary").ssm_adaptive_unitary(
            ...     0 * one, one, 0 * one[:, :, :1], quarter, *torch.zeros(2, 1, dtype=torch.complex64), one[0, 0, :1],
            ...     one, torch.ones(1, 1, 1, dtype=torch.complex64))
            >>> (y[0, 0] / y[0, 0, 3]).round(decimals=3).abs().tolist()
            [0.0, 1.0, 0.0, 1.0]
        """
        check(u, dt, x, x_bias, B, C, D, z, state)
        tensors = (u, dt, x, x_bias, B, C, D, z, *(() if state is None else (state,)))
        save = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        y, _, last, _, _ = compute(u, dt, x, x_bias, B, C, D, z, state, save)
        return y, last

    return ssm_adaptive_unitary


def polar(x: Tensor) -> Tensor:
    """softplus(Re x) exp(i Im x)."""
    return torch.polar(F.softplus(x.real, threshold=700), x.imag)


def through_polar(x: Tensor, grad: Tensor) -> Tensor:
    """The gradient of x from that of polar(x)."""
    along = grad * torch.polar(torch.ones_like(x.real), -x.imag)  # seen from the direction in which polar(x) points
    radius = F.softplus(x.real, threshold=700)
    return torch.complex(along.real * torch.sigmoid(x.real), along.imag * radius)


def check(
    u: Tensor,
    dt: Tensor,
    x: Tensor,
    x_bias: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor,
    state: Tensor | None = None,
) -> None:
    """Raise TypeError or ValueError, naming the argument, unless the operator of these makes sense."""
    check_tensor(CALL, "u", u, 3, DTYPES)
    for name, value, rank in (("dt", dt, 3), ("x", x, 3), ("x_bias", x_bias, 2), ("D", D, 1), ("z", z, 3)):
        check_fellow(CALL, name, value, "u", u, rank, DTYPES)
    numbers = COMPLEX_OF[u.dtype]
    for name, value, rank in (("B", B, 1), ("C", C, 1), ("state", state, 3)):
        if name == "state" and value is None:
            continue
        check_tensor(CALL, name, value, rank, (numbers,))
        if value.device != u.device:
            raise ValueError(f"{CALL}: {name} is on {value.device}, but u is on {u.device}; allowed: the same for both")
    (batches, channels, _), states = u.shape, x.shape[1]
    for name, value in (("dt", dt), ("z", z)):
        if value.shape != u.shape:
            raise ValueError(f"{CALL}: {name} is {shape(value)} and u is {shape(u)}; allowed: the same shape for both")
    if x.shape[0] != channels or x.shape[2] != channels:
        raise ValueError(
            f"{CALL}: x is {shape(x)} and u is {shape(u)}; allowed: (d, n, d), here ({channels}, n, {channels})"
        )
    for name, value, letters, allowed in (
        ("x_bias", x_bias, "(d, n)", (channels, states)),
        ("B", B, "(n,)", (states,)),
        ("C", C, "(n,)", (states,)),
        ("D", D, "(d,)", (channels,)),
        ("state", state, "(b, d, n)", (batches, channels, states)),
    ):
        if value is not None and value.shape != allowed:
            raise ValueError(
                f"{CALL}: {name} is {shape(value)}, u is {shape(u)} and x is {shape(x)}; allowed: {letters}, "
                f"here {allowed}"
            )


FASTEST = ("48_adaptive_unitary",)


def choose(
    u: Tensor,
    dt: Tensor,
    x: Tensor,
    x_bias: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor,
    state: Tensor | None = None,
) -> Choice:
    """There is one."""
    check(u, dt, x, x_bias, B, C, D, z, state)
    return Choice("48_adaptive_unitary", "the only one")


def make(
    sizes: Mapping[str, int], dtype: torch.dtype, device: str | torch.device = "cpu", seed: int = 0, **options: object
) -> tuple[Tensor, ...]:
    """Normal u, z and states, dt in (0, 1); angles of about 1 radian a step."""
    generator = torch.Generator(device).manual_seed(seed)
    b, d, n, seq = (sizes[name] for name in SIZES)
    numbers = COMPLEX_OF[dtype]

    def normal(*size: int) -> Tensor:
        return random(size, torch.float64, generator)

    u, z, dt = normal(b, d, seq), normal(b, d, seq), normal(b, d, seq).sigmoid()
    x, x_bias = normal(d, n, d) / max(d, 1) ** 0.5, normal(d, n)
    B, C, state = (torch.complex(normal(*size), normal(*size)) for size in ((n,), (n,), (b, d, n)))
    D = normal(d)
    real = (t.to(dtype) for t in (u, dt, x, x_bias))
    return *real, B.to(numbers), C.to(numbers), D.to(dtype), z.to(dtype), state.to(numbers)


def reference(
    u: Tensor,
    dt: Tensor,
    x: Tensor,
    x_bias: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """y and the last states, step by step, in float64 of the values as they are given."""
    u, dt, x, x_bias, B, C, D, z = (widened(t) for t in (u, dt, x, x_bias, B, C, D, z))
    gate, b, c = F.silu(u), polar(B), polar(C)
    h = 0 * b.expand(u.shape[0], *x_bias.shape) if state is None else widened(state)
    theta = torch.einsum("ijr,brt->tbij", x, u) + x_bias
    turns = torch.polar(torch.ones_like(theta), theta)
    steps = []
    for t in range(u.shape[2]):
        h = turns[t] * h + (dt * gate)[:, :, t, None] * b
        steps.append((h * c).real.sum(2))
    # Without steps there is nothing in y, but it has gradients, which are 0.
    states = torch.stack(steps, 2) if steps else theta.permute(1, 2, 0, 3).sum(3) * dt * (b.real.sum() + c.real.sum())
    return F.silu(z) * (states + D[:, None] * gate), h


def tolerance(sizes: Mapping[str, int], dtype: torch.dtype, **options: object) -> dict[str, float]:
    """How far each result may be from the truth, r = |x - ref| / |ref|: each step's angle is rounded."""
    steps = 1 + sizes.get("T", 0)
    allowed = 1e-5 * max(1.0, (steps / 256) ** 0.5) * unit_roundoff(dtype) / unit_roundoff(torch.float32)
    return dict.fromkeys((*OUTPUTS, *ARGUMENTS), allowed)


def incumbent(
    u: Tensor,
    dt: Tensor,
    x: Tensor,
    x_bias: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sums over time of whole tensors: of the angles, and of what the states take up in the frame that turns along."""
    b, c, gate = polar(B), polar(C), F.silu(u)
    phase = (torch.einsum("ijr,brt->bijt", x, u) + x_bias[..., None]).cumsum(3)
    turned = torch.polar(torch.ones_like(phase), phase)
    taken = ((dt * gate)[:, :, None] * b[:, None] * turned.conj()).cumsum(3)
    h = turned * (taken if state is None else taken + state[..., None])
    y = F.silu(z) * ((h * c[:, None]).real.sum(2) + D[:, None] * gate)
    if not u.shape[2]:
        return y, h.new_full(h.shape[:3], 0) if state is None else state.clone()
    return y, h[..., -1].clone()


def work(sizes: Mapping[str, int], itemsize: int, **options: object) -> Work:
    """For a state and step: d multiplications and additions for its angle, and some 24 operations besides."""
    b, d, n, seq = (sizes[name] for name in SIZES)
    return Work(
        b * seq * d * n * (2 * d + 24), itemsize * (4 * b * d * seq + 4 * b * d * n + d * n * (d + 1) + 4 * n + d)
    )
