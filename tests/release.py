"""Install each distribution of a folder into an empty environment, and try it there.

Run by ``tox -e release``.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

SMOKE = """
import numpy as np
import polarquant_nb as pq

assert pq.__version__ != "unknown"
k, v = np.random.default_rng(0).standard_normal((2, 1, 2, 300, 64), dtype=np.float32)
cache = pq.KVCache("balanced", head_dim=64)
cache.append(k, v)
out = cache.attend(k[:, :, -1:])
assert out.shape == (1, 2, 1, 64)
error = np.square(cache.decode()[0] - k).sum() / np.square(k).sum()
assert 0 < error < 0.02, error
assert pq.Calibration.bundled("SmolLM2-135M-Instruct").bits_per_value > 4  # a data file
print(pq.__version__, pq.__file__)
"""


def main() -> None:
    """Check the metadata of all, then install and try one after another."""
    found = sorted(Path(sys.argv[1]).iterdir())
    assert [path.suffix for path in found] == [".whl", ".gz"], found
    run(sys.executable, "-m", "twine", "check", "--strict", *found)
    for path in found:
        with tempfile.TemporaryDirectory() as folder:
            venv.create(folder, with_pip=True)
            scripts = Path(folder) / ("Scripts" if sys.platform == "win32" else "bin")
            run(scripts / "python", "-m", "pip", "install", "--quiet", path)
            run(scripts / "python", "-c", SMOKE, cwd=folder)
            run(scripts / "polarquant-nb", "info", cwd=folder)
            print(f"{path.name}: installed and tried")


def run(*command: object, cwd: str | None = None) -> None:
    """Run a program; its failure ends this one."""
    subprocess.run([str(part) for part in command], cwd=cwd, check=True)


if __name__ == "__main__":
    main()
