#!/usr/bin/env bash
# torch 2.13.0: in code that torch.compile traces, `getattr(method, "__func__", None)` of a bound
# method is None, while `method.__func__` is the function. A test of whether a class has replaced a
# method is thus answered otherwise than without a compiler, without a graph break, an error or a word.
#
# Seen: called: 1, 1; compiled: 1, 0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0
cd "$folder"
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore - <<'PYTHON'
import torch


class Actor:
    def get_dist(self):
        return "its own"


actor = Actor()


def by_attribute(x):
    return x + 1 if actor.get_dist.__func__ is Actor.get_dist else x


def by_getattr(x):
    return x + 1 if getattr(actor.get_dist, "__func__", None) is Actor.get_dist else x


both, zero = (by_attribute, by_getattr), torch.zeros(())
called = [int(f(zero)) for f in both]
compiled = [int(torch.compile(f, backend="eager", fullgraph=True)(zero)) for f in both]
print(f"torch {torch.__version__}: called: {called[0]}, {called[1]}; "
      f"compiled: {compiled[0]}, {compiled[1]}")
assert (called, compiled) == ([1, 1], [1, 0]), (called, compiled)
PYTHON
