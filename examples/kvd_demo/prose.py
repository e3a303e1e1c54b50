"""Long real English prose, in the public domain, out of the compression test files of the Brotli package.

Two texts of the Canterbury corpus: the proceedings of a Library of Congress workshop (1992), and Alice's
Adventures in Wonderland. Headings, tables, lists and the participants' addresses are left out, so what
remains reads on as prose: 97,000 tokens of SmolLM2's vocabulary.
"""

import hashlib
import re
import tarfile
import tempfile
from pathlib import Path

from kvd_demo.fetch import MaterialUnavailableError, cache_folder, download, made_once

PACKAGE = "brotli==1.2.1"
FOLDER = "prose"
SHA256 = {
    "lcet10.txt": "5314ba1dbb03f471df88bec6cd120a938ef60d0fd3511c5c1dce61bf7463245f",
    "alice29.txt": "7467306ee0feed4971260f3c87421154a05be571d944e9cb021a5713700c38f0",
}
ADDRESSES = "Appendix III:  DIRECTORY OF PARTICIPANTS"  # the workshop's last part
MIN_PARAGRAPH_CHARS = 120  # characters; shorter ones here are mostly headings, lists and signatures
MIN_LETTER_SHARE = 0.75  # of all characters; tables and addresses have fewer


def prose() -> str:
    """Both texts as one: paragraphs on one line each, parted by an empty line. The same on every machine."""
    folder = made_once(FOLDER, _fetch_and_extract)
    return "\n\n".join(text for name in SHA256 for text in paragraphs((folder / name).read_text("ascii")))


def paragraphs(text: str) -> list[str]:
    """The prose paragraphs of a hard-wrapped text, each unwrapped, in order."""
    blocks = re.split(r"\n\s*\n", text.replace("\r\n", "\n").split(ADDRESSES)[0])
    return [block for block in map(_unwrapped, blocks) if _is_prose(block)]


def _unwrapped(block: str) -> str:
    joined = re.sub(r"(?<=\w)-\n\s*", "-", block)  # a hyphen at a line's end belongs to its word
    return re.sub(r"\s+", " ", joined).strip().replace("`", "'")


def _is_prose(block: str) -> bool:
    letters = sum(char.isalpha() or char == " " for char in block)
    ends = block.endswith((".", "!", "?", "'", '"', ")", ":"))
    return len(block) >= MIN_PARAGRAPH_CHARS and ends and letters >= MIN_LETTER_SHARE * len(block)


def _fetch_and_extract(folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=cache_folder()) as scratch:
        archive = download(PACKAGE, Path(scratch), source=True)
        with tarfile.open(archive) as members:
            for member in members:
                name = Path(member.name).name
                if name in SHA256 and (content := members.extractfile(member)) is not None:
                    (folder / name).write_bytes(as_expected(name, content.read()))


def as_expected(name: str, content: bytes) -> bytes:
    if hashlib.sha256(content).hexdigest() != SHA256[name]:
        raise MaterialUnavailableError(f"{name} of {PACKAGE} is not the file the figures were measured with")
    return content
