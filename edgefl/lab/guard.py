"""Ends a lab, or what runs in it, when the process that it is for is gone, whatever ended that process.

python -m edgefl.lab.guard down|clear NAME: standard input is a pipe from that process, which closes when the
process ends. Then, unless "keep" came through it, the lab is taken down, or its nodes' processes are ended.
"""

from __future__ import annotations

import sys

from edgefl.lab.build import clear, down


def main() -> None:
    word, name = sys.argv[1:]
    if sys.stdin.read().strip() != "keep":
        {"down": down, "clear": clear}[word](name)


if __name__ == "__main__":
    main()
