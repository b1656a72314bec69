"""The digit language against enumeration and a slow, direct implementation of its rule."""

import itertools
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
    @pytest.mark.parametrize("name", ["vocab_size", "prompt_length", "response_length", "window"])
    @pytest.mark.parametrize("size", [0, 4.0, True])
    def test_wrong_sizes_are_refused(self, name, size):
        with pytest.raises(ValueError, match=f"`{name}` must be an int of at least 1, got {size}"):
            DigitLanguage(**{name: size})


class TestNextTokenProbs:
    @pytest.mark.parametrize("window", [1, 2, 3, 9])
    @pytest.mark.parametrize("length", [1, 2, 3, 5])
    def test_all_contexts_against_the_slow_rule(self, window, length):
        language = DigitLanguage(vocab_size=2, window=window)
        contexts = all_ids(language.n_tokens, length)
        contexts = contexts[(contexts != language.separator).any(-1)]
        expected = [slow_probs(language, context) for context in contexts.tolist()]
        probs = language.next_token_probs(contexts)
        torch.testing.assert_close(probs, torch.tensor(expected, dtype=torch.float64))

    @pytest.mark.parametrize(
        ("tokens", "error", "match"),
        [
            ([[3, 10], [10, 10]], ValueError, r"a digit in each context, got shape \(2, 2\)"),
            ([3.0], TypeError, r"`tokens` must be .* torch.int64 .* got torch.float32"),
            (3, ValueError, r"`tokens` must have shape \(\*B, T\), got \(\)"),
            ([3, -1], ValueError, "`tokens` must be between 0 and 10, got values between -1 and 3"),
            ([3, 11], ValueError, "`tokens` must be between 0 and 10, got values between 3 and 11"),
        ],
    )
    def test_wrong_tokens_are_refused(self, tokens, error, match):
        with pytest.raises(error, match=match):
            DigitLanguage().next_token_probs(torch.tensor(tokens))


class TestLogProb:
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

    @pytest.mark.parametrize(
        ("text", "match"),
        [
            ([1] * 8, r"`tokens` must have shape \(\*B, 9\), got \(8,\)"),
            ([1, 2, 3, 4, 5, 5, 5, 5, 5], "must begin with 4 digits and the separator 10"),
            ([1, 10, 3, 4, 10, 5, 5, 5, 5], "must begin with 4 digits and the separator 10"),
        ],
    )
    def test_wrong_texts_are_refused(self, text, match):
        with pytest.raises(ValueError, match=match):
            DigitLanguage().log_prob(torch.tensor(text))


class TestSampling:
    @pytest.mark.parametrize(
        ("window", "prompt"), [(1, [0, 2]), (2, [0]), (2, [0, 2]), (3, [1, 1])]
    )
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

    def test_wrong_prompts_are_refused(self):
        language = DigitLanguage()
        with pytest.raises(ValueError, match=r"`prompts` must have shape \(\*B, 4\), got \(2, 9\)"):
            language.sample(torch.zeros(2, 9, dtype=torch.int64))
        with pytest.raises(ValueError, match=r"`prompts` must be between 0 and 9, got .* 1 and 10"):
            language.preferred_token(torch.tensor([[1, 2, 3, 10]]))


class TestPreference:
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
