"""Prints the size of each room of the engine: files, and lines before their tests. `ARCHITECTURE.md` has the table."""

from __future__ import annotations

import pathlib

SOURCE = pathlib.Path(__file__).parent.parent / "crates/cushion-core/src"
TESTS = "#[cfg(test)]\nmod tests"


def lines_before_tests(path: pathlib.Path) -> int:
    return len(path.read_text().split(TESTS)[0].splitlines())


def main() -> None:
    sizes: dict[str, list[int]] = {}
    for path in sorted(SOURCE.rglob("*.rs")):
        if path.stem == "tests":
            continue
        room = path.relative_to(SOURCE).parts[0].removesuffix(".rs")
        sizes.setdefault(room, []).append(lines_before_tests(path))
    print(f"{'room':10} files lines largest")
    for room, lines in sizes.items():
        print(f"{room:10} {len(lines):5} {sum(lines):5} {max(lines):7}")


if __name__ == "__main__":
    main()
