"""Adapts docstrings to the API pages: examples become code, and entries get their own lines."""

import re
from typing import Any

import griffe


class Sections(griffe.Extension):
    """Renames "Example:", the name in TorchRL's docstrings, and splits the lines of "Keys:"."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Is called for each class and function that is read."""
        if obj.docstring is not None:
            text = obj.docstring.value.replace("Example:\n", "Examples:\n")
            obj.docstring.value = re.sub(r"\n( +)(writes|drops)\b", r"\n\n\1\2", text)
