#!/usr/bin/env bash
# transformers 5.24.0: a causal language model that is given new tokens and its own cache finds their
# positions from the length of the cache, as Llama does. Bamba does not: without `position_ids` its
# attention layers place the new tokens at the beginning of the text, without a word. With them, as
# `generate` passes them, cached outputs are those of one pass.
#
# Seen: largest difference of logits to one pass over the whole text, 6 cached steps: Llama 3e-06 and,
# with position_ids, 3e-06; Bamba 0.3 and, with position_ids, 1e-06
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0
"$folder/venv/bin/pip" install -q transformers==5.24.0
cd "$folder"
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore - <<'PYTHON'
import torch
import transformers
from transformers import BambaConfig, BambaForCausalLM, LlamaConfig, LlamaForCausalLM

transformers.logging.set_verbosity_error()
torch.manual_seed(0)
SIZES = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}
MAMBA = {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1,
         "mamba_d_state": 16}
tokens = torch.randint(3, 50, (1, 12))


@torch.no_grad()
def error(model, with_positions):
    whole = model(tokens).logits
    output = model(tokens[:, :6], use_cache=True)
    found = [output.logits[:, -1]]
    for t in range(6, 12):
        options = {"position_ids": torch.tensor([[t]])} if with_positions else {}
        cache = output.past_key_values
        output = model(tokens[:, t : t + 1], past_key_values=cache, use_cache=True, **options)
        found.append(output.logits[:, -1])
    return (torch.stack(found, 1) - whole[:, 5:]).abs().max().item()


errors = {}
for model in (LlamaForCausalLM(LlamaConfig(**SIZES)), BambaForCausalLM(BambaConfig(**SIZES, **MAMBA))):
    for weight in model.eval().parameters():  # sharper than at initialization
        weight.data.mul_(3)
    name = type(model).__name__.removesuffix("ForCausalLM")
    errors[name] = error(model, False), error(model, True)
print(f"transformers {transformers.__version__}:",
      "; ".join(f"{name} {a:.0e} and, with position_ids, {b:.0e}" for name, (a, b) in errors.items()))
assert max(*errors["Llama"], errors["Bamba"][1]) < 1e-4 < 1e-2 < errors["Bamba"][0], errors
PYTHON
