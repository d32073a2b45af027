"""Epsilons against Opacus' accountants, the closed form in many digits, and the specification's numbers."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import mpmath
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.accountants import PRVAccountant, RDPAccountant
from opacus.accountants.utils import get_noise_multiplier
from scipy.optimize import brentq
from scipy.special import ndtr
from tests.support.processes import printed

from tightframe.privacy import accounting
from tightframe.privacy.accounting import (
    ORDERS,
    BudgetError,
    Epsilons,
    epsilons,
    fitting,
    guaranteed,
    solve,
)
from tightframe.privacy.events import Event, Gaussian, PrivacyValueError, SubsampledGaussian

DELTA = 1e-5
TRAINING = SubsampledGaussian(0.71, 64 / 9930, 7758)
SMALL = SubsampledGaussian(2.19, 64 / 351, 300)


def by_opacus(
    kind: type[RDPAccountant] | type[PRVAccountant], events: Sequence[Event], delta: float
) -> float:
    """What the library says of the same history."""
    accountant = kind()
    for event in events:
        if isinstance(event, Gaussian):
            accountant.step(noise_multiplier=event.noise_multiplier, sample_rate=1.0)
        else:
            accountant.history.append((event.noise_multiplier, event.sampling_rate, event.steps))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return float(accountant.get_epsilon(delta))


def exact_in_many_digits(mu: float, delta: float) -> mpmath.mpf:
    """The root of Balle & Wang's equation, found with 60 digits."""
    with mpmath.workdps(50):
        m, d = mpmath.mpf(mu), mpmath.mpf(delta)

        def excess(epsilon: mpmath.mpf) -> mpmath.mpf:
            first = mpmath.ncdf(m / 2 - epsilon / m)
            return first - mpmath.exp(epsilon) * mpmath.ncdf(-m / 2 - epsilon / m) - d

        low, high = mpmath.mpf(0), m**2 / 2 + m * mpmath.sqrt(2 * mpmath.log(1 / d))
        if excess(low) <= 0:
            return low
        for _ in range(110):
            middle = (low + high) / 2
            low, high = (low, middle) if excess(middle) <= 0 else (middle, high)
        return high


def test_the_specification_s_numbers() -> None:
    found = epsilons([Gaussian(6.0)] * 100, DELTA)
    assert found.exact == pytest.approx(8.004, abs=5e-4)
    assert found.prv == pytest.approx(8.014, abs=5e-4)
    assert found.rdp == pytest.approx(8.603, abs=5e-4)
    assert found.guaranteed == found.exact


@pytest.mark.whole
@pytest.mark.parametrize(
    ("records", "sigma"), [(9930, 0.71), (351, 2.19)], ids=["9,930 records", "351 records"]
)
@pytest.mark.filterwarnings("ignore:Optimal order")  # of the library's own search
def test_sigma_of_the_specification(records: int, sigma: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Epsilon 8, 50 epochs, batches of 64, by RDP, as the library's own search; less by PLD."""
    rate, steps = 64 / records, 50 * math.ceil(records / 64)
    less = solve(lambda noise: [SubsampledGaussian(noise, rate, steps)], epsilon=8.0, delta=DELTA)
    monkeypatch.setattr(accounting, "_pld", lambda *_: None)
    found = solve(lambda noise: [SubsampledGaussian(noise, rate, steps)], epsilon=8.0, delta=DELTA)
    assert 0.94 * found < less < 0.97 * found
    assert found == pytest.approx(sigma, abs=0.006)
    theirs = get_noise_multiplier(
        target_epsilon=8.0,
        target_delta=DELTA,
        sample_rate=rate,
        steps=steps,
        accountant="rdp",
        epsilon_tolerance=1e-3,
    )
    assert found == pytest.approx(theirs, rel=1e-3)
    assert guaranteed([SubsampledGaussian(found, rate, steps)], DELTA) <= 8.0
    assert guaranteed([SubsampledGaussian(found - 3e-4, rate, steps)], DELTA) > 8.0


COMPOSITIONS: dict[str, tuple[list[Event], float]] = {
    "training": ([TRAINING], DELTA),
    "a small silo": ([SMALL], DELTA),
    "training and class sums": ([TRAINING, *[Gaussian(12.0)] * 10], DELTA),
    "two jobs": ([TRAINING, SubsampledGaussian(1.5, 0.01, 1000)], 1e-6),
    "full batches": ([SubsampledGaussian(20.0, 1.0, 50)], DELTA),
    "little noise": ([SubsampledGaussian(0.4, 0.02, 100)], DELTA),
    "half of the records": ([SubsampledGaussian(3.0, 0.5, 20)], 1e-3),
    "class sums": ([Gaussian(20.0)] * 3, DELTA),
}


@pytest.mark.parametrize(("events", "delta"), COMPOSITIONS.values(), ids=COMPOSITIONS.keys())
def test_rdp_is_opacus(events: list[Event], delta: float) -> None:
    found, theirs = epsilons(events, delta, prv=False).rdp, by_opacus(RDPAccountant, events, delta)
    # All of their orders and some more: never above them, and the same where theirs suffice.
    assert found == pytest.approx(theirs, rel=1e-5) and found <= theirs * (1 + 1e-7) + 1e-9


@pytest.mark.whole
@pytest.mark.parametrize("name", ["a small silo", "training and class sums", "full batches"])
def test_prv_is_opacus_and_the_analyses_are_in_order(name: str) -> None:
    """PRV adds its error bound of 0.01 to the best value."""
    events, delta = COMPOSITIONS[name]
    found = epsilons(events, delta)
    assert found.prv == pytest.approx(by_opacus(PRVAccountant, events, delta), rel=2e-3)
    assert found.prv is not None and found.prv <= found.rdp + 0.01
    assert (found.exact is None) == (name != "full batches")
    if found.exact is not None:
        assert found.exact <= found.prv <= found.exact + 0.0101


@pytest.mark.parametrize("mu", [1e-4, 0.1, 10 / 6, 30.0])
@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.1])
def test_the_exact_value_in_many_digits(mu: float, delta: float) -> None:
    """Never below the true value, and above it by next to nothing."""
    true = exact_in_many_digits(mu, delta)
    found = mpmath.mpf(epsilons([Gaussian(1 / mu)], delta, prv=False).exact)
    noise = mpmath.mpf(1 / mu)
    assert found >= exact_in_many_digits(float(1 / noise), delta) - mpmath.mpf(1e-15) * true
    assert found <= true * (1 + mpmath.mpf(1e-8)) + mpmath.mpf(1e-9)


def rdp_by_integration(noise: float, rate: float, order: float) -> mpmath.mpf:
    """Renyi divergence of the mixture from the Gaussian, by its definition."""
    with mpmath.workdps(20):
        s, q, a = mpmath.mpf(noise), mpmath.mpf(rate), mpmath.mpf(order)

        def integrand(x: mpmath.mpf) -> mpmath.mpf:
            ratio = (1 - q) + q * mpmath.exp((2 * x - 1) / (2 * s**2))
            return mpmath.npdf(x, 0, s) * ratio**a

        peaks = sorted({-12 * s, mpmath.mpf(0), mpmath.mpf(1), a, a + 12 * s, (a + 12 * s) / 2})
        return mpmath.log(mpmath.quad(integrand, peaks, maxdegree=6)) / (a - 1)


@pytest.mark.parametrize(
    ("noise", "rate"),
    [(0.71, 64 / 9930), (2.19, 64 / 351), (1.0, 0.5), (0.5, 0.9), (10.0, 0.01), (0.4, 1e-4)],
)
def test_no_order_is_below_the_divergence_itself(noise: float, rate: float) -> None:
    """Opacus' series, whose errors could go either way, with the slack that we add."""
    for order in (1.1, 2.5, 7.3, 63.0):
        assert order in ORDERS
        true = rdp_by_integration(noise, rate, order)
        found = mpmath.mpf(accounting._step_rdp(noise, rate, order))
        assert true <= found <= true * (1 + mpmath.mpf(1e-6)) + mpmath.mpf(1.2e-11), order


def test_orders_hold_opacus_own() -> None:
    assert {round(order, 9) for order in RDPAccountant.DEFAULT_ALPHAS} <= {
        round(order, 9) for order in ORDERS
    }
    assert list(ORDERS) == sorted(set(ORDERS)) and ORDERS[-1] == 1024.0


def test_large_orders_pay_where_epsilon_is_small() -> None:
    """Opacus warns that its largest order, 63, is the best one: more orders give less."""
    events = [SubsampledGaussian(30.0, 0.01, 100)]
    with pytest.warns(UserWarning, match="largest alpha"):
        accountant = RDPAccountant()
        accountant.history = [(30.0, 0.01, 100)]
        theirs = accountant.get_epsilon(DELTA)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = epsilons(events, DELTA)
    assert found.prv is not None and found.prv - 0.01 < found.rdp < 0.6 * theirs


mixed = st.lists(
    st.one_of(
        st.builds(Gaussian, st.sampled_from([3.0, 7.1, 20.0])),
        st.builds(
            SubsampledGaussian,
            st.sampled_from([0.8, 2.0]),
            st.sampled_from([0.01, 1.0]),
            st.integers(1, 500),
        ),
    ),
    max_size=8,
)


@settings(max_examples=20)
@given(mixed, st.randoms(use_true_random=False), st.sampled_from([1e-6, 1e-3]))
def test_order_does_not_matter_to_the_last_bit(events: list[Event], random: object, delta: float) -> None:
    shuffled = list(events)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert epsilons(shuffled, delta, prv=False) == epsilons(events, delta, prv=False)


@settings(max_examples=20)
@given(mixed, mixed, st.sampled_from([1e-6, 1e-3]))
def test_more_never_costs_less(events: list[Event], more: list[Event], delta: float) -> None:
    assert guaranteed([*events, *more], delta) >= guaranteed(events, delta)
    assert guaranteed(events, delta / 10) >= guaranteed(events, delta)


def test_steps_may_be_charged_in_parts() -> None:
    parts = [SubsampledGaussian(2.19, 64 / 351, steps) for steps in (100, 50, 150)]
    assert epsilons(parts, DELTA, prv=False) == epsilons([SMALL], DELTA, prv=False)
    full = epsilons([SubsampledGaussian(6.0, 1.0, 100)], DELTA)
    assert full == epsilons([Gaussian(6.0)] * 100, DELTA), "full batches are plain releases"


def test_nothing_costs_nothing() -> None:
    assert epsilons([], DELTA) == Epsilons(0.0, None, 0.0, 0.0)
    assert guaranteed([], DELTA) == 0.0


def test_what_is_not_finite_is_refused() -> None:
    naked: list[Event] = [SubsampledGaussian(0.01, 1.0, 10**9)]
    with pytest.raises(PrivacyValueError, match="TF-700: Expected these events to have an epsilon up to"):
        epsilons(naked, DELTA)
    assert guaranteed(naked, DELTA) > 1e12, "and no budget holds it"
    assert guaranteed([SubsampledGaussian(0.01, 0.5, 10**9)], DELTA) > 1e12
    assert fitting(naked[0], epsilon=8.0, delta=DELTA) == 0


@pytest.mark.parametrize("call", [epsilons, guaranteed])
def test_wrong_arguments(call: object) -> None:
    for events, delta in (
        ([Gaussian(1.0)], 0.0),
        ([Gaussian(1.0)], math.nan),
        ([1.0], DELTA),
        ([None], DELTA),
    ):
        with pytest.raises(PrivacyValueError):
            call(events, delta)  # type: ignore[operator]
    for epsilon in (0.0, -1.0, math.nan, math.inf, True):
        with pytest.raises(PrivacyValueError, match="`epsilon`"):
            fitting(Gaussian(1.0), epsilon=epsilon, delta=DELTA)
        with pytest.raises(PrivacyValueError, match="`epsilon`"):
            solve(lambda noise: [Gaussian(noise)], epsilon=epsilon, delta=DELTA)


def test_an_order_that_opacus_cannot_compute_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN, negative, or an exception at some orders only loosens the bound."""
    from opacus.accountants.analysis import rdp

    real = rdp.compute_rdp

    def broken(*, q: float, noise_multiplier: float, steps: int, orders: float) -> float:
        if orders < 3:
            return (math.nan, -1.0)[round(orders * 10) % 2]
        if orders > 5:
            raise OverflowError
        return float(real(q=q, noise_multiplier=noise_multiplier, steps=steps, orders=orders))

    def forget() -> None:
        accounting._step_rdp.cache_clear()
        accounting._rdp.cache_clear()

    monkeypatch.setattr(accounting, "_pld", lambda *_: None)  # which does not ask Opacus
    whole = guaranteed([TRAINING], DELTA)
    monkeypatch.setattr(rdp, "compute_rdp", broken)
    forget()
    try:
        assert whole <= guaranteed([TRAINING], DELTA) < math.inf
        monkeypatch.setattr(rdp, "compute_rdp", lambda **_: math.nan)
        forget()
        assert guaranteed([TRAINING], DELTA) == math.inf
        with pytest.raises(PrivacyValueError, match="inf"):
            epsilons([TRAINING], DELTA, prv=False)
    finally:
        forget()


def test_prv_is_none_where_it_fails() -> None:
    found = epsilons([SubsampledGaussian(0.05, 0.1, 100)], DELTA)
    assert found.prv is None and 1000 < found.rdp < 1e6


def test_solve_counts_what_was_spent() -> None:
    spent = [Gaussian(6.0)] * 50
    plan = [Gaussian] * 10
    alone = solve(lambda z: [make(z) for make in plan], epsilon=8.0, delta=DELTA)
    after = solve(lambda z: [make(z) for make in plan], epsilon=8.0, delta=DELTA, spent=spent)
    assert alone < after and guaranteed([*spent, *[Gaussian(after)] * 10], DELTA) <= 8.0
    assert guaranteed([*spent, *[Gaussian(after - 3e-4)] * 10], DELTA) > 8.0
    # mu^2 = 50/36 + 10/z^2 by the closed form: the same z
    mu = float(brentq(lambda m: exact(m) - 8.0, 1.6, 1.7))
    assert after == pytest.approx(math.sqrt(10 / (mu**2 - 50 / 36)), abs=2e-3)


def exact(mu: float) -> float:
    """In double precision, by scipy."""
    return float(
        brentq(lambda e: ndtr(mu / 2 - e / mu) - math.exp(e) * ndtr(-mu / 2 - e / mu) - DELTA, 0, 50)
    )


def test_solve_refuses_what_no_noise_can_do() -> None:
    with pytest.raises(
        BudgetError, match=r"TF-701: Expected a noise multiplier up to .*costs 8\.00[45] already"
    ):
        solve(lambda z: [Gaussian(z)], epsilon=8.0, delta=DELTA, spent=[Gaussian(6.0)] * 100)
    assert solve(lambda z: [], epsilon=8.0, delta=DELTA) <= 0.0102, "the least there is"


def test_fitting_counts_releases_and_steps() -> None:
    assert fitting(Gaussian(6.0), epsilon=8.0, delta=DELTA) == 99, "100 come to 8.004"
    assert fitting(Gaussian(6.0), epsilon=8.005, delta=DELTA, spent=[Gaussian(6.0)] * 90) == 10
    steps = fitting(SMALL, epsilon=8.0, delta=DELTA)
    rate = SMALL.sampling_rate
    assert guaranteed([SubsampledGaussian(2.19, rate, steps)], DELTA) <= 8.0
    assert guaranteed([SubsampledGaussian(2.19, rate, steps + 1)], DELTA) > 8.0
    assert fitting(Gaussian(1e9), epsilon=8.0, delta=DELTA) == 10**9


def test_pricing_and_solving_need_neither_torch_nor_opacus() -> None:
    """Light processes start without them; releases and sampled steps are priced and solved without them."""
    program = (
        "import sys\n"
        "from tightframe.privacy import accounting, events\n"
        "from tightframe.privacy.events import SubsampledGaussian as S\n"
        "from tightframe.privacy.ledger import ledger\n"
        "assert accounting.guaranteed([events.Gaussian(6.0)] * 100, 1e-5) < 8.005\n"
        "assert accounting.guaranteed([S(1.0, 0.05, 200)], 1e-5) < 4.77\n"
        "assert accounting.solve(lambda z: [S(z, 0.05, 200)], epsilon=8.0, delta=1e-5) < 0.79\n"
        "print(sorted({'torch', 'opacus'} & set(sys.modules)))"
    )
    assert printed(program) == ["[]"]


@pytest.mark.parametrize(
    ("rate", "steps", "epsilon", "spent"),
    [
        (0.1, 20, 8.0, ()),
        (64 / 351, 300, 8.0, ()),
        (0.01, 10_000, 1.0, ()),
        (0.5, 4, 2.0, (9.0, 9.0)),
        (0.3, 50, 0.3, ()),
        (0.2, 3, 50.0, ()),
    ],
)
def test_noise_solved_by_few_orders_is_that_of_all(
    rate: float, steps: int, epsilon: float, spent: tuple[float, ...]
) -> None:
    before = [Gaussian(noise) for noise in spent]
    noise = solve(
        lambda found: [SubsampledGaussian(found, rate, steps)], epsilon=epsilon, delta=DELTA, spent=before
    )
    assert guaranteed([*before, SubsampledGaussian(noise, rate, steps)], DELTA) <= epsilon
    assert guaranteed([*before, SubsampledGaussian(noise * 0.998, rate, steps)], DELTA) > epsilon
