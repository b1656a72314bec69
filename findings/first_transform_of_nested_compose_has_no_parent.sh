#!/usr/bin/env bash
# torchrl 0.14.1: a transform that is the first one of a Compose has no `parent` where that Compose
# is itself the first one of another Compose. `parent` is the env up to the transform, with which
# transforms read specs when they are attached. Asking for it raises a bare IndexError, "index -1 is
# out of range". With any transform before the inner Compose, or without the outer one, it is there.
#
# Seen: 0.14.1: one Compose: TransformedEnv; behind another transform: TransformedEnv; first of a
# nested Compose: IndexError: index -1 is out of range
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0
"$folder/venv/bin/pip" install -q torchrl==0.14.1 tensordict==0.14.3 gymnasium==1.3.0
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import torchrl
from torchrl.envs import Compose, GymEnv, RewardSum, StepCounter, TransformedEnv


def parent_of_first(*before, depth):
    inner = StepCounter()
    nested = inner
    for _ in range(depth):
        nested = Compose(nested)
    env = TransformedEnv(GymEnv("CartPole-v1"), Compose(*before, nested))
    assert env.transform is not None
    try:
        return type(inner.parent).__name__
    except IndexError as error:
        return f"IndexError: {error}"


found = [
    parent_of_first(depth=0),
    parent_of_first(RewardSum(), depth=1),
    parent_of_first(depth=1),
]
print(f"torchrl {torchrl.__version__}: one Compose: {found[0]}; behind another transform: "
      f"{found[1]}; first of a nested Compose: {found[2]}")
assert found == ["TransformedEnv", "TransformedEnv", "IndexError: index -1 is out of range"], found
PYTHON
