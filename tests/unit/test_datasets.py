"""Texts and datasets: what may be named, what is read, and which tokens are predicted from which."""

import bz2
import hashlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from optigpu.meters.base import QualityOptions
from optigpu.quality.hellaswag import ENDINGS, Item, chosen_right, item_passages, read_items
from optigpu.quality.passages import Passage, perplexity, predictions, windows
from optigpu.quality.text import DATASETS_DIR, hellaswag_file, read_hub, read_source, wikitext_file
from optigpu.vocabulary import OptiGPUError

GOOD_ITEM = ("A man sits on a roof. he", "3", "swims.", "flies.", "sleeps in it.", "pulls up tiles.")


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that OPTIGPU_DATASETS_DIR names."""
    folder = tmp_path / "datasets"
    folder.mkdir()
    monkeypatch.setenv(DATASETS_DIR, str(folder))
    return folder


def compressed(*lines: str) -> bytes:
    return bz2.compress("\n".join(lines).encode())


@pytest.mark.parametrize(
    "name",
    ["", "wikitext", "file:", "file:.", "file:/etc/passwd", "file:../a", "file:a/../../b", "file:a\0b"],
)
def test_any_other_text_is_refused_before_anything_runs(name: str) -> None:
    with pytest.raises(ValidationError, match=f"{DATASETS_DIR}|unknown text"):
        QualityOptions(text=name)


@pytest.mark.parametrize(
    "options", [{"tokens": 64, "window": 65}, {"window": 64, "stride": 64}, {"tokens": 64, "stride": 64}]
)
def test_windows_that_do_not_fit_together_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValidationError, match="must"):
        QualityOptions(**options)


def test_a_file_is_read_as_it_is_and_its_hash_is_that_of_its_bytes(datasets: Path) -> None:
    content = " Käse =\r\n".encode()
    (datasets / "mine.txt").write_bytes(content)
    source = read_source("file:mine.txt")
    assert (source.content, source.words()) == (content, " Käse =\r\n")
    assert source.sha256 == hashlib.sha256(content).hexdigest()
    assert source.origin == "mine.txt"


@pytest.mark.parametrize("name", ["wikitext-2", "hellaswag", "file:nothing.txt"])
def test_what_is_missing_is_named(name: str, datasets: Path) -> None:
    with pytest.raises(OptiGPUError, match=rf"\.\w+ under {DATASETS_DIR} cannot be read \(No such file"):
        read_source(name)


def test_a_link_out_of_the_folder_is_refused(datasets: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("no")
    (datasets / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(OptiGPUError, match="link is outside of"):
        read_source("file:link")


def test_bytes_that_are_no_text_are_refused(datasets: Path) -> None:
    (datasets / "raw").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(OptiGPUError, match="raw is not UTF-8 text"):
        read_source("file:raw").words()


@pytest.mark.parametrize("name", ["wikitext-2", "hellaswag"])
def test_without_a_folder_and_without_the_package_it_says_what_to_set_or_install(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(DATASETS_DIR, raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(OptiGPUError, match=f"set {DATASETS_DIR} to a folder that holds {name}/.*or install"):
        read_source(name)


def test_a_hub_that_cannot_be_asked_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of that name whose download fails, found by the ordinary import."""
    (tmp_path / "datasets.py").write_text(
        "def load_dataset(name, configuration, split):\n    raise ConnectionError(f'no way to {name}\\nmore')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(OptiGPUError, match=r"cannot be read from the hub \(no way to Salesforce/wikitext\)"):
        read_hub("wikitext-2", "wikitext-2/test.txt")


def test_the_hub_s_rows_become_the_same_files() -> None:
    assert wikitext_file([{"text": ""}, {"text": " = A = \n"}, {"text": " b \n"}]) == b" = A = \n b \n"
    context, label, *endings = GOOD_ITEM
    row = {"activity_label": "Roof", "ctx": context, "label": label, "endings": endings}
    (item,) = read_items(hellaswag_file([row]))
    assert item == Item(f"Roof: {context}", tuple(endings), 3)


@pytest.mark.slow
def test_hellaswag_is_read_whole(datasets_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DATASETS_DIR, str(datasets_dir))
    content = read_source("hellaswag").content
    items, lines = read_items(content), bz2.decompress(content).decode().splitlines()
    assert len(items) == len(lines) // (2 + ENDINGS) > 20
    assert [str(item.label) for item in items] == lines[1 :: 2 + ENDINGS]
    assert {item.label for item in items} == set(range(ENDINGS))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no bzip2",
        compressed(*GOOD_ITEM * 50)[:-20],
        compressed(*GOOD_ITEM, "one more line"),
        compressed(GOOD_ITEM[0], "4", *GOOD_ITEM[2:]),
        compressed(GOOD_ITEM[0], "x", *GOOD_ITEM[2:]),
        compressed(*GOOD_ITEM[:5], " "),
        bz2.compress(b"\xff" * 6),
    ],
    ids=["empty", "other", "cut", "lines", "label", "word", "blank", "bytes"],
)
def test_a_corrupt_hellaswag_is_an_error(content: bytes) -> None:
    with pytest.raises(OptiGPUError, match=r"hellaswag file .*; replace it with a good copy"):
        read_items(content)


@pytest.mark.parametrize(
    ("context", "endings", "tokens", "lost"),
    [
        ("ab", ("c", "dd", "e", "f"), [b"ab c", b"ab dd", b"ab e", b"ab f"], 0),
        ("abcd", ("e", "ff", "g", "h"), [b"abcd e", b"bcd ff", b"abcd g", b"abcd h"], 1),
    ],
    ids=["fits", "loses its beginning"],
)
def test_an_ending_is_predicted_after_its_context_and_a_blank(
    context: str, endings: tuple[str, ...], tokens: list[bytes], lost: int
) -> None:
    passages, cut = item_passages([Item(context, endings, 0)], lambda text: list(text.encode()), window=6)
    assert [bytes(passage.tokens.tolist()) for passage in passages] == tokens
    assert [passage.positions for passage in passages] == [2, 3, 2, 2]
    assert cut == lost


def test_an_answer_is_the_ending_that_is_likeliest_for_each_character() -> None:
    items = [Item("a", ("x", "xx", "xxxx", "x"), 2), Item("a", ("x", "y", "z", "w"), 0)]
    right = chosen_right(items, np.array([-3.0, -5.0, -8.0, -4.0, -2.0, -1.0, -3.0, -4.0]))
    assert right.tolist() == [True, False]
    assert len(items[0].endings) == ENDINGS


@given(length=st.integers(2, 200), data=st.data())
def test_each_token_but_the_first_is_predicted_once_from_a_window_before_it(length: int, data: Any) -> None:
    window = data.draw(st.integers(2, length))
    stride = data.draw(st.integers(1, window - 1))
    tokens = np.arange(length)
    passages = windows(tokens, window, stride)
    predicted = [int(token) for passage in passages for token in passage.tokens[passage.first :]]
    assert predicted == list(range(1, length))
    for passage in passages:
        assert len(passage.tokens) <= window
        before = int(passage.tokens[passage.first])
        assert passage.first >= min(before, window - stride)


def test_perplexity_is_the_exponential_of_the_mean_loss() -> None:
    assert perplexity(np.log([0.5, 0.125])) == pytest.approx(4.0)
    with pytest.raises(OptiGPUError, match="too large"):
        perplexity(np.array([-2000.0]))
    with pytest.raises(OptiGPUError, match="too large"):
        perplexity(np.array([np.nan]))


PASSAGES = st.lists(
    st.lists(st.integers(0, 9), min_size=2, max_size=8).flatmap(
        lambda tokens: st.integers(1, len(tokens) - 1).map(
            lambda first: Passage(np.array(tokens, np.int64), first)
        )
    ),
    min_size=1,
    max_size=7,
)


def summing(tokens: Any, prefill: int) -> Iterator[Any]:
    """A causal "model" whose logits say exactly which tokens it has seen, in which order."""
    seen = np.zeros((tokens.shape[0], 1))
    for index in range(tokens.shape[1]):
        seen = seen * 11 + tokens[:, index : index + 1] + 1
        if index >= prefill:
            yield np.repeat(seen, 10, axis=1)


@given(PASSAGES, st.integers(1, 5))
def test_predictions_are_the_same_whatever_the_batch(passages: list[Passage], batch: int) -> None:
    found = {made.position: made for made in predictions(passages, batch, summing)}
    expected = [
        (int(passage.tokens[index]), list(summing(passage.tokens[None, :index], 0))[-1][0])
        for passage in passages
        for index in range(passage.first, len(passage.tokens))
    ]
    assert sorted(found) == list(range(len(expected)))
    for position, (target, logits) in enumerate(expected):
        assert found[position].target == target
        assert (found[position].logits == logits).all()
