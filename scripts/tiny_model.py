"""tiny_model.py FAMILY FOLDER: writes a tiny random checkpoint of a model family, with a byte-level tokenizer.

Its answers mean nothing, but it has every kind of state that the family has, and is served in a second:

    python scripts/tiny_model.py qwen3_next /tmp/tiny-hybrid
    hicache serve /tmp/tiny-hybrid
"""

import argparse
from pathlib import Path

from hicache.testing.families import TINY, write_tiny


def main() -> None:
    """Write one checkpoint."""
    parser = argparse.ArgumentParser(description="Write a tiny random checkpoint of a model family.")
    parser.add_argument("family", choices=sorted(TINY), metavar="FAMILY", help=", ".join(sorted(TINY)))
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where to write it; it must be empty or new")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights (default: 0)")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    if folder.exists() and any(folder.iterdir()):
        parser.error(f"{folder} is not empty; name another folder")
    write_tiny(arguments.family, folder, seed=arguments.seed)
    print(f"wrote a tiny {arguments.family} to {folder}")


if __name__ == "__main__":
    main()
