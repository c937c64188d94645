"""A cut per client and shares of the link and of the server: HSFL's planner.

Source: Sun et al. 2024 (https://arxiv.org/abs/2411.13907), which names the parts (sample average, genetic
algorithm, Lagrangian relaxation, branch and bound); the details are choices.

Client k with cut c needs T_k = alpha_k(c) + beta_k(c) / (zeta_k x_k) + sigma_k(c) / y_k seconds a round: its
computing, the link at share x_k with fading zeta_k, the server at share y_k; sum x <= 1, sum y <= 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from edgefl.planning.edgesplit import bisect

_LEAST = 1e-12


@dataclass(frozen=True)
class ClientCosts:
    """One client by cut (entry c - 1): alpha: seconds of its own computing and of latencies; beta: of the
    whole link; sigma: of the whole server; feasible: whether it may take the cut."""

    alpha: tuple[float, ...]
    beta: tuple[float, ...]
    sigma: tuple[float, ...]
    feasible: tuple[bool, ...]

    @property
    def cuts(self) -> tuple[int, ...]:
        return tuple(c + 1 for c, may in enumerate(self.feasible) if may)


@dataclass(frozen=True)
class Shares:
    """The longest time, and each client's share of the link (x) and of the server (y)."""

    round_s: float
    link: tuple[float, ...]
    server: tuple[float, ...]


@dataclass(frozen=True)
class HSFLPlan:
    """cuts by client; shares of the plan; fitness: mean over the scenarios of the longest time."""

    cuts: tuple[int, ...]
    shares: Shares
    fitness: float


def times(
    clients: Sequence[ClientCosts], cuts: Sequence[int], shares: Shares, fading: np.ndarray
) -> np.ndarray:
    """T_k of each client; fading: zeta, (..., K). Returns (..., K) seconds."""
    alpha, beta, sigma = _at(clients, cuts)
    found: np.ndarray = alpha + beta / (fading * np.array(shares.link)) + sigma / np.array(shares.server)
    return found


def _at(clients: Sequence[ClientCosts], cuts: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rows = [(k.alpha[c - 1], k.beta[c - 1], k.sigma[c - 1]) for k, c in zip(clients, cuts, strict=True)]
    alpha, beta, sigma = np.array(rows).T
    return alpha, np.maximum(beta, _LEAST), np.maximum(sigma, _LEAST)


def best_shares(alpha: np.ndarray, beta: np.ndarray, sigma: np.ndarray) -> Shares:
    """The shares with which the last client ends first: Lagrangian relaxation, bisection on T.

    At T, with u = T - alpha and the multiplier lam of the server's budget,
    x = sqrt(beta) r / u and y = sqrt(sigma / lam) r / u with r = sqrt(beta) + sqrt(lam sigma);
    sum y = 1 gives sqrt(lam) = (sum sqrt(beta sigma) / u) / (1 - sum sigma / u).
    """

    def need(T: float) -> float:
        u = T - alpha
        if u.min() <= 0 or (sigma / u).sum() >= 1:
            return math.inf
        return float(_link_shares(u, beta, sigma).sum())

    T = bisect(need, 1.0, float(alpha.max()))
    u = T - alpha
    x = _link_shares(u, beta, sigma)
    root = _root_of_multiplier(u, beta, sigma)
    y = np.sqrt(sigma) / root * (np.sqrt(beta) + root * np.sqrt(sigma)) / u
    return Shares(T, tuple(map(float, x)), tuple(map(float, y)))


def _root_of_multiplier(u: np.ndarray, beta: np.ndarray, sigma: np.ndarray) -> float:
    return float((np.sqrt(beta * sigma) / u).sum() / (1 - (sigma / u).sum()))


def _link_shares(u: np.ndarray, beta: np.ndarray, sigma: np.ndarray) -> np.ndarray:
    root = _root_of_multiplier(u, beta, sigma)
    shares: np.ndarray = np.sqrt(beta) * (np.sqrt(beta) + root * np.sqrt(sigma)) / u
    return shares


def equal_shares(alpha: np.ndarray, beta: np.ndarray, sigma: np.ndarray) -> Shares:
    """1 / K of the link and of the server for each client."""
    K = len(alpha)
    share = (1 / K,) * K
    return Shares(float((alpha + K * beta + K * sigma).max()), share, share)


class Fitness:
    """Mean over the scenarios of the longest time of a cut vector, at the relaxation's shares; remembered.

    scenarios: zeta, (S, K): 20 draws of exp(spread x normal), or one of ones where nothing fades.
    channels: the link is cut into so many whole channels; None: shares are any number.
    """

    def __init__(
        self, clients: Sequence[ClientCosts], scenarios: np.ndarray, channels: int | None = None
    ) -> None:
        self.clients, self.scenarios, self.channels = clients, scenarios, channels
        self._known: dict[tuple[int, ...], tuple[float, Shares]] = {}

    def __call__(self, cuts: tuple[int, ...]) -> float:
        return self.of(cuts)[0]

    def of(self, cuts: tuple[int, ...]) -> tuple[float, Shares]:
        """The fitness, and the shares that it is for."""
        known = self._known.get(cuts)
        if known is None:
            alpha, beta, sigma = _at(self.clients, cuts)
            mean_beta = beta * (1 / self.scenarios).mean(0)
            if self.channels is None:
                shares = best_shares(alpha, mean_beta, sigma)
            else:
                shares = whole_channels(alpha, mean_beta, sigma, self.channels)
            longest = times(self.clients, cuts, shares, self.scenarios).max(1)
            known = self._known[cuts] = (float(longest.mean()), shares)
        return known


def scenarios(rng: np.random.Generator, num_clients: int, spread: float, count: int = 20) -> np.ndarray:
    """zeta (count, num_clients) = exp(spread x standard normal); one row of ones where the spread is 0."""
    if spread == 0:
        return np.ones((1, num_clients))
    return np.asarray(np.exp(spread * rng.standard_normal((count, num_clients))))


def plan_by_genes(
    clients: Sequence[ClientCosts],
    fitness: Fitness,
    rng: np.random.Generator,
    *,
    population: int = 30,
    generations: int = 50,
) -> HSFLPlan:
    """Cuts by a genetic algorithm: tournaments of 3, uniform crossover with probability 0.9, each gene
    mutated with probability 1 / K, 2 elites; begun with each client's own best cut, all common cuts, chance.

    Ties go to the earlier individual.
    """
    K = len(clients)
    choices = [k.cuts for k in clients]
    pool = _first_generation(clients, rng, population)
    for _ in range(generations):
        ranked = sorted(range(len(pool)), key=lambda i: (fitness(pool[i]), i))
        children = [pool[i] for i in ranked[:2]]
        while len(children) < population:
            mother, father = (
                min(rng.integers(0, len(pool), 3), key=lambda i: (fitness(pool[i]), i)) for _ in range(2)
            )
            genes = list(pool[mother])
            if rng.random() < 0.9:
                genes = [
                    m if keep else f
                    for m, f, keep in zip(genes, pool[father], rng.random(K) < 0.5, strict=True)
                ]
            for k in np.flatnonzero(rng.random(K) < 1 / K):
                genes[k] = choices[k][int(rng.integers(len(choices[k])))]
            children.append(tuple(genes))
        pool = children
    best = min(range(len(pool)), key=lambda i: (fitness(pool[i]), i))
    return chosen(fitness, pool[best])


def _first_generation(
    clients: Sequence[ClientCosts], rng: np.random.Generator, population: int
) -> list[tuple[int, ...]]:
    pool = [own_cuts(clients), *_common_cuts(clients)][:population]
    while len(pool) < population:
        pool.append(random_cuts(clients, rng))
    return pool


def own_cuts(clients: Sequence[ClientCosts]) -> tuple[int, ...]:
    """Each client's own best cut at equal shares, whatever the others take; ties go to the smaller one."""
    K = len(clients)

    def best(k: ClientCosts) -> int:
        return min(k.cuts, key=lambda c: (k.alpha[c - 1] + K * (k.beta[c - 1] + k.sigma[c - 1]), c))

    return tuple(map(best, clients))


def random_cuts(clients: Sequence[ClientCosts], rng: np.random.Generator) -> tuple[int, ...]:
    """Any cut that a client may take, each as likely as the others."""
    return tuple(k.cuts[int(rng.integers(len(k.cuts)))] for k in clients)


def _common_cuts(clients: Sequence[ClientCosts]) -> list[tuple[int, ...]]:
    return [(c,) * len(clients) for c in clients[0].cuts if all(k.feasible[c - 1] for k in clients)]


def chosen(fitness: Fitness, cuts: tuple[int, ...]) -> HSFLPlan:
    """The plan of these cuts."""
    value, shares = fitness.of(cuts)
    return HSFLPlan(cuts, shares, value)


def plan_by_trying_all(clients: Sequence[ClientCosts], fitness: Fitness) -> HSFLPlan:
    """The best cuts of all: for a few clients."""
    return chosen(fitness, min(product(*(k.cuts for k in clients)), key=lambda cuts: (fitness(cuts), cuts)))


def best_common(clients: Sequence[ClientCosts], fitness: Fitness) -> HSFLPlan:
    """The one cut for all with the shortest round, at the best shares."""
    return chosen(fitness, min(_common_cuts(clients), key=fitness))


def at_equal_shares(clients: Sequence[ClientCosts], cuts: tuple[int, ...], scenarios: np.ndarray) -> HSFLPlan:
    """The plan of these cuts at 1 / K of the link and of the server for each client."""
    shares = equal_shares(*_at(clients, cuts))
    return HSFLPlan(cuts, shares, float(times(clients, cuts, shares, scenarios).max(1).mean()))


def best_common_at_equal_shares(clients: Sequence[ClientCosts], scenarios: np.ndarray) -> HSFLPlan:
    """The one cut for all with the shortest round at equal shares."""
    plans = [at_equal_shares(clients, cuts, scenarios) for cuts in _common_cuts(clients)]
    return min(plans, key=lambda plan: plan.fitness)


# --- whole channels --------------------------------------------------------------------------------------


def whole_channels(alpha: np.ndarray, beta: np.ndarray, sigma: np.ndarray, channels: int) -> Shares:
    """The best shares of which each link share is a whole number of channels, at least one: branch and bound.

    Depth first; a node fixes the channels of some clients and is bounded by the continuous optimum of the
    rest; branches on the most fractional share (ties: the lower client), rounded up first.
    Raises ValueError when there are fewer channels than clients.
    """
    if channels < len(alpha):
        raise ValueError(f"{len(alpha)} clients need at least as many channels, found {channels}")
    search = _ChannelSearch(alpha, beta, sigma, channels)
    search.visit({})
    assert search.best is not None
    return search.best


class _ChannelSearch:
    def __init__(self, alpha: np.ndarray, beta: np.ndarray, sigma: np.ndarray, channels: int) -> None:
        self.alpha, self.beta, self.sigma, self.channels = alpha, beta, sigma, channels
        self.best: Shares | None = None

    def visit(self, fixed: dict[int, int]) -> None:
        """Look below a node: the clients in `fixed` have so many channels."""
        K = len(self.alpha)
        open_clients = [k for k in range(K) if k not in fixed]
        left = self.channels - sum(fixed.values())
        if left < len(open_clients):
            return
        if not open_clients:
            self._try(np.array([fixed[k] / self.channels for k in range(K)]))
            return
        T, wanted = self._relaxed(fixed, left / self.channels)
        if self.best is not None and self.best.round_s * (1 - 1e-12) <= T:
            return
        parts = {k: wanted[k] * self.channels for k in open_clients}
        k = min(open_clients, key=lambda k: (abs(parts[k] % 1 - 0.5), k))
        up, down = math.ceil(parts[k]), math.floor(parts[k])
        for m in dict.fromkeys((up, *range(down, 0, -1), *range(up + 1, left + 1))):
            if 1 <= m <= left - len(open_clients) + 1:
                self.visit({**fixed, k: m})

    def _relaxed(self, fixed: dict[int, int], left: float) -> tuple[float, np.ndarray]:
        """The continuous optimum with the link shares of `fixed` as they are, and the shares there."""
        K = len(self.alpha)
        is_fixed = np.array([k in fixed for k in range(K)])
        given = np.array([fixed.get(k, 0) / self.channels for k in range(K)])
        alpha = np.where(is_fixed, self.alpha + self.beta / np.where(is_fixed, given, 1.0), self.alpha)
        beta, sigma = np.where(is_fixed, 0.0, self.beta) / left, self.sigma

        def need(T: float) -> float:
            u = T - alpha
            if u.min() <= 0 or (sigma / u).sum() >= 1:
                return math.inf
            return float(_link_shares(u, beta, sigma).sum())

        T = bisect(need, 1.0, float(alpha.max()))
        return T, _link_shares(T - alpha, beta, sigma) * left

    def _try(self, x: np.ndarray) -> None:
        """A whole assignment: y from bisection on T at these link shares."""
        alpha = self.alpha + self.beta / x
        T = bisect(lambda T: float((self.sigma / (T - alpha)).sum()), 1.0, float(alpha.max()))
        if self.best is None or self.best.round_s > T:
            self.best = Shares(T, tuple(map(float, x)), tuple(map(float, self.sigma / (T - alpha))))
