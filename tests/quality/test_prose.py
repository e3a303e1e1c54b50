import hashlib

import pytest
from kvd_demo import prose
from kvd_demo.fetch import MaterialUnavailableError, made_once

SENTENCE = "It was a long and quiet afternoon, and nobody in the house had anything of note to say about it."


def wrapped(text, width=40):
    lines = [""]
    for word in text.split(" "):
        if len(lines[-1]) + len(word) > width:
            lines.append("")
        lines[-1] += f"{word} "
    return "\r\n".join(f"  {line.rstrip()}" for line in lines)


def test_a_paragraph_is_unwrapped_whole():
    assert prose.paragraphs(wrapped(f"{SENTENCE} {SENTENCE}")) == [f"{SENTENCE} {SENTENCE}"]


def test_a_word_broken_at_its_hyphen_is_joined():
    assert prose.paragraphs(f"She took a well-\r\nknown book. {SENTENCE}") == [
        f"She took a well-known book. {SENTENCE}"
    ]


def test_headings_tables_and_addresses_are_left_out():
    heading = "CHAPTER ONE\r\n\r\n     The Pool of Tears"
    table = "\r\n".join(f"  {year}   {year * 3}   {year * 7}." for year in range(1900, 1920))
    address = f"{prose.ADDRESSES}\r\n\r\n{SENTENCE} {SENTENCE}"
    text = "\r\n\r\n".join([heading, wrapped(f"{SENTENCE} {SENTENCE}"), table, address])
    assert prose.paragraphs(text) == [f"{SENTENCE} {SENTENCE}"]


def test_the_texts_are_joined_in_a_fixed_order_and_read_from_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KVD_CACHE", str(tmp_path))

    def fill(folder):
        for name in prose.SHA256:
            (folder / name).write_text(f"{name}: {SENTENCE} {SENTENCE}", "ascii")

    made_once(prose.FOLDER, fill)
    assert [text.split(":")[0] for text in prose.prose().split("\n\n")] == list(prose.SHA256)


def test_a_text_other_than_the_one_measured_with_is_refused(monkeypatch):
    monkeypatch.setitem(prose.SHA256, "alice29.txt", hashlib.sha256(b"right").hexdigest())
    assert prose.as_expected("alice29.txt", b"right") == b"right"
    with pytest.raises(MaterialUnavailableError, match=r"alice29\.txt"):
        prose.as_expected("alice29.txt", b"wrong")
