"""Text to tokens and back, by the tokenizer files of a bundle."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfbyte.errors import CheckpointError, HalfbyteError, UsageError

if TYPE_CHECKING:
    import tokenizers

    from halfbyte.runtime.bundle import Bundle

_INCOMPLETE = "\ufffd"  # what decoding gives for bytes that are no whole character


class Tokenizer:
    """A model's tokenizer.

    Args:
        folder: holds tokenizer.json and, for chats, tokenizer_config.json (and chat_template.jinja).

    Attributes:
        bos_token: text of the token that begins a text, or None.
        eos_token: text of the token that ends a text, or None.

    Raises:
        CheckpointError: the files are missing or malformed.
        HalfbyteError: the package tokenizers is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            import tokenizers
        except ImportError:
            raise _not_installed("tokenizers") from None
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(
                "no tokenizer",
                where=str(folder),
                accepted="a bundle compiled from a model with tokenizer.json",
                advice="use token numbers: halfbyte logits --tokens, or the Python API",
            )
        try:
            self._tokenizer: tokenizers.Tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the Rust side raises bare Exception
            raise CheckpointError("malformed tokenizer", where=str(path), found=str(error)) from None
        self._config = _read_config(Path(folder) / "tokenizer_config.json")
        self.bos_token = _token_text(self._config.get("bos_token"))
        self.eos_token = _token_text(self._config.get("eos_token"))
        self._template = _template(Path(folder) / "chat_template.jinja", self._config)

    @staticmethod
    def of(bundle: Bundle) -> Tokenizer:
        """Returns the tokenizer of a bundle; errors as in the constructor."""
        return Tokenizer(bundle.folder)

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` can be used."""
        return self._template is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the tokens of a text; the special tokens the model expects around it are added if asked."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of tokens; bytes that are no character become U+FFFD."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens))

    def stream(self, tokens: Iterable[int] = ()) -> TextStream:
        """Returns a decoder for tokens that come one by one; ``tokens`` came before and are not given out."""
        return TextStream(self, tokens)

    def chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
        """Returns the tokens of a chat by the model's template.

        Args:
            messages: each with ``role`` (``system``, ``user``, ``assistant``) and ``content``.
            add_generation_prompt: end with what makes the model answer.

        Raises:
            UsageError: the model has no template, or the template refuses the messages.
            HalfbyteError: the package jinja2 is not installed.
        """
        if self._template is None:
            raise UsageError("the model has no chat template", advice="give the prompt as plain text")
        text = render_chat(
            self._template,
            messages=list(messages),
            add_generation_prompt=add_generation_prompt,
            bos_token=self.bos_token or "",
            eos_token=self.eos_token or "",
        )
        return self.encode(text, add_special_tokens=False)  # the template has written them


class TextStream:
    """Decodes tokens that come one by one into text; never gives out half a character."""

    def __init__(self, tokenizer: Tokenizer, before: Iterable[int] = ()) -> None:
        self._tokenizer = tokenizer
        # Decoding needs a few tokens of context, for a token's text can depend on the one before (spaces).
        self._tokens = list(before)[-8:]
        self._given = len(self._tokenizer.decode(self._tokens))

    def push(self, token: int) -> str:
        """Returns the text that is complete with this token; empty if none is."""
        self._tokens.append(token)
        text = self._tokenizer.decode(self._tokens)
        if text.endswith(_INCOMPLETE) or len(text) <= self._given:
            return ""
        new, self._tokens = text[self._given :], self._tokens[-4:]
        self._given = len(self._tokenizer.decode(self._tokens))
        return new

    def flush(self) -> str:
        """Returns what is left at the end; incomplete characters become U+FFFD."""
        text = self._tokenizer.decode(self._tokens)
        new, self._given = text[self._given :], len(text)
        return new


def render_chat(template: str, **variables: Any) -> str:
    """Renders a chat template as transformers does, in jinja2's sandbox.

    Raises:
        UsageError: the template is malformed or refuses the messages.
        HalfbyteError: the package jinja2 is not installed.
    """
    try:
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise _not_installed("jinja2") from None

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(template).render(**variables)
    except jinja2.TemplateError as error:
        raise UsageError("the chat template refuses", found=str(error)) from None


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError("unreadable", where=str(path), found=str(error)) from None
    if not isinstance(content, dict):
        raise CheckpointError("malformed", where=str(path), accepted="a JSON object")
    return content


def _token_text(entry: Any) -> str | None:
    """A token is written as its text or as an object that holds it."""
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else None


def _template(path: Path, config: Mapping[str, Any]) -> str | None:
    """From a file of its own (newer models), else from the config: one text, or several by name."""
    if path.is_file():
        return path.read_text(encoding="utf-8")
    entry = config.get("chat_template")
    if isinstance(entry, list):
        named = {item.get("name"): item.get("template") for item in entry if isinstance(item, dict)}
        entry = named.get("default")
    return entry if isinstance(entry, str) else None


def _not_installed(package: str) -> HalfbyteError:
    return HalfbyteError(f"the package {package} is not installed", advice='pip install "halfbyte[text]"')
