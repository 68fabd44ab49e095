"""The selective scan of state-space models: n states a channel, whose step, input and output the sequence itself makes.

    h' = A h + B u     over a step of length dt = delta, or softplus(delta + delta_bias), discretized by a method:
    h_t = A_bar_t h_(t-1) + gain_t B_t u_t                       foh: + gain_prev_t B_(t-1) u_(t-1), where u_0 = 0
    y_t = (sum_n C_t h_t + D u_t) silu(z_t)                      complex A: 2 Re sum_n C_t h_t

With z = dt A, phi_1 = (e^z - 1) / z and phi_2 = (e^z - 1 - z) / z^2:

    method            A_bar                     gain / dt
    mamba             e^z                       1             Mamba's operator
    zoh               e^z                       phi_1         exact for an input held constant between samples
    foh               e^z                       phi_2, and phi_1 - phi_2 of the input before: exact for a linear one
    bilinear          (1 + z/2) / (1 - z/2)     1 / (1 - z/2)
    backward_euler    1 / (1 - z)               1 / (1 - z)
    highorder         e^z                       1 + z/2                        phi_1 to degree 1,
    poly              e^z                       1 + z/2 + z^2/6                2,
    rk4               e^z                       1 + z/2 + z^2/6 + z^3/24       and 3: of no use where abs(z) > 1
    dirac             e^z                       1 / dt        impulses: the input is added as it is

A state decays by what delta says, which is made of the input: the model chooses what it keeps. A, B and C are real or
complex. B and C hold for all time, [d, n], or change with it: [B, n, T] for all channels, or [B, g, n, T] for groups of
d / g channels each.

**Padding** is neutral: a step that is not there has dt = 0 after bias and softplus, and not before.

**What a backward needs**: the states before every chunk of steps, from which it makes those between anew. Of all states
of all steps, [B, d, n, T], nothing is ever stored.

Gu and Dao, Mamba: linear-time sequence modeling with selective state spaces, 2023, https://arxiv.org/abs/2312.00752.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from stages.families import (
    FLOATING,
    Choice,
    Work,
    accumulator,
    check_tensor,
    listing,
    random,
    scan,
    shape,
    unit_roundoff,
    widened,
)
from stages.families.discretization import phi
from stages.toolkit import operator
from stages.toolkit.kernels import Kernels
from stages.toolkit.report import Counts

NAME = "selective_scan"
CALL = (
    "selective_scan(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, "
    "return_last_state=False, *, discretization_method='mamba', initial_state=None)"
)
ARGUMENTS = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")
OUTPUTS = ("y", "last_state")
SIZES = ("B", "d", "n", "T")
PROBLEMS = (
    (2, 32, 16, 64),
    (2, 35, 5, 37),
    (1, 35, 17, 130),
    (1, 5, 3, 130),
    (1, 2, 64, 20),
    (3, 1, 1, 1),
    (2, 3, 4, 0),
    (2, 3, 0, 5),
    (0, 3, 4, 5),
    (2, 0, 4, 5),
)
XRAY = (1, 32, 16, 64)
BENCH = {"cpu": ((1, 64, 16, 128),), "cuda": ((8, 2048, 16, 2048), (1, 4096, 16, 16384))}
SWEEP = {
    "cpu": tuple((1, 32, 16, 1 << n) for n in range(5, 10)),
    "cuda": tuple((1, 2048, 16, 1 << n) for n in range(8, 17, 2)),
}
DTYPES = FLOATING
COMPLEX_OF = {torch.float64: torch.complex128, torch.float32: torch.complex64}
# What real tensors may have beside u: what is summed in, or u's own dtype.
REALS = {dtype: tuple(dict.fromkeys((accumulator(dtype), dtype))) for dtype in FLOATING}
INCUMBENT, COMPILED = "torch.compile(formula)", True  # in torch, a tree of pairs of steps, of all states at a time

METHODS = ("mamba", "zoh", "foh", "bilinear", "highorder", "poly", "rk4", "dirac", "backward_euler")
SERIES = ("highorder", "poly", "rk4")  # which are cut off: for small steps
MOST_STATES = 256  # of a channel
CHUNK = 128  # steps between those before which the states are kept for the backward
BLOCKS = {"cpu": 2, "cuda": 792}  # of the backward, if there are so many channels: they share those of a chunk of steps
FOUR = 4  # steps that lie together in shared memory
LANES = 32
ENOUGH_WARPS = 1056  # 8 for each multiprocessor of an H100: then a lane has 4 states, before that 2


def states_of_a_lane(u: Tensor, A: Tensor) -> int:
    """4 where there are enough channels, as what is not done for each state is then done for fewer; else 2."""
    (batch, channels, _), states = u.shape, A.shape[1]
    enough = batch * channels * -(-states // 4) >= LANES * ENOUGH_WARPS
    return 4 if enough and states > 2 and A.dtype is torch.float32 else 2


def define(name: str, kernels: Kernels, *, backward: bool = True) -> Callable[..., Tensor | tuple[Tensor, Tensor]]:
    """Register the operator of a stage and return its public function.

    The operator gives y, the last state, and for a backward the states before every chunk of steps (none where nobody
    asks for gradients). The kernel knows B and C as [B, groups, n, T]; what holds for all time has a group for each
    channel and T = 1. A, D, delta_bias and states are float32 for 16-bit u; what is not there is an empty tensor.

    Args:
        name: Of the operator.
        kernels: The modules of the stage.
        backward: Whether they have one.
    """

    def run(
        u,
        delta,
        A,
        B,
        C,
        D=None,
        z=None,
        delta_bias=None,
        initial_state=None,
        delta_softplus=False,
        method=0,
        save=True,
    ) -> tuple[Tensor, ...]:
        results = fake(u, delta, A, B, C, D, z, delta_bias, initial_state, delta_softplus, method, save)
        given = (u, delta, A, in_groups(B, u), in_groups(C, u), *present(u, A, D, z, delta_bias, initial_state))
        options = (delta_softplus, method, states_of_a_lane(u, A))
        kernels.launch("selective_scan", u.device, *given, *results, *options)
        return results

    def fake(
        u,
        delta,
        A,
        B,
        C,
        D=None,
        z=None,
        delta_bias=None,
        initial_state=None,
        delta_softplus=False,
        method=0,
        save=True,
    ) -> tuple[Tensor, ...]:
        of_states = (u.shape[0], *A.shape)
        chunks = -(-u.shape[2] // CHUNK) if save else 0
        y = operator.empty(u.shape, like=u)
        return y, operator.empty(of_states, like=A), operator.empty((chunks, *of_states), like=A)

    def setup_context(ctx, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.softplus, ctx.method, _ = inputs
        ctx.save_for_backward(*tensors, output[2])
        ctx.mark_non_differentiable(output[2])
        ctx.set_materialize_grads(False)

    def differentiate(ctx, dy: Tensor | None, dlast: Tensor | None, _states) -> tuple[Tensor | None, ...]:
        if not backward:
            raise NotImplementedError(f"stages::{name} has no backward")
        if dy is None and dlast is None:
            return (None,) * 12
        *tensors, initial_state, states = ctx.saved_tensors
        u, A = tensors[0], tensors[2]
        dy = operator.nothing(u.shape, like=u) if dy is None else dy
        dlast = operator.nothing((u.shape[0], *A.shape), like=A) if dlast is None else dlast
        *grads, dinitial = compute_backward(dy, dlast, *tensors, states, ctx.softplus, ctx.method)
        grads = [None if x is None else grad for x, grad in zip(tensors, grads, strict=True)]
        return *grads, None if initial_state is None else dinitial, None, None, None

    def run_backward(dy, dlast, u, delta, A, B, C, D, z, delta_bias, states, softplus, method) -> tuple[Tensor, ...]:
        batch, channels, seq = u.shape
        if batch * channels == 0:
            return tuple(x.zero_() for x in fake_backward(dy, dlast, u, delta, A, B, C, D, z, delta_bias))
        by_group = [in_groups(x, u) for x in (B, C)]
        module = kernels.serving(u.device)
        # What is summed over time, batches or channels is so in places of its own, which are added up in order.
        chunks, foh, states_of_all = -(-seq // CHUNK), METHODS[method] == "foh", A.shape[1]
        carried = operator.empty(((1 + foh) * chunks, batch, *A.shape), like=A)
        in_group = [channels if x.shape[3] == 1 else channels // x.shape[1] for x in by_group]
        share = math.gcd(*in_group)
        parts = max(1, min(share, BLOCKS[u.device.type] // max(1, chunks * batch * (channels // share))))
        parts = -(-share // -(-share // parts))  # none of which is without a channel
        of_bc = [
            operator.empty(
                (chunks, batch, *A.shape, 1) if x.shape[3] == 1 else (n // share * parts, *x.shape[:3], chunks * CHUNK),
                like=A,
            )
            for x, n in zip(by_group, in_group, strict=True)
        ]
        sums = accumulator(u.dtype)
        of_d, of_bias = (
            operator.empty((0,) * 4 if x is None else (chunks, batch, channels, module.WARPS), like=u, dtype=sums)
            for x in (D, delta_bias)
        )
        # The sums over states, if it takes more than one launch to come to all of them.
        several = states_of_all > module.STATES * 4 // A.element_size()
        so_far = operator.empty((2 if z is None else 3, *u.shape) if several else (0, 0, 0, 0), like=u, dtype=sums)
        D, z, delta_bias, _ = present(u, A, D, z, delta_bias, None)
        du, ddelta, dz, dinitial = (operator.empty(x.shape, like=x) for x in (u, delta, z, dlast))
        given = (dy, dlast, u, delta, A, *by_group, D, z, delta_bias, states)
        scratch = (du, ddelta, dz, dinitial, carried, *of_bc, of_d, of_bias, so_far)
        kernels.launch("selective_scan_backward", u.device, *given, *scratch, softplus, method, parts)
        dbc = []
        for x, parts_of_x in zip((B, C), of_bc, strict=True):
            if x.dim() == 2:
                total = parts_of_x.sum((0, 1))[..., 0]
            elif x.shape[-1] == 1:  # a group's channels, which have all been taken for groups
                total = parts_of_x.sum(0).unflatten(1, (in_groups(x, u).shape[1], -1)).sum(2).view(x.shape)
            else:
                total = parts_of_x[..., :seq].sum(0).view(x.shape)
            dbc.append(total.to(x.dtype))
        return du, ddelta, carried[:chunks].sum((0, 1)), *dbc, of_d.sum((0, 1, 3)), dz, of_bias.sum((0, 1, 3)), dinitial

    def fake_backward(dy, dlast, u, delta, A, B, C, D, z, delta_bias, *_) -> tuple[Tensor, ...]:
        d, bias = (operator.empty((0,), u, accumulator(u.dtype)) if x is None else x for x in (D, delta_bias))
        gates = operator.empty((0, 0, 0), u) if z is None else z
        return tuple(operator.empty(x.shape, like=x) for x in (u, delta, A, B, C, d, gates, bias, dlast))

    def twice(ctx, *grads: Tensor):
        raise NotImplementedError(f"stages::{name} has no second derivatives: its backward is not differentiable")

    if backward:
        compute_backward = operator.register(
            f"{name}_backward",
            "(Tensor dy, Tensor dlast, Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, "
            "Tensor? delta_bias, Tensor states, bool delta_softplus, int method)"
            " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
            run_backward,
            fake=fake_backward,
            backward=twice,
        )
    compute = operator.register(
        name,
        "(Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D=None, Tensor? z=None, "
        "Tensor? delta_bias=None, Tensor? initial_state=None, bool delta_softplus=False, int method=0, bool save=True)"
        " -> (Tensor y, Tensor last_state, Tensor states)",
        run,
        fake=fake,
        setup_context=setup_context,
        backward=differentiate,
    )

    def selective_scan(
        u: Tensor,
        delta: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        *,
        discretization_method: str = "mamba",
        initial_state: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The selective scan h[t] = A_bar[t] h[t - 1] + gain[t] B[t] u[t], y = (sum C h + D u) silu(z), in one kernel.

        A_bar and gain are what a method makes of A and the step dt = delta: with "mamba", exp(dt A) and dt, as in
        Mamba, whose function this one can stand in for. Computed in float32, for float64 in float64.

        Args:
            u: [B, d, T], the input; float64, float32, float16 or bfloat16, on a CPU or a CUDA device. Any strides, 0
                included, here and in all that follow.
            delta: [B, d, T], of u's dtype and device: the length of each step, or what softplus makes it of.
            A: [d, n], n <= 256: float32, in float64 float64, or u's dtype; or complex64, in float64 complex128.
            B: [d, n], [B, n, T], or [B, g, n, T] where g divides d and channel i belongs to group i g // d. u's dtype
                or float32; complex if A is. Where it varies in time, real pairs (re, im) along time are taken for
                complex numbers: [B, n, 2 T].
            C: Likewise; it need not be like B.
            D: [d]: how much of u goes past the states. None: nothing.
            z: [B, d, T], of u's dtype: the output is multiplied by silu(z). None: by 1.
            delta_bias: [d]: is added to delta before the softplus. None: nothing is.
            delta_softplus: Whether dt is softplus(delta + delta_bias).
            return_last_state: Whether to return the states after the last step, too.
            discretization_method: "mamba", "zoh", "foh", "bilinear", "highorder", "poly", "rk4", "dirac" or
                "backward_euler". "foh" takes the input before the first step for 0. "highorder", "poly" and "rk4" are
                series, which mean nothing where abs(dt A) > 1.
            initial_state: [B, d, n]: the states before the first step, complex if A is. None: zeros.

        Returns:
            y, [B, d, T], of u's dtype and contiguous; with return_last_state also the last states, [B, d, n], float32
            (float64, complex64, complex128), which are `initial_state` of the steps that follow.

        Raises:
            TypeError: A tensor is none, is not dense, or has another dtype than those above, or an option is of the
                wrong type.
            ValueError: A tensor has another number of dimensions, the sizes do not fit each other, the devices differ,
                or the method is unknown.
            NotImplementedError: Gradients are asked of a stage that has no backward.
            KernelFault: The CPU device caught the kernel doing what it may not.

        Example:
            >>> import math, stages, torch
            >>> u = torch.tensor([[[1.0, 0.0, 0.0, 2.0]]])
            >>> one, A = torch.ones(1, 1), torch.full((1, 1), -math.log(2))  # what a state has left of itself: a half
            >>> stages.load("selective_scan").selective_scan(u, torch.ones(1, 1, 4), A, one, one)
            tensor([[[1.0000, 0.5000, 0.2500, 2.1250]]])
        """
        options = dict(discretization_method=discretization_method, initial_state=initial_state)
        check(u, delta, A, B, C, D, z, delta_bias, delta_softplus, return_last_state, **options)
        sums = accumulator(u.dtype)
        numbers = COMPLEX_OF[sums] if A.is_complex() else sums
        if A.is_complex():
            B, C = paired(B, u, A), paired(C, u, A)
        A, initial_state = of_type(A, numbers), of_type(initial_state, numbers)
        D, delta_bias = of_type(D, sums), of_type(delta_bias, sums)
        tensors = (u, delta, A, B, C, D, z, delta_bias, initial_state)
        save = backward and torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
        y, last, _ = compute(*tensors, delta_softplus, METHODS.index(discretization_method), save)
        return (y, last) if return_last_state else y

    return selective_scan


def in_groups(x: Tensor, u: Tensor) -> Tensor:
    """B or C as [B, groups, n, T], by a view; T is 1, and there is a group for each channel, if it holds for all."""
    if x.dim() == 2:
        return x[None, :, :, None].expand(u.shape[0], -1, -1, -1)
    return x.unsqueeze(1) if x.dim() == 3 else x


@cache
def absent(rank: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What the kernel gets for an argument that is not there."""
    return torch.zeros((0,) * rank, dtype=dtype, device=device)


def present(
    u: Tensor, A: Tensor, D: Tensor | None, z: Tensor | None, delta_bias: Tensor | None, initial_state: Tensor | None
) -> tuple[Tensor, ...]:
    """The arguments, and empty tensors for those that are not there."""
    device, sums = u.device, accumulator(u.dtype)
    return (
        absent(1, sums, device) if D is None else D,
        absent(3, u.dtype, device) if z is None else z,
        absent(1, sums, device) if delta_bias is None else delta_bias,
        absent(3, A.dtype, device) if initial_state is None else initial_state,
    )


def of_type(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """x in that dtype; where it has it, `to` would take a microsecond."""
    return x if x is None or x.dtype is dtype else x.to(dtype)


def paired(x: Tensor, u: Tensor, A: Tensor) -> Tensor:
    """B or C as complex numbers, if A is complex and x has real pairs (re, im) along time instead."""
    if x.is_complex() or not A.is_complex():
        return x
    pairs = x.to(accumulator(u.dtype)).unflatten(-1, (u.shape[2], 2))
    return torch.complex(pairs[..., 0], pairs[..., 1])


def check(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    *,
    discretization_method: str = "mamba",
    initial_state: Tensor | None = None,
) -> None:
    """Raise TypeError or ValueError, naming the argument, unless the selective scan of these makes sense."""
    check_tensor(CALL, "u", u, 3)
    sums, device = accumulator(u.dtype), u.device
    reals, numbers = REALS[u.dtype], REALS[u.dtype] + (COMPLEX_OF[sums],)
    check_one("A", A, 2, numbers, device)
    turns = A.is_complex()
    own, of_states = (u.dtype,), numbers[-1:] if turns else reals
    check_one("delta", delta, 3, own, device)
    for name, value in (("B", B), ("C", C)):
        if not (isinstance(value, Tensor) and value.dim() in (2, 3, 4)):
            check_tensor(CALL, name, value, None, numbers if turns else reals)
            count = f"{value.dim()} dimension{'' if value.dim() == 1 else 's'}"
            raise ValueError(f"{CALL}: {name} has {count} {shape(value)}; allowed: 2, 3 or 4")
        check_one(name, value, value.dim(), numbers if turns else reals, device)
        if turns and value.dim() == 2 and not value.is_complex():
            raise TypeError(
                f"{CALL}: {name} has dtype {value.dtype}, holds for all time and A is complex; allowed: {numbers[-1]}"
            )
    if D is not None:
        check_one("D", D, 1, reals, device)
    if z is not None:
        check_one("z", z, 3, own, device)
    if delta_bias is not None:
        check_one("delta_bias", delta_bias, 1, reals, device)
    if initial_state is not None:
        check_one("initial_state", initial_state, 3, of_states, device)
    for name, option in (("delta_softplus", delta_softplus), ("return_last_state", return_last_state)):
        if not isinstance(option, bool):
            raise TypeError(f"{CALL}: {name} must be True or False, got {type(option).__name__}")
    if not isinstance(discretization_method, str):
        raise TypeError(f"{CALL}: discretization_method must be a str, got {type(discretization_method).__name__}")
    if discretization_method not in METHODS:
        raise ValueError(
            f"{CALL}: discretization_method is {discretization_method!r}; allowed: "
            f"{listing([repr(m) for m in METHODS])}"
        )
    size = u.shape
    batch, channels, seq = size
    for name, value in (("delta", delta), ("z", z)):
        if value is not None and value.shape != size:
            raise ValueError(f"{CALL}: {name} is {shape(value)} and u is {shape(u)}; allowed: the same shape for both")
    if A.shape[0] != channels:
        raise ValueError(f"{CALL}: A is {shape(A)} and u is {shape(u)}; allowed: (d, n), here ({channels}, n)")
    states = A.shape[1]
    if states > MOST_STATES:
        raise ValueError(f"{CALL}: A is {shape(A)}; allowed: (d, n) with n <= {MOST_STATES}")
    for name, value in (("B", B), ("C", C)):
        found, rank = value.shape, value.dim()
        pairs = turns and not value.is_complex()
        steps = 2 * seq if pairs else seq
        groups = found[1] if rank == 4 else 1
        allowed = (
            (channels, states) if rank == 2 else (batch, states, steps) if rank == 3 else (batch, groups, states, steps)
        )
        if found != allowed:
            what = {2: "(d, n)", 3: "(B, n, T)", 4: "(B, g, n, T)"}[rank].replace("T", "2 T" if pairs else "T")
            raise ValueError(
                f"{CALL}: {name} is {shape(value)}, u is {shape(u)} and A is {shape(A)}; allowed: {what}, "
                f"here {allowed}"
            )
        if rank == 4 and (channels % groups if groups else channels):
            raise ValueError(
                f"{CALL}: {name} is {shape(value)} and u is {shape(u)}; allowed: a number of groups that divides d, "
                f"here {channels}"
            )
    for name, value, letters, allowed in (
        ("D", D, "(d,)", (channels,)),
        ("delta_bias", delta_bias, "(d,)", (channels,)),
        ("initial_state", initial_state, "(B, d, n)", (batch, channels, states)),
    ):
        if value is not None and value.shape != allowed:
            raise ValueError(
                f"{CALL}: {name} is {shape(value)}, u is {shape(u)} and A is {shape(A)}; allowed: {letters}, "
                f"here {allowed}"
            )


def check_one(name: str, value: object, rank: int, dtypes: Sequence[torch.dtype], device: torch.device) -> None:
    """`check_tensor`, and that it is on the device of u; quick where all is well."""
    if (
        isinstance(value, Tensor)
        and value.dtype in dtypes
        and value.device == device
        and value.layout is torch.strided
        and value.dim() == rank
    ):
        return
    check_tensor(CALL, name, value, rank, dtypes)
    raise ValueError(f"{CALL}: {name} is on {value.device}, but u is on {device}; allowed: the same for both")


FASTEST = ("52_selective_scan_backward",)


def choose(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    *,
    discretization_method: str = "mamba",
    initial_state: Tensor | None = None,
) -> Choice:
    """There is one."""
    options = dict(discretization_method=discretization_method, initial_state=initial_state)
    check(u, delta, A, B, C, D, z, delta_bias, delta_softplus, return_last_state, **options)
    return Choice(FASTEST[0], "the only one")


def make(
    sizes: Mapping[str, int],
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    seed: int = 0,
    *,
    discretization_method: str = "mamba",
) -> tuple[Tensor | bool, ...]:
    """Normal u, B, C and D, softplus and the last state; steps of about 0.1, states that decay or turn.

    Normal z, too, but with "mamba", which is measured as others have measured theirs.

    As in a model, A, D and delta_bias of 16-bit u are float32. For complex64 u is float32, and A, B and C are complex.
    B and C vary in time; where the number of steps is odd they hold for all, as that is a case of its own.
    """
    generator = torch.Generator(device).manual_seed(seed)
    batch, channels, states, seq = (sizes[name] for name in SIZES)
    real = {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(dtype, dtype)
    sums = accumulator(real)

    def normal(*size: int) -> Tensor:
        return random(size, torch.float64, generator)

    u, delta = (normal(batch, channels, seq) for _ in range(2))
    A = -(0.5 * normal(channels, states)).exp() * (1 + torch.arange(states, device=generator.device) % 16)
    if discretization_method in SERIES:
        A = A / 16
    of_time = (channels, states) if seq % 2 else (batch, states, seq)
    B, C = (normal(*of_time) for _ in range(2))
    if dtype.is_complex:
        A = torch.complex(0.5 * A, 3 * normal(channels, states))
        B, C = (torch.complex(x, normal(*of_time)) for x in (B, C))
    D, delta_bias = normal(channels), normal(channels) - 2
    z = None if discretization_method == "mamba" else normal(batch, channels, seq).to(real)
    u, delta = (x.to(real) for x in (u, delta))
    A, B, C = A.to(dtype if dtype.is_complex else sums), B.to(dtype), C.to(dtype)
    return u, delta, A, B, C, D.to(sums), z, delta_bias.to(sums), True, True


def discretized(A: Tensor, dt: Tensor, method: str) -> tuple[Tensor, Tensor | None, Tensor]:
    """A_bar, the factor of the input before (foh alone) and that of the input, for dt [T, B, d, 1] and A [d, n]."""
    z = dt * A
    one = torch.ones_like(z)
    if method == "bilinear":
        return (1 + z / 2) / (1 - z / 2), None, dt / (1 - z / 2)
    if method == "backward_euler":
        return 1 / (1 - z), None, dt / (1 - z)
    if method == "foh":
        newer = phi(2, z, z.exp())
        return z.exp(), dt * (phi(1, z, z.exp()) - newer), dt * newer
    gain = {
        "mamba": lambda: dt * one,
        "zoh": lambda: dt * phi(1, z, z.exp()),
        "highorder": lambda: dt * (1 + z / 2),
        "poly": lambda: dt * (1 + z / 2 + z**2 / 6),
        "rk4": lambda: dt * (1 + z / 2 + z**2 / 6 + z**3 / 24),
        "dirac": lambda: one,
    }[method]
    return z.exp(), None, gain()


def over_time(x: Tensor, u: Tensor) -> Tensor:
    """B or C as [T or 1, B, d, n]."""
    if x.dim() == 2:
        return x[None, None]
    x = in_groups(x, u)
    return x.repeat_interleave(u.shape[1] // x.shape[1] if x.shape[1] else 1, 1).permute(3, 0, 1, 2)


def reference(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    *,
    discretization_method: str = "mamba",
    initial_state: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """y and the last states, step by step, in float64 of the values as they are given."""
    tensors = (u, delta, A, B, C, D, z, delta_bias, initial_state)
    u, delta, A, B, C, D, z, delta_bias, initial_state = (None if x is None else widened(x) for x in tensors)
    B, C = (over_time(paired(x, u, A), u) for x in (B, C))
    dt = delta if delta_bias is None else delta + delta_bias[:, None]
    dt = torch.logaddexp(dt, torch.zeros_like(dt)) if delta_softplus else dt
    a_bar, gain_before, gain = discretized(A, dt.permute(2, 0, 1)[..., None], discretization_method)
    taken = B * u.permute(2, 0, 1)[..., None]
    added = gain * taken
    if gain_before is not None:
        before = torch.cat((torch.zeros_like(taken[:1]), taken[:-1]))
        added = added + gain_before * before
    # With no steps the results have gradients, too, which are 0.
    h = 0 * A.expand(u.shape[0], *A.shape) if initial_state is None else initial_state
    states = []
    for a_step, b_step in zip(a_bar.unbind(), added.unbind(), strict=True):
        h = a_step * h + b_step
        states.append(h)
    seen = (torch.stack(states) if states else a_bar + added) * C
    y = (2 * seen.real if A.is_complex() else seen).sum(3).permute(1, 2, 0)
    y = y if D is None else y + D[:, None] * u
    y = y if z is None else y * F.silu(z)
    return (y, h) if return_last_state else y


def tolerance(sizes: Mapping[str, int], dtype: torch.dtype, **options: object) -> dict[str, float]:
    """How far each result may be from the truth, r = |x - ref| / |ref|. States are never rounded to 16 bits."""
    real = {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(dtype, dtype)
    allowed = 1e-5 * unit_roundoff(accumulator(real)) / unit_roundoff(torch.float32)
    rounded = {torch.bfloat16: 4e-3, torch.float16: 1e-3}.get(real, allowed)
    return {**dict.fromkeys(("y", *ARGUMENTS), rounded), "last_state": allowed}


def incumbent(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    *,
    discretization_method: str = "mamba",
    initial_state: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """All states of all steps, [B, d, n, T], as a tree of pairs of steps makes them; then what is seen of them."""
    sums = accumulator(u.dtype)
    batch, channels, seq = u.shape
    B, C = (over_time(paired(x, u, A), u).permute(1, 2, 3, 0).to(A.dtype) for x in (B, C))  # [B or 1, d, n, T or 1]
    wide = u.to(sums)
    dt = delta.to(sums) if delta_bias is None else delta.to(sums) + delta_bias[:, None]
    dt = F.softplus(dt) if delta_softplus else dt
    coefficients = discretized(A[:, :, None], dt[:, :, None], discretization_method)
    a_bar, gain_before, gain = coefficients
    taken = B * wide[:, :, None]
    added = gain * taken
    if gain_before is not None:
        added = added + gain_before * F.pad(taken, (1, 0))[..., :seq]
    start = None if initial_state is None else initial_state.flatten(1)
    h = scan.incumbent(a_bar.expand_as(added).flatten(1, 2), added.flatten(1, 2), start, time_dim=2)
    h = h.unflatten(1, A.shape)
    seen = (h * C).sum(2)
    y = 2 * seen.real if A.is_complex() else seen
    y = y if D is None else y + D[:, None] * wide
    y = (y if z is None else y * F.silu(z.to(sums))).to(u.dtype)
    if not return_last_state:
        return y
    if not seq:
        return y, torch.zeros((batch, *A.shape)).to(h) if initial_state is None else initial_state.clone()
    return y, h[..., -1].clone()


def work(sizes: Mapping[str, int], itemsize: int, *, discretization_method: str = "mamba") -> Work:
    """For a state and step 6 operations and an exponential; u, delta, B, C, y and z, if there is one, moved once."""
    batch, channels, states, seq = (sizes[name] for name in SIZES)
    of_channels = 3 if discretization_method == "mamba" else 4
    return Work(7 * batch * channels * states * seq, itemsize * batch * seq * (of_channels * channels + 2 * states))


def cost(B: int, d: int, n: int, T: int, itemsize: int, discretization_method: str = "mamba") -> Counts:
    """Of the forward, for arguments as `make` gives them, of so few channels that a lane has 2 states."""
    gates = discretization_method != "mamba"  # whether there is a z
    double = itemsize == 8
    size, of_a_lane, parts = (8, 2, 2) if double else (4, 2, 1)  # of a number; parts of 16 bytes of FOUR of them
    steps, lanes = 128 // size, n // of_a_lane
    channels = max(128 // lanes, min(8, 256 // lanes))
    warps, blocks, tiles, fours = lanes * channels // 32, B * d // channels, T // steps, steps // FOUR
    of_states = warps * of_a_lane  # requests for A, and for the last states
    each = 16 if double else min(16, channels)  # sectors
    copied = (2 * channels + 2 * n + gates * channels) * steps * itemsize  # bytes a tile, of u, delta, B, C and z
    of_u, of_b = 2 * channels * fours // 32, 2 * n * fours // 32  # requests to turn that, for FOUR steps each
    sums = of_u // 2 * lanes
    if itemsize == 2:  # 8 bytes a lane: of rows that lie 80 bytes apart the ninth meets the first, and of z's the next
        twice = 2 * (of_b + (of_u if channels == 16 else 0)) + gates * of_u
        turned = 2 * (of_u + of_b) + gates * of_u + twice
    else:
        turned, twice = 4 * parts * (of_u + of_b + gates * of_u // 2), 0
    if double:  # lanes that lie 32 bytes apart meet in the banks twice
        twice += warps * fours * 16 + sums * 8
    walked = warps * fours * (8 * parts * parts + 8 * parts)  # dt and u, and for each step B and C
    return Counts(
        load_requests=blocks * (warps + of_states + 1 + tiles * copied // 512),
        load_sectors=blocks * ((warps + 1) * channels * size // 32 + each * of_states + tiles * copied // 32),
        store_requests=blocks * (of_states + tiles * parts * of_u // 2),
        store_sectors=blocks * (each * of_states + tiles * parts * channels * steps * itemsize // 32),
        shared_load_wavefronts=blocks * tiles * (turned + walked + sums * 4 * parts * parts),
        shared_load_conflicts=blocks * tiles * twice,
        shared_store_wavefronts=blocks * tiles * 4 * parts * (parts * (of_u + warps * fours) + of_b),
        shared_store_conflicts=blocks * tiles * 8 * (parts - 1) * (of_u + warps * fours),
        shared_copy_wavefronts=blocks * tiles * copied // 512 * (8 if itemsize == 2 else 4),
        barriers=blocks * 2 * (tiles + 1),
    )
