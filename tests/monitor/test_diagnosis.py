"""The cause of recorded log-probs by numbers alone, and the evidence against a sampler."""

import math

import pytest
import torch
from torch.distributions import Categorical
from torch.testing import assert_close

from torchrl_kl.monitor.diagnosis import (
    N_ALTERNATIVES,
    SAMPLERS,
    TEMPERATURES,
    TOP_KS,
    PooledEvidence,
    chance,
    find_cause,
    log_ratios,
    take,
)

INF = math.inf


def test_a_stated_chance_is_a_bound():
    for nats in (14.6, 15.2, 16.1, 30.0):
        assert math.exp(-nats) <= float(chance(nats)) < 10 * math.exp(-nats)
    assert chance(INF) == "0"


class TestCause:
    log_probs = (
        torch.randn(700, 6, generator=torch.Generator().manual_seed(1)).double().log_softmax(-1)
    )

    def cause(self, recorded, log_probs=None, **masks):
        log_probs = self.log_probs if log_probs is None else log_probs
        return find_cause(log_probs, self.action, recorded, masks, 1e-3)

    @property
    def action(self):
        return torch.arange(700) % 6

    @pytest.mark.parametrize("temperature", [0.05, 0.33, 0.99, 1.01, 4.4, 30.0])
    def test_any_temperature(self, temperature):
        recorded = take((self.log_probs / temperature).log_softmax(-1), self.action)
        assert f"at temperature {temperature:.3g}. Divide" in self.cause(recorded)

    def test_a_temperature_where_actions_are_masked(self):
        log_probs = self.log_probs.clone()
        log_probs[torch.arange(700), (self.action + 1) % 6] = -INF
        recorded = take((log_probs / 0.5).log_softmax(-1), self.action)
        assert "at temperature 0.5. Divide" in self.cause(recorded, log_probs.log_softmax(-1))

    def test_one_pair_of_numbers_is_not_a_temperature(self):
        """Two actions of one state: some temperature fits whatever the weights became."""
        log_probs = torch.tensor([0.2, 0.8]).double().log().expand(700, 2)
        self_action = torch.arange(700) % 2
        recorded = take(torch.tensor([0.3, 0.7]).double().log().expand(700, 2), self_action)
        assert "cannot be told" in find_cause(log_probs, self_action, recorded, {}, 1e-3)

    def test_a_mask_that_does_not_explain_it_is_not_named(self):
        recorded = take((self.log_probs / 0.5).log_softmax(-1), self.action)
        assert "temperature 0.5" in self.cause(recorded, other=torch.ones(700, 6, dtype=torch.bool))
        shifted = take(self.log_probs, self.action) + 0.01
        assert "other" not in self.cause(shifted, other=torch.ones(700, 6, dtype=torch.bool))

    def test_a_part_of_the_actions(self):
        kept = torch.linspace(0.5, 0.9, 700).double()
        scored = take(self.log_probs, self.action)
        said = self.cause(scored - kept.log())
        assert "is smaller than the actor's: the sampler seems to draw from fewer actions" in said
        said = self.cause(scored + kept.log())
        assert "is larger than the actor's: the actor seems to give probability to fewer" in said

    @pytest.mark.parametrize("temperature", [0.7, 0.9, 1.3, 2.0])
    def test_a_temperature_and_top_k_at_once(self, temperature):
        """Each of the two kept actions may be likelier than under the actor."""
        ranked = self.log_probs.sort(-1, descending=True)
        kept, place = ranked.values[:, :2], torch.arange(700)[:, None] % 2
        recorded = (kept / temperature).log_softmax(-1).gather(-1, place).squeeze(-1)
        action = ranked.indices.gather(-1, place).squeeze(-1)
        likelier = recorded >= take(self.log_probs, action)
        said = find_cause(self.log_probs[likelier], action[likelier], recorded[likelier], {}, 1e-3)
        assert "fewer actions (a mask, top-k or top-p), perhaps with a temperature, too" in said

    @pytest.mark.parametrize("scale", [1, 20])
    def test_the_most_likely_action_each_time(self, scale):
        """Its log-prob is 0, which every temperature near 0 explains, too."""
        log_probs = (scale * self.log_probs).log_softmax(-1)
        said = find_cause(log_probs, log_probs.argmax(-1), torch.zeros(700).double(), {}, 1e-3)
        assert said.startswith("the sampler takes the most likely action each time.")

    def test_top_k_holds_the_actions_that_it_draws(self):
        """The mass of the 2 most likely, for the least likely action, which top-k never draws."""
        ranked = self.log_probs.sort(-1, descending=True)
        recorded = ranked.values[:, -1] - ranked.values[:, :2].logsumexp(-1)
        assert "is smaller than the actor's" in find_cause(
            self.log_probs, ranked.indices[:, -1], recorded, {}, 1e-3
        )

    def test_a_cause_explains_most_of_a_small_difference(self):
        """Of differences of 0.01 a temperature that leaves 0.0005 over is a coincidence."""
        exact = take((self.log_probs / 1.0015).log_softmax(-1), self.action)
        largest = (exact - take(self.log_probs, self.action)).abs().max()
        assert 1e-3 < largest < 0.01
        assert "at temperature 1" in self.cause(exact)
        assert "cannot be told" in self.cause(exact + 5e-4 * torch.linspace(-1, 1, 700).sign())

    def test_cuts_that_no_p_explains_are_not_top_p(self):
        """Each step keeps its 1 or 5 most likely actions of 6, whatever mass they hold."""
        ranked = self.log_probs.sort(-1, descending=True)
        n_kept = torch.arange(700) % 2 * 4 + 1
        kept = ranked.values.logcumsumexp(-1).gather(-1, n_kept.unsqueeze(-1) - 1).squeeze(-1)
        said = find_cause(
            self.log_probs, ranked.indices[:, 0], ranked.values[:, 0] - kept, {}, 1e-3
        )
        assert "is smaller than the actor's" in said

    def test_a_few_steps_of_one_sign_say_nothing(self):
        recorded = take(self.log_probs, self.action)
        for n_steps, said in ((19, "cannot be told"), (20, "is smaller than the actor's")):
            shifted = recorded.clone()
            shifted[:n_steps] += torch.linspace(0.1, 0.2, n_steps).double()
            assert said in find_cause(
                self.log_probs[:500], self.action[:500], shifted[:500], {}, 1e-3
            )

    @pytest.mark.parametrize(
        ("value", "said"), [(math.nan, "cannot be told"), (-INF, "is larger than the actor's")]
    )
    def test_recorded_ones_that_are_not_finite(self, value, said):
        recorded = take(self.log_probs, self.action)
        recorded[::2] = value
        assert said in self.cause(recorded)


def enumerate_actions(n_actions: int, n_steps: int) -> torch.Tensor:
    return torch.cartesian_prod(*[torch.arange(n_actions)] * n_steps)


class TestLogRatios:
    log_probs = (
        torch.tensor([[0.5, -1.0, 0.2, 0.2], [2.0, 0.0, -1.0, -INF], [0.0, 0.0, 0.0, 0.0]])
        .double()
        .log_softmax(-1)
    )

    def test_each_alternative_is_a_distribution_by_enumeration(self):
        """E[exp(log-ratio)] is 1 over all actions of three steps, also with masks and ties."""
        mean = torch.zeros(N_ALTERNATIVES, dtype=torch.float64)
        for action in enumerate_actions(4, 3):
            chance = take(self.log_probs, action).sum().exp()
            if chance > 0:
                mean += chance * log_ratios(self.log_probs, action).exp()
        assert_close(mean, torch.ones_like(mean), rtol=1e-12, atol=0.0)

    def test_a_uniform_policy_is_not_one_that_takes_the_most_likely_action(self):
        log_probs = torch.zeros(200, 5).double().log_softmax(-1)
        ratios = log_ratios(log_probs, torch.arange(200) % 5)
        # Every alternative is then the same policy: all that is left is 200 roundings.
        assert_close(ratios, torch.zeros_like(ratios), rtol=0.0, atol=200 * 2**-50)

    def test_no_temperature_of_the_list_is_the_policys(self):
        assert 1.0 not in TEMPERATURES

    @pytest.mark.parametrize(
        ("sampler", "said"),
        [
            (
                lambda logits: Categorical(logits=logits / 2).sample(),
                "a higher temperature (near 2)",
            ),
            (
                lambda logits: Categorical(logits=logits / 0.5).sample(),
                "(near 0.5), top-k or top-p",
            ),
            (lambda logits: logits.argmax(-1), "the most likely action each time"),
            (
                lambda logits: logits.topk(3).indices[torch.arange(800), torch.arange(800) % 3],
                "top-k sampling with k near 3",
            ),
        ],
    )
    def test_the_best_alternative_is_described(self, sampler, said):
        logits = torch.randn(800, 6).double()
        ratios = log_ratios(logits.log_softmax(-1), sampler(logits))
        assert ratios.max() > math.log(2e6 * N_ALTERNATIVES)
        assert said in SAMPLERS[int(ratios.argmax())]


def ratio_table(probs: torch.Tensor) -> torch.Tensor:
    """The log-ratios of one step, (V, N_ALTERNATIVES), for each action of a policy (V,)."""
    log_probs = probs.double().log().unsqueeze(0)
    return torch.stack([log_ratios(log_probs, torch.tensor([a])) for a in range(len(probs))])


class TestPooledEvidence:
    def test_the_wealth_is_a_martingale_by_enumeration(self):
        """E[wealth + what is not yet bet] is 1 after three batches of a policy that is updated.

        The policy of each step depends on the actions before it, as that of a trained policy does.
        """

        def policy(history):
            return torch.tensor([0.2, 0.5 + len(history), 1.0 * sum(history)]).double().softmax(0)

        def expected(history, chance, wealth):
            if len(history) == 3:
                return chance * (sum(map(math.exp, wealth)) + 1 / 4)
            total = 0.0
            for action in range(3):
                probs = policy(history)
                pooled = PooledEvidence(len(history), wealth)
                pooled.add(ratio_table(probs)[action])
                p = chance * probs[action].item()
                total += expected([*history, action], p, pooled.log_wealth)
            return total

        assert_close(expected([], 1.0, [-INF] * N_ALTERNATIVES), 1.0, rtol=1e-12, atol=0.0)

    @pytest.mark.parametrize("scale", [0.3, 1.0, 3.0])
    def test_no_false_alarm_in_200_000_clean_batches(self, scale):
        """1000 runs of 200 batches of 200 steps, all at once: a wealth of x at most once in x runs.

        The policy moves after every batch. `add` is one line over the alternatives, repeated here
        for all runs at once, and compared with the class on the first of them.
        """
        generator = torch.Generator().manual_seed(round(10 * scale))
        n_runs, wealth, highest = 1000, None, torch.full((1000,), -INF).double()
        pooled = PooledEvidence()
        for n in range(1, 201):
            probs = (scale * torch.randn(5, generator=generator)).softmax(0)
            counts, left, rest = [], torch.full((n_runs,), 200.0), 1.0
            for p in probs.tolist():  # a multinomial, as one binomial after another
                share = torch.full((n_runs,), min(p / rest, 1.0))
                counts.append(torch.binomial(left, share, generator=generator))
                left, rest = left - counts[-1], max(rest - p, 1e-9)
            counts = torch.stack(counts, -1)
            counts[:, -1] += left  # rounding may leave a step over
            table = ratio_table(probs)
            # Not -inf: 0 * -inf would be NaN for an action that was not drawn.
            ratios = counts.double() @ table.clamp_min(-1e9)
            stake = -torch.tensor(n * (n + 1.0) * N_ALTERNATIVES).double().log()
            before = stake if wealth is None else torch.logaddexp(wealth, stake)
            wealth = before + ratios
            highest = torch.maximum(highest, wealth.logsumexp(-1))
            assert_close(pooled.add(ratios[0]), wealth[0], rtol=1e-9, atol=1e-9)
        for level in (5.0, 20.0, 100.0):
            # Ville: at most n_runs / level are expected; 4 standard deviations of a binomial more.
            allowed = n_runs / level + 4 * math.sqrt(n_runs / level)
            assert (highest > math.log(level)).sum() <= allowed
        assert highest.max() < math.log(2e6)

    @pytest.mark.parametrize("temperature", [0.8, 1.25, 2.0])
    @pytest.mark.parametrize("late", [0, 30])
    def test_finds_what_no_single_batch_shows(self, temperature, late):
        """Batches of 200 steps with 5 actions: from the start of a run, or after clean batches."""
        pooled, alone, together = PooledEvidence(), [], []
        for index in range(late + 40):
            logits = 0.6 * torch.randn(200, 5).double()
            sampled = logits / (temperature if index >= late else 1.0)
            action = Categorical(logits=sampled).sample()
            ratios = log_ratios(logits.log_softmax(-1), action)
            alone.append((ratios.logsumexp(-1) - math.log(N_ALTERNATIVES)).item())
            together.append(pooled.add(ratios).logsumexp(-1).item())
        if temperature < 2:
            assert max(alone) < math.log(1e6)
        assert max(together[: late + 1]) < math.log(2e6)
        assert max(together) > math.log(2e6)

    def test_repaired_faults_are_forgotten(self):
        """The evidence of 300 bad batches is gone within 60 clean ones."""
        pooled, evidence = PooledEvidence(), torch.zeros(0)
        for index in range(360):
            logits = torch.randn(200, 5).double()
            action = Categorical(logits=logits / (2.0 if index < 300 else 1.0)).sample()
            evidence = pooled.add(log_ratios(logits.log_softmax(-1), action))
            if index == 299:
                assert evidence.logsumexp(-1) > math.log(2e6)
                assert evidence.max() <= 30
        assert evidence.logsumexp(-1) < 3

    def test_an_impossible_action_is_the_most_evidence(self):
        log_probs = torch.tensor([[0.5, 0.5, 0.0]]).double().log()
        evidence = PooledEvidence().add(log_ratios(log_probs, torch.tensor([2])))
        assert evidence.max() == 30
        assert not evidence.isnan().any()

    def test_the_top_ks_grow(self):
        assert sorted(set(TOP_KS)) == list(TOP_KS)
