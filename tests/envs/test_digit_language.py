"""The digit language against enumeration and a slow, direct implementation of its rule."""

import itertools
import math
from collections import Counter

import pytest
import torch

from torchrl_kl.envs import DigitLanguage


def all_ids(n_ids: int, length: int) -> torch.Tensor:
    return torch.tensor(list(itertools.product(range(n_ids), repeat=length)))


def slow_probs(language: DigitLanguage, context: list[int]) -> list[float]:
    digits = [token for token in context if token != language.separator]
    source = digits[max(0, len(digits) - language.window) :]
    counts = Counter((digit + 1) % language.vocab_size for digit in source)
    return [counts[token] / len(source) for token in range(language.n_tokens)]


def texts_of(language: DigitLanguage, prompt: list[int], n_ids: int) -> torch.Tensor:
    """All texts of one prompt, with every response of ids below n_ids."""
    responses = all_ids(n_ids, language.response_length)
    begin = torch.tensor([*prompt, language.separator]).expand(len(responses), -1)
    return torch.cat([begin, responses], -1)


class TestSizes:
    def test_derived_sizes(self):
        language = DigitLanguage(vocab_size=7, prompt_length=3, response_length=5, window=2)
        assert (language.separator, language.n_tokens) == (7, 8)
        assert (language.context_length, language.text_length) == (4, 9)

    def test_defaults(self):
        assert DigitLanguage() == DigitLanguage(10, 4, 4, 4)

    @pytest.mark.parametrize("name", ["vocab_size", "prompt_length", "response_length", "window"])
    def test_wrong_sizes_are_refused(self, name):
        with pytest.raises(ValueError, match=f"`{name}` must be at least 1, got 0"):
            DigitLanguage(**{name: 0})
        with pytest.raises(TypeError, match=f"`{name}` must be an int, got float"):
            DigitLanguage(**{name: 4.0})  # pyright: ignore[reportArgumentType]
        with pytest.raises(TypeError, match=f"`{name}` must be an int, got bool"):
            DigitLanguage(**{name: True})

    def test_large_sizes_work(self):
        language = DigitLanguage(1000, 512, 512, 512)
        generator = torch.Generator().manual_seed(0)
        texts = language.sample(
            language.sample_prompts(4, generator=generator), generator=generator
        )
        assert texts.shape == (4, 1025)
        log_prob = language.log_prob(texts)
        # A token is in the window 1 to 512 times.
        assert (log_prob >= -math.log(512) - 1e-12).all()
        assert (log_prob <= 0).all()
        assert language.next_token_probs(texts).shape == (4, 1001)


class TestNextTokenProbs:
    def test_hand_values(self):
        probs = DigitLanguage().next_token_probs(torch.tensor([3, 9, 9, 8, 10]))
        expected = torch.zeros(11, dtype=torch.float64)
        expected[4], expected[0], expected[9] = 0.25, 0.5, 0.25
        torch.testing.assert_close(probs, expected, rtol=0, atol=0)

    @pytest.mark.parametrize("window", [1, 2, 3, 9])
    @pytest.mark.parametrize("length", [1, 2, 3, 5])
    def test_all_contexts_against_the_slow_rule(self, window, length):
        language = DigitLanguage(vocab_size=2, window=window)
        contexts = all_ids(language.n_tokens, length)
        contexts = contexts[(contexts != language.separator).any(-1)]
        expected = [slow_probs(language, context) for context in contexts.tolist()]
        probs = language.next_token_probs(contexts)
        torch.testing.assert_close(probs, torch.tensor(expected, dtype=torch.float64))

    @pytest.mark.parametrize("batch", [(), (3,), (2, 3), (0,)])
    def test_any_leading_shape(self, batch):
        language = DigitLanguage()
        contexts = language.sample_prompts(batch)
        probs = language.next_token_probs(contexts)
        assert probs.shape == (*batch, 11)
        flat = language.next_token_probs(contexts.reshape(-1, 4))
        torch.testing.assert_close(probs.reshape(-1, 11), flat, rtol=0, atol=0)

    def test_a_context_without_digits_is_refused(self):
        with pytest.raises(
            ValueError, match=r"must have a digit in each context, got shape \(2, 2\)"
        ):
            DigitLanguage().next_token_probs(torch.tensor([[3, 10], [10, 10]]))

    def test_wrong_tokens_are_refused(self):
        language = DigitLanguage()
        with pytest.raises(
            TypeError, match=r"`tokens` must be .* torch.int64 .* got torch.float32"
        ):
            language.next_token_probs(torch.zeros(3))
        with pytest.raises(TypeError, match=r"`tokens` must be .* got list"):
            language.next_token_probs([1, 2])  # pyright: ignore[reportArgumentType]
        with pytest.raises(ValueError, match=r"`tokens` must have shape \(\*B, T\), got \(\)"):
            language.next_token_probs(torch.tensor(3))
        for bad in (-1, 11):
            with pytest.raises(ValueError, match="`tokens` must be between 0 and 10, got values"):
                language.next_token_probs(torch.tensor([3, bad]))


class TestEntropy:
    def test_hand_values(self):
        contexts = torch.tensor([[1, 1, 1, 1], [1, 2, 3, 4], [1, 1, 2, 2], [5, 5, 5, 6]])
        expected = [0.0, math.log(4), math.log(2), math.log(4) - 0.75 * math.log(3)]
        entropy = DigitLanguage().entropy(contexts)
        torch.testing.assert_close(entropy, torch.tensor(expected, dtype=torch.float64))

    def test_mean_at_each_position_over_all_texts(self):
        # A text is a prompt and, per response token, which of the last four digits it came from:
        # all of these choices have the same probability, so a plain mean is exact.
        language = DigitLanguage()
        contexts = all_ids(10, 4)
        means = []
        for _ in range(4):
            means.append(language.entropy(contexts).mean())
            successors = (contexts[:, -4:] + 1) % 10
            contexts = torch.cat([contexts.repeat(4, 1), successors.T.reshape(-1, 1)], -1)
            assert len(contexts) == 10**4 * 4 ** len(means)
        expected = torch.tensor([1.18681, 1.20969, 1.17576, 1.10696], dtype=torch.float64)
        torch.testing.assert_close(torch.stack(means), expected, rtol=0, atol=5e-6)
        mean = torch.stack(means).mean()
        torch.testing.assert_close(mean, torch.tensor(1.16981).double(), rtol=0, atol=5e-6)


class TestLogProb:
    def test_each_token_is_scored_given_the_tokens_before_it(self):
        # 6 and 6 have probability 1/4 and 1/2; the separator and 5 are impossible; the last 7 is
        # made from the two 6 among 5, 6, 6, 5, with the separator left out.
        language = DigitLanguage(response_length=5)
        log_prob = language.log_prob(torch.tensor([0, 1, 2, 5, 10, 6, 7, 10, 5, 8]))
        probs = [1 / 4, 1 / 4, 0, 0, 1 / 4]
        torch.testing.assert_close(log_prob, torch.tensor(probs, dtype=torch.float64).log())

    @pytest.mark.parametrize("window", [1, 2, 4])
    def test_all_responses_against_the_slow_rule(self, window):
        language = DigitLanguage(vocab_size=3, prompt_length=2, response_length=3, window=window)
        texts = texts_of(language, [0, 2], language.n_tokens)
        log_prob = language.log_prob(texts)
        expected = [
            [slow_probs(language, text[:end])[text[end]] for end in range(3, 6)]
            for text in texts.tolist()
        ]
        torch.testing.assert_close(log_prob.exp(), torch.tensor(expected, dtype=torch.float64))
        total = log_prob.sum(-1).exp().sum()
        torch.testing.assert_close(total, torch.tensor(1.0, dtype=torch.float64))

    def test_any_leading_shape(self):
        language = DigitLanguage()
        texts = language.sample(language.sample_prompts((2, 3)))
        assert language.log_prob(texts).shape == (2, 3, 4)
        one = language.log_prob(texts[1, 2])
        torch.testing.assert_close(language.log_prob(texts)[1, 2], one, rtol=0, atol=0)

    def test_wrong_texts_are_refused(self):
        language = DigitLanguage()
        with pytest.raises(ValueError, match=r"`tokens` must have shape \(\*B, 9\), got \(2, 8\)"):
            language.log_prob(torch.zeros(2, 8, dtype=torch.int64))
        for text in ([1, 2, 3, 4, 5, 5, 5, 5, 5], [1, 10, 3, 4, 10, 5, 5, 5, 5]):
            with pytest.raises(ValueError, match="must begin with 4 digits and the separator 10"):
                language.log_prob(torch.tensor([text]))


class TestSampling:
    @pytest.mark.parametrize("window", [1, 2, 3])
    @pytest.mark.parametrize("prompt", [[0], [0, 2], [1, 1]])
    def test_frequencies_are_the_probabilities(self, window, prompt):
        language = DigitLanguage(3, len(prompt), 3, window)
        n = 20_000
        prompts = torch.tensor(prompt).expand(n, -1)
        generator = torch.Generator().manual_seed(0)
        sampled = language.sample(prompts, generator=generator)
        texts = texts_of(language, prompt, language.n_tokens)
        probs = language.log_prob(texts).sum(-1).exp()
        counts = Counter(tuple(text) for text in sampled.tolist())
        frequencies = torch.tensor([counts[tuple(text)] / n for text in texts.tolist()])
        # Five standard errors of a frequency, in each of at most 64 cells; zero where impossible.
        assert ((frequencies - probs).abs() <= 5 * (probs * (1 - probs) / n).sqrt() + 1e-12).all()

    def test_rows_are_drawn_apart(self):
        language = DigitLanguage(response_length=32)
        prompts = torch.tensor([0, 3, 5, 7]).expand(2, -1)
        texts = language.sample(prompts, generator=torch.Generator().manual_seed(0))
        assert (texts[0] != texts[1]).any()

    def test_texts_hold_their_prompt(self):
        language = DigitLanguage()
        prompts = language.sample_prompts((2, 3))
        texts = language.sample(prompts)
        assert texts.shape == (2, 3, 9)
        assert texts.dtype == torch.int64
        torch.testing.assert_close(texts[..., :4], prompts)
        assert (texts[..., 4] == language.separator).all()
        assert language.sample(prompts[0, 0]).shape == (9,)

    def test_prompts_are_uniform_digits(self):
        n = 10_000
        prompts = DigitLanguage().sample_prompts(n, generator=torch.Generator().manual_seed(0))
        assert prompts.shape == (n, 4)
        assert prompts.dtype == torch.int64
        frequencies = torch.nn.functional.one_hot(prompts, 10).double().mean(0)
        # Five standard errors of each of the 40 frequencies.
        assert ((frequencies - 0.1).abs() <= 5 * math.sqrt(0.1 * 0.9 / n)).all()
        assert DigitLanguage().sample_prompts((2, 3)).shape == (2, 3, 4)

    def test_a_generator_is_the_only_source(self):
        language = DigitLanguage()

        def draw():
            generator = torch.Generator().manual_seed(5)
            prompts = language.sample_prompts(16, generator=generator)
            return language.sample(prompts, generator=generator)

        before = torch.get_rng_state()
        texts = draw()
        torch.testing.assert_close(torch.get_rng_state(), before, rtol=0, atol=0)
        torch.rand(1)
        torch.testing.assert_close(draw(), texts, rtol=0, atol=0)

    def test_without_a_generator_the_global_rng_is_used(self):
        language = DigitLanguage()
        torch.manual_seed(5)
        texts = language.sample(language.sample_prompts(16))
        torch.manual_seed(5)
        again = language.sample(language.sample_prompts(16))
        torch.testing.assert_close(again, texts, rtol=0, atol=0)

    def test_wrong_prompts_are_refused(self):
        language = DigitLanguage()
        with pytest.raises(TypeError, match=r"`prompts` must be .* got torch.int32"):
            language.sample(torch.zeros(2, 4, dtype=torch.int32))
        with pytest.raises(ValueError, match=r"`prompts` must have shape \(\*B, 4\), got \(2, 9\)"):
            language.sample(torch.zeros(2, 9, dtype=torch.int64))
        with pytest.raises(ValueError, match=r"`prompts` must be between 0 and 9, got .* 1 and 10"):
            language.sample(torch.tensor([[1, 2, 3, 10]]))


class TestPreference:
    def test_preferred_token_is_the_successor_of_the_last_digit(self):
        prompts = torch.tensor([[[1, 2, 3, 4]], [[0, 0, 0, 9]]])
        preferred = DigitLanguage().preferred_token(prompts)
        torch.testing.assert_close(preferred, torch.tensor([[5], [0]]))

    def test_preferred_token_wants_prompts(self):
        with pytest.raises(ValueError, match=r"`prompts` must have shape \(\*B, 4\), got \(9,\)"):
            DigitLanguage().preferred_token(torch.tensor([1, 2, 3, 4, 10, 5, 5, 5, 5]))

    def test_preference_looks_at_the_first_response_token_only(self):
        texts = torch.tensor(
            [
                [5, 7, 1, 5, 10, 6, 2, 7, 3],
                [5, 7, 1, 9, 10, 0, 10, 10, 10],
                [5, 7, 1, 5, 10, 2, 6, 6, 6],
                [5, 7, 1, 5, 10, 10, 6, 6, 6],
            ]
        )
        reward = DigitLanguage().preference(texts)
        torch.testing.assert_close(reward, torch.tensor([1.0, 1.0, 0.0, 0.0]))

    def test_preference_wants_whole_texts(self):
        with pytest.raises(ValueError, match=r"`tokens` must have shape \(\*B, 9\), got \(6,\)"):
            DigitLanguage().preference(torch.tensor([1, 2, 3, 4, 10, 5]))
