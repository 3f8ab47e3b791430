"""The guide to transformers runs as it is printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support import NOJIT

GUIDE = Path(__file__).parents[1] / "docs" / "how-to" / "transformers.md"


@pytest.mark.skipif(NOJIT, reason="takes minutes with NUMBA_DISABLE_JIT=1")
@pytest.mark.filterwarnings("default::FutureWarning")  # transformers 5.24 renames an argument
def test_the_guide_runs(capsys):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 5
    namespace = {}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for block in blocks:
            exec(block, namespace)
    assert namespace["cache"].counts.coded == 2 * 5
    assert "balanced" in capsys.readouterr().out
