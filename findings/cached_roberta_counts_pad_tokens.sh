#!/usr/bin/env bash
# transformers 5.24.0: RoBERTa finds positions from ids, and pad tokens have none: in one pass a token
# after two pad tokens comes two positions earlier. With a cache all its tokens count, those of pads
# too, so that the same text has other positions, and other logits, without a word. With
# `position_ids` that count as one pass does, cached outputs are those of one pass.
#
# Seen: largest difference of cached logits to one pass over the whole text: without pad tokens 0e+00,
# with two in the cached part 3.3, with them and position_ids 0e+00
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
from transformers import RobertaConfig, RobertaForCausalLM

transformers.logging.set_verbosity_error()
torch.manual_seed(0)
PAD = 1
model = RobertaForCausalLM(
    RobertaConfig(vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                  num_attention_heads=2, max_position_embeddings=40, is_decoder=True, pad_token_id=PAD)
).eval()
for weight in model.parameters():  # sharper than at initialization
    weight.data.mul_(3)
tokens = torch.randint(3, 50, (1, 12))
padded = tokens.clone()
padded[0, 2:4] = PAD


@torch.no_grad()
def error(text, with_positions=False):
    counted = text.ne(PAD).int()
    positions = counted.cumsum(1) * counted + PAD  # those of one pass
    options = {"position_ids": positions[:, 6:]} if with_positions else {}
    cache = model(text[:, :6], use_cache=True).past_key_values
    rest = model(text[:, 6:], past_key_values=cache, use_cache=True, **options).logits
    return (rest - model(text).logits[:, 6:]).abs().max().item()


found = error(tokens), error(padded), error(padded, with_positions=True)
print(f"transformers {transformers.__version__}: without pad tokens {found[0]:.0e}, with two in the"
      f" cached part {found[1]:.1f}, with them and position_ids {found[2]:.0e}")
assert max(found[0], found[2]) < 1e-4 < 1e-2 < found[1], found
PYTHON
