"""TorchRL's LLM API: chats of a TransformersWrapper, each response scored and penalized once."""

import torch
from tensordict import TensorDict, set_list_to_stack
from tokenizers import Tokenizer, models, pre_tokenizers
from torchrl.envs.llm import ChatEnv
from torchrl.modules.llm import TransformersWrapper
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from torchrl_kl import AdaptiveKLController, KLPenaltyLoss
from torchrl_kl.language import CausalLMActor, ResponseKLTransform, as_steps

# A toy tokenizer and model; in practice, AutoTokenizer and AutoModelForCausalLM.
QUESTIONS = ["how was the film", "was the book good"]
WORDS = ["<pad>", "<end>", *sorted(set(" ".join([*QUESTIONS, "user assistant"]).split()))]
TEMPLATE = (  # TorchRL uses a template only if it marks what was generated; ChatML if not
    "{% for m in messages %}{{ m['role'] }} {% generation %}{{ m['content'] }} <end> "
    "{% endgeneration %}{% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
)
words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<pad>"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=words, pad_token="<pad>", eos_token="<end>", chat_template=TEMPLATE
)
torch.manual_seed(0)
size = {"vocab_size": len(WORDS), "hidden_size": 32, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(**size, pad_token_id=0, eos_token_id=1)).eval()

# TorchRL's sampler takes the 50 most likely tokens unless it is told otherwise.
generate = {"max_new_tokens": 6, "do_sample": True, "top_k": len(WORDS), "temperature": 0.9}
sampler = TransformersWrapper(
    model, tokenizer=tokenizer, input_mode="text", pad_output=True, generate_kwargs=generate
)
env = ChatEnv(batch_size=(16,), input_mode="text", tokenizer=tokenizer)
# The KL goes into the loss, so the transform only measures; with a controller it penalizes.
measure = ResponseKLTransform(model, 0.0, temperature=0.9)
actor = CausalLMActor(model, temperature=0.9)
controller = AdaptiveKLController(init_coeff=0.1, target=0.5, horizon=1000)
penalty = KLPenaltyLoss(actor, controller, gradient="sequence", reference=measure.reference)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for _ in range(5):
    with set_list_to_stack(True):
        batch = env.step(sampler(env.reset(TensorDict(query=QUESTIONS * 8, batch_size=16))))
    good = batch["tokens", "response"] == WORDS.index("good")
    batch["next", "reward"] = good.float().mean(-1)[:, None, None]
    batch = measure(batch)  # ("next", "kl"): nats per response
    coeff = penalty.update_controller(steps := as_steps(batch, pad_token=0))  # (16, 6): tokens
    advantage = batch["next", "reward"] - batch["next", "reward"].mean()
    gain = (advantage.squeeze(-1) * actor.log_prob(steps.copy()))[steps["collector", "mask"]]
    losses = penalty(steps)
    optimizer.zero_grad()
    (losses["loss_kl"] - gain.mean()).backward()
    optimizer.step()
    print(f"KL {batch['next', 'kl'].mean():+.3f} nats per response, coefficient {coeff:.4f}")
