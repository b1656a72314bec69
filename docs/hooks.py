"""What the site does with its pages: links to files outside of docs/, and formulas."""

import html
import logging
import os
import re
from typing import Any

from latex2mathml.converter import convert

log = logging.getLogger("mkdocs.hooks")  # `mkdocs build --strict` fails at its warnings
FOR_FILES = "[How to see the docstrings](index.md)."  # on API pages, for readers of files
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^):#]+)(#[^)]*)?\)")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', flags=re.S)
CODE = re.compile(r"<(pre|code|math)\b.*?</\1>", flags=re.S)


def on_page_markdown(markdown: str, *, page: Any, config: Any, **kwargs: Any) -> str:
    """Links that leave docs/ lead to the repository, if it has an address, or become paths."""

    def link(match: re.Match[str]) -> str:
        text, path, anchor = match[1], match[2], match[3] or ""
        path = os.path.normpath(os.path.join("docs", os.path.dirname(page.file.src_uri), path))
        if path.split("/")[0] == "docs":
            return match[0]
        if not os.path.exists(path):
            log.warning(f"{page.file.src_uri} links to {path}, which does not exist")
        if config["extra"]["files"]:
            return f"[{text}]({config['extra']['files']}{path}{anchor})"
        return f"`{path}`" if path.endswith(text.strip("/")) else f"{text} (`{path}`)"

    return LINK.sub(link, markdown.replace(FOR_FILES, ""))


def on_page_content(content: str, *, page: Any, **kwargs: Any) -> str:
    """Formulas, LaTeX in the source, become MathML, which browsers show without a script."""

    def formula(match: re.Match[str]) -> str:
        return convert(html.unescape(match[2]), display="inline" if match[1] == "span" else "block")

    content = FORMULA.sub(formula, content)
    if raw := re.search(r"\\[a-zA-Z(\[].{0,40}|\$\$", CODE.sub("", content)):
        log.warning(f"{page.file.src_uri} shows raw LaTeX: {raw[0]!r}")
    return content
