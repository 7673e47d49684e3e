"""Where data that are made or fetched once are kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Where made data are kept: $DFORCE_CACHE, or dforce in the user's cache folder."""
    base = os.environ.get("DFORCE_CACHE")
    return Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "dforce"
