"""Small models of every family of causal language models that transformers has.

`FAMILIES` are the names (types of models) that are built, `SETTINGS` further "family@setting".
"""

import contextlib
import copy
import dataclasses
import functools
import re
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

VOCAB = 64
_DATA = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
_SIZES = {name: size for size, names in _DATA["sizes"].items() for name in names.split()}
_WINDOWS = _DATA["windows"].split()
_SETTINGS = {name: each for names, each in _DATA["settings"].items() for name in names.split()}
LEFT_OUT = _DATA["left_out"].split()
FAMILIES = [name for name in CLASSES if name not in LEFT_OUT]
SETTINGS = sorted(name for name in _SETTINGS if "@" in name)
# Parameters that keep the values that the model's own code gives them.
_KEPT = re.compile(
    r"A_log|dt_bias|\.D$|time_decay|time_first|time_mix|a_param|recurrent_param|router_bias|lambda_"
    r"|position_ids|e_score|A_scale|rotary|sinks|\.scale$|alpha|beta|coef|hc_scale|layer_scalar"
)


def build(name: str, window: int) -> Any:
    """A new model in eval mode, with sharp weights; each window and chunk is of this size."""
    return copy.deepcopy(_prototype(name, window))


@functools.lru_cache(maxsize=4)
def _prototype(name: str, window: int) -> Any:
    kind = getattr(transformers, CLASSES[name.split("@")[0]])
    models = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            torch.manual_seed(0)
            models.append(kind(_config(name, window)).float().eval())
    _sharpen(models[0])  # which calls it, and some remember what they have read
    models[1].load_state_dict(models[0].state_dict())
    return models[1]


def _config(name: str, window: int) -> Any:
    family = name.split("@")[0]
    settings = _settings(_SETTINGS.get(name, _SETTINGS.get(family, {})), window)
    text, kind = settings.pop("text", None), transformers.CONFIG_MAPPING[family]
    if "config" in settings:  # that of the text alone
        module = import_module(f"transformers.models.{family}.configuration_{family}")
        kind = getattr(module, settings.pop("config"))
    if text is None:
        return kind(**_arguments(kind, settings, window))
    config = transformers.CONFIG_MAPPING[text]
    inner = _arguments(config, _settings(_SETTINGS.get(text, {}), window), window)
    return kind(**{"text_config": {"model_type": text, **inner}, **settings})


def _settings(settings: Any, window: int) -> dict[str, Any]:
    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: filled(each) for key, each in value.items()}
        return window if value == "window" else copy.copy(value)

    settings = filled(settings)
    return {**filled(_SETTINGS.get(settings.pop("like", ""), {})), **settings}


def _arguments(kind: Any, settings: dict[str, Any], window: int) -> dict[str, Any]:
    """Those of a configuration: small sizes, the window, two layers of different types."""
    names = {field.name for field in dataclasses.fields(kind)}
    default: dict[str, Any] = {}
    with warnings.catch_warnings(), contextlib.suppress(Exception):  # some have no defaults
        warnings.simplefilter("ignore")
        made = kind()
        for name in names:
            with contextlib.suppress(Exception):
                default[name] = getattr(made, name, None)
    given = {name: size for name, size in _SIZES.items() if name in names} | {
        name: window for name in _WINDOWS if type(default.get(name)) is int and default[name] > 0
    }
    if default.get("num_key_value_heads") is None:
        given.pop("num_key_value_heads", None)
    n = settings.get("num_hidden_layers", given.get("num_hidden_layers"))
    if types := settings.get("layer_types") or default.get("layer_types"):
        types = settings.get("layer_types") or list(dict.fromkeys(types))
        n = len(types) if "layer_types" in settings else max(n or 2, len(types))
        given |= {"layer_types": (types * n)[:n], "num_hidden_layers": n}
    if types := default.get("mlp_layer_types"):
        types = list(dict.fromkeys(types))
        given["mlp_layer_types"] = [types[min(i, len(types) - 1)] for i in range(n or 2)]
    return given | settings


@torch.no_grad()
def _sharpen(model: Any) -> None:
    """Random weights, with logits that differ by about one and a half."""
    generator = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        if _KEPT.search(name):
            continue
        noise = torch.randn(weight.shape, generator=generator)
        if weight.ndim == 1:
            weight.add_(0.1 * noise)
        elif weight.ndim > 1 and "norm" not in name.lower():
            width = 0.4 if "conv" in name else 1.3 * weight.shape[-1] ** -0.5
            embeds = "embed" in name.lower() or "wte" in name
            weight.copy_((0.7 if embeds else width) * noise)
    head = getattr(model.get_output_embeddings(), "weight", None)
    ids = torch.randint(3, VOCAB, (1, 12), generator=generator)
    for _ in range(3):
        options = {"use_cache": False} if model.config.model_type == "blt" else {}
        logits = model(ids, **options).logits
        spread = logits[0, 1:].std(-1).mean().item()
        if 0.8 < spread < 2.5 or head is None or not spread > 0:
            break
        head.mul_(1.5 / spread)
