"""Whether cached files are still what they were, by their SHA-256, and whose they are.

Hashing 100 MB takes longer than a start should wait. So the hash of a large file is computed once, and remembered with the size
and the times that the file had then; the kernel changes its status time with every write.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path


def is_own(file: Path) -> bool:
    """This user's or root's, and not for everyone to write. The folder keeps groups out (process/platform.cache_dir)."""
    status = file.stat()
    return status.st_uid in (os.getuid(), 0) and not status.st_mode & 0o002


def sha256_of(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def record_of(file: Path, folder: Path) -> Path:
    """Where it is remembered that the file was verified."""
    return folder / f"{file.name}.verified"


def has_hash(file: Path, expected: str, folder: Path) -> bool:
    """Whether the file has this SHA-256. What was found is remembered in `folder`."""
    status = file.stat()
    facts = [expected, str(file), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
    record = record_of(file, folder)
    with suppress(OSError, ValueError):
        if is_own(record) and json.loads(record.read_text()) == facts:
            return True
    if sha256_of(file) != expected:
        return False
    with suppress(OSError):                              # a full disk: then it is hashed at every start
        part = record.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(facts))
        os.replace(part, record)
    return True
