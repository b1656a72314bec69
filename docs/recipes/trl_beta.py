"""A callback that moves the `beta` of TRL's GRPOTrainer by a controller."""

import tempfile

import pyarrow
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.trainer_callback import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from torchrl_kl import ExponentialKLController, KLController


class MoveBeta(TrainerCallback):
    """Updates a controller with each KL that the trainer logs, nats per token."""

    def __init__(self, controller: KLController):
        self.controller, self.trainer = controller, None

    def watch(self, trainer: GRPOTrainer) -> None:  # built with a `beta` above 0
        self.trainer, trainer.beta = trainer, self.controller.coeff.item()
        trainer.add_callback(self)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "kl" in (logs or {}):
            self.trainer.beta = self.controller.update(logs["kl"], n_steps=1)
            print(f"KL {logs['kl']:+.4f} nats per token, next beta {self.trainer.beta:.4f}")


# A toy tokenizer and model; in practice, from_pretrained.
WORDS = ["<pad>", "<end>", *["how", "was", "the", "film", "good", "bad"]]
words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<pad>"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")
torch.manual_seed(0)
size = {"vocab_size": len(WORDS), "hidden_size": 32, "intermediate_size": 64}
config = LlamaConfig(**size, num_hidden_layers=2, pad_token_id=0, eos_token_id=1)


def count_good(completions, **_):
    return [float(text.split().count("good")) for text in completions]


with tempfile.TemporaryDirectory() as folder:
    LlamaForCausalLM(config).save_pretrained(folder)  # TRL loads the reference from there
    options = {"output_dir": folder, "report_to": [], "use_cpu": True, "disable_tqdm": True}
    options |= {"max_steps": 6, "logging_steps": 1, "learning_rate": 3e-2, "beta": 0.04}
    options |= {"max_completion_length": 8, "num_generations": 8, "save_strategy": "no"}
    data = Dataset(pyarrow.table({"prompt": ["how was the film"] * 16}), fingerprint="toy")
    config = GRPOConfig(**options)
    trainer = GRPOTrainer(folder, count_good, config, data, processing_class=tokenizer)
    controller = ExponentialKLController(0.04, target=0.05, gain=0.3, per="step")
    trainer.remove_callback(PrinterCallback)
    MoveBeta(controller).watch(trainer)
    trainer.train()
