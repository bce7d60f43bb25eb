"""Which wheels a machine without network installs: those of a folder, and those that came in pieces.

    python3 -m src.bench.wheels .whl /var/tmp/manyhead-wheels

Pieces `NAME.whl.part-*` are kept in the second folder until all of a wheel are there, which is when what they
make, joined in the order of their names, is a whole archive; so they may come in several runs.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from zipfile import BadZipFile, ZipFile

PIECE = ".part-"


def main(argv: list[str] | None = None) -> int:
    """Print the path of each wheel, and on stderr what is not whole yet."""
    folder, kept = map(Path, sys.argv[1:] if argv is None else argv)
    for wheel in wheels(folder, kept):
        print(wheel)
    for name in sorted({path.name.partition(PIECE)[0] for path in kept.glob(f"*.whl{PIECE}*")}):
        count = len(list(kept.glob(f"{name}{PIECE}*")))
        print(f"{name}: not whole with {count} pieces in {kept}", file=sys.stderr)
    return 0


def wheels(folder: Path, kept: Path) -> Iterator[Path]:
    """Whole ones; pieces of `folder` are copied to `kept` and joined there."""
    kept.mkdir(parents=True, exist_ok=True)
    for piece in folder.glob(f"*.whl{PIECE}*"):
        name = piece.name.partition(PIECE)[0]
        if not (kept / name).exists():
            shutil.copyfile(piece, kept / piece.name)
    for name in sorted({path.name.partition(PIECE)[0] for path in kept.glob(f"*.whl{PIECE}*")}):
        _join(kept, name)
    found = {path.name: path for place in (kept, folder) for path in place.glob("*.whl")}
    yield from (found[name] for name in sorted(found))


def _join(kept: Path, name: str) -> None:
    pieces, joined = sorted(kept.glob(f"{name}{PIECE}*")), kept / f"{name}.joined"
    with joined.open("wb") as file:
        for piece in pieces:
            with piece.open("rb") as part:
                shutil.copyfileobj(part, file)
    if not _is_whole(joined):
        joined.unlink()
        return
    joined.rename(kept / name)
    for piece in pieces:
        piece.unlink()


def _is_whole(path: Path) -> bool:
    """Whether the archive's list of files is there and every file has its checksum."""
    try:
        with ZipFile(path) as archive:
            return archive.testzip() is None
    except (BadZipFile, OSError, ValueError, EOFError):
        return False


if __name__ == "__main__":
    sys.exit(main())
