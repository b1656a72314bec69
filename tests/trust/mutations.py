"""Seeded damage to files: flipped bits, cut ends, swapped and huge JSON values, other files."""

import io
import json
import pickle
import random
import re
import zipfile
from pathlib import Path
from typing import Any

import torch

HUGE: list[Any] = [10**9, 20_000, 2**63, 10**40, -1, 0, 1.5, 1e308, "3", None, True, [], {}]


class Planted:
    """Creates a file if it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def pickles(path: Path) -> list[bytes]:
    """Pickles and files of `torch.save` that create a file if they are loaded."""
    saved = io.BytesIO()
    torch.save({"weight": Planted(path)}, saved)
    return [pickle.dumps(Planted(path), protocol) for protocol in (0, 2, 4)] + [saved.getvalue()]


def damage(content: bytes, rng: random.Random) -> bytes:
    """Flips bits, cuts off, repeats, clears or moves bytes."""
    data, kind = bytearray(content), rng.randrange(6)
    at, length = rng.randrange(len(data)), rng.randint(1, 64)
    if kind <= 1:
        # Half of the flips are in the headers, where all sizes are.
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(len(data) if kind else min(len(data), 2000))
            data[place] ^= 1 << rng.randrange(8)
    elif kind == 2:
        del data[at:]
    elif kind == 3:
        data[at : at + length] = bytes(length)
    elif kind == 4:
        data += data[at : at + length]
    else:
        del data[at : at + length]
    return bytes(data)


def edit_json(text: str, rng: random.Random) -> str:
    """Swaps two values of a JSON text, or replaces one by a number, often huge, or by anything."""
    pattern = r"(?<=[:,\\[ ])(-?\d[\d.e]*|\"[^\"]*\")(?=[,\]}\n])"
    values = list(re.finditer(pattern, text))
    one, other = sorted(rng.sample(values, 2), key=lambda match: match.start())
    if rng.random() < 0.5:
        new = [other.group(), one.group()]
    else:
        new = [json.dumps(rng.choice(HUGE)), other.group()]
    parts = text[: one.start()], new[0], text[one.end() : other.start()], new[1]
    return "".join([*parts, text[other.end() :]])


def edit_header(content: bytes, rng: random.Random) -> bytes:
    """A safetensors file with other values in its header, whose length is right."""
    size = int.from_bytes(content[:8], "little")
    header = edit_json(content[8 : 8 + size].decode(), rng).encode()
    return len(header).to_bytes(8, "little") + header + content[8 + size :]


def edit_member(content: bytes, rng: random.Random) -> bytes:
    """A zip file, whole and with right checksums, of which one file was edited."""
    members = read_zip(content)
    name = rng.choice(sorted(members))
    edited = edit_header if name.endswith(".safetensors") else damage
    if name.endswith(".json"):
        members[name] = edit_json(members[name].decode(), rng).encode()
    else:
        members[name] = rng.choice([edited, damage])(members[name], rng)
    return write_zip(members)


def read_zip(content: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def write_zip(members: dict[str, bytes], **options: Any) -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", **options) as archive:
        for name, member in members.items():
            archive.writestr(name, member)
    return written.getvalue()
