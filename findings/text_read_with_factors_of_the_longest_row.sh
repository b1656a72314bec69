#!/usr/bin/env bash
# transformers 5.24.0: a Phi-3 model with longrope has two sets of factors for its rotary positions,
# one for texts up to `original_max_position_embeddings` and one for longer texts. Which set is used
# is decided once for a whole batch, by its longest row. So the log-probs of a short text depend on
# the other texts of its batch, and those of a prefix on what follows it: the model is not causal
# across the switch. Padding that does not reach the switch changes nothing.
#
# Seen: largest difference in log-probs of a text of 10 tokens, switch at 16: padded to 16: 5e-06;
# with a row of 20 tokens in the batch: 6.3; with 10 more tokens of its own: 6.3
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0
"$folder/venv/bin/pip" install -q transformers==5.24.0
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import torch
import transformers
from transformers import Phi3Config, Phi3ForCausalLM

transformers.logging.set_verbosity_error()
torch.manual_seed(0)
factors = {"short_factor": [1.0] * 8, "long_factor": [8.0] * 8}
config = Phi3Config(
    vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
    original_max_position_embeddings=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0,
                     "partial_rotary_factor": 1.0, **factors},
)
model = Phi3ForCausalLM(config).eval()
for weight in model.parameters():  # sharper than at initialization, so that differences show
    weight.data.mul_(4)
text, other = torch.randint(3, 50, (1, 10)), torch.randint(3, 50, (1, 20))


@torch.no_grad()
def of_the_text(tokens):
    logits = model(tokens, attention_mask=(tokens != 0).long()).logits
    return logits.log_softmax(-1)[0, :10]


def padded(width):
    return torch.nn.functional.pad(text, (0, width - 10))


alone = of_the_text(text)
found = [
    (of_the_text(tokens) - alone).abs().max().item()
    for tokens in (
        padded(16), torch.cat([padded(20), other]), torch.cat([text, other[:, :10]], 1)
    )
]
print(f"transformers {transformers.__version__}: padded to 16: {found[0]:.0e}; with a row of 20 "
      f"tokens: {found[1]:.1f}; with 10 more tokens: {found[2]:.1f}")
assert found[0] < 1e-3 and found[1] > 1 and found[2] > 1, found
PYTHON
