"""The commands that run a bundle: what they print and write."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from typer.testing import CliRunner

from halfbyte.cli import make_app
from halfbyte.errors import HalfbyteError, UsageError
from halfbyte.runtime import Tokenizer, generate, load


def _invoke(*arguments: object) -> Any:
    result = CliRunner().invoke(make_app(), [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, (SystemExit, HalfbyteError)):
        raise result.exception
    return result


def test_run_prints_and_writes(graph_bundle: Path, tmp_path: Path) -> None:
    inputs = ("--input", "1x3xf32=1,2,3", "--input=1x3xf32=2")
    result = _invoke("run", graph_bundle, "--function", "affine", *inputs)
    assert result.exit_code == 0
    assert result.stdout == (
        "EXEC @affine\n"
        "result[0]: hal.buffer_view\n1x3xf32=[3 4 5]\n"
        "result[1]: hal.buffer_view\n1x3xf32=[2 4 6]\n"
    )
    outputs = ("--output=", f"--output=@{tmp_path / 'p.npy'}")
    result = _invoke("run", graph_bundle, "--function=affine", *inputs, *outputs, "--device=local-sync")
    assert result.stdout == "EXEC @affine\n"
    assert np.load(tmp_path / "p.npy").tolist() == [[2, 4, 6]]
    result = _invoke("run", graph_bundle, "--function=scalar", "--input=41", "--input=f32=1")
    assert result.stdout.splitlines()[-1] == "i64=42"


def test_run_takes_caches(decoder_bundle: Path, reference: Any) -> None:
    inputs = ("--input=2xi64=3,5", "--input=1xi64=0", "--input=16x4xf32=0", "--input=16x4xf32")
    result = _invoke("run", decoder_bundle, "--function=prefill", *inputs)
    numbers = result.stdout.splitlines()[-1].partition("=")[2]
    assert [float(number) for number in numbers.split()] == reference.forward([3, 5])[-1].tolist()


@pytest.mark.parametrize(
    ("function", "inputs", "message"),
    [
        ("forward", ("2xi64=3,99999999",), r"outside the vocabulary(.|\n)*99999999(.|\n)*0 to 10"),
        ("decode", ("1xi64=3", "1xi64=16", "16x4xf32", "16x4xf32"), "1 token from position 16 on"),
    ],
)
def test_run_refuses_what_a_decoder_has_no_room_for(
    decoder_bundle: Path, function: str, inputs: tuple[str, ...], message: str
) -> None:
    given = [f"--input={text}" for text in inputs]
    result = _invoke("run", decoder_bundle, f"--function={function}", *given)
    with pytest.raises(UsageError, match=message):
        raise result.exception


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), r"no such entry point(.|\n)*affine, types"),
        (("--function=nope",), "no such entry point"),
        (("--function=affine", "--input=1x3xf32"), r"wrong number of inputs(.|\n)*2: x: Tx3xf32"),
        (("--function=affine", "--input=1x3xf32", "--input=1x3xi32"), "wrong element type"),
        (("--function=affine", "--input=1x3xf32", "--input=2x3xf32"), "sizes contradict"),
        (("--function=affine", "--input=1x3xf32", "--input=1x3xf32", "--output=-"), "number of outputs"),
        (("--function=scalar", "--input=1", "--input=1", "--output=x"), "malformed output"),
        (("--function=scalar", "--parameters=fast", "--input=1", "--input=1"), "huge or mmap"),
    ],
)
def test_run_refuses(graph_bundle: Path, arguments: tuple[str, ...], message: str) -> None:
    result = _invoke("run", graph_bundle, *arguments)
    with pytest.raises(UsageError, match=message):
        raise result.exception


@pytest.mark.parametrize("tokens", ["3,5,7", "4", "[3, 5]\n", "@file"])
def test_logits(decoder_bundle: Path, tmp_path: Path, reference: Any, tokens: str) -> None:
    if tokens == "@file":
        (tmp_path / "tokens.txt").write_text("3\n5 7,\n0\n")
        tokens = f"@{tmp_path / 'tokens.txt'}"
    path = tmp_path / "logits.npy"
    result = _invoke("logits", decoder_bundle, "--tokens", tokens, "-o", path)
    assert result.exit_code == 0, result.exception
    numbers = {"4": [4], "3,5,7": [3, 5, 7], "[3, 5]\n": [3, 5]}.get(tokens, [3, 5, 7, 0])
    found = np.load(path)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, reference.forward(numbers))


@pytest.mark.parametrize(
    ("tokens", "name", "message"),
    [
        ("3,x", "a.npy", r"no token numbers(.|\n)*'x'"),
        ("-3", "a.npy", "no token numbers"),
        (" ", "a.npy", "nothing"),
        ("@none", "a.npy", "unreadable file"),
        ("99", "a.npy", "outside the vocabulary"),
        ("3", "a.txt", "cannot write"),
        ("3", "none/a.npy", "cannot write"),
    ],
)
def test_logits_refuses(decoder_bundle: Path, tmp_path: Path, tokens: str, name: str, message: str) -> None:
    result = _invoke("logits", decoder_bundle, f"--tokens={tokens}", "-o", tmp_path / name)
    with pytest.raises(UsageError, match=message):
        raise result.exception
    assert not (tmp_path / name).exists()


@pytest.fixture(scope="module")
def text_bundle(tmp_path_factory: pytest.TempPathFactory, decoder_bundle: Path) -> Path:
    """The tiny model with a tokenizer of its 11 tokens: 1 is <s>, 2 is </s>, one is half of an é."""
    folder = Path(shutil.copytree(decoder_bundle, tmp_path_factory.mktemp("text") / "tiny"))
    words = ["Ã", "<s>", "</s>", "a", "b", "c", "Ġ", "©", "d", "e", "f"]
    model = tokenizers.models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }} {% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "chat_template": template}))
    return folder


def _expected(folder: Path, tokens: list[int], **options: Any) -> str:
    return Tokenizer(folder).decode(list(generate(load(folder), tokens, **options)))


def test_generate(text_bundle: Path, reference: Any) -> None:
    base = ("generate", text_bundle, "-p", "ab c", "--max-tokens", 6, "--temperature", 900, "--seed", 3)
    expected = _expected(text_bundle, [3, 4, 6, 5], max_tokens=6, temperature=900, seed=3)
    assert expected
    for mode in ("--stream", "--no-stream"):
        result = _invoke(*base, mode)
        assert result.exit_code == 0, result.exception
        assert result.stdout == expected + "\n"
        assert result.stderr.startswith("prompt: 4 tokens, ")
        assert "model.n64k8.irpa" in result.stderr
    greedy = _invoke(
        "generate", text_bundle, "-p", "ab", "--max-tokens=4", "--threads=1", "--parameters=mmap"
    )
    assert greedy.stdout == Tokenizer(text_bundle).decode(reference.greedy([3, 4], 4)) + "\n"
    assert "mapped" in greedy.stderr


def test_generate_with_the_chat_template(text_bundle: Path) -> None:
    options = ("--max-tokens=5", "--temperature=900", "--seed=8")
    result = _invoke("generate", text_bundle, "-p", "ab", "--chat", *options)
    assert result.exit_code == 0, result.exception
    expected = _expected(text_bundle, [1, 3, 4, 6], max_tokens=5, temperature=900, seed=8)
    assert result.stdout == expected + "\n"


def test_generate_refuses(text_bundle: Path, graph_bundle: Path) -> None:
    for arguments, code in (
        ((text_bundle, "-p", "a" * 17), 2),
        ((text_bundle, "-p", ""), 2),
        ((text_bundle, "-p", "a", "--top-p=7"), 2),
        ((graph_bundle, "-p", "a"), 3),
    ):
        assert _invoke("generate", *arguments).exception.exit_code == code


@pytest.mark.parametrize("form", ["md", "json", "csv"])
def test_bench_measures_prompts_and_tokens(decoder_bundle: Path, form: str) -> None:
    options = ("-p", "4,8", "-n", "3,0", "-d", "0,2", "-r", "2", "-o", form, "--threads", "1")
    result = _invoke("bench", decoder_bundle, *options)
    assert result.exit_code == 0
    tests = ["pp4", "pp8", "tg3", "pp4 @ d2", "pp8 @ d2", "tg3 @ d2"]
    if form == "json":
        rows = json.loads(result.stdout)
        assert [row["test"] for row in rows] == tests
        for row in rows:
            assert len(row["repetitions"]) == 2 and min(row["repetitions"]) > 0
            assert abs(row["tokens_per_second"] - sum(row["repetitions"]) / 2) <= 0.01
            assert (row["threads"], row["device"]) == (1, "local-sync")
    elif form == "csv":
        head, *lines = result.stdout.splitlines()
        assert head == "model,bytes,device,threads,test,tokens_per_second,deviation"
        assert [line.split(",")[4] for line in lines] == tests
    else:
        head, rule, *lines = result.stdout.splitlines()
        assert [cell.strip() for cell in head.split("|")[1:-1]] == [
            "model", "size", "device", "threads", "test", "t/s",
        ]  # fmt: skip
        assert set(rule) == set("| -") and len({len(line) for line in (head, rule, *lines)}) == 1
        assert [line.split("|")[5].strip() for line in lines] == tests


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-p", "100"), r"does not fit the context(.|\n)*pp100: 100 tokens(.|\n)*1 to 16"),
        (("-p", "4", "-d", "14"), "pp4 @ d14: 18 tokens"),
        (("-p", "4", "-n", "0", "-r", "0"), "no repetitions"),
        (("-p", "0", "-n", "0"), "nothing to measure"),
        (("-p", "4;5"), "--prompt is no list of numbers"),
        (("-p", "-4"), "--prompt is no list of numbers"),
        (("-p", "4", "--threads", "0"), "--threads is no list of numbers"),
        (("-p", "4", "-o", "xml"), "md, json, csv"),
    ],
)
def test_bench_refuses(decoder_bundle: Path, arguments: tuple[str, ...], message: str) -> None:
    result = _invoke("bench", decoder_bundle, *arguments)
    assert isinstance(result.exception, UsageError)
    assert re.search(message, str(result.exception))
