"""Which commit a result is of."""

import subprocess


def commit() -> str:
    """The present commit's short name, and whether the working tree differs from it."""

    def said(*command: str) -> str:
        return subprocess.run(["git", *command], capture_output=True, text=True, check=False).stdout.strip()

    return said("rev-parse", "--short", "HEAD") + (" with changes" if said("status", "--porcelain") else "")
