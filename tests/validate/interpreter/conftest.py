"""These tests run in a process of their own: kernels are loaded either for the interpreter or for a compiler."""

from __future__ import annotations

import os

# ../test_kernels_interpreted.py starts pytest on this folder with the variable set.
collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
