"""Every backend gives the reference's bits, and the reference's bits have the distribution they claim."""

import copy
import hashlib
import itertools
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import forwardtune as ft
from forwardtune import BackendError, Field, InvalidArgumentError
from forwardtune.noise import DISTRIBUTIONS, NOISE_VERSION, Term
from forwardtune.noise.backends import cpu_numba, cuda_triton, reference
from forwardtune.noise.types import Key, Slot
from forwardtune.theory.smoothness import slope_bounds

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
CPU = torch.device("cpu")


def to(direction, *offsets):
    """A move from the old point along one direction."""
    return Term(direction, (0.0,) * len(offsets), offsets)


def draw(distribution, count, *, seed=0, step=0, direction=0, parameter=0, start=0):
    """A long stretch of noise, by the fast backend (which the tests here compare with the reference)."""
    x = torch.zeros(start + count)
    cpu_numba.CpuNumba([Slot(x, parameter, 0)]).move([(Key(seed, step, distribution), [to(direction, 1.0)])])
    return x[start:].double().numpy()


def assert_same_bits(a, b):
    integer = {8: torch.int64, 4: torch.int32, 2: torch.int16}[a.element_size()]
    assert torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))


def tensors(draw, dtype, generator):
    """Random tensors, some of them transposed, sliced or channels-last."""
    shape = draw(st.lists(st.integers(0, 40), max_size=4).filter(lambda s: math.prod(s) <= 30_000))
    x = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    layout = draw(st.sampled_from(["plain", "transposed", "sliced", "channels_last"]))
    if layout == "transposed":
        return x.permute(list(reversed(range(x.dim()))))
    if layout == "sliced" and x.dim():
        return torch.cat([x, x], dim=-1)[..., ::2]
    if layout == "channels_last" and x.dim() == 4:
        return x.to(memory_format=torch.channels_last)
    return x


@st.composite
def models(draw):
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    count = draw(st.integers(1, 6))
    return [tensors(draw, draw(st.sampled_from(DTYPES)), generator) for _ in range(count)]


keys = st.builds(Key, st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.sampled_from(DISTRIBUTIONS))
offsets = st.tuples(*[st.floats(-1e3, 1e3, allow_subnormal=False)] * 2)
lengths = st.sampled_from([1.0, 0.97, 1.003])
terms = st.lists(st.builds(Term, st.integers(0, 2**16 - 1), offsets, offsets, lengths), min_size=1, max_size=3)


FAST = pytest.mark.parametrize("backend", [cpu_numba.CpuNumba, cuda_triton.CudaTriton], ids=["numba", "triton"])


@FAST
@given(models(), keys, terms)
def test_fast_backends_equal_the_reference_bit_for_bit(backend, model, key, terms):
    copies = [copy.deepcopy(tensor) for tensor in model]  # keeps the strides, which clone does not
    for kind, members in ((reference.Reference, model), (backend, copies)):
        slots = [Slot(tensor, number, number % 2, 1 / (number + 1)) for number, tensor in enumerate(members)]
        kind(slots).move([(key, terms)])
    for ours, theirs in zip(model, copies, strict=True):
        assert ours.stride() == theirs.stride()
        assert_same_bits(ours, theirs)
    key = key._replace(distribution="sphere")
    assert reference.Reference(slots).squares(key, 3) == backend(slots).squares(key, 3)


@FAST
@pytest.mark.parametrize("distribution", ["rademacher", "uniform", "normal"])
def test_a_parameter_of_many_chunks(backend, distribution):
    shape = (5, 40_003) if backend is cuda_triton.CudaTriton else (5, 400_003)
    ours, theirs = torch.zeros(shape), torch.zeros(shape)
    key = Key(2**64 - 1, 2**32 - 1, distribution)
    reference.Reference([Slot(theirs, 2**32 - 1, 0)]).move([(key, [to(2**16 - 1, 1.0)])])
    backend([Slot(ours, 2**32 - 1, 0)]).move([(key, [to(2**16 - 1, 1.0)])])
    assert_same_bits(ours, theirs)


@FAST
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered")  # by numpy, in triton's interpreter
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_sums_round_like_torch(backend, dtype):
    """All 65,536 bit patterns, subnormals, infinities and NaNs among them, plus noise of several sizes."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    for scale in (0.0, 1e-8, 3e-5, 0.37, 3e4, 1e38):
        ours, theirs = x.clone(), x.clone()
        backend([Slot(ours, 0, 0)]).move([(Key(1, 2, "normal"), [to(0, scale)])])
        reference.Reference([Slot(theirs, 0, 0)]).move([(Key(1, 2, "normal"), [to(0, scale)])])
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert_same_bits(ours.nan_to_num(0.0), theirs.nan_to_num(0.0))


@pytest.mark.parametrize("distribution", ["rademacher", "uniform", "normal"])
def test_any_stretch_can_be_computed_alone(distribution):
    key = Key(5, 6, distribution)
    whole = draw(distribution, 30_000, seed=5, step=6, direction=3, parameter=4)
    for start, stop in ((0, 1), (511, 514), (8191, 8200), (12_345, 29_999)):
        part = reference.values(key, 3, 4, start, stop, CPU)
        np.testing.assert_array_equal(part.double().numpy(), whole[start:stop])


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_threads_do_not_change_a_bit(distribution):
    results = []
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        x = torch.zeros(700_001), torch.zeros(513, 3).t()
        try:
            Field([x], seed=3, distribution=distribution, backend="numba").mover.move(7, [to(0, 0.1), to(1, -0.3)])
        finally:
            torch.set_num_threads(1)
        results.append(torch.cat([t.flatten() for t in x]))
    assert all(torch.equal(result, results[0]) for result in results)


def test_large_indices_reach_the_upper_counter_words():
    """Beyond 2^32 blocks the counter's second word takes over; no stretch repeats an earlier one."""
    key = Key(0, 0, "normal")
    low, high = (reference.values(key, 0, 0, start, start + 512, CPU) for start in (0, 512 * 2**26))
    assert not torch.equal(low, high)
    assert not torch.equal(high, reference.values(key, 1, 0, 0, 512, CPU))


# --- statistics on ten million draws; the bounds are five standard errors, or a p-value of 1e-4 ---

N = 10_000_000
MOMENTS = {"rademacher": (0, 1, 0, 1), "uniform": (0, 1, 0, 9 / 5), "normal": (0, 1, 0, 3)}
EIGHTH = {"rademacher": 1, "uniform": 9.0, "normal": 105}  # E s^8, for the error of the fourth moment


@pytest.mark.parametrize("distribution", list(MOMENTS))
def test_moments_and_correlations(distribution):
    s = draw(distribution, N)
    second, fourth = MOMENTS[distribution][1], MOMENTS[distribution][3]
    sixth = {"rademacher": 1, "uniform": 27 / 7, "normal": 15}[distribution]
    deviations = (
        math.sqrt(second),
        math.sqrt(fourth - 1),
        math.sqrt(sixth),
        math.sqrt(EIGHTH[distribution] - fourth**2),
    )
    for power, (expected, deviation) in enumerate(zip(MOMENTS[distribution], deviations, strict=True), start=1):
        assert abs((s**power).mean() - expected) <= 5 * deviation / math.sqrt(N) + 1e-9, power
    for lag in (1, 2, 31, 32, 64, 128, 256, 512, 4096, 8192):
        assert abs((s[lag:] * s[:-lag]).mean()) < 5 / math.sqrt(N), lag
        squares = s**2 - 1
        assert abs((squares[lag:] * squares[:-lag]).mean()) <= 5 * (fourth - 1) / math.sqrt(N) + 1e-9, lag


def test_kolmogorov_smirnov():
    assert stats.kstest(draw("normal", N), "norm").pvalue > 1e-4
    width = math.sqrt(3)
    assert stats.kstest(draw("uniform", N), stats.uniform(-width, 2 * width).cdf).pvalue > 1e-4


def test_the_square_root_of_the_reference_is_rounded_to_nearest():
    generator = torch.Generator().manual_seed(0)
    x = torch.cat([torch.rand(500_000, generator=generator) * 45, torch.tensor([0.0, -0.0, 0.25, 1, 2, 4, 42.97])])
    np.testing.assert_array_equal(reference._sqrt(x).numpy(), np.sqrt(x.numpy()))


def test_the_normal_is_box_and_mullers_and_its_tail_reaches_6_55():
    word = torch.tensor([0, 1, 2**32 - 1, 2**31, 123456789, 987654321, 3_000_000_001])
    u = (word >> 1 | 1).float().double() / 2**31
    angle = ((word >> 2 & 0x3FFF).double() + 0.5) / 2**14 * math.pi / 2
    for second, trig, bit in ((False, torch.cos, 1), (True, torch.sin, 2)):
        ours = reference._box_muller(word, torch.full_like(word, second, dtype=torch.bool)).double()
        sign = torch.where(word & bit == bit, -1.0, 1.0)
        exact = sign * torch.sqrt(-2 * torch.log(u)) * trig(angle)
        torch.testing.assert_close(ours, exact, rtol=3e-6, atol=1e-9)
    longest = reference._box_muller(torch.tensor([0]), torch.tensor([False])).item()
    assert longest == pytest.approx(math.sqrt(2 * 31 * math.log(2)), rel=1e-5)


@pytest.mark.parametrize("distribution", list(MOMENTS))
@pytest.mark.parametrize("other", [{"seed": 1}, {"seed": 2**32}, {"step": 1}, {"direction": 1}, {"parameter": 1}])
def test_streams_are_unrelated(distribution, other):
    n = 1_000_000
    a, b = draw(distribution, n), draw(distribution, n, **other)
    assert not np.array_equal(a[:64], b[:64])
    assert abs((a * b).mean()) < 5 / math.sqrt(n)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_directions_have_the_length_of_the_dimension(distribution):
    x = [torch.zeros(70_000), torch.zeros(30, 1000, dtype=torch.float64)]
    field = Field([x], distribution=distribution)
    field.mover.move(0, [to(0, 1.0)])
    length = sum(float((t.double() ** 2).sum()) for t in x)
    if distribution in ("sphere", "rademacher"):
        assert length == pytest.approx(field.dimension, rel=1e-6)
    else:
        assert length == pytest.approx(field.dimension, rel=5 * math.sqrt(2 / field.dimension))


@pytest.mark.parametrize(
    ("distribution", "digest"),
    [
        ("rademacher", "81a9815917826b3e"),
        ("normal", "c316d522b8a85f60"),
        ("uniform", "df5ee4531045f46e"),
        ("sphere", "67c0ce7254c051d5"),
    ],
)
def test_the_noise_of_version_1_never_changes(distribution, digest):
    assert NOISE_VERSION == 1
    field = Field([[torch.zeros(7), torch.zeros(9000)]], seed=2**40 + 3, distribution=distribution)
    values = field.values(5, 1, 1, 0, 9000).float()
    assert hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16] == digest


@pytest.mark.parametrize("d", [1, 2, 30, 5000])
def test_every_direction_on_the_sphere_has_the_same_length(d):
    field = Field([[torch.zeros(d)]], distribution="sphere")
    for step in range(300 if d < 5000 else 3):
        assert field.values(step, 0, 0, 0, d).square().sum() == pytest.approx(d, rel=1e-6)


def test_values_are_what_a_move_adds():
    for distribution in DISTRIBUTIONS:
        x = [torch.zeros(300), torch.zeros(7, 9)]
        field = Field([x[:1], x[1:]], seed=11, distribution=distribution)
        field.mover.move(4, [to(2, 1.0, 2.0)])
        torch.testing.assert_close(x[0].double(), field.values(4, 2, 0, 0, 300), rtol=1e-6, atol=0)
        torch.testing.assert_close(x[1].flatten().double(), 2 * field.values(4, 2, 1, 0, 63), rtol=1e-6, atol=0)


def test_slopes_lie_inside_the_lemma_for_rademacher():
    rng = np.random.default_rng(0)
    for g in (np.eye(1, 50)[0], np.ones(2), rng.standard_normal(200), rng.standard_cauchy(50)):
        s = draw("rademacher", 20_000 * len(g)).reshape(-1, len(g))
        slopes = np.abs(s @ g)
        error = 5 * slopes.std() / math.sqrt(len(slopes))
        low, high = slope_bounds(float(np.linalg.norm(g)))
        assert low - error <= slopes.mean() <= high + error


# --- the field ---


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("distribution", ["rademacher", "normal"])
def test_going_back_restores_the_old_weights(distribution, dtype):
    """Exactly, except for the few that cross a power of two; and what is lost there does not accumulate."""
    old = (0.05 * torch.randn(50_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))).to(dtype)
    x, naive, rho = old.clone(), old.clone(), 1e-3
    field, other = Field([[x]], distribution=distribution), Field([[naive]], distribution=distribution)
    for step in range(100):
        for here, there in itertools.pairwise((0.0, rho, -rho, 0.0)):
            field.mover.move(step, [Term(0, [here], [there])])
            other.mover.move(step, [to(0, there - here)])
        if step == 0:
            assert (x != old).double().mean() < 0.1
            largest = old.double().abs() + 7 * rho
            assert ((x - old).double().abs() <= largest * torch.finfo(dtype).eps).all()
    drift, naive_drift = ((moved - old).double().norm() for moved in (x, naive))
    assert drift < naive_drift / (1.5 if dtype == torch.float64 else 5)


def test_a_mover_is_kept_as_long_as_the_tensors_are_where_they_were():
    p, q = torch.nn.Parameter(torch.zeros(10)), torch.nn.Parameter(torch.zeros(10))
    field = Field([[p], [q]])
    mover = field.mover
    field.refresh()
    assert field.mover is mover
    q.requires_grad_(False)
    assert field.mover is mover  # the tensors that move are those of the step's beginning
    field.refresh()
    assert [slot.parameter for slot in field.slots] == [0]
    assert field.covers([[p], [q]])
    assert not field.covers([[p, q]])
    assert not field.covers([[p], [q.data]])


def test_field_follows_storage_that_moves():
    p = torch.nn.Parameter(torch.zeros(1000))
    field = Field([[p]], seed=1)
    field.mover.move(0, [to(0, 1.0)])
    before = p.detach().clone()
    old, p.data = p.data, p.data.clone()
    field.mover.move(0, [to(0, -1.0)])
    assert p.abs().max() == 0
    assert torch.equal(old, before)
    p.data = p.data.double().reshape(10, 100).t()
    field.refresh()
    field.mover.move(0, [to(0, 1.0)])
    assert torch.equal(p.detach().flatten().float(), before)


def test_a_tensor_of_very_many_axes():
    x, y = (torch.zeros([1] * 40 + [2, 3]).transpose(-1, -2) for _ in range(2))
    Field([[x]], backend="numba").mover.move(0, [to(0, 1.0)])
    Field([[y]], backend="reference").mover.move(0, [to(0, 1.0)])
    assert torch.equal(x, y)


def test_what_does_not_fit_the_field_is_refused():
    x, y = torch.zeros(3), torch.zeros(3)
    field = Field([[x], [y]])
    field.mover.move(0, [])
    for step, term, complaint in (
        (0, to(0, 1.0), "for each of the 2 groups"),
        (0, to(0, 1.0, 2.0, 3.0), "for each of the 2 groups"),
        (2**32, to(0, 1.0, 1.0), "step must be an integer from 0 to 4294967295"),
        (0, to(2**16, 1.0, 1.0), "direction must be an integer from 0 to 65535"),
    ):
        with pytest.raises(InvalidArgumentError, match=complaint):
            field.mover.move(step, [term])
    assert not torch.cat([x, y]).any()


def test_compiled_code_that_differs_from_the_reference_is_refused(monkeypatch):
    cpu_numba._self_test.cache_clear()
    monkeypatch.setattr(reference.D, "UNIFORM_SCALE", 1.0)
    with pytest.raises(BackendError, match=r"the compiled uniform noise differs from the reference; .*: delete"):
        Field([[torch.zeros(3)]], backend="numba")


def test_same_memory_is_one_parameter():
    a = torch.zeros(100)
    field = Field([[a, a.view(100)]])
    field.mover.move(0, [to(0, 0.5)])
    assert field.dimension == 100
    assert torch.equal(a.abs(), torch.full((100,), 0.5))


@pytest.mark.parametrize(
    "views",
    [
        lambda a: [a[:60], a[40:]],
        lambda a: [a[:1].expand(50)],
        lambda a: [a.view(10, 10)[:, :6], a.view(10, 10)[:, 5:]],
        lambda a: [a[:50], a.view(torch.float64)[20:]],
    ],
)
def test_partly_shared_memory_is_refused(views):
    with pytest.raises(InvalidArgumentError, match="shares part of its memory"):
        Field([views(torch.zeros(100))])


def test_disjoint_views_of_one_storage_are_fine():
    a = torch.zeros(10, 10)
    Field([[a[:, ::2], a[:, 1::2]]]).mover.move(0, [to(0, 1.0)])
    assert torch.equal(a.abs(), torch.ones(10, 10))


def test_in_place_moves_are_seen_by_autograd():
    w = torch.ones(3, requires_grad=True)
    loss = (w * w).sum()
    ft.VS2P([w]).step(lambda: 0.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_without_a_folder_for_compiled_code_it_is_compiled_anew_with_one_warning():
    code = """
import warnings
from numba.core.caching import CacheImpl
CacheImpl._locator_classes = []
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch, forwardtune as ft
    x = torch.ones(3)
    field = ft.Field([[x]], backend="numba")
    field.mover.move(0, [ft.noise.Term(0, [0.0], [0.5])])
print(sorted(x.tolist()), [str(w.message)[:19] for w in caught if "numba" in str(w.message)])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "[0.5, 0.5, 1.5] ['numba has no folder']", result.stderr
