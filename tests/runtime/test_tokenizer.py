"""Text to tokens and back."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from halfbyte.errors import CheckpointError, UsageError
from halfbyte.runtime.tokenizer import Tokenizer, render_chat

DATA = Path(__file__).parent / "data"
TEXTS = [
    "The quick brown fox",
    "  leading and  double spaces ",
    "naïve café — “quotes”",
    "日本語のテキスト",
    "👩‍👩‍👧 family, 🇫🇷 flag, e\u0301 combining",
    "line\nbreak\ttab\u00a0nbsp",
    "a\ufffdb genuine replacement",
]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n"
    "    {% if message['role'] not in ('user', 'assistant') %}\n"
    "        {{ raise_exception('unknown role ' ~ message['role']) }}\n"
    "    {% endif %}\n"
    "[{{ message['role'] }}]{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def _folder(path: Path, config: dict[str, Any] | None = None) -> Path:
    shutil.copy(DATA / "tokenizer.json", path)
    if config is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer(_folder(tmp_path, {"bos_token": "<s>", "eos_token": {"content": "</s>"}}))


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text)
    assert tokens[0] == 0  # <s>, by the file's own post-processor
    assert tokenizer.encode(text, add_special_tokens=False) == tokens[1:]
    assert tokenizer.decode(tokens) == text
    assert tokenizer.decode(tokens, skip_special_tokens=False) == "<s>" + text
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("prompt", ["", "Well, ", "日"])
def test_streams_whole_characters_only(tokenizer: Tokenizer, prompt: str, text: str) -> None:
    """This tokenizer has 512 tokens: most characters beyond ASCII take several."""
    before, tokens = tokenizer.encode(prompt), tokenizer.encode(text, add_special_tokens=False)
    stream = tokenizer.stream(before)
    pieces = [stream.push(token) for token in tokens]
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + stream.flush() == text
    assert stream.flush() == ""


def test_what_stays_incomplete_comes_out_at_the_end(tokenizer: Tokenizer) -> None:
    whole = tokenizer.encode("ok 日", add_special_tokens=False)
    stream = tokenizer.stream()
    assert "".join(stream.push(token) for token in whole[:-1]) == "ok "
    assert stream.flush() == "\ufffd"


def test_broken_bytes_do_not_hold_up_the_rest(tokenizer: Tokenizer) -> None:
    whole, rest = (tokenizer.encode(text, add_special_tokens=False) for text in ("日", "abc def"))
    stream = tokenizer.stream()
    text = "".join(stream.push(token) for token in whole[:1] + rest)
    assert text.endswith("abc def") and text.startswith("\ufffd")


def test_streams_long_texts(tokenizer: Tokenizer) -> None:
    text = " ".join(TEXTS[:6]) * 40
    stream = tokenizer.stream()
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(stream.push(token) for token in tokens) + stream.flush() == text


def test_special_tokens_are_not_text(tokenizer: Tokenizer) -> None:
    stream = tokenizer.stream()
    hello = tokenizer.encode("hi", add_special_tokens=False)
    assert "".join(stream.push(token) for token in [0, *hello, 2, 1]) + stream.flush() == "hi"


@pytest.mark.parametrize("kind", ["config", "list", "file"])
def test_chat(tmp_path: Path, kind: str) -> None:
    config: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
    if kind == "config":
        config["chat_template"] = TEMPLATE
    if kind == "list":
        config["chat_template"] = [
            {"name": "tool", "template": "no"},
            {"name": "default", "template": TEMPLATE},
        ]
    if kind == "file":
        config["chat_template"] = "outdated"
        (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = Tokenizer(_folder(tmp_path, config))
    assert tokenizer.has_chat_template
    tokens = tokenizer.chat([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(tokens, skip_special_tokens=False) == "<s>[user]hi</s>[assistant]"
    assert tokens.count(0) == 1
    tokens = tokenizer.chat([{"role": "user", "content": "hi"}], add_generation_prompt=False)
    assert tokenizer.decode(tokens, skip_special_tokens=False) == "<s>[user]hi</s>"
    with pytest.raises(UsageError, match=r"refuses(.|\n)*unknown role tool"):
        tokenizer.chat([{"role": "tool", "content": "hi"}])


def test_chat_agrees_with_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    template = TEMPLATE + "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
    template += "{{ {'x': m['content'], 'é': [1, None]} | tojson }}{% endfor %}"
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    messages = [{"role": "user", "content": f"<é> {i}"} for i in range(4)]
    theirs = transformers.AutoTokenizer.from_pretrained(str(_folder(tmp_path, config)))
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    variables = {"messages": messages, "add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>"}
    assert render_chat(template, **variables) == text
    ours = Tokenizer(tmp_path).chat(messages)
    assert ours == theirs(text, add_special_tokens=False)["input_ids"]


def test_templates_know_the_date() -> None:
    assert render_chat("{{ strftime_now('%Y') }}").isdigit()


def test_templates_are_sandboxed() -> None:
    for template in (
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% for",
    ):
        with pytest.raises(UsageError, match="the chat template refuses"):
            render_chat(template, messages=[])


def test_says_what_is_missing(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError, match="no chat template"):
        tokenizer.chat([{"role": "user", "content": "hi"}])
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(CheckpointError, match="no tokenizer"):
        Tokenizer(empty)
    (empty / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="malformed tokenizer"):
        Tokenizer(empty)
    _folder(empty)
    (empty / "tokenizer_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="a JSON object"):
        Tokenizer(empty)


@pytest.mark.parametrize("package", ["tokenizers", "jinja2"])
def test_says_how_to_install_what_is_missing(tmp_path: Path, package: str) -> None:
    _folder(tmp_path, {"chat_template": "hi"})
    code = (
        "import sys\n"
        f"sys.modules[{package!r}] = None\n"
        "from halfbyte.errors import HalfbyteError\n"
        "from halfbyte.runtime import Tokenizer\n"
        "try: Tokenizer(sys.argv[1]).chat([])\n"
        "except HalfbyteError as error: print(error)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert f"the package {package} is not installed" in printed
    assert 'pip install "halfbyte[text]"' in printed
