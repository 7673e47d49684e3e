"""Objects by name, imported when first asked for.

The root and the engine name what domains offer as strings in tables of their own, "package.module:name", so that neither imports a domain.
A name that comes from a file is looked up in such a table and never imported itself.
"""

from __future__ import annotations

import importlib
from typing import Any


def load(reference: str) -> Any:
    """The object that "package.module:name" refers to."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)
