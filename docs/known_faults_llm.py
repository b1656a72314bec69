"""TorchRL's own KL parts for language models: the number that they give, next to the right one.

Each function is a script of at most 25 lines, to be reported as it is, together with the setup
above it. One that fails shows that TorchRL has changed: remove its row from the page.
`python docs/known_faults_llm.py` runs all of them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict, lazy_stack
from tokenizers import Tokenizer, models, pre_tokenizers
from torchrl.data import AdaptiveKLController, LazyTensorStorage, ReplayBuffer
from torchrl.envs.llm.transforms.kl import KLComputation, KLRewardTransform
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import GRPOLoss, MCAdvantage
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

WORDS = ["<pad>", "<end>", *(f"w{n}" for n in range(14))]


def make_tokenizer(pad: str = "<pad>") -> Any:
    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token=pad))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token=pad, eos_token="<end>")


def make_model(pad: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(0)
    size = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(**size, num_attention_heads=2, pad_token_id=pad, eos_token_id=1)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(8.0 if weight.ndim > 1 else 1.0)  # far from uniform
    return model


def sample(model: Any, tokenizer: Any, temperature: float = 1.0, **options: Any) -> Any:
    """Eight responses of a TransformersWrapper to one prompt."""
    generate = {"max_new_tokens": 8, "do_sample": True, "top_k": 16, "temperature": temperature}
    wrapper = TransformersWrapper(
        model, tokenizer=tokenizer, input_mode="text", generate_kwargs=generate,
        pad_output=True, **options,
    )  # fmt: skip
    prompts = TensorDict(text=TensorDict(prompt=["w1 w2 w3"] * 8, batch_size=8), batch_size=8)
    torch.manual_seed(0)
    with torch.no_grad():
        return wrapper(prompts)


def log_probs_of(model: Any, batch: Any, temperature: float = 1.0) -> torch.Tensor:
    """What the model says of the response tokens, (8, T), by one pass over the whole texts."""
    tokens, n = batch["tokens", "full"], batch["tokens", "prompt"].shape[-1]
    with torch.no_grad():
        logits = model(tokens).logits / temperature
    scores = logits.log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1)
    return scores[:, n - 1 :]


def controller_given_a_kl() -> str:
    """A KL of five times the target lowers the coefficient."""
    controller = AdaptiveKLController(init_kl_coef=0.1, target=1.0, horizon=100)
    controller.update([5.0] * 10)
    right = 0.1 * (1 + 0.2 * 10 / 100)
    assert controller.coef < 0.1 < right
    return f"coefficient {float(controller.coef):.3f}, right {right:.3f}"


def controller_at_zero() -> str:
    """A coefficient of 0 becomes NaN, for ever."""
    controller = AdaptiveKLController(init_kl_coef=0.0, target=1.0, horizon=100)
    for _ in range(2):
        controller.update([torch.tensor(-0.0)] * 10)
    assert math.isnan(controller.coef)
    return f"coefficient {float(controller.coef)}, right 0.0"


def controller_with_many_samples() -> str:
    """Five times the horizon in one update makes the coefficient negative."""
    controller = AdaptiveKLController(init_kl_coef=0.1, target=1.0, horizon=10)
    controller.update([-0.01 * 0.1] * 60)  # rewards -coef * kl of a KL of 0.01
    assert controller.coef < 0
    return f"coefficient {float(controller.coef):.3f}, right above 0"


def penalize(reward: torch.Tensor) -> Any:
    """KLComputation on one response of eight tokens, of 0.1 nats each."""
    kl = torch.full((8,), 0.1)
    row = TensorDict(log_probs={"full": kl}, ref_log_probs={"full": kl * 0}, reward=reward)
    step = lazy_stack([row]) if len(reward) == 1 else row[None]
    batch = TensorDict(next=step, batch_size=1)
    return KLComputation(coeff=1.0)(batch)["next"].get("reward")[0]


def reward_of_each_token() -> str:
    """KLComputation, the end of RetrieveKL, adds the reward of a response once per token."""
    total, right = penalize(torch.ones(1, 1)).sum(), 1 - 8 * 0.1
    assert abs(total - (8 - 0.8)) < 1e-5
    return f"sum of the rewards {total:.1f}, right {right:.1f}"


def dense_rewards() -> str:
    """KLComputation raises for a reward of each token in a batch that is not a lazy stack."""
    right = torch.ones(8, 1).sum() - 0.8
    try:
        penalize(torch.ones(8, 1))
    except RuntimeError as error:
        return f"RuntimeError ({str(error)[:40]}...), right a sum of {right:.1f}"
    raise AssertionError("dense rewards are taken")


def first_token() -> str:
    """The first token of a sampled response has log-prob 0."""
    model = make_model()
    batch = sample(model, make_tokenizer(), return_log_probs=True)
    first = batch["log_probs", "response"][:, 0]
    right = log_probs_of(model, batch)[:, 0]
    assert (first == 0).all()
    assert (right < -0.1).any()
    return f"mean log-prob {first.mean():.2f} nats, right {right.mean():.2f}"


def temperature() -> str:
    """Log-probs of sampled responses ignore the temperature of the sampler."""
    model = make_model()
    batch = sample(model, make_tokenizer(), 0.5, return_log_probs=True)
    counted = batch["tokens", "response"][:, 1:] > 1
    wrong = batch["log_probs", "response"][:, 1:][counted]
    right = log_probs_of(model, batch, 0.5)[:, 1:][counted]
    assert (wrong - log_probs_of(model, batch)[:, 1:][counted]).abs().max() < 1e-3
    assert (wrong - right).abs().mean() > 0.1
    return f"mean log-prob {wrong.mean():.2f} nats per token, right {right.mean():.2f}"


def end_token() -> str:
    """Where the pad token ends a text, responses lose their end token."""
    model, tokenizer = make_model(pad=1), make_tokenizer("<end>")
    options = {"generate": True, "pad_output": False, "input_mode": "text"}
    generate = {"max_new_tokens": 8, "do_sample": True, "top_k": 16, "bad_words_ids": [[0]]}
    wrapper: Any = TransformersWrapper(
        model, tokenizer=tokenizer, generate_kwargs=generate, **options
    )
    prompts = TensorDict(text=TensorDict(prompt=["w1 w2 w3"] * 32, batch_size=32), batch_size=32)
    torch.manual_seed(0)
    rows = wrapper(prompts)["tokens"].get("response", as_list=True)
    shorter = [row for row in rows if len(row) < 8]
    ended = sum(1 in row.tolist() for row in shorter)
    assert shorter
    assert ended == 0
    return f"{ended} of {len(shorter)} short responses end with the end token, right {len(shorter)}"


def no_log_probs() -> str:
    """A sampler with `return_log_probs` writes no ("log_probs", "full"), which GRPOLoss reads."""
    batch = sample(make_model(), make_tokenizer(), return_log_probs=True)
    full = batch.get(("log_probs", "full"), None)
    assert full is None
    return f"('log_probs', 'full') {full}, right a tensor of shape {(8, 11)}"


def not_causal() -> str:
    """Without `pad_model_input`, log-probs of a token depend on the tokens after it."""
    wrapper = TransformersWrapper(
        make_model(), tokenizer=make_tokenizer(), input_mode="tokens", generate=False,
        pad_output=False, pad_model_input=False,
    )  # fmt: skip
    scores = []
    for last in (4, 5):
        full = torch.tensor([[3, 4, 5, last]])
        batch = TensorDict(tokens=TensorDict(full=full, batch_size=1), batch_size=1)
        scores.append(wrapper(batch)["log_probs"].get("full", as_list=True)[0][1:3])
    moved = (scores[0] - scores[1]).abs().max()
    assert moved > 0.01
    return f"log-probs of earlier tokens move by {moved:.2f} nats, right 0.00"


def in_a_buffer() -> str:
    """KLRewardTransform in a buffer that is extended through it raises."""
    model = make_model()
    reference = TransformersWrapper(
        model, tokenizer=make_tokenizer(), input_mode="tokens", generate=False, pad_output=True,
        return_log_probs=True,
    )  # fmt: skip
    buffer = ReplayBuffer(storage=LazyTensorStorage(8))
    buffer.append_transform(KLRewardTransform(reference), invert=True)
    batch = sample(model, make_tokenizer(), return_log_probs=True)
    batch["next"] = TensorDict(reward=torch.ones(8, 1, 1), batch_size=8)
    try:
        buffer.extend(batch)
    except Exception as error:
        return f"{type(error).__name__} ({str(error)[:40]}...), right {8} responses"
    raise AssertionError("it is scored")


def grpo_counts_padding() -> str:
    """`kl_to_ref` of GRPOLoss is a mean over the prompts and the padding, too."""
    model, tokenizer = make_model(), make_tokenizer()
    wrapper = TransformersWrapper(
        model, tokenizer=tokenizer, input_mode="tokens", generate=False, pad_output=True
    )
    full = torch.randint(2, 16, (4, 12))
    mask = (torch.arange(12) >= 8).expand(4, 12)
    batch = TensorDict(tokens=TensorDict(full=full, batch_size=4), batch_size=4)
    batch["masks"] = TensorDict(
        all_attention_mask=torch.ones_like(mask), all_assistant_mask=mask, batch_size=4
    )
    with torch.no_grad():
        old = wrapper(batch.copy())["log_probs", "full"]
    batch["log_probs", "full"], batch["advantage"] = old, torch.ones(4, 12, 1)
    batch["next"] = TensorDict(ref_log_probs={"full": old - 1.0}, batch_size=4)
    loss = GRPOLoss(wrapper, kl_to_ref_coeff=1.0, masking_strategy="rlhf")
    wrong, right = loss(batch).kl_to_ref, math.exp(-1) - 1 + 1
    assert wrong < 0.5 * right
    return f"mean KL {wrong:.3f} nats per token, right {right:.3f}"


def gpt2() -> str:
    """GPT-2 cannot be scored: the mask is passed as the cache."""
    torch.manual_seed(0)
    size = {"vocab_size": 16, "n_positions": 32, "n_embd": 32, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=None, eos_token_id=1)).eval()
    wrapper = TransformersWrapper(
        model, tokenizer=make_tokenizer(), input_mode="tokens", generate=False, pad_output=True
    )
    full = torch.tensor([[3, 4, 5, 6]])
    batch = TensorDict(tokens=TensorDict(full=full, batch_size=1), batch_size=1)
    right = model(full).logits.log_softmax(-1)[0, 2, 6]
    try:
        wrapper(batch)
    except AttributeError as error:
        return f"{type(error).__name__}, right {right:.2f} nats for the last token"
    raise AssertionError("GPT-2 is scored")


def advantages_of_penalized_rewards() -> str:
    """With equal task rewards, GRPO's advantages do not depend on the coefficient."""
    kl, found = torch.tensor([0.5, 1.0, 2.0, 4.0]).reshape(4, 1, 1), []
    for coeff in (0.01, 100.0):
        step = TensorDict(reward=-coeff * kl, done=torch.ones(4, 1, 1).bool(), batch_size=4)
        batch = TensorDict(next=step, batch_size=4)
        batch["text", "prompt"] = ["w1"] * 4
        batch["query"] = ["w1"] * 4
        transform = MCAdvantage(grpo_size=4, prompt_key="query")
        found.append(transform.inv(batch)["advantage"].flatten())
    ratio = float(found[1][0] / found[0][0])
    assert abs(ratio - 1) < 1e-2
    return f"advantages grow by {ratio:.2f} from coefficient 0.01 to 100, right by 10000"


FAULTS: tuple[Callable[[], str], ...] = (
    controller_given_a_kl,
    controller_at_zero,
    controller_with_many_samples,
    reward_of_each_token,
    dense_rewards,
    first_token,
    temperature,
    end_token,
    no_log_probs,
    not_causal,
    in_a_buffer,
    grpo_counts_padding,
    gpt2,
    advantages_of_penalized_rewards,
)

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for fault in FAULTS:
        print(f"{fault.__name__}: {fault()}")
