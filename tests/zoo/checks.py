"""What a family of models does in this package, against each text read alone by a fresh model.

Axes: N texts, T tokens of a response, V tokens.
"""

import copy
import inspect
import math
import re
import traceback
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import torch
from torchrl.modules import set_recurrent_mode

from tests.zoo.families import VOCAB, build
from torchrl_kl import KLConstrainedTransform, KLPenaltyLoss
from torchrl_kl.language import CausalLMActor, prompts, sample_responses
from torchrl_kl.language.causal_lm import CausalLM

PACKAGE = Path(inspect.getfile(CausalLMActor)).parents[1]
LENGTH, SHARED, RAGGED = 26, (5, 5, 5), (1, 6, 3, 11)  # of the longest text, and of prompts
TOLERANCE = 2e-4  # nats: rounding in float32
CHUNK = 5  # positions of a tile
NOT_ADAPTED = ["out_proj", "conv1d", "router", "o_a_proj"]  # what PEFT refuses, or breaks


class Refused(Exception):
    """An error of this package's own."""


@contextmanager
def heard(warned: list[str]) -> Any:
    """Collects the warnings of this package; its errors become `Refused`."""

    def note(message, *_: Any) -> None:
        frames = [f for f in traceback.extract_stack()[:-1] if f.filename != warnings.__file__]
        if Path(frames[-1].filename).is_relative_to(PACKAGE):  # whatever `stacklevel` says
            warned.append(str(message))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        try:
            yield
        except Exception as error:
            last = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
            if last.is_relative_to(PACKAGE):
                raise Refused(str(error)) from error
            raise


def random_prompts(lengths: tuple[int, ...], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=generator) for n in lengths]


def sample(actor: Any, lengths: tuple[int, ...], length: int, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    prompts, n_new = random_prompts(lengths, seed), length - max(lengths)
    return sample_responses(actor, prompts, n_new, pad_token=0, generator=generator)


def uncached(model: Any) -> dict[str, bool]:
    """The keyword for a pass without a cache, with which `blt` raises."""
    inner = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    known = "use_cache" in inspect.signature(inner.forward).parameters
    return {"use_cache": False} if known else {}


def learns(model: Any) -> bool:
    """Whether the model itself has a gradient in eval mode."""
    try:
        logits = model(torch.arange(3, 7)[None], **uncached(model)).logits
        return bool(gradient(logits.sum(), model).any())
    except AssertionError:  # of Reformer
        return False


@torch.no_grad()
def alone(model: Any, batch: Any) -> torch.Tensor:
    """The log-probs (N, T, V) of a model that has read nothing, for each prefix of each text."""
    model, position = copy.deepcopy(model), batch["position"]
    options = uncached(model)
    found = torch.empty(*position.shape, VOCAB)
    for n in position.unique().tolist():  # those that remember the longest text have not yet
        here = position == n
        found[here] = model(batch["tokens"][here][:, :n], **options).logits[:, -1].log_softmax(-1)
    return found


def rolled_out(actor: Any, batch: Any) -> torch.Tensor:
    """The log-probs (N, T) of the actions, one step of an environment after the other."""
    found = []
    with torch.no_grad():
        for states in batch.select("tokens", "position", "action").unbind(1):
            found.append(actor.get_dist(states.clone()).log_prob(states["action"]))
    return torch.stack(found, 1)


def n_read(model: Any, actor: Any, length: int) -> float:
    """How many positions are read for a text more than its prompt, per token of the response."""
    read: list[int] = []

    def count(_, args, kwargs) -> None:
        read.append((args[0] if args else kwargs["input_ids"]).numel())

    handle = model.register_forward_pre_hook(count, with_kwargs=True)
    lengths = SHARED if length > max(SHARED) else (2, 2)
    for seed in (1, 2):  # models are compared with and without a cache at first
        read.clear()
        sample(actor, lengths, length, seed)
    handle.remove()
    return (sum(read) / len(lengths) - lengths[0]) / (length - lengths[0])


def gradient(value: torch.Tensor, model: Any) -> torch.Tensor:
    """That of a loss with respect to all weights that learn, in one vector."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    found = torch.autograd.grad(value, weights, allow_unused=True, materialize_grads=True)
    return torch.cat([each.flatten() for each in found])


class Checks:
    """What was found of a family; `faults` are differences and errors that must not be."""

    def __init__(self, name: str):
        self.name = name
        self.read = False  # whether texts of any length are
        self.cached = self.tiles = self.lora = self.once = True
        self.remarks: list[str] = []
        self.faults: list[str] = []

    def run(self) -> Any:
        """All checks, with windows of 4 and of 8 tokens."""
        for window in (4, 8):
            for length in (LENGTH, window):
                if self._try("sampling", self._sampling, window, length):
                    self.read = True
                    if learns(build(self.name, window)):
                        self._try("loss", self._losses, window, length)
                        right = self._try("prompts", self._prompts, window, length)
                        self.once &= right  # after it, since it sets it, too
                        self.lora &= self._try("LoRA", self._lora, window, length)
                    else:
                        self.tiles = self.lora = self.once = False
                        self._remark("its own backward pass raises in eval mode")
                    break
        return self

    def _try(self, what: str, check: Any, window: int, length: int) -> bool:
        """Whether a check did not raise; errors of this package are no fault."""
        warned: list[str] = []
        raised = True
        try:
            with heard(warned):
                check(window, length)
            raised = False
        except Refused as error:
            self._remark("refused: " + str(error).split(". ")[0])
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            said = str(error).splitlines() or [""]
            name = type(error).__name__
            self.faults.append(f"{what}: {name}: {said[0][:150]} (line {where.lineno})")
        for text in warned:
            self._remark(text.split(": ")[0])
        return not raised

    def _remark(self, text: str) -> None:
        """Adds a remark; those of the two windows differ in numbers."""
        words = [re.sub(r"[\d.]+", "", each) for each in (text, *self.remarks)]
        if words[0] not in words[1:]:
            self.remarks.append(text)

    def _close(self, what: str, got: torch.Tensor, expected: torch.Tensor) -> None:
        difference = (got - expected).abs().max().item()
        if not difference < TOLERANCE:
            self.faults.append(f"{what} differs by {difference:.2g}")

    def _learns(self, what: str, slope: torch.Tensor) -> None:
        if not (slope.isfinite().all() and slope.any()):
            self.faults.append(f"{what} has a gradient of {slope.norm():.2g}")

    def _sampling(self, window: int, length: int) -> None:
        """Recorded log-probs, rollouts and the KL of a model with itself."""
        for lengths in (SHARED, RAGGED):
            model, kind = build(self.name, window), "equal" if lengths is SHARED else "ragged"
            lengths = tuple(min(n, length // 2) for n in lengths)
            actor = CausalLMActor(model)
            batch = sample(actor, lengths, length)
            action = batch["action"]
            expected = alone(build(self.name, window), batch)
            expected = expected.gather(-1, action[..., None])[..., 0]
            self._close(f"{kind} prompts: log-prob", batch["action_log_prob"], expected)
            self._close(f"{kind} prompts: rollout", rolled_out(actor, batch), expected)
            stack = KLConstrainedTransform(actor, 0.1)
            kl = stack(batch)["next", "kl"]
            self._close(f"{kind} prompts: KL with itself", kl, torch.zeros(()))
        self.cached &= n_read(model, actor, length) <= 1.1

    def _losses(self, window: int, length: int) -> None:
        """The KL as a loss, of whole logits and of tiles, and its gradient."""
        model, other = build(self.name, window), build(self.name, window)
        with torch.no_grad():
            other.get_output_embeddings().weight.mul_(0.5)
        batch = sample(CausalLMActor(model), (min(5, length // 2),) * 3, length)
        policy, reference = alone(model, batch), alone(other, batch)
        expected = (policy.exp() * (policy - reference)).sum(-1).mean()
        gradients = []
        for chunk in (None, CHUNK):
            actor = CausalLMActor(model, head_chunk=chunk)
            loss = KLPenaltyLoss(actor, 1.0, reference=CausalLMActor(other))
            loss_kl = loss(batch)["loss_kl"]
            self._close("loss" if chunk is None else "loss of tiles", loss_kl, expected)
            gradients.append(gradient(loss_kl, model))
        self._close("gradient of tiles", gradients[1], gradients[0])
        self._learns("loss", gradients[0])
        with torch.no_grad(), set_recurrent_mode(True):
            dist: Any = actor.get_dist(batch.select("tokens", "position"))
        self._close("log-prob of tiles", dist.log_prob(batch["action"]), batch["action_log_prob"])
        self.tiles &= hasattr(dist, "tiles")

    def _prompts(self, window: int, length: int) -> None:
        """Prompts that are read once, of several lengths: outputs and gradients of whole rows."""
        texts = torch.stack(random_prompts((length,) * 6))
        for start in {1, length // 4, length // 2, length - 2}:
            texts[:, :start] = texts[::3, :start].repeat_interleave(3, 0)
            row = torch.arange(6).repeat_interleave(length - start)
            last = torch.arange(start - 1, length - 1).repeat(6)
            found = []
            for caches in (False, True):
                lm = CausalLM(build(self.name, window))
                lm.caches &= caches
                lm.check_causal(texts, length)  # after it, BigBird's attention is no longer sparse
                with mock.patch.object(prompts, "_LEAST_SAVED", -math.inf):
                    output = prompts.read_at(lm, texts, row, last).log_softmax(-1)
                value = output.gather(1, texts[row, last + 1][:, None]).mean()
                found += [output, gradient(value, lm)]
                self.once &= not caches or {*lm.read_once[True].values()} == {True}
            self._close("log-prob with prompts read once", found[2], found[0])
            size = found[1].abs().max()
            self._close("gradient with prompts read once", found[3] / size, found[1] / size)

    def _lora(self, window: int, length: int) -> None:
        """Adapters whose model is the reference where they are off."""
        config = peft.LoraConfig(
            r=2, target_modules="all-linear", exclude_modules=NOT_ADAPTED, init_lora_weights=False
        )
        torch.manual_seed(0)
        model = peft.get_peft_model(build(self.name, window), config).eval()
        fresh, base = copy.deepcopy(model), build(self.name, window)
        actor = CausalLMActor(model)
        batch = sample(actor, (min(5, length // 2),) * 3, length)
        action = batch["action"][..., None]
        policy, reference = (alone(m, batch).gather(-1, action)[..., 0] for m in (fresh, base))
        self._close("LoRA: log-prob", batch["action_log_prob"], policy)
        stack = KLConstrainedTransform(actor, 0.1, reference=model.disable_adapter)
        kl = stack(batch)["next", "kl"][..., 0]
        self._close("LoRA: KL", kl, policy - reference)
        loss = KLPenaltyLoss(actor, 1.0, reference=model.disable_adapter)
        self._learns("LoRA", gradient(loss(batch)["loss_kl"], model))
