"""A disk of our own for a deployment: an ext4 file system in a file, which can fill up, turn read-only and lose its
power.

Needs root and loop devices."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

COMMIT_S = 5
"""how often the file system writes its journal by itself: what is younger and not synced is lost with the power"""


class Disk:
    """Mounted at `place`; the file lies beside it."""

    def __init__(self, place: Path, size_mb: int) -> None:
        self.place = place
        self._image = place.with_suffix(".img")
        place.mkdir(parents=True, exist_ok=True)
        with self._image.open("wb") as file:
            file.truncate(size_mb << 20)
        _run("mkfs.ext4", "-q", "-F", str(self._image))
        self._mount()

    @staticmethod
    def possible() -> bool:
        """Whether this machine lets us have one."""
        found = all(map(shutil.which, ("mkfs.ext4", "e2fsck", "mount", "losetup")))
        return found and subprocess.run(["losetup", "-f"], capture_output=True).returncode == 0

    def snapshot(self) -> Path:
        """What a power cut now would leave, in a file. Call it while every writer is frozen."""
        left = self._image.with_suffix(".left")
        _run("cp", "--sparse=always", str(self._image), str(left))
        return left

    def restore(self, left: Path) -> None:
        """Put the disk back as `snapshot` found it. Call it when every writer is dead."""
        _run("umount", "-l", str(self.place))
        left.replace(self._image)
        self._mount()

    def fill(self) -> None:
        """Leave no room."""
        with suppress(OSError), (self.place / "filler").open("wb") as file:
            while True:
                file.write(bytes(1 << 20))
                file.flush()

    def shrink(self, size: int) -> None:
        """Give back so many bytes of what `fill` took."""
        filler = self.place / "filler"
        os.truncate(filler, filler.stat().st_size - size)

    def free(self) -> None:
        """Make room again."""
        (self.place / "filler").unlink(missing_ok=True)

    def fail(self) -> None:
        """Turn read-only under those who write, as ext4 does when it finds an error."""
        _run("mount", "-o", "remount,abort", str(self.place))

    def mend(self) -> None:
        """Check the file system and mount it writable. OSError while any process still uses what turned read-only."""
        try:
            _run("umount", str(self.place))
        except subprocess.CalledProcessError as error:
            raise OSError(error.stderr.decode()) from None
        # An aborted journal leaves files that were removed while they were open, which -p mends not. 1 and 2: mended.
        checked = subprocess.run(["e2fsck", "-fy", str(self._image)], capture_output=True)
        if checked.returncode > 2:
            raise OSError(checked.stdout.decode())
        self._mount()

    def close(self) -> None:
        """Unmount and forget."""
        _run("umount", "-l", str(self.place))
        self._image.unlink()

    def _mount(self) -> None:
        _run("mount", "-o", f"loop,commit={COMMIT_S},errors=remount-ro", str(self._image), str(self.place))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
